"""Workflows: the arrays of a sample are exactly what was sampled and what was given."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pentad.core.errors import DataFailure, UserError
from pentad.core.seeds import derive_seed
from pentad.core.types import Generation, Prompt, SamplingParams
from pentad.rollout.environments import Step, ToolEnvironment, observation_ids
from pentad.rollout.executor import load_workflow
from pentad.rollout.workflows import Context, MultiTurn, SingleTurn, Transcript, answered


def context_for(tokenizer, num_samples=1, **changes) -> Context:
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    params = SamplingParams(max_new_tokens=16, stop_ids=(stop,))
    return Context(
        tokenizer=tokenizer, params=params, num_samples=num_samples, run_seed=11, **changes
    )


def ids_of(tokenizer, text: str) -> list[int]:
    """One id per character: never merged, as a sampler may well produce them."""
    special = "<|im_end|>"
    body = text.removesuffix(special)
    tail = [special] if text.endswith(special) else []
    return [tokenizer.convert_tokens_to_ids(piece) for piece in [*body, *tail]]


class Counting:
    """Answers each turn with a fixed text; done after `num_turns`."""

    def __init__(self, observations, log=None) -> None:
        self.observations = list(observations)
        self.heard: list[str] = []
        self.log = log if log is not None else []

    async def reset(self, fields: Any) -> None:
        self.log.append(("reset", dict(fields)))

    async def step(self, text: str) -> Step:
        self.heard.append(text)
        self.log.append(("step", text))
        if not self.observations:
            return Step(None, is_done=True, reward_parts={"end": 1.0})
        return Step(self.observations.pop(0), is_done=False, reward_parts={"turn": 0.25})

    async def close(self) -> None:
        self.log.append(("close",))


def test_answers_made_into_samples_together_are_those_of_transcripts():
    generations = [
        Generation([7, 2], [-0.1, -0.7], [3, 4], "stop"),
        Generation([9], [-0.25], [4], "length"),
    ]
    for generation, sample in zip(
        generations, answered([5, 6, 1], generations, ["a", "b"]), strict=True
    ):
        transcript = Transcript([5, 6, 1])
        transcript.add_sampled(generation)
        alone = transcript.finished(generation.finish, "")
        for name in ("ids", "mask", "rollout_logprobs", "versions"):
            mine, its = getattr(sample, name), getattr(alone, name)
            assert mine.dtype == its.dtype and mine.tolist() == its.tolist(), name
    assert [s.text for s in answered([5], generations, ["a", "b"])] == ["a", "b"]
    other = replace(generations[0], logprobs=[-0.5, -0.5])  # as whoever wraps a sampler may do
    assert answered([5], [other], ["a"])[0].rollout_logprobs.tolist() == [0, -0.5, -0.5]


def test_single_turn_builds_the_arrays_of_the_contract(scripted, plain_tokenizer):
    end = plain_tokenizer.convert_tokens_to_ids("<|im_end|>")
    answers = {
        0: ids_of(plain_tokenizer, "ab") + [end],
        1: ids_of(plain_tokenizer, "abcabcabc") * 2,
    }
    sampler = scripted(lambda request, i: answers[i])
    context = context_for(plain_tokenizer, num_samples=2)
    prompt = Prompt(7, (5, 9), {})
    first, second = asyncio.run(SingleTurn().run(prompt, sampler, context))

    a, b = answers[0][:2]
    np.testing.assert_array_equal(first.ids, [5, 9, a, b, end])
    np.testing.assert_array_equal(first.mask, [False, False, True, True, True])
    expected = [-0.125 * (1 + (token + t) % 7) for t, token in enumerate(answers[0])]
    np.testing.assert_array_equal(first.rollout_logprobs, np.float32([0, 0, *expected]))
    np.testing.assert_array_equal(first.versions, [-1, -1, 3, 3, 3])
    assert (first.finish, first.text, first.reward) == ("stop", "ab", None)
    assert (second.finish, second.text, second.num_sampled) == ("length", "abcabcabcabcabca", 16)
    assert first.ids.dtype == np.int64 and first.rollout_logprobs.dtype == np.float32


def test_one_request_carries_the_seeds_of_the_group(scripted, plain_tokenizer):
    sampler = scripted(lambda request, i: [1])
    context = context_for(plain_tokenizer, num_samples=3, attempt=2)
    asyncio.run(SingleTurn().run(Prompt(7, (5,), {}), sampler, context))
    [request] = sampler.requests
    assert request.seeds == tuple(derive_seed(11, "sample", 7, 2, i) for i in range(3))
    assert request.prompt_ids == (5,)


def test_a_prompt_without_room_for_an_answer_is_final(scripted, plain_tokenizer):
    sampler = scripted(lambda request, i: [1])
    context = context_for(plain_tokenizer, max_total_tokens=4)
    with pytest.raises(DataFailure, match="prompt 0 has 4 tokens, a sample may have 4") as caught:
        asyncio.run(SingleTurn().run(Prompt(0, (1, 2, 3, 4), {}), sampler, context))
    assert caught.value.is_final and caught.value.reason == "too_long" and not sampler.requests
    asyncio.run(SingleTurn().run(Prompt(0, (1, 2, 3), {}), sampler, context))
    assert sampler.requests[0].params.max_new_tokens == 1


def test_what_is_trained_is_what_was_sampled_where_encoding_again_would_differ(
    scripted, chat_tokenizer
):
    first = ids_of(chat_tokenizer, "cab<|im_end|>")
    second = ids_of(chat_tokenizer, "ban<|im_end|>")
    assert chat_tokenizer.encode("cab", add_special_tokens=False) != first[:-1]
    turns = [first, second]
    sampler = scripted(lambda request, i: turns[len(sampler.requests) - 1])
    log: list[Any] = []
    workflow = MultiTurn(lambda: Counting(["ab"], log))
    prompt_ids = chat_tokenizer.encode(
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False
    )
    context = context_for(chat_tokenizer)
    prompt = Prompt(1, tuple(prompt_ids), {"answer": "x"})
    [sample] = asyncio.run(workflow.run(prompt, sampler, context))

    given_text = "\n<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n"
    given = chat_tokenizer.encode(given_text, add_special_tokens=False)
    np.testing.assert_array_equal(sample.ids, [*prompt_ids, *first, *given, *second])
    sampled = [False] * len(prompt_ids) + [True] * 4 + [False] * len(given) + [True] * 4
    np.testing.assert_array_equal(sample.mask, sampled)
    assert not sample.rollout_logprobs[~sample.mask].any() and sample.rollout_logprobs[-1] < 0
    assert set(sample.versions[sample.mask]) == {3} and set(sample.versions[~sample.mask]) == {-1}
    assert sampler.requests[1].prompt_ids == (*prompt_ids, *first, *given)
    assert sampler.requests[0].seeds == sampler.requests[1].seeds
    assert (sample.text, sample.finish) == ("cab\nban", "stop")
    assert sample.reward == 1.25 and sample.reward_parts == {"turn": 0.25, "end": 1.0}
    assert log == [("reset", {"answer": "x"}), ("step", "cab"), ("step", "ban"), ("close",)]


words = st.text("abn cde", min_size=1, max_size=6)


@given(st.lists(st.tuples(words, words), min_size=1, max_size=4), st.sampled_from(["user", "tool"]))
@settings(max_examples=40, deadline=None)
def test_turn_by_turn_suffixes_read_like_the_whole_conversation(
    scripted, chat_tokenizer, turns, role
):
    """The text of all turns equals what the template renders from the messages in one go."""
    answers = [ids_of(chat_tokenizer, answer + "<|im_end|>") for answer, _ in turns]
    answers.append(ids_of(chat_tokenizer, "end<|im_end|>"))
    sampler = scripted(lambda request, i: answers[len(sampler.requests) - 1])
    workflow = MultiTurn(lambda: Counting([obs for _, obs in turns]), role=role)
    messages = [{"role": "user", "content": "q"}]
    render = chat_tokenizer.apply_chat_template
    start = render(messages, tokenize=False, add_generation_prompt=True)
    prompt = Prompt(1, tuple(chat_tokenizer.encode(start, add_special_tokens=False)), {})
    [sample] = asyncio.run(workflow.run(prompt, sampler, context_for(chat_tokenizer)))
    for answer, observation in turns:
        messages.append({"role": "assistant", "content": answer})
        messages.append({"role": role, "content": observation})
    messages.append({"role": "assistant", "content": "end"})
    whole = render(messages, tokenize=False)
    got = chat_tokenizer.decode(sample.ids, skip_special_tokens=False)
    assert got + "\n" == whole
    assert sample.ids[sample.mask].tolist() == [token for answer in answers for token in answer]


def test_an_answer_that_did_not_end_itself_gets_the_templates_turn_end(chat_tokenizer):
    end = chat_tokenizer.convert_tokens_to_ids("<|im_end|>")
    with_end = observation_ids(["x"], "user", None, chat_tokenizer)
    without = observation_ids(["x"], "user", end, chat_tokenizer)
    assert with_end == [end, *without]


def test_no_observation_only_opens_the_next_turn(chat_tokenizer):
    ids = observation_ids([], "user", None, chat_tokenizer)
    assert chat_tokenizer.decode(ids) == "<|im_end|>\n<|im_start|>assistant\n"


def test_without_a_template_the_observation_is_taken_as_it_is(plain_tokenizer):
    assert observation_ids(["ab"], "user", 1, plain_tokenizer) == plain_tokenizer.encode(
        "ab", add_special_tokens=False
    )


def test_a_template_that_hides_answers_is_refused(chat_tokenizer, plain_tokenizer):
    class Hiding:
        chat_template = "x"

        def apply_chat_template(self, conversation, **kwargs) -> str:
            return "nothing"

    with pytest.raises(UserError, match="does not show the text of an assistant's turn"):
        observation_ids(["x"], "user", None, Hiding())


@pytest.mark.parametrize(
    ("answer", "max_turns", "max_total", "num_requests"),
    [
        ("abcdefghijklmnopqrstuvwxyz", 9, None, 1),  # a turn cut off is the last one
        ("ab<|im_end|>", 2, None, 2),
        ("ab<|im_end|>", 9, 40, 2),  # a second observation does not fit
    ],
)
def test_limits_end_a_conversation_with_finish_length(
    scripted, chat_tokenizer, answer, max_turns, max_total, num_requests
):
    sampler = scripted(lambda request, i: ids_of(chat_tokenizer, answer))
    workflow = MultiTurn(lambda: Counting(["x"] * 20), max_turns=max_turns)
    context = context_for(chat_tokenizer, max_total_tokens=max_total)
    [sample] = asyncio.run(workflow.run(Prompt(1, (1, 2), {}), sampler, context))
    assert sample.finish == "length" and sample.mask[-1]
    assert len(sampler.requests) == num_requests
    if max_total:
        assert len(sample.ids) <= max_total


def test_tools_are_called_and_their_failures_told(plain_tokenizer):
    async def add(a: int, b: int) -> str:
        return str(a + b)

    environment = ToolEnvironment({"add": add})

    def step(text: str) -> Step:
        return asyncio.run(environment.step(text))

    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
    assert step(call) == Step("5", is_done=False)
    assert step(call + call).observation == "5\n5"
    assert step("the result is 5") == Step(None, is_done=True)
    assert "give a name of ['add']" in step("<tool_call>{nonsense</tool_call>").observation
    assert "give a name of ['add']" in step('<tool_call>{"name": "sub"}</tool_call>').observation
    wrong = '<tool_call>{"name": "add", "arguments": {"c": 2}}</tool_call>'
    assert step(wrong).observation.startswith("error: TypeError")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (["echo"], "x", "error: give a name"),
        ({}, "x", "error: give a name"),
        (None, "x", "error: give a name"),
        ("echo", 5, "5"),
        ("echo", None, "None"),
        ("echo", float("inf"), "inf"),
        ("echo", "a\ud800b", "a?b"),
        ("raises", "a\ud800b", "error: LookupError: a?b"),
    ],
)
def test_any_call_is_answered_by_text_that_can_be_encoded(plain_tokenizer, name, text, said):
    async def echo(text):
        return text

    async def raises(text):
        raise LookupError(text)

    environment = ToolEnvironment({"echo": echo, "raises": raises})
    call = json.dumps({"name": name, "arguments": {"text": text}})
    step = asyncio.run(environment.step(f"<tool_call>{call}</tool_call>"))
    assert step.observation.startswith(said) and not step.is_done
    plain_tokenizer.encode(step.observation)


def test_a_workflow_of_ones_own_is_loaded_by_path(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "class Mine:\n    async def run(self, prompt, sampler, context): return []\n"
        "class Not:\n    def run(self): return []\n"
        "def broken(): raise ValueError('no tools')\n"
    )
    assert type(load_workflow(f"{file}:Mine")).__name__ == "Mine"
    assert isinstance(load_workflow("single_turn"), SingleTurn)
    for spec, message in [
        ("multi_trun", "no built-in workflow"),
        (f"{file}:Missing", "has no attribute 'Missing'"),
        (f"{file}:Not", "Not has no coroutine `run`"),
        (f"{file}:broken", "ValueError: no tools"),
        ("no.such.module:X", "No module named 'no'"),
        (f"{tmp_path}/absent.py:X", "no Python file"),
    ]:
        with pytest.raises(UserError, match=message):
            load_workflow(spec)
