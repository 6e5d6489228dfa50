"""Both tiers of a run, with a real uploader and a real store: crashes, outages, retention."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from server import free_ports

from pentad.checkpoint.fence import holding
from pentad.checkpoint.fetch import give_up, read_remote
from pentad.checkpoint.folders import COMMIT, damage, find_checkpoints, prune, read_checkpoint
from pentad.checkpoint.quarantine import quarantine
from pentad.checkpoint.s3 import Store, StoreError
from pentad.checkpoint.tiers import Tiers
from pentad.checkpoint.upload import upload
from pentad.config.load import load_config
from pentad.config.resolve import resolve
from pentad.runtime.restarts import in_generation
from pentad.trainer.preflight import the_remote_store_answers

PATIENCE_S = 240.0
SOON_S = 60.0
SMALL = 2000


def wait_for(ready: Callable[[], object], what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not ready():
        assert time.monotonic() < end, f"not within {PATIENCE_S:.0f} s: {what}"
        time.sleep(0.02)


def local_steps(root: Path) -> list[int]:
    return [found.step for found in find_checkpoints(root, lambda sentence: None)]


def remote_steps(store: Store) -> list[int]:
    keys = [key for key in store.sizes("recover_info/") if key.endswith("/COMMIT")]
    return sorted((int(key.split("globalstep")[1].split("/")[0]) for key in keys), reverse=True)


@pytest.fixture
def open_tiers(tmp_path):
    """Makes tiers whose uploaders are ended with the test."""
    opened: list[Tiers] = []

    def make(remote, root: Path = tmp_path / "local", **settings) -> tuple[Tiers, list[str]]:
        said: list[str] = []
        opened.append(Tiers(root, remote, report=said.append, **settings))
        return opened[-1], said

    yield make
    for tiers in opened:
        if tiers.uploader is not None:
            tiers.uploader.child.end()


def test_without_a_store_there_is_no_process(open_tiers, make_checkpoint):
    tiers, said = open_tiers(None)
    assert tiers.uploader is None and tiers.find() is None
    checkpoint = make_checkpoint(1, size=SMALL)
    tiers.after_commit(checkpoint.step)
    assert tiers.find() == checkpoint and tiers.close() and said == []
    assert tiers.keep_committed == 2


def test_checkpoints_are_uploaded_and_both_tiers_keep_what_they_should(
    remote, open_tiers, make_checkpoint, tmp_path, caplog
):
    caplog.set_level(logging.INFO)
    tiers, said = open_tiers(replace(remote, retention=2), keep_last=1)
    assert tiers.find() is None and tiers.keep_committed > 1000
    for step in (1, 2, 3, 4):
        tiers.after_commit(make_checkpoint(step, size=SMALL).step)
        wait_for(lambda step=step: tiers.status().last_step == step, "upload")
    assert tiers.close() and said == []
    assert local_steps(tmp_path / "local") == [4]
    assert remote_steps(Store(remote)) == [4, 3]
    status = tiers.status()
    assert (status.last_step, status.waiting_step, status.num_failures) == (4, None, 0)
    assert status.num_bytes > 4 * SMALL
    fresh, said = open_tiers(remote, tmp_path / "fresh")
    found = fresh.find()
    assert found is not None and (found.step, damage(found)) == (4, [])
    (fetched,) = [one for one in caplog.records if one.getMessage().startswith("fetched s3://")]
    assert "every byte verified" in fetched.getMessage() and said == [], "nothing to warn of"
    assert fetched.levelno == logging.INFO and hasattr(fetched, "is_notice")


def test_an_outage_is_reported_counted_and_made_up_for(
    remote, open_tiers, make_checkpoint, proxy, tmp_path
):
    """No local copy goes while the store has none; training would go on."""
    proxy.choose = lambda request: "busy"
    store = Store(remote)
    tiers, said = open_tiers(replace(remote, endpoint_url=proxy.url, max_attempts=2), keep_last=1)
    for step in (1, 2, 3):
        tiers.after_commit(make_checkpoint(step, size=SMALL).step)
    wait_for(lambda: tiers.status().num_failures > 0, "failure")
    status = tiers.status()
    assert status.waiting_step == 3 and status.last_step is None
    assert re.search("the checkpoint of step [234] is not uploaded", said[0]) and "503" in said[0]
    assert local_steps(tmp_path / "local") == [3, 2, 1]
    tiers.after_commit(make_checkpoint(4, size=SMALL).step)
    proxy.choose = lambda request: ""
    assert tiers.close(PATIENCE_S)
    found = remote_steps(store)  # another try of step 3 may have been in progress
    assert found[0] == 4 and not {1, 2} & {*found}, "the newest is uploaded, not all before it"
    assert local_steps(tmp_path / "local") == [4]


def test_a_run_that_goes_on_by_itself_does_not_need_the_store(
    remote, open_tiers, make_checkpoint, monkeypatch
):
    """Neither a rank that is lost while the store is away nor a start that finds it away ends a run
    that has a local checkpoint."""
    away = replace(remote, endpoint_url=f"http://127.0.0.1:{free_ports(1)[0]}", max_attempts=2)
    checkpoint = make_checkpoint(4, size=SMALL)
    for is_again in (True, False):
        tiers, said = open_tiers(away, is_again=is_again)
        assert tiers.find() == checkpoint
        assert "cannot be reached" in said[0]
        assert said[0].endswith(
            "; the run resumes from its local checkpoint after step 5, which is uploaded when the "
            "store answers"
        )
    overrides = [
        f"checkpoint.remote_uri={away.uri}",
        f"checkpoint.endpoint_url={away.endpoint_url}",
    ]
    config, _ = resolve(load_config(None, overrides))
    assert len(the_remote_store_answers(config)) == 1
    with in_generation(1):
        assert the_remote_store_answers(config) == []


def test_a_store_that_is_away_is_asked_for_where_it_is_needed(
    remote, proxy, open_tiers, make_checkpoint, monkeypatch
):
    """It has a newer checkpoint, or may have a copy of one that is damaged here; or it refuses."""
    make_checkpoint(4, size=SMALL)
    through = replace(remote, endpoint_url=proxy.url, max_attempts=2)
    upload(Store(remote), make_checkpoint(5, size=SMALL))
    newest = read_checkpoint(open_tiers(None)[0].root, 5)
    quarantine(newest, "as a restore would")
    for fault in ("busy", "denied"):
        proxy.choose = lambda request, fault=fault: fault if ".distcp" in request.target else ""
        with pytest.raises(StoreError):
            open_tiers(through)[0].find()
        proxy.choose = lambda request, fault=fault: fault
        with pytest.raises(StoreError):
            open_tiers(through)[0].find()
    proxy.choose = lambda request: ""
    found = open_tiers(through)[0].find()
    assert found is not None and found.step == 5


def test_what_is_not_uploaded_in_time_is_said_and_done_by_the_next_start(
    remote, open_tiers, make_checkpoint, proxy
):
    proxy.choose = lambda request: "stall" if request.method == "PUT" else ""
    tiers, said = open_tiers(replace(remote, endpoint_url=proxy.url))
    tiers.after_commit(make_checkpoint(6, size=SMALL).step)
    wait_for(lambda: "stall" in proxy.faults, "first object")
    assert not tiers.close(0.1)
    assert "the checkpoint of step 7 is not in s3://" in said[-1] and "next start" in said[-1]
    again, _ = open_tiers(remote)
    found = again.find()
    assert found is not None and found.step == 6
    assert again.close(PATIENCE_S) and remote_steps(Store(remote)) == [6]


@pytest.mark.parametrize(
    ("signals", "stopped_s", "said"),
    [
        ([signal.SIGTERM], 1.0, "SIGTERM"),
        ([signal.SIGINT], 1.0, "SIGINT"),
        ([signal.SIGTERM, signal.SIGINT], 2 * SOON_S, "SIGINT"),
        ([signal.SIGTERM, signal.SIGTERM], 2 * SOON_S, "SIGTERM"),
    ],
    ids=["SIGTERM", "SIGINT", "two", "twice"],
)
def test_a_signal_ends_the_wait_for_a_store_that_hangs(
    remote, open_tiers, make_checkpoint, proxy, signals, stopped_s, said, monkeypatch
):
    """One signal leaves it STOPPED_S, a second one nothing."""
    monkeypatch.setattr("pentad.checkpoint.tiers.STOPPED_S", stopped_s)
    proxy.choose = lambda request: "stall" if request.method == "PUT" else ""
    tiers, reports = open_tiers(replace(remote, endpoint_url=proxy.url))
    tiers.after_commit(make_checkpoint(6, size=SMALL).step)
    wait_for(lambda: "stall" in proxy.faults, "first object")
    for number, one in enumerate(signals):
        threading.Timer(0.5 + number, os.kill, (os.getpid(), one)).start()
    began = time.monotonic()
    assert not tiers.close(PATIENCE_S)
    assert time.monotonic() - began < SOON_S
    place = rf"s3://\S+ \({said} ended the upload\)"
    assert re.fullmatch(
        rf"the checkpoint of step 7 is not in {place}; .* next start .*", reports[-1]
    )


def test_a_killed_uploader_goes_on_without_sending_finished_parts_again(
    remote, open_tiers, make_checkpoint, proxy
):
    def third_part_hangs(request):
        return "stall" if request.is_part and "partNumber=3" in request.target else ""

    def num_sent(number: int) -> int:
        return proxy.count(lambda r: r.is_part and f"partNumber={number}&" in f"{r.target}&")

    proxy.choose = third_part_hangs
    through = replace(remote, endpoint_url=proxy.url, num_workers=1)
    tiers, said = open_tiers(through)
    tiers.after_commit(make_checkpoint(8).step)  # three parts
    wait_for(lambda: "stall" in proxy.faults, "third part")
    assert tiers.uploader is not None
    os.kill(tiers.uploader.child.pid, signal.SIGKILL)
    wait_for(lambda: tiers.status().num_failures == 1, "notice")
    assert "the uploader was ended by signal 9" in said[0]
    proxy.choose = lambda request: ""
    again, said = open_tiers(through)
    assert again.find() is not None and again.close(PATIENCE_S) and said == []
    assert [num_sent(number) for number in (1, 2, 3)] == [1, 1, 2]
    assert proxy.count(lambda r: r.method == "POST" and r.target.endswith("?uploads")) == 1
    found = read_remote(Store(remote), 8)
    assert found is not None and Store(remote).uploads() == {}


def test_an_uploader_that_died_is_started_again(remote, open_tiers, make_checkpoint):
    tiers, said = open_tiers(remote)
    assert tiers.uploader is not None
    tiers.uploader.child.send(signal.SIGKILL)
    wait_for(lambda: said, "notice")
    tiers.after_commit(make_checkpoint(2, size=SMALL).step)
    assert tiers.close(PATIENCE_S) and tiers.status().last_step == 2
    assert tiers.status().num_failures == 1


def test_a_server_that_is_killed_loses_nothing_that_it_acknowledged(
    server, remote, make_checkpoint
):
    patient = replace(remote, max_attempts=40, backoff_s=0.5, bandwidth_mb_s=6.0)
    store = Store(patient)
    upload(store, make_checkpoint(1, size=SMALL))
    failed: list[BaseException] = []

    def send() -> None:
        try:
            upload(store, make_checkpoint(2))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=send)
    before = store.num_bytes
    thread.start()
    wait_for(lambda: store.num_bytes > before, "the first part")
    server.kill()
    time.sleep(0.5)
    server.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive() and not failed and store.num_retries > 0
    for step in (1, 2):
        found = read_remote(store, step)
        assert found is not None, f"step {step} was acknowledged"


def test_the_newest_of_both_tiers_is_found_and_a_local_wreck_is_replaced(
    remote, open_tiers, make_checkpoint, tmp_path
):
    store = Store(remote)
    for step in (3, 5):
        upload(store, make_checkpoint(step, root=tmp_path / "elsewhere", size=SMALL))
    make_checkpoint(4, size=SMALL)
    tiers, _ = open_tiers(remote)
    found = tiers.find()
    assert found is not None and found.step == 5
    quarantine(found, "as a restore would")
    again = tiers.find()
    assert again is not None and again.step == 4, "what was fetched whole is not fetched again"
    other, _ = open_tiers(remote)
    fetched = other.find()
    assert fetched is not None and (fetched.step, damage(fetched)) == (5, [])
    quarantine(fetched, "for good")
    newer = make_checkpoint(7, size=SMALL)
    assert tiers.find() == newer
    assert tiers.close(PATIENCE_S) and remote_steps(store)[0] == 7


def test_a_checkpoint_that_is_read_is_not_removed(make_checkpoint, tmp_path):
    old, new = make_checkpoint(1, size=SMALL), make_checkpoint(2, size=SMALL)
    with holding(old.root / old.info / COMMIT):
        assert prune(old.root, 1) == []
        assert damage(old) == []
    assert len(prune(old.root, 1)) == 1 and local_steps(tmp_path / "local") == [new.step]


def test_what_was_found_is_held_until_the_next_commit(
    remote, open_tiers, make_checkpoint, tmp_path
):
    make_checkpoint(1, size=SMALL)
    tiers, _ = open_tiers(None)
    assert tiers.find() is not None
    newer = make_checkpoint(2, size=SMALL)
    assert prune(tmp_path / "local", 1) == []
    tiers.after_commit(newer.step)
    assert len(prune(tmp_path / "local", 1)) == 1


def test_a_run_that_starts_anew_gives_up_what_the_store_has(
    remote, open_tiers, make_checkpoint, tmp_path
):
    store = Store(remote)
    for step in (1, 9):
        upload(store, make_checkpoint(step, root=tmp_path / "before", size=SMALL))
    give_up(store)
    tiers, _ = open_tiers(remote)
    assert tiers.find() is None
    tiers.after_commit(make_checkpoint(1, size=SMALL + 1).step)
    assert tiers.close(PATIENCE_S) and tiers.status().last_step == 1
    found, _ = open_tiers(remote, tmp_path / "fresh")
    assert found.find().step == 1


def test_the_uploader_ends_with_its_parent(remote, tmp_path):
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom pentad.checkpoint.tiers import Tiers\n"
        "from pentad.core.remote import Remote\n"
        f"tiers = Tiers(Path({str(tmp_path)!r}), Remote({remote.uri!r}))\n"
        "print(tiers.uploader.child.pid, flush=True)\ntime.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        uploader = psutil.Process(int(parent.stdout.readline()))
        assert uploader.is_running()
    finally:
        parent.kill()
        parent.wait()
    gone, _ = psutil.wait_procs([uploader], timeout=PATIENCE_S)
    assert gone
