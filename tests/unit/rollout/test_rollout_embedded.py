"""The executor over the real embedded engine: whole conversations, exact to their last token."""

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from closeness import assert_logprobs
from sections import make_executor, sampler_settings

from pentad.core.dims import ModelDims
from pentad.core.errors import InfraFailure
from pentad.core.types import Group, Prompt, SamplingParams
from pentad.infer.sampler import EmbeddedSampler
from pentad.models.decoder import causal_attend
from pentad.models.registry import create_model
from pentad.rollout.environments import Step
from pentad.rollout.workflows import MultiTurn, SingleTurn


class Echo:
    """Says what it heard, twice, and gives one point a turn; done after three turns."""

    def __init__(self) -> None:
        self.num_turns = 0

    async def reset(self, fields: Any) -> None:
        assert fields == {"answer": "x"}

    async def step(self, text: str) -> Step:
        self.num_turns += 1
        return Step(text[:3] + "ab", is_done=self.num_turns == 3, reward_parts={"turns": 1.0})

    async def close(self) -> None:
        pass


@pytest.fixture
def dims(chat_tokenizer):
    return ModelDims(
        family="qwen3",
        vocab_size=len(chat_tokenizer),
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=48,
        qk_norm=True,
        max_position=256,
        initializer_range=0.3,
    )


@pytest.fixture
def make_sampler(dims):
    def make() -> EmbeddedSampler:
        limits = sampler_settings(max_running=32, kv_cache_tokens=8192, block_size=4)
        return EmbeddedSampler(create_model(dims, seed=1), limits, version=0)

    return make


def roll(samplers, tokenizer, workflow, gids) -> list[Group]:
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    settings = {
        "params": SamplingParams(max_new_tokens=12, stop_ids=(stop,)),
        "num_samples": 3,
        "run_seed": 5,
        "vocab_size": len(tokenizer),
        "max_total_tokens": 256,
    }

    class Zero:
        async def score(self, group: Group) -> Group:
            for sample in group.samples:
                sample.reward = 0.0 if sample.reward is None else sample.reward
            return group

    async def run() -> list[Group]:
        executor = make_executor(samplers, workflow, Zero(), tokenizer, **settings)
        prompts = [Prompt(gid, (gid, 4, 9), {"answer": "x"}) for gid in gids]
        try:
            return await asyncio.gather(*(executor.rollout(p, 0) for p in prompts))
        finally:
            for sampler in samplers.values():
                await sampler.close()

    return asyncio.run(run())


@torch.no_grad()
def forced_logits(model, ids: np.ndarray) -> torch.Tensor:
    whole = torch.from_numpy(ids)
    return model.logits(model(whole, torch.arange(len(whole)), causal_attend))[:-1]


def test_a_conversation_has_the_log_probs_of_one_forward_over_its_ids(
    make_sampler, dims, chat_tokenizer
):
    groups = roll({"a": make_sampler()}, chat_tokenizer, MultiTurn(Echo), range(4))
    model = create_model(dims, seed=1)
    num_turns = set()
    for sample in (sample for group in groups for sample in group.samples):
        sampled = sample.mask[1:]  # prefill and decode sum in different orders
        logits = forced_logits(model, sample.ids)[sampled]
        assert_logprobs(sample.rollout_logprobs[1:][sampled], logits, sample.ids[1:][sampled])
        assert not sample.rollout_logprobs[~sample.mask].any()
        num_turns.add(sample.reward)
    assert max(num_turns) > 1, "some conversation went beyond its first turn"


def test_one_replica_and_three_draw_the_same_tokens(make_sampler, chat_tokenizer):
    one = roll({"a": make_sampler()}, chat_tokenizer, SingleTurn(), range(9))
    names = ("a", "b", "c")
    three = roll({n: make_sampler() for n in names}, chat_tokenizer, SingleTurn(), range(9))
    again = roll({"a": make_sampler()}, chat_tokenizer, SingleTurn(), range(9))
    for left, right, same in zip(one, three, again, strict=True):
        for x, y, z in zip(left.samples, right.samples, same.samples, strict=True):
            assert x.ids.tolist() == y.ids.tolist() == z.ids.tolist() and x.text == y.text
            assert x.rollout_logprobs.tobytes() == z.rollout_logprobs.tobytes()
    assert len({tuple(s.ids.tolist()) for group in one for s in group.samples}) > 20


def test_a_deadline_leaves_nothing_running_in_the_engine(make_sampler, chat_tokenizer):
    sampler = make_sampler()

    async def paused() -> dict[str, float]:
        await sampler.pause()
        stop = chat_tokenizer.convert_tokens_to_ids("<|im_end|>")
        settings = {
            "params": SamplingParams(max_new_tokens=12, stop_ids=(stop,)),
            "num_samples": 3,
            "run_seed": 5,
            "vocab_size": len(chat_tokenizer),
            "deadline_s": 0.2,
            "max_infra_retries": 0,
        }
        executor = make_executor({"a": sampler}, SingleTurn(), None, chat_tokenizer, **settings)
        with pytest.raises(InfraFailure, match="waiting for tokens"):
            await executor.rollout(Prompt(1, (1, 2), {}), 0)
        assert sampler.open == {}
        stats = sampler.stats()
        await sampler.close()
        return stats

    stats = asyncio.run(paused())
    assert stats["running"] == 0 and stats["waiting"] == 0
