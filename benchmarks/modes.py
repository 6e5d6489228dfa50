"""One recipe in all modes on this machine, with ragged lengths: `python benchmarks/modes.py`.

The task is to sort 3 to 24 digits, most of them few: answers are ragged however well the policy
does, and a sampler works on few sequences for the greater part of a batch. The toy model begins
with some steps of imitation, so that its reward rises. On a CPU every process is kept on cores:
learner and sampler on one each, colocate on the same two, with the better of one and two threads as
the base. Printed for each mode: trained tokens a second, where the trainer's time went, the lag of
trained tokens, and the reward at the same times of the wall clock.

    python benchmarks/modes.py --device cuda --share-gpu --model DIR gconfig.max_new_tokens=256

takes a model of yours and an arithmetic task (or `--data` with `reward.fn=...`), and with
`--share-gpu` learner and sampler are two processes on one GPU. Words at the end override keys.

    python benchmarks/modes.py --cases colocate --simulate 1+1 4+4

runs the real budget, ledger and pumps on a virtual clock with the times that colocate was measured
to take: what N learners and M samplers would give. A sampler's decoding step takes `a + c * running
sequences`, fitted to the measured steps; training is assumed to scale with the learners.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import logging
import multiprocessing
import os
import random
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "invariants"))

import simulation  # noqa: E402
from simulation import SimulatedLearner, Simulation, VirtualLoop, World  # noqa: E402

from pentad.cli.demo import recipe  # noqa: E402
from pentad.core.types import Group, Prompt  # noqa: E402
from pentad.data.toy import write_model  # noqa: E402
from pentad.planner.prepare import prepare  # noqa: E402
from pentad.rollout.drafts import Draft  # noqa: E402
from pentad.runtime import local_roles  # noqa: E402
from pentad.runtime.roles import RoleSpec  # noqa: E402
from pentad.telemetry.steps import read_lines  # noqa: E402
from pentad.trainer.records import TrainedBatch  # noqa: E402
from pentad.trainer.sources.examples import run_sft  # noqa: E402
from pentad.trainer.sources.rollouts import run_train  # noqa: E402

SEPARATE = "scheduler.processes=separate"
CASES = {
    "colocate": ("mode=colocate",),
    "colocate, 2 threads": ("mode=colocate",),
    "colocate, oversample 1.5": ("mode=colocate", "rollout.oversample=1.5"),
    "colocate, oversample 2": ("mode=colocate", "rollout.oversample=2"),
    "hybrid K=1, threads": ("mode=hybrid", "max_staleness=1", "scheduler.processes=one"),
    "hybrid K=0": ("mode=hybrid", SEPARATE),
    "hybrid K=1": ("mode=hybrid", "max_staleness=1", SEPARATE),
    "async K=1": ("mode=async", "max_staleness=1", SEPARATE),
    "async K=2": ("mode=async", "max_staleness=2", SEPARATE),
}
BASES = ("colocate", "colocate, 2 threads")
GATES = ("rollout", "train", "publish")
"""What a step waits for or does; the rest is saving and recording."""
WARM = 2
"""Steps at the beginning that are not counted."""
BATCH, NUM_SAMPLES = 16, 8


# The task.


def write_digits(folder: Path, draw: random.Random) -> None:
    """Digits to sort, of which many are few; the toy model knows a token for each."""
    for name, key, num in (("train", "answer", 4000), ("sft", "response", 2000)):
        lines = []
        for _ in range(num):
            size = min(24, 3 + int(draw.expovariate(1 / 4)))
            digits = "".join(draw.choices("0123456789", k=size))
            lines.append(json.dumps({"prompt": f"{digits}>", key: "".join(sorted(digits))}))
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def write_sums(folder: Path, draw: random.Random) -> None:
    """Sums for a model that knows words."""
    lines = []
    for _ in range(4000):
        first, second = draw.randint(10, 99), draw.randint(10, 99)
        asked = f"What is {first} + {second}? Answer with the number."
        row = {"messages": [{"role": "user", "content": asked}], "answer": str(first + second)}
        lines.append(json.dumps(row))
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")


def prepare_task(root: Path, given: argparse.Namespace) -> list[str]:
    """The overrides that name model, data and reward."""
    draw = random.Random(1)
    if given.model is not None:
        write_sums(root, draw)
        data = [f"train_dataset.path={given.data or root / 'train.jsonl'}"]
        data += [] if given.data else ["train_dataset.messages_key=messages", "reward.fn=numeric"]
        return [f"actor.path={given.model}", "gconfig.max_new_tokens=128", *data]
    write_model(root / "model")
    write_digits(root, draw)
    words = [f"fileroot={root}", f"actor.path={root / 'model'}", f"total_train_steps={given.warm}"]
    words += [f"train_dataset.path={root / 'sft.jsonl'}"]
    config, notes = prepare(recipe("demo_sft.yaml"), words, "sft")
    warm = run_sft(config, notes, device="cpu").model
    return [
        *(f"actor.path={warm}", f"train_dataset.path={root / 'train.jsonl'}"),
        *("reward.fn=sort_digits", "gconfig.max_new_tokens=32", "actor.optimizer.lr=4e-4"),
    ]


# A run.


def pin_roles(is_colocate: bool) -> None:
    """Learner and sampler on a core each, all else beside the learner or on a third; colocate on
    the two. Processes have the cores before they start a thread."""
    cores = sorted(os.sched_getaffinity(0))
    own = {"learner": (cores[0],), "rollout": (cores[1 % len(cores)],)}
    rest = cores[:2] if is_colocate else cores[2:3] or cores[:1]
    os.sched_setaffinity(0, rest)

    class Pinned(local_roles.LocalProcess):
        def __init__(self, spec: RoleSpec, token: str) -> None:
            role = spec.name.rpartition("-")[0]
            super().__init__(replace(spec, cores=own.get(role, tuple(rest))), token)

    local_roles.LocalProcess = Pinned  # type: ignore[misc]


def run_case(name: str, words: list[str], device: str) -> Path:
    """In a process of its own; the folder of its records."""
    is_one = SEPARATE not in CASES[name]
    if device == "cpu":
        torch.set_num_threads(2 if "2 threads" in name else 1)
        pin_roles(is_one)
    config, notes = prepare(None, [*words, *CASES[name]], "train")
    return run_train(config, notes, device=device).records


@dataclass
class Measured:
    """A run's steps after those that warm up."""

    name: str
    steps: list[dict[str, Any]]
    lengths: list[list[int]]
    """Sampled tokens of the samples of each group."""
    began_s: float

    @property
    def seconds(self) -> float:
        return float(self.steps[-1]["time_s"] - self.began_s)

    @property
    def speed(self) -> float:
        """Trained tokens a second."""
        return float(sum(step["num_tokens"] for step in self.steps)) / self.seconds

    def phase_s(self, *names: str) -> float:
        """Of a step, on average."""
        return sum(step["phases"].get(n, 0.0) for step in self.steps for n in names) / (
            1e3 * len(self.steps)
        )

    def reward_at(self, seconds: float) -> float:
        """Mean of the last steps before that time, five at most."""
        before = [s for s in self.steps if s["time_s"] <= self.began_s + seconds + 1e-3]
        last = before[-5:] or self.steps[:1]
        return sum(step["rl"]["reward_mean"] for step in last) / len(last)


def read_case(name: str, records: Path) -> Measured:
    steps = read_lines(records / "steps.jsonl")
    groups: dict[int, list[int]] = collections.defaultdict(list)
    for line in read_lines(records / "samples.jsonl"):
        if line["step"] > WARM:
            groups[line["gid"]].append(line["num_sampled"])
    return Measured(name, steps[WARM:], list(groups.values()), steps[WARM - 1]["time_s"])


def row(run: Measured, base: float, marks: list[float]) -> str:
    whole = run.phase_s(*{name for step in run.steps for name in step["phases"]})
    lags: collections.Counter[str] = collections.Counter()
    for step in run.steps:
        lags.update(step["rl"]["staleness"])
    split = [run.phase_s(gate) / whole for gate in GATES]
    lag = ", ".join(f"{key}: {n / sum(lags.values()):.0%}" for key, n in sorted(lags.items()))
    cells = [run.name, f"{run.speed:.0f}", f"{run.speed / base:.2f}"]
    cells += [f"{share:.0%}" for share in (*split, 1 - sum(split))]
    cells += [lag, ", ".join(f"{run.reward_at(mark):.3f}" for mark in marks)]
    return "| " + " | ".join(cells) + " |"


# What other numbers of devices would give.


@dataclass
class Times:
    """Measured of colocate on one device."""

    step_s: float
    """Of decoding, whatever the number of sequences."""
    token_s: float
    """More for each sequence that is decoded."""
    train_s: float
    publish_s: float


def fit(run: Measured) -> Times:
    """Decoding a batch takes as many steps as its longest answer has tokens."""
    longest = [step["rl"]["length_max"] for step in run.steps]
    tokens = [step["rl"]["length_mean"] * step["num_samples"] for step in run.steps]
    seconds = np.array([step["phases"]["rollout"] / 1e3 for step in run.steps])
    both = np.array([longest, tokens]).T
    step_s, token_s = np.linalg.lstsq(both, seconds, rcond=None)[0]
    if min(step_s, token_s) < 0:  # lengths hardly differ: all of it by the steps
        step_s, token_s = float(seconds.sum() / sum(longest)), 0.0
    return Times(float(step_s), float(token_s), run.phase_s("train"), run.phase_s("publish"))


class TimedLearner(SimulatedLearner):
    async def run(self, function: Any) -> Any:
        return function()


class TimedRun(Simulation):
    """Groups have the lengths that were measured; replicas decode all they have, step by step."""

    def __init__(self, world: World, times: Times, lengths: list[list[int]]) -> None:
        super().__init__(world, 0)
        self.times, self.lengths = times, lengths
        self.running: list[list[list[Any]]] = [[] for _ in range(world.num_replicas)]
        """By replica: tokens left and the future of each sequence."""
        self.num_tokens = 0

    async def rollout(self, prompt: Prompt, attempt: int, draft: Draft) -> Group:
        own = self.lengths[prompt.gid % len(self.lengths)]
        place = min(range(len(self.running)), key=lambda n: len(self.running[n]))
        version = self.replicas[place].version
        loop = asyncio.get_running_loop()
        sequences = [[length, loop.create_future()] for length in own]
        if not self.running[place]:
            self.beside(self._decode(self.running[place]))
        self.running[place] += sequences
        await asyncio.gather(*(future for _, future in sequences))
        self.num_tokens += sum(own)
        return Group(prompt, [simulation.sample(version, version)], attempt)

    async def _decode(self, running: list[list[Any]]) -> None:
        await asyncio.sleep(0)  # all that come at once begin at once
        while running:
            await asyncio.sleep(self.times.step_s + self.times.token_s * len(running))
            for one in running:
                one[0] -= 1
            for one in [one for one in running if one[0] <= 0]:
                running.remove(one)
                one[1].set_result(None)

    async def pass_time(self, mean_s: float) -> None:
        await asyncio.sleep(mean_s)

    def after_step(self, trained: TrainedBatch) -> None:
        """It is never started again."""


def simulate(
    times: Times, run: Measured, *, learners: int, samplers: int, staleness: int, is_shared: bool
) -> float:
    """Sampled tokens a second."""
    simulation.SimulatedLearner = TimedLearner  # type: ignore[misc]
    simulation.MAX_TURNS = 10**9
    world = World(
        groups_per_batch=run.steps[0]["num_groups"],
        num_batches=40,
        max_staleness=staleness,
        num_replicas=samplers,
        is_shared=is_shared,
        train_s=times.train_s / learners,
        publish_s=times.publish_s,
    )
    timed, loop = TimedRun(world, times, run.lengths), VirtualLoop()
    assert loop.run_until_complete(timed._start(None))
    seconds = loop.time()
    timed._close(loop)
    return timed.num_tokens / seconds


def show_simulated(run: Measured, layouts: list[str]) -> None:
    times = fit(run)
    measured = sum(map(sum, run.lengths)) / run.seconds
    alone = simulate(times, run, learners=1, samplers=1, staleness=0, is_shared=True)
    print(
        f"\nSimulated from {run.name}: a decoding step {1e3 * times.step_s:.2f} ms and "
        f"{1e6 * times.token_s:.0f} us a sequence, training {times.train_s:.2f} s, publish "
        f"{times.publish_s:.2f} s a step. Colocate on one device: {measured:.0f} sampled tokens/s "
        f"measured, {alone:.0f} simulated.\n\n| devices | colocate | K=0 | K=1 | K=2 | best ratio |"
        "\n|---|---|---|---|---|---|"
    )
    for layout in layouts:
        learners, samplers = (int(number) for number in layout.split("+"))
        both = learners + samplers
        base = simulate(times, run, learners=both, samplers=both, staleness=0, is_shared=True)
        found = [
            simulate(times, run, learners=learners, samplers=samplers, staleness=k, is_shared=False)
            for k in (0, 1, 2)
        ]
        cells = [layout, *(f"{speed:.0f}" for speed in (base, *found)), f"{max(found) / base:.2f}"]
        print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--cases", nargs="*", choices=list(CASES), metavar="CASE")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--model", help="folder of a model to begin with; default: the toy")
    parser.add_argument("--data", help="JSON lines to train on, with --model")
    parser.add_argument("--warm", type=int, default=60, help="steps of imitation of the toy")
    parser.add_argument("--share-gpu", action="store_true", help="two processes on one GPU")
    parser.add_argument("--simulate", nargs="+", default=[], metavar="N+M")
    given, overrides = parser.parse_known_args()
    names = given.cases or [n for n in CASES if given.device == "cpu" or "threads" not in n]
    if given.device == "cpu":
        os.environ["OMP_NUM_THREADS"] = "1"  # of every process; the model is too small for more
    torch.set_num_threads(1)
    runs = []
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="pentad-modes-") as folder:
        root = Path(folder)
        task = prepare_task(root, given)
        common = [
            *(f"fileroot={root}", "actor.gradient_checkpointing=false", "seed=7"),
            *(f"train_dataset.batch_size={BATCH}", f"gconfig.n_samples={NUM_SAMPLES}"),
            *("rollout.max_running=512", f"total_train_steps={given.steps + WARM}"),
            *("total_train_epochs=99", "recover.mode=off", "telemetry.keep_batches=0"),
            *("telemetry.samples_per_step=100000", *task),
        ]
        for number, name in enumerate(names):
            words = [*common, f"trial_name=case{number}", *overrides]
            if given.share_gpu and SEPARATE in CASES[name]:
                words += ["cluster.share_gpus=true", "allocation_mode=embedded:d1+archon:d1"]
            with ProcessPoolExecutor(1, mp_context=context) as pool:
                records = pool.submit(run_case, name, words, given.device).result()
            runs.append(read_case(name, records))
            print(f"{name}: {runs[-1].speed:.0f} tokens/s, {runs[-1].seconds:.0f} s", flush=True)
    bases = [run.speed for run in runs if run.name in BASES] or [runs[0].speed]
    least = min(run.seconds for run in runs)
    marks = [least * share for share in (0.25, 0.5, 1.0)]
    when = "reward at " + ", ".join(f"{mark:.0f}" for mark in marks) + " s"
    head = ("mode", "tokens/s", "ratio", *GATES, "other", "lag", when)
    print("\n| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    for run in runs:
        print(row(run, max(bases), marks))
    if given.simulate:
        logging.disable(logging.WARNING)
        show_simulated(runs[0], given.simulate)


if __name__ == "__main__":
    main()
