"""Options that several commands share, and commands whose options are the fields of a dataclass."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from typer import Argument, Option

ADAPTER_HELP = "PEFT folder, unmerged beside the model's weights."
AdapterOption = Annotated[str | None, Option("--adapter", help=ADAPTER_HELP)]
DequantizeOption = Annotated[
    bool, Option("--dequantize", help="Read quantised weights (fp8, MXFP4) as 16-bit ones.")
]
DeviceOption = Annotated[str, Option(help="cpu, cuda or auto.")]
Figures = Annotated[bool, Option("--json", help="Print the figures as JSON.")]
Findings = Annotated[bool, Option("--json", help="Print the findings as JSON.")]
"""Options that several commands share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """Options of `pentad convert`."""

    source: Annotated[
        str, Argument(metavar="SRC", help="HF or Megatron folder, or a run's checkpoint.")
    ]
    target: Annotated[str, Argument(metavar="DST", help="The folder to write.")]
    to: Annotated[
        str | None, Option(help="hf, megatron (which is torch_dist), torch_dist or legacy.")
    ] = None
    tp: Annotated[int, Option(help="Tensor parallel size.")] = 1
    pp: Annotated[int, Option(help="Pipeline parallel size.")] = 1
    vpp: Annotated[int, Option(help="Model chunks on each pipeline rank.")] = 1
    ep: Annotated[int, Option(help="Expert parallel size.")] = 1
    etp: Annotated[int | None, Option(help="Tensor parallel size of experts; default: --tp.")] = (
        None
    )
    processes: Annotated[
        int, Option(max=1024, help="Processes that convert files in parallel.")
    ] = 1
    iteration: Annotated[
        int | None, Option(min=0, help="Iteration of the Megatron checkpoint.")
    ] = None
    release: Annotated[
        bool, Option("--release", help="Read the Megatron checkpoint named release.")
    ] = False
    config: Annotated[
        str | None, Option(help="HF folder of the model, if SRC has no config.json.")
    ] = None
    model: Annotated[str | None, Option(help="Family, instead of the config's model_type.")] = None
    dtype: Annotated[str | None, Option(help="float32, bfloat16 or float16.")] = None
    dequantize: DequantizeOption = False
    spec: Annotated[str, Option(help="Megatron layer spec of the names: te or local.")] = "te"
    separate_layers: Annotated[
        bool, Option("--separate-layers", help="Write torch_dist with one key per layer.")
    ] = False
    make_vocab_size_divisible_by: Annotated[
        int, Option(min=1, help="As in Megatron: the vocabulary is padded to tp times this.")
    ] = 128
    role: Annotated[
        str | None, Option(help="Role in a run's checkpoint: actor (default) or critic.")
    ] = None
    tag: Annotated[
        str, Option(help="Weights in a run's checkpoint: actor, or a tag such as ref.")
    ] = "actor"
    merge: Annotated[bool, Option("--merge", help="Merge the adapter SRC into its base model.")] = (
        False
    )
    base: Annotated[
        str | None, Option(help="HF folder to merge into; default: the adapter's base model.")
    ] = None
    force: Annotated[bool, Option("--force", help="Overwrite DST.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Options of `pentad serve`."""

    model: Annotated[str, Argument(help="A model's folder, or its name on the Hub.")]
    host: Annotated[str, Option(help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Option(min=0, max=65535, help="Port; 0 selects a free one.")] = 8000
    name: Annotated[str | None, Option(help="Name of the model; default: its folder's name.")] = (
        None
    )
    device: DeviceOption = "auto"
    dtype: Annotated[str, Option(help="float32, bfloat16 or auto.")] = "auto"
    max_running: Annotated[
        int, Option(min=1, max=10**6, help="Answers generated at the same time.")
    ] = 256
    max_context: Annotated[
        int | None,
        Option(min=2, max=10**9, help="Most tokens of prompt and answer together."),
    ] = None
    kv_cache_gb: Annotated[
        float | None, Option(min=1e-9, max=1e6, help="Memory of the key-value cache in GB.")
    ] = None
    max_requests: Annotated[
        int, Option(min=1, help="Concurrent requests; further ones get 429.")
    ] = 256
    max_body_mb: Annotated[float, Option(min=1e-3, max=1e4, help="Largest request in MB.")] = 4.0
    max_chars: Annotated[
        int, Option(min=1, help="Characters of a request, over all its texts.")
    ] = 1_000_000
    max_connections: Annotated[int, Option(min=1, help="Connections per client address.")] = 512
    api_key: Annotated[
        str | None,
        Option(envvar="PENTAD_API_KEY", help="Key that every request must send."),
    ] = None
    allow_host: Annotated[
        list[str] | None, Option(help="Further host names accepted at loopback.")
    ] = None
    drain_s: Annotated[
        float, Option(min=0, max=1e6, help="Seconds to finish requests after SIGTERM.")
    ] = 30.0
    model_files: Annotated[
        list[str] | None, Option(help="Model files of your own: path/to/file.py:SPEC.")
    ] = None
    adapter: AdapterOption = None
    dequantize: DequantizeOption = False
    template_args: Annotated[
        str | None, Option(help="Arguments of the chat template: '{enable_thinking: false}'.")
    ] = None


def takes_options(command: Callable[[Any], None]) -> Callable[..., None]:
    """Adds an option for each field of the dataclass that a command has as its parameter."""
    (parameter,) = inspect.signature(command, eval_str=True).parameters.values()

    @functools.wraps(command)
    def wrapped(**options: Any) -> None:
        command(parameter.annotation(**options))

    vars(wrapped)["__signature__"] = inspect.signature(parameter.annotation, eval_str=True)
    return wrapped
