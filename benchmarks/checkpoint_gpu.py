"""How long a recovery checkpoint holds up training, sync and async, and how long a restore takes.

    python benchmarks/checkpoint_gpu.py                # state of Qwen3-1.7B (20 GB) on a GPU
    python benchmarks/checkpoint_gpu.py --model smol   # of SmolLM2-135M (1.6 GB), also on a CPU
    python benchmarks/checkpoint_gpu.py --model toy    # proves the script, no more

Weights are random. Before each save an optimizer step moves every number. "Stall" is what the
trainer waits; "commit" is until the marker is on disk. The restore is compared with reading the
same bytes from the same files by as many threads, both with the files in the page cache; the state
that comes back is compared bit by bit.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from engine_smoke import DEVICE, TOY, MeanNll, make_rows  # noqa: E402

from pentad.checkpoint.folders import find_checkpoints, info_folder  # noqa: E402
from pentad.checkpoint.job import CommitJob, run_job  # noqa: E402
from pentad.checkpoint.restore import restore_learner  # noqa: E402
from pentad.checkpoint.shards import StateSaver  # noqa: E402
from pentad.checkpoint.writer import Writer  # noqa: E402
from pentad.engine.engine import Engine, build_engine  # noqa: E402
from pentad.engine.section import EngineSettings, ModelConfig  # noqa: E402
from pentad_tools.bench.bench_rl import SMOLLM2_135M  # noqa: E402
from pentad_tools.bench.bench_train import QWEN3_0_6B  # noqa: E402

QWEN3_1_7B: dict[str, Any] = {**QWEN3_0_6B, "hidden_size": 2048, "intermediate_size": 6144}
MODELS = {"toy": TOY, "smol": SMOLLM2_135M, "1.7b": QWEN3_1_7B}
NUM_READERS = 8
CHUNK = 32 << 20


def train(engine: Engine, step: int) -> float:
    """One optimizer step on a few rows; seconds."""
    begun = time.monotonic()
    rows = make_rows([256] * 4, engine.dims.vocab_size, seed=step)
    engine.begin_step()
    engine.accumulate(rows, MeanNll())
    engine.end_step()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.monotonic() - begun


def save(engine: Engine, saver: StateSaver, root: Path, step: int, mode: str) -> dict:
    folder = f"default/recover_checkpoint/globalstep{step}"
    begun = time.monotonic()
    tensors, counters = engine.state_tensors(), engine.state_counters()
    staged = saver.save(tensors, root, folder, is_async=mode == "async", counters=counters)
    stall = time.monotonic() - begun
    beside: list[float] = []
    while not staged.done():
        beside.append(train(engine, step))
    written = staged.result()
    run_job(CommitJob(root, info_folder(step), written["files"], (), keep_last=1))
    commit = time.monotonic() - begun
    return {"stall": stall, "commit": commit, "bytes": written["bytes"], "beside": beside}


def read_all(paths: list[Path]) -> float:
    """Seconds to read every byte, by threads, into memory that is reused."""
    jobs = [(p, at) for p in paths for at in range(0, p.stat().st_size, CHUNK)]

    def read(job: tuple[Path, int]) -> int:
        path, at = job
        with path.open("rb", buffering=0) as file:
            return len(os.pread(file.fileno(), CHUNK, at))

    begun = time.monotonic()
    with ThreadPoolExecutor(NUM_READERS) as pool:
        total = sum(pool.map(read, jobs))
    seconds = time.monotonic() - begun
    assert total == sum(p.stat().st_size for p in paths)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=[*MODELS], default="1.7b")
    parser.add_argument("--folder", type=Path, help="where to write; default a temporary folder")
    given = parser.parse_args()
    config = MODELS[given.model]
    keys = {"archon": {"ac_mode": "none", "enable_compile": False}}
    settings = EngineSettings(model=ModelConfig.model_validate(keys), total_steps=1)
    engine = build_engine(config, settings, device=DEVICE, init_from_scratch=True)
    with TemporaryDirectory(prefix="pentad-bench-", dir=given.folder) as name:
        root, writer = Path(name) / "run", Writer()
        free = shutil.disk_usage(name).free
        saver = StateSaver(writer)
        begun = time.monotonic()
        saver.prepare(engine.state_tensors())
        saver.memory._wait()
        print(f"staging memory made and pinned in {time.monotonic() - begun:.2f} s, by a thread")
        steps = [train(engine, n) for n in range(3)]
        print(f"a training step alone: {1e3 * min(steps):.0f} ms; {free / 1e9:.0f} GB free")
        print("save         GB  stall s    s/GB  commit s   GB/s  step beside")
        stalls: dict[str, list[float]] = {"sync": [], "async": []}
        for number, mode in enumerate(["sync", "async", "async", "sync"]):
            got = save(engine, saver, root, number, mode)
            gb = got["bytes"] / 1e9
            stalls[mode].append(got["stall"])
            beside = (
                f"{1e3 * sum(got['beside']) / len(got['beside']):.0f} ms" if got["beside"] else ""
            )
            print(
                f"{mode:8s} {gb:6.2f} {got['stall']:8.3f} {got['stall'] / gb:7.4f} "
                f"{got['commit']:9.2f} {gb / got['commit']:6.2f}  {beside}",
                flush=True,
            )
            train(engine, 100 + number)
        longest = max(stalls["async"])
        print(f"sync / async stall: {min(stalls['sync']) / longest:.1f}")
        print(f"async stall of the default interval, 600 s: {longest / 6:.3f}%")
        save(engine, saver, root, 9, "sync")
        wanted = {n: t.clone() for n, t in engine.state_tensors().items()}
        newest = find_checkpoints(root)[0]
        for n in range(2):
            train(engine, 200 + n)
        files = [newest.root / path for path in newest.manifest.files]
        reading = min(read_all(files) for _ in range(2))
        times = []
        for _ in range(2):
            begun = time.monotonic()
            restore_learner(engine, newest, "default/recover_checkpoint/globalstep9")
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.monotonic() - begun)
        for tensor_name, tensor in engine.state_tensors().items():
            assert torch.equal(tensor, wanted[tensor_name]), tensor_name
        print(f"restore {min(times):.2f} s (first {times[0]:.2f}), bit-identical; ", end="")
        print(f"reading the bytes {reading:.2f} s: {min(times) / reading:.2f}x")
        saver.close()
        writer.close()


if __name__ == "__main__":
    main()
