"""Sets damaged checkpoints aside, restores intact ones, removes remains of interrupted saves.

`globalstepG` becomes `globalstepG.damaged` in every folder that holds files of the checkpoint, and
its COMMIT `COMMIT.damaged`. If that is interrupted between two renames, the next start completes
it.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

from pentad.checkpoint.folders import (
    COMMIT,
    DAMAGED,
    Checkpoint,
    Damaged,
    folders_by_step,
    info_folder,
    list_folders,
    read_checkpoint,
)
from pentad.core.errors import RunError
from pentad.core.files import REAL_DISK, Disk, remove_tree
from pentad.core.folders import INFO, step_of

WHY = "why.txt"

log = logging.getLogger(__name__)


def quarantine(checkpoint: Checkpoint, why: str, disk: Disk = REAL_DISK) -> Path:
    """Sets a damaged checkpoint aside as `globalstepG.damaged`; returns its info folder there."""
    return _set_aside(checkpoint.root, checkpoint.step, checkpoint.folders(), why, disk)


def list_aside(root: Path) -> list[tuple[int, str]]:
    """Lists (step, suffix) of the checkpoints that were set aside, newest first."""
    found = []
    for name in list_folders(root / INFO):
        base, dot, suffix = name.partition(".")
        step = step_of(base)
        if step is not None and re.fullmatch(rf"{DAMAGED}(-[0-9]+)?", suffix):
            found.append((step, dot + suffix))
    return sorted(found, key=lambda one: (one[0], len(one[1]), one[1]), reverse=True)


def put_back(checkpoint: Checkpoint, disk: Disk = REAL_DISK) -> Path:
    """Restores the names of an intact checkpoint that was set aside, COMMIT last; returns its info
    folder."""
    root, step = checkpoint.root, checkpoint.step
    plain = Checkpoint(root, step, checkpoint.manifest)
    taken = [folder for folder in plain.folders() if folder.exists()]
    if taken:
        raise RunError(f"{taken[0]} exists: {checkpoint.folders()[-1]} cannot be restored")
    for old, new in reversed(list(zip(checkpoint.folders(), plain.folders(), strict=True))):
        disk.rename(old, new)
        disk.fsync_dir(new.parent)
    info = root / plain.info
    if (info / WHY).exists():
        disk.unlink(info / WHY)
    disk.rename(info / f"{COMMIT}.{DAMAGED}", info / COMMIT)
    disk.fsync_dir(info)
    return info


def sweep_uncommitted(root: str | Path, disk: Disk = REAL_DISK) -> list[Path]:
    """Removes remains of interrupted saves and removals, and returns them; the caller must hold the
    run lock. A checkpoint whose COMMIT does not match is set aside, with a warning. All are read
    before anything is changed."""
    root = Path(root)
    found = [(step, folders, _judge(root, step)) for step, folders in folders_by_step(root).items()]
    removed = []
    for step, folders, state in sorted(found, key=lambda one: one[0]):
        if isinstance(state, Damaged):
            place = _set_aside(root, step, folders, str(state), disk)
            log.warning("%s; the checkpoint is renamed to %s", state, place)
        elif state is not None:
            removed += _remove_leftovers(root / info_folder(step), disk)
        else:
            for folder in folders:
                remove_tree(disk, folder)
            removed += folders
    return removed + _remove_leftovers(root / INFO, disk)


def _judge(root: Path, step: int) -> Checkpoint | Damaged | None:
    try:
        return read_checkpoint(root, step)
    except Damaged as error:
        return error


def _remove_leftovers(folder: Path, disk: Disk) -> list[Path]:
    """Removes receipts and temporary files of a process that was killed between two operations."""
    found = [path for glob in (".*.receipt", ".*.aside-*") for path in folder.glob(glob)]
    for path in found:
        disk.unlink(path)
    return found


def _set_aside(root: Path, step: int, folders: list[Path], why: str, disk: Disk) -> Path:
    suffix = DAMAGED
    number = 1
    while any(folder.with_name(f"{folder.name}.{suffix}").exists() for folder in folders):
        number += 1
        suffix = f"{DAMAGED}-{number}"
    info = root / info_folder(step)
    if (info / COMMIT).exists():
        disk.rename(info / COMMIT, info / f"{COMMIT}.{DAMAGED}")
        disk.fsync_dir(info)
    if info.is_dir():
        (info / WHY).write_text(why + "\n", encoding="utf-8")
    for folder in folders:
        if folder.is_dir():
            disk.rename(folder, folder.with_name(f"{folder.name}.{suffix}"))
            disk.fsync_dir(folder.parent)
    return info.with_name(f"{info.name}.{suffix}")
