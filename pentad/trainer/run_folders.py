"""The two folders of a run, for records and for checkpoints: paths, locks, and the check that the
config still matches their content."""

from __future__ import annotations

import datetime
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pentad.checkpoint.folders import find_checkpoints, list_folders
from pentad.checkpoint.quarantine import sweep_uncommitted
from pentad.config.describe import show
from pentad.config.load import dump_config, record_values, with_hub_names
from pentad.config.rules.checkpoint import changed_keys, judge_changes
from pentad.config.schema import Config
from pentad.core.errors import FULL, Problem, RunError, UserError, may_pass
from pentad.core.files import json_digest, sweep
from pentad.core.folders import INFO
from pentad.core.lock import FolderLock
from pentad.core.section import chosen
from pentad.telemetry.log import log_to
from pentad.telemetry.runfolder import RunFolder, open_run_folder

if TYPE_CHECKING:
    from pentad.checkpoint.s3 import Store

log = logging.getLogger(__name__)


def oldest_saved(config: Config) -> int:
    """Returns the steps in the oldest recovery checkpoint; `sys.maxsize` if recovery is off."""
    if not config.recover.is_on:
        return sys.maxsize
    found = find_checkpoints(checkpoint_path(config), report=log.debug)
    return found[-1].step + 1 if found else 0


def checkpoint_path(config: Config) -> Path:
    """Returns the folder of a run's exports, which has a subfolder for each role."""
    root = Path(config.checkpoint_root).expanduser()
    return root / chosen(config.user, "user") / config.experiment_name / config.trial_name


def describe_progress(config: Config) -> str:
    """Describes the progress of a run before its first step."""
    found = find_checkpoints(checkpoint_path(config), log.debug) if config.recover.is_on else []
    if found:
        step = found[0].step + 1
        return f"the run has done step {step}; started again, it resumes there"
    is_far = config.recover.is_on and config.checkpoint.remote_uri is not None
    return "nothing was trained" + (" since it was started" if is_far else "")


def accept_config(config: Config, before: Mapping[str, Any]) -> list[str]:
    """Describes allowed differences from the config of an earlier start; UserError for others."""
    values, before = record_values(config), with_hub_names(before)
    recover = config.recover
    if recover.is_on:
        changes = judge_changes(before, values, recover.allow)
        if changes.refused:
            raise UserError(changes.refused)
        return changes.accepted
    changed = [
        f"{key} was {show(old)}, is {show(new)}" for key, old, new in changed_keys(before, values)
    ]
    if changed:
        said = "; ".join(changed[:5])
        said += f"; and {len(changed) - 5} more" if changed[5:] else ""
        remedy = "choose another trial_name, restore the config, or start over with --fresh"
        where = f"trial_name = {config.trial_name}"
        raise UserError(Problem(where, f"belongs to a run with another config ({said})", remedy))
    return []


def sweep_all(root: Path) -> None:
    """Removes leftovers of a killed run; UserError if that fails."""
    with writing_checkpoints(root):
        swept = sweep_uncommitted(root)  # first: it raises if the storage cannot be read
        roles = [root / name for name in list_folders(root) if name[0] != "."]
        for left in [*swept, *(left for role in roles for left in sweep(role))]:
            log.info("%s: removed what a killed run left", left)


@contextmanager
def writing_checkpoints(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if may_pass(error) and error.errno not in FULL:
            raise RunError(f"checkpoint folder = {root}: {error}; start again later") from error
        rule = f"cannot be written ({error.strerror})"
        remedy = "make it writable, with free space, or set checkpoint.local_dir"
        raise UserError(Problem(f"checkpoint folder = {root}", rule, remedy)) from error


@contextmanager
def locked_checkpoints(config: Config, root: Path) -> Iterator[None]:
    """Locks the checkpoints. In `fileroot` the lock of the run folder suffices."""
    if config.checkpoint.local_dir is None:
        yield
        return
    with writing_checkpoints(root):
        # Next to the folder, so that checkpoints from elsewhere can be moved there.
        lock = FolderLock(root.parent, f"checkpoint folder = {root}", f".{root.name}.lock")
    with closing(lock):
        yield


@contextmanager
def take_folder(config: Config, *, fresh: bool) -> Iterator[RunFolder]:
    """Locks the run folder until the end; UserError if that is not possible."""
    values, root = record_values(config), checkpoint_path(config)
    store = _superseded_store(config) if fresh else None
    with ExitStack() as stack:
        stack.enter_context(locked_checkpoints(config, root))
        folder = open_run_folder(
            config.run_path,
            config=values,
            config_yaml=dump_config(config),
            config_digest=json_digest(values),
            seed=config.seed,
            fresh=fresh,
            exports=root,
            accept=partial(accept_config, config),
            resumes=config.recover.is_on,
            has_checkpoint=not fresh and bool(find_checkpoints(root, report=log.info)),
        )
        stack.enter_context(closing(folder))
        if store is not None:
            from pentad.checkpoint.fetch import give_up

            give_up(store)
        with log_to(folder.file("log.txt")):
            sweep_all(root)
        yield folder


def _superseded_store(config: Config) -> Store | None:
    """Returns the store whose checkpoints a fresh start discards. If it does not answer, raises
    StoreError before anything is moved."""
    remote = config.remote
    if remote is None:
        return None
    from pentad.checkpoint.s3 import Store

    store = Store(remote)
    store.sizes(f"{INFO}/")
    return store


def now_text() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
