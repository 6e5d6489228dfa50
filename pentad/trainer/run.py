"""What every run has besides its loop: folders, records, screen, exports, and the summary."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from pentad.checkpoint.folders import (
    MANIFEST,
    Checkpoint,
    Unreadable,
    find_checkpoints,
    reading,
)
from pentad.checkpoint.tiers import Tiers
from pentad.config.derived import compute_bytes, is_saved_within, layout_of
from pentad.config.describe import show
from pentad.config.rules.checkpoint import changed_keys, fixed_problems
from pentad.config.rules.unused_keys import Command, unread
from pentad.config.schema import Config, FrequencyConfig
from pentad.core.device import gpu_name
from pentad.core.dims import ModelDims
from pentad.core.errors import (
    Crashed,
    Problem,
    RunError,
    Stopped,
    UserError,
    may_pass,
    raise_problems,
    visible,
)
from pentad.core.faults import check_armed
from pentad.core.layout import Layout
from pentad.core.machine import GIB, host_memory
from pentad.core.seeds import seed_globals
from pentad.core.sizes import PROCESS_BYTES, RunSize, export_bytes
from pentad.engine.flops import detect_peak_tflops
from pentad.planner.figures import Device
from pentad.planner.remedies import saves_beside
from pentad.rl.bounds import Bounds
from pentad.rl.health import find_alarms
from pentad.runtime.environment import determinism_restored
from pentad.telemetry import host
from pentad.telemetry.log import NOTICE, announced, log_to
from pentad.telemetry.recorder import Recorder
from pentad.telemetry.runfolder import RunFolder, describe_start, set_aside, write_json
from pentad.telemetry.screen import Screen, open_screen
from pentad.telemetry.sinks import build_sinks
from pentad.trainer.batches import BatchKeeper
from pentad.trainer.crew import Regroup
from pentad.trainer.learner_thread import Calls
from pentad.trainer.periodic import Frequency
from pentad.trainer.preflight import is_again, kind_of
from pentad.trainer.records import StepRecorder
from pentad.trainer.recovery import Check, RecoverHandler
from pentad.trainer.run_folders import (
    accept_config,
    checkpoint_path,
    digest_of_config,
    now_text,
    standing,
    take_folder,
)
from pentad.trainer.saver import Saver
from pentad.trainer.state import ProcessRandom
from pentad.trainer.stopping import stop_early
from pentad.trainer.translate import remote_of

log = logging.getLogger(__name__)

FOLDERS = {"default": "actor", "critic": "critic"}
"""In the checkpoint folder -> the role of the learner whose weights lie there."""


@dataclass(slots=True)
class RunSummary:
    """What is left of a run for whoever started it."""

    records: Path
    """The run folder."""
    model: Path
    """The last HF export."""
    num_steps: int
    evals: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class OpenRun:
    """A run whose folder is ours and whose records are being written."""

    config: Config
    stack: ExitStack
    """Closed at the end of the run."""
    folder: RunFolder
    recorder: Recorder
    steps: StepRecorder
    checkpoints: Path
    steps_per_epoch: int
    num_steps: int
    """Of the whole run."""
    export_bytes: float
    saves_beside: bool
    device: torch.device
    layout: Layout
    """Of the actor."""

    def build(self, calls: Calls, **given: Any) -> None:
        """The models, on all ranks."""
        with announced(log, "making the model"):
            calls.call("build", **given)
        self.steps.num_nodes = calls.call("count_nodes")
        self.steps.find_straggler = lambda: calls.straggler

    def saver(self, calls: Calls, folder: str) -> Saver:
        return Saver(
            calls=calls,
            role=FOLDERS[folder],
            root=self.checkpoints / folder,
            frequency=self.frequency(self.config.saver),
            steps_per_epoch=self.steps_per_epoch,
            is_async=self.saves_beside,
            size_bytes=self.export_bytes,
            keep_last=self.config.saver.keep_last,
            keep_best=self.config.saver.keep_best,
        )

    def frequency(self, config: FrequencyConfig) -> Frequency:
        return Frequency(
            epochs=config.freq_epochs,
            steps=config.freq_steps,
            seconds=config.freq_secs,
            steps_per_epoch=self.steps_per_epoch,
        )

    def batches(self, size: RunSize) -> BatchKeeper:
        """Keeps what a replay of this start's steps needs."""
        facts = {
            "generation": self.recorder.generation,
            "config": self.config.model_dump(mode="json"),
            "size": asdict(size),
            "place": place_of(self.device, self.layout),
        }
        return BatchKeeper(self.folder.file("batches/"), self.config.telemetry.keep_batches, facts)

    def recovery(self, calls: Calls, savers: Mapping[str, Saver]) -> RecoverHandler:
        """Of a run with these savers, by the names of their folders."""
        recover, values = self.config.recover, self.config.model_dump(mode="json")
        facts = {
            "config": values,
            "config_digest": digest_of_config(values),
            "allocation_mode": self.config.allocation_mode,
            "versions": host.versions(),
        }
        handler = RecoverHandler(
            calls=calls,
            roles={folder: saver.role for folder, saver in savers.items()},
            tiers=self._tiers(),
            frequency=self.frequency(recover),
            steps_per_epoch=self.steps_per_epoch,
            is_on=recover.is_on,
            is_async=self.saves_beside,
            upload_timeout_s=self.config.checkpoint.finish_timeout_s,
            before_commit=self.recorder.sync,
            facts=lambda: {**facts, "time": now_text()},
        )
        self.stack.push(lambda kind, *_: handler.close(is_failed=kind is not None))
        handler.add("checkpoint_info", "frequency", handler.frequency)
        handler.add("stats_logger_info", "recorder", self.recorder)
        handler.add("stats_logger_info", "steps", self.steps)
        if calls.is_apart:  # else it is part of the learner's state
            handler.add("dataloader_info", "random", ProcessRandom())
        for folder, saver in savers.items():
            handler.add("saver_info", folder, saver)
        return handler

    def _tiers(self) -> Tiers:
        recover = self.config.recover
        remote = remote_of(self.config) if recover.is_on else None
        return Tiers(self.checkpoints, remote, keep_last=recover.keep_last, is_again=is_again())

    def go_back(self, handler: RecoverHandler, bounds: Bounds, step: int, sentence: str) -> str:
        """The sentence that ends the run after `step`, counted from 0; empty where a checkpoint is
        put in the place of weights that give no usable gradient."""
        if not (sentence and bounds.may_roll_back):
            return sentence
        to = handler.roll_back(step, bounds.rollbacks)
        if to is None:
            return sentence
        bounds.rolled_back(step, to)
        self.steps.rolled_back_to = to + 1
        log.warning(
            "step %d: %s. The weights and the optimizer state of step %d are put back (rollback %d "
            "of guards.max_rollbacks = %d); steps and data go on",
            step + 1,
            sentence.partition(":")[0],
            to + 1,
            len(bounds.rollbacks),
            bounds.settings.max_rollbacks,
        )
        return ""

    def resume(self, handler: RecoverHandler, check: Check) -> Checkpoint | None:
        """Goes on from the newest checkpoint that is whole, and logs it; None: from the start."""
        if not handler.is_on:
            return None
        is_known = bool(self.folder.manifest["starts"])

        def accept(checkpoint: Checkpoint) -> None:
            facts = checkpoint.manifest.facts
            with reading(checkpoint.root / checkpoint.info / MANIFEST):
                before = facts["config"]
                _ = facts["time"], before["train_dataset"]["batch_size"]
                _ = [before[tag]["path"] for tag in ("ref", "teacher")]
                if not is_known:  # the records are elsewhere, or gone
                    self.folder.changes = accept_config(self.config, before)
            raise_problems(fixed_problems(before, self.config.model_dump(mode="json")))
            check(checkpoint)

        checkpoint = handler.restore(accept)
        if checkpoint is None and is_known:
            self._check_place()
        trained = 0 if checkpoint is None else checkpoint.step + 1
        redone = self.recorder.resume(trained)
        for change in self.folder.changes:
            log.info("the config differs from the start before: %s", change, extra=NOTICE)
        some, verb = (
            ("1 step that was", "is") if redone == 1 else (f"{redone} steps that were", "are")
        )
        again = f"; {some} recorded since {verb} done again" if redone else ""
        if checkpoint is not None:
            place = checkpoint.root / checkpoint.info
            saved = visible(str(checkpoint.manifest.facts["time"]))
            log.info(
                "resumed after step %d from %s (%s)%s", trained, place, saved, again, extra=NOTICE
            )
            for change in changed_versions(checkpoint.manifest.facts.get("versions")):
                log.info("%s", change, extra=NOTICE)
        elif redone:
            place = self.checkpoints
            models = ""
            for moved in set_aside([place]):
                if list(moved.glob("*/epoch*")):
                    models = f"; earlier models are in {moved}"
            text = "no recovery checkpoint in %s: the run starts again at step 1%s%s"
            log.info(text, place, again, models, extra=NOTICE)
        return checkpoint

    def _check_place(self) -> None:
        """UserError if the checkpoints of the run are where they are not looked for any more."""
        former = self.folder.manifest["config"].get("checkpoint")
        former = former.get("local_dir") if isinstance(former, dict) else None
        if not isinstance(former, str | None):
            former = None
        checkpoint = self.config.checkpoint.model_copy(update={"local_dir": former})
        place = checkpoint_path(self.config.model_copy(update={"checkpoint": checkpoint}))
        if place != self.checkpoints and find_checkpoints(place, report=log.info):
            rule = f"the run's recovery checkpoints are in {place}"
            remedy = f"move that folder to {self.checkpoints}, set it back, or start with --fresh"
            where = f"checkpoint.local_dir = {show(self.config.checkpoint.local_dir)}"
            raise UserError(Problem(where, rule, remedy))

    def finished(
        self, *, roles: Sequence[str] = ("default",), evaluates: bool
    ) -> RunSummary | None:
        """Of a run that did all its steps before, has the model of every role and, if it
        `evaluates`, the score of the last step; None where there is work."""
        if not self.config.recover.is_on:
            return None
        found = find_checkpoints(self.checkpoints, report=log.info)
        trained = found[0].step + 1 if found else 0
        last = f"epoch*globalstep{trained - 1}"
        models = [list((self.checkpoints / role).glob(last)) for role in roles]
        if not trained or trained < self.num_steps or not all(models):
            return None
        if evaluates and trained not in self.recorder.evaluated():
            return None
        log.info("the run is finished: all its %d steps are done", trained, extra=NOTICE)
        tiers = self._tiers()
        tiers.after_commit(trained - 1)  # the store may have been away at the end of the run
        tiers.close(self.config.checkpoint.finish_timeout_s)
        evals = self.recorder.evaluations()
        return RunSummary(self.folder.path, models[0][0], trained, evals)

    def started(self, trained: int, **facts: Any) -> None:
        """Notes this start, and what was found out before its first step, in the manifest."""
        saving = "async" if self.saves_beside else "sync"
        generation = self.recorder.generation
        more = {"from_step": trained, "generation": generation, "saver_mode": saving}
        more |= {"opened_s": self.recorder.opened_s, "device": str(self.device)}
        self.folder.add_start(describe_start(**more, **facts))


class RunData(Protocol):
    """What a run samples from or learns from."""

    def summary(self) -> str: ...

    def steps_per_epoch(self, size: int) -> int: ...

    def run_warnings(self, size: int) -> list[str]: ...

    @property
    def notes(self) -> Sequence[str]: ...


@contextmanager
def open_run(
    config: Config,
    notes: Sequence[str],
    data: RunData,
    *,
    command: Command = "train",
    title: str,
    fresh: bool,
    dims: ModelDims,
    device: torch.device,
) -> Iterator[OpenRun]:
    """Takes the run folder, opens log, sinks and screen, and closes them in any case."""
    size, layout = config.train_dataset.batch_size, layout_of(config, "actor")
    steps_per_epoch = data.steps_per_epoch(size)
    num_steps = config.total_train_steps or steps_per_epoch * config.total_train_epochs
    checkpoints, telemetry = checkpoint_path(config), config.telemetry
    seed_globals(config.seed, "scheduler")  # each time learners start: a checkpoint has the rest
    with ExitStack() as stack:
        folder = stack.enter_context(take_folder(config, fresh=fresh))
        stack.enter_context(log_to(folder.file("log.txt")))
        stack.enter_context(determinism_restored())
        stack.enter_context(noted_end(folder, checkpoints))
        stack.enter_context(stop_early(partial(standing, config)))
        warnings = [*unread(config, command), *data.run_warnings(size)]
        log_start(config, [*notes, data.summary()], warnings, steps_per_epoch)
        for note in data.notes:
            log.info("%s", note, extra=NOTICE)
        recorder = open_recorder(config, folder, title, num_steps)
        stack.callback(recorder.close)
        steps = StepRecorder(
            dims,
            layout=layout,
            peak_tflops=telemetry.hardware_peak_tflops or detect_peak_tflops(device),
            steps_per_epoch=steps_per_epoch,
            mfu_target=telemetry.mfu_target,
        )
        yield OpenRun(
            config,
            stack,
            folder,
            recorder,
            steps,
            checkpoints,
            steps_per_epoch,
            num_steps,
            export_size(config, dims, device),
            writes_beside(config, device, layout),
            device,
            layout,
        )
        folder.check_there()


def open_recorder(config: Config, folder: RunFolder, title: str, num_steps: int) -> Recorder:
    telemetry, name = config.telemetry, f"{config.experiment_name}/{config.trial_name}"
    sinks = build_sinks(
        folder.path,
        tensorboard=telemetry.tensorboard,
        wandb=telemetry.wandb,
        run_name=name,
    )
    return Recorder(
        folder,
        start_screen(f"{title} {name}", num_steps),
        sinks,
        samples_per_step=telemetry.samples_per_step,
        seed=config.seed,
        answer_key=config.train_dataset.answer_key,
        find_alarms=partial(
            find_alarms,
            correction=config.algorithm.correction or "none",
            has_penalty=bool(config.algorithm.settings.overlong_penalty),
        ),
    )


def log_start(
    config: Config, notes: Sequence[str], warnings: Sequence[str], steps_per_epoch: int
) -> None:
    for note in notes:
        log.info("%s", note)
    for warning in warnings:
        log.warning("%s", warning)
    if armed := check_armed():
        log.warning("%s", armed)
    asked, by_epochs = config.total_train_steps, steps_per_epoch * config.total_train_epochs
    if asked is not None and asked > by_epochs:
        log.info(
            "total_train_steps = %d: it overrides total_train_epochs = %d, which is %d steps",
            *(asked, config.total_train_epochs, by_epochs),
            extra=NOTICE,
        )
    if not (is_saved_within(config) or config.recover.is_on):
        log.info(
            "the model is saved at the end and not before, and recover.mode = %s: a run that "
            "is killed leaves nothing; saver.freq_steps=N saves it every N steps",
            config.recover.mode,
            extra=NOTICE,
        )


@contextmanager
def noted_end(folder: RunFolder, checkpoints: Path, *, is_last: bool = True) -> Iterator[None]:
    """How this start of the run ended goes to its log and to exit.json; a refusal of the operating
    system is a sentence. `is_last`: the run is complete after this part of it."""
    marker = folder.file("exit.json")
    marker.unlink(missing_ok=True)

    def note(end: str, reason: str = "") -> None:
        saved: int | None = None
        with suppress(Unreadable):
            found = find_checkpoints(checkpoints, report=log.debug)
            saved = found[0].step + 1 if found else 0
        with suppress(OSError):  # a full disk, or a folder that is gone
            write_json(
                marker, {"end": end, "reason": reason, "saved_step": saved, "at": now_text()}
            )

    try:
        yield
    except OSError as error:
        log.info("the run failed", exc_info=True)
        note("failed", str(error))
        kind = Crashed if may_pass(error) else RunError
        raise kind(f"the operating system refused: {error}") from error
    except (UserError, RunError) as error:
        log.info("the run ended: %s", error)
        note("stopped" if isinstance(error, Stopped) else "failed", str(error))
        raise
    except Regroup:
        raise
    except BaseException as error:
        log.info("the run failed", exc_info=True)
        note("failed", repr(error))
        raise
    if is_last:
        log.info("the run is complete")
        note("complete")


def changed_versions(before: Any) -> list[str]:
    """What is installed in another version than when a checkpoint was saved, in words."""
    if not isinstance(before, Mapping):
        return []
    return [
        f"{visible(name)} was {visible(str(was or 'not installed'))} when the checkpoint was "
        f"saved, and is {now or 'not installed'}: numbers may differ in their last bits"
        for name, was, now in changed_keys(before, host.versions())
    ]


def writes_beside(config: Config, device: torch.device, layout: Layout) -> bool:
    """Whether saves are written while training goes on; warns where `auto` finds no room."""
    local = min(layout.world, config.cluster.n_gpus_per_node or layout.world)
    own = local * min((host.rss_gb() or 0.0) * 1e9, PROCESS_BYTES[kind_of(device)])
    here = Device(kind_of(device), host_memory()[1], "this machine")
    found = saves_beside(config, here, own)
    if config.saver.mode == "auto" and not found:
        log.warning(
            "saver.mode = auto: training waits while the model is saved, since %.3g GiB of host "
            "memory are too little for the run and a copy of what is saved",
            here.host_bytes / GIB,
        )
    return found


def export_size(config: Config, dims: ModelDims, device: torch.device) -> float:
    """Bytes of one HF folder; 0 where the dimensions are not known."""
    return (
        export_bytes(dims, compute_bytes(config.actor, kind_of(device))) if dims.is_whole else 0.0
    )


def start_screen(title: str, num_steps: int) -> Screen | None:
    """None without an output: a closed pipe or terminal is no reason not to train."""
    if sys.stdout is None:
        return None
    try:
        return open_screen(title, num_steps)
    except OSError as error:
        log.warning("the screen: %s; training goes on", error)
        return None


def place_of(device: torch.device, layout: Layout) -> dict[str, Any]:
    """What numbers may differ by in their last bits."""
    name = gpu_name(device) if device.type == "cuda" else host.hardware()["cpu"]
    return {
        "device": name or device.type,
        "layout": str(layout),
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "torch": torch.__version__,
    }
