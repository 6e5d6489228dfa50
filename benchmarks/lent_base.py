"""An adapter's learner and sampler in two processes on one GPU: memory with a copy of the frozen
weights in the sampler, and with the learner's.

    python benchmarks/lent_base.py [--model Qwen3-8B] [--parts copy shared killed] [--tiny]

Runs GRPO of random weights (`mode=hybrid`, staleness 1, rank 32) for a few steps in each way, with
one size of the cache. `killed` sends SIGKILL to the sampler after step 1 and to the learner after
step 3, and prints what is left in /dev/shm. `--tiny` is the same with toy dimensions, for a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from pentad.config.topology import Topology  # noqa: E402
from pentad.models.catalog import known_config  # noqa: E402
from pentad.models.registry import create_model, dims_of, save_model  # noqa: E402
from pentad.planner.prepare import prepare  # noqa: E402
from pentad.trainer.sources.rollouts import run_train  # noqa: E402
from pentad_tools.bench.bench_rl import RlCase, write_recipe  # noqa: E402
from pentad_tools.bench.bench_train import TOY  # noqa: E402

IS_GPU = torch.cuda.is_available()
STEPS = {"copy": 4, "shared": 4, "killed": 6}
CACHE = f"rollout.kv_cache_gb={4 if IS_GPU else 0.1}"
WORDS = (
    *("mode=hybrid", "max_staleness=1", "allocation_mode=embedded:d1+archon:d1"),
    *(
        "actor.lora.rank=32",
        "actor.init_from_scratch=false",
        CACHE,
    ),
    *("recover.freq_steps=1", "saver.mode=sync"),
    *(("cluster.share_gpus=true",) if IS_GPU else ("scheduler.processes=separate",)),
)
KILLS = {1: "rollout-0", 3: "learner-0"}
"""Step after which a process is killed."""


def say(text: str) -> None:
    print(text, flush=True)


def write_model(given: argparse.Namespace, folder: Path) -> Path:
    """Writes the recipe of the runs, and its model with random weights; returns the recipe."""
    config = {**(known_config(given.model) or {}), "max_position_embeddings": 40960}
    case = RlCase(
        model=given.model,
        config=TOY if given.tiny else config,
        num_prompts=4 if given.tiny else 16,
        num_samples=4 if given.tiny else 8,
        mean_length=16 if given.tiny else 200,
        max_new_tokens=24 if given.tiny else 256,
    )
    recipe = write_recipe(case, folder, max(STEPS.values()))
    model, dims = folder / "model", dims_of(folder / "model")
    place = {"device": "cuda", "dtype": torch.bfloat16} if IS_GPU else {"device": "cpu"}
    made = create_model(dims, seed=1, **place)  # type: ignore[arg-type]
    save_model(made, folder / "filled", source_folder=model, tokenizer_folder=model)
    del made
    if IS_GPU:
        torch.cuda.empty_cache()
    shutil.rmtree(model)
    (folder / "filled").rename(model)
    return recipe


def train(part: str, recipe: Path) -> None:
    """One run; its process is the scheduler."""
    if part == "copy":
        Topology.shares_base = False  # type: ignore[assignment, method-assign]
    words = [*WORDS, f"trial_name={part}", f"total_train_steps={STEPS[part]}"]
    config, notes = prepare(str(recipe), words, "train")
    run_train(config, notes, device="cuda" if IS_GPU else "cpu")


def processes(parent: int) -> dict[str, int]:
    """Ids of the role processes of a run, by name."""
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            status = (folder / "stat").read_text().rpartition(") ")[2].split()
            name = (folder / "cmdline").read_text().strip("\0").split("\0")[-1]
        except (OSError, ValueError):
            continue
        if status[1] == str(parent) and status[0] != "Z" and name.endswith("-0"):
            found[name] = int(folder.name)
    return found


def gpu_memory() -> tuple[float, list[str]]:
    """GiB in use on the GPU, and the lines of its processes, if nvidia-smi shows them."""
    free, total = torch.cuda.mem_get_info()
    words = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    shown = subprocess.run(words, capture_output=True, text=True, check=False)
    return (total - free) / 2**30, shown.stdout.splitlines()


def host_gib(pid: int) -> dict[str, float]:
    """Proportional and anonymous memory of a process."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    values = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return {key: round(values[key] / 2**20, 2) for key in ("Pss", "Pss_Anon", "Pss_Shmem")}


def num_steps(records: Path, part: str) -> int:
    files = records.rglob(f"{part}/steps.jsonl")
    return sum(len(file.read_text().splitlines()) for file in files)


def names_in_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def measure(part: str, recipe: Path, given: argparse.Namespace) -> None:
    say(f"\n== {part}")
    before = names_in_memory()
    words = [sys.executable, __file__, "--run", part, "--recipe", str(recipe)]
    records, peak, seen, killed = recipe.parent / "runs", (0.0, [], {}), {}, set()
    start = time.perf_counter()
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as child:
        assert child.stdout is not None
        os.set_blocking(child.stdout.fileno(), False)
        output, steps = b"", 0
        while child.poll() is None:
            output += child.stdout.read() or b""
            found = processes(child.pid)
            try:
                host = {name: host_gib(pid) for name, pid in found.items()}
            except OSError:  # it has ended
                host = {}
            used, apps = gpu_memory() if IS_GPU else (sum(one["Pss"] for one in host.values()), [])
            peak = max(peak, (used, apps, host), key=lambda one: one[0])
            seen |= host
            steps = num_steps(records, part)
            name = KILLS.get(steps) if part == "killed" else None
            if name in found and steps not in killed:
                killed.add(steps)
                say(f"killed {name} (process {found[name]}) after step {steps}")
                os.kill(found[name], signal.SIGKILL)
            time.sleep(0.1)
        output += child.stdout.read() or b""
    say(f"exit code {child.returncode}, {steps} steps, {time.perf_counter() - start:.0f} s")
    say(f"peak: {peak[0]:.2f} GiB in use; processes then (pid, MiB): {peak[1]}")
    say(f"host GiB at that time: {peak[2]}; last seen: {seen}")
    for path in records.rglob(f"{part}/steps.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        kept: list[Any] = [
            {"step": r["step"], "reward": r["rl"]["reward_mean"], "ms": r["wall_clock_ms"]}
            for r in lines
        ]
        say("\n".join(map(str, kept)) + f"\nmemory of the learner: {lines[-1]['memory']}")
    say(f"new in /dev/shm: {sorted(names_in_memory() - before)}")
    text = output.decode(errors="replace")
    say(text[-given.output :])
    for path in sorted(records.rglob("*-0.log")):
        if part in path.parts:
            say(f"-- {path.name}\n{path.read_text()[-1500:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="Qwen3-8B")
    parser.add_argument("--parts", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--output", type=int, default=2500, help="characters of each run's output")
    parser.add_argument("--run", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--recipe", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        train(given.run, given.recipe)
        return
    with tempfile.TemporaryDirectory(prefix="pentad-lent-") as name:
        start = time.perf_counter()
        recipe = write_model(given, Path(name))
        say(f"model written in {time.perf_counter() - start:.0f} s")
        for part in given.parts:
            measure(part, recipe, given)


if __name__ == "__main__":
    main()
