"""One recipe in all modes on this machine, with ragged lengths: `python benchmarks/modes.py`.

A model with random weights answers with 1 to 64 tokens, most of them few: the sampler works on few
sequences for the greater part of a batch. Printed for each mode: trained tokens a second, where the
trainer's time went, the lag of trained tokens, and the reward against the wall clock. Modes with a
sampler of their own gain where trainer and sampler run at once: as processes, with a core each. As
threads of one process they share one interpreter.
"""

from __future__ import annotations

import argparse
import collections
import tempfile
from pathlib import Path

import torch

from pentad.data.toy import write_model, write_task
from pentad.planner.prepare import prepare
from pentad.telemetry.steps import read_lines
from pentad.trainer.assemble import run_train

SEPARATE = "scheduler.processes=separate"
CASES = {
    "colocate": ("mode=colocate",),
    "hybrid K=1, threads": ("mode=hybrid", "max_staleness=1"),
    "hybrid K=0": ("mode=hybrid", SEPARATE),
    "hybrid K=1": ("mode=hybrid", "max_staleness=1", SEPARATE),
    "async K=1": ("mode=async", "max_staleness=1", SEPARATE),
    "async K=2": ("mode=async", "max_staleness=2", SEPARATE),
}
GATES = ("rollout", "train", "publish")
"""What a step waits for or does; the rest is saving and recording."""


def run_case(root: Path, number: int, overrides: tuple[str, ...], num_steps: int) -> list[dict]:
    words = [
        *(f"fileroot={root}", f"trial_name=case{number}", f"actor.path={root / 'model'}"),
        *("actor.init_from_scratch=true", "actor.gradient_checkpointing=false", "seed=7"),
        *(f"train_dataset.path={root / 'train.jsonl'}", "train_dataset.batch_size=16"),
        *("gconfig.n_samples=8", "gconfig.max_new_tokens=64", "reward.fn=sort_digits"),
        *("rollout.max_running=64", f"total_train_steps={num_steps}", "total_train_epochs=99"),
        *("recover.mode=off", "telemetry.keep_batches=0", *overrides),
    ]
    config, notes = prepare(None, words, "train")
    return read_lines(run_train(config, notes, device="cpu").records / "steps.jsonl")


def row(name: str, steps: list[dict], base: float) -> tuple[str, float]:
    """One line of the table; the first two steps warm up."""
    steps = steps[2:]
    seconds = steps[-1]["time_s"] - steps[0]["time_s"]
    speed = sum(step["num_tokens"] for step in steps[1:]) / seconds
    phases: collections.Counter[str] = collections.Counter()
    lags: collections.Counter[str] = collections.Counter()
    for step in steps:
        phases.update(step["phases"])
        lags.update(step["rl"]["staleness"])
    whole, tokens = sum(phases.values()), sum(lags.values())
    split = [f"{phases[gate] / whole:.0%}" for gate in GATES]
    rest = 1 - sum(phases[gate] for gate in GATES) / whole
    lag = ", ".join(f"{key}: {count / tokens:.0%}" for key, count in sorted(lags.items()))
    half, last = steps[len(steps) // 2], steps[-1]
    rewards = ", ".join(
        f"{one['rl']['reward_mean']:.3f} at {one['time_s'] - steps[0]['time_s']:.0f} s"
        for one in (half, last)
    )
    cells = (name, f"{speed:.0f}", f"{speed / (base or speed):.2f}", *split, f"{rest:.0%}")
    return "| " + " | ".join((*cells, lag, rewards)) + " |", speed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_model(root / "model")
        write_task(root, seed=1, num_train=4000, num_sft=1, num_valid=1)
        rows, base = [], 0.0
        for number, name in enumerate(given.cases):
            steps = run_case(root, number, CASES[name], given.steps)
            line, speed = row(name, steps, base)
            base = base or speed
            rows.append(line)
    head = ("mode", "tokens/s", "ratio", *GATES, "other", "lag", "reward")
    print("\n| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|\n" + "\n".join(rows))


if __name__ == "__main__":
    main()
