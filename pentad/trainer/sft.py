"""Supervised fine-tuning: the same learner, records and exports, without rollout."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from pentad.checkpoint.folders import Checkpoint, reading
from pentad.config.catalog import register_models
from pentad.config.rules.unread import unread
from pentad.config.schema import Config
from pentad.core.dims import ModelDims
from pentad.core.errors import RunError
from pentad.core.roles import Learner
from pentad.core.types import Row
from pentad.data.sft import SftDataset, open_sft
from pentad.data.tokenizer import load_tokenizer
from pentad.engine.engine import build_engine
from pentad.rl.bounds import Bounds
from pentad.rl.losses import SftLoss
from pentad.runtime.lead import Lead
from pentad.telemetry.log import announced
from pentad.telemetry.timing import PhaseTimer
from pentad.trainer.frequency import Frequency
from pentad.trainer.preflight import Collector, start_problems
from pentad.trainer.ranks import layout_of, run_over_ranks
from pentad.trainer.recovery import Identity, RecoverHandler, save_after_failure
from pentad.trainer.run import OpenRun, RunSummary, count_steps, open_run, repeat_warnings
from pentad.trainer.saver import Saver
from pentad.trainer.selftest import NUM_PROBES, check_packing, tolerance_of
from pentad.trainer.start import (
    backend_of,
    check_start,
    start_run,
    trained_dims,
    weights_folder,
)
from pentad.trainer.stopping import StopFlag, cut_short, stop_flag
from pentad.trainer.translate import (
    bounds_of,
    data_settings,
    engine_settings,
)
from pentad.trainer.watchdog import end_when_hung

log = logging.getLogger(__name__)


def run_sft(
    config: Config, notes: Sequence[str] = (), fresh: bool = False, device: str = "auto"
) -> RunSummary:
    """Trains on prompts with given responses; returns where everything is."""
    return run_over_ranks(lead_sft, begin_sft, config, notes, fresh, device)


def begin_sft(
    config: Config, device: torch.device
) -> tuple[ModelDims, SftDataset, SftDataset | None]:
    """What must be done before anything else is, on any rank."""
    checked = check_sft(config, device)
    start_run(config, ("actor",))
    return checked


def lead_sft(lead: Lead, config: Config, notes: Sequence[str], fresh: bool) -> RunSummary:
    """The run, on rank 0 or alone."""
    assert config.actor.path is not None, "checked with the config"
    dims, data, valid = begin_sft(config, lead.device)
    layout = layout_of(config, "actor")
    weights = weights_folder(config, "actor")
    size = config.train_dataset.batch_size
    steps_per_epoch = data.steps_per_epoch(size)
    num_steps = count_steps(config, steps_per_epoch)
    settings = engine_settings(
        config.actor,
        lead.device,
        pp=layout.pp,
        world=layout.world,
        temperature=1.0,
        total_steps=num_steps,
        max_row_tokens=max(len(example.ids) for example in data.examples),
    )
    with open_run(
        config,
        [*notes, data.summary()],
        warnings=[*unread(config, "sft"), *data.warnings, *repeat_warnings(size, len(data))],
        title=f"sft {config.experiment_name}/{config.trial_name}",
        fresh=fresh,
        dims=dims,
        device=lead.device,
        layout=layout,
        num_steps=num_steps,
        steps_per_epoch=steps_per_epoch,
    ) as run:
        if done := run.finished(num_steps, evaluates=valid is not None):
            return done
        with announced(log, "making the model"):
            learner = lead.build(
                "actor",
                build_engine,
                config.actor.path,
                settings,
                layout=layout,
                init_from_scratch=weights is None,
                seed=config.seed,
                tokenizer_folder=config.actor.path,
                weights=weights,
                backend=backend_of(config, "actor"),
            )
        probe = data.batch(0, min(NUM_PROBES, len(data)))
        with announced(log, "self-test: packed sequences get the log-probs they get alone"):
            packed = check_packing(learner, probe, probe, tolerance_of(settings.compute_dtype))
        saver = run.saver(learner)
        recover = run.recovery({"default": learner}, [saver])
        recover.add("dataloader_info", "data", Identity(data.state))
        held_out = HeldOut(valid, learner, run.frequency(config.evaluator)) if valid else None
        if held_out is not None:
            recover.add("evaluator_info", "frequency", held_out.frequency)
        bounds = bounds_of(config)
        recover.add("stats_logger_info", "bounds", bounds)
        checkpoint = run.resume(recover, lambda found: check_data(config, data, found, recover))
        recover.prepare()
        trained = 0 if checkpoint is None else checkpoint.step + 1
        run.started(
            trained,
            selftest={"packed_max_difference": packed},
            device=str(lead.device),
            layout=str(layout),
        )
        with stop_flag() as stop, watch_alone(lead, run):
            return train(
                lead,
                run,
                learner,
                data,
                held_out,
                bounds,
                trained,
                num_steps,
                size,
                stop,
                saver,
                recover,
            )


def check_data(
    config: Config, data: SftDataset, checkpoint: Checkpoint, recover: RecoverHandler
) -> None:
    """UserError if the next rows are not those that would have come."""
    with reading(checkpoint.root / checkpoint.info / "dataloader_info.json"):
        known = dict(recover.infos["dataloader_info"]["data"])
    if "train_dataset" not in config.recover.allow:
        data.check_state(known)


def watch_alone(lead: Lead, run: OpenRun) -> AbstractContextManager[None]:
    """Over several ranks the launcher watches."""
    if lead.rank.world > 1:
        return nullcontext()
    return end_when_hung(run.config.stall_abort_s, run.folder.file("log.txt"))


def check_sft(
    config: Config, device: torch.device
) -> tuple[ModelDims, SftDataset, SftDataset | None]:
    """Everything the run reads, or one UserError with every problem."""
    asked = Collector()
    asked.problems += start_problems(config, device, samples=False)
    path = config.actor.path
    assert path is not None, "checked with the config"
    asked.ask(lambda: register_models(config))
    dims = asked.ask(lambda: trained_dims(config, path))
    tokenizer = asked.ask(lambda: load_tokenizer(path))
    found: dict[str, SftDataset | None] = {}
    if dims is not None and tokenizer is not None:
        asked.ask(lambda: check_start(config, "actor"))
        for key, source in (("train", config.train_dataset), ("valid", config.valid_dataset)):
            if source is not None:
                settings = data_settings(
                    source, f"{key}_dataset", seed=config.seed, max_tokens=dims.max_position
                )
                found[key] = asked.ask(lambda s=settings: open_sft(s, tokenizer))  # type: ignore[misc]
    asked.settle()
    data = found.get("train")
    assert dims is not None and data is not None, "a step failed without a word"
    return dims, data, found.get("valid")


@dataclass(slots=True)
class HeldOut:
    """The loss on examples that are not trained."""

    data: SftDataset
    learner: Learner
    frequency: Frequency

    def evaluate(self, version: int) -> dict[str, float | int]:
        started = time.monotonic()
        rows = self.data.batch(0, len(self.data))
        total, count = 0.0, 0.0
        for row, output in zip(rows, self.learner.forward(rows), strict=True):
            weights = row.columns["weights"]
            total -= float((output["logprobs"].cpu() * weights).sum())
            count += float(weights.sum())
        return {
            "version": version,
            "num_prompts": len(rows),
            "loss": total / count,
            "seconds": time.monotonic() - started,
        }


def train(
    lead: Lead,
    run: OpenRun,
    learner: Learner,
    data: SftDataset,
    held_out: HeldOut | None,
    bounds: Bounds,
    trained: int,
    num_steps: int,
    size: int,
    stop: StopFlag,
    saver: Saver,
    recover: RecoverHandler,
) -> RunSummary:
    loss = SftLoss()

    def evaluate(version: int) -> None:
        assert held_out is not None
        found = held_out.evaluate(version)
        saver.scored(version - 1, -found["loss"])
        run.recorder.evaluation(found)

    try:
        if held_out and not run.recorder.evaluated():
            evaluate(trained)
        for step in range(trained, num_steps):
            if stop.reason:
                break
            lead.report(step + 1)
            timer = PhaseTimer()
            rows: list[Row] = data.batch(step, size)
            with timer.phase("train"):
                learner.begin_step()
                learner.accumulate(rows, loss)
                result = learner.end_step()
            trained = step + 1
            if result.skipped:
                log.warning("step %d: nothing was updated: %s", step + 1, result.reason)
            if held_out and (held_out.frequency.is_due(step + 1) or step + 1 == num_steps):
                with timer.phase("evaluate"):
                    evaluate(step + 1)
            sentence = bounds.past([result])
            with timer.phase("save"):
                saver.after_step(step)
                recover.after_step(step)
            lengths = [len(row.ids) for row in rows]
            record = run.steps.sft_record(step + 1, result, lengths, timer, saver, recover)
            run.recorder.step(record)
            recover.commit()
            if sentence:
                raise RunError(f"step {trained}: {sentence}")
        recover.finish()
        folder = saver.finish(trained - 1) if trained else None
    except KeyboardInterrupt:
        name, next_start = stop.reason, recover.next_start
        raise cut_short(name, trained + 1, saver.good, next_start) from None
    except Exception:
        save_after_failure(lead, recover, [saver], trained)
        raise
    stop.check_complete(trained, num_steps, folder, next_start=recover.next_start)
    assert folder is not None, "a complete run has steps"
    return RunSummary(run.folder.path, folder, trained, run.recorder.evaluations())
