"""The GPU path of the engine against the plain one; interpreted where there is no GPU."""

import asyncio
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from closeness import ROUNDING

pytest.importorskip("triton", reason="the kernels need Triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from sections import sampler_settings  # noqa: E402

from pentad.engine.section import LoraConfig  # noqa: E402
from pentad.infer.draw_kernel import draw_fused  # noqa: E402
from pentad.infer.graphs import batch_sizes  # noqa: E402
from pentad.infer.sampler import EmbeddedSampler  # noqa: E402
from pentad.infer.sampling import draw, uniforms  # noqa: E402
from pentad.models.families import lora_map_of  # noqa: E402
from pentad.models.hf_weights import iter_hf  # noqa: E402
from pentad.models.registry import create_model  # noqa: E402
from pentad.ops import paged_decode  # noqa: E402


@pytest.mark.parametrize("vocab_size", [50, 2048, 5000])
def test_the_fused_draw_is_the_plain_one(vocab_size):
    num = 64 if DEVICE == "cuda" else 16  # Triton's interpreter takes seconds for more
    logits = torch.randn(num, vocab_size, generator=torch.Generator().manual_seed(0)) * 2
    logits[:, 3] = float("-inf")
    numbers = uniforms(np.arange(num, dtype=np.uint64), np.zeros(num, np.int64))
    numbers[:2] = 0.0, 1 - 2.0**-40
    heat = torch.linspace(0.3, 2, num)
    heat[5:12] = 0
    args = [x.to(DEVICE) for x in (logits, torch.from_numpy(numbers), heat)]
    ids, logprobs = draw_fused(*args)
    wanted_ids, wanted = draw(*args)
    # At the very end of the line the fp32 sums of the two decide; all else is equal.
    ids[1], logprobs[1] = wanted_ids[1], wanted[1] if logprobs[1].isfinite() else torch.nan
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(logprobs, wanted, atol=2e-5, rtol=0)  # logits up to 30, fp32


def test_the_fused_draw_shows_what_is_not_finite():
    logits = torch.zeros(2, 50, device=DEVICE)
    logits[1, 7] = float("nan")
    u = torch.full((2,), 0.5, dtype=torch.float64, device=DEVICE)
    _, logprobs = draw_fused(logits, u, torch.ones(2, device=DEVICE))
    assert logprobs.isfinite().tolist() == [True, False]


def test_batch_sizes_end_with_the_largest():
    assert list(batch_sizes(1)) == [1]
    assert list(batch_sizes(40)) == [1, 2, 4, 8, 16, 24, 32, 40]
    assert list(batch_sizes(256))[-4:] == [96, 128, 192, 256]


def test_the_engine_with_kernels_is_the_engine_without(make_request, windowed_dims, monkeypatch):
    monkeypatch.setattr(paged_decode, "MIN_PROGRAMS", 16)  # two splits of a full batch
    dims = replace(windowed_dims, num_heads=2, num_kv_heads=1)  # a layer with a window, one without
    # 3 + 2 rows are padded to 8; 9 tokens a step chunk the long prompt; blocks run short
    sizes = {"max_running": 8, "kv_cache_tokens": 24, "block_size": 4, "max_batch_tokens": 9}
    requests = [
        make_request("a", range(3), n=2, max_new_tokens=4),
        make_request("b", range(13), n=1, max_new_tokens=4, temperature=0.0),
        make_request("c", range(5), n=2, max_new_tokens=4, top_k=3),
    ]

    async def both(kernels):
        model = create_model(dims, seed=1, device=DEVICE)
        sampler = EmbeddedSampler(model, sampler_settings(kernels=kernels, **sizes))
        first = await asyncio.gather(*(sampler.generate(r) for r in requests))
        weights = list(iter_hf(create_model(dims, seed=2, device=DEVICE)))
        await sampler.install(1, weights)
        await sampler.sleep()
        await sampler.wake()
        second = await sampler.generate(requests[0])
        await sampler.close()
        return [*first, second], sampler.stats()

    plain, plain_stats = asyncio.run(both("torch"))
    fused, fused_stats = asyncio.run(both("triton"))
    assert plain_stats == fused_stats and plain_stats["preemptions"] > 0
    for ours, theirs in zip(fused, plain, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a.ids == b.ids and a.versions == b.versions
            # the logits of the tiny model are at most 10
            assert a.logprobs == pytest.approx(b.logprobs, abs=10 * ROUNDING)


ADAPTED = {
    "all matrices": {"targets": "all-linear"},
    "q alone": {"targets": ("q", "down")},
    "shared experts": {"targets": "all-linear", "experts": "shared_outer"},
    "experts each": {"targets": "all-linear", "experts": "each"},
    "widths that no kernel takes": {"targets": "all-linear"},
}


@pytest.mark.parametrize("case", ADAPTED)
def test_an_adapter_with_kernels_is_the_one_without(make_request, tiny_dims, case, monkeypatch):
    """One joined product for q, k and v with their factors, one for both matrices of experts."""
    monkeypatch.setattr(paged_decode, "MIN_PROGRAMS", 1)  # attention is not split
    sizes = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 16, "num_layers": 2}
    if "widths" in case:
        sizes |= {"head_dim": 12, "intermediate_size": 40}
    if "experts" in case:
        sizes |= {"family": "qwen3_moe", "num_experts": 4, "num_experts_per_token": 2}
        sizes |= {"moe_intermediate_size": 16, "moe_layers": (True, False)}
    dims = replace(tiny_dims, qk_norm=True, qkv_bias=False, **sizes)
    lora = LoraConfig(rank=3, alpha=6.0, **ADAPTED[case])
    generator = torch.Generator().manual_seed(3)
    factors = [
        (name, torch.randn(source.shape, generator=generator).to(DEVICE) * 0.3)
        for name, source in lora_map_of(dims, lora).sources.items()
    ]

    async def drawn(kernels):
        model = create_model(dims, seed=1, device=DEVICE)
        settings = sampler_settings(kernels=kernels, lora=lora, max_running=4, block_size=4)
        sampler = EmbeddedSampler(model, settings)
        receipt = await sampler.install(1, factors)
        found = await sampler.generate(make_request("a", range(5), n=2, max_new_tokens=4))
        await sampler.close()
        return found, receipt.digest

    (plain, digest), (fused, fused_digest) = (
        asyncio.run(drawn(kernels)) for kernels in ("torch", "triton")
    )
    assert digest == fused_digest
    for a, b in zip(fused, plain, strict=True):
        assert a.ids == b.ids and a.logprobs == pytest.approx(b.logprobs, abs=10 * ROUNDING)
