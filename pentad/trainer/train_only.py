"""A run that only trains: the groups that another run sampled and kept, without a sampler.

Every rank reads them from the folder of that run. Whose weights drew them is not known here, so
the data count as off-policy: a correction is chosen, and no staleness is claimed or checked.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from pentad.checkpoint.folders import Checkpoint, reading
from pentad.config.catalog import register_models
from pentad.config.derived import layout_of
from pentad.config.rules.unread import unread
from pentad.config.schema import Config
from pentad.core.algorithms import AlgorithmSettings
from pentad.core.dims import ModelDims
from pentad.core.errors import Problem, RunError, UserError
from pentad.core.sizes import RunSize
from pentad.core.types import Group, Prompt
from pentad.data.ledger import PromptFunnel
from pentad.telemetry.record import MemoryUse
from pentad.telemetry.timing import PhaseTimer
from pentad.trainer.batches import kept_steps, read_batch, read_head
from pentad.trainer.crew import Crew, Regroup
from pentad.trainer.facts import BatchFacts
from pentad.trainer.learner_thread import Calls
from pentad.trainer.preflight import Collector, start_problems
from pentad.trainer.ranks import run_over_ranks
from pentad.trainer.recovery import Identity, RecoverHandler, progress_of, save_after_failure
from pentad.trainer.run import OpenRun, RunSummary, count_steps, open_run
from pentad.trainer.saver import Saver
from pentad.trainer.service import LearnerService
from pentad.trainer.sft import watch_alone
from pentad.trainer.start import Role, check_start, start_run, trained_dims
from pentad.trainer.stopping import StopFlag, cut_short, stop_flag
from pentad.trainer.train_pump import TrainedBatch
from pentad.trainer.translate import algorithm_settings, bounds_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeptGroups:
    """The batches of a run, as they are trained one after the other."""

    folder: Path
    steps: list[int]
    heads: list[dict[str, Any]]

    @property
    def max_row_tokens(self) -> int:
        return max(head["size"]["max_row_tokens"] for head in self.heads)

    def state(self) -> dict[str, Any]:
        """What must be the same when the run goes on."""
        return {"steps": self.steps, "digests": [head["sha256"] for head in self.heads]}


@dataclass(frozen=True, slots=True)
class CheckedGroups:
    """The inputs of the run, read and found good."""

    dims: ModelDims
    algorithm: AlgorithmSettings
    kept: KeptGroups

    @property
    def roles(self) -> tuple[Role, ...]:
        return ("actor", "critic") if self.algorithm.needs_critic else ("actor",)


def run_train_only(
    config: Config, notes: Sequence[str] = (), fresh: bool = False, device: str = "auto"
) -> RunSummary:
    return run_over_ranks(
        lead_train_only, LearnerService, begin_train_only, config, notes, fresh, device
    )


def begin_train_only(config: Config, device: torch.device) -> CheckedGroups:
    """Everything the run reads, or one UserError with every problem."""
    asked = Collector()
    asked.problems += start_problems(config, device, samples=False)
    path = config.actor.path
    assert path is not None, "checked with the config"
    algorithm = asked.ask(lambda: algorithm_settings(config))
    asked.ask(lambda: register_models(config))
    dims = asked.ask(lambda: trained_dims(config, path))
    kept = asked.ask(lambda: open_groups(config))
    asked.ask(lambda: check_start(config, "actor"))
    if algorithm is not None and algorithm.needs_critic:
        asked.ask(lambda: check_start(config, "critic"))
    if dims is not None and kept is not None and kept.max_row_tokens > dims.max_position:
        rule = f"its samples may have {kept.max_row_tokens} tokens, and the model takes "
        where = f"groups_from = {config.groups_from}"
        asked.problems.append(Problem(where, f"{rule}{dims.max_position}"))
    asked.settle()
    assert dims and algorithm and kept, "a step failed without a word"
    checked = CheckedGroups(dims, algorithm, kept)
    start_run(config, checked.roles)
    return checked


def open_groups(config: Config) -> KeptGroups:
    assert config.groups_from is not None, "checked with the config"
    folder = Path(config.groups_from).absolute() / "batches"
    steps = kept_steps(folder)
    if not steps:
        rule = "has no groups: no step*.groups in its batches/"
        remedy = "give the folder of a run's records; telemetry.keep_batches says what it keeps"
        raise UserError(Problem(f"groups_from = {config.groups_from}", rule, remedy))
    return KeptGroups(folder, steps, [read_head(folder, step) for step in steps])


def lead_train_only(
    calls: Calls, config: Config, notes: Sequence[str], fresh: bool, crew: Crew
) -> RunSummary:
    """The run, beside its learners, on rank 0 or alone."""
    device, layout = calls.device, layout_of(config, "actor")
    checked: CheckedGroups = crew.checked or begin_train_only(config, device)
    kept = checked.kept
    num_steps = count_steps(config, len(kept.steps))
    some = f"{kept.folder}: {len(kept.steps)} steps, {kept.steps[0]} to {kept.steps[-1]}"
    with open_run(
        config,
        [*notes, some],
        warnings=unread(config, "train"),
        title=f"{config.algorithm.name} {config.experiment_name}/{config.trial_name}",
        fresh=fresh,
        dims=checked.dims,
        device=device,
        layout=layout,
        num_steps=num_steps,
        steps_per_epoch=len(kept.steps),
    ) as run:
        folders = ["default" if role == "actor" else role for role in checked.roles]
        if done := run.finished(num_steps, roles=folders, evaluates=False):
            return done
        size = RunSize(num_steps, kept.max_row_tokens)
        run.build(calls, **asdict(size))
        learning = TrainOnly(calls, run, kept, size, folders, crew)
        trained = learning.resume()
        run.started(trained, device=str(device), layout=str(layout))
        with stop_flag() as stop, watch_alone(calls, run):
            calls.is_leaving = lambda: bool(stop.reason)
            return learning.train(trained, num_steps, stop)


class TrainOnly:
    """Steps over kept batches, and what is saved and recorded of each."""

    def __init__(
        self,
        calls: Calls,
        run: OpenRun,
        kept: KeptGroups,
        size: RunSize,
        folders: Sequence[str],
        crew: Crew,
    ) -> None:
        self.calls = calls
        self.crew = crew
        self.open = run
        self.kept = kept
        self.savers: dict[str, Saver] = {folder: run.saver(calls, folder) for folder in folders}
        self.recover: RecoverHandler = run.recovery(calls, self.savers)
        self.recover.add("dataloader_info", "groups", Identity(kept.state))
        self.bounds = bounds_of(run.config)
        self.recover.add("stats_logger_info", "bounds", self.bounds)
        self.batches = run.batches(size)
        self.num_groups = 0

    def resume(self) -> int:
        """State and tags; how many steps are in the weights."""
        checkpoint = self.open.resume(self.recover, self._check_groups)
        trained = 0 if checkpoint is None else checkpoint.step + 1
        self.batches.forget(after=trained)
        saved = self.recover.counters.get("default", {"tags": ()})["tags"]
        self.calls.call("load_tags", has=sorted(saved), step=trained)
        self.recover.prepare()
        self.crew.note_loaded()
        self.num_groups = sum(self._num_groups(step) for step in range(trained))
        return trained

    def _check_groups(self, checkpoint: Checkpoint) -> None:
        """UserError if the groups are not those it began with."""
        with reading(checkpoint.root / checkpoint.info / "dataloader_info.json"):
            known = dict(self.recover.infos["dataloader_info"]["groups"])
        if known != self.kept.state():
            where = f"groups_from = {self.open.config.groups_from}"
            rule = "has other groups than when the run began"
            raise UserError(Problem(where, rule, "bring them back, or start anew with --fresh"))

    def _num_groups(self, step: int) -> int:
        return self.kept.heads[step % len(self.kept.steps)]["num_groups"]

    def train(self, trained: int, num_steps: int, stop: StopFlag) -> RunSummary:
        try:
            for step in range(trained, num_steps):
                if stop.reason:
                    break
                self._step(step)
                trained = step + 1
                if trained < num_steps:
                    self.crew.regroup_if_due(self.recover, step)
            self.recover.finish()
            savers = list(self.savers.values())
            folders = [saver.finish(trained - 1) for saver in savers] if trained else [None]
        except Regroup:
            raise
        except KeyboardInterrupt:
            saved, next_start = self.savers["default"].good, self.recover.next_start
            raise cut_short(stop.reason, trained + 1, saved, next_start) from None
        except Exception:
            savers = list(self.savers.values())
            save_after_failure(self.calls, self.recover, savers, *progress_of(self.calls, trained))
            raise
        stop.check_complete(trained, num_steps, folders[0], next_start=self.recover.next_start)
        assert folders[0] is not None, "a complete run has steps"
        return RunSummary(self.open.folder.path, folders[0], trained)

    def _step(self, step: int) -> None:
        timer, config = PhaseTimer(), self.open.config
        at, folder = step % len(self.kept.steps), self.kept.folder
        source, digest = self.kept.steps[at], self.kept.heads[at]["sha256"]
        groups = [with_prompt(group) for group in read_batch(folder, source, digest).groups]
        with timer.phase("train"):
            self.calls.call(
                "train_kept", folder=str(folder), step=source, number=step, digest=digest
            )
            facts = BatchFacts.read(self.calls.ask("measure"))
        self.crew.note_step()
        if config.ref_update_interval and (step + 1) % config.ref_update_interval == 0:
            self.calls.call("save_tag", tag="ref")
        for one in [*facts.steps, *facts.critic_steps]:
            if one.skipped:
                log.warning("step %d: nothing was updated: %s", step + 1, one.reason)
        past = self.bounds.past([*facts.steps, *facts.critic_steps])
        with timer.phase("train"):
            sentence = self.open.go_back(self.recover, self.bounds, step, past)
        with timer.phase("save"):
            for saver in self.savers.values():
                saver.after_step(step)
            self.recover.after_step(step, is_doubtful=self.bounds.is_doubtful)
        self._record(step, groups, facts, timer)
        if sentence:
            raise RunError(f"step {step + 1}: {sentence}")

    def _record(self, step: int, groups: list[Group], facts: BatchFacts, timer: PhaseTimer) -> None:
        self.num_groups += len(groups)
        funnel = PromptFunnel(self.num_groups, self.num_groups, {}, 0)
        trained = TrainedBatch(step, groups, facts, funnel, timer, None)
        memory = MemoryUse(**self.calls.ask("memory"))
        record = self.open.steps.rl_record(trained, memory, self.savers["default"], self.recover)
        assert record.rl is not None, "it is one of RL"
        record = replace(record, rl=replace(record.rl, staleness=None))
        self.batches.keep(record.step, groups)
        self.open.recorder.step(record, groups)
        self.recover.commit()


def with_prompt(group: Group) -> Group:
    """Kept groups have no prompts but what their samples begin with."""
    sample = group.samples[0]
    length = int(sample.mask.argmax()) if sample.mask.any() else len(sample.ids)
    return Group(Prompt(group.gid, tuple(sample.ids[:length].tolist()), {}), group.samples)
