"""Ranks that do wrong on purpose: the first case kills a rank, the others drop a sum over ranks."""

import os

from pentad.cli import parallel_ranks
from pentad.engine import engine


def measure(rank, payload):
    if payload["cases"][0][0] == 0 and rank.rank == 1:
        rank.report(0)
        os._exit(9)
    assert "sum_copies" in vars(engine), "there is nothing left to sabotage"
    engine.sum_copies = lambda *_: None
    parallel_ranks.measure_layouts(rank, payload)
