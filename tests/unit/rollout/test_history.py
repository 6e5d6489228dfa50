"""Earlier turns as the chat template writes them: new sequences where it rewrites them, and no
trained id that was not sampled."""

import asyncio

import numpy as np
import pytest
from conftest import make_tokenizer
from sections import make_executor

from pentad.core.errors import UserError
from pentad.core.types import Prompt, SamplingParams
from pentad.rollout.environments import Step
from pentad.rollout.workflows import MultiTurn

THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and messages[-1].role == 'user' %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Leaves the thinking of earlier answers out when a user speaks, and keeps it after a tool."""
QUESTION = [{"role": "user", "content": "go"}]
ANSWERS = ("<think>ab</think>an<|im_end|>", "<think>x</think>b<|im_end|>", "c<|im_end|>")


class Talking:
    """Says `more` twice, then ends with a reward."""

    def __init__(self):
        self.turns = 0

    async def reset(self, fields):
        pass

    async def step(self, text):
        self.turns += 1
        return Step("more", is_done=self.turns == 3, reward_parts={"turn": 0.5})

    async def close(self):
        pass


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer(THINKING, [("a", "b"), ("a", "n")])


def drawn(tokenizer, text):
    """One id a character, which no tokenizer would give for "ab"."""
    body = [*text.removesuffix("<|im_end|>"), "<|im_end|>"]
    return [tokenizer.convert_tokens_to_ids(piece) for piece in body]


def converse(tokenizer, scripted, role="user", text=None, **more):
    """The samples of one episode, and what was asked."""
    asked = {}

    def script(request, i):
        number = asked.setdefault(request.prompt_ids, len(asked))
        return drawn(tokenizer, ANSWERS[number])

    text = text or tokenizer.apply_chat_template(
        QUESTION, tokenize=False, add_generation_prompt=True
    )
    ids = tuple(tokenizer.encode(text, add_special_tokens=False))
    sampler = scripted(script)
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    executor = make_executor(
        {"one": sampler},
        MultiTurn(Talking, role=role),
        None,
        tokenizer,
        params=SamplingParams(max_new_tokens=64, stop_ids=(stop,)),
        num_samples=1,
        run_seed=3,
        vocab_size=len(tokenizer),
        **{"history": "template", **more},
    )
    prompt = Prompt(5, ids, {}, text, messages=tuple(QUESTION))
    return asyncio.run(executor.rollout(prompt, 0)).samples, sampler.requests


def words(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=False)


def test_a_turn_whose_history_is_rewritten_is_a_sequence_of_its_own(tokenizer, scripted):
    samples, requests = converse(tokenizer, scripted)
    assert len(samples) == 3
    for sample, request, answer in zip(samples, requests, ANSWERS, strict=True):
        assert sample.ids[sample.mask].tolist() == drawn(tokenizer, answer)
        assert tuple(sample.ids[: sample.mask.argmax()]) == request.prompt_ids
    messages = [*QUESTION]
    for request, answer in zip(requests, ANSWERS, strict=True):
        shown = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert words(tokenizer, request.prompt_ids) == shown, "what a server would be asked"
        messages.append({"role": "assistant", "content": answer.removesuffix("<|im_end|>")})
        messages.append({"role": "user", "content": "more"})
    assert "<think>" not in words(tokenizer, requests[2].prompt_ids)
    assert {sample.reward for sample in samples} == {1.5}
    assert {sample.text for sample in samples} == {"<think>ab</think>an\n<think>x</think>b\nc"}
    assert len({request.seeds for request in requests}) == 3


@pytest.mark.parametrize("how", [{"role": "tool"}, {"history": "sampled"}])
def test_turns_that_are_written_as_they_were_sampled_stay_one_sequence(tokenizer, scripted, how):
    [sample], requests = converse(tokenizer, scripted, **how)
    trained = sample.ids[sample.mask].tolist()
    assert trained == [token for answer in ANSWERS for token in drawn(tokenizer, answer)]
    for request in requests[1:]:
        begun = np.array(request.prompt_ids)
        assert (sample.ids[: len(begun)] == begun).all()
    assert len(sample.turns) == 5


def test_tokens_of_all_sequences_count_against_the_limit_of_a_sample(tokenizer, scripted):
    samples, requests = converse(tokenizer, scripted, max_sampled_tokens=30)
    assert sum(sample.num_sampled for sample in samples) == 30
    assert samples[-1].finish == "length" and len(requests) == 2


def test_a_prompt_that_another_template_wrote_is_refused(tokenizer, scripted):
    with pytest.raises(UserError, match="the prompt is not what the chat template writes"):
        converse(tokenizer, scripted, text="go")
