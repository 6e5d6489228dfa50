"""Decoding of groups that share their prompt's keys and values, on a GPU.

    python benchmarks/shared_prompts_gpu.py            # every part
    python benchmarks/shared_prompts_gpu.py kernel     # the named parts

Parts: `count` (bytes of keys and values of a step), `kernel` (paged decode of Qwen3-0.6B's heads,
16 groups of 16 rows, alone and together), `tiles` (the same over tile sizes of the shared part),
`check` (log-probs of both ways against one plain forward pass), `load` (sampling of groups with
both, and of single requests).
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import replace

import torch
from sampler_gpu import build, changed, close, run
from sampler_load import QWEN3_06B, forced, random_model, requests
from triton.testing import do_bench_cudagraph

from pentad.infer.sampler import EmbeddedSampler
from pentad.ops import paged_decode, shared_places
from pentad.ops.pages import EIGHT_BITS, Pages

GROUPS, EACH = 16, 16
HEADS, KV_HEADS, WIDTH, BLOCK = 16, 8, 128, 16
CASES = (
    (64, 128),
    (128, 64),
    (128, 256),
    (128, 1024),
    (256, 256),
    (512, 256),
    (2048, 100),
    (2048, 1024),
)
"""Tokens of the prompt and of the answer so far."""


def count() -> None:
    """Bytes of keys and values that a step reads, averaged over the tokens of the answers."""
    each = 2 * 28 * KV_HEADS * WIDTH * 2
    rows = GROUPS * EACH
    for prompt, answer in ((128, 256), (128, 512), (128, 1024), (512, 256), (2048, 200)):
        plain = rows * (prompt + answer / 2) * each
        shared = (GROUPS * prompt + rows * answer / 2) * each
        print(
            f"count: {rows} rows, prompt {prompt}, answers {answer}: {plain / 1e9:.1f} GB a step, "
            f"shared {shared / 1e9:.1f} GB, {plain / shared:.2f}x"
        )


def tables(prompt: int, answer: int) -> tuple[torch.Tensor, int]:
    """The block table of the groups; the second number is its width."""
    num, width = prompt // BLOCK, -(-(prompt + answer) // BLOCK)
    free = 1 + torch.randperm(GROUPS * num + GROUPS * EACH * (width - num), dtype=torch.int32)
    table = torch.zeros(GROUPS, EACH, width, dtype=torch.int32)
    table[:, :, :num] = free[: GROUPS * num].view(GROUPS, 1, num)
    table[:, :, num:] = free[GROUPS * num :].view(GROUPS, EACH, -1)
    return table.view(GROUPS * EACH, width), len(free) + 1


class Case:
    """One step of `GROUPS` groups: their pages, block table and queries."""

    def __init__(self, prompt: int, answer: int, form: str = "auto") -> None:
        rows = GROUPS * EACH
        table, num_blocks = tables(prompt, answer)
        shape = (num_blocks, BLOCK, KV_HEADS, WIDTH)
        scales = [torch.ones(shape[:-1], device="cuda") for _ in range(2)] if form != "auto" else []
        dtype = EIGHT_BITS.get(form, torch.bfloat16)
        held = [torch.zeros(shape, device="cuda", dtype=dtype) for _ in range(2)]
        self.pages = Pages(*held, *scales)
        new = [torch.randn(shape, device="cuda").flatten(0, 1) for _ in range(2)]
        places = torch.arange(len(new[0]), device="cuda")
        self.pages.write(places, *(x if scales else x.bfloat16() for x in new))
        self.q = torch.randn(rows, HEADS, WIDTH, device="cuda", dtype=torch.bfloat16)
        self.table = table.cuda()
        self.blocks = self.table.flatten()
        self.width = torch.tensor([table.shape[1]], device="cuda")
        self.lengths = torch.full((rows,), prompt + answer, device="cuda")
        self.shared = torch.full((rows,), prompt, device="cuda")

    def plain(self) -> torch.Tensor:
        return paged_decode.paged_decode(self.q, self.pages, self.blocks, self.width, self.lengths)

    def cascade(self) -> Callable[[], torch.Tensor]:
        tile = min(shared_places.rows_per_tile(HEADS // KV_HEADS), EACH)
        num, rows = len(self.q) // tile, len(self.q)
        firsts, counts = torch.zeros(2, rows // 4, dtype=torch.int64, device="cuda")
        firsts[:num] = torch.arange(0, rows, tile, device="cuda")
        counts[:num] = tile
        shared = shared_places.SharedRows(self.shared, firsts, counts)

        def once() -> torch.Tensor:
            return paged_decode.paged_decode(
                self.q, self.pages, self.blocks, self.width, self.lengths, shared=shared
            )

        return once

    def gap(self, found: torch.Tensor) -> float:
        """Largest distance of some rows to the reference in float32."""
        some = slice(0, len(self.q), 19)
        wanted = paged_decode.reference_decode(
            self.q[some].float(), self.pages, self.table[some], self.lengths[some]
        )
        return (found[some].float() - wanted).abs().max().item()


def time_us(once: Callable[[], torch.Tensor]) -> float:
    return 1000 * do_bench_cudagraph(once, rep=30)


def kernel(form: str = "auto") -> None:
    for prompt, answer in CASES:
        case = Case(prompt, answer, form)
        cascade = case.cascade()
        gaps = case.gap(case.plain()), case.gap(cascade())
        before, after = time_us(case.plain), time_us(cascade)
        print(
            f"kernel: {form}, prompt {prompt} + {answer}: plain {before:.1f} us a layer, shared "
            f"{after:.1f}, {before / after:.2f}x; distance to float32 {gaps[0]:.1e}, {gaps[1]:.1e}",
            flush=True,
        )


def kernel_8() -> None:
    kernel("int8")
    kernel("fp8")


def tiles() -> None:
    """Tile sizes of the shared part: places, warps, stages, and programs to fill the device."""
    grid = [(p, w, s, 512) for p in (32, 64, 128) for w in (4, 8) for s in (2, 3)]
    grid += [(64, 4, 3, programs) for programs in (128, 256, 1024)]
    cases = [Case(prompt, answer) for prompt, answer in ((128, 128), (512, 256), (2048, 100))]
    usual = shared_places.TILE, paged_decode.MIN_PROGRAMS
    for places, warps, stages, programs in grid:
        shared_places.TILE = {"places": places, "warps": warps, "stages": stages}
        paged_decode.MIN_PROGRAMS = programs
        try:
            text = ", ".join(f"{time_us(case.cascade()):.1f}" for case in cases)
        except Exception as error:  # a tile that does not fit
            text = type(error).__name__
        print(
            f"tiles: places {places} warps {warps} stages {stages} programs {programs}: {text} us",
            flush=True,
        )
    shared_places.TILE, paged_decode.MIN_PROGRAMS = usual


def parts() -> None:
    """Device time of each kernel of a decode."""
    for prompt, answer in ((128, 256), (2048, 100)):
        case = Case(prompt, answer)
        for once in (case.plain, case.cascade()):
            once()
            torch.cuda.synchronize()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
                for _ in range(20):
                    once()
                torch.cuda.synchronize()
            times: dict[str, list[float]] = {}
            for event in sorted(prof.events(), key=lambda event: event.time_range.start):
                if event.name.startswith(("_attend", "_merge")):
                    times.setdefault(event.name, []).append(event.time_range.elapsed_us())
            if len(times) == 2 and once != case.plain:  # both phases have one name
                name = next(name for name in times if "_attend" in name)
                both = times.pop(name)
                times |= {"shared places": both[::2], "other places": both[1::2]}
            text = ", ".join(f"{name} {sum(t) / len(t):.1f}" for name, t in times.items())
            print(f"parts: prompt {prompt} + {answer}: {text} us", flush=True)


def check() -> None:
    """float32 and bf16; one of the groups is larger than a tile, one is single."""
    small = replace(QWEN3_06B, num_layers=4, initializer_range=0.05)
    work = [*requests(3, n=8, prompt=300, new=24), *requests(1, n=40, prompt=260, new=40)]
    work += requests(9, prompt=137, new=40)
    work = [replace(r, id=f"c{i}") for i, r in enumerate(work)]
    for dtype in (torch.float32, torch.bfloat16):
        plain = random_model(small, dtype=dtype)
        for name, settings in (
            ("alone", changed(shares_prompts=False)),
            ("together", changed()),
            ("together, without graphs", changed(cuda_graphs=False)),
            ("together, few blocks", changed(kv_cache_tokens=3200)),
            ("alone, int8", changed(shares_prompts=False, kv_cache_dtype="int8")),
            ("together, int8", changed(kv_cache_dtype="int8")),
        ):
            sampler = EmbeddedSampler(random_model(small, dtype=dtype), settings)
            _, results = run(sampler, work)
            gap = torch.cat(
                [
                    (torch.tensor(g.logprobs) - forced(plain, r, g)).abs()
                    for r, gs in zip(work, results, strict=True)
                    for g in gs
                ]
            )
            stats = sampler.stats()
            print(
                f"check: {str(dtype)[6:]}, {name}: log-probs against one plain forward pass: mean "
                f"{gap.mean():.2e}, largest {gap.max():.2e}; preemptions "
                f"{stats['preemptions']:.0f}, reads saved {stats['kv_reads_saved']:.0%}",
                flush=True,
            )
            if dtype == torch.float32 and "int8" not in name:
                assert gap.max() < 1e-3, "float32 log-probs differ beyond rounding"
            close(sampler)


def load() -> None:
    for num, n, prompt, new in (
        (16, 16, 2048, 200),
        (16, 16, 512, 256),
        (16, 16, 256, 256),
        (16, 16, 128, 256),
        (256, 1, 128, 256),
    ):
        work = requests(num, n=n, prompt=prompt, new=new)
        for shares in (False, True):
            sampler = build(settings=changed(shares_prompts=shares))
            speeds = []
            for _ in range(4):
                seconds, results = run(sampler, work)
                speeds.append(sum(len(g.ids) for gs in results for g in gs) / seconds)
            text = ", ".join(f"{speed:,.0f}" for speed in speeds[1:])
            print(
                f"load: {num} x {n}, prompt {prompt} + {new}, {'together' if shares else 'alone'}: "
                f"{text} generated tok/s, reads saved {sampler.stats()['kv_reads_saved']:.0%}",
                flush=True,
            )
            close(sampler)
            del sampler
            gc.collect()
            torch.cuda.empty_cache()


PARTS = {part.__name__: part for part in (count, kernel, kernel_8, tiles, parts, check, load)}

if __name__ == "__main__":
    for part in sys.argv[1:] or PARTS:
        PARTS[part]()
