"""Trains recorded steps of a run again, without a sampler, and compares with their records.

The learners start from the newest recovery checkpoint before the step, or from the run's initial
state; then the kept batches up to the step are trained by the same calls as in the run. Nothing in
the run's folder is written.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError

from pentad.checkpoint.fence import holding
from pentad.checkpoint.folders import COMMIT, Checkpoint, find_checkpoints, state_folder
from pentad.config.aliases import config_from_record
from pentad.config.load import record_values, with_hub_names
from pentad.config.resolve import with_absolute_paths
from pentad.config.rules.checkpoint import judge_changes
from pentad.config.rules.start import rank_problems
from pentad.config.schema import SCORERS, Config
from pentad.config.topology import scorers
from pentad.core.device import pick_device
from pentad.core.errors import Problem, RunError, UserError, raise_problems
from pentad.core.lock import FolderLock
from pentad.core.types import Group
from pentad.planner.hub import with_local_models
from pentad.runtime.calls import RankCalls
from pentad.runtime.group_calls import GroupSettings, RankGroup
from pentad.runtime.learner_client import LearnerClient
from pentad.runtime.local_roles import LocalRuntime
from pentad.runtime.rank import Rank, rank_from_environment
from pentad.runtime.rank_host import JOIN_S, specs_of_ranks
from pentad.telemetry.record import plain_json
from pentad.telemetry.steps import read_lines
from pentad.trainer.context import place_of
from pentad.trainer.preflight import start_facts
from pentad.trainer.rank.learners import Role, roles_of
from pentad.trainer.rank.service import LearnerService
from pentad.trainer.rank.update import BatchFacts, BatchResult
from pentad.trainer.records import grad_norm_of, loss_of
from pentad.trainer.run_folders import checkpoint_path
from pentad.trainer.saving.batches import kept_steps, read_batch, read_head

TOLERANCES = {"float32": 1e-4, "bfloat16": 5e-2}
"""Tolerances for sums added in another order: absolute for a loss, relative for a norm. Each step
trained before the replayed one adds the same amount."""


@dataclass(frozen=True, slots=True)
class ReplayedNumber:
    """A number of a step: its recorded and its replayed value."""

    step: int
    name: str
    record: float | None
    replay: float | None
    tolerance: float

    @property
    def is_equal(self) -> bool:
        return self.record == self.replay

    @property
    def difference(self) -> float:
        if self.record is None or self.replay is None:
            return 0.0 if self.is_equal else math.inf
        return abs(self.record - self.replay)

    @property
    def is_within(self) -> bool:
        return self.difference <= self.tolerance


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of a replay."""

    begin: str
    """Describes the starting point."""
    differences: list[str]
    """Describes differences between the run and this machine; if empty, numbers must be equal."""
    compared: list[ReplayedNumber]

    @property
    def is_good(self) -> bool:
        return all(one.is_within for one in self.compared)


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """The inputs and steps of a replay."""

    config: Config
    checkpoint: Checkpoint | None
    folder: Path
    """The folder of the batches, absolute."""
    batches: list[dict[str, Any]]
    """The head of each batch file (`batches.read_head`)."""
    records: Mapping[int, Mapping[str, Any]]

    @property
    def first(self) -> int:
        """The first step to be trained."""
        return int(self.batches[0]["step"])

    @property
    def given(self) -> dict[str, Any]:
        """Arguments for building a rank, as JSON values."""
        last = self.batches[-1]
        return {
            "config": with_absolute_paths(self.config).model_dump(mode="json"),
            "scored_apart": list(scorers(config_from_record(last["config"]))),
            "threads": last["place"]["threads"],
        }

    @property
    def begin(self) -> str:
        if self.checkpoint is None:
            return "the weights the run began with"
        return f"the recovery checkpoint after step {self.checkpoint.step + 1}"


def run_replay(folder: Path, step: int, *, layout: str | None, device: str, dump: str) -> Replay:
    """Runs a replay; UserError if an input is missing. `dump`: file for the log-probs of the
    step."""
    if rank_from_environment() is not None:
        rule, remedy = "replay starts its ranks itself", "start it without torchrun"
        raise UserError(Problem("WORLD_SIZE is set", rule, remedy))
    with reading_run(folder):
        plan, place = make_plan(folder, step, layout), pick_device(device)
        with open_learner(plan, place) as learner:
            return replay(plan, learner, str(Path(dump).absolute()) if dump else "")


@contextmanager
def open_learner(plan: ReplayPlan, device: torch.device) -> Iterator[LearnerClient]:
    """Opens a learner: one rank in this process, or a process for each rank."""
    config = plan.config
    world = config.component("actor").world
    if world == 1:
        with RankCalls(serve_replay(plan.given, Rank(), device)) as learner:
            yield learner
        return
    raise_problems(rank_problems(config, start_facts(device, "train")))
    with tempfile.TemporaryDirectory(prefix="pentad-replay-") as logs:
        specs = specs_of_ranks(
            "replay",
            serve_replay,
            plan.given,
            [Path(logs) / f"rank-{rank}.log" for rank in range(world)],
            device=device.type,
            devices=range(world) if device.type == "cuda" else (),
            generation=0,
            deterministic=config.actor.archon.use_deterministic_algorithms,
            seed=config.seed,
        )
        settings = GroupSettings(stall_s=config.stall_abort_s, timeout_s=JOIN_S)
        with RankGroup(LocalRuntime(), specs, settings, device) as ranks:
            yield ranks


def serve_replay(given: Mapping[str, Any], rank: Rank, device: torch.device) -> ReplayService:
    """Makes the service of one rank, in its process."""
    config = Config.model_validate(given["config"])
    config.register_models()
    service = ReplayService(config, rank, device)
    service.scored_apart = given["scored_apart"]
    if given["threads"] and device.type == "cpu":
        torch.set_num_threads(given["threads"])
    return service


class ReplayService(LearnerService):
    """A learner that also returns its hardware and versions, and the policy's outputs for each
    sample."""

    def __init__(self, config: Config, rank: Rank, device: torch.device) -> None:
        super().__init__(config, rank, device)
        self.usual_threads = torch.get_num_threads()

    def place(self) -> dict[str, Any]:
        return place_of(self.device, self.config.layout("actor"))

    def dump(self, file: str) -> None:
        assert self.result is not None, "a batch is trained first"
        write_dump(Path(file), self.update.groups, self.result)

    def close(self, *, is_failed: bool) -> None:
        torch.set_num_threads(self.usual_threads)
        super().close(is_failed=is_failed)


@contextmanager
def reading_run(folder: Path) -> Iterator[None]:
    """Locks the run while active; UserError if the folder is no run, or the run is in progress."""
    if not (folder / "manifest.json").is_file():
        remedy = "give the folder of a run's records: {fileroot}/logs/USER/EXPERIMENT/TRIAL"
        raise UserError(Problem(f"run = {folder}", "is not the folder of a run", remedy))
    try:
        lock = FolderLock(folder, f"run = {folder}")
    except OSError:  # a read-only folder: no run uses it
        yield
        return
    with closing(lock):
        yield


def make_plan(folder: Path, step: int, layout: str | None) -> ReplayPlan:
    """Reads all inputs of the replay except tensors."""
    records = {line["step"]: line for line in read_lines(folder / "steps.jsonl")}
    if step not in records:
        rule = f"the run has recorded steps 1 to {max(records)}" if records else "it has no steps"
        raise UserError(Problem(f"--step = {step}", rule))
    kept = kept_steps(folder / "batches")
    if step not in kept:
        has = f"batches of steps {kept[0]} to {kept[-1]}" if kept else "no batches"
        rule = f"its batch was not kept: {folder / 'batches'} has {has}"
        remedy = "telemetry.keep_batches sets how many a run keeps"
        raise UserError(Problem(f"--step = {step}", rule, remedy))
    place = (folder / "batches").absolute()
    last = _read_whole(place, step)
    config = with_local_models(config_of(last, folder, layout))
    found = find_checkpoints(checkpoint_path(config), report=lambda sentence: None)
    checkpoint = next((one for one in found if one.step + 1 < step), None)
    first = 1 if checkpoint is None else checkpoint.step + 2
    if missing := sorted(set(range(first, step)) - set(kept)):
        raise UserError(missing_batches_problem(config, step, first, missing))
    before = [_read_whole(place, number) for number in range(first, step)]
    for batch in before:
        changes = judge_changes(with_hub_names(batch["config"]), with_hub_names(last["config"]))
        if changes.refused:
            where = changes.refused[0].where
            rule = f"the config changed between step {batch['step']} and step {step}, in {where}"
            remedy = "replay a step whose checkpoint is after the change"
            raise UserError(Problem(f"--step = {step}", rule, remedy))
    return ReplayPlan(config, checkpoint, place, [*before, last], records)


def _read_whole(folder: Path, step: int) -> dict[str, Any]:
    """Returns the head of a batch file; UserError if its groups are damaged."""
    head = read_head(folder, step)
    read_batch(folder, step, head["sha256"])
    return head


def missing_batches_problem(config: Config, step: int, first: int, missing: list[int]) -> Problem:
    begins = "no recovery checkpoint before it is left" if first == 1 else "the checkpoint before "
    if first > 1:
        begins += f"it is that of step {first - 1}"
    steps = f"step {missing[0]}" if len(missing) == 1 else f"{len(missing)} of the steps between"
    rule = f"{begins} in {checkpoint_path(config)}, and the batch of {steps} was not kept"
    remedy = (
        "in the next run save more often (recover.freq_steps, recover.keep_last) or keep more "
        "batches (telemetry.keep_batches)"
    )
    return Problem(f"--step = {step}", rule, remedy)


def config_of(batch: Mapping[str, Any], folder: Path, layout: str | None) -> Config:
    """Returns the config of the step, with paths changed to the run's present folder."""
    values = dict(batch["config"])
    if folder.resolve().parents[2].name == "logs":
        values["fileroot"] = str(folder.resolve().parents[3])
    try:
        config = config_from_record(values | ({"allocation_mode": layout} if layout else {}))
    except ValidationError as error:
        rule = f"its config is of another version: {error.errors()[0]['msg']}"
        raise UserError(Problem(f"step {batch['step']}", rule)) from error
    allocation = config.parsed_allocation
    if allocation is None or allocation.find("actor") is None:
        remedy = "for example --layout archon:d2t2, or archon:d1 for one process"
        raise UserError(Problem(f"--layout = {layout}", "is not a layout of the trainer", remedy))
    return config


def replay(plan: ReplayPlan, learner: LearnerClient, dump: str = "") -> Replay:
    config, last = plan.config, plan.batches[-1]
    roles = roles_of(config)
    learner.call_all("build", **last["size"])
    learner.call_all("load_tags", has=sorted(restore(plan, learner, roles)), step=plan.first - 1)
    changed = differences(last["place"], learner.query("place"))
    tolerance = TOLERANCES[config.actor.compute_dtype(learner.device.type)] if changed else 0.0
    every = None if "ref" in plan.given["scored_apart"] else config.ref_update_interval
    compared: list[ReplayedNumber] = []
    for number, batch in enumerate(plan.batches, 1):
        step = int(batch["step"])
        learner.call_all(
            "train_kept",
            folder=str(plan.folder),
            step=step,
            number=step - 1,
            digest=batch["sha256"],
            num_chunks=batch["config"]["num_iters_per_train_update"],
        )
        facts = BatchFacts.read(learner.query("measure"))
        compared += compare(step, plan.records[step], facts, number * tolerance)
        if every and step % every == 0:
            learner.call_all("save_tag", tag="ref")
    if dump:
        learner.query("dump", file=dump)
    return Replay(plan.begin, changed, compared)


def restore(plan: ReplayPlan, learner: LearnerClient, roles: Sequence[Role]) -> set[str]:
    """Restores the learners from the checkpoint, if any; returns their weight tags."""
    checkpoint = plan.checkpoint
    if checkpoint is None:
        return set()
    root, step, tags = str(checkpoint.root.absolute()), checkpoint.step, set[str]()
    with holding(checkpoint.root / checkpoint.info / COMMIT):
        for role in roles:
            given = {"root": root, "step": step, "folder": state_folder(role, step)}
            counters = learner.call_all("restore_state", role=role, **given)
            tags |= set(counters.get("tags", ())) if role == "actor" else set()
    before, values = with_hub_names(checkpoint.manifest.facts["config"]), record_values(plan.config)
    return tags - {tag for tag in SCORERS if before[tag]["path"] != values[tag]["path"]}


def compare(
    step: int, record: Mapping[str, Any], facts: BatchFacts, tolerance: float
) -> list[ReplayedNumber]:
    steps, critic = facts.steps, facts.critic_steps
    found = plain_json(
        {
            "loss": loss_of(steps),
            "grad_norm": grad_norm_of(steps),
            "lr": steps[-1].lr,
            "critic_loss": loss_of(critic) if critic else None,
            "critic_grad_norm": grad_norm_of(critic) if critic else None,
        }
    )
    lines = []
    for name in ("loss", "grad_norm", "lr", "critic_loss", "critic_grad_norm"):
        known = record["rl"][name] if name.startswith("critic") else record[name]
        if known is None and found[name] is None:
            continue
        scale = abs(known or 0.0) if name.endswith("grad_norm") else max(1.0, abs(known or 0.0))
        lines.append(ReplayedNumber(step, name, known, found[name], tolerance * scale))
    return lines


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [f"{key} was {before[key]}, is {now[key]}" for key in now if before[key] != now[key]]


def write_dump(file: Path, groups: Sequence[Group], result: BatchResult) -> None:
    """Writes a JSON line for each sample of the step's first update."""
    names = {
        id(sample): (group.gid, index)
        for group in groups
        for index, sample in enumerate(group.samples)
    }
    try:
        with file.open("w", encoding="utf-8") as out:
            for sample, logprobs in result.scored:
                gid, index = names[id(sample)]
                line = {
                    "gid": gid,
                    "index": index,
                    "reward": sample.reward,
                    "ids": sample.ids.tolist(),
                    "mask": sample.mask.astype(np.int8).tolist(),
                    "rollout_logprobs": sample.rollout_logprobs.tolist(),
                    "logprobs": logprobs.float().cpu().tolist(),
                }
                out.write(json.dumps(line) + "\n")
    except OSError as error:
        raise RunError(f"--dump = {file}: cannot be written ({error.strerror})") from error
