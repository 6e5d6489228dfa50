"""A run whose machine is lost goes on from the store on another one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest

from pentad.checkpoint import s3
from pentad.checkpoint.fetch import committed_steps
from pentad.checkpoint.s3 import Store, StoreError
from pentad.checkpoint.tiers import Tiers
from pentad.core.errors import UserError
from pentad.core.remote import Remote
from pentad.data.toy import write_model, write_task
from pentad.planner.prepare import prepare
from pentad.telemetry.recorder import Recorder
from pentad.telemetry.steps import read_lines
from pentad.trainer.sources.examples import run_sft


@pytest.fixture
def sft(tmp_path, remote):
    task = tmp_path / "task"
    write_model(task / "model")
    write_task(task, seed=5, num_train=8, num_sft=64, num_valid=8)

    def run(machine: Path, num_steps: int, *more: str, fresh: bool = False):
        overrides = [
            *(f"fileroot={machine}", "user=me", "experiment_name=sums", "trial_name=one"),
            *(f"actor.path={task / 'model'}", "actor.init_from_scratch=true"),
            *("actor.gradient_checkpointing=false", f"train_dataset.path={task / 'sft.jsonl'}"),
            *("train_dataset.batch_size=8", f"total_train_steps={num_steps}"),
            *(f"checkpoint.remote_uri={remote.uri}", "recover.freq_steps=2"),
            *(f"checkpoint.endpoint_url={remote.endpoint_url}", *more),
        ]
        return run_sft(*prepare(None, overrides, "sft"), fresh=fresh, device="cpu")

    return run


def weights(summary) -> bytes:
    return (summary.model / "model.safetensors").read_bytes()


def test_a_run_goes_on_from_the_store_alone_as_if_nothing_had_happened(sft, remote, tmp_path):
    whole = sft(tmp_path / "whole", 5, "checkpoint.remote_uri=null")
    sft(tmp_path / "lost", 3)
    shutil.rmtree(tmp_path / "lost")
    resumed = sft(tmp_path / "other", 5)
    assert weights(resumed) == weights(whole)
    steps = [record["step"] for record in read_lines(resumed.records / "steps.jsonl")]
    assert steps == [4, 5]
    store = Store(Remote(f"{remote.uri}/me/sums/one", endpoint_url=remote.endpoint_url))
    committed = sorted(key for key in store.sizes("recover_info/") if key.endswith("/COMMIT"))
    assert committed[-1] == "recover_info/globalstep4/COMMIT"
    infra = [record["infra"] for record in read_lines(resumed.records / "steps.jsonl")]
    assert infra[0]["last_uploaded_step"] == 3, "it was fetched"
    assert read_lines(whole.records / "steps.jsonl")[-1]["infra"]["last_uploaded_step"] is None
    log = (resumed.records / "log.txt").read_text()
    assert "fetched s3://" in log and "globalstep2" in log


def test_records_say_what_waits_what_is_uploaded_and_what_failed(
    sft, remote, tmp_path, monkeypatch
):
    """Somebody else commits the step of the first checkpoint in the store; the second is whole."""
    store = Store(Remote(f"{remote.uri}/me/sums/one", endpoint_url=remote.endpoint_url))
    plain_step, plain_commit, tiers = Recorder.step, Tiers.after_commit, []

    def wait_for(ready):
        end = time.monotonic() + 240
        while not (tiers and ready(tiers[0].status())):
            assert time.monotonic() < end, tiers
            time.sleep(0.02)

    def step(self, record, *args):
        found = plain_step(self, record, *args)
        if record.step == 1:
            store.put("recover_info/globalstep1/COMMIT", b"another\n")
        elif record.step == 3:
            wait_for(lambda status: status.num_failures)
        elif record.step == 5:
            wait_for(lambda status: status.last_step == 3)
        return found

    def after_commit(self, checkpoint):
        tiers.append(self)
        plain_commit(self, checkpoint)

    monkeypatch.setattr(Recorder, "step", step)
    monkeypatch.setattr(Tiers, "after_commit", after_commit)
    summary = sft(tmp_path / "one", 6, "saver.mode=sync")
    names = ("last_uploaded_step", "waiting_upload_step", "num_failed_uploads")
    infra = [record["infra"] for record in read_lines(summary.records / "steps.jsonl")]
    found = [tuple(one[name] for name in names) for one in infra]
    assert found[0] == (None, None, 0) and infra[0]["uploaded_gb"] == 0
    assert found[3] == (None, 2, 1)
    assert found[5] == (4, None, 1) and infra[5]["uploaded_gb"] > 1e-6


def committed(remote) -> list[int]:
    store = Store(Remote(f"{remote.uri}/me/sums/one", endpoint_url=remote.endpoint_url))
    return committed_steps(store.sizes("recover_info/"))


def test_what_the_end_of_a_run_could_not_upload_the_next_start_does(sft, remote, tmp_path, proxy):
    """The store takes the probe of the start, and is away from then on."""
    through = f"checkpoint.endpoint_url={proxy.url}"
    more = (through, "checkpoint.finish_timeout_s=1", "saver.mode=sync")

    def away(request):
        is_write = request.method == "PUT" and "probe" not in request.target
        return "busy" if is_write else ""

    proxy.choose = away
    first = sft(tmp_path / "one", 3, *more)
    said = (first.records / "log.txt").read_text()
    assert "the next start of the run uploads it" in said
    assert committed(remote) == []
    proxy.choose = lambda request: ""
    again = sft(tmp_path / "one", 3, through, "saver.mode=sync")
    assert (
        "the run is finished: all its 3 steps are done" in (again.records / "log.txt").read_text()
    )
    assert committed(remote) == [2]
    assert weights(again) == weights(first)


def test_a_signal_ends_the_wait_of_a_run_for_a_store_that_hangs(
    sft, remote, tmp_path, proxy, monkeypatch
):
    """The run is complete; a further start uploads what is missing, and ends by a signal too."""
    plain_close = Tiers.close

    def close(self, timeout_s):
        timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM))
        timer.start()
        try:
            return plain_close(self, timeout_s)
        finally:
            timer.cancel()  # an upload that ends before needs no signal, and pytest would get it

    monkeypatch.setattr(Tiers, "close", close)
    more = (f"checkpoint.endpoint_url={proxy.url}", "saver.mode=sync")
    is_write = {True: "stall", False: ""}
    proxy.choose = lambda one: is_write[one.method == "PUT" and "probe" not in one.target]
    for num_starts in (1, 2):
        began = time.monotonic()
        found = sft(tmp_path / "one", 3, *more)
        said = (found.records / "log.txt").read_text()
        sentence = "(SIGTERM ended the upload); it is on the local disk, and the next start of the"
        assert said.count(sentence) == num_starts
        assert time.monotonic() - began < 60
        assert json.loads((found.records / "exit.json").read_text())["end"] == "complete"
    assert committed(remote) == []
    proxy.choose = lambda request: ""
    sft(tmp_path / "one", 3, *more)
    assert committed(remote) == [2]


def test_a_run_with_a_local_checkpoint_starts_while_the_store_is_away(
    sft, remote, tmp_path, proxy, monkeypatch
):
    monkeypatch.setattr(s3, "MAX_PAUSE_S", 0.05)
    more = (f"checkpoint.endpoint_url={proxy.url}", "checkpoint.finish_timeout_s=1")
    proxy.choose = lambda request: "reset"
    with pytest.raises(UserError, match="checkpoint.remote_uri = .* cannot be reached"):
        sft(tmp_path / "one", 3, *more)  # it may have what a lost machine left
    proxy.choose = lambda request: ""
    sft(tmp_path / "one", 3, *more)
    proxy.choose = lambda request: "reset"
    summary = sft(tmp_path / "one", 5, *more)
    assert [record["step"] for record in read_lines(summary.records / "steps.jsonl")] == [
        *range(1, 6)
    ]
    said = (summary.records / "log.txt").read_text()
    assert "the run resumes from its local checkpoint after step 3, which is uploaded" in said
    with pytest.raises(StoreError):
        sft(tmp_path / "one", 5, *more, fresh=True)
    assert not list((tmp_path / "one").rglob("earlier")), "nothing is moved"
