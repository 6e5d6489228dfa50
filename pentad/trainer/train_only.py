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
from pentad.config.derived import chosen, model_folder, register_models
from pentad.config.rules.modes import no_groups
from pentad.config.schema import Config
from pentad.core.dims import ModelDims
from pentad.core.errors import Problem, UserError
from pentad.core.sizes import RunSize
from pentad.core.types import Group, Prompt, StepResult
from pentad.data.ledger import PromptFunnel
from pentad.telemetry.record import MemoryUse, PhaseTimer, StepRecord
from pentad.trainer.batches import kept_steps, read_batch, read_head
from pentad.trainer.crew import Crew
from pentad.trainer.learner_thread import Calls
from pentad.trainer.learners import Role, check_start, start_run, trained_dims
from pentad.trainer.plain_run import PlainRun
from pentad.trainer.preflight import Collector, start_problems
from pentad.trainer.ranks import run_over_ranks
from pentad.trainer.recovery import Identity, progress_of
from pentad.trainer.run import OpenRun, RunSummary, open_run
from pentad.trainer.service import LearnerService
from pentad.trainer.train_pump import TrainedBatch
from pentad.trainer.translate import algorithm_settings
from pentad.trainer.update import BatchFacts

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

    def summary(self) -> str:
        return f"{self.folder}: {len(self.steps)} steps, {self.steps[0]} to {self.steps[-1]}"

    def steps_per_epoch(self, size: int) -> int:
        return len(self.steps)

    def run_warnings(self, size: int) -> list[str]:
        return []

    @property
    def notes(self) -> Sequence[str]:
        return ()


CheckedGroups = tuple[ModelDims, tuple[Role, ...], KeptGroups]
"""The inputs of the run, read and found good: the model, who learns, and from what."""


def run_train_only(
    config: Config, notes: Sequence[str] = (), fresh: bool = False, device: str = "auto"
) -> RunSummary:
    return run_over_ranks(
        lead_train_only, LearnerService, begin_train_only, config, notes, fresh, device
    )


def begin_train_only(config: Config, device: torch.device) -> CheckedGroups:
    """Everything the run reads, or one UserError with every problem."""
    checks = Collector()
    checks.problems += start_problems(config, device, samples=False)
    path = model_folder(config)
    algorithm = checks.attempt(lambda: algorithm_settings(config))
    checks.attempt(lambda: register_models(config))
    dims = checks.attempt(lambda: trained_dims(config, path))
    kept = checks.attempt(lambda: open_groups(config))
    checks.attempt(lambda: check_start(config, "actor"))
    if algorithm is not None and algorithm.needs_critic:
        checks.attempt(lambda: check_start(config, "critic"))
    if dims is not None and kept is not None and kept.max_row_tokens > dims.max_position:
        rule = f"its samples may have {kept.max_row_tokens} tokens, and the model takes "
        where = f"groups_from = {config.groups_from}"
        checks.problems.append(Problem(where, f"{rule}{dims.max_position}"))
    checks.raise_all()
    assert dims and algorithm and kept, "what failed has raised"
    roles: tuple[Role, ...] = ("actor", "critic") if algorithm.needs_critic else ("actor",)
    start_run(config, roles)
    return dims, roles, kept


def open_groups(config: Config) -> KeptGroups:
    source = chosen(config.groups_from, "groups_from")
    folder = Path(source).absolute() / "batches"
    steps = kept_steps(folder)
    if not steps:
        raise UserError(no_groups(source))
    return KeptGroups(folder, steps, [read_head(folder, step) for step in steps])


def lead_train_only(
    calls: Calls, config: Config, notes: Sequence[str], fresh: bool, crew: Crew
) -> RunSummary:
    """The run, beside its learners, on rank 0 or alone."""
    checked: CheckedGroups = crew.checked or begin_train_only(config, calls.device)
    dims, roles, kept = checked
    with open_run(
        config,
        notes,
        kept,
        title=config.algorithm.name,
        fresh=fresh,
        dims=dims,
        device=calls.device,
    ) as run:
        folders = ["default" if role == "actor" else role for role in roles]
        if done := run.finished(roles=folders, evaluates=False):
            return done
        size = RunSize(run.num_steps, kept.max_row_tokens)
        run.build(calls, **asdict(size))
        found = TrainOnly(calls, run, crew, kept, size, folders)
        found.prepare()
        return found.train()


class TrainOnly(PlainRun):
    """Steps over kept batches."""

    def __init__(
        self,
        calls: Calls,
        run: OpenRun,
        crew: Crew,
        kept: KeptGroups,
        size: RunSize,
        folders: Sequence[str],
    ) -> None:
        super().__init__(calls, run, crew, folders)
        self.kept = kept
        self.recover.add("dataloader_info", "groups", Identity(kept.state))
        self.batches = run.batches(size)
        self.num_groups = 0

    def prepare(self) -> None:
        """State and tags."""
        self.restore(self._check_groups)
        self.batches.forget(after=self.trained)
        saved = self.recover.counters.get("default", {"tags": ()})["tags"]
        self.calls.call("load_tags", has=sorted(saved), step=self.trained)
        self.recover.prepare()
        self.crew.note_loaded()
        heads = self.kept.heads
        self.num_groups = sum(heads[n % len(heads)]["num_groups"] for n in range(self.trained))
        self.open.started(self.trained, layout=str(self.open.layout))

    def _check_groups(self, checkpoint: Checkpoint) -> None:
        """UserError if the groups are not those it began with."""
        with reading(checkpoint.root / checkpoint.info / "dataloader_info.json"):
            known = dict(self.recover.infos["dataloader_info"]["groups"])
        if known != self.kept.state():
            where = f"groups_from = {self.open.config.groups_from}"
            rule = "has other groups than when the run began"
            raise UserError(Problem(where, rule, "bring them back, or start anew with --fresh"))

    def progress(self) -> tuple[int, int]:
        return progress_of(self.calls, self.trained)

    def train_step(self, step: int, timer: PhaseTimer) -> list[StepResult]:
        at, folder = step % len(self.kept.steps), self.kept.folder
        source, digest = self.kept.steps[at], self.kept.heads[at]["sha256"]
        given = {"folder": str(folder), "step": source, "number": step, "digest": digest}
        with timer.phase("other"):
            self.groups = [with_prompt(one) for one in read_batch(folder, source, digest).groups]
        self.calls.call("train_kept", **given)
        self.facts = BatchFacts.read(self.calls.ask("measure"))
        return [*self.facts.steps, *self.facts.critic_steps]

    def after_update(self, step: int, timer: PhaseTimer) -> None:
        every = self.open.config.ref_update_interval
        if every and (step + 1) % every == 0:
            self.calls.call("save_tag", tag="ref")

    def record(self, step: int, timer: PhaseTimer, memory: MemoryUse) -> StepRecord:
        self.num_groups += len(self.groups)
        funnel = PromptFunnel(self.num_groups, self.num_groups, {}, 0)
        trained = TrainedBatch(step, self.groups, self.facts, funnel, timer, None)
        record = self.open.steps.rl_record(trained, memory, self.savers["default"], self.recover)
        assert record.rl is not None, "it is one of RL"
        record = replace(record, rl=replace(record.rl, staleness=None))
        self.batches.keep(record.step, self.groups)
        self.open.recorder.step(record, self.groups)
        return record


def with_prompt(group: Group) -> Group:
    """Kept groups have no prompts but what their samples begin with."""
    sample = group.samples[0]
    length = int(sample.mask.argmax()) if sample.mask.any() else len(sample.ids)
    return Group(Prompt(group.gid, tuple(sample.ids[:length].tolist()), {}), group.samples)
