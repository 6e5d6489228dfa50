"""Episodes: what fails by an answer counts against that answer, and never drops its group."""

import asyncio

import pytest
from sections import make_executor

from pentad.core.errors import DataFailure, InfraFailure
from pentad.core.seeds import derive_seed
from pentad.core.types import Prompt, SamplingParams
from pentad.rollout.environments import Step
from pentad.rollout.workflows import Episodes, MultiTurn, SingleTurn, Transcript

VOCAB = 40
BAD = 1
"""The sample that fails."""
PROMPT = Prompt(3, (1, 2, 3), {})
LATE = {"reward_failed": 1.0, "reward_failed/deadline": 1.0}
RAISED = {"reward_failed": 1.0, "reward_failed/workflow_error": 1.0}


def draw(request, i) -> list[int]:
    start = len(request.prompt_ids)
    return [derive_seed(request.seeds[i], t) % VOCAB for t in range(start, start + 3)]


class First:
    """Scores by the first id that was sampled, from -2 on."""

    async def score(self, group):
        for sample in group.samples:
            sample.reward = float(sample.ids[sample.mask][0] % 5 - 2)
        return group


@pytest.fixture
def roll(scripted, plain_tokenizer):
    def go(workflow, sampler=None, **changes):
        settings = dict(
            params=SamplingParams(max_new_tokens=8),
            num_samples=4,
            run_seed=5,
            vocab_size=VOCAB,
            **{"replica_backoff_s": 0.01, "max_retries": 0, "deadline_s": 60.0} | changes,
        )
        samplers = {"r": sampler or scripted(draw)}
        executor = make_executor(samplers, workflow, First(), plain_tokenizer, **settings)
        return asyncio.run(executor.rollout(PROMPT, 0)).samples

    return go


class Own(Episodes):
    """A workflow of a user's own, with two answers in a sample, that is `spoilt` in between."""

    def __init__(self, spoilt, only=BAD, between=(7, 8)) -> None:
        self.spoilt, self.only, self.between = spoilt, only, between

    async def episode(self, prompt, index, sampler, context):
        transcript, seed = Transcript(prompt.ids), context.seed(prompt.gid, index)
        for number in range(2):
            request = context.request(transcript.ids, [seed], transcript.num_sampled)
            [answer] = await sampler.generate(request)
            transcript.add_sampled(answer)
            if number == 1 and self.only in (index, None):
                await self.spoilt()
            transcript.add_given(self.between if number == 0 else ())
        return transcript.finished(answer.finish, context.text_of(answer))


async def raises():
    raise LookupError("no such tool")


async def hangs():
    await asyncio.sleep(600)


async def passes():
    pass


def columns(samples):
    return [(one.ids.tolist(), one.mask.tolist(), one.rollout_logprobs.tolist()) for one in samples]


def test_an_answer_that_a_workflow_of_ones_own_raises_on_does_not_drop_its_group(roll):
    clean, kept = roll(Own(passes)), roll(Own(raises))
    assert columns(kept) == columns(clean), "both answers and what stands between are kept"
    rewards = [one.reward for one in clean]
    rewards[BAD] = sum(rewards[i] for i in (0, 2, 3)) / 3
    assert [one.reward for one in kept] == pytest.approx(rewards)
    assert [one.reward_parts for one in kept] == [{}, RAISED, {}, {}]
    assert kept[BAD].turns[0][0] == "assistant" and kept[BAD].turns[1] == ("user", "hi")


def test_an_episode_that_hangs_until_the_deadline_has_no_reward_above_the_others(roll):
    clean, kept = roll(Own(passes)), roll(Own(hangs), deadline_s=1.0)
    assert columns(kept) == columns(clean)
    rewards = [one.reward for one in clean]
    rewards[BAD] = min(0.0, *(rewards[i] for i in (0, 2, 3)))
    assert [one.reward for one in kept] == rewards
    assert [one.reward_parts for one in kept] == [{}, LATE, {}, {}]


class Slow:
    """An environment that hangs at one answer."""

    def __init__(self, bad) -> None:
        self.bad = bad

    async def reset(self, fields) -> None:
        if self.bad == "reset":
            await hangs()

    async def step(self, text):
        if text == self.bad:
            await hangs()
        return Step(None, is_done=True)

    async def close(self) -> None:
        pass


def test_an_environment_that_hangs_at_one_answer_does_not_drop_its_group(roll):
    clean = roll(SingleTurn())
    kept = roll(MultiTurn(lambda: Slow(clean[BAD].text)), deadline_s=1.0)
    assert columns(kept) == columns(clean)
    assert [one.reward_parts for one in kept] == [{}, LATE, {}, {}]
    assert kept[BAD].reward == min(0.0, *(clean[i].reward for i in (0, 2, 3)))


def test_an_environment_that_hangs_before_any_answer_drops_the_group_by_name(roll):
    with pytest.raises(DataFailure, match="deadline: the group was not done after 0.5 s"):
        roll(MultiTurn(lambda: Slow("reset")), deadline_s=0.5)


@pytest.mark.parametrize(
    ("spoilt", "said"), [(raises, "workflow_error: LookupError"), (hangs, "deadline: the group")]
)
def test_where_no_sample_passes_the_group_is_dropped_by_name(roll, spoilt, said):
    with pytest.raises(DataFailure, match=said):
        roll(Own(spoilt, only=None), deadline_s=1.0)


class Stuck:
    """A sampler that does not answer what continues a first answer of the sample `BAD`."""

    def __init__(self, inner, seed) -> None:
        self.inner, self.seed = inner, seed
        self.capabilities = inner.capabilities
        self.abort, self.health = inner.abort, inner.health

    async def generate(self, request):
        if request.seeds[0] == self.seed and len(request.prompt_ids) > len(PROMPT.ids):
            await hangs()
        return await self.inner.generate(request)


def test_a_sampler_that_hangs_is_not_the_answers_doing(roll, scripted):
    seed = derive_seed(5, "sample", 3, 0, BAD)
    with pytest.raises(InfraFailure, match="waiting for tokens"):
        roll(Own(passes), Stuck(scripted(draw), seed), deadline_s=0.5, max_infra_retries=0)


class Delaying(Own):
    """Spends the time before it asks for the second answer of the bad sample."""

    async def episode(self, prompt, index, sampler, context):
        if index != BAD:
            return await super().episode(prompt, index, sampler, context)

        class Later:
            async def generate(self, request):
                if len(request.prompt_ids) > len(prompt.ids):
                    await asyncio.sleep(0.8)
                return await sampler.generate(request)

        return await super().episode(prompt, index, Later(), context)


def test_time_that_an_episode_spent_itself_is_its_own_also_while_it_waits_for_tokens(
    roll, scripted
):
    seed = derive_seed(5, "sample", 3, 0, BAD)
    kept = roll(Delaying(passes), Stuck(scripted(draw), seed), deadline_s=1.2)
    assert [one.reward_parts for one in kept] == [{}, LATE, {}, {}]
    assert kept[BAD].num_sampled == 3, "the first answer"


def test_a_failure_before_the_deadline_stays_one_when_the_second_attempt_is_late(roll):
    times = []

    async def raises_then_hangs():
        times.append(1)
        await (raises() if len(times) == 1 else hangs())

    kept = roll(Own(raises_then_hangs), deadline_s=1.0)
    assert [one.reward_parts for one in kept] == [{}, RAISED, {}, {}]


def test_an_episode_that_swallows_its_cancellation_is_left_behind(roll, monkeypatch, caplog):
    monkeypatch.setattr("pentad.rollout.workflows.CLOSE_TIMEOUT_S", -0.8)

    async def hangs_on():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(2.0)

    kept = roll(Own(hangs_on), deadline_s=0.5)
    assert [one.reward_parts for one in kept] == [{}, LATE, {}, {}]
    assert "does not end" in caplog.text


class Paying(Own):
    """Gives rewards by itself: one of them is no number that can be trained."""

    def __init__(self, reward, parts) -> None:
        super().__init__(passes)
        self.pay = reward, parts

    async def episode(self, prompt, index, sampler, context):
        sample = await super().episode(prompt, index, sampler, context)
        sample.reward, sample.reward_parts = self.pay if index == BAD else (float(index), {})
        return sample


@pytest.mark.parametrize(
    ("reward", "parts"),
    [
        (float("nan"), {}),
        (float("inf"), {}),
        (float("-inf"), {"a": 1.0}),
        (1.0, {"a": float("nan")}),
        (None, {"a": 10**400}),
    ],
)
def test_a_reward_that_is_not_finite_counts_against_its_sample(roll, reward, parts):
    kept = roll(Paying(reward, parts))
    assert [one.reward_parts for one in kept] == [{}, RAISED, {}, {}]
    assert [one.reward for one in kept if one.reward_parts == {}] == pytest.approx(
        [one.reward for i, one in enumerate(roll(Own(passes))) if i != BAD]
    )
