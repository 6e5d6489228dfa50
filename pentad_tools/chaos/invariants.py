"""Invariants of runs after faults: each check raises an error with a message."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from pentad.checkpoint.folders import damage, list_steps, read_checkpoint
from pentad.telemetry.record import comparable
from pentad.telemetry.steps import read_lines
from pentad_tools.chaos.broken_run import ChaosRun, require

NEAR = 1e-4
"""Maximum relative difference of losses in a trial."""
HALF_MADE = (".writing-", ".replaced-", ".aside-", ".receipt")
"""Parts of names of files that a save is writing."""
SLACK_HANDLES = 6
"""Allowed change in the number of open files."""
Invariant = Callable[[ChaosRun, ChaosRun | None], None]
"""Function of a trial and, if there is one, the same run without a fault."""


def check_once(trial: ChaosRun, whole: ChaosRun | None) -> None:
    """Checks that every step was trained exactly once and in order."""
    steps = [line["step"] for line in trial.lines]
    require(steps == list(range(1, len(steps) + 1)), f"steps {steps}: one is missing or twice")
    if whole is not None:
        require(len(steps) == len(whole.lines), f"{len(steps)} steps, not {len(whole.lines)}")


def check_monotone(trial: ChaosRun, whole: ChaosRun | None) -> None:
    """Checks that every start resumes from the committed step and does not train it again."""
    starts = json.loads((trial.records / "manifest.json").read_text())["starts"]
    generations = [start["generation"] for start in starts]
    require(generations == list(range(len(starts))), f"generations {generations}")
    begun = [start["from_step"] for start in starts]
    require(begun == sorted(begun), f"a later start went further back: {begun}")
    last = 0
    for line in read_lines(trial.records / "steps.jsonl", superseded=True):
        where = f"step {line['step']} of generation {line['generation']}"
        require(line["step"] > begun[line["generation"]], f"{where} was restored already")
        require(line["generation"] >= last, f"{where} came after generation {last}")
        last = line["generation"]


def check_equal(trial: ChaosRun, whole: ChaosRun | None) -> None:
    """Checks that weights, records and trained groups are bitwise equal to the reference run."""
    assert whole is not None, "this invariant needs the reference run"
    for mine, theirs in zip(trial.lines, whole.lines, strict=True):
        one, other = comparable(mine), comparable(theirs)
        names = [name for name in one if one[name] != other.get(name)]
        require(not names, f"the record of step {mine['step']} differs in {names}")
    require(weights(trial) == weights(whole), "the weights of the last step differ")
    require(groups(trial) == groups(whole), "the groups that were trained differ")


def check_near(trial: ChaosRun, whole: ChaosRun | None) -> None:
    """Checks that samples of every step are equal, and losses up to the order of summation."""
    assert whole is not None, "this invariant needs the reference run"
    for mine, theirs in zip(trial.lines, whole.lines, strict=True):
        step, apart = mine["step"], abs(mine["loss"] / theirs["loss"] - 1)
        require(apart < NEAR, f"step {step}: the loss differs by {apart:.1e}")
        same = mine["rows_digest"] == theirs["rows_digest"]
        require(same, f"step {step} trained other samples")
    require(groups(trial) == groups(whole), "the groups that were trained differ")


def weights(trial: ChaosRun) -> dict[str, bytes]:
    step = trial.workload.steps
    folders = list((trial.checkpoints / "default").glob(f"epoch*globalstep{step - 1}"))
    require(len(folders) == 1, f"{len(folders)} exports of step {step}")
    return {file.name: file.read_bytes() for file in folders[0].glob("*.safetensors")}


def groups(trial: ChaosRun) -> list[tuple[int, int]]:
    lines = read_lines(trial.records / "samples.jsonl")
    return sorted({(line["step"], line["gid"]) for line in lines})


def check_groups(trial: ChaosRun, whole: ChaosRun | None) -> None:
    """Checks that no prompt was trained in two steps and that no group of a step is missing."""
    found = groups(trial)
    gids = [gid for _, gid in found]
    require(len(gids) == len(set(gids)), "a group was trained in two steps")
    sizes = {sum(step == one for step, _ in found) for one in range(1, trial.workload.steps + 1)}
    require(len(sizes) == 1, f"steps have different numbers of groups: {sorted(sizes)}")


def check_whole(trial: ChaosRun, whole: ChaosRun | None) -> None:
    """Checks that committed checkpoints are intact and no partial checkpoint is left."""
    root, steps = trial.checkpoints, []
    for step in list_steps(root):
        found = read_checkpoint(root, step)
        require(found is not None, f"{root}: the save of step {step + 1} was never committed")
        assert found is not None
        wrong = damage(found)
        require(not wrong, "; ".join(wrong[:1]))
        steps.append(step + 1)
    trained = len(trial.lines)
    require(max(steps, default=0) == trained, f"step {trained} is trained, {steps} are committed")
    left = [path.name for path in root.rglob(".*") if any(mark in path.name for mark in HALF_MADE)]
    require(not left, f"half-made files: {left[:3]}")


def check_leaks(trial: ChaosRun, whole: ChaosRun | None) -> None:
    """Checks that no processes, temporary folders or additional open files remain."""
    trial.wait_gone()
    left = sorted(str(path) for path in trial.shared if path.exists())
    require(not left, f"folders that are left: {left}")
    for start in {start for start, _ in trial.handles}:
        counts = [count for number, count in trial.handles if number == start]
        grown = counts[-1] - counts[0]
        require(grown <= SLACK_HANDLES, f"open files of the scheduler grew from {counts}")


def check_tokens(trial: ChaosRun, whole: ChaosRun | None) -> None:
    """Checks token counts: tokens routed to experts, and with expert parallelism those received and
    computed, equal tokens times experts per token."""
    load = trial.workload
    for line in trial.lines if load.num_experts else ():
        sent = line["kernel"]["tokens_per_expert_mean"] * load.num_experts
        wanted = line["num_tokens"] * load.top_k
        right = math.isclose(sent, wanted, rel_tol=1e-6)
        require(right, f"step {line['step']}: {sent} tokens at experts, not {wanted}")
        exchange = line.get("collective") or {}
        if exchange.get("dispatch_bytes") is not None:  # else all experts are local
            pairs, all_pairs = exchange["pairs_computed"], wanted * len(line["kernel"]["balance"])
            sentence = f"step {line['step']}: {pairs} pairs were computed, not {all_pairs}"
            require(pairs == all_pairs, sentence)


def check_restarts(trial: ChaosRun, whole: ChaosRun | None) -> None:
    """Checks by log and processes that the faulted component was restarted automatically, and
    nothing else."""
    lives = len(json.loads((trial.records / "manifest.json").read_text())["starts"])
    number = f"{lives} groups of ranks in {trial.num_starts} starts of the run"
    if "ranks" in trial.restarts:
        require(lives > trial.num_starts, f"{number}: the ranks were not started again")
    else:
        require(lives == trial.num_starts, f"{number}: ranks were started again")
        require(not (again := restarted(trial, "learner")), f"ranks were started again: {again}")
    served = re.findall(r"(\S+) serves again", trial.said)
    if "samplers" in trial.restarts:
        require(served, "no sampler serves again")
    elif "samplers, perhaps" not in trial.restarts:
        again = sorted({*served, *restarted(trial, "rollout")})
        require(not again, f"samplers were started again: {again}")


def restarted(trial: ChaosRun, role: str) -> list[str]:
    """Roles of this kind that had several processes within one start of the run."""
    seen = Counter((start, name) for start, name, _ in trial.processes if name.startswith(role))
    return sorted({name for (_, name), number in seen.items() if number > 1})


CHECKS: dict[str, Invariant] = {
    "once": check_once,
    "monotone": check_monotone,
    "equal": check_equal,
    "near": check_near,
    "groups": check_groups,
    "whole": check_whole,
    "leaks": check_leaks,
    "tokens": check_tokens,
    "restarts": check_restarts,
}
ALWAYS = ("once", "monotone", "whole", "leaks", "tokens", "restarts")


def newest_state(trial: ChaosRun) -> Path:
    """A tensor file of the newest committed checkpoint."""
    step = list_steps(trial.checkpoints)[0]
    return sorted(trial.checkpoints.glob(f"default/recover_checkpoint/globalstep{step}/*.distcp"))[
        0
    ]
