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

from pentad.infer.draw_kernel import draw_fused  # noqa: E402
from pentad.infer.graphs import batch_sizes  # noqa: E402
from pentad.infer.sampler import EmbeddedSampler  # noqa: E402
from pentad.infer.sampling import draw, uniforms  # noqa: E402
from pentad.models.hf_weights import iter_hf  # noqa: E402
from pentad.models.registry import create_model  # noqa: E402


@pytest.mark.parametrize("vocab_size", [50, 2048, 5000])
def test_the_fused_draw_is_the_plain_one(vocab_size):
    num = 64
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


def test_the_engine_with_kernels_is_the_engine_without(make_request, windowed_dims):
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
