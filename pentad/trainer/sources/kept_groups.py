"""Kept groups as the source of a run's batches: the samples of another run, without a sampler.

Every rank reads them from the folder of that run. The weights that sampled them are unknown, so the
data count as off-policy: a correction is applied, and staleness is neither recorded nor checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pentad.checkpoint.folders import Checkpoint
from pentad.config.rules.modes import no_groups
from pentad.config.schema import Config
from pentad.core.errors import Problem, UserError
from pentad.core.section import chosen
from pentad.core.sizes import RunSize
from pentad.core.types import Group, Prompt
from pentad.data.ledger import PromptFunnel
from pentad.telemetry.record import PhaseTimer
from pentad.trainer.preflight import begin_checks
from pentad.trainer.processes.ranks import run_over_ranks
from pentad.trainer.rank.learners import check_start, roles_of, start_run
from pentad.trainer.rank.service import LearnerService
from pentad.trainer.rank.update import BatchFacts
from pentad.trainer.records import TrainedBatch
from pentad.trainer.run import BatchSource, Run, RunInputs
from pentad.trainer.saving.batches import BatchKeeper, kept_steps, read_batch, read_head
from pentad.trainer.saving.recovery import Identity


@dataclass(frozen=True, slots=True)
class KeptGroups:
    """The batches of another run, in the order of training."""

    folder: Path
    steps: list[int]
    heads: list[dict[str, Any]]

    @property
    def max_row_tokens(self) -> int:
        return max(head["size"]["max_row_tokens"] for head in self.heads)

    def state(self) -> dict[str, Any]:
        """Returns the values that must be equal when the run resumes."""
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


async def open_kept(kept: KeptGroups, run: Run, stack: AsyncExitStack) -> KeptSource:
    size = RunSize(run.num_steps, kept.max_row_tokens)
    await run.learner.run(partial(run.build, **asdict(size)))
    run.recover.add("dataloader_info", "groups", Identity(kept.state))
    return KeptSource(run, kept, run.context.batch_keeper(size))


@dataclass(eq=False)
class KeptSource(BatchSource):
    """Steps over kept batches."""

    run: Run
    kept: KeptGroups
    batches: BatchKeeper
    num_groups: int = 0
    """Number of groups trained so far."""
    num_before: int = 0
    """Number of steps before the first kept batch."""
    chunks_as_kept: bool = False
    """Whether a step has as many chunks as in the run that kept it; else as configured."""

    def check(self, checkpoint: Checkpoint) -> None:
        """Raises UserError if the groups differ from those at its start."""
        if self.run.recover.data_state(checkpoint, "groups") != self.kept.state():
            where = f"groups_from = {self.run.config.groups_from}"
            rule = "has other groups than when the run began"
            raise UserError(Problem(where, rule, "restore them, or start over with --fresh"))

    def restored(self, checkpoint: Checkpoint | None) -> None:
        super().restored(checkpoint)
        done, heads = self.run.trained, self.kept.heads
        self.batches.forget(after=done)
        self.num_groups = sum(heads[n % len(heads)]["num_groups"] for n in range(done))

    async def begin(self) -> None:
        self.run.context.started(self.run.trained, layout=str(self.run.context.layout))

    async def train(self, step: int, timer: PhaseTimer) -> TrainedBatch:
        at, folder = (step - self.num_before) % len(self.kept.steps), self.kept.folder
        source, head = self.kept.steps[at], self.kept.heads[at]
        groups = [with_prompt(one) for one in read_batch(folder, source, head["sha256"]).groups]
        given = {"folder": str(folder), "step": source, "number": step, "digest": head["sha256"]}
        if self.chunks_as_kept:
            given["num_chunks"] = head["config"]["num_iters_per_train_update"]
        with timer.phase("train"):
            facts = await self.run.learner.run(lambda: self._train(given))
        self.num_groups += len(groups)
        funnel = PromptFunnel(self.num_groups, self.num_groups, {}, 0)
        return TrainedBatch(step, facts, timer, groups, funnel, is_off_policy=True)

    def _train(self, given: Mapping[str, Any]) -> BatchFacts:
        self.run.learner.call_all("train_kept", **given)
        return BatchFacts.read(self.run.learner.query("measure"))

    async def after_update(self, trained: TrainedBatch) -> None:
        every = self.run.config.ref_update_interval
        if every and (trained.batch + 1) % every == 0:
            await self.run.learner.call("save_tag", tag="ref")


def begin_train_only(config: Config, device: torch.device) -> RunInputs:
    """Checks everything the run reads; raises one UserError with every problem."""
    checks, dims = begin_checks(config, device, "train")
    kept = checks.attempt(lambda: open_groups(config))
    for role in roles_of(config):
        checks.attempt(partial(check_start, config, role))
    if dims is not None and kept is not None and kept.max_row_tokens > dims.max_position:
        rule = f"its samples may have {kept.max_row_tokens} tokens, and the model takes "
        where = f"groups_from = {config.groups_from}"
        checks.problems.append(Problem(where, f"{rule}{dims.max_position}"))
    checks.raise_all()
    assert dims and kept, "what failed has raised"
    roles = roles_of(config)
    start_run(config, roles)
    return RunInputs(
        command="train",
        title=config.algorithm.name,
        dims=dims,
        data=kept,
        roles=roles,
        evaluates=False,
        open=partial(open_kept, kept),
    )


run_train_only = partial(run_over_ranks, begin_train_only, LearnerService)


def open_groups(config: Config) -> KeptGroups:
    source = chosen(config.groups_from, "groups_from")
    folder = Path(source).absolute() / "batches"
    steps = kept_steps(folder)
    if not steps:
        raise UserError(no_groups(source))
    heads = [read_head(folder, step) for step in steps]
    lacking = [head["step"] for head in heads if not head.get("has_greedy")]
    if config.samples_greedily and lacking:
        rule = f"{config.algorithm.name} needs greedy answers, and the groups of step {lacking[0]} "
        remedy = f"sample them with algorithm.name={config.algorithm.name}"
        raise UserError(Problem(f"groups_from = {source}", f"{rule}have none", remedy))
    return KeptGroups(folder, steps, heads)


def with_prompt(group: Group) -> Group:
    """Restores a kept group's prompt from the first tokens of its samples."""
    sample = group.samples[0]
    length = int(sample.mask.argmax()) if sample.mask.any() else len(sample.ids)
    return replace(group, prompt=Prompt(group.gid, tuple(sample.ids[:length].tolist()), {}))
