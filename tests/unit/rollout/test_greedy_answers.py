"""Greedy answers of groups: sampled at temperature 0 beside the samples, scored, never trained."""

import asyncio
from dataclasses import replace
from functools import partial

import pytest
from sections import make_executor

from pentad.core.errors import DataFailure, InfraFailure
from pentad.core.seeds import derive_seed
from pentad.core.types import Greedy, Group, Prompt, SamplingParams
from pentad.rewards.scorer import RewardScorer
from pentad.rewards.section import RewardConfig
from pentad.rollout.environments import Step
from pentad.rollout.workflows import EpisodeOver, MultiTurn, OwnPrompts, SingleTurn, Transcript

VOCAB, STOP = 40, 39


def draw(request, i):
    """Two tokens by the seed; greedily always five, whatever the seed."""
    if request.params.temperature == 0:
        return [11, 12, 13, 14, 15]
    return [derive_seed(request.seeds[i], t) % 10 for t in range(2)]


def turns(request, i):
    """Turns of one token."""
    return [*draw(request, i)[:1], STOP]


EACH = """
def score(ids):
    return {2: 1.5}[len(ids) if ids != FAILS else 0]
"""
ALL = """
def score(completions, completion_ids):
    return [{2: 1.5}[len(ids) if ids != FAILS else 0] for ids in completion_ids]
"""


class Sum:
    """Scores by the sum of the sampled ids; remembers how many samples it scored at once."""

    def __init__(self):
        self.nums = []

    async def score(self, group: Group) -> Group:
        self.nums.append(sum(sample.reward is None for sample in group.samples))
        for sample in group.samples:
            if sample.reward is None:
                sample.reward = float(sample.ids[sample.mask].sum())
        return group


@pytest.fixture
def build(plain_tokenizer):
    def make(samplers, workflow=None, reward=None, **given):
        given = {"num_samples": 3, "run_seed": 5, "vocab_size": VOCAB} | given
        given |= {
            "params": SamplingParams(max_new_tokens=8, stop_ids=(STOP,)),
            "needs_greedy": True,
        }
        named = {f"r{i}": sampler for i, sampler in enumerate(samplers)}
        patience = {"replica_patience_s": 5.0, "replica_backoff_s": 0.01}
        workflow = workflow or SingleTurn()
        return make_executor(named, workflow, reward or Sum(), plain_tokenizer, **given, **patience)

    return make


def rollout(executor, attempt=0):
    return asyncio.run(executor.rollout(Prompt(3, (1, 2), {}), attempt))


def drawn(group):
    return [sample.ids.tolist() for sample in group.samples]


@pytest.mark.parametrize("num_samples", [1, 3])
def test_the_greedy_answer_is_scored_and_is_no_sample(scripted, build, num_samples):
    sampler, reward = scripted(draw), Sum()
    group = rollout(build([sampler], reward=reward, num_samples=num_samples))
    assert group.greedy == Greedy(65.0, 5)
    plain = rollout(build([scripted(draw)], num_samples=num_samples, needs_greedy=True))
    assert drawn(group) == drawn(plain) and len(group.samples) == num_samples
    asked = sorted((r.params.temperature, len(r.seeds)) for r in sampler.requests)
    assert asked == [(0.0, 1), (1.0, num_samples)]
    assert reward.nums == [num_samples, 1], "scored apart: rewards that compare do not see it"


class Hot(OwnPrompts):
    """A workflow with two sequences for each sample, whose requests are at temperature 1."""

    async def run(self, prompt, sampler, context):
        samples = []
        for i in range(context.num_samples):
            for ids in (prompt.ids, (7, 7, 7)):
                request = context.request(ids, [context.seed(prompt.gid, i)])
                request = replace(request, params=SamplingParams(max_new_tokens=8))
                [answer] = await sampler.generate(request)
                transcript = Transcript(ids)
                transcript.add_sampled(answer)
                samples.append(transcript.finished(answer.finish, ""))
                samples[-1].reward = float(len(samples) % 2)
        return samples


def test_a_workflow_of_its_own_is_run_once_more_for_one_sample(scripted, build):
    sampler = scripted(draw)
    group = rollout(build([sampler], Hot()))
    assert len(group.samples) == 6
    assert group.greedy == Greedy(0.5, 5), "the mean over its sequences, the length of the longest"
    assert sum(request.params.temperature == 0 for request in sampler.requests) == 2


class Guess:
    """An environment of two turns, the second of which is rewarded."""

    def __init__(self):
        self.turns = 0

    async def reset(self, fields):
        return ""

    async def step(self, text):
        self.turns += 1
        part = {"turns": float(self.turns == 2)}
        return Step("ab", is_done=self.turns == 2, reward_parts=part)

    async def close(self):
        return None


def test_an_environment_is_played_greedily_over_all_turns(scripted, build):
    sampler = scripted(turns)
    group = rollout(build([sampler], MultiTurn(Guess), num_samples=2))
    assert group.greedy == Greedy(1.0, 4)
    assert sum(request.params.temperature == 0 for request in sampler.requests) == 2
    assert sum(request.params.temperature == 1 for request in sampler.requests) == 4


class Broken(SingleTurn):
    """Fails greedily, the first `times` times."""

    def __init__(self, times):
        self.times = times

    async def run(self, prompt, sampler, context):
        found = await super().run(prompt, sampler, context)
        if context.params.temperature == 0 and self.times > 0:
            self.times -= 1
            raise RuntimeError("it fell over")
        return found


def test_a_failed_greedy_answer_fails_its_group_which_is_sampled_again(scripted, build):
    whole = rollout(build([scripted(draw)]))
    again = rollout(build([scripted(draw)], Broken(1), max_retries=2))
    assert again.greedy == whole.greedy and drawn(again) != drawn(whole), "with new seeds"
    with pytest.raises(DataFailure, match="it fell over"):
        rollout(build([scripted(draw)], Broken(9), max_retries=2))


class Falls(Guess):
    """Falls over at the greedy answer, every time."""

    def __init__(self, failure):
        super().__init__()
        self.failure = failure

    async def step(self, text):
        if text == "l":
            raise self.failure
        return await super().step(text)


@pytest.mark.parametrize(
    ("failure", "reward"), [(RuntimeError("it fell over"), 1.0), (EpisodeOver("over", "x"), 0.0)]
)
def test_a_greedy_episode_that_always_fails_drops_no_group(scripted, build, failure, reward):
    """It gets the reward of a failed sample: the mean of the samples, or at most 0."""
    plain = rollout(build([scripted(turns)], MultiTurn(Guess), num_samples=2))
    build_broken = partial(Falls, failure)
    group = rollout(build([scripted(turns)], MultiTurn(build_broken), num_samples=2))
    assert drawn(group) == drawn(plain), "sampled once, with the first seeds"
    assert plain.greedy == Greedy(1.0, 4) and group.greedy == Greedy(reward, 2)


@pytest.mark.parametrize("body", [EACH, ALL])
def test_a_reward_that_always_fails_on_the_greedy_answer_drops_no_group(
    scripted, build, tmp_path, body
):
    """As for the first sample here, the cause is unclear: it has the mean reward of the others."""
    first, second = drawn(rollout(build([scripted(draw)], num_samples=2)))
    assert first != second
    place = tmp_path / "rewards.py"
    place.write_text(f"FAILS = {first[2:]}\n{body}")

    async def scored():
        reward = RewardScorer(RewardConfig(fn=f"{place}:score", num_workers=1, timeout_s=20.0))
        await reward.start()
        try:
            executor = build([sampler], reward=reward, num_samples=2)
            return await executor.rollout(Prompt(3, (1, 2), {"answer": ""}), 0)
        finally:
            await reward.close()

    sampler = scripted(draw)
    group = asyncio.run(scored())
    assert group.greedy == Greedy(1.5, 5)
    assert [sample.reward for sample in group.samples] == [1.5, 1.5]
    assert len(sampler.requests) == 2, "sampled once"


def test_after_a_failure_of_the_replica_both_come_from_another(scripted, build):
    def fails(request, i):
        if request.params.temperature == 0:
            raise ConnectionError("refused")
        return draw(request, i)

    bad, good = scripted(fails), scripted(draw)
    group = rollout(build([bad, good]))
    assert drawn(group) == drawn(rollout(build([scripted(draw)])))
    assert group.greedy == Greedy(65.0, 5)
    with pytest.raises(InfraFailure, match="refused"):
        rollout(build([scripted(fails)]))


def test_a_cancelled_group_aborts_both_requests(scripted, build):
    sampler = scripted(draw)
    sampler.delay_s = 60.0

    async def cancelled():
        work = asyncio.ensure_future(build([sampler]).rollout(Prompt(3, (1, 2), {}), 0))
        while len(sampler.requests) < 2:
            await asyncio.sleep(0.001)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    asyncio.run(cancelled())
    assert sorted(sampler.aborted) == sorted(request.id for request in sampler.requests)
