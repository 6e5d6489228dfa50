"""Decode steps of the embedded engine launched one at a time and together, on a GPU.

    python benchmarks/decode_gpu.py               # all parts
    python benchmarks/decode_gpu.py equal small   # the named parts only

Parts: `equal` (fp32, bf16 and strict: tokens and log-probs beside one step at a time without
captured graphs), `small` (1,024 answers of about 30 tokens, SmolLM2's dimensions: time by phase and
host time of a step), `medium` (Qwen3-0.6B's dimensions: 256 x (128 + 256), and 1,024 answers of 16
to 256 tokens), `start` (time from the command to the first step, and of imports). A part that
fails is reported and the next one runs. Weights are random.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from sampler_load import NEW, QWEN3_06B, random_model, requests

from pentad.core.dims import ModelDims
from pentad.core.types import Generation, Request, SamplingParams
from pentad.infer.engine import InferenceEngine, Report
from pentad.infer.sampler import EmbeddedSampler
from pentad.infer.section import SamplerSettings
from pentad.rollout.section import RolloutConfig

SMOLLM2 = ModelDims(
    family="llama",
    vocab_size=49152,
    hidden_size=576,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    tie_embeddings=True,
    rope_theta=1e5,
    max_position=8192,
)
STOP_EVERY, MAX_NEW = 30, 64
TOGETHER = (1, 2, 4, 8)


def settings(max_running: int, tokens: int, **values: Any) -> SamplerSettings:
    rollout = RolloutConfig(max_running=max_running)
    values = {"max_context": 4096, "kv_cache_tokens": tokens} | values
    return SamplerSettings(rollout=rollout, **values)


def run(sampler: EmbeddedSampler, load: list[Request]) -> tuple[float, list[list[Generation]]]:
    async def once() -> tuple[float, list[list[Generation]]]:
        start = time.perf_counter()
        results = await asyncio.gather(*(sampler.generate(r) for r in load))
        return time.perf_counter() - start, results

    return asyncio.run(once())


def close(sampler: EmbeddedSampler) -> None:
    asyncio.run(sampler.close())
    gc.collect()
    torch.cuda.empty_cache()


def groups(num: int = 64, n: int = 16, prompt: int = 20, seed: int = 1) -> list[Request]:
    """Groups whose answers end at one token in `STOP_EVERY`, or at `MAX_NEW`."""
    made = torch.Generator().manual_seed(seed)
    stops = tuple(range(300 + STOP_EVERY, SMOLLM2.vocab_size, STOP_EVERY))
    params = SamplingParams(max_new_tokens=MAX_NEW, stop_ids=stops)
    return [
        Request(
            id=f"g{i}",
            prompt_ids=tuple(torch.randint(49152, (prompt,), generator=made).tolist()),
            params=params,
            seeds=tuple(range(n * i + 1000 * seed, n * i + 1000 * seed + n)),
        )
        for i in range(num)
    ]


def equal() -> None:
    dims = replace(SMOLLM2, num_layers=6, initializer_range=0.05)
    load = [*groups(24, 8), *requests_of(20, 49152)]
    for name, dtype, strict in (
        ("fp32", torch.float32, False),
        ("bf16", torch.bfloat16, False),
        ("bf16 strict", torch.bfloat16, True),
    ):
        wanted: list[Generation] = []
        for way, keys in (
            ("eager", {"cuda_graphs": False}),
            *((f"{k} together", {"steps_together": k}) for k in TOGETHER),
            ("4, few blocks", {"steps_together": 4, "kv_cache_tokens": 6000}),
            ("4, few rows", {"steps_together": 4, "max_running": 40}),
        ):
            keys = {"max_running": 256, "tokens": 1 << 16, **keys}
            keys["tokens"] = keys.pop("kv_cache_tokens", keys["tokens"])
            sampler = EmbeddedSampler(
                random_model(dims, dtype=dtype), settings(strict=strict, **keys), version=0
            )
            _, results = run(sampler, load)
            found = [g for gs in results for g in gs]
            wanted = wanted or found
            pairs = list(zip(found, wanted, strict=True))
            same = [a for a, b in pairs if a.ids == b.ids and a.finish == b.finish]
            gaps = [
                abs(x - y)
                for a, b in pairs
                if a.ids == b.ids
                for x, y in zip(a.logprobs, b.logprobs, strict=True)
            ]
            bits = sum(a.ids == b.ids and a.logprobs == b.logprobs for a, b in pairs)
            print(
                f"equal {name:11} {way:14}: {len(same)}/{len(pairs)} sequences have equal tokens, "
                f"{bits} equal bits; log-probs differ by at most {max(gaps):.2e}; "
                f"preemptions {sampler.stats()['preemptions']:.0f}",
                flush=True,
            )
            if strict:
                assert bits == len(pairs), "strict log-probs depend on the way of decoding"
            if dtype == torch.float32:
                assert max(gaps) < 1e-3 and len(same) >= 0.97 * len(pairs)
            close(sampler)


def requests_of(num: int, vocab_size: int) -> list[Request]:
    return [
        replace(
            request,
            prompt_ids=tuple(id_ % vocab_size for id_ in request.prompt_ids),
            params=SamplingParams(max_new_tokens=5 + 7 * i, temperature=0.0 if i % 3 == 0 else 0.8),
        )
        for i, request in enumerate(requests(num, n=2, prompt=100))
    ]


def by_step(engine: InferenceEngine, load: list[Request]) -> list[float]:
    """Runs requests in this thread; returns the duration of each call of `step`, in ms."""
    for request in load:
        engine.submit(request)
    times = []
    while engine.has_work:
        start = time.perf_counter()
        engine.step(Report())
        times.append(1e3 * (time.perf_counter() - start))
    return times


def small() -> None:
    for together in TOGETHER:
        keys = settings(1024, 1 << 17, steps_together=together)
        sampler = EmbeddedSampler(random_model(SMOLLM2), keys, version=0)
        engine = sampler.engine
        for seed in range(1, 4):  # captures the graphs
            run(sampler, groups(seed=seed))
        walls, tokens = [], 0
        for seed in range(4, 14):
            seconds, results = run(sampler, groups(seed=seed))
            walls.append(1e3 * seconds)
            tokens += sum(len(g.ids) for gs in results for g in gs)
        print(
            f"small, {together} together: rollout of 64 x 16 through the sampler: median "
            f"{statistics.median(walls):.1f} ms, slowest {max(walls):.1f}, "
            f"{tokens / sum(walls) * 1e3:,.0f} tok/s",
            flush=True,
        )
        firsts, rests, nums = [], [], []
        for seed in range(4, 9):
            before = engine.num_steps
            times = by_step(engine, groups(seed=seed))
            firsts.append(times[0])
            rests.append(sum(times[1:]))
            nums.append(engine.num_steps - before - 1)
        print(
            f"small, {together} together, in one thread: first pass {statistics.median(firsts):.1f}"
            f" ms, then {statistics.median(rests):.1f} ms for {statistics.median(nums)} steps: "
            f"{statistics.median(rests) / statistics.median(nums):.2f} ms a step"
        )
        device(engine, together)
        close(sampler)
        del sampler, engine


def device(engine: InferenceEngine, together: int) -> None:
    """Device time of one rollout, and host time of its steps without waiting for the device."""
    waits: list[float] = []
    decoder = engine.runner.decoder
    assert decoder is not None
    from pentad.infer.graphs import Launched

    read = Launched.read

    def timed(self: Launched) -> Any:
        start = time.perf_counter()
        if self.is_done is not None:
            self.is_done.synchronize()
        waits.append(1e3 * (time.perf_counter() - start))
        return read(self)

    Launched.read = timed  # type: ignore[method-assign]
    try:
        activities = [torch.profiler.ProfilerActivity.CUDA]
        times = by_step(engine, groups(seed=20))
        waited = sum(waits)
        with torch.profiler.profile(activities=activities) as found:
            by_step(engine, groups(seed=20))
            torch.cuda.synchronize()
    finally:
        Launched.read = read  # type: ignore[method-assign]
    busy = sum(event.self_device_time_total for event in found.key_averages()) / 1e3
    print(
        f"small, {together} together: GPU busy {busy:.1f} ms of {sum(times):.1f}; of the steps "
        f"after the first pass ({sum(times[1:]):.1f} ms) the host waits {waited:.1f} ms for the GPU"
    )


def medium() -> None:
    made = torch.Generator().manual_seed(5)
    lengths = torch.randint(16, NEW + 1, (1024,), generator=made).tolist()
    ragged = [
        replace(request, params=SamplingParams(max_new_tokens=num))
        for request, num in zip(requests(1024), lengths, strict=True)
    ]
    cases = (("256 x (128 + 256)", requests(256), 256), ("ragged", ragged, 1024))
    for together in TOGETHER:
        for name, load, rows in cases:
            keys = settings(rows, 2 * rows * 384, steps_together=together)
            sampler = EmbeddedSampler(random_model(QWEN3_06B), keys, version=0)
            speeds = []
            for _ in range(4):
                seconds, results = run(sampler, load)
                speeds.append(sum(len(g.ids) for gs in results for g in gs) / seconds)
            print(
                f"medium, {together} together, {name}: "
                f"{', '.join(f'{speed:,.0f}' for speed in speeds)} tok/s",
                flush=True,
            )
            close(sampler)
            del sampler


def start() -> None:
    """Seconds from the command to each line of output and to the first record, without and with
    caches of compiled code, then the time of imports by package."""
    from pentad_tools.bench.bench_rl import gpu_cases, write_recipe

    for case in gpu_cases()[:2]:
        with tempfile.TemporaryDirectory(prefix="pentad-start-") as folder:
            place = Path(folder)
            own = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
            own |= {"TRITON_CACHE_DIR": f"{folder}/triton"}
            for number, label in enumerate(("cold", "warm", "warm", "warm, imports timed")):
                recipe = write_recipe(case, place, 2)
                options = ["-X", "importtime"] if "imports" in label else []
                command = [sys.executable, *options, "-m", "pentad", "train", str(recipe)]
                command += ["total_train_steps=2", f"trial_name=start{number}"]
                print(f"start: {case.name}, {label}", flush=True)
                lines = timed_lines(command, {**os.environ, **own})
                shown = [line for line in lines if not line[1].startswith("import time:")]
                for at, text in shown:
                    print(f"start: {at:7.2f} s  {text[:150]}")
                for found in place.glob("runs/**/steps.jsonl"):
                    if f"start{number}" in str(found):
                        for line in found.read_text().splitlines():
                            record = json.loads(line)
                            phases = {k: round(v) for k, v in record["phases"].items()}
                            print(f"start: record of step {record['step']}: {phases}")
                if options:
                    report_imports([text for _, text in lines])


def timed_lines(command: list[str], environment: dict[str, str]) -> list[tuple[float, str]]:
    begin, lines = time.perf_counter(), []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append((time.perf_counter() - begin, line.rstrip()))
    return [*lines, (time.perf_counter() - begin, f"exit code {process.returncode}")]


PACKAGES = (
    *("torch._dynamo", "torch._inductor", "torch._functorch", "torch.distributed", "torch"),
    *("sympy", "triton", "flash_attn", "cutlass", "transformers", "numpy", "pydantic", "pentad"),
)


def report_imports(lines: list[str]) -> None:
    """Prints own seconds of imports by package, and the modules that took longest."""
    totals: dict[str, list[float]] = {}
    slowest: list[tuple[float, str]] = []
    for line in lines:
        parts = line.removeprefix("import time:").split("|")
        if len(parts) != 3 or not parts[0].strip().isdigit():
            continue
        name, seconds = parts[2].strip(), int(parts[0]) / 1e6
        package = next((p for p in PACKAGES if name == p or name.startswith(p + ".")), "others")
        totals.setdefault(package, []).append(seconds)
        slowest.append((int(parts[1]) / 1e6, parts[2].rstrip()))
    for package, times in sorted(totals.items(), key=lambda item: -sum(item[1])):
        print(f"start: imports of {package}: {sum(times):.2f} s, {len(times)} modules")
    for seconds, name in sorted(slowest, reverse=True)[:40]:
        print(f"start: {seconds:7.2f} s  {name}")


PARTS: dict[str, Callable[[], None]] = {
    part.__name__: part for part in (equal, small, medium, start)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    names = parser.parse_args().parts or list(PARTS)
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"no such part: {unknown}; known are {list(PARTS)}")
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    failed = []
    for name in names:
        begin = time.perf_counter()
        try:
            PARTS[name]()
        except Exception:
            failed.append(name)
            traceback.print_exc()
        gc.collect()
        torch.cuda.empty_cache()
        print(f"-- {name}: {time.perf_counter() - begin:.0f} s", flush=True)
    if failed:
        sys.exit(f"failed: {failed}")


if __name__ == "__main__":
    main()
