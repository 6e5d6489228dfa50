"""Pretraining over ranks: the samples, their order and the losses of one process."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from run_cases import config_of, data_seen

from pentad.data.toy import write_byte_model
from pentad.telemetry.steps import read_lines
from pentad.trainer.sft import run_pretrain

pytestmark = pytest.mark.dist

CLOSE = 1e-5
"""Ranks add up in another order: float32 sums differ in the last digits, over three steps."""
SETTINGS = (
    *("train_dataset.max_length=48", "train_dataset.batch_size=4", "total_train_steps=3"),
    "actor.optimizer.lr=1e-3",
)


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    write_byte_model(folder / "model", num_experts=4)
    texts = [f"{n} is followed by {n + 1}; " * (1 + n % 4) for n in range(30)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "pretrain.jsonl").write_text(lines)
    return folder


@pytest.fixture(scope="module")
def alone(task, tmp_path_factory):
    root = tmp_path_factory.mktemp("alone")
    torch.set_num_threads(1)
    words = (*SETTINGS, "allocation_mode=archon:d1")
    config, notes = config_of(task, root, "pretrain", "alone", *words)
    return run_pretrain(config, notes, device="cpu").records, data_seen(task, root, words)


@pytest.mark.parametrize("layout", ["d2", "d2e2"])
def test_ranks_see_the_samples_of_one_process_in_its_order(pool, task, tmp_path, alone, layout):
    records, seen = alone
    words = [*SETTINGS, f"allocation_mode=archon:{layout}"]
    summary = pool.run(
        2,
        "run_cases",
        "run_noting_rows",
        command="pretrain",
        task=task,
        root=tmp_path,
        trial=layout,
        overrides=words,
    )
    assert summary["seen"] == seen and len(seen) == 3, "every rank, every step, every token"
    mine, theirs = (read_lines(Path(p) / "steps.jsonl") for p in (summary["records"], records))
    for one, other in zip(mine, theirs, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=CLOSE)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=10 * CLOSE)
        assert one["num_tokens"] == other["num_tokens"]
        balance = one["kernel"]["balance"], other["kernel"]["balance"]
        assert np.isclose(balance[0]["0"]["std"], balance[1]["0"]["std"])
