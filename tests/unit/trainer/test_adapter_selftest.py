"""The self-test of an adapter: a sampler that does not compute with it is found before step 1."""

import asyncio

import pytest

from pentad.core.errors import RunError
from pentad.core.types import Generation
from pentad.trainer.sampling.selftest import Prober

MOVED, BASE = -0.5, -1.0


class Learner:
    """Every token has one log-prob, which shaken factors move."""

    def __init__(self):
        self.calls, self.strength = [], 0.0

    async def call(self, method, strength):
        self.calls.append(strength)
        self.strength = strength

    async def run(self, function):
        return function()

    def call_all(self, method, rows, tag="actor"):
        value = BASE + (MOVED * self.strength if tag == "actor" else 0.0)
        return [[value] * len(ids) for ids in rows]


class Sampler:
    def __init__(self, learner, is_deaf, noise):
        self.learner, self.is_deaf, self.noise, self.logprob = learner, is_deaf, noise, BASE

    async def publish(self):
        if not self.is_deaf:
            self.logprob = BASE + MOVED * self.learner.strength + self.noise

    async def generate(self, request):
        drawn = {"ids": [1, 2], "logprobs": [self.logprob] * 2, "versions": [0, 0]}
        return [Generation(**drawn, finish="stop") for _ in request.seeds]


def outcome(is_deaf: bool, noise: float = 0.0, expected: tuple[float, ...] = (1.0, 0.0)):
    learner = Learner()
    sampler = Sampler(learner, is_deaf, noise)
    given = {"samplers": [sampler], "prompts": [(3, 4)], "learner": learner}
    prober = Prober(**given, temperature=1.0, seed=0)
    try:
        return asyncio.run(prober.check_adapter(sampler.publish))
    finally:
        assert tuple(learner.calls) == expected, "the factors are put back"


def test_a_sampler_that_ignores_the_adapter_is_found():
    with pytest.raises(RunError, match="log-probs by 8 and the sampler's by 0, and they are 8 apa"):
        outcome(is_deaf=True, expected=(1.0, 4.0, 16.0, 0.0))


def test_rounding_as_large_as_the_move_is_told_from_a_sampler_without_the_adapter():
    found = outcome(is_deaf=False, noise=0.3, expected=(1.0, 4.0, 0.0))
    assert (found.trainer, found.apart) == (2.0, pytest.approx(0.3))


def test_both_sides_move_alike():
    found = outcome(is_deaf=False)
    assert (found.trainer, found.sampler, found.apart) == (0.5, 0.5, 0.0)
