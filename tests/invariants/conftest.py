"""A tiny model and task on disk."""

import pytest
from run_lab import Lab

from pentad.data.toy import write_model, write_task


@pytest.fixture(scope="session")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    write_model(folder / "model")
    write_task(folder, seed=5, num_train=64, num_sft=64, num_valid=16)
    return folder


@pytest.fixture
def lab(task, tmp_path):
    return Lab(task, tmp_path)
