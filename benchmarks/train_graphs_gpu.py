"""Checks and measures training passes captured as CUDA graphs, on one GPU.

    python benchmarks/train_graphs_gpu.py [--seconds 100] [PART ...]

Each part runs in a process of its own and prints its figures; one that fails prints its traceback,
and the next one follows while time is left.
Kernels of attention add gradients in no fixed order, so the difference of two uncaptured engines is
shown beside that of a captured and an uncaptured one.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pentad.core.types import Group, Loss, Prompt, Row, Sample
from pentad.engine.batch import check_rows, pack_rows
from pentad.engine.engine import Engine, build_engine
from pentad.engine.passes import WholePasses
from pentad.engine.section import (
    ArchonConfig,
    EngineSettings,
    MicrobatchConfig,
    ModelConfig,
    OptimizerConfig,
)
from pentad.ops import attention
from pentad.ops.attention import VarlenAttend, reference_attention
from pentad.rl.algorithms import build_policy_loss, make_rows
from pentad.rl.losses import SftLoss, ValueLoss
from pentad.rl.section import AlgorithmConfig
from pentad_tools.bench.bench_rl import SMOLLM2_135M
from pentad_tools.bench.bench_train import QWEN3_0_6B

SMALL = SMOLLM2_135M | {"num_hidden_layers": 4}
COLUMNS = ("advantages", "actor_logprobs", "rollout_logprobs", "ref_logprobs", "values", "returns")


def rows_of(num: int, seed: int, prompt: int = 27, mean: int = 30, most: int = 64) -> list[Row]:
    """Rows as of the benchmark: a prompt, then an answer of geometric length."""
    gen = torch.Generator().manual_seed(seed)
    lengths = torch.empty(num).geometric_(1 / mean, generator=gen).clamp(max=most).long() + prompt
    rows = []
    for length in lengths.tolist():
        ids = torch.randint(0, SMOLLM2_135M["vocab_size"], (length,), generator=gen)
        columns = {name: -torch.rand(length, generator=gen) for name in COLUMNS}
        columns["weights"] = (torch.arange(length) >= prompt).float()
        rows.append(Row(ids, columns, float(length - prompt)))
    return rows


def make(
    graphs: bool | str,
    config: dict[str, Any] = SMALL,
    *,
    longest: int = 91,
    value_head: bool = False,
    tokens: int | None = None,
    is_recorded: bool = True,
    **archon: Any,
) -> Engine:
    """`is_recorded`: False for an engine that pads as with graphs, but captures none."""
    keys = ArchonConfig().model_copy(update={"cuda_graphs": graphs, **archon})
    model = ModelConfig(
        archon=keys,
        optimizer=OptimizerConfig(lr=1e-5),
        mb_spec=MicrobatchConfig(max_tokens_per_mb=tokens),
    )
    settings = EngineSettings(model=model, total_steps=100, max_row_tokens=longest)
    engine = build_engine(
        config, settings, device="cuda", value_head=value_head, init_from_scratch=True, seed=1
    )
    if not is_recorded:
        held = graphs_of(engine)
        assert held is not None
        held._capture = lambda *_: None
    return engine


def graphs_of(engine: Engine) -> Any:
    assert isinstance(engine.passes, WholePasses)
    return engine.passes.graphs


def grpo(**given: Any) -> Loss:
    return build_policy_loss(AlgorithmConfig(name="grpo", **given))


def apart(found: Tensor, wanted: Tensor) -> float:
    scale = wanted.abs().max().item()
    return (found - wanted).abs().max().item() / scale if scale else found.abs().max().item()


def compare(engines: dict[str, Engine], loss: Loss, steps: Sequence[list[Row]]) -> None:
    """Trains all engines on the same rows; prints how far each is from the first."""
    for number, rows in enumerate(steps):
        found: dict[str, tuple[dict[str, Tensor], Any, Any]] = {}
        for name, engine in engines.items():
            engine.begin_step()
            called = engine.accumulate(rows, loss)
            gradients = {key: x.clone() for key, x in engine.held.gradients().items()}
            found[name] = gradients, called, engine.end_step()
        first, *others = found
        wanted = found[first]
        for name in others:
            mine = found[name]
            gradient = max(apart(mine[0][key], wanted[0][key]) for key in wanted[0])
            equal = sum(torch.equal(mine[0][key], wanted[0][key]) for key in wanted[0])
            outputs = max(
                apart(a[key], b[key])
                for a, b in zip(mine[1].outputs, wanted[1].outputs, strict=True)
                for key in a
            )
            num = sum(len(row.ids) for row in rows)
            graphs = graphs_of(engines[name])
            replays = None if graphs is None else (graphs.num_captured, graphs.num_replayed)
            print(
                f"step {number}, {num} tokens, {name} against {first}: loss "
                f"{mine[1].loss_sum:.6f} / {wanted[1].loss_sum:.6f}, gradient norm "
                f"{mine[2].grad_norm:.6g} / {wanted[2].grad_norm:.6g}, gradients apart "
                f"{gradient:.2e} ({equal} of {len(wanted[0])} equal), outputs {outputs:.2e}, "
                f"(captured, replayed) {replays}"
            )


def check_short() -> None:
    """The kernel for short sequences against torch's flash kernel: error and device time."""
    lengths = [len(row.ids) for row in rows_of(512, 0)]
    device = torch.device("cuda")
    gen = torch.Generator(device).manual_seed(0)
    shapes = [(sum(lengths), num, 64) for num in (9, 3, 3, 9)]
    q, k, v, grad = (
        torch.randn(s, generator=gen, device=device, dtype=torch.bfloat16) for s in shapes
    )
    few = slice(0, sum(lengths[:40]))
    exact = [x[few].double().requires_grad_() for x in (q, k, v)]
    plain = reference_attention(exact[0], exact[1], exact[2], lengths[:40])
    wanted = [plain, *torch.autograd.grad(plain, exact, grad[few].double())]
    for name, is_short in (("torch's", False), ("short", True)):
        attend = VarlenAttend(lengths, device=device, is_short=is_short)
        mine = [x.clone().requires_grad_() for x in (q, k, v)]

        def run(attend: VarlenAttend = attend, mine: list[Tensor] = mine) -> list[Tensor]:
            out = attend(0, mine[0], mine[1], mine[2])
            return [out, *torch.autograd.grad(out, mine, grad)]

        found = run()
        errors = [
            ((x[few].double() - true).norm() / true.norm()).item()
            for x, true in zip(found, wanted, strict=True)
        ]
        with torch.no_grad():
            forward_us = device_us(partial(attend, 0, q, k, v))
        both_us = device_us(run)
        print(f"{name} kernel: forward {forward_us:.0f} us, with backward {both_us:.0f} us, errors")
        print("  ", [f"{error:.2e}" for error in errors], flush=True)


def device_us(run: Callable[[], object], num: int = 20) -> float:
    """Device time of a call, without that of the host: all calls are queued behind a long one."""
    run()
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(num):
        run()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * start.elapsed_time(end) / num


def check_equal() -> None:
    """Captured against uncaptured passes over the same padding, and against plain ones; then
    several microbatches a step."""
    steps = [rows_of(256, seed) for seed in range(4)] + [rows_of(64, 9)]
    engines = {"padded": make(True, is_recorded=False), "captured": make(True)}
    compare(engines, grpo(), [*steps, rows_of(256, 11)])
    compare({"padded": make(True, is_recorded=False), "plain": make(False)}, grpo(), steps[:1])
    engines = {
        "padded": make(True, is_recorded=False, tokens=4096),
        "captured": make(True, tokens=4096),
    }
    compare(engines, grpo(), steps[:3])


def check_losses() -> None:
    for name, loss, head in (
        ("KL and entropy", grpo(kl_coef=0.1, entropy_coef=0.01), False),
        ("gspo", build_policy_loss(AlgorithmConfig(name="gspo"), num_updates=2), False),
        ("sft", SftLoss(), False),
        ("values", ValueLoss(eps_clip_value=0.2), True),
    ):
        print(name)
        engines = {
            "padded": make(True, value_head=head, is_recorded=False),
            "captured": make(True, value_head=head),
        }
        compare(engines, loss, [rows_of(128, seed) for seed in range(3)])


def check_long() -> None:
    """Rows for which FlashAttention-4 is used if it is installed, and kept logits."""
    engines = {
        "padded": make(True, longest=600, is_recorded=False),
        "captured": make(True, longest=600),
        "kept logits": make(True, longest=600, keep_logits=True),
    }
    steps = [rows_of(48, seed, prompt=100, mean=200, most=500) for seed in range(4)]
    compare(engines, grpo(), steps)


def check_refusal() -> None:
    """A loss that reads the device on the host cannot be captured, and trains nevertheless."""

    class Reading(SftLoss):
        def __call__(self, outputs: Any, columns: Any) -> Any:
            loss, stats = super().__call__(outputs, columns)
            return (loss * 1.0 if float(loss) > 0 else loss), stats

    engines = {"plain": make(False), "refused": make("auto")}
    compare(engines, Reading(), [rows_of(128, seed) for seed in range(3)])
    print("still on:", graphs_of(engines["refused"]).is_on)
    compare(engines, SftLoss(), [rows_of(128, seed) for seed in range(3)])


def measure_steps() -> None:
    """Time of the parts of a step of the benchmark's size, and memory."""
    for graphs, most in ((False, 0), (True, 0), (False, 128), (True, 128)):
        attention.MAX_SHORT = most
        engine = make(graphs, SMOLLM2_135M)
        torch.cuda.reset_peak_memory_stats()
        loss = grpo()
        times: dict[str, list[float]] = {}
        for seed in range(10):
            rows = rows_of(1024, seed)
            torch.cuda.synchronize()
            began = time.perf_counter()
            engine.begin_step()
            plan = engine._planned(rows, loss.columns, buckets=graphs)
            planned = time.perf_counter()
            list(plan[2])
            torch.cuda.synchronize()
            packed = time.perf_counter()
            engine.accumulate(rows, loss)
            torch.cuda.synchronize()
            added = time.perf_counter()
            engine.end_step()
            torch.cuda.synchronize()
            ended = time.perf_counter()
            if seed >= 4:
                spans = itertools.pairwise((began, planned, packed, added, ended))
                for name, (a, b) in zip(("plan", "pack", "accumulate", "end"), spans, strict=True):
                    times.setdefault(name, []).append(1e3 * (b - a))
        figures = {
            name: f"{statistics.median(ms):.1f} (most {max(ms):.1f})" for name, ms in times.items()
        }
        gib = 2**30
        print(f"graphs {graphs}, short kernel up to {most} tokens: ms {figures}")
        print(
            f"  peak allocated {torch.cuda.max_memory_allocated() / gib:.2f} GiB, held after a "
            f"step {torch.cuda.memory_allocated() / gib:.2f}, reserved "
            f"{torch.cuda.memory_reserved() / gib:.2f}"
        )
        if graphs:
            held = graphs_of(engine)
            print(f"  captured {held.num_captured}, replayed {held.num_replayed}", flush=True)
        if graphs and most:
            profile(engine, loss)
        del engine
        clean()


def profile(engine: Engine, loss: Loss) -> None:
    """Device time by kernel of one step."""
    rows = rows_of(1024, 3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        engine.begin_step()
        engine.accumulate(rows, loss)
        engine.end_step()
        torch.cuda.synchronize()
    events = trace.key_averages()
    print(events.table(sort_by="self_device_time_total", row_limit=22, max_name_column_width=90))


def measure_rows() -> None:
    """CPU time before the first kernel of a step: rows of groups, their checks, and packing."""
    groups = groups_of(64, 16)
    settings, loss = AlgorithmConfig(name="grpo"), grpo()
    gc.collect()
    gc.freeze()
    times: dict[str, list[float]] = {}
    for _ in range(20):
        moments = [time.process_time()]
        rows = make_rows(groups, settings, max_new_tokens=64)
        moments.append(time.process_time())
        check_rows(rows, loss.columns, SMOLLM2_135M["vocab_size"])
        moments.append(time.process_time())
        pack_rows(rows, loss.columns, torch.device("cpu"))
        moments.append(time.process_time())
        for name, (a, b) in zip(
            ("rows", "checks", "packing"), itertools.pairwise(moments), strict=True
        ):
            times.setdefault(name, []).append(1e3 * (b - a))
    print({name: f"{statistics.median(ms):.2f} ms" for name, ms in times.items()})


def groups_of(num: int, num_samples: int) -> list[Group]:
    gen = np.random.default_rng(0)
    groups = []
    for gid in range(num):
        samples = []
        for _ in range(num_samples):
            mask = np.arange(27 + min(64, gen.geometric(1 / 30))) >= 27
            ids = gen.integers(0, SMOLLM2_135M["vocab_size"], len(mask))
            logprobs = np.where(mask, -1.0, 0.0).astype(np.float32)
            versions = np.where(mask, 0, -1)
            samples.append(Sample(ids, mask, logprobs, versions, "stop", reward=gen.random()))
        groups.append(Group(Prompt(gid, (), {}), samples))
    return groups


def measure_larger() -> None:
    """Where graphs stop paying: Qwen3-0.6B by tokens of a microbatch."""
    for tokens, graphs in itertools.product((4096, 16384, 32768), (False, True)):
        engine = make(graphs, QWEN3_0_6B, tokens=tokens, longest=600)
        loss, times = SftLoss(), []
        for seed in range(9):
            rows = rows_of(tokens // 310, seed, prompt=100, mean=200, most=500)
            torch.cuda.synchronize()
            began = time.perf_counter()
            engine.begin_step()
            engine.accumulate(rows, loss)
            engine.end_step()
            torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - began))
        ms = statistics.median(times[5:])
        peak = torch.cuda.max_memory_allocated() / 2**30
        print(f"{tokens} tokens, graphs {graphs}: {ms:.1f} ms, peak {peak:.1f} GiB")
        del engine
        clean()


def whole_steps(value: str = "auto") -> None:
    """GRPO steps as `pentad train` runs them."""
    script = str(Path(__file__).parent / "step_profile.py")
    command = [sys.executable, script, "--steps", "5", "--most", "22"]
    command += [f"actor.archon.cuda_graphs={value}"]
    print("$", " ".join(command[1:]), flush=True)
    subprocess.run(command, timeout=200, check=False)


def clean() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


PARTS: dict[str, Callable[[], None]] = {
    "short": check_short,
    "equal": check_equal,
    "steps": measure_steps,
    "whole": whole_steps,
    "losses": check_losses,
    "long": check_long,
    "refusal": check_refusal,
    "larger": measure_larger,
    "rows": measure_rows,
    "whole-without": lambda: whole_steps("false"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="no part starts later")
    parser.add_argument("--here", action="store_true", help="in this process")
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []])
    given = parser.parse_args()
    started = time.monotonic()
    for name in given.parts or PARTS:
        if given.here:
            PARTS[name]()
            continue
        if time.monotonic() - started > given.seconds:
            print(f"=== {name}: no time is left")
            continue
        print(f"\n=== {name}", flush=True)
        began = time.monotonic()
        command = [sys.executable, "-X", "faulthandler", __file__, "--here", name]
        found = subprocess.run(command, stderr=subprocess.STDOUT, check=False)
        print(f"--- {name}: {time.monotonic() - began:.0f} s, exit {found.returncode}", flush=True)


if __name__ == "__main__":
    main()
