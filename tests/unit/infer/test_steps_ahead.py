"""A decode step that is launched before the one ahead of it is read: the same tokens as without.

On a GPU the ids stay on the device. Here the runner computes such a step on the CPU, from the ids
of the step before, so that the engine's and the scheduler's part is the real one.
"""

import asyncio
from dataclasses import dataclass

import numpy as np
import pytest

from pentad.infer.scheduler import Plan
from pentad.models.hf_weights import iter_hf
from pentad.models.registry import create_model


@dataclass
class Step:
    """As `graphs.Launched`."""

    rows: np.ndarray
    seats: np.ndarray
    ids: np.ndarray
    logprobs: np.ndarray

    def read(self):
        return self.ids, self.logprobs


def launch_on_cpu(runner):
    """Stands for `Runner.launch`: the last token of a row is the one that `after` drew."""
    table = runner.table

    def launch(rows, after=None):
        if after is not None:
            place = {row: i for i, row in enumerate(after.rows.tolist())}
            at = table.num_tokens[rows]
            table.reserve_columns(int(at.max()) + 1)
            table.tokens[rows, at] = [after.ids[place[row]] for row in rows.tolist()]
            table.num_tokens[rows] += 1
            table.num_computed[rows] += 1
        starts, each = table.num_computed[rows].copy(), np.arange(len(rows))
        ids, logprobs = runner.run(Plan(rows, starts, np.ones(len(rows), np.int64), rows, each))
        if after is not None:
            table.num_tokens[rows] -= 1
            table.num_computed[rows] -= 1
        launched.append(after is not None)
        return Step(rows, table.num_seated[rows].copy(), ids, logprobs)

    launched: list[bool] = []
    return launch, launched


@pytest.fixture
def ahead_sampler(make_sampler):
    def make(**settings):
        sampler = make_sampler(**settings)
        sampler.engine.runner.launch, launched = launch_on_cpu(sampler.engine.runner)
        return sampler, launched

    return make


def tokens(results):
    return [[(g.ids, g.versions, g.finish) for g in one] for one in results]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_running": 5},
        {"kv_cache_tokens": 96, "max_running": 8},
        {"max_batch_tokens": 9, "max_running": 8},
    ],
    ids=["room for all", "few rows", "few blocks", "chunked"],
)
def test_the_tokens_are_those_of_steps_in_turn(
    make_sampler, ahead_sampler, make_request, generate, check_exact, settings
):
    requests = [
        make_request("a", range(3), n=4, max_new_tokens=20, stop_ids=(1, 5, 9, 30)),
        make_request("b", range(13), n=2, max_new_tokens=7),
        make_request("c", range(5), n=3, max_new_tokens=30, stop_ids=(2,)),
        make_request("d", range(2), n=1, max_new_tokens=1),
    ]
    plain = generate(make_sampler(**settings), requests)
    sampler, launched = ahead_sampler(**settings)
    found = generate(sampler, requests)
    assert tokens(found) == tokens(plain)
    assert sum(launched) > 5, "no step was ever launched ahead"
    check_exact(sampler, requests, found)
    stats = sampler.engine.stats()
    assert stats["running"] == stats["kv_usage"] == 0
    assert stats["tokens_drawn"] == sum(len(g.ids) for one in found for g in one)


def test_an_abort_and_new_weights_meet_a_step_that_is_under_way(
    ahead_sampler, make_request, tiny_dims
):
    """What was launched before an install carries the version that drew it; rows of an aborted
    request, and the sequence that takes such a row, get none of its tokens."""
    sampler, launched = ahead_sampler(version=0)

    async def main():
        seen = asyncio.Event()
        long = make_request("long", range(4), n=2, max_new_tokens=40)
        ended = make_request("ended", range(6), n=3, max_new_tokens=40)
        answers = asyncio.create_task(
            sampler.generate(long, on_token=lambda i, id_, logprob: seen.set())
        )
        other = asyncio.create_task(sampler.generate(ended))
        await seen.wait()
        await sampler.abort("ended")
        await sampler.install(1, list(iter_hf(create_model(tiny_dims, seed=2))))
        third = await sampler.generate(make_request("third", range(5), n=3, max_new_tokens=6))
        return await answers, await other, third

    answers, other, third = asyncio.run(main())
    assert any(launched)
    assert all(g.finish == "abort" for g in other)
    assert all(len(g.ids) == 6 and g.versions == [1] * 6 for g in third)
    for answer in answers:
        assert len(answer.ids) == 40 and sorted(answer.versions) == answer.versions
        assert set(answer.versions) == {0, 1}
