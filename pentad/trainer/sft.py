"""Learning from examples, supervised or pretraining: the learner, records and exports of any run,
without rollout."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from pentad.checkpoint.folders import Checkpoint, reading
from pentad.config.catalog import register_models
from pentad.config.derived import layout_of
from pentad.config.rules.unread import unread
from pentad.config.schema import Config
from pentad.core.dims import ModelDims
from pentad.core.errors import RunError
from pentad.data.examples import Examples
from pentad.data.tokenizer import load_tokenizer
from pentad.rl.bounds import Bounds
from pentad.runtime.calls import RankCalls
from pentad.telemetry.log import announced
from pentad.telemetry.record import MemoryUse
from pentad.telemetry.timing import PhaseTimer
from pentad.trainer.crew import Crew, Regroup
from pentad.trainer.facts import step_from
from pentad.trainer.frequency import Frequency
from pentad.trainer.learner_thread import Calls
from pentad.trainer.preflight import Collector, start_problems
from pentad.trainer.ranks import run_over_ranks
from pentad.trainer.recovery import Identity, RecoverHandler, save_after_failure
from pentad.trainer.run import OpenRun, RunSummary, count_steps, open_run, repeat_warnings
from pentad.trainer.saver import Saver
from pentad.trainer.selftest import NUM_PROBES, check_packing, tolerance_of
from pentad.trainer.sft_service import ExampleService, PretrainService, SftService, parts_of
from pentad.trainer.start import check_start, start_run, trained_dims
from pentad.trainer.stopping import StopFlag, cut_short, stop_flag
from pentad.trainer.translate import bounds_of, compute_dtype
from pentad.trainer.watchdog import end_when_hung

log = logging.getLogger(__name__)

Checked = tuple[ModelDims, dict[str, Examples]]
"""The model's dimensions, and the data by "train" and "valid"."""


def run_sft(
    config: Config, notes: Sequence[str] = (), fresh: bool = False, device: str = "auto"
) -> RunSummary:
    """Trains on prompts with given responses; returns where everything is."""
    lead = partial(lead_examples, SftService)
    return run_over_ranks(lead, SftService, begin_sft, config, notes, fresh, device)


def run_pretrain(
    config: Config, notes: Sequence[str] = (), fresh: bool = False, device: str = "auto"
) -> RunSummary:
    """Trains on a stream of tokens; returns where everything is."""
    lead = partial(lead_examples, PretrainService)
    return run_over_ranks(lead, PretrainService, begin_pretrain, config, notes, fresh, device)


def begin_sft(config: Config, device: torch.device) -> Checked:
    """What must be done before anything else is, on any rank."""
    return begin_examples(SftService, config, device)


def begin_pretrain(config: Config, device: torch.device) -> Checked:
    return begin_examples(PretrainService, config, device)


def begin_examples(service: type[ExampleService], config: Config, device: torch.device) -> Checked:
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
    device, layout = calls.device, layout_of(config, "actor")
    checked: Checked = crew.checked or begin_examples(service, config, device)
    dims, parts = checked
    if isinstance(calls, RankCalls) and isinstance(calls.service, ExampleService):
        calls.service.data = parts
    data, evaluates = parts["train"], "valid" in parts
    size = config.train_dataset.batch_size
    steps_per_epoch = data.steps_per_epoch(size)
    num_steps = count_steps(config, steps_per_epoch)
    with open_run(
        config,
        [*notes, data.summary()],
        warnings=[
            *unread(config, service.command),
            *data.warnings,
            *repeat_warnings(size, len(data)),
        ],
        title=f"{service.command} {config.experiment_name}/{config.trial_name}",
        fresh=fresh,
        dims=dims,
        device=device,
        layout=layout,
        num_steps=num_steps,
        steps_per_epoch=steps_per_epoch,
    ) as run:
        if done := run.finished(num_steps, evaluates=evaluates):
            return done
        states = {part: opened.state() for part, opened in parts.items()}
        run.build(calls, num_steps=num_steps, data=states)
        probes = [row.ids.tolist() for row in data.batch(0, min(NUM_PROBES, len(data)))]
        with announced(log, "self-test: packed sequences get the log-probs they get alone"):
            tolerance = tolerance_of(compute_dtype(config.actor, device))
            packed = check_packing(calls, probes, tolerance)
        saver = run.saver(calls, "default")
        recover = run.recovery(calls, {"default": saver})
        recover.add("dataloader_info", "data", Identity(data.state))
        evals = run.frequency(config.evaluator) if evaluates else None
        if evals is not None:
            recover.add("evaluator_info", "frequency", evals)
        bounds = bounds_of(config)
        recover.add("stats_logger_info", "bounds", bounds)
        checkpoint = run.resume(recover, lambda found: check_data(config, data, found, recover))
        recover.prepare()
        crew.note_loaded()
        trained = 0 if checkpoint is None else checkpoint.step + 1
        run.started(
            trained,
            selftest={"packed_max_difference": packed},
            device=str(device),
            layout=str(layout),
        )
        with stop_flag() as stop, watch_alone(calls, run):
            calls.is_leaving = lambda: bool(stop.reason)
            return train(calls, run, crew, evals, bounds, trained, num_steps, stop, saver, recover)


def check_data(
    config: Config, data: Examples, checkpoint: Checkpoint, recover: RecoverHandler
) -> None:
    """UserError if the next rows are not those that would have come."""
    with reading(checkpoint.root / checkpoint.info / "dataloader_info.json"):
        known = dict(recover.infos["dataloader_info"]["data"])
    if "train_dataset" not in config.recover.allow:
        data.check_state(known)


def watch_alone(calls: Calls, run: OpenRun) -> AbstractContextManager[None]:
    """Over several ranks somebody else watches."""
    if not isinstance(calls, RankCalls) or calls.rank.world > 1:
        return nullcontext()
    return end_when_hung(run.config.stall_abort_s, run.folder.file("log.txt"))


def check_examples(service: type[ExampleService], config: Config, device: torch.device) -> Checked:
    """Everything the run reads, or one UserError with every problem."""
    asked = Collector()
    asked.problems += start_problems(config, device, samples=False)
    path = config.actor.path
    assert path is not None, "checked with the config"
    asked.ask(lambda: register_models(config))
    dims = asked.ask(lambda: trained_dims(config, path))
    tokenizer = asked.ask(lambda: load_tokenizer(path))
    found: dict[str, Examples] = {}
    if dims is not None and tokenizer is not None:
        asked.ask(lambda: check_start(config, "actor"))
        for part in parts_of(config):
            read = partial(service.open_part, config, part, dims, tokenizer)
            if (data := asked.ask(read)) is not None:
                found[part] = data
    asked.settle()
    assert dims is not None and "train" in found, "a step failed without a word"
    return dims, found


def train(
    calls: Calls,
    run: OpenRun,
    crew: Crew,
    evals: Frequency | None,
    bounds: Bounds,
    trained: int,
    num_steps: int,
    stop: StopFlag,
    saver: Saver,
    recover: RecoverHandler,
) -> RunSummary:

    def evaluate(version: int) -> None:
        started = time.monotonic()
        found = calls.call("evaluate")
        saver.scored(version - 1, -found["loss"])
        seconds = time.monotonic() - started
        run.recorder.evaluation({"version": version, **found, "seconds": seconds})

    try:
        if evals and not run.recorder.evaluated():
            evaluate(trained)
        for step in range(trained, num_steps):
            if stop.reason:
                break
            timer = PhaseTimer()
            with timer.phase("train"):
                found = calls.call("step", step=step)
            crew.note_step()
            result = step_from(found["result"])
            trained = step + 1
            if result.skipped:
                log.warning("step %d: nothing was updated: %s", step + 1, result.reason)
            if evals and (evals.is_due(step + 1) or step + 1 == num_steps):
                with timer.phase("evaluate"):
                    evaluate(step + 1)
            with timer.phase("train"):
                sentence = run.go_back(recover, bounds, step, bounds.past([result]))
            with timer.phase("save"):
                saver.after_step(step)
                recover.after_step(step, is_doubtful=bounds.is_doubtful)
            memory = MemoryUse(**calls.ask("memory"))
            record = run.steps.sft_record(
                step + 1,
                result,
                found["lengths"],
                timer,
                memory,
                saver,
                recover,
                found["rows_digest"],
            )
            run.recorder.step(record)
            recover.commit()
            if sentence:
                raise RunError(f"step {trained}: {sentence}")
            if trained < num_steps:
                crew.regroup_if_due(recover, step)
        recover.finish()
        folder = saver.finish(trained - 1) if trained else None
    except Regroup:
        raise
    except KeyboardInterrupt:
        name, next_start = stop.reason, recover.next_start
        raise cut_short(name, trained + 1, saver.good, next_start) from None
    except Exception:
        save_after_failure(calls, recover, [saver], trained)
        raise
    stop.check_complete(trained, num_steps, folder, next_start=recover.next_start)
    assert folder is not None, "a complete run has steps"
    return RunSummary(run.folder.path, folder, trained, run.recorder.evaluations())
