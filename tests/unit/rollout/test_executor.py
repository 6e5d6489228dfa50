"""The executor: what enters a batch was sampled as it says, and every failure has one end."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from sections import make_executor

from pentad.core.errors import DataFailure, InfraFailure, RunError, UserError
from pentad.core.seeds import derive_seed
from pentad.core.types import Generation, Group, Prompt, SamplingParams
from pentad.rewards.scorer import RewardScorer
from pentad.rewards.section import RewardConfig
from pentad.rollout.environments import Step
from pentad.rollout.executor import Executor
from pentad.rollout.retries import GroupRetries, ReplicaFailed
from pentad.rollout.workflows import MultiTurn, SingleTurn, Transcript

VOCAB = 40


def draw(request, i) -> list[int]:
    """Three tokens that depend on the seed and the position only, as the contract says."""
    start = len(request.prompt_ids)
    return [derive_seed(request.seeds[i], t) % VOCAB for t in range(start, start + 3)]


class Half:
    """Scores by the parity of the first sampled id; remembers the groups."""

    def __init__(self) -> None:
        self.groups: list[Group] = []

    async def score(self, group: Group) -> Group:
        self.groups.append(group)
        for sample in group.samples:
            if sample.reward is None:
                sample.reward = float(sample.ids[sample.mask][0] % 2)
        return group


def settings(**changes) -> dict:
    base = {
        "params": SamplingParams(max_new_tokens=8),
        "num_samples": 4,
        "run_seed": 5,
        "vocab_size": VOCAB,
        "replica_patience_s": 60.0,
        "replica_backoff_s": 0.01,
    }
    return base | changes


@pytest.fixture
def build(plain_tokenizer):
    def make(samplers, workflow=None, reward=None, **changes) -> Executor:
        named = {f"r{i}": sampler for i, sampler in enumerate(samplers)}
        workflow = workflow or SingleTurn()
        return make_executor(
            named, workflow, reward or Half(), plain_tokenizer, **settings(**changes)
        )

    return make


def prompt(gid: int, *ids: int) -> Prompt:
    return Prompt(gid, ids or (1, 2, gid % VOCAB), {"answer": "a"})


def drawn(group: Group) -> list[list[int]]:
    return [sample.ids.tolist() for sample in group.samples]


def test_a_group_is_a_function_of_seed_gid_and_attempt(scripted, build):
    one = asyncio.run(build([scripted(draw)]).rollout(prompt(3), 0))
    same = asyncio.run(build([scripted(draw), scripted(draw)]).rollout(prompt(3), 0))
    later = asyncio.run(build([scripted(draw)]).rollout(prompt(3), 1))
    expected = [
        [1, 2, 3, *(derive_seed(derive_seed(5, "sample", 3, 0, i), t) % VOCAB for t in (3, 4, 5))]
        for i in range(4)
    ]
    assert drawn(one) == expected == drawn(same)
    assert drawn(later) != expected and later.attempt == 1 and later.gid == 3
    assert [s.reward for s in one.samples] == [float(ids[3] % 2) for ids in expected]


GARBAGE = {
    "a log-prob is missing": lambda g: g.logprobs.pop(),
    "a version is missing": lambda g: g.versions.pop(),
    "no tokens": lambda g: (g.ids.clear(), g.logprobs.clear(), g.versions.clear()),
    "too many tokens": lambda g: (
        (g.ids.extend([1] * 9), g.logprobs.extend([-1.0] * 9)) and g.versions.extend([3] * 9)
    ),
    "an id outside the vocabulary": lambda g: g.ids.__setitem__(1, VOCAB),
    "a negative id": lambda g: g.ids.__setitem__(0, -1),
    "a log-prob that is no number": lambda g: g.logprobs.__setitem__(0, float("nan")),
    "an infinite log-prob": lambda g: g.logprobs.__setitem__(0, float("-inf")),
    "a log-prob above zero": lambda g: g.logprobs.__setitem__(2, 0.01),
    "versions that go back": lambda g: g.versions.__setitem__(2, 1),
    "a version below zero": lambda g: g.versions.__setitem__(0, -1),
    "an unknown finish": lambda g: setattr(g, "finish", "tired"),
    "an abort": lambda g: setattr(g, "finish", "abort"),
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_never_enters_a_batch(scripted, build, kind):
    def spoil(answers: list[Generation]) -> list[Generation]:
        GARBAGE[kind](answers[2])
        return answers

    bad, good = scripted(draw), scripted(draw)
    bad.spoil = spoil
    reward = Half()
    with pytest.raises(InfraFailure, match="prompt 3 failed 4 times .*generation 2"):
        asyncio.run(build([bad], reward=reward).rollout(prompt(3), 0))
    assert reward.groups == []
    clean = asyncio.run(build([scripted(draw)]).rollout(prompt(3), 0))
    elsewhere = asyncio.run(build([bad, good]).rollout(prompt(3), 0))
    assert drawn(elsewhere) == drawn(clean)


def test_a_wrong_number_of_generations_is_garbage(scripted, build):
    sampler = scripted(draw)
    sampler.spoil = lambda answers: answers[:3]
    with pytest.raises(InfraFailure, match="3 generations came for 4 seeds"):
        asyncio.run(build([sampler]).rollout(prompt(3), 0))


def test_a_sure_token_in_low_precision_is_no_garbage(scripted, build):
    sampler = scripted(draw)
    sampler.spoil = lambda answers: [replace(a, logprobs=[1e-6, -0.5, 0.0]) for a in answers]
    group = asyncio.run(build([sampler]).rollout(prompt(3), 0))
    np.testing.assert_allclose(group.samples[0].rollout_logprobs[3:], [1e-6, -0.5, 0.0], rtol=1e-6)


def test_a_dead_replica_is_left_alone_until_it_is_well(scripted, build):
    dead, well = scripted(draw), scripted(draw)
    dead.error, dead.is_healthy = ConnectionError("refused"), False
    executor = build([dead, well])

    async def run() -> list[Group]:
        groups = [await executor.rollout(prompt(gid), 0) for gid in range(12)]
        before = len(dead.requests)
        dead.error, dead.is_healthy = None, True
        async with asyncio.timeout(60):
            while any(r.last_error for r in executor.fleet.replicas.values()):
                await asyncio.sleep(0.05)
        groups += [await executor.rollout(prompt(gid), 0) for gid in range(12, 24)]
        assert before == 1 and len(dead.requests) > 1
        executor.close()
        return groups

    groups = asyncio.run(run())
    lone = build([scripted(draw)])
    assert [drawn(g) for g in groups] == [
        drawn(asyncio.run(lone.rollout(prompt(gid), 0))) for gid in range(24)
    ]


def test_no_healthy_replica_is_a_bounded_failure_with_the_reason(scripted, build):
    sampler = scripted(draw)
    sampler.error, sampler.is_healthy = ConnectionError("refused"), False
    with pytest.raises(InfraFailure, match="no replica can serve .r0: RunError: the replica is"):
        asyncio.run(build([sampler], replica_patience_s=0.5).rollout(prompt(0), 0))


def test_users_errors_are_not_retried(scripted, build):
    sampler = scripted(draw)
    sampler.error = UserError("temperature = -1: must be at least 0")
    with pytest.raises(UserError, match="temperature"):
        asyncio.run(build([sampler]).rollout(prompt(0), 0))
    assert len(sampler.requests) == 1


def test_replicas_share_the_load_and_a_prompt_keeps_its_replica(scripted, build):
    samplers = [scripted(draw) for _ in range(3)]
    for sampler in samplers:
        sampler.delay_s = 0.3  # until all are under way
    executor = build(samplers)

    async def run() -> None:
        await asyncio.gather(*(executor.rollout(prompt(gid), 0) for gid in range(30)))

    asyncio.run(run())
    shares = [len(sampler.requests) for sampler in samplers]
    assert sum(shares) == 30 and max(shares) - min(shares) <= 2
    assert all(replica.load == 0 for replica in executor.fleet.replicas.values())
    for _ in range(4):
        asyncio.run(executor.rollout(prompt(99, 8, 8, 8), 0))
    homes = [[r.prompt_ids for r in s.requests].count((8, 8, 8)) for s in samplers]
    assert sorted(homes) == [0, 0, 4]


def test_a_deadline_stops_the_work_and_not_only_the_waiting(scripted, build):
    sampler = scripted(draw)
    sampler.delay_s = 600.0
    executor = build([sampler], deadline_s=0.5, max_infra_retries=1)
    with pytest.raises(InfraFailure, match=r"not done after 0\.5 s, waiting for tokens"):
        asyncio.run(executor.rollout(prompt(0), 0))
    assert sampler.aborted == [request.id for request in sampler.requests]
    assert len(sampler.aborted) == 2 and sampler.num_finished == 0


class Endless:
    """An environment that never answers."""

    closed = 0

    async def reset(self, fields) -> None:
        pass

    async def step(self, text: str) -> Step:
        await asyncio.sleep(60)
        raise AssertionError

    async def close(self) -> None:
        Endless.closed += 1


def test_an_environment_that_hangs_is_a_data_failure_and_is_closed(scripted, build):
    Endless.closed = 0
    executor = build([scripted(draw)], MultiTurn(Endless), deadline_s=0.5, max_retries=1)
    with pytest.raises(DataFailure, match="in the workflow") as caught:
        asyncio.run(executor.rollout(prompt(0), 0))
    assert caught.value.reason == "deadline"
    assert Endless.closed == 8  # two attempts of four samples


def test_a_cancelled_rollout_aborts_its_requests(scripted, build):
    sampler = scripted(draw)
    sampler.delay_s = 600.0
    executor = build([sampler])

    async def run() -> None:
        task = asyncio.create_task(executor.rollout(prompt(0), 0))
        while not sampler.requests:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert sampler.aborted == [sampler.requests[0].id]
    (replica,) = executor.fleet.replicas.values()
    assert replica.load == 0 and replica.last_error is None


def test_data_failures_draw_fresh_samples_then_the_group_is_given_up(scripted, build):
    class Failing:
        async def score(self, group: Group) -> Group:
            raise DataFailure("reward_timeout", "longer than 1 s")

    sampler = scripted(draw)
    executor = build([sampler], reward=Failing(), max_retries=2)
    with pytest.raises(DataFailure, match="reward_timeout"):
        asyncio.run(executor.rollout(prompt(0), 1))
    assert len({request.seeds for request in sampler.requests}) == 3
    assert sampler.requests[0].seeds[0] == derive_seed(5, "sample", 0, 1, 0)


def test_a_prompt_that_is_too_long_is_not_tried_again(scripted, build):
    sampler = scripted(draw)
    executor = build([sampler], max_total_tokens=3)
    with pytest.raises(DataFailure, match="too_long"):
        asyncio.run(executor.rollout(prompt(0), 0))
    assert sampler.requests == []


class Custom:
    """A workflow of one's own that goes wrong as told."""

    def __init__(self, wrong) -> None:
        self.wrong = wrong

    async def run(self, prompt, sampler, context):
        samples = []
        for i in range(context.num_samples):
            request = context.request(prompt.ids, [context.seed(prompt.gid, i)])
            [generation] = await sampler.generate(request)
            transcript = Transcript(prompt.ids)
            transcript.add_sampled(generation)
            samples.append(transcript.finished(generation.finish, "x"))
        return self.wrong(samples) or samples


def put(name, index, value):
    return lambda samples: getattr(samples[1], name).__setitem__(index, value)


STRAY = "token {} is trained, but was not sampled there"
BREACHES = [
    (STRAY.format(3), put("ids", 4, 39)),  # nothing was drawn that begins like this
    (STRAY.format(4), put("rollout_logprobs", 4, -0.3)),
    (STRAY.format(5), put("versions", 5, 4)),
    (STRAY.format(2), put("mask", 2, True)),
    ("a token that is not trained has a log-prob", put("mask", 3, False)),
    ("its ids do not begin with those of the prompt", put("ids", 0, 7)),
    ("no token of it is trained", put("mask", slice(None), False)),
    ("mask has shape", lambda samples: setattr(samples[1], "mask", samples[1].mask[:-1])),
    ("its reward is nan", lambda samples: setattr(samples[1], "reward", float("nan"))),
    ("returned 3 samples where 4 were requested", lambda samples: samples[:3]),
]


@pytest.mark.parametrize(("sentence", "wrong"), BREACHES)
def test_a_workflow_that_breaks_its_contract_stops_the_run(scripted, build, sentence, wrong):
    executor = build([scripted(draw)], Custom(wrong))
    with pytest.raises(UserError, match=sentence):
        asyncio.run(executor.rollout(prompt(3), 0))


def test_a_workflow_may_train_a_part_of_what_was_sampled(scripted, build):
    def only_last(samples) -> None:
        for sample in samples:
            sample.mask[:5], sample.versions[:5], sample.rollout_logprobs[:5] = False, -1, 0.0

    group = asyncio.run(build([scripted(draw)], Custom(only_last)).rollout(prompt(3), 0))
    assert [sample.num_sampled for sample in group.samples] == [1] * 4


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (LookupError("no such tool"), "LookupError: no such tool"),
        (SystemExit(5), r"RuntimeError: SystemExit\(5\)"),
        (asyncio.CancelledError(), "RuntimeError: it awaited a task that was cancelled"),
    ],
)
def test_a_workflow_that_raises_drops_its_group_with_the_error(scripted, build, error, told):
    def raising(samples):
        raise error

    executor = build([scripted(draw)], Custom(raising), max_retries=0)
    with pytest.raises(DataFailure, match=f"workflow_error: {told}"):
        asyncio.run(executor.rollout(prompt(3), 0))


def test_the_traceback_of_a_workflow_is_shown_once_for_each_place(scripted, build, caplog):
    def raising(samples):
        raise ValueError(f"odd {next(count)}")

    count = iter(range(9))
    executor = build([scripted(draw)], Custom(raising), max_retries=1)
    for gid in range(3):
        with pytest.raises(DataFailure, match="workflow_error: ValueError: odd"):
            asyncio.run(executor.rollout(prompt(gid), 0))
    shown = [record for record in caplog.records if record.exc_info]
    assert len(shown) == 1 and "odd 0" in str(shown[0].exc_info[1])
    assert next(count) == 6


def test_an_error_of_the_run_inside_a_workflow_is_passed_on(scripted, build):
    def raising(samples):
        raise ExceptionGroup("tasks", [RunError("the disk is full")])

    with pytest.raises(RunError, match="the disk is full"):
        asyncio.run(build([scripted(draw)], Custom(raising)).rollout(prompt(3), 0))


class Fragile:
    """An environment of one turn that raises `error` at the answers in `bad`, `times` times each.
    An answer that is the key of a reward has it."""

    def __init__(self, bad, error, times=9, rewards=None) -> None:
        self.left = dict.fromkeys(bad, times)
        self.error = error
        self.rewards = rewards or {}

    async def reset(self, fields) -> None:
        if "reset" in self.left:
            raise self.error

    async def step(self, text: str) -> Step:
        if self.left.get(text, 0):
            self.left[text] -= 1
            raise self.error
        return Step(None, is_done=True, reward_parts=self.rewards.get(text, {}))

    async def close(self) -> None:
        pass


MARKS = {"reward_failed": 1.0, "reward_failed/workflow_error": 1.0}
ERRORS = [ValueError("odd"), SystemExit(3), ExceptionGroup("tasks", [KeyError("x")])]


@pytest.mark.parametrize("is_own", [False, True], ids=["reward.fn", "own rewards"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda one: type(one).__name__)
def test_an_answer_its_environment_fails_on_does_not_drop_its_group(
    scripted, build, caplog, error, is_own
):
    clean = asyncio.run(build([scripted(draw)]).rollout(prompt(3), 0))
    texts = [sample.text for sample in clean.samples]
    assert len(set(texts)) == 4
    rewards = {text: {"own": float(i)} for i, text in enumerate(texts)} if is_own else {}
    fragile, reward = Fragile({texts[1]}, error, rewards=rewards), Half()
    executor = build([scripted(draw)], MultiTurn(lambda: fragile), reward)
    group = asyncio.run(executor.rollout(prompt(3), 0))
    assert drawn(group) == drawn(clean) and fragile.left[texts[1]] == 7, "tried once more"
    values = [float(i) for i in range(4)] if is_own else [one.reward for one in clean.samples]
    values[1] = (values[0] + values[2] + values[3]) / 3
    assert [sample.reward for sample in group.samples] == pytest.approx(values)
    assert [sample.reward_parts == MARKS for sample in group.samples] == [False, True, False, False]
    assert [len(one.samples) for one in reward.groups] == [3], "what failed is not judged"
    assert len([record for record in caplog.records if record.exc_info]) == 1


def test_an_environment_that_fails_once_leaves_no_mark(scripted, build):
    clean = asyncio.run(build([scripted(draw)]).rollout(prompt(3), 0))
    fragile = Fragile({one.text for one in clean.samples}, ValueError("odd"), times=1)
    workflow = MultiTurn(lambda: fragile)
    group = asyncio.run(build([scripted(draw)], workflow).rollout(prompt(3), 0))
    assert drawn(group) == drawn(clean) and not any(one.reward_parts for one in group.samples)
    assert [one.reward for one in group.samples] == [one.reward for one in clean.samples]


@pytest.mark.parametrize(
    ("bad", "error", "kind", "said"),
    [
        ("all", ValueError("odd"), DataFailure, "workflow_error: ValueError: odd"),
        ("reset", ValueError("odd"), DataFailure, "workflow_error: ValueError: odd"),
        ("one", InfraFailure("no tool"), InfraFailure, "prompt 3 failed 4 times .*no tool"),
        ("one", DataFailure("bad", "row"), DataFailure, "bad: row"),
        ("one", RunError("the disk is full"), RunError, "the disk is full"),
    ],
)
def test_what_is_no_doing_of_one_answer_fails_the_group(scripted, build, bad, error, kind, said):
    clean = asyncio.run(build([scripted(draw)]).rollout(prompt(3), 0))
    texts = [sample.text for sample in clean.samples]
    fragile = Fragile({"all": texts, "one": texts[:1], "reset": ["reset"]}[bad], error, times=99)
    executor = build([scripted(draw)], MultiTurn(lambda: fragile), max_retries=0)
    with pytest.raises(kind, match=said):
        asyncio.run(executor.rollout(prompt(3), 0))


def test_rewards_of_the_workflow_are_kept_and_missing_ones_named(scripted, plain_tokenizer):
    def scored(samples) -> None:
        for sample in samples:
            sample.reward = 0.5

    sampler = {"r": scripted(draw)}
    executor = make_executor(sampler, Custom(scored), None, plain_tokenizer, **settings())
    group = asyncio.run(executor.rollout(prompt(3), 0))
    assert [sample.reward for sample in group.samples] == [0.5] * 4

    def scored_but_one(samples) -> None:
        scored(samples)
        samples[2].reward = None

    for workflow, first in ((SingleTurn(), 0), (Custom(scored_but_one), 2)):
        executor = make_executor(sampler, workflow, None, plain_tokenizer, **settings())
        said = f"none is set, and the workflow gave no reward to sample {first} of prompt 3; name"
        with pytest.raises(UserError, match=said):
            asyncio.run(executor.rollout(prompt(3), 0))


def test_a_built_in_reward_scores_the_group(scripted, build, plain_tokenizer):
    letters = [plain_tokenizer.convert_tokens_to_ids(c) for c in "ab"]
    sampler = scripted(lambda request, i: letters[: 1 + i % 2])
    reward = RewardScorer(RewardConfig(fn="sort_digits"))
    executor = build([sampler], reward=reward)
    group = asyncio.run(executor.rollout(Prompt(0, (1,), {"answer": "ab"}), 0))
    assert [sample.text for sample in group.samples] == ["a", "ab", "a", "ab"]
    assert [sample.reward for sample in group.samples] == [0.25, 1.0, 0.25, 1.0]
    assert [sample.reward_parts["correct"] for sample in group.samples] == [0, 1, 0, 1]


def test_replicas_are_counted_for_each_set_of_seeds_and_new_seeds_for_the_group():
    retries = GroupRetries(max_retries=1, max_replicas=1)
    retries.after(ReplicaFailed("a: lost"), prompt(3))
    assert retries.key(5) == 5, "the health of machines selects no answers"
    retries.after(DataFailure("deadline", "late"), prompt(3))
    assert retries.key(5) == "5.1"
    retries.after(ReplicaFailed("b: lost"), prompt(3))
    with pytest.raises(InfraFailure, match="prompt 3 failed 2 times .b: lost; c: lost."):
        retries.after(ReplicaFailed("c: lost"), prompt(3))
    with pytest.raises(DataFailure):
        retries.after(DataFailure("deadline", "late"), prompt(3))
    with pytest.raises(DataFailure):
        GroupRetries(9, 9).after(DataFailure("too_long", "it is", is_final=True), prompt(3))


def test_every_episode_of_a_group_is_run_again_once():
    retries = GroupRetries()
    episodes = [("samples", 0), ("samples", 1), ("greedy", 0)]
    assert [retries.repeats(one) for one in episodes * 2] == [True] * 3 + [False] * 3
