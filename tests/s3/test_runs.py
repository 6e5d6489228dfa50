"""A run whose machine is lost goes on from the store on another one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pentad.checkpoint.s3 import Store
from pentad.core.remote import Remote
from pentad.data.toy import write_model, write_task
from pentad.planner.prepare import prepare
from pentad.telemetry.steps import read_lines
from pentad.trainer.sft import run_sft

pytest.importorskip("pentad.trainer.recovery", reason="runs do not save recovery checkpoints yet")


@pytest.fixture
def sft(tmp_path, remote):
    task = tmp_path / "task"
    write_model(task / "model")
    write_task(task, seed=5, num_train=8, num_sft=64, num_valid=8)

    def run(machine: Path, num_steps: int, *more: str):
        overrides = [
            *(f"fileroot={machine}", "user=me", "experiment_name=sums", "trial_name=one"),
            *(f"actor.path={task / 'model'}", "actor.init_from_scratch=true"),
            *("actor.gradient_checkpointing=false", f"train_dataset.path={task / 'sft.jsonl'}"),
            *("train_dataset.batch_size=8", f"total_train_steps={num_steps}"),
            *(f"checkpoint.remote_uri={remote.uri}", "recover.freq_steps=2"),
            *(f"checkpoint.endpoint_url={remote.endpoint_url}", *more),
        ]
        return run_sft(*prepare(None, overrides, "sft"), fresh=False, device="cpu")

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
    log = (resumed.records / "log.txt").read_text()
    assert "fetched s3://" in log and "globalstep2" in log
