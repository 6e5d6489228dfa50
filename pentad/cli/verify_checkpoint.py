"""`pentad verify-checkpoint`: lists the contents of recovery checkpoints, verifies every byte,
compares two of them, and restores the names of intact ones that were renamed as damaged."""

from __future__ import annotations

import json as jsonlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pentad.checkpoint.folders import (
    DAMAGED,
    INFO,
    STATE,
    Checkpoint,
    Damaged,
    Manifest,
    damage,
    info_folder,
    json_object,
    list_steps,
    read_checkpoint,
    read_file,
    state_folder,
    step_of,
)
from pentad.checkpoint.quarantine import list_aside, put_back
from pentad.cli.output import make_table, print_parts
from pentad.config.rules.checkpoint import changed_keys
from pentad.config.rules.inputs import url_problem
from pentad.core.errors import Problem, RunError, UserError, one_line, visible
from pentad.core.lock import NAME, is_held
from pentad.core.machine import GIB, installed
from pentad.core.remote import Remote, split_uri

if TYPE_CHECKING:
    from pentad.checkpoint.fetch import RemoteCheckpoint
    from pentad.checkpoint.s3 import Store
    from pentad.weights.dcp import DcpFolder

MIN_WIDTH = 120
"""Minimum width of the table, so that a narrow terminal does not truncate names and figures."""
MAX_SHOWN = 20
MAX_LINES = 200
VALUE_CHARS = 60


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A committed checkpoint, local or in a store."""

    place: str
    manifest: Manifest
    damage: Callable[[], list[str]]
    read: Callable[[str], bytes]
    """Reads and verifies a small file."""
    open: Callable[[str], DcpFolder] | None = None
    """Opens the tensors of a role; None if they cannot be read one by one."""


@dataclass(frozen=True, slots=True)
class Location:
    """The location of a trial, or of one of its steps."""

    name: str
    steps: list[int]
    """Newest first; includes steps that were never committed."""
    read: Callable[[int], FoundCheckpoint | None]
    """Reads a step; returns None without a COMMIT, raises Damaged if it does not match."""


def run_verify_checkpoint(places: list[str], *, as_json: bool, **remote: str | None) -> int:
    """Returns 0 if every byte is as saved, 1 otherwise."""
    locations = [locate(place, **remote) for place in places]
    notes: list[str] = []
    faults: dict[str, list[str]] = {}
    found: list[FoundCheckpoint] = []
    for location in locations:
        # If two trials are compared, only the newest checkpoint of each.
        found += _find(location, 1 if len(locations) == 2 else None, notes, faults)
    is_whole = not any(faults.values())
    is_compared = len(found) == 2 == len(locations) and is_whole
    changes = list(differences(*found)) if is_compared else []
    if as_json:
        rows = [{**summary(one), "damage": faults[one.place]} for one in found]
        value = {"is_whole": is_whole, "checkpoints": rows, "notes": notes, "damage": faults}
        print(jsonlib.dumps({**value, "differences": changes}, indent=2))
    else:
        show(found, faults, notes)
        if is_compared:
            show_differences(changes)
    return 0 if is_whole else 1


def _find(
    location: Location, limit: int | None, notes: list[str], faults: dict[str, list[str]]
) -> list[FoundCheckpoint]:
    """Verified committed checkpoints, newest first; RunError if there is none."""
    out: list[FoundCheckpoint] = []
    for step in location.steps:
        place = f"{location.name}/{info_folder(step)}"
        try:
            one = location.read(step)
        except Damaged as error:
            faults[place] = [str(error)]
            continue
        if one is None:
            notes.append(f"{place}: was never committed, so it is not a checkpoint")
            continue
        faults[one.place] = one.damage() or unusable(one, notes)
        out.append(one)
        if len(out) == limit:
            break
    if not out and not faults:
        raise RunError(notes[0] if notes else f"{location.name}: holds no checkpoint")
    return out


def locate(place: str, endpoint_url: str | None = None, region: str | None = None) -> Location:
    """Finds a trial or step; UserError if there is none at the path."""
    if "://" in place:
        return locate_remote(place, endpoint_url, region)
    path = Path(place).expanduser().absolute()
    folder, step = split_place(str(path))
    root = Path(folder)
    if not (root / INFO).is_dir():
        trials = sorted(found.parent for found in path.glob(f"*/**/{INFO}"))
        remedy = "give the folder of a trial, {fileroot}/checkpoints/USER/EXPERIMENT/TRIAL"
        if trials:
            remedy = "give one of the trials in it: " + ", ".join(map(str, trials[:MAX_SHOWN]))
        rule = "holds no recovery checkpoints" if path.exists() else "no such folder"
        raise UserError(Problem(f"PATH = {path}", rule, remedy))

    def read(step: int) -> FoundCheckpoint | None:
        one = read_checkpoint(root, step)
        return None if one is None else local_checkpoint(one)

    steps = list_steps(root) if step is None else [step]
    return Location(str(root), steps, read)


def local_checkpoint(one: Checkpoint) -> FoundCheckpoint:
    def open_role(role: str) -> DcpFolder:
        from pentad.checkpoint.restore import open_state

        return open_state(one, state_folder(role, one.step))

    place = str(one.folders()[-1])
    return FoundCheckpoint(
        place, one.manifest, lambda: damage(one), lambda path: read_file(one, path), open_role
    )


def locate_remote(place: str, endpoint_url: str | None, region: str | None) -> Location:
    root, wanted = split_place(place)
    store = open_store(place, root, endpoint_url, region)
    from pentad.checkpoint.fetch import committed_steps, read_remote

    def read(step: int) -> FoundCheckpoint | None:
        one = read_remote(store, step)
        return None if one is None else remote_checkpoint(one)

    found = committed_steps(store.sizes(f"{INFO}/"))
    return Location(root, found if wanted is None else [wanted], read)


def open_store(place: str, root: str, endpoint_url: str | None, region: str | None) -> Store:
    """Opens a store; UserError for an invalid address."""
    try:
        from pentad.checkpoint.s3 import Store
    except ImportError as error:
        remedy = "pip install 'pentad[s3]'"
        raise UserError(
            Problem(f"PATH = {place}", f"a store needs {error.name}", remedy)
        ) from error
    try:
        split_uri(root)
    except ValueError as error:
        raise UserError(
            Problem(f"PATH = {place}", str(error), "give s3://BUCKET/PREFIX")
        ) from error
    if endpoint_url is not None and (rule := url_problem(endpoint_url)):
        remedy = "give for instance http://127.0.0.1:9000, or leave it out for Amazon's"
        raise UserError(Problem(f"--endpoint-url = {endpoint_url}", rule, remedy))
    return Store(Remote(root, endpoint_url=endpoint_url, region=region))


def remote_checkpoint(one: RemoteCheckpoint) -> FoundCheckpoint:
    from pentad.checkpoint.fetch import remote_damage

    def read_small(path: str) -> bytes:
        data = one.store.read(path)
        if data is None:
            raise Damaged(f"{one.store.place(path)}: is missing")
        return data  # `remote_damage` has found nothing in it

    return FoundCheckpoint(one.place, one.manifest, lambda: remote_damage(one), read_small)


def unusable(found: FoundCheckpoint, notes: list[str]) -> list[str]:
    """A message for each intact file that a resume could not use: an index, counters, or JSON that
    a run would not write."""
    if installed("torch") is None:
        notes.append(f"{found.place}: its indexes were not read, as torch is not installed")
        return []
    from pentad.checkpoint.restore import checked_counters, open_index
    from pentad.checkpoint.shards import COUNTERS
    from pentad.trainer.saving.recovery import INFOS
    from pentad.weights.megatron.layout import INDEX

    manifest, out = found.manifest, []
    root = found.place.removesuffix(f"/{Path(found.place).name}").removesuffix(f"/{INFO}")
    folders = dict.fromkeys(path.rpartition("/")[0] for path in manifest.files)
    wanted = [f"{folder}/{INDEX}" for folder in folders if f"/{STATE}/" in folder]
    for path in [*wanted, *(path for path in manifest.files if path.endswith(".json"))]:
        (folder, _, name), place = path.rpartition("/"), Path(root, path)
        try:
            if name == INDEX:
                open_index(manifest, folder, found.read(path), place.parent)
            elif name == COUNTERS:
                checked_counters(json_object(found.read(path), place), place)
            elif name.removesuffix(".json") in INFOS:
                json_object(found.read(path), place)
        except Damaged as error:
            out.append(str(error))
    return out


def split_place(place: str) -> tuple[str, int | None]:
    """Splits a path into the trial's root and the step; None for a trial."""
    parts = place.rstrip("/").split("/")
    step = step_of(parts[-1])
    above = parts if step is None else parts[:-1]
    if above[-1] == INFO:
        return "/".join(above[:-1]), step
    if above[-1] == STATE:
        return "/".join(above[:-2]), step
    return "/".join(parts), None


def summary(found: FoundCheckpoint) -> dict[str, Any]:
    """Facts of a checkpoint, from its manifest."""
    manifest = found.manifest
    return {
        "place": found.place,
        "step": manifest.step,
        "facts": dict(manifest.facts),
        "bytes": manifest.num_bytes,
        "files": len(manifest.files),
        "ranks": ranks_of(manifest),
        "tensors": {role: len(tensors) for role, tensors in tensors_of(manifest).items()},
        "has_groups": any(Path(path).name == "groups.bin" for path in manifest.files),
    }


def ranks_of(manifest: Manifest) -> dict[str, int]:
    """Number of ranks that saved the state of each role."""
    roles = [path.partition("/")[0] for path in manifest.files if path.endswith(".distcp")]
    return {role: roles.count(role) for role in dict.fromkeys(roles)}


def tensors_of(manifest: Manifest) -> dict[str, dict[str, list[tuple[str, str]]]]:
    """Maps role and tensor name to position and digest of each stored part."""
    out: dict[str, dict[str, list[tuple[str, str]]]] = {}
    for path, entry in manifest.files.items():
        role, _, rest = path.partition("/")
        if rest.startswith(f"{STATE}/") and path.endswith(".distcp"):
            tensors = out.setdefault(role, {})
            for piece in entry.pieces:
                name, _, part = piece.name.partition(" ")
                tensors.setdefault(name, []).append((part, piece.sha256))
    return out


def show(found: list[FoundCheckpoint], faults: dict[str, list[str]], notes: list[str]) -> None:
    rows = []
    for one in found:
        verdict = f"{len(faults[one.place])} damaged" if faults[one.place] else "whole"
        saved = visible(str(one.manifest.facts.get("time", ""))).replace("+00:00", "Z")
        for number, row in enumerate(_rows(one.manifest)):
            head = ("", "", "") if number else (str(one.manifest.step), saved, verdict)
            rows.append((*head, *row))
    titles = ("step", "saved", "every byte", "part", "ranks", "tensors", "size")
    numbers = ("step", "ranks", "tensors", "size")
    print_parts(make_table(titles, rows, right=numbers, no_wrap=True), min_width=MIN_WIDTH)
    layouts = dict.fromkeys(str(one.manifest.facts.get("allocation_mode", "")) for one in found)
    if any(layouts):
        print(f"\nallocation_mode: {visible(', then '.join(reversed(layouts)))}")
    for sentence in notes:
        print(f"\n{sentence}.")
    for sentences in faults.values():
        for sentence in sentences[:MAX_SHOWN]:
            print(f"\n{sentence}.")
        if sentences[MAX_SHOWN:]:
            print(f"\nand {len(sentences) - MAX_SHOWN} more of this checkpoint.")


def _rows(manifest: Manifest) -> Iterator[tuple[str, str, str, str]]:
    """Table rows (part, ranks, tensors, size) for each role and for the other files."""
    ranks, tensors = ranks_of(manifest), tensors_of(manifest)
    for part in sorted({path.partition("/")[0] for path in manifest.files}):
        sizes = [e.size for path, e in manifest.files.items() if path.startswith(f"{part}/")]
        name = visible(part)
        if part == INFO:
            has_groups = any(Path(path).name == "groups.bin" for path in manifest.files)
            name += ", ready groups" if has_groups else ""
        counts = str(ranks.get(part, "")), str(len(tensors[part]) if part in tensors else "")
        yield name, *counts, _size(sum(sizes))


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes} bytes"


def differences(old: FoundCheckpoint, new: FoundCheckpoint) -> Iterator[str]:
    """Differences in facts, in the small JSON files, and in tensors by name, as lines."""
    if old.manifest.step != new.manifest.step:
        yield f"step: {old.manifest.step}, {new.manifest.step}"
    for key, before, after in changed_keys(old.manifest.facts, new.manifest.facts):
        yield f"{key}: {_value(before)}, {_value(after)}"
    ours, theirs = _small_files(old), _small_files(new)
    for name in sorted({*ours, *theirs}):
        for key, before, after in changed_keys(ours.get(name, {}), theirs.get(name, {})):
            yield f"{name} {key}: {_value(before)}, {_value(after)}"
    yield from _tensor_differences(old, new)


def _tensor_differences(old: FoundCheckpoint, new: FoundCheckpoint) -> Iterator[str]:
    before, after = tensors_of(old.manifest), tensors_of(new.manifest)
    for role in sorted({*before, *after}):
        ours, theirs = before.get(role, {}), after.get(role, {})
        for name in sorted({*ours, *theirs}):
            if name not in ours or name not in theirs:
                yield f"{role} {name}: only in the {'second' if name in theirs else 'first'}"
                continue
            parts, others = sorted(ours[name]), sorted(theirs[name])
            if [part for part, _ in parts] != [part for part, _ in others]:
                difference = _reads_differently(old, new, role, name)
            else:
                difference = "" if parts == others else "differs"
            if difference:
                yield f"{role} {name}: {difference}"


def _reads_differently(old: FoundCheckpoint, new: FoundCheckpoint, role: str, name: str) -> str:
    """The difference of a tensor that the two checkpoints split differently; empty: none."""
    if old.open is None or new.open is None:
        return "is split differently, and not compared, as one is in a store"
    import torch

    from pentad.weights.regions import full_box

    both = []
    for found in (old.open(role), new.open(role)):
        info = found.infos[name]
        both.append((info, found.read(name, full_box(info.shape))))
    (ours, first), (theirs, second) = both
    if ours != theirs:
        return f"{list(ours.shape)} of {ours.dtype}, {list(theirs.shape)} of {theirs.dtype}"
    bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (first, second)]
    return "" if torch.equal(*bits) else "differs"


def _small_files(found: FoundCheckpoint) -> dict[str, dict[str, Any]]:
    """The JSON objects beside the tensors, by name."""
    out = {}
    for path in found.manifest.files:
        if path.startswith(f"{INFO}/") and path.endswith(".json"):
            data = found.read(path)
            value = jsonlib.loads(data) if data else {}
            out[Path(path).name] = value if isinstance(value, dict) else {"": value}
    return out


def _value(value: Any) -> str:
    return one_line(repr(value), VALUE_CHARS)


def show_differences(lines: list[str]) -> None:
    print()
    if not lines:
        print("The two are equal.")
        return
    print(f"{len(lines)} differences (first, second):")
    for line in lines[:MAX_LINES]:
        print(f"  {visible(line)}")
    if lines[MAX_LINES:]:
        print(f"  and {len(lines) - MAX_LINES} more; --json lists all")


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
    """Renames intact checkpoints back; returns 0 if all were intact, else 1."""
    folder, step, suffix = split_aside(place)
    if "://" in place:
        every = remote_asides(open_store(place, folder, endpoint_url, region))
    else:
        every = local_asides(Path(folder))
    found = [a for a in every if step in (None, a.step) and suffix in ("", a.suffix)]
    if not found:
        raise RunError(f"{place}: has no checkpoint that was renamed to .{DAMAGED}")
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
        print(f"{aside.place}: is damaged, and keeps its name: {faults[0]}{more}.")
        return 1
    back()
    print(f"{aside.place}: every byte is as saved; the checkpoint is restored.")
    return 0


def split_aside(place: str) -> tuple[str, int | None, str]:
    """Splits a path into the trial's root, and step and suffix of a renamed checkpoint."""
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
    """Raises UserError if a run holds the locks of the folder."""
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
