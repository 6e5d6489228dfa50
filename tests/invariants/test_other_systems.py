"""On a system that is not Linux, as `other_system/sitecustomize.py` plays it: the demo runs, also
over processes, and what needs Linux is a sentence."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from warm_start import warm_starts_with

HIDING = Path(__file__).parents[1] / "other_system"
PATHS = [str(HIDING), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
ELSEWHERE = {"PYTHONPATH": os.pathsep.join(filter(None, PATHS))}


@pytest.fixture(scope="module", autouse=True)
def started_elsewhere():
    """Processes are forked from one that has imported everything on such a system."""
    with warm_starts_with(**ELSEWHERE):
        yield


def pentad(folder, *words):
    return subprocess.run(
        [sys.executable, "-m", "pentad.cli.main", *words],
        env={**os.environ, **ELSEWHERE},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_the_demo_runs_elsewhere(tmp_path):
    done = pentad(tmp_path, "demo", "--device", "cpu", "--steps", "1")
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stdout + done.stderr
    assert "held-out accuracy" in done.stdout


def words_for(task, *more):
    return [
        *("train", f"actor.path={task / 'model'}", "actor.init_from_scratch=true"),
        *(f"train_dataset.path={task / 'train.jsonl'}", "train_dataset.batch_size=4"),
        *("gconfig.n_samples=2", "gconfig.max_new_tokens=4", "total_train_steps=2"),
        *("reward.fn=sort_digits", "valid_dataset=null", *more),
    ]


@pytest.mark.slow
def test_a_run_over_processes_works_elsewhere(task, tmp_path):
    """A rank, a sampler and the writer, each a process; weights and samples by files."""
    more = ("mode=hybrid", "scheduler.processes=separate", "recover.freq_steps=1")
    done = pentad(tmp_path, *words_for(task, *more))
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stdout + done.stderr
    assert len(list(tmp_path.glob("runs/checkpoints/**/recover_info/globalstep*/COMMIT"))) > 0


OWN = """
def length(completion, **row):
    return float(len(completion))

class Env:
    def reset(self, **row):
        return None
"""


def test_what_needs_linux_is_a_sentence(task, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    more = ("reward.fn=own.py:length", "rollout.workflow=class:own.py:Env")
    done = pentad(tmp_path, *words_for(task, *more))
    assert done.returncode == 2, done.stdout + done.stderr
    assert "platform = darwin: the reward pool needs Linux" in done.stderr
    assert "environments run in processes that need Linux" in done.stderr
    assert "Traceback" not in done.stderr
