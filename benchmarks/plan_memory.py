"""What `plan` predicts against what one GPU measures: peak memory by phase over a grid.

    python benchmarks/plan_memory.py                        # the whole grid, about 8 minutes
    python benchmarks/plan_memory.py --models 0.6b --tokens 16384 --compile off --json out.json
    python benchmarks/plan_memory.py --long --modes op full --compile on  # 32k and 128k tokens
    python benchmarks/plan_memory.py --toy                  # proves the script on a CPU, no more

Allocated bytes are compared, so the constant for context and allocator slack is left out of both.
Weights are random and made on the device: what they are does not change how much they take.
Needs torch, numpy, safetensors and transformers. Exits 1 when one is off by more than 10% and by
more than 0.25 GiB.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from engine_smoke import DEVICE, IS_GPU, TOY, MeanNll, make_rows  # noqa: E402

from pentad.core.errors import RunError  # noqa: E402
from pentad.core.layout import Layout  # noqa: E402
from pentad.engine.engine import Engine  # noqa: E402
from pentad.engine.flops import detect_peak_tflops, measure_throughput  # noqa: E402
from pentad.engine.held import HeldModel, decoder_maker  # noqa: E402
from pentad.engine.section import EngineSettings, ModelConfig  # noqa: E402
from pentad.models.families import dims_of  # noqa: E402
from pentad.parallel.cuts import local  # noqa: E402
from pentad.parallel.mesh import build_meshes  # noqa: E402
from pentad.planner.memory import Training, training_phases  # noqa: E402
from pentad_tools.bench.bench_train import QWEN3_0_6B, QWEN3_4B, QWEN3_MOE_SLICE  # noqa: E402

GIB = 2**30
LIMIT = 0.1
SLACK_BYTES = 2**28
"""Off by less is within the constant that `plan` adds for context and allocator."""
MODELS = {
    "0.6b": QWEN3_0_6B,
    "4b": QWEN3_4B,
    "moe": QWEN3_MOE_SLICE | {"num_hidden_layers": 4},
}
MODES: dict[str, dict[str, Any]] = {
    "none": {"mode": "none"},
    "op": {"mode": "selective", "selective": "op"},
    "stride 2": {"mode": "selective", "selective": 2},
    "full": {"mode": "full"},
    "budget 0.3": {"mode": "memory_budget", "budget": 0.3},
    "budget 0.6": {"mode": "memory_budget", "budget": 0.6},
}
GRID = {
    "0.6b": ((16384, 2048), (32768, 8192), (8192, 512)),
    "4b": ((16384, 4096),),
    "moe": ((16384, 2048), (32768, 4096)),
}
"""(tokens a microbatch, tokens a sequence) of each model."""
LONG = {"0.6b": ((32768, 32768), (131072, 131072)), "4b": ((32768, 32768),), "moe": ()}
"""Of one sequence in one microbatch, with the time of a step."""


@dataclass(frozen=True)
class Case:
    model: str
    tokens: int
    length: int
    compile: bool
    mode: str
    offload: bool = False
    keep: bool = False

    @property
    def num_microbatches(self) -> int:
        return 1 if self.tokens == self.length else 2


@dataclass(frozen=True)
class Found:
    case: Case
    phase: str
    predicted_bytes: float
    measured_bytes: float

    @property
    def ratio(self) -> float:
        return self.predicted_bytes / self.measured_bytes

    @property
    def is_near(self) -> bool:
        off = abs(self.predicted_bytes - self.measured_bytes)
        return off <= max(SLACK_BYTES, LIMIT * self.measured_bytes)


def keys_of(case: Case) -> EngineSettings:
    how = MODES[case.mode]
    archon = {
        "ac_mode": how["mode"],
        "ac_selective": how.get("selective", "op"),
        "ac_memory_budget": how.get("budget", 0.5),
        "enable_compile": case.compile,
        "keep_logits": case.keep,
        "offload_params": case.offload,
    }
    keys = {"archon": archon, "mb_spec": {"max_tokens_per_mb": case.tokens}}
    settings = EngineSettings(model=ModelConfig.model_validate(keys), total_steps=1)
    return settings.settled(DEVICE.type, Layout())


def predict(config: dict[str, Any], case: Case) -> dict[str, float]:
    training = Training(
        dims=dims_of(config),
        layout=Layout(),
        model=keys_of(case).model,
        microbatch_tokens=case.tokens,
        num_microbatches=case.num_microbatches,
        device=DEVICE.type,
    )
    phases = training_phases(training, 0)
    return {name: phase.device_bytes - phase.device["overhead"] for name, phase in phases.items()}


def make_engine(config: dict[str, Any], case: Case) -> Engine:
    settings = keys_of(case)
    meshes = build_meshes(Layout(), DEVICE)
    maker = decoder_maker(dims_of(config), settings, meshes, value_head=False)
    held = HeldModel(maker, meshes)
    with torch.no_grad():
        for name, parameter in held.parameters.items():
            norm = name.endswith("norm.weight")
            local(parameter).fill_(1.0) if norm else local(parameter).normal_(std=0.02)
    return Engine(held, settings, meshes=meshes, hf_config=config)


def allocated() -> float:
    return float(torch.cuda.memory_allocated()) if IS_GPU else 1.0


def peak_of(call: Callable[[], object]) -> float:
    if not IS_GPU:
        call()
        return 1.0
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated())


def measure(config: dict[str, Any], case: Case) -> dict[str, float]:
    gc.collect()
    if IS_GPU:
        torch.cuda.empty_cache()
    before = allocated()  # of compiled code and libraries, which count as overhead
    engine = make_engine(config, case)
    found = {"load": allocated()}
    num_rows = case.num_microbatches * case.tokens // case.length
    rows = make_rows([case.length] * num_rows, config["vocab_size"])
    for _ in range(2):  # the first round compiles
        started = time.perf_counter()
        engine.begin_step()
        found["backward"] = peak_of(lambda: engine.accumulate(rows, MeanNll()))
        found["optimizer"] = peak_of(lambda: _step(engine))
        seconds = time.perf_counter() - started
        found["log-prob"] = peak_of(lambda: engine.forward(rows))
    speed = measure_throughput(
        dims_of(config), [case.length] * num_rows, seconds, peak_tflops=detect_peak_tflops(DEVICE)
    )
    share = "" if speed.mfu_causal is None else f", MFU {speed.mfu_causal:.1%} causal"
    print(f"{case}: a step takes {seconds:.2f} s, {speed.tokens_per_s:,.0f} tok/s{share}")
    sizes = {phase: size - before * IS_GPU for phase, size in found.items()}
    return {phase: size for phase, size in sizes.items() if size}  # offloaded, loading takes none


def _step(engine: Engine) -> None:
    result = engine.end_step()
    assert not result.skipped, result.reason


def cases(args: argparse.Namespace) -> Iterator[Case]:
    for model in args.models:
        for tokens, length in (LONG if args.long else GRID)[model]:
            if args.tokens and tokens not in args.tokens:
                continue
            for word in args.compile:
                for mode in args.modes:
                    if MODES[mode]["mode"] != "memory_budget" or word == "on":
                        yield Case(model, tokens, length, word == "on", mode, keep=args.keep)
        if args.offload:
            yield Case(model, *GRID[model][0], False, "op", True)


def show(found: Found) -> None:
    case = found.case
    what = f"{case.model:5}{case.tokens:7}{case.length:6} {'on' if case.compile else 'off':8}"
    mode = case.mode + (" offload" if case.offload else "") + (" keep" if case.keep else "")
    if not IS_GPU:
        size = f"{found.predicted_bytes / GIB:10.2f}"
        print(f"{what}{mode:12}{found.phase:10}{size}{'-':>10}{'-':>8}")
        return
    sizes = f"{found.predicted_bytes / GIB:10.2f}{found.measured_bytes / GIB:10.2f}"
    mark = "" if found.is_near else "  <--"
    print(f"{what}{mode:12}{found.phase:10}{sizes}{found.ratio:8.3f}{mark}", flush=True)


def run_case(case: Case, toy: bool) -> list[Found]:
    config = MODELS[case.model]
    if toy:
        config = config | {key: TOY[key] for key in ("vocab_size", "hidden_size", "head_dim")}
        config = config | {"num_hidden_layers": 2, "intermediate_size": 128}
        config = config | ({"moe_intermediate_size": 32} if case.model == "moe" else {})
    try:
        got = measure(config, case)
    except (RuntimeError, RunError) as error:  # no memory, no compiled form: the grid goes on
        print(f"{case}: {type(error).__name__}: {error}", flush=True)
        return []
    want = predict(config, case)
    return [Found(case, phase, want[phase], size) for phase, size in got.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--long", action="store_true", help="long sequences, with their speed")
    parser.add_argument("--tokens", nargs="+", type=int, help="of the grid's sizes only these")
    parser.add_argument("--compile", nargs="+", default=["off", "on"], choices=["off", "on"])
    parser.add_argument("--offload", action="store_true", help="also offload_params, once a model")
    parser.add_argument("--keep", action="store_true", help="with keep_logits")
    parser.add_argument("--toy", action="store_true", help="tiny models; measures nothing")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    if not IS_GPU and not args.toy:
        raise SystemExit("this benchmark needs a GPU; --toy runs it on the CPU, to no purpose")
    name = torch.cuda.get_device_name() if IS_GPU else "CPU"
    print(f"{name}, torch {torch.__version__}; bytes in GiB, without overhead")
    print(f"{'model':5}{'tokens':>7}{'seq':>6} {'compile':8}{'mode':12}{'phase':10}", end="")
    print(f"{'predicted':>10}{'measured':>10}{'ratio':>8}")
    found: list[Found] = []
    for case in cases(args):
        if args.toy:
            if MODES[case.mode]["mode"] == "memory_budget":
                continue
            case = replace(case, tokens=256, length=64, compile=False)
        for one in run_case(case, args.toy):
            show(one)
            found.append(one)
        if args.json:  # after every case: a run that is cut short leaves what it had
            records = [asdict(one.case) | asdict(one) | {"ratio": one.ratio} for one in found]
            head = {"device": name, "torch": torch.__version__, "records": records}
            Path(args.json).write_text(json.dumps(head, indent=1))
    if not IS_GPU:
        print(f"{len(found)} cases ran; memory is not measured on a CPU")
        return
    off = [one for one in found if not one.is_near]
    slack = f"{SLACK_BYTES / GIB:.2f} GiB"
    print(f"{len(found) - len(off)} of {len(found)} within {LIMIT:.0%} or {slack}")
    if off:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
