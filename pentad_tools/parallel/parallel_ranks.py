"""Worker of `verify-parallel`: one training step on one rank (reference) and on every layout.

Gradients are read from the optimizer's first moment, which after one step from zero is a fixed
share of the applied gradient: so the comparison covers a real step.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pentad.checkpoint.exports import export_model
from pentad.core.layout import Layout
from pentad.core.types import Row, StepResult
from pentad.engine.engine import Engine, build_engine
from pentad.engine.section import EngineSettings, ModelConfig, OptimizerConfig
from pentad.models.hf_weights import gather_whole
from pentad.rl.losses import SftLoss
from pentad.runtime.rank import Rank
from pentad.runtime.rank_host import device_of

OPTIMIZER = OptimizerConfig(lr=1e-3, beta1=0.9, gradient_clipping=None)
EXP_AVG = "optimizer.exp_avg."
MAX_LENGTH = 48


@dataclass(frozen=True, slots=True)
class StepMeasurement:
    """Measurements of one step under a layout, with errors relative to one rank."""

    loss: float
    grad_norm: float
    next_loss: float
    """Loss of the same rows after the step."""
    size_bytes: int
    """GPU: highest peak of a rank; CPU: weights, gradients and optimizer state of a rank."""
    seconds: float
    """Seconds of the second step, after warm-up."""
    gradient_error: float = 0.0
    """Error of the worst tensor, relative to its norm."""
    worst: str = ""
    routes_differ: float = 0.0
    """Share of tokens and layers whose chosen experts differ from those on one rank."""


def engine_settings_of(model: ModelConfig, layout: Layout) -> dict[str, Any]:
    """Engine settings of a GPU run, except those that change numbers (16 bit, losses that depend on
    the split), the model size, and features that ranks here lack."""
    made = EngineSettings(model=model).settled("cuda", layout).model
    archon = made.archon
    plain = {
        "enable_compile": False,
        "ac_mode": "none" if archon.ac_mode == "memory_budget" else archon.ac_mode,  # it compiles
        "ac_debug": False,
        "layers_per_stage": None,
        "offload_params": False,
        **dict.fromkeys((*archon.router_losses, "moe_bias_rate"), 0.0),
    }
    kept = {"gradient_checkpointing": made.gradient_checkpointing, "pad_to_maximum": False}
    return {
        **kept,
        **dict.fromkeys(("dtype", "param_dtype", "reduce_dtype"), "float32"),
        "archon": archon.model_copy(update=plain).model_dump(mode="json"),
    }


def make_rows(vocab_size: int, num_rows: int, max_length: int, seed: int) -> list[Row]:
    """Random rows of unequal lengths, with some tokens masked from the loss."""
    gen = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(num_rows):
        length = int(torch.randint(max_length // 4, max_length + 1, (), generator=gen))
        ids = torch.randint(0, vocab_size, (length,), generator=gen)
        weights = (torch.rand(length, generator=gen) < 0.8).float()
        weights[0], weights[-1] = 0, 1
        rows.append(Row(ids, {"weights": weights}, float(weights.sum())))
    return rows


def measure_alone(payload: dict[str, Any]) -> StepMeasurement:
    """Reference measurement in this process; writes model and results to the payload's folder."""
    torch.set_num_threads(1)  # as on each rank, so times can be compared
    folder = Path(payload["folder"])
    engine = _build(payload, {}, Layout(), device_of(Rank(), payload["device"]))
    if payload["source"] is None:
        _unsettle(engine, payload["seed"])
        export_model(engine, folder / "model")
    rows = _rows(payload, engine)
    routes = engine.routes(rows) if engine.dims.num_experts and engine.dims.is_whole else None
    found, gradients = _step(engine, rows, routes)
    torch.save({"gradients": dict(gradients), "routes": routes}, folder / "alone.pt")
    return found


class LayoutService:
    """One rank of a process group, which tests layouts of its size."""

    mild: frozenset[str] = frozenset()

    def __init__(self, payload: dict[str, Any], rank: Rank, device: torch.device) -> None:
        # Deprecations in libraries are not under test.
        warnings.simplefilter("ignore", FutureWarning)
        self.payload = payload
        self.rank = rank
        self.device = device
        self.truth = torch.load(Path(payload["folder"]) / "alone.pt", mmap=True)

    def measure(
        self, number: int, layout: dict[str, Any], settings: dict[str, Any]
    ) -> dict[str, Any]:
        """Measures one layout; returns fields of StepMeasurement."""
        self.rank.report(number)
        engine = _build(self.payload, settings, Layout(**layout), self.device)
        rows = _rows(self.payload, engine)
        differ = 0.0
        if self.truth["routes"] is not None:
            differ = _share_of_other(engine.routes(rows), self.truth["routes"])
        found, gradients = _step(engine, rows, self.truth["routes"])
        error, worst = _worst_error(gradients, self.truth["gradients"])
        return {**asdict(found), "gradient_error": error, "worst": worst, "routes_differ": differ}

    def close(self, *, is_failed: bool) -> None:
        """No cleanup needed between calls."""


def _build(
    payload: dict[str, Any], settings: dict[str, Any], layout: Layout, device: torch.device
) -> Engine:
    source: Any = payload["source"] or payload["config"]
    saved = Path(payload["folder"]) / "model"
    is_fresh = payload["source"] is None and not saved.exists()
    return build_engine(
        source if payload["source"] or is_fresh else saved,
        EngineSettings(model=ModelConfig(**settings, optimizer=OPTIMIZER), total_steps=2),
        device=device,
        layout=layout,
        init_from_scratch=is_fresh,
        seed=payload["seed"],
        backend=payload["backend"],
    )


@torch.no_grad()
def _unsettle(engine: Engine, seed: int) -> None:
    """Randomises norms and biases: with equal initial values swapped ones would pass."""
    gen = torch.Generator().manual_seed(seed)
    for tensor in engine.tensors.values():
        if tensor.ndim == 1:
            tensor.add_(0.3 * torch.randn(tensor.shape, generator=gen).to(tensor))


def _rows(payload: dict[str, Any], engine: Engine) -> list[Row]:
    longest = min(MAX_LENGTH, engine.dims.max_position)
    return make_rows(engine.dims.vocab_size, payload["num_rows"], longest, payload["seed"])


def _step(
    engine: Engine, rows: list[Row], routes: list[Tensor] | None
) -> tuple[StepMeasurement, Iterator[tuple[str, Tensor]]]:
    """Runs and measures two steps; also yields the whole gradients of the first one by one."""
    for row, given in zip(rows, routes or (), strict=False):
        row.routes = given
    if engine.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(engine.device)
    first = _train(engine, rows)
    moments = {
        name.removeprefix(EXP_AVG): tensor
        for name, tensor in engine.state_tensors().items()
        if name.startswith(EXP_AVG)
    }
    share = 1.0 / (1.0 - OPTIMIZER.beta1)
    # Copied before the second step changes them.
    kept = {name: moment.detach().clone() for name, moment in moments.items()}
    gradients = ((name, gather_whole(moment).cpu() * share) for name, moment in kept.items())
    start = time.perf_counter()
    second = _train(engine, rows)
    if engine.device.type == "cuda":
        torch.cuda.synchronize(engine.device)
    seconds = time.perf_counter() - start
    found = StepMeasurement(first.loss, first.grad_norm, second.loss, _size(engine), seconds)
    return found, gradients


def _train(engine: Engine, rows: list[Row]) -> StepResult:
    engine.begin_step()
    engine.accumulate(rows, SftLoss())
    return engine.end_step()


def _size(engine: Engine) -> int:
    """Bytes on the rank that uses most."""
    if engine.device.type == "cuda":
        size = torch.cuda.max_memory_allocated(engine.device)
    else:
        size = sum(x.numel() * x.element_size() for x in engine.tensors.values())
        size += sum(x.numel() * 12 for x in engine.masters.values())  # with gradients and moments
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return size
    largest = torch.tensor(size, device=engine.device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def _worst_error(
    gradients: Iterator[tuple[str, Tensor]], truth: dict[str, Tensor]
) -> tuple[float, str]:
    """(largest error over all tensors and ranks, its tensor); raises if a tensor is missing."""
    errors: dict[str, float] = {}
    for name, gradient in gradients:
        wanted = truth[name]
        size = float(wanted.norm())
        same = gradient.shape == wanted.shape
        error = float((gradient - wanted).norm()) / max(size, 1e-30) if same else float("inf")
        errors[name] = error if error == error else float("inf")
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, errors)
    merged: dict[str, float] = dict.fromkeys(truth, -1.0)
    for one in everyone:
        for name, error in one.items():
            merged[name] = max(merged[name], error)
    missing = [name for name, error in merged.items() if error < 0]
    if missing:
        return float("inf"), f"{missing[0]} (no rank has it)"
    worst = max(merged, key=lambda name: merged[name])
    return merged[worst], worst


def _share_of_other(mine: list[Tensor], truth: list[Tensor]) -> float:
    """Share of differing expert choices, without each row's last token, which has no effect."""
    a = torch.cat([routes[:-1] for routes in mine]).sort(-1).values
    b = torch.cat([routes[:-1] for routes in truth]).sort(-1).values
    return float((a != b).any(-1).float().mean())
