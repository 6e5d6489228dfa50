"""Every wait for something being saved ends soon and with its cause: whatever is lost or full."""

import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from pentad.checkpoint.folders import find_checkpoints, state_folder
from pentad.checkpoint.job import FileSpec, Piece, WriteJob, run_job
from pentad.checkpoint.tiers import Tiers
from pentad.checkpoint.writer import Pending
from pentad.core.errors import RunError, Stopped, Transient
from pentad.trainer.saving import periodic
from pentad.trainer.saving.periodic import Frequency
from pentad.trainer.saving.recovery import RecoverHandler, finish_saves, save_after_failure
from pentad.trainer.saving.saver import Saver
from pentad.trainer.stopping import StopFlag, stop_flag

SOON_S = 60.0
"""A loaded machine; without its cause a wait takes half an hour, or has no end."""
LOST = "rank 1 of 2 ended by signal 9"


class Learner:
    """Ranks whose saves end when they are told to."""

    is_broken = False
    straggler = None
    device = None
    is_stopping = staticmethod(bool)

    def __init__(self, root: Path) -> None:
        self.root = root
        self.state = Pending()
        self.exported = Pending()
        self.exports: list[str] = []
        self.num_bytes = 10

    def hold(self) -> None:
        """From now on nothing is written."""
        self.state, self.exported, self.is_held = Pending(), Pending(), True

    is_held = False

    @property
    def is_gone(self) -> bool:
        return self.is_broken

    def call_all(self, method: str, **given):
        if self.is_broken:
            raise Transient(LOST)
        if method == "save_state" and not self.is_held:
            data = bytes(self.num_bytes)
            file = FileSpec(f"{given['folder']}/__0_0.distcp", (Piece("w", (data,)),))
            info = f"recover_info/{Path(given['folder']).name}"
            self.state = Pending()
            try:
                self.state.set_result(run_job(WriteJob(self.root, info, (file,))))
            except OSError as error:
                self.state.set_exception(error)
        if method == "save_state":
            return [] if given["is_async"] else [self.state.outcome()]
        if method == "export":
            self.exports.append(given["folder"])
            if not (self.is_held and given["is_async"]):
                Path(given["folder"]).mkdir(parents=True, exist_ok=True)
                self.exported = Pending()
                self.exported.set_result({})
        return None

    def query(self, method: str, **given):
        written = self.exported if method == "exported" else self.state
        while not written.done():
            if self.is_broken:
                raise Transient(LOST)
            wait([written], 0.01)
        return written.outcome() if method == "exported" else [written.outcome()]

    def check(self) -> None:
        pass


@pytest.fixture
def learner(tmp_path, monkeypatch):
    monkeypatch.setattr(periodic, "LAST_WAITS_S", (0.0, 0.0))
    monkeypatch.setattr(periodic, "FAILED_S", 0.3)
    monkeypatch.setattr("pentad.trainer.saving.recovery.FAILED_S", 0.3)
    learner = Learner(tmp_path)
    yield learner
    learner.is_broken = True  # or threads wait for what it was to write


@pytest.fixture
def recover(learner):
    return RecoverHandler(
        learner=learner,
        roles=["actor"],
        tiers=Tiers(learner.root),
        frequency=Frequency(steps=1),
        steps_per_epoch=10,
        is_async=True,
    )


@pytest.fixture
def saver(learner):
    return Saver(
        learner=learner,
        role="actor",
        root=learner.root / "default",
        frequency=Frequency(steps=2),
        steps_per_epoch=10,
        is_async=True,
    )


def save(recover: RecoverHandler, step: int) -> None:
    recover.after_step(step)
    recover.commit_staged()


def steps(root: Path) -> list[int]:
    return [found.step for found in find_checkpoints(root)]


def lose(learner: Learner) -> None:
    learner.is_broken = True


def fill(learner: Learner) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(learner.root / "state"))
    learner.is_held = False  # the next attempt finds room
    learner.state.set_exception(full)
    learner.exported.set_exception(full)


def stop(learner: Learner) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def after(seconds: float, action: Callable[[Learner], None], learner: Learner) -> Iterator[None]:
    """Does something meanwhile; it has happened when this is left, as signals need a handler."""
    timer = threading.Timer(seconds, action, (learner,))
    timer.start()
    try:
        yield
    finally:
        timer.join()


def write_soon(learner: Learner, step: int) -> threading.Timer:
    """What was held is written half a second later."""

    def write() -> None:
        folder = state_folder("default", step)
        file = FileSpec(f"{folder}/__0_0.distcp", (Piece("w", (b"x",)),))
        info = f"recover_info/globalstep{step}"
        learner.is_held = False
        learner.state.set_result(run_job(WriteJob(learner.root, info, (file,))))

    timer = threading.Timer(0.5, write)
    timer.start()
    return timer


FAULTS = {"a lost rank": lose, "a full disk": fill, "SIGTERM": stop}
WAITS = {
    "the end of the run": lambda recover, saver, flag: finish_saves(recover, [saver], 2, flag),
    "a rank that returned": lambda recover, saver, flag: recover.is_saved(1),
    "a rollback": lambda recover, saver, flag: recover.roll_back(1, []),
    "an export that is due": lambda recover, saver, flag: saver.after_step(3),
    "what to say at the end": lambda recover, saver, flag: recover.next_start,
}
CAUSES = {"a lost rank": LOST, "a full disk": "No space left on device: '", "SIGTERM": "SIGTERM"}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("wait", WAITS)
def test_no_wait_outlives_what_it_waits_for(learner, recover, saver, caplog, wait, fault):
    save(recover, 0)
    recover.is_saved(0)
    learner.hold()
    saver.after_step(1)
    save(recover, 1)
    began, raised = time.monotonic(), ""
    with stop_flag(StopFlag()) as flag:
        learner.is_stopping = lambda: bool(flag.reason)
        with after(0.3, FAULTS[fault], learner):
            try:
                WAITS[wait](recover, saver, flag)
            except RunError as error:
                raised = str(error)
    assert time.monotonic() - began < SOON_S
    said = caplog.text + raised
    if wait == "an export that is due" and fault == "SIGTERM":
        assert saver.under_way == (1, saver.under_way[1]) and len(learner.exports) == 1
    elif wait == "the end of the run" or fault != "SIGTERM":
        is_silent = wait == "what to say at the end"  # the next start says the same
        assert is_silent or CAUSES[fault] in said, said
    assert steps(learner.root)[-1] == 0


def test_a_failed_write_is_tried_again_after_the_next_step(learner, recover, caplog):
    save(recover, 0)
    recover.is_saved(0)
    learner.hold()
    save(recover, 1)
    fill(learner)
    recover.is_saved(1)
    assert "step 2: the recovery checkpoint of step 2 could not be saved: [Errno 28]" in caplog.text
    assert "tried again after step 3; a run that stops now resumes after step 1" in caplog.text
    save(recover, 2)
    assert recover.is_saved(2) and steps(learner.root) == [2, 0] and recover.num_failed == 0


def test_the_model_is_exported_while_the_last_checkpoint_is_not_written(learner, recover, saver):
    save(recover, 0)
    recover.is_saved(0)
    learner.hold()
    save(recover, 1)
    with stop_flag(StopFlag()) as flag, after(0.3, stop, learner), pytest.raises(Stopped) as caught:
        finish_saves(recover, [saver], 2, flag)
    folder = saver.folder(1)
    assert folder.is_dir()
    assert str(caught.value) == (
        "stopped by SIGTERM before the recovery checkpoint of the last step was saved; the model "
        f"is in {folder}; started again, the run resumes after step 1"
    )


def test_a_second_signal_does_not_wait_at_all(learner, recover, saver, monkeypatch):
    monkeypatch.setattr(periodic, "FAILED_S", 600.0)
    save(recover, 0)
    recover.is_saved(0)
    learner.hold()
    save(recover, 1)
    with (
        stop_flag(StopFlag()) as flag,
        after(0.3, stop, learner),
        after(0.8, stop, learner),
        pytest.raises(KeyboardInterrupt),
    ):
        finish_saves(recover, [saver], 2, flag)


def test_what_is_said_at_the_end_is_where_the_next_start_resumes(learner, recover, monkeypatch):
    """A commit that is under way when the sentence is made has ended before."""
    monkeypatch.setattr("pentad.trainer.saving.recovery.FAILED_S", SOON_S)
    save(recover, 0)
    recover.is_saved(0)
    learner.hold()
    save(recover, 1)
    write_soon(learner, 1)
    assert recover.next_start == "started again, the run resumes after step 2"
    assert steps(learner.root) == [1, 0]


@pytest.mark.parametrize("keep_last", [1, 2, 3])
def test_on_a_disk_with_room_for_two_the_third_is_saved(recover, learner, monkeypatch, keep_last):
    """An older one is given up for it, and never the newest."""
    recover.tiers.keep_last = keep_last
    room = 25 * 4096

    def free(place) -> int:
        sizes = [path.stat().st_size for path in learner.root.rglob("*") if path.is_file()]
        return room - sum(sizes)

    plain = learner.call_all

    def call(method, **given):
        if method == "save_state" and free(learner.root) < learner.num_bytes:
            learner.state = Pending()
            learner.state.set_exception(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "state"))
            return []
        return plain(method, **given)

    learner.num_bytes = 40_000
    monkeypatch.setattr(learner, "call_all", call)
    monkeypatch.setattr(
        "pentad.trainer.saving.recovery.shutil.disk_usage",
        lambda place: os.terminal_size((0, 0)) and type("Usage", (), {"free": free(place)}),
    )
    committed = []
    for step in range(8):
        before = steps(learner.root)
        save(recover, step)
        recover.is_saved(step)
        found = steps(learner.root)
        assert not before or before[0] in found or found[0] == step, "the newest is never removed"
        committed.append(found[0])
    misses = [step for step, last in enumerate(committed) if last != step]
    assert misses == ([] if keep_last == 1 else [2]), "one attempt finds out"


@pytest.mark.parametrize("is_failed", [False, True])
def test_a_signal_before_the_last_saves_does_not_cut_them_short(
    learner, recover, saver, monkeypatch, is_failed
):
    """A run that is stopped after a step saves it, however long that takes."""
    monkeypatch.setattr(periodic, "FAILED_S", 0.05)
    save(recover, 0)
    recover.is_saved(0)
    learner.hold()
    save(recover, 1)
    with stop_flag(StopFlag()) as flag:
        learner.is_stopping = lambda: True
        flag.reason = "SIGTERM"
        assert not recover.is_saved(1) and recover.is_given_up, "within a step it is not waited for"
        timer = write_soon(learner, 1)
        if is_failed:
            save_after_failure(learner, recover, [saver], flag, 2)
        else:
            finish_saves(recover, [saver], 2, flag)
        timer.join()
    assert recover.last_saved == 1 and saver.folder(1).is_dir()


@pytest.mark.parametrize("newest", [1, 3])
def test_an_export_that_a_failure_cut_off_is_begun_again_or_reported(
    learner, saver, caplog, newest
):
    caplog.set_level("INFO")
    learner.hold()
    saver.after_step(1)
    state = saver.state()
    assert state["under_way"] == 1
    learner.is_held = False
    again = replace(saver, under_way=None)
    again.restore(state)
    again.resume(newest)
    again.collect(newest, wait=True)
    cut = f"{saver.folder(1)} was being written when the run ended"
    if newest == 1:
        assert again.last_saved == 1 and f"{cut}: it is written again" in caplog.text
    else:
        assert again.last_saved == -1 and learner.exports == [str(saver.folder(1))]
        assert f"{cut}, and cannot be written again from the checkpoint of step 4" in caplog.text
    again.restore(state)  # it is there now, or not
    assert (again.last_saved, again.cut_off) == ((1, None) if newest == 1 else (-1, 1))


def test_a_lost_rank_says_which_export_it_was_writing(learner, recover, saver, caplog):
    learner.hold()
    saver.after_step(1)
    lose(learner)
    save_after_failure(learner, recover, [saver], StopFlag(), 2)
    cut = f"and {saver.folder(1)} was being written and is incomplete"
    assert f"so nothing is saved, {cut}; there is no recovery checkpoint" in caplog.text


def test_what_all_ranks_have_written_is_committed_although_one_is_lost_then(learner, recover):
    """Where training waits for a save, its answer is all that the commit needs."""
    recover.is_async = False
    recover.after_step(0)
    lose(learner)
    recover.commit_staged()
    assert recover.last_saved == 0 and steps(learner.root) == [0]
