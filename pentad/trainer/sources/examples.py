"""Examples as the source of a run's batches: supervised fine-tuning, pretraining, preferences and
reward models."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

import torch

from pentad.checkpoint.folders import Checkpoint
from pentad.config.rules.rule import RunCommand
from pentad.config.schema import Config
from pentad.data.examples import Examples
from pentad.telemetry.log import announced
from pentad.telemetry.record import PhaseTimer
from pentad.trainer.context import RunSummary
from pentad.trainer.inputs import (
    RowReader,
    open_examples,
    parts_of,
    tokenizer_of,
    vocabulary_problems,
)
from pentad.trainer.preflight import begin_checks
from pentad.trainer.processes.ranks import run_over_ranks
from pentad.trainer.rank.example_service import (
    ExampleService,
    PretrainService,
    SftService,
)
from pentad.trainer.rank.learners import check_start, start_run
from pentad.trainer.rank.preference_service import PreferenceService, RewardModelService
from pentad.trainer.rank.update import BatchFacts, step_from
from pentad.trainer.records import TrainedBatch
from pentad.trainer.run import BatchSource, Run, RunInputs
from pentad.trainer.sampling.selftest import NUM_PROBES, check_packing, tolerance_of
from pentad.trainer.saving.periodic import Frequency
from pentad.trainer.saving.recovery import Identity

log = logging.getLogger(__name__)


async def open_source(parts: dict[str, Examples], run: Run, stack: AsyncExitStack) -> ExampleSource:
    """`parts`: the data "train" and "valid"."""
    data = parts["train"]
    if run.learner.service is not None:  # no need to read the data twice
        run.learner.service.data = parts
    states = {part: opened.state() for part, opened in parts.items()}
    await run.learner.run(partial(run.build, num_steps=run.num_steps, data=states))
    rows = [row.ids.tolist() for row in data.batch(0, min(NUM_PROBES, len(data)))]
    tolerance = tolerance_of(run.config.actor.compute_dtype(run.learner.device.type))
    with announced(log, "self-test: packed sequences get the log-probs they get alone"):
        packed = await run.learner.run(lambda: check_packing(run.learner, rows, tolerance))
    evals = run.context.frequency(run.config.evaluator) if "valid" in parts else None
    run.recover.add("dataloader_info", "data", Identity(data.state))
    if evals is not None:
        run.recover.add("evaluator_info", "frequency", evals)
    return ExampleSource(run, data, evals, packed)


@dataclass(eq=False)
class ExampleSource(BatchSource):
    """Steps over examples, and the loss on held-out ones."""

    run: Run
    data: Examples
    evals: Frequency | None
    """Frequency of evaluations; None: no held-out examples."""
    packed: float
    """The largest log-prob difference in the self-test of packing."""

    def check(self, checkpoint: Checkpoint) -> None:
        """Raises UserError if the next rows differ from those of the checkpoint."""
        known = self.run.recover.data_state(checkpoint, "data")
        if "train_dataset" not in self.run.config.recover.allow:
            self.data.check_state(known)

    async def begin(self) -> None:
        run = self.run
        selftest = {"packed_max_difference": self.packed}
        run.context.started(run.trained, selftest=selftest, layout=str(run.context.layout))
        if self.evals and not run.context.recorder.evaluated():
            await run.learner.run(lambda: self._evaluate(run.trained))

    async def train(self, step: int, timer: PhaseTimer) -> TrainedBatch:
        with timer.phase("train"):
            found = await self.run.learner.call("step", step=step)
        return TrainedBatch(
            step,
            BatchFacts([step_from(found["result"])], [], found["lengths"]),
            timer,
            num_samples=found["num_samples"],
            rows_digest=found["rows_digest"],
            preference=found.get("preference"),
        )

    async def after_update(self, trained: TrainedBatch) -> None:
        version = trained.batch + 1
        if self.evals and (self.evals.is_due(version) or version == self.run.num_steps):
            with trained.timer.phase("evaluate"):
                await self.run.learner.run(lambda: self._evaluate(version))

    def _evaluate(self, version: int) -> None:
        started = time.monotonic()
        found = self.run.learner.call_all("evaluate")
        self.run.saver.scored(version - 1, -found["loss"])
        seconds = time.monotonic() - started
        self.run.context.recorder.evaluation({"version": version, **found, "seconds": seconds})


def begin_examples(
    service: type[ExampleService], config: Config, device: torch.device
) -> RunInputs:
    """Preparations before anything else, on any rank."""
    inputs = check_examples(service, config, device)
    start_run(config, inputs.roles)
    return inputs


def check_examples(
    service: type[ExampleService], config: Config, device: torch.device
) -> RunInputs:
    """Checks everything the run reads; raises one UserError with every problem."""
    checks, dims = begin_checks(config, device, service.command)
    tokenizer = checks.attempt(lambda: tokenizer_of(config))
    found: dict[str, Examples] = {}
    if dims is not None and tokenizer is not None:
        checks.attempt(lambda: check_start(config, "actor"))
        if service.command != "pretrain":  # the ids of token shards are checked directly
            checks.problems += vocabulary_problems(config.model_folder(), dims, tokenizer)
        for part in parts_of(config):
            reader = RowReader(dims, tokenizer)
            read = partial(open_examples, service.command, config, part, reader)
            if (data := checks.attempt(read)) is not None:
                found[part] = data
    checks.raise_all()
    assert dims is not None and "train" in found, "what failed has raised"
    return RunInputs(
        command=service.command,
        title=service.command,
        dims=dims,
        roles=("actor",),
        data=found["train"],
        evaluates="valid" in found,
        open=partial(open_source, found),
    )


def trains(service: type[ExampleService]) -> Callable[..., RunSummary]:
    """Returns the function that runs this training on examples (`run_over_ranks`)."""
    return partial(run_over_ranks, partial(begin_examples, service), service)


run_sft = trains(SftService)
"""SFT on prompts with given responses."""
run_pretrain = trains(PretrainService)
"""Pretraining on a stream of tokens."""
run_dpo = trains(PreferenceService)
"""Training on preferences: DPO, IPO or KTO."""
run_reward_model = trains(RewardModelService)
"""Trains a reward model on preferences."""
ON_EXAMPLES: dict[RunCommand, Callable[..., RunSummary]] = {
    "sft": run_sft,
    "pretrain": run_pretrain,
    "dpo": run_dpo,
    "reward-model": run_reward_model,
}
"""The services of these commands."""
