"""Agent programs written for an OpenAI server: what they were answered is what is trained."""

import asyncio
import contextlib
import copy
import sys
import threading
import time

import numpy as np
import openai
import pytest
from sections import make_executor

from pentad.core.errors import DataFailure, InfraFailure, UserError
from pentad.core.types import Prompt, SamplingParams
from pentad.rollout.agents import AgentWorkflow

END = "<|im_end|>"


@pytest.fixture
def lab(scripted, chat_tokenizer):
    """A policy that says `turns`, one after the other, one id a letter, and an executor."""

    class Lab:
        def __init__(self):
            self.tokenizer = chat_tokenizer
            self.end = chat_tokenizer.convert_tokens_to_ids(END)
            self.turns = ["abc", "ban", "z"]
            self.sampler = scripted(self.say)

        def ids(self, text):
            return [self.tokenizer.convert_tokens_to_ids(c) for c in text]

        def say(self, request, i):
            turn = self.turns[(len(self.sampler.requests) - 1) % len(self.turns)]
            return [*self.ids(turn), self.end]

        def executor(self, agent, num_samples=1, samplers=None, **changes):
            settings = dict(
                params=SamplingParams(max_new_tokens=40, stop_ids=(self.end,), temperature=0.9),
                num_samples=num_samples,
                run_seed=1,
                vocab_size=len(self.tokenizer),
                **({"replica_backoff_s": 0.01, "max_retries": 0} | changes),
            )
            samplers = samplers or {"a": self.sampler}
            return make_executor(samplers, AgentWorkflow(agent), None, self.tokenizer, **settings)

        def run(self, agent, fields=None, **more):
            executor = self.executor(agent, **more)
            prompt = Prompt(5, (1, 2), fields or {"answer": "x"}, "what?")
            return asyncio.run(executor.rollout(prompt, 0)).samples

    return Lab()


async def three_turns(fields, base_url, api_key, model):
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "go"}]
    for remark in ("more", "and?", None):
        answer = await client.chat.completions.create(model=model, messages=messages)
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        if remark:
            messages.append({"role": "user", "content": remark})
    return {"said": float(len(messages)), "known": 1.0 if fields["answer"] == "x" else 0.0}


def test_a_conversation_is_one_sequence_of_exactly_the_sampled_ids(lab):
    [sample] = lab.run(three_turns)
    encode = lab.tokenizer.encode
    first = encode(
        f"<|im_start|>system\nbe brief{END}\n<|im_start|>user\ngo{END}\n<|im_start|>assistant\n",
        add_special_tokens=False,
    )
    wanted, mask = list(first), [False] * len(first)
    for turn, remark in zip(lab.turns, ("more", "and?", None), strict=True):
        said = [*lab.ids(turn), lab.end]  # "ab" and "an" apart, as no encoding would have them
        wanted, mask = wanted + said, mask + [True] * len(said)
        if remark:
            between = encode(
                f"\n<|im_start|>user\n{remark}{END}\n<|im_start|>assistant\n",
                add_special_tokens=False,
            )
            wanted, mask = wanted + between, mask + [False] * len(between)
    np.testing.assert_array_equal(sample.ids, wanted)
    np.testing.assert_array_equal(sample.mask, mask)
    assert (sample.versions[sample.mask] == 3).all() and (sample.rollout_logprobs[mask] < 0).all()
    assert sample.text == "abc\nban\nz" and sample.finish == "stop"
    assert sample.turns == (
        *(("assistant", "abc"), ("user", "more")),
        *(("assistant", "ban"), ("user", "and?"), ("assistant", "z")),
    )
    assert sample.reward == 8.0 and sample.reward_parts == {"said": 7.0, "known": 1.0}
    assert {r.params.temperature for r in lab.sampler.requests} == {0.9}
    assert len({r.seeds for r in lab.sampler.requests}) == 3


def test_a_plain_program_runs_in_a_thread(lab):
    def program(prompt, base_url, api_key, model):
        assert threading.current_thread() is not threading.main_thread()
        client = openai.OpenAI(base_url=base_url, api_key=api_key)
        answer = client.completions.create(model=model, prompt=prompt, max_tokens=2, temperature=0)
        assert answer.choices[0].finish_reason == "length"
        return answer.choices[0].text == "ab"

    [sample] = lab.run(program)
    given = lab.tokenizer.encode("what?", add_special_tokens=False)
    np.testing.assert_array_equal(sample.ids, [*given, *lab.ids("ab")])
    assert sample.reward == 1.0 and sample.finish == "length"
    assert sample.turns == (), "one answer is in the text"


def test_a_rewritten_history_begins_a_sequence_of_its_own(lab):
    async def forgetful(base_url, api_key, model):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        for text in ("one", "two"):
            messages = [{"role": "user", "content": text}]
            await client.chat.completions.create(model=model, messages=messages)
        return 1.0

    samples = lab.run(forgetful, num_samples=2)
    assert len(samples) == 4 and all(s.reward == 1.0 for s in samples)
    for pair in (samples[:2], samples[2:]):  # an episode's; which turns depends on who came first
        said = pair[0].text.split("\n")
        assert pair[1].text == pair[0].text and set(said) <= set(lab.turns)
        assert [int(s.mask.sum()) for s in pair] == [len(turn) + 1 for turn in said]


def test_streams_are_recorded_like_whole_answers(lab):
    async def streaming(base_url, api_key, model):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        stream = await client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "go"}], stream=True, logprobs=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        text, logprobs, usage = "", [], None
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                logprobs += [t.logprob for t in choice.logprobs.content] if choice.logprobs else []
        assert text == "abc" and len(logprobs) == usage.completion_tokens == 4
        return {"logprob": sum(logprobs)}

    [sample] = lab.run(streaming)
    assert sample.text == "abc" and sample.mask.sum() == 4
    assert sample.reward == pytest.approx(float(sample.rollout_logprobs.sum()))


def test_several_choices_are_several_sequences(lab):
    async def choosing(base_url, api_key, model):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        messages = [{"role": "user", "content": "go"}]
        answer = await client.chat.completions.create(model=model, messages=messages, n=3)
        return float(len(answer.choices))

    samples = lab.run(choosing)
    assert len(samples) == 3 and all(s.reward == 3.0 for s in samples)


def test_addresses_are_private_and_end_with_their_episode(lab):
    kept = {}

    async def nosy(base_url, api_key, model):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        messages = [{"role": "user", "content": "go"}]
        await client.chat.completions.create(model=model, messages=messages)
        with pytest.raises(openai.AuthenticationError, match="not the api_key of this episode"):
            await client.with_options(api_key="wrong").models.list()
        other = client.with_options(base_url=base_url.replace("/episodes/", "/episodes/0"))
        with pytest.raises(openai.NotFoundError, match="has ended or does not exist"):
            await other.models.list()
        with pytest.raises(openai.BadRequestError, match="does not show tools"):
            await client.chat.completions.create(
                model=model,
                messages=messages,
                tools=[{"type": "function", "function": {"name": "f"}}],
            )
        for bad in ([{"role": "user", "content": 3}], [*messages, {"role": "assistant"}], [{}]):
            with pytest.raises(openai.BadRequestError, match="messages"):
                await client.chat.completions.create(model=model, messages=bad)
        assert [m.id async for m in client.models.list()] == [model]
        kept.update(base_url=base_url, api_key=api_key)
        return 1.0

    lab.run(nosy)
    client = openai.OpenAI(**kept, max_retries=0)
    with pytest.raises(openai.APIConnectionError):
        client.models.list()


def test_a_program_that_raises_is_tried_again_with_other_seeds_then_dropped(lab):
    async def broken(base_url, api_key, model):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        await client.completions.create(model=model, prompt="a")
        raise KeyError("its own fault")

    with pytest.raises(DataFailure, match="workflow_error: KeyError: 'its own fault'"):
        lab.run(broken, max_retries=2)
    assert len({r.seeds for r in lab.sampler.requests}) == 3


@pytest.mark.parametrize("is_plain", [False, True], ids=["coroutine", "thread"])
def test_an_answer_that_a_program_fails_on_does_not_drop_its_group(lab, is_plain):
    """The policy says one of four letters by its seed; the program cannot read one of them."""
    lab.sampler.script = lambda request, i: [*lab.ids("wxyz"[request.seeds[i] % 4]), lab.end]
    asked = []

    def judge(text):
        asked.append(text)
        return {"known": {"w": 1.0, "x": 2.0, "y": 6.0}[text]}

    async def program(base_url, api_key, model):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        answer = await client.completions.create(model=model, prompt="a")
        return judge(answer.choices[0].text)

    def plain(base_url, api_key, model):
        client = openai.OpenAI(base_url=base_url, api_key=api_key)
        return judge(client.completions.create(model=model, prompt="a").choices[0].text)

    samples = lab.run(plain if is_plain else program, num_samples=8)
    by_text = {sample.text: sample for sample in samples}
    assert len(samples) == 8 and {"z"} < set(by_text)
    passed = [sample.reward for sample in samples if sample.text != "z"]
    failed = [sample for sample in samples if sample.text == "z"]
    assert len(asked) == 8 + len(failed)
    for sample in failed:
        assert sample.reward == pytest.approx(sum(passed) / len(passed))
        assert sample.reward_parts == {"reward_failed": 1.0, "reward_failed/workflow_error": 1.0}


@pytest.mark.parametrize("end", [sys.exit, lambda: asyncio.current_task().cancel()])
def test_a_coroutine_that_ends_itself_ends_nothing_else(lab, end):
    async def program(base_url):
        end()
        await asyncio.sleep(5)

    with pytest.raises(DataFailure, match="workflow_error: "):
        lab.run(program)


def test_a_coroutine_that_swallows_its_cancellation_is_left_behind(lab, monkeypatch):
    monkeypatch.setattr("pentad.rollout.agents.CLOSE_TIMEOUT_S", 0.2)
    release = []

    async def stubborn(base_url):
        while not release:
            with contextlib.suppress(BaseException):
                await asyncio.sleep(0.05)

    async def main():
        with pytest.raises(DataFailure, match="deadline"):
            await lab.executor(stubborn, deadline_s=0.2).rollout(Prompt(5, (1, 2), {}, "what?"), 0)
        release.append(True)

    asyncio.run(main())  # ends


@pytest.mark.parametrize(
    "fields",
    [
        {"extra_body": {"ignore_eos": True}},
        {"logprobs": True, "top_logprobs": 2},
        {"max_tokens": 2, "max_completion_tokens": 3},
    ],
)
def test_what_would_be_answered_otherwise_is_refused(lab, fields):
    async def program(base_url, api_key, model):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        messages = [{"role": "user", "content": "go"}]
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model=model, messages=messages, **fields)
        await client.chat.completions.create(model=model, messages=messages)
        return np.float32(1)

    [sample] = lab.run(program)
    assert sample.reward == 1.0 and sample.text == "abc"


def test_a_program_that_asks_nothing_is_dropped(lab):
    with pytest.raises(DataFailure, match="no_turns"):
        lab.run(lambda: 1.0)


def test_a_failing_replica_is_left_for_another(lab, scripted):
    """The program is started anew there; that its client swallowed the error does not matter."""
    bad = scripted(lab.say)
    bad.error = ConnectionError("gone")
    swallowed = []

    async def stubborn(base_url, api_key, model):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        try:
            await client.completions.create(model=model, prompt="a")
        except openai.InternalServerError as error:
            swallowed.append(error)
        return 1.0

    for _ in range(2):  # whichever of the two is asked first
        samples = lab.run(stubborn, samplers={"a": bad, "b": lab.sampler})
        assert len(samples) == 1
    lab.sampler.error = ConnectionError("gone too")
    bad.is_healthy = lab.sampler.is_healthy = False
    with pytest.raises(InfraFailure, match="no replica can serve"):
        lab.run(stubborn, samplers={"a": bad, "b": lab.sampler}, replica_patience_s=0.2)


def test_the_deadline_ends_the_program_and_its_requests(lab):
    lab.sampler.delay_s = 600.0
    ended = []

    async def slow(base_url, api_key, model):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        try:
            await client.completions.create(model=model, prompt="a")
        finally:
            ended.append(True)

    with pytest.raises(InfraFailure, match="waiting for tokens"):
        lab.run(slow, deadline_s=3.0, max_infra_retries=0)
    assert ended == [True] and not lab.sampler.num_finished
    assert len(lab.sampler.aborted) == 1


def test_a_thread_that_hangs_does_not_hold_the_run(lab):
    release, outlasted = threading.Event(), []

    def hanging(base_url, api_key, model):
        openai.OpenAI(base_url=base_url, api_key=api_key).completions.create(
            model=model, prompt="a"
        )
        release.wait(600)
        outlasted.append(True)

    with pytest.raises(DataFailure, match="deadline"):
        lab.run(hanging, deadline_s=3.0)
    assert not outlasted
    release.set()


def test_an_answer_that_a_program_hangs_at_does_not_drop_its_group(lab):
    lab.sampler.script = lambda request, i: [*lab.ids("wxyz"[request.seeds[i] % 4]), lab.end]

    async def program(base_url, api_key, model):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        answer = await client.completions.create(model=model, prompt="a")
        if answer.choices[0].text == "z":
            await asyncio.sleep(600)
        return 1.0

    samples = lab.run(program, num_samples=8, deadline_s=10.0)
    late = {"reward_failed": 1.0, "reward_failed/deadline": 1.0}
    by_text = {sample.text: (sample.reward, sample.reward_parts) for sample in samples}
    assert len(samples) == 8 and by_text.pop("z") == (0.0, late)
    assert by_text and all(told == (1.0, {"agent": 1.0}) for told in by_text.values())
    assert all(sample.given_text for sample in samples)


@pytest.mark.parametrize("reward", ["much", {"a": None}])
def test_a_reward_that_is_no_number_stops_the_run(lab, reward):
    async def judged(base_url, api_key, model):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        await client.completions.create(model=model, prompt="a")
        return reward

    with pytest.raises(UserError, match="is not a number"):
        lab.run(judged)


def test_an_agent_that_wants_what_there_is_not_is_refused():
    with pytest.raises(UserError, match="wants temperature"):
        AgentWorkflow(lambda base_url, temperature: None)


TOOLS = (
    "{% for t in tools or [] %}<|im_start|>system\ntool {{ t.function.name }}<|im_end|>\n"
    "{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_with_tools_is_one_sequence(lab, stream):
    lab.tokenizer = copy.deepcopy(lab.tokenizer)
    lab.tokenizer.chat_template = TOOLS
    call = '<tool_call>{"name": "f"}</tool_call>'
    lab.turns = [call, "two"]

    async def calling(base_url, api_key, model):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        messages = [{"role": "user", "content": "go"}]
        asked = {"model": model, "tools": [{"type": "function", "function": {"name": "f"}}]}
        if stream:
            events = await client.chat.completions.create(**asked, messages=messages, stream=True)
            deltas = [chunk.choices[0].delta async for chunk in events]
            [found] = [one for delta in deltas for one in delta.tool_calls or []]
            assert "".join(delta.content or "" for delta in deltas) == ""
            answer = {"role": "assistant", "content": "", "tool_calls": [found.model_dump()]}
            del answer["tool_calls"][0]["index"]
        else:
            choice = (await client.chat.completions.create(**asked, messages=messages)).choices[0]
            assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
            [found] = choice.message.tool_calls
            answer = choice.message.model_dump()
        assert (found.function.name, found.function.arguments) == ("f", "{}")
        result = {"role": "tool", "content": "2", "tool_call_id": found.id}
        messages += [answer, result]
        last = await client.chat.completions.create(**asked, messages=messages)
        return float(last.choices[0].message.content == "two")

    [sample] = lab.run(calling)
    assert sample.reward == 1.0
    assert lab.tokenizer.decode(sample.ids, skip_special_tokens=False) == (
        f"<|im_start|>system\ntool f{END}\n<|im_start|>user\ngo{END}\n<|im_start|>assistant\n"
        f"{call}{END}\n<|im_start|>tool\n2{END}\n<|im_start|>assistant\ntwo{END}"
    )
    np.testing.assert_array_equal(
        sample.ids[sample.mask], [*lab.ids(call), lab.end, *lab.ids("two"), lab.end]
    )
    assert sample.text == f"{call}\ntwo"


def test_a_large_request_does_not_hold_the_loop_of_the_run(lab):
    """The text is read in a thread: the loop goes on, and other programs are answered."""
    gaps = []

    async def beat():
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.01)
            gaps.append(time.monotonic() - before)

    async def large(base_url, api_key, model):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        turn = [{"role": "user", "content": "ab " * 300}, {"role": "assistant", "content": "c"}]
        messages = [*turn * 500, {"role": "user", "content": "go"}]
        beating = asyncio.create_task(beat())
        started = time.monotonic()
        with pytest.raises(openai.BadRequestError, match="leaves no room"):
            await client.chat.completions.create(model=model, messages=messages)
        took = time.monotonic() - started
        beating.cancel()
        with pytest.raises(openai.BadRequestError, match="more than 1000000 characters"):
            await client.completions.create(model=model, prompt="a" * 1_000_000)
        await client.completions.create(model=model, prompt="a")
        return {"held": float(max(gaps) > 0.5 * took)}

    [sample] = lab.run(large, max_total_tokens=64)
    assert sample.reward == 0.0, (max(gaps), len(gaps))


def test_a_conversation_that_is_full_is_told_so(lab):
    async def long(base_url, api_key, model):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        await client.completions.create(model=model, prompt="a")
        with pytest.raises(openai.BadRequestError, match="leaves no room") as refused:
            await client.completions.create(model=model, prompt="b" * 64)
        return {"refused": float(refused.value.code == "context_length_exceeded")}

    [sample] = lab.run(long, max_total_tokens=64)
    assert sample.reward == 1.0
