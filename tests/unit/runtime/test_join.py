"""Real process groups: ours and torchrun's run the same function, and a lost rank is named."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pentad.core.errors import RunError, UserError
from pentad.runtime.launch import LaunchSettings, run_ranks
from pentad.runtime.rank import rank_from_environment

CPU = LaunchSettings(device="cpu", timeout_s=240)
PROGRAM = Path(__file__).parent / "rank_targets.py"


@pytest.fixture
def no_rank(monkeypatch):
    for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(key, raising=False)


@pytest.mark.dist
def test_ranks_meet_in_one_process_group(no_rank, tmp_path):
    results = run_ranks("rank_targets:add_up", {}, world=2, log_folder=tmp_path, settings=CPU)
    assert results == [[3.0, 2, "gloo"]] * 2


@pytest.mark.dist
def test_a_rank_killed_in_a_collective_is_named_not_those_who_lost_it(no_rank, tmp_path):
    with pytest.raises(RunError, match="rank 1 of 3, .*: was ended by signal 9"):
        run_ranks("rank_targets:add_up", {"dies": 1}, world=3, log_folder=tmp_path, settings=CPU)


@pytest.mark.dist
@pytest.mark.parametrize("world", [2, 3])
def test_under_torchrun_nothing_is_started_and_the_world_must_fit(tmp_path, world):
    given = {
        "target": "rank_targets:add_up",
        "payload": {},
        "world": world,
        "log_folder": str(tmp_path / "logs"),
        "settings": {"device": "cpu", "timeout_s": 240},
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    result = subprocess.run(
        [*command, str(PROGRAM), json.dumps(given)],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if world == 2:
        assert result.returncode == 0, result.stderr[-2000:]
        assert result.stdout.count('[[3.0, 2, "gloo"]]') == 2
    else:
        assert result.returncode != 0
        sentence = (
            "WORLD_SIZE = 2: the layout needs 3 ranks; start with torchrun --nproc-per-node 3"
        )
        assert sentence in result.stdout
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"RANK": "1"}, None),
        ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, (1, 4, 0)),
        ({"RANK": "1", "WORLD_SIZE": "4"}, (1, 4, 1)),
    ],
)
def test_a_rank_is_known_by_its_environment(environment, expected):
    found = rank_from_environment(environment)
    assert (found and (found.rank, found.world, found.local_rank)) == expected


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"RANK": "x", "WORLD_SIZE": "4"}, "RANK = x: must be a number"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK = 4: must be below WORLD_SIZE = 4"),
    ],
)
def test_a_broken_environment_is_refused_in_a_sentence(environment, expected):
    with pytest.raises(UserError, match=expected):
        rank_from_environment(environment)
