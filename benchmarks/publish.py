"""A publish between processes: seconds end to end, by phase, the sampler's pause, peak memory.

    python benchmarks/publish.py                            # on a GPU: Qwen3-0.6B, random weights
    python benchmarks/publish.py --kind shm                 # by shared memory instead of CUDA IPC
    python benchmarks/publish.py --device cpu --ranks 4     # a toy, 4 ranks that hold shards
    python benchmarks/publish.py --kind file --trains layers.1.  # the rest is frozen: deltas

Each rank of the learner is a process, the embedded sampler another, which decodes meanwhile. The
learner changes its weights before each publish; the receipt must hold their digest. Memory is that
of each rank above what it had before: of a GPU the allocator's peak, of a CPU the peak of the
resident memory, pages of the shared file that the rank has written included.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing as mp
import re
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pentad.core.layout import Layout
from pentad.core.types import Request, SamplingParams
from pentad.engine.engine import build_engine
from pentad.engine.section import EngineSettings, ModelConfig
from pentad.infer.section import SamplerSettings
from pentad.models.families import dims_of
from pentad.planner.memory import Training, publish_bucket, publish_params, snapshot_bytes
from pentad.rollout.section import RolloutConfig
from pentad.runtime.local_roles import LocalRuntime
from pentad.runtime.restarts import RestartPolicy
from pentad.runtime.roles import RoleSpec
from pentad.samplers import remote
from pentad.samplers.remote import HostedSettings, RoleSampler
from pentad.samplers.replica import Replica
from pentad.sync.publisher import Publisher
from pentad.sync.shards import ShardWriter
from pentad.sync.weights_dir import WeightsDir, snapshot_of

QWEN3_06B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
}
TOY = QWEN3_06B | {
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
}


def resident(key: str) -> int:
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(re.findall(rf"{key}:\s+(\d+) kB", text)[0]) * 1024


class Peak:
    """Bytes at the most between `begin` and `grown`, above those at `begin`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.before = 0

    def begin(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
            return
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
        self.before = resident("VmRSS")

    def grown(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated() - self.before
        return resident("VmHWM") - self.before


def learn(rank: int, layout: Layout, config: dict[str, Any], dtype: str, given: dict[str, Any]):
    """The process of one rank: publishes when asked."""
    pipe: Connection = given["pipe"]
    device = torch.device(given["device"])
    torch.set_num_threads(1 if device.type == "cpu" else 8)
    if layout.world > 1:
        store = dist.FileStore(given["store"], layout.world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=layout.world)
    settings = EngineSettings(model=ModelConfig(dtype=dtype), total_steps=1)
    engine = build_engine(
        config, settings, device=device, layout=layout, init_from_scratch=True, seed=3
    )
    group = dist.new_group(backend="gloo") if layout.world > 1 else None
    writer = ShardWriter(engine.weight_shards(), *engine.published(), group)
    peak, kept = Peak(device), {}
    pipe.send("ready")
    while (asked := pipe.recv()) is not None:
        version, kind, folder = asked
        with torch.no_grad():
            for name, tensor in engine.tensors.items():
                if given["trains"] in name:
                    tensor.mul_(1.01)
        if device.type == "cuda":
            torch.cuda.synchronize()
        peak.begin()
        started = time.perf_counter()
        made = writer.write(version, engine.weight_shards(), kind, Path(folder), deltas=True)
        seconds = time.perf_counter() - started
        writer.close()
        kept = {version: made.kept}
        answer = {"seconds": seconds, "grown": peak.grown(), "share": writer.staged_bytes}
        if rank == 0:
            answer |= {"weights": asdict(made.weights), "digest": made.digest.entries}
        pipe.send(answer)
    del kept


async def keep_busy(sampler: Replica, vocab: int) -> None:
    """Requests under way, as in a run, until it is cancelled."""
    number = 0
    while True:
        prompt = tuple(n % vocab for n in range(number, number + 16))
        params = SamplingParams(max_new_tokens=256, temperature=1.0)
        request = Request(id=f"r{number}", prompt_ids=prompt, params=params, seeds=tuple(range(8)))
        await sampler.generate(request)
        number += 1


async def measure(args: argparse.Namespace, pipes: list[Connection], folder: Path) -> list[Any]:
    is_gpu = args.device == "cuda"
    settings = HostedSettings(
        dims=dims_of(args.config),
        sampler=SamplerSettings(rollout=RolloutConfig(max_running=16), kv_cache_tokens=1 << 14),
        device=args.device,
        dtype=args.dtype,
        seed=9,
        num_threads=0 if is_gpu else 1,
    )
    spec = RoleSpec(
        name="rollout-0",
        target=remote.TARGET,
        payload=settings.model_dump(mode="json"),
        log=folder / "rollout-0.log",
        devices=(0,) if is_gpu else (),
        num_gpus=1 if is_gpu else 0,
    )
    runtime, weights_dir = LocalRuntime(), WeightsDir(args.kind, folder)
    rows = []
    try:
        process = await runtime.start(spec)
        sampler = Replica(
            "rollout-0",
            lambda _: RoleSampler.open(process, weights_dir),
            weights_dir,
            RestartPolicy(0),
        )
        await sampler.open()
        publisher = Publisher([sampler])
        for pipe in pipes:
            await asyncio.to_thread(pipe.recv)
        busy = asyncio.create_task(keep_busy(sampler, args.config["vocab_size"]))
        for version in range(args.repeats + 1):  # the first warms up
            assert not busy.done(), busy.exception()
            started = time.perf_counter()
            for pipe in pipes:
                pipe.send((version, args.kind, str(folder)))
            answers = [await asyncio.to_thread(pipe.recv) for pipe in pipes]
            first = answers[0]
            snapshot = snapshot_of(first["weights"], first["digest"], first["seconds"])
            await publisher.publish(snapshot)
            seconds = time.perf_counter() - started
            assert publisher.times is not None
            rows.append({"total": seconds, **asdict(publisher.times), "ranks": answers})
            await asyncio.sleep(0.2)
        busy.cancel()
        with suppress(asyncio.CancelledError):
            await busy
        for pipe in pipes:
            pipe.send(None)
        await sampler.close()
    finally:
        await runtime.close()
    return rows[1:]


def publish_bytes(training: Training, pp_rank: int) -> float:
    """What one rank grows by in a publish: its share, in the file or staged, and a bucket."""
    share = training.compute_bytes * publish_params(training, pp_rank)
    return share + publish_bucket(training)


def planned(args: argparse.Namespace, layout: Layout) -> float:
    """What `plan` adds for a publish on the device of one rank."""
    training = Training(
        dims=dims_of(args.config),
        layout=layout,
        model=EngineSettings(model=ModelConfig(dtype=args.dtype)).settled("cpu", layout).model,
        microbatch_tokens=8,
        publishes=True,
        overlaps=True,
        max_staleness=1,
        device=args.device,
        publish_kind=args.kind,
    )
    if args.kind == "ipc":
        return snapshot_bytes(training)
    return publish_bucket(training) if args.device == "cuda" else publish_bytes(training, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    has_gpu = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if has_gpu else "cpu")
    parser.add_argument("--kind", choices=("shm", "file", "ipc"), default=None)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--trains", default="", help="part of the names of tensors that change")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    is_gpu = args.device == "cuda"
    args.kind = args.kind or ("ipc" if is_gpu else "shm")
    args.config, args.dtype = (QWEN3_06B, "bfloat16") if is_gpu else (TOY, "float32")
    layout = Layout(dp_shard=args.ranks)
    place = Path("/dev/shm") if args.kind != "file" and Path("/dev/shm").is_dir() else None
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="pentad-bench-", dir=place) as name:
        folder, pipes, processes = Path(name), [], []
        for rank in range(args.ranks):
            ours, theirs = context.Pipe()
            given = {"pipe": theirs, "device": args.device, "store": f"{name}/store"}
            given["trains"] = args.trains
            target = (rank, layout, args.config, args.dtype, given)
            processes.append(context.Process(target=learn, args=target, daemon=True))
            processes[-1].start()
            pipes.append(ours)
        rows = asyncio.run(measure(args, pipes, folder))
        for process in processes:
            process.join()
    report(args, rows, planned(args, layout))


def report(args: argparse.Namespace, rows: list[Any], plan: float) -> None:
    phases = ("total", "gather", "transfer", "install", "pause")
    middle = {key: sorted(row[key] for row in rows)[len(rows) // 2] for key in phases}
    share = rows[0]["ranks"][0]["share"]
    whole = sum(rank["share"] for rank in rows[0]["ranks"])
    grown = max(row["ranks"][0]["grown"] for row in rows)
    print(f"{args.device}, {args.kind}, {args.ranks} ranks, {whole / 1e6:.0f} MB of {args.dtype}:")
    written = max(row["num_bytes"] for row in rows)
    print(f"  written for a publish: {written / 1e6:.1f} MB")
    print("  median ms: " + ", ".join(f"{key} {1e3 * middle[key]:.0f}" for key in phases))
    print(
        f"  rank 0 grew by {grown / 1e6:.1f} MB at the most; its share is {share / 1e6:.1f} MB, "
        f"plan says {plan / 1e6:.1f} MB ({grown / plan - 1:+.0%})"
    )
    if args.json:
        figures = {**middle, "grown": grown, "share": share, "plan": plan}
        args.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
