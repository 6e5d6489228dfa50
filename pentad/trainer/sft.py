"""Learning from examples, supervised or pretraining: the learner, records and exports of any run,
without rollout."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial

import torch

from pentad.checkpoint.folders import Checkpoint, reading
from pentad.config.derived import model_folder, register_models
from pentad.config.schema import Config
from pentad.core.dims import ModelDims
from pentad.core.types import StepResult
from pentad.data.examples import Examples
from pentad.data.tokenizer import load_tokenizer
from pentad.runtime.calls import RankCalls
from pentad.telemetry.log import announced
from pentad.telemetry.record import MemoryUse, PhaseTimer, StepRecord
from pentad.trainer.crew import Crew
from pentad.trainer.learner_thread import Calls
from pentad.trainer.learners import check_start, start_run, trained_dims
from pentad.trainer.plain_run import PlainRun
from pentad.trainer.preflight import Collector, start_problems, vocabulary_problems
from pentad.trainer.ranks import run_over_ranks
from pentad.trainer.recovery import Identity
from pentad.trainer.run import OpenRun, RunSummary, open_run
from pentad.trainer.selftest import NUM_PROBES, check_packing, tolerance_of
from pentad.trainer.sft_service import ExampleService, PretrainService, SftService, parts_of
from pentad.trainer.update import step_from

log = logging.getLogger(__name__)

CheckedExamples = tuple[ModelDims, dict[str, Examples]]
"""The model's dimensions, and the data by "train" and "valid"."""


def run_examples(
    service: type[ExampleService],
    config: Config,
    notes: Sequence[str] = (),
    fresh: bool = False,
    device: str = "auto",
) -> RunSummary:
    """Trains on examples; returns where everything is."""
    lead, begin = partial(lead_examples, service), partial(begin_examples, service)
    return run_over_ranks(lead, service, begin, config, notes, fresh, device)


run_sft = partial(run_examples, SftService)
"""On prompts with given responses."""
run_pretrain = partial(run_examples, PretrainService)
"""On a stream of tokens."""


def begin_examples(
    service: type[ExampleService], config: Config, device: torch.device
) -> CheckedExamples:
    """What must be done before anything else is, on any rank."""
    checked = check_examples(service, config, device)
    start_run(config, ("actor",))
    return checked


def lead_examples(
    service: type[ExampleService],
    calls: Calls,
    config: Config,
    notes: Sequence[str],
    fresh: bool,
    crew: Crew,
) -> RunSummary:
    """The run, beside its learners, on rank 0 or alone."""
    checked: CheckedExamples = crew.checked or begin_examples(service, config, calls.device)
    dims, parts = checked
    if isinstance(calls, RankCalls) and isinstance(calls.service, ExampleService):
        calls.service.data = parts
    with open_run(
        config,
        notes,
        parts["train"],
        command=service.command,
        title=service.command,
        fresh=fresh,
        dims=dims,
        device=calls.device,
    ) as run:
        if done := run.finished(evaluates="valid" in parts):
            return done
        states = {part: opened.state() for part, opened in parts.items()}
        run.build(calls, num_steps=run.num_steps, data=states)
        found = ExampleRun(calls, run, crew, parts)
        found.prepare()
        return found.train()


class ExampleRun(PlainRun):
    """Steps over examples, and the loss on held-out ones."""

    def __init__(
        self, calls: Calls, run: OpenRun, crew: Crew, parts: Mapping[str, Examples]
    ) -> None:
        super().__init__(calls, run, crew)
        self.data = parts["train"]
        self.recover.add("dataloader_info", "data", Identity(self.data.state))
        self.evals = run.frequency(run.config.evaluator) if "valid" in parts else None
        if self.evals is not None:
            self.recover.add("evaluator_info", "frequency", self.evals)

    def prepare(self) -> None:
        """The self-test, and the state to go on from."""
        run, config = self.open, self.open.config
        examples = self.data.batch(0, min(NUM_PROBES, len(self.data)))
        with announced(log, "self-test: packed sequences get the log-probs they get alone"):
            tolerance = tolerance_of(config.actor.compute_dtype(run.device.type))
            packed = check_packing(self.calls, [row.ids.tolist() for row in examples], tolerance)
        self.restore(self._check_data)
        self.recover.prepare()
        self.crew.note_loaded()
        selftest = {"packed_max_difference": packed}
        run.started(self.trained, selftest=selftest, layout=str(run.layout))

    def _check_data(self, checkpoint: Checkpoint) -> None:
        """UserError if the next rows are not those that would have come."""
        with reading(checkpoint.root / checkpoint.info / "dataloader_info.json"):
            known = dict(self.recover.infos["dataloader_info"]["data"])
        if "train_dataset" not in self.open.config.recover.allow:
            self.data.check_state(known)

    def before_steps(self) -> None:
        if self.evals and not self.open.recorder.evaluated():
            self._evaluate(self.trained)

    def train_step(self, step: int, timer: PhaseTimer) -> list[StepResult]:
        found = self.calls.call("step", step=step)
        self.result, self.found = step_from(found["result"]), found
        return [self.result]

    def after_update(self, step: int, timer: PhaseTimer) -> None:
        if self.evals and (self.evals.is_due(step + 1) or step + 1 == self.open.num_steps):
            with timer.phase("evaluate"):
                self._evaluate(step + 1)

    def _evaluate(self, version: int) -> None:
        started = time.monotonic()
        found = self.calls.call("evaluate")
        self.savers["default"].scored(version - 1, -found["loss"])
        seconds = time.monotonic() - started
        self.open.recorder.evaluation({"version": version, **found, "seconds": seconds})

    def record(self, step: int, timer: PhaseTimer, memory: MemoryUse) -> StepRecord:
        record = self.open.steps.record(
            step=step + 1,
            steps=[self.result],
            lengths=self.found["lengths"],
            num_samples=self.found["num_samples"],
            timer=timer,
            saver=self.savers["default"],
            recover=self.recover,
            memory=memory,
            rows_digest=self.found["rows_digest"],
        )
        self.open.recorder.step(record)
        return record


def check_examples(
    service: type[ExampleService], config: Config, device: torch.device
) -> CheckedExamples:
    """Everything the run reads, or one UserError with every problem."""
    checks = Collector()
    checks.problems += start_problems(config, device, samples=False)
    path = model_folder(config)
    checks.attempt(lambda: register_models(config))
    dims = checks.attempt(lambda: trained_dims(config, path))
    tokenizer = checks.attempt(lambda: load_tokenizer(path))
    found: dict[str, Examples] = {}
    if dims is not None and tokenizer is not None:
        checks.attempt(lambda: check_start(config, "actor"))
        if service.command == "sft":  # a token shard's ids are looked at themselves
            checks.problems += vocabulary_problems(path, dims, tokenizer)
        for part in parts_of(config):
            read = partial(service.open_part, config, part, dims, tokenizer)
            if (data := checks.attempt(read)) is not None:
                found[part] = data
    checks.raise_all()
    assert dims is not None and "train" in found, "what failed has raised"
    return dims, found
