"""The context of a run: its folders, log, records and screen, and the record of how it ended."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from pentad.checkpoint.folders import (
    Unreadable,
    find_checkpoints,
)
from pentad.checkpoint.tiers import Tiers
from pentad.config.environments import environments
from pentad.config.load import record_values
from pentad.config.rules.unused_keys import Command, unread
from pentad.config.schema import Config
from pentad.core.device import gpu_name
from pentad.core.dims import ModelDims
from pentad.core.errors import (
    Crashed,
    RunError,
    Stopped,
    UserError,
    may_pass,
)
from pentad.core.faults import check_armed
from pentad.core.layout import Layout
from pentad.core.machine import GIB, host_memory
from pentad.core.seeds import seed_globals
from pentad.core.sizes import PROCESS_BYTES, RunSize, export_bytes
from pentad.engine.flops import detect_peak_tflops
from pentad.planner.adapters import folder_bytes
from pentad.planner.figures import Device
from pentad.planner.remedies import saves_beside
from pentad.rl.health import find_alarms
from pentad.runtime.environment import determinism_restored
from pentad.runtime.restarts import is_restart
from pentad.telemetry import host
from pentad.telemetry.log import NOTICE, log_to
from pentad.telemetry.recorder import Recorder
from pentad.telemetry.runfolder import RunFolder, describe_start, write_json
from pentad.telemetry.screen import Screen, open_screen
from pentad.telemetry.sinks import build_sinks
from pentad.trainer.preflight import kind_of
from pentad.trainer.processes.resources import Regroup
from pentad.trainer.records import StepRecorder
from pentad.trainer.run_folders import (
    checkpoint_path,
    describe_progress,
    now_text,
    take_folder,
)
from pentad.trainer.saving.batches import BatchKeeper
from pentad.trainer.saving.periodic import Frequency
from pentad.trainer.section import FrequencyConfig
from pentad.trainer.stopping import stop_early

log = logging.getLogger(__name__)


@dataclass(slots=True)
class RunSummary:
    """Results of a run: its folders and figures."""

    records: Path
    """The run folder."""
    model: Path
    """The last HF export; for a run that only samples, the folder of its groups."""
    num_steps: int
    evals: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """State of a run besides learners and data: its config, locked run folder, records and
    devices."""

    config: Config
    stack: ExitStack
    """Closed at the end of the run."""
    folder: RunFolder
    recorder: Recorder
    steps: StepRecorder
    checkpoints: Path
    steps_per_epoch: int
    num_steps: int
    """Steps of the whole run."""
    export_bytes: float
    saves_beside: bool
    device: torch.device
    layout: Layout
    """The layout of the actor."""

    def frequency(self, config: FrequencyConfig) -> Frequency:
        return Frequency(
            epochs=config.freq_epochs,
            steps=config.freq_steps,
            seconds=config.freq_secs,
            steps_per_epoch=self.steps_per_epoch,
        )

    def tiers(self) -> Tiers:
        recover = self.config.recover
        remote = self.config.remote if recover.is_on else None
        return Tiers(self.checkpoints, remote, keep_last=recover.keep_last, is_again=is_restart())

    def batch_keeper(self, size: RunSize) -> BatchKeeper:
        """Keeps the batches that a replay of this start's steps needs."""
        facts = {
            "generation": self.recorder.generation,
            "config": record_values(self.config),
            "size": asdict(size),
            "place": place_of(self.device, self.layout),
        }
        return BatchKeeper(self.folder.file("batches/"), self.config.telemetry.keep_batches, facts)

    def started(self, trained: int, **facts: Any) -> None:
        """Writes this start, and the findings before its first step, to the manifest."""
        saving = "async" if self.saves_beside else "sync"
        generation = self.recorder.generation
        more = {"from_step": trained, "generation": generation, "saver_mode": saving}
        more |= {"opened_s": self.recorder.opened_s, "device": str(self.device)}
        more |= {"num_steps": self.num_steps}
        self.folder.add_start(describe_start(**more, **facts))


class RunData(Protocol):
    """The data that a run samples prompts from or trains on."""

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
    is_shown: bool = True,
) -> Iterator[RunContext]:
    """Locks the run folder and opens log, sinks and screen; always closes them. `is_shown`: whether
    there is a screen."""
    size, layout = config.train_dataset.batch_size, config.layout("actor")
    steps_per_epoch = data.steps_per_epoch(size)
    num_steps = config.total_train_steps or steps_per_epoch * config.total_train_epochs
    checkpoints, telemetry = checkpoint_path(config), config.telemetry
    # At every start of the learners; a checkpoint restores later states.
    seed_globals(config.seed, "scheduler")
    with ExitStack() as stack:
        folder = stack.enter_context(take_folder(config, fresh=fresh))
        stack.enter_context(log_to(folder.file("log.txt"), is_shown=is_shown))
        stack.enter_context(determinism_restored())
        stack.enter_context(noted_end(folder, checkpoints))
        stack.enter_context(stop_early(partial(describe_progress, config)))
        warnings = [*unread(config, command), *data.run_warnings(size)]
        log_start(config, [*notes, data.summary()], warnings, steps_per_epoch)
        for note in data.notes:
            log.info("%s", note, extra=NOTICE)
        name = f"{config.experiment_name}/{config.trial_name}"
        screen = start_screen(f"{title} {name}", num_steps) if is_shown else None
        recorder = open_recorder(config, folder, name, screen)
        stack.callback(recorder.close)
        steps = StepRecorder(
            dims,
            layout=layout,
            peak_tflops=telemetry.hardware_peak_tflops or detect_peak_tflops(device),
            steps_per_epoch=steps_per_epoch,
            mfu_target=telemetry.mfu_target,
        )
        yield RunContext(
            config=config,
            stack=stack,
            folder=folder,
            recorder=recorder,
            steps=steps,
            checkpoints=checkpoints,
            steps_per_epoch=steps_per_epoch,
            num_steps=num_steps,
            export_bytes=export_size(config, dims, device),
            saves_beside=writes_beside(config, device, layout),
            device=device,
            layout=layout,
        )
        folder.check_there()


def open_recorder(config: Config, folder: RunFolder, name: str, screen: Screen | None) -> Recorder:
    telemetry = config.telemetry
    sinks = build_sinks(
        folder.path,
        tensorboard=telemetry.tensorboard,
        wandb=telemetry.wandb,
        trackio=telemetry.trackio,
        run_name=name,
    )
    return Recorder(
        folder,
        screen,
        sinks,
        samples_per_step=telemetry.samples_per_step,
        seed=config.seed,
        answer_keys={one.name: one.data.answer_key for one in environments(config)},
        find_alarms=partial(
            find_alarms,
            correction=config.algorithm.correction,
            has_penalty=bool(config.algorithm.overlong_penalty),
            compares_samples=config.algorithm.facts.min_group_size > 1,
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
            extra=NOTICE if config.total_train_epochs > 1 else None,  # only if the user set it
        )
    if not (config.saver.is_periodic or config.recover.is_on):
        log.info(
            "the model is saved at the end and not before, and recover.mode = %s: a run that "
            "is killed leaves nothing; saver.freq_steps=N saves it every N steps",
            config.recover.mode,
            extra=NOTICE,
        )


@contextmanager
def noted_end(folder: RunFolder, checkpoints: Path, *, is_last: bool = True) -> Iterator[None]:
    """Writes to the log and to exit.json how this start of the run ended. Converts an OSError to a
    one-line error. `is_last`: the run is complete after the block."""
    marker = folder.file("exit.json")
    marker.unlink(missing_ok=True)

    def note(end: str, reason: str = "") -> None:
        saved: int | None = None
        with suppress(Unreadable):
            found = find_checkpoints(checkpoints, report=log.debug)
            saved = found[0].step + 1 if found else 0
        with suppress(OSError):  # a full disk, or a deleted folder
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


def writes_beside(config: Config, device: torch.device, layout: Layout) -> bool:
    """Whether saves are written while training continues; warns if `auto` finds too little
    memory."""
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
    """Bytes of one HF folder, or of one PEFT folder; 0 if the dimensions are unknown."""
    if not dims.is_whole:
        return 0.0
    if config.actor.lora is not None:
        return folder_bytes(dims, config.actor.lora)
    return export_bytes(dims, config.actor.bytes_on(kind_of(device)))


def start_screen(title: str, num_steps: int) -> Screen | None:
    """Opens the screen; None without stdout: a closed pipe or terminal must not stop training."""
    if sys.stdout is None:
        return None
    try:
        return open_screen(title, num_steps)
    except OSError as error:
        log.warning("the screen: %s; training continues", error)
        return None


def place_of(device: torch.device, layout: Layout) -> dict[str, Any]:
    """Returns the hardware and library versions that may change the last bits of results."""
    name = gpu_name(device) if device.type == "cuda" else host.hardware()["cpu"]
    return {
        "device": name or device.type,
        "layout": str(layout),
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "torch": torch.__version__,
    }
