"""The key-value cache in 16 and in 8 bits on a GPU: the decode kernel, sampling, log-probs.

    python benchmarks/kv_cache_gpu.py                 # every part
    python benchmarks/kv_cache_gpu.py kernel tiles    # the named parts

Parts: `kernel` (paged decode of Qwen3-0.6B's heads, beside the time of a copy of the same bytes),
`tiles` (the same over tile sizes), `load` (256 requests of 128 + 256 tokens, and 1,024 ragged
answers), `gap` (log-probs of the sampler against one plain forward of the drawn tokens).
"""

from __future__ import annotations

import gc
import sys
from dataclasses import replace

import torch
from sampler_gpu import NUM_REQUESTS, build, changed, close, run
from sampler_load import NEW, PROMPT, QWEN3_06B, forced, random_model, requests
from triton.testing import do_bench_cudagraph

from pentad.core.types import SamplingParams
from pentad.infer.sampler import EmbeddedSampler
from pentad.ops import paged_decode
from pentad.ops.pages import EIGHT_BITS, Pages

FORMATS = ("auto", "int8", "fp8")
SIZES = ((256, 254), (512, 434), (256, 2048))


def pages_for(num_rows: int, context: int, form: str) -> tuple[Pages, torch.Tensor]:
    heads, width = QWEN3_06B.num_kv_heads, QWEN3_06B.head_dim
    each = -(-context // 16)
    shape = (num_rows * each + 1, 16, heads, width)
    dtype = EIGHT_BITS.get(form, torch.bfloat16)
    held = [torch.randn(shape, device="cuda").to(dtype) for _ in range(2)]
    scales = [torch.ones(shape[:-1], device="cuda") for _ in range(2)] if form != "auto" else []
    blocks = 1 + torch.randperm(num_rows * each, device="cuda", dtype=torch.int32)
    return Pages(*held, *scales), blocks


def time_us(num_rows: int, context: int, form: str) -> float:
    pages, blocks = pages_for(num_rows, context, form)
    q = torch.randn(num_rows, QWEN3_06B.num_heads, 128, device="cuda", dtype=torch.bfloat16)
    width = torch.tensor([-(-context // 16)], device="cuda")
    lengths = torch.full((num_rows,), context, device="cuda")

    def once() -> torch.Tensor:
        return paged_decode.paged_decode(q, pages, blocks, width, lengths)

    return 1000 * do_bench_cudagraph(once, rep=50)


def kernel() -> None:
    for num_rows, context in SIZES:
        for form in FORMATS:
            pages, _ = pages_for(num_rows, context, form)
            parts = [getattr(pages, name) for name in Pages.__slots__]
            size = sum(x.numel() * x.element_size() for x in parts if x is not None)
            other = torch.empty(size // 2, dtype=torch.uint8, device="cuda")
            half = torch.zeros(size // 2, dtype=torch.uint8, device="cuda")
            copy = 1000 * do_bench_cudagraph(lambda a=other, b=half: a.copy_(b), rep=50)
            found = time_us(num_rows, context, form)
            print(
                f"kernel: {num_rows} rows, context {context}, {form}: {found:.1f} us a layer; "
                f"{size / 1e6:.0f} MB take {copy:.1f} us by a copy",
                flush=True,
            )


def tiles() -> None:
    for form in FORMATS:
        for places in (32, 64, 128):
            for warps in (1, 2, 4):
                for stages in (2, 3, 4):
                    tile = {"places": places, "warps": warps, "stages": stages}
                    paged_decode.TILE = paged_decode.EIGHT_BIT_TILE = tile
                    try:
                        found = [time_us(*size, form) for size in SIZES]
                    except Exception as error:  # a tile that does not fit
                        print(f"tiles: {form} {places} {warps} {stages}: {type(error).__name__}")
                        continue
                    text = ", ".join(f"{one:.1f}" for one in found)
                    print(f"tiles: {form} places {places} warps {warps} stages {stages}: {text} us")
    sys.stdout.flush()


def load() -> None:
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(16, NEW + 1, (4 * NUM_REQUESTS,), generator=generator).tolist()
    ragged = [
        replace(request, params=SamplingParams(max_new_tokens=length))
        for request, length in zip(requests(4 * NUM_REQUESTS), lengths, strict=True)
    ]
    for form in FORMATS:
        for name, work, running in (
            ("256 x (128 + 256)", requests(NUM_REQUESTS), NUM_REQUESTS),
            ("1,024 ragged", ragged, len(ragged)),
        ):
            room = 2 * running * (PROMPT + NEW)
            settings = changed(max_running=running, kv_cache_tokens=room, kv_cache_dtype=form)
            sampler = build(settings=settings)
            speeds = []
            for _ in range(4):
                seconds, results = run(sampler, work)
                speeds.append(sum(len(g.ids) for gs in results for g in gs) / seconds)
            text = ", ".join(f"{speed:,.0f}" for speed in speeds)
            print(f"load: {name}, {form}: {text} generated tok/s", flush=True)
            close(sampler)
            del sampler
            gc.collect()
            torch.cuda.empty_cache()


def gap() -> None:
    for scale in (0.02, 0.05):
        dims = replace(QWEN3_06B, initializer_range=scale)
        work = requests(32, prompt=100, new=128)
        plain = random_model(dims)
        for form in FORMATS:
            settings = changed(kv_cache_dtype=form)
            sampler = EmbeddedSampler(random_model(dims), settings, version=0)
            _, results = run(sampler, work)
            gaps = torch.cat(
                [
                    torch.tensor(g.logprobs) - forced(plain, r, g)
                    for r, gs in zip(work, results, strict=True)
                    for g in gs
                ]
            )
            print(
                f"gap: weights of {scale}, {form}: mean |difference| {gaps.abs().mean():.4f}, "
                f"mean {gaps.mean():+.4f}, 99th percentile {gaps.abs().quantile(0.99):.4f}, "
                f"largest {gaps.abs().max():.3f}",
                flush=True,
            )
            close(sampler)


PARTS = {part.__name__: part for part in (kernel, tiles, load, gap)}

if __name__ == "__main__":
    for part in sys.argv[1:] or PARTS:
        PARTS[part]()
