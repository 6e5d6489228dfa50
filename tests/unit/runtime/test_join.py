"""Where a rank finds who it is, and what its process is started with."""

import pytest

from pentad.core.errors import UserError
from pentad.runtime.environment import DETERMINISTIC, rank_environment
from pentad.runtime.rank import rank_from_environment


def test_what_determinism_needs_is_set_before_the_process_starts(monkeypatch):
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    found = rank_environment(rank=1, world=2, deterministic=True)
    wanted = {key: value for key, value in DETERMINISTIC.items() if key != "NCCL_ALGO"}
    assert wanted.items() <= found.items()
    assert "NCCL_ALGO" not in found, "what the user chose stays"


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
