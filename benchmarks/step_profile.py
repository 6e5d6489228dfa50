"""Where the time of GRPO steps goes: host time by phase, thread and function, kernels by phase.

    python benchmarks/step_profile.py --model SmolLM2 --steps 6 [--cpu] [KEY=VALUE ...]

The steps of a case of `pentad bench rl`, three times in one run: timed alone, with the stacks of
all threads sampled every millisecond, and with CUDA's activities traced.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from pentad.planner.prepare import prepare
from pentad.telemetry.record import PhaseTimer
from pentad.trainer.run import Run
from pentad.trainer.sources.rollouts import run_train
from pentad_tools.bench.bench_rl import NUM_WARM, cpu_cases, gpu_cases, write_recipe

INTERVAL_S = 0.001
NUM_TRACED = 2
PACKAGE = os.sep + "pentad" + os.sep


class Stacks:
    """Samples the stacks of all threads: seconds by (phase, thread, line), inclusive and own."""

    def __init__(self) -> None:
        self.phase = "other"
        self.inclusive: Counter[tuple[str, str, str]] = Counter()
        self.own: Counter[tuple[str, str, str]] = Counter()
        self.is_on = False
        self.is_done = False
        self.thread = threading.Thread(target=self._work, name="stacks", daemon=True)
        self.thread.start()

    def _work(self) -> None:
        last = time.perf_counter()
        while not self.is_done:
            time.sleep(INTERVAL_S)
            now = time.perf_counter()
            passed, last = now - last, now
            if self.is_on:
                self._sample(passed)

    def _sample(self, passed: float) -> None:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            name = names.get(ident, "?")
            if name == "stacks":
                continue
            seen: list[str] = []
            here: Any = frame
            while here is not None:
                code = here.f_code
                seen.append(f"{code.co_filename}:{code.co_qualname}:{here.f_lineno}")
                here = here.f_back
            if not seen or is_idle(seen):
                continue
            self.own[self.phase, name, shown(seen[0], line=True)] += passed
            for one in dict.fromkeys(shown(one, line=True) for one in seen if PACKAGE in one):
                self.inclusive[self.phase, name, one] += passed


def is_idle(seen: list[str]) -> bool:
    leaf = seen[0]
    waits = (
        *("threading.py", "selectors.py", "queue.py", "thread.py", "_work", "subprocess.py"),
        *("process.py:Child", "awake.py", "unix_events.py", "helper.py", "socket.py"),
    )
    return any(wait in leaf for wait in waits)


def shown(place: str, line: bool = False) -> str:
    path, name, number = place.rsplit(":", 2)
    at = path.rfind(PACKAGE)
    path = path[at + 1 :] if at >= 0 else "/".join(Path(path).parts[-3:])
    return f"{path}:{name}:{number}" if line else f"{path}:{name}"


class Watch:
    """Turns sampling and tracing on and off by step."""

    def __init__(self, num_steps: int, is_cuda: bool) -> None:
        self.stacks = Stacks()
        self.spans: list[tuple[str, int, int]] = []
        self.num_steps = num_steps
        self.done = 0
        self.profiler: Any = None
        self.is_cuda = is_cuda
        self.collected: Counter[int] = Counter()
        """Milliseconds of garbage collections by step."""
        self.collecting = 0.0
        gc.callbacks.append(self.note_collection)

    def note_collection(self, when: str, info: dict[str, int]) -> None:
        if when == "start":
            self.collecting = time.perf_counter()
        else:
            self.collected[self.done] += round(1e3 * (time.perf_counter() - self.collecting))

    def before(self) -> None:
        self.stacks.is_on = NUM_WARM + self.num_steps <= self.done < NUM_WARM + 2 * self.num_steps
        if self.is_cuda and self.done == NUM_WARM + 2 * self.num_steps:
            self.profiler = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CUDA]
            )
            self.profiler.__enter__()
            self.spans.clear()

    def after(self) -> None:
        self.done += 1
        self.stacks.is_on = False
        if self.profiler is not None and self.done == NUM_WARM + 2 * self.num_steps + NUM_TRACED:
            torch.cuda.synchronize()
            self.profiler.__exit__(None, None, None)


def install(watch: Watch) -> None:
    step, phase = Run._step, PhaseTimer.phase

    async def watched(self: Run, source: Any) -> None:
        watch.before()
        await step(self, source)
        watch.after()

    @contextmanager
    def spanned(self: PhaseTimer, name: str) -> Iterator[None]:
        outer, watch.stacks.phase = watch.stacks.phase, name
        begin = time.time_ns()
        try:
            with phase(self, name):
                yield
        finally:
            watch.stacks.phase = outer
            watch.spans.append((name, begin, time.time_ns()))

    Run._step = watched  # type: ignore[method-assign]
    PhaseTimer.phase = spanned  # type: ignore[method-assign,assignment]


def report_stacks(stacks: Stacks, num_steps: int, most: int) -> None:
    print(f"\nhost: wall ms per step by phase and thread ({num_steps} steps sampled)")
    for title, table in (("inclusive", stacks.inclusive), ("own lines", stacks.own)):
        groups: dict[tuple[str, str], list[tuple[float, str]]] = defaultdict(list)
        for (phase, thread, name), seconds in table.items():
            groups[phase, thread].append((1e3 * seconds / num_steps, name))
        print(f"\n== {title}")
        for (phase, thread), found in sorted(groups.items()):
            found.sort(reverse=True)
            if found[0][0] < 1:
                continue
            print(f"-- {phase}, {thread}")
            for ms, name in found[:most]:
                if ms >= 0.4:
                    print(f"{ms:9.2f}  {name}")


def report_trace(watch: Watch, out: Path) -> None:
    trace = out / "trace.json"
    watch.profiler.export_chrome_trace(str(trace))
    content = json.loads(trace.read_text())
    trace.unlink()
    base = content.get("baseTimeNanoseconds", 0)
    events = [one for one in content["traceEvents"] if one.get("ph") == "X"]
    device = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    runtime = [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    innermost = sorted(watch.spans, key=lambda span: span[2] - span[1])

    def phase_of(event: dict[str, Any]) -> str:
        at = base + event["ts"] * 1e3
        return next((name for name, b, e in innermost if b <= at <= e), "other")

    busy: Counter[str] = Counter()
    count: Counter[str] = Counter()
    kernels: dict[str, Counter[str]] = defaultdict(Counter)
    numbers: dict[str, Counter[str]] = defaultdict(Counter)
    for event in device:
        phase = phase_of(event)
        busy[phase] += event["dur"] / 1e3
        count[phase] += 1
        kernels[phase][event["name"][:90]] += event["dur"] / 1e3
        numbers[phase][event["name"][:90]] += 1
    print(f"\ndevice: ms per step by phase ({NUM_TRACED} steps traced)")
    for phase in busy:
        print(
            f"-- {phase}: busy {busy[phase] / NUM_TRACED:.1f} ms, {count[phase] / NUM_TRACED:.0f}"
        )
        for name, ms in kernels[phase].most_common(14):
            print(f"{ms / NUM_TRACED:9.2f} {numbers[phase][name] / NUM_TRACED:8.0f}  {name}")
    calls: dict[str, Counter[str]] = defaultdict(Counter)
    times: dict[str, Counter[str]] = defaultdict(Counter)
    for event in runtime:
        phase = phase_of(event)
        calls[phase][event["name"]] += 1
        times[phase][event["name"]] += event["dur"] / 1e3
    print("\nCUDA calls of the host: ms per step, calls per step")
    for phase, found in times.items():
        print(f"-- {phase}")
        for name, ms in found.most_common(8):
            print(f"{ms / NUM_TRACED:9.2f} {calls[phase][name] / NUM_TRACED:8.0f}  {name}")
    gaps(device, phase_of)


def gaps(device: list[dict[str, Any]], phase_of: Any) -> None:
    """Time by length of the gaps between kernels, by the phase of the kernel that ends the gap."""
    device.sort(key=lambda event: event["ts"])
    found: dict[str, Counter[str]] = defaultdict(Counter)
    end = device[0]["ts"] if device else 0.0
    for event in device:
        gap = event["ts"] - end
        if gap > 0:
            size = (
                "<10us" if gap < 10 else "<100us" if gap < 100 else "<1ms" if gap < 1e3 else ">1ms"
            )
            found[phase_of(event)][size] += gap / 1e3
        end = max(end, event["ts"] + event["dur"])
    print("\nidle gaps of the device: ms per step by length")
    for phase, sizes in found.items():
        text = ", ".join(f"{size} {ms / NUM_TRACED:.1f}" for size, ms in sorted(sizes.items()))
        print(f"-- {phase}: {text}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="SmolLM2")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--most", type=int, default=40)
    parser.add_argument("--switch-ms", type=float, help="Python's thread switch interval")
    parser.add_argument("extra", nargs="*")
    given = parser.parse_args()
    if given.switch_ms:
        sys.setswitchinterval(given.switch_ms / 1e3)
    cases = cpu_cases() if given.cpu else gpu_cases()
    case = next(case for case in cases if given.model in case.name)
    watch = Watch(given.steps, not given.cpu)
    install(watch)
    total = NUM_WARM + 2 * given.steps + (0 if given.cpu else NUM_TRACED)
    with tempfile.TemporaryDirectory(prefix="pentad-profile-") as folder:
        config, notes = prepare(write_recipe(case, Path(folder), total), given.extra, "train")
        with redirect_stdout(StringIO()):
            summary = run_train(config, notes, device="cpu" if given.cpu else "cuda")
        lines = (summary.records / "steps.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        counted = records[NUM_WARM : NUM_WARM + given.steps]
        walls = [record["wall_clock_ms"] for record in counted]
        print(f"{case.name}: median {statistics.median(walls):.0f} ms, slowest {max(walls):.0f}")
        print(
            "first step",
            round(records[0]["wall_clock_ms"]),
            "ms; warm steps",
            [round(w) for w in walls],
        )
        moments = [record["time_s"] for record in records[NUM_WARM - 1 : NUM_WARM + given.steps]]
        print("between records", [round(1e3 * (b - a)) for a, b in itertools.pairwise(moments)])
        for name in counted[-1]["phases"]:
            times = [record["phases"].get(name, 0.0) for record in counted]
            print(f"{name:>12} {statistics.median(times):8.1f} {max(times):8.1f}")
        print(
            "tokens",
            [r["num_tokens"] for r in counted],
            "mbs",
            [r["num_microbatches"] for r in counted],
        )
        print("losses", [record["loss"] for record in counted])
        print("digest", summary.records and records[-1].get("grad_norm"), records[-1]["loss"])
        for record in records:
            phases = {name: round(ms) for name, ms in record["phases"].items()}
            collected = watch.collected[record["step"] - 1]
            print(f"step {record['step']}: {record['wall_clock_ms']:.0f} ms, {phases},", end=" ")
            print(f"garbage collections {collected} ms")
        report_stacks(watch.stacks, given.steps, given.most)
        if not given.cpu:
            report_trace(watch, Path(folder))


main()
