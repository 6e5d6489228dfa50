"""Elastic runs under torchrun: the layout follows the number of ranks that came together."""

import os

import pytest

from pentad.config.load import read_config
from pentad.config.resolve import resolve
from pentad.core.errors import UserError
from pentad.runtime.rank import Rank
from pentad.trainer.processes.ranks import fit_torchrun


@pytest.fixture
def config(monkeypatch):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    given = ["allocation_mode=archon:d4t2", "actor.path=Qwen/Qwen3-0.6B", "elastic.min_ranks=4"]
    return resolve(read_config(None, ["elastic.enabled=true", *given]).config)[0]


def test_fewer_ranks_get_the_layout_of_the_plan_and_idle_ones_leave(config, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "7")
    fitted, rank, why = fit_torchrun(config, Rank(5, 7))
    assert why.startswith("archon:d3t2 for archon:d4t2 on 7 ranks: d 4 -> 3")
    assert fitted.allocation_mode == "archon:d3t2" and rank == Rank(5, 6)
    assert os.environ["WORLD_SIZE"] == "6", "torch makes a group of so many"
    with pytest.raises(SystemExit) as left:
        fit_torchrun(config, Rank(6, 7))
    assert left.value.code == 0
    assert fit_torchrun(config, Rank(0, 8)) == (config, Rank(0, 8), "")


def test_too_few_ranks_and_a_store_that_outlives_them_are_refused(config, monkeypatch):
    with pytest.raises(UserError, match="WORLD_SIZE = 3: elastic.min_ranks = 4, and the layout"):
        fit_torchrun(config, Rank(0, 3))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert fit_torchrun(config, Rank(0, 8)), "one agent counts its restarts right"
    monkeypatch.setenv("WORLD_SIZE", "8"), monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(UserError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on all machines"):
        fit_torchrun(config, Rank(0, 8))
