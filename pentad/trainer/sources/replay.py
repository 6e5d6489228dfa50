"""Recorded steps as the source of a run's batches: `pentad replay` trains them again, without a
sampler, and compares the numbers with their records.

The learners start from the newest recovery checkpoint before the step, or from the run's initial
state. The replay has a temporary run folder; nothing in the folder of the recorded run is written.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError

from pentad.checkpoint.folders import Checkpoint, find_checkpoints
from pentad.checkpoint.section import CheckpointConfig
from pentad.config.aliases import config_from_record
from pentad.config.load import with_hub_names
from pentad.config.rules.checkpoint import judge_changes
from pentad.config.rules.start import rank_problems
from pentad.config.schema import Config
from pentad.config.topology import scorers
from pentad.core.device import pick_device
from pentad.core.errors import Problem, RunError, UserError, raise_problems
from pentad.core.lock import FolderLock
from pentad.core.section import Section
from pentad.core.sizes import RunSize
from pentad.core.types import Group
from pentad.planner.hub import with_local_models
from pentad.runtime.rank import Rank, rank_from_environment
from pentad.telemetry.section import TelemetryConfig
from pentad.telemetry.steps import read_lines
from pentad.trainer.context import RunSummary, place_of
from pentad.trainer.preflight import start_facts
from pentad.trainer.processes.ranks import run_over_ranks
from pentad.trainer.rank.learners import roles_of, trained_dims
from pentad.trainer.rank.service import LearnerService
from pentad.trainer.rank.update import BatchResult, places_of
from pentad.trainer.records import TrainedBatch
from pentad.trainer.resume import replaced_weights
from pentad.trainer.run import Run, RunInputs
from pentad.trainer.run_folders import checkpoint_path
from pentad.trainer.saving.batches import kept_steps, read_batch, read_head
from pentad.trainer.saving.recovery import restore_learners
from pentad.trainer.sources.kept_groups import KeptGroups, KeptSource

TOLERANCES = {"float32": 1e-4, "bfloat16": 5e-2}
"""Tolerances for sums added in another order: absolute for a loss, relative for a norm. Each step
trained before the replayed one adds the same amount."""
NUMBERS = ("loss", "grad_norm", "lr", "critic_loss", "critic_grad_norm")
"""The compared fields of a record; those of a critic are in its block `rl`."""


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
    """The config of the last step."""
    checkpoint: Checkpoint | None
    data: KeptGroups
    """The steps to be trained."""
    records: Mapping[int, Mapping[str, Any]]

    @property
    def last(self) -> Mapping[str, Any]:
        return self.data.heads[-1]

    @property
    def apart(self) -> list[str]:
        """Tags of frozen weights whose columns were recorded with the groups, also used if the
        replay has another layout."""
        return list(scorers(config_from_record(self.last["config"])))

    @property
    def begin(self) -> str:
        if self.checkpoint is None:
            return "the weights the run began with"
        return f"the recovery checkpoint after step {self.checkpoint.step + 1}"

    def config_in(self, folder: Path) -> Config:
        """Returns the config of the replay, whose run folder is in `folder`. Only the recorded run
        saves, sends its records elsewhere, and ends by its guards."""
        config, step = self.config, self.data.steps[-1]

        def changed(section: Section, **keys: Any) -> Section:
            return section.model_copy(update=keys)

        processes = "one" if config.component("actor").world == 1 else "auto"
        return config.model_copy(
            update={
                "fileroot": str(folder),
                "total_train_steps": step,
                "ref_update_interval": None if "ref" in self.apart else config.ref_update_interval,
                "checkpoint": CheckpointConfig(),
                "telemetry": TelemetryConfig(keep_batches=0, samples_per_step=0),
                "recover": changed(config.recover, mode="off"),
                "elastic": changed(config.elastic, enabled=False),
                "scheduler": changed(config.scheduler, type="local", processes=processes),
                "guards": changed(
                    config.guards,
                    patience_steps=step + 1,
                    max_nonfinite_share=1.0,
                    max_logprob_gap=None,
                ),
            }
        )


def run_replay(folder: Path, step: int, *, layout: str | None, device: str, dump: str) -> Replay:
    """Runs a replay; UserError if an input is missing. `dump`: file for the log-probs of the
    step."""
    if rank_from_environment() is not None:
        rule, remedy = "replay starts its ranks itself", "start it without torchrun"
        raise UserError(Problem("WORLD_SIZE is set", rule, remedy))
    with reading_run(folder), tempfile.TemporaryDirectory(prefix="pentad-replay-") as scratch:
        plan = make_plan(folder, step, layout)
        begin = partial(begin_replay, plan, str(Path(dump).absolute()) if dump else "")
        config = plan.config_in(Path(scratch))
        done = run_over_ranks(begin, ReplayService, config, device=device)
        (start,) = json.loads((done.records / "manifest.json").read_text())["starts"]
        replayed = read_lines(done.records / "steps.jsonl")
    changed = start["differences"]
    dtype = config.actor.compute_dtype(pick_device(device).type)
    tolerance = TOLERANCES[dtype] if changed else 0.0
    compared = [
        one
        for number, record in enumerate(replayed, 1)
        for one in compare(plan.records[record["step"]], record, number * tolerance)
    ]
    return Replay(plan.begin, changed, compared)


def begin_replay(plan: ReplayPlan, dump: str, config: Config, device: torch.device) -> RunInputs:
    """Preparations before anything else; UserError if this machine has too few devices."""
    if config.component("actor").world > 1:
        raise_problems(rank_problems(plan.config, start_facts(device, "train")))
    config.register_models()
    return RunInputs(
        command="train",
        title="replay",
        dims=trained_dims(config, config.model_folder()),
        data=plan.data,
        roles=(),
        evaluates=False,
        is_shown=False,
        open=partial(open_replay, plan, dump),
    )


async def open_replay(plan: ReplayPlan, dump: str, run: Run, stack: AsyncExitStack) -> ReplaySource:
    """Builds the learners of the recorded run; none is saved."""
    given = {"scored_apart": plan.apart, "num_threads": plan.last["place"]["threads"]}
    await run.learner.run(partial(run.build, **plan.last["size"], **given))
    return ReplaySource(
        run=run,
        kept=plan.data,
        batches=run.context.batch_keeper(RunSize(**plan.last["size"])),
        num_before=plan.data.steps[0] - 1,
        chunks_as_kept=True,
        plan=plan,
        dump=dump,
    )


@dataclass(eq=False, kw_only=True)
class ReplaySource(KeptSource):
    """Recorded steps, trained from the checkpoint of the recorded run before them, if any."""

    plan: ReplayPlan
    dump: str
    """File for the log-probs of the last step; empty: none."""

    def restored(self, checkpoint: Checkpoint | None) -> None:
        learner, config, tags = self.run.learner, self.plan.config, set[str]()
        if (start := self.plan.checkpoint) is not None:
            counters = restore_learners(learner, start, roles_of(config))
            tags = set(counters["actor"]["tags"]) - replaced_weights(start, config)
        self.run.trained = self.num_before
        learner.call_all("load_tags", has=sorted(tags), step=self.run.trained)

    async def begin(self) -> None:
        changed = differences(self.plan.last["place"], self.run.learner.query("place"))
        self.run.context.started(self.run.trained, differences=changed)

    def keep(self, trained: TrainedBatch) -> None:
        if self.dump and trained.batch + 1 == self.run.num_steps:
            self.run.learner.query("dump", file=self.dump)

    def summary(self, model: Path | None) -> RunSummary:
        run = self.run
        run.stop.check_complete(run.trained, run.num_steps, model)
        folder = run.context.folder.path
        return RunSummary(folder, folder, run.trained)


class ReplayService(LearnerService):
    """A learner that also returns its hardware and versions, and the policy's outputs for each
    sample."""

    def __init__(self, config: Config, rank: Rank, device: torch.device) -> None:
        super().__init__(config, rank, device)
        self.usual_threads = torch.get_num_threads()

    def build(
        self,
        num_steps: int,
        max_row_tokens: int,
        scored_apart: Sequence[str] = (),
        num_threads: int | None = None,
    ) -> None:
        """Builds the models as in the recorded run, which had so many threads on a CPU."""
        self.scored_apart = scored_apart
        if num_threads and self.device.type == "cpu":
            torch.set_num_threads(num_threads)
        super().build(num_steps, max_row_tokens)

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
    heads = [*(_read_whole(place, number) for number in range(first, step)), last]
    for batch in heads[:-1]:
        changes = judge_changes(with_hub_names(batch["config"]), with_hub_names(last["config"]))
        if changes.refused:
            where = changes.refused[0].where
            rule = f"the config changed between step {batch['step']} and step {step}, in {where}"
            remedy = "replay a step whose checkpoint is after the change"
            raise UserError(Problem(f"--step = {step}", rule, remedy))
    return ReplayPlan(
        config, checkpoint, KeptGroups(place, [*range(first, step + 1)], heads), records
    )


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


def compare(
    record: Mapping[str, Any], replayed: Mapping[str, Any], tolerance: float
) -> list[ReplayedNumber]:
    lines = []
    for name in NUMBERS:
        known, found = (
            (one["rl"] if name.startswith("critic") else one)[name] for one in (record, replayed)
        )
        if known is None and found is None:
            continue
        scale = abs(known or 0.0) if name.endswith("grad_norm") else max(1.0, abs(known or 0.0))
        lines.append(ReplayedNumber(record["step"], name, known, found, tolerance * scale))
    return lines


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [f"{key} was {before[key]}, is {now[key]}" for key in now if before[key] != now[key]]


def write_dump(file: Path, groups: Sequence[Group], result: BatchResult) -> None:
    """Writes a JSON line for each sample of the step's first update."""
    names = places_of(groups)
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
