"""The embedded sampler over transformers' own modules: log-probs are those of one forward pass of
transformers over the whole sequence, whatever the engine did."""

import asyncio
from dataclasses import dataclass

import pytest
import torch
from sections import sampler_settings
from torch import nn
from transformers.utils import logging

from pentad.core.errors import RunError, UserError
from pentad.core.types import Request, SamplingParams
from pentad.infer.sampler import EmbeddedSampler
from pentad.models.hf_weights import iter_hf
from pentad.models.registry import build_unfiled, load_to_sample
from pentad_tools.models.types_table import CLOSE, own_logprobs, write_tiny

logging.disable_progress_bar()
FAMILIES = ["cohere", "cohere2", "gemma4_unified_text", "phimoe"]
"""Windows, heads that differ by layer, scaled logits, experts."""
CASES = {
    "plain": {},
    "chunked": {"max_running": 2, "max_batch_tokens": 3},
    "preempted": {"kv_cache_tokens": 48},
}


@dataclass(frozen=True)
class Written:
    folder: str
    theirs: nn.Module


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    made = {}

    def write(family):
        if family not in made:
            folder = str(tmp_path_factory.mktemp(family))
            made[family] = Written(folder, write_tiny(family, folder))
        return made[family]

    return write


@pytest.fixture
def keep():
    """Samplers that are closed after the test."""
    made = []

    def add(sampler):
        made.append(sampler)
        return sampler

    yield add
    for sampler in made:
        asyncio.run(sampler.close())


@pytest.fixture
def sampler_of(keep):
    def make(folder, dtype=torch.float32, **keys):
        given = {"max_running": 64, "kv_cache_tokens": 8192, "block_size": 4} | keys
        settings = sampler_settings(**given)
        return keep(EmbeddedSampler.from_folder(folder, settings, dtype=dtype))

    return make


REQUESTS = [
    Request(
        id=f"{i}",
        prompt_ids=tuple(3 + 7 * j % 90 for j in range(1 + 5 * i)),  # they begin alike
        params=SamplingParams(max_new_tokens=9),
        seeds=(i, i + 100),
    )
    for i in range(5)
]


def draw(sampler):
    async def main():
        return await asyncio.gather(*(sampler.generate(request) for request in REQUESTS))

    return asyncio.run(main())


def gap(results, theirs):
    """The largest difference of a log-prob."""
    found = 0.0
    for request, made in zip(REQUESTS, results, strict=True):
        for one in made:
            ids = torch.tensor([*request.prompt_ids, *one.ids])
            expected = own_logprobs(theirs, ids)[-len(one.ids) :]
            found = max(found, float((torch.tensor(one.logprobs) - expected).abs().max()))
    return found


@pytest.mark.parametrize(
    ("family", "case"),
    [
        *((family, case) for family in FAMILIES for case in CASES),
        ("gemma3n_text", "chunked"),  # layers that share keys and values
    ],
)
def test_logprobs_are_those_of_one_forward_pass(sampler_of, written, family, case):
    sampler = sampler_of(written(family).folder, **CASES[case])
    assert gap(draw(sampler), written(family).theirs) < CLOSE
    stats = sampler.stats()
    assert stats["prefill_tokens_reused"] > 0
    assert stats["preemptions"] >= (case == "preempted")


@pytest.mark.parametrize("part", ["layers.1.self_attn.v_proj.weight", "norm.weight"])
def test_a_small_defect_of_the_weights_shows(sampler_of, written, part):
    sampler = sampler_of(written("cohere").folder)
    model = sampler.engine.model
    with torch.no_grad():
        model.get_parameter(f"model.{part}").mul_(1.003)
    assert gap(draw(sampler), written("cohere").theirs) > 5 * CLOSE


def test_a_layer_that_sees_further_than_its_window_shows(sampler_of, written):
    sampler = sampler_of(written("cohere2").folder)
    attention = sampler.engine.model.get_submodule("model.layers.0.self_attn")
    assert attention.pentad_window == 4
    attention.pentad_window = 5
    assert gap(draw(sampler), written("cohere2").theirs) > 10 * CLOSE


def test_a_model_that_waits_for_weights_takes_published_ones_and_no_others(keep, written):
    """As a run has it: blank at first, then the trainer's tensors by their names on disk."""
    folder, theirs = written("phimoe").folder, written("phimoe").theirs
    place = {"device": "cpu", "dtype": torch.float32}
    sampler = keep(EmbeddedSampler(build_unfiled(folder, **place), sampler_settings()))
    pairs = list(iter_hf(load_to_sample(folder, **place)))

    async def refused():
        with pytest.raises(UserError, match="missing"):
            await sampler.install(0, pairs[1:])
        await sampler.install(0, pairs)

    asyncio.run(refused())
    assert gap(draw(sampler), theirs) < CLOSE
    asyncio.run(sampler.sleep())
    asyncio.run(sampler.wake())
    assert gap(draw(sampler), theirs) < CLOSE
    blank = keep(EmbeddedSampler(build_unfiled(folder, **place), sampler_settings()))
    with pytest.raises(RunError, match="not finite"):
        draw(blank)


def test_a_cache_in_eight_bits_holds_heads_of_several_widths(sampler_of, written):
    sampler = sampler_of(written("gemma4_unified_text").folder, kv_cache_dtype="int8")
    assert gap(draw(sampler), written("gemma4_unified_text").theirs) < 0.1


def test_half_precision_differs_by_its_rounding_alone(sampler_of, written):
    """Also where a family computes a part of a layer in float32."""
    for family in ("gemma3n_text", "cohere"):
        sampler = sampler_of(written(family).folder, torch.bfloat16)
        assert gap(draw(sampler), written(family).theirs) < 0.15


def test_what_needs_layers_of_our_own_is_rejected(written):
    settings = sampler_settings(strict=True)
    model = build_unfiled(written("cohere").folder, device="cpu", dtype=torch.float32)
    with pytest.raises(UserError) as caught:
        EmbeddedSampler(model, settings)
    said = str(caught.value)
    assert "strict = true: needs a model file, and cohere has none" in said


def test_calls_of_attention_that_were_not_expected_end_the_run(sampler_of, written):
    """The cache knows a layer by the order of calls alone."""
    sampler = sampler_of(written("cohere").folder)
    model = sampler.engine.model
    model.body.layers = model.body.layers[:1]
    with pytest.raises(RunError, match="1 calls of attention, where 2 were"):
        draw(sampler)
