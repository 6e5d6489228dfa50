"""`pentad verify-checkpoint --restore`: verifies checkpoints that were renamed as damaged, and
gives intact ones their names back."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pentad.checkpoint.folders import DAMAGED, INFO, Damaged, info_folder, read_checkpoint
from pentad.checkpoint.quarantine import list_aside, put_back
from pentad.cli.verify_checkpoint import (
    FoundCheckpoint,
    local_checkpoint,
    open_store,
    remote_checkpoint,
    split_place,
    unusable,
)
from pentad.core.errors import Problem, RunError, UserError
from pentad.core.lock import NAME, is_held

if TYPE_CHECKING:
    from pentad.checkpoint.s3 import Store

Found = tuple[FoundCheckpoint, Callable[[], object]]
"""A checkpoint, and the function that restores its name."""


@dataclass(frozen=True, slots=True)
class Aside:
    """A checkpoint that was renamed as damaged."""

    step: int
    suffix: str
    place: str
    read: Callable[[], Found]
    """Raises Damaged."""


def run_restore(place: str, endpoint_url: str | None, region: str | None) -> int:
    """Returns 0 if all of them are intact and were renamed back; 1 otherwise."""
    folder, step, suffix = split_aside(place)
    if "://" in place:
        every = remote_asides(open_store(place, folder, endpoint_url, region))
    else:
        every = local_asides(Path(folder))
    found = [a for a in every if step in (None, a.step) and suffix in ("", a.suffix)]
    if not found:
        raise RunError(f"{place}: holds no checkpoint that was set aside as {DAMAGED}")
    return max([_restore(aside) for aside in found])


def _restore(aside: Aside) -> int:
    notes: list[str] = []
    try:
        one, back = aside.read()
        faults = one.damage() or unusable(one, notes)
    except Damaged as error:
        faults = [str(error)]
    for note in notes:
        print(f"{note}.")
    if faults:
        more = f" (and {len(faults) - 1} more)" if faults[1:] else ""
        print(f"{aside.place}: is damaged, and stays set aside: {faults[0]}{more}.")
        return 1
    back()
    print(f"{aside.place}: every byte is as saved; the checkpoint is restored.")
    return 0


def split_aside(place: str) -> tuple[str, int | None, str]:
    """The trial's root, and step and suffix if the path is the folder of one checkpoint."""
    found = re.search(rf"\.{DAMAGED}(-[0-9]+)?/*$", place)
    suffix = found[0].rstrip("/") if found else ""
    plain = place[: found.start()] if found else place
    if "://" not in place:
        plain = str(Path(plain).expanduser().absolute())
    return *split_place(plain), suffix


def local_asides(root: Path) -> Iterator[Aside]:
    if not (root / INFO).is_dir():
        remedy = "give the folder of a trial, {fileroot}/checkpoints/USER/EXPERIMENT/TRIAL"
        raise UserError(Problem(f"PATH = {root}", "holds no recovery checkpoints", remedy))
    refuse_running(root)
    for step, suffix in list_aside(root):
        place = f"{root / info_folder(step)}{suffix}"
        yield Aside(step, suffix, place, partial(_read_local, root, step, suffix))


def _read_local(root: Path, step: int, suffix: str) -> Found:
    one = read_checkpoint(root, step, suffix)
    if one is None:
        raise Damaged(f"{root / info_folder(step)}{suffix}: has no COMMIT.{DAMAGED}")
    return local_checkpoint(one), partial(put_back, one)


def refuse_running(root: Path) -> None:
    """Raises UserError while a run writes there, judged by its locks."""
    locks = [root.with_name(f".{root.name}.lock")]
    if len(root.parents) > 3 and root.parents[2].name == "checkpoints":
        locks.append(root.parents[3] / "logs" / root.relative_to(root.parents[2]) / NAME)
    for lock in locks:
        if lock.exists() and is_held(lock):
            rule = f"a run writes there ({lock} is held)"
            raise UserError(Problem(f"PATH = {root}", rule, "wait for its end"))


def remote_asides(store: Store) -> Iterator[Aside]:
    from pentad.checkpoint.fetch import ASIDE, committed_steps

    for step in committed_steps(store.sizes(f"{INFO}/"), ASIDE):
        yield Aside(step, "", store.place(info_folder(step)), partial(_read_remote, store, step))


def _read_remote(store: Store, step: int) -> Found:
    from pentad.checkpoint import fetch

    one = fetch.read_aside(store, step)
    return remote_checkpoint(one), partial(fetch.put_back, one)
