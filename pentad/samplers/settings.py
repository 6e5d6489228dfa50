"""What a server is told when a run starts it or attaches to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pentad.core.dims import ModelDims
from pentad.core.errors import Problem, UserError

ROUTES_FLAG = "--enable-return-routed-experts"
"""Of vLLM and SGLang alike."""
TransportName = Literal["disk", "broadcast", "ipc"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """One server of a run."""

    model_folder: str
    """Its config.json and tokenizer; weights come by install."""
    dims: ModelDims
    dtype: str
    max_context: int
    max_running: int
    max_batch_tokens: int
    kv_cache_bytes: int | None
    on_update: Literal["continue", "reprefill"]
    device: str
    """cpu or cuda."""
    devices: tuple[int, ...] = ()
    """GPUs a started server sees; their number is tensor x pipeline."""
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    python: str | None = None
    """Interpreter or environment folder; None: where its command is on the path."""
    arguments: tuple[str, ...] = ()
    """Further words for its command line."""
    start_timeout_s: float = 600.0
    transport: TransportName = "disk"
    transfer_folder: Path = field(default_factory=lambda: Path("/dev/shm"))
    """Where weights that travel by disk lie while they do."""
    weight_deltas: bool = True
    """Whether by disk only modules travel in which a tensor changed."""
    check_weights_every: int = 0
    """Installs from one that compares every tensor as held to the next; 0: the first alone."""
    record_routes: bool = False
    """Whether answers say which experts each token went to."""
    can_sleep: bool = False
    """Whether it will be put to sleep while others use its devices."""
    memory_share: float | None = None
    """Part of a GPU's memory it may take; None: its own choice."""


def check_routes(where: str, settings: ServerSettings, has_flag: bool) -> None:
    if settings.record_routes and not has_flag:
        rule = "it does not say which experts it used, which rollout.replay_routes needs"
        raise UserError(Problem(where, rule, f"start it with {ROUTES_FLAG}"))
