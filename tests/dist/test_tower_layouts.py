"""Text towers of multimodal folders over several ranks."""

import pytest
import torch
from run_cases import config_of, run_ranks
from test_runs_over_ranks import check_equal
from tower_toys import others_of, tensors_of, write_whole

from pentad.data.toy import write_task
from pentad.trainer.sources.examples import run_sft
from pentad.trainer.sources.rollouts import run_train

pytestmark = pytest.mark.dist
KINDS = ("gemma3", "qwen3_5")
COMMON = ["actor.init_from_scratch=false", "actor.optimizer.lr=1e-3", "total_train_steps=2"]


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("towers")
    for kind in KINDS:
        write_whole(folder / kind, kind)
    write_task(folder, seed=5, num_train=16, num_sft=16, num_valid=2)
    return folder


@pytest.fixture(scope="module")
def alone(task, tmp_path_factory):
    root, runs = tmp_path_factory.mktemp("alone"), {}
    torch.set_num_threads(1)
    for kind in KINDS:
        words = [*COMMON, f"actor.path={task / kind}"]
        runs["sft", kind] = run_sft(*config_of(task, root, "sft", kind, *words), device="cpu")
    words = [*COMMON, f"actor.path={task / 'gemma3'}"]
    runs["train", "gemma3"] = run_train(*config_of(task, root, "train", "rl", *words), device="cpu")
    return runs


@pytest.mark.parametrize(
    ("command", "kind", "layout"),
    [
        ("sft", "gemma3", "d2t2"),
        ("sft", "gemma3", "p2"),
        ("sft", "gemma3", "c2"),
        ("sft", "qwen3_5", "d1t2"),
        ("train", "gemma3", "d2"),
    ],
)
def test_a_tower_under_a_layout_has_the_numbers_and_the_folder_of_one_process(
    task, tmp_path, alone, command, kind, layout
):
    rollout = "embedded:d1|" if command == "train" else ""
    summary = run_ranks(
        command=command,
        task=task,
        root=tmp_path,
        trial=layout,
        overrides=[
            *COMMON,
            f"actor.path={task / kind}",
            f"allocation_mode={rollout}archon:{layout}",
            "saver.freq_steps=1",
        ],
    )
    check_equal(summary.records, summary.model, alone[command, kind])
    before, after = tensors_of(task / kind), tensors_of(summary.model)
    assert all(torch.equal(before[name], after[name]) for name in others_of(task / kind))
