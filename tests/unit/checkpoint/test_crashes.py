"""A crash at every operation of a save leaves a committed state: the new one or the one before.

The operations are recorded and replayed on a model of a disk that has forgotten, torn or kept what
was not synced; what is left is written out and read as after a restart.
"""

import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from checkpoint_saves import CountingDisk, QuickDisk, commit_job, data_files, save, write_jobs
from tables import table

from pentad.checkpoint.folders import damage, find_checkpoints
from pentad.checkpoint.job import run_job
from pentad.checkpoint.quarantine import quarantine, sweep_uncommitted

ROLES = ("default", "critic")
DATA = ("dropped", "torn", "zeros", "kept")
NAMES = ("dropped", "kept", "mixed 1", "mixed 2", "mixed 3")


@dataclass
class File:
    live: bytearray = field(default_factory=bytearray)
    durable: bytes = b""


@dataclass
class Folder:
    live: dict[str, Any] = field(default_factory=dict)
    durable: dict[str, Any] = field(default_factory=dict)


class RecordingDisk(CountingDisk):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, ...]] = []
        self.names: dict[int, Path] = {}

    def after(self, operation: str, *values: Any) -> None:
        if operation in ("write", "fsync"):
            values = (self.names[values[0]], *values[1:])
        self.operations.append((operation, *values))

    def created(self, fd: int, path: Path) -> None:
        self.names[fd] = path


class Model:
    """A disk as POSIX promises it: data after fsync, names after fsync of their folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.top = Folder()
        for path in sorted(root.rglob("*")):  # what is there is durable
            parent = self.folder(path.parent)
            if path.is_dir():
                node: Any = Folder()
            else:
                node = File(bytearray(path.read_bytes()), path.read_bytes())
            parent.live[path.name] = parent.durable[path.name] = node

    def folder(self, path: Path) -> Any:
        node: Any = self.top
        for name in path.relative_to(self.root).parts:
            node = node.live[name]
        return node

    def apply(self, operation: str, path: Path, *values: Any) -> None:
        if not path.is_relative_to(self.root):
            return
        if operation == "fsync_dir":
            folder = self.folder(path)
            folder.durable = dict(folder.live)
            return
        live = self.folder(path.parent).live
        match operation:
            case "make_dir":
                live[path.name] = Folder()
            case "create":
                live[path.name] = File()
            case "write":
                data, offset = values
                file = live[path.name].live
                file.extend(bytes(max(0, offset + len(data) - len(file))))
                file[offset : offset + len(data)] = data
            case "fsync":
                live[path.name].durable = bytes(live[path.name].live)
            case "rename":
                self.folder(values[0].parent).live[values[0].name] = live.pop(path.name)
            case _:
                del live[path.name]

    def after_crash(self, data: str, names: str) -> dict[str, bytes | None]:
        """What a restart finds, by path; None is a folder."""
        choose = random.Random(names)
        found: dict[str, bytes | None] = {}

        def visit(folder: Folder, place: str) -> None:
            for name in sorted({*folder.live, *folder.durable}):
                sides = {"dropped": folder.durable, "kept": folder.live}
                side = sides[names if names in sides else choose.choice(("dropped", "kept"))]
                node = side.get(name)
                if isinstance(node, Folder):
                    found[place + name] = None
                    visit(node, f"{place}{name}/")
                elif node is not None:
                    found[place + name] = after_crash(node, data)

        visit(self.top, "")
        return found


def after_crash(file: File, data: str) -> bytes:
    live, durable = bytes(file.live), file.durable
    match data:
        case "dropped":
            return durable
        case "torn":
            return live[: len(durable) + (len(live) - len(durable)) // 2]
        case "zeros":
            return durable + bytes(len(live) - len(durable))
        case _:
            return live


class Restored:
    """A folder that is made to hold one state after the other."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.now: dict[str, bytes | None] = {}

    def become(self, wanted: dict[str, bytes | None]) -> None:
        for path in sorted(self.now, reverse=True):
            if path not in wanted:
                (self.root / path).rmdir() if self.now[path] is None else (
                    self.root / path
                ).unlink()
        for path, data in sorted(wanted.items()):
            if path not in self.now and data is None:
                (self.root / path).mkdir()
            elif data is not None and (path not in self.now or self.now[path] != data):
                (self.root / path).write_bytes(data)
        self.now = wanted


def content(root: Path, step: int) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in data_files(root, step)}


def recorded(root: Path, *, in_threads: bool) -> tuple[Model, list[tuple[Any, ...]], int]:
    """The disk before a save of step 2 that removes step 0, the operations of the save, and how
    many of them were done when it was acknowledged."""
    quick = QuickDisk()
    for step in range(2):
        save(lambda job: run_job(job, quick), root, step, ROLES)
    model = Model(root)
    disk = RecordingDisk()
    jobs = write_jobs(root, 2, ROLES)
    with ThreadPoolExecutor(len(jobs) if in_threads else 1) as pool:
        results = list(pool.map(lambda job: run_job(job, disk), jobs))
    run_job(commit_job(root, 2, results), disk)
    marker = root / "recover_info/globalstep2"
    places = [
        i for i, op in enumerate(disk.operations) if op[0] == "rename" and op[2].parent == marker
    ]
    (done,) = [i for i in places if disk.operations[i][2].name == "COMMIT"]
    acknowledged = disk.operations.index(("fsync_dir", marker), done) + 1
    return model, disk.operations, acknowledged


@pytest.mark.parametrize("in_threads", table([False, True], [False]), ids=["in turn", "at once"])
def test_every_crash_leaves_a_committed_state(tmp_path: Path, in_threads: bool):
    root = tmp_path / "trial"
    root.mkdir()
    model, operations, acknowledged = recorded(root, in_threads=in_threads)
    expected = {step: content(root, step) for step in (1, 2)}
    place = tmp_path / "restored"
    place.mkdir()
    restored = Restored(place)
    num_cases = 0
    seen: set[int] = set()
    for done in range(len(operations) + 1):
        if done:
            model.apply(*operations[done - 1])
        last = 2 if done >= acknowledged else 1
        for data, names in itertools.product(DATA, NAMES):
            num_cases += 1
            state = model.after_crash(data, names)
            key = hash((last, *sorted(state.items(), key=lambda pair: pair[0])))
            if key in seen:
                continue
            seen.add(key)
            restored.become(state)
            case = (operations[max(done - 1, 0)], data, names)
            found = find_checkpoints(place, report=lambda sentence: None)
            assert found and found[0].step >= last, case
            for checkpoint in found:
                assert damage(checkpoint) == [], case
                if checkpoint.step in expected:
                    files = {p: (place / p).read_bytes() for p in checkpoint.manifest.files}
                    assert files == expected[checkpoint.step], case
    assert num_cases > 2000
    assert len(seen) > 100


def test_after_any_crash_the_next_run_clears_up_and_saves(tmp_path: Path):
    root = tmp_path / "trial"
    root.mkdir()
    model, operations, _ = recorded(root, in_threads=False)
    for done, operation in enumerate(operations):
        model.apply(*operation)
        if done % 5:
            continue
        place = tmp_path / f"restored-{done}"
        place.mkdir()
        Restored(place).become(model.after_crash("torn", "kept"))
        before = [found.step for found in find_checkpoints(place)]
        sweep_uncommitted(place, QuickDisk())
        assert [found.step for found in find_checkpoints(place, report=pytest.fail)] == before
        known = {f"globalstep{step}" for step in before}
        for folder in place.rglob("globalstep*"):
            assert folder.name in known, operation
        assert not [p for p in place.rglob(".*") if p.name != ".metadata"], operation
        save(lambda job: run_job(job, QuickDisk()), place, 3, ROLES)
        assert find_checkpoints(place)[0].step == 3


def test_a_crash_while_a_damaged_one_is_set_aside(tmp_path: Path):
    root = tmp_path / "trial"
    root.mkdir()
    for step in range(2):
        save(lambda job: run_job(job, QuickDisk()), root, step, ROLES)
    model = Model(root)
    disk = RecordingDisk()
    newest, _ = find_checkpoints(root)
    quarantine(newest, "its bytes rot", disk)
    place = tmp_path / "restored"
    place.mkdir()
    restored = Restored(place)
    for operation in disk.operations:
        model.apply(*operation)
        for data, names in itertools.product(DATA, NAMES):
            restored.become(model.after_crash(data, names))
            found = find_checkpoints(place, report=lambda sentence: None)
            assert found and found[-1].step == 0
            assert not any(damage(one) for one in found), (operation, data, names)
    assert [found.step for found in find_checkpoints(root)] == [0]
