"""Decoding of groups that share their prompt's keys and values, on a GPU.

    python benchmarks/shared_prompts_gpu.py count     # bytes per step, no GPU
    python benchmarks/shared_prompts_gpu.py kernel    # paged decode, plain and shared
    python benchmarks/shared_prompts_gpu.py tiles     # the shared kernel over tile sizes

Heads of Qwen3-0.6B, 16 groups of 16 rows, bf16 and 8 bits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from triton.testing import do_bench_cudagraph

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
    """The shared part's tile: queries, places, warps, stages, and the number of programs."""
    grid = [(32, p, w, s, 512) for p in (32, 64, 128) for w in (2, 4, 8) for s in (2, 3)]
    grid += [(64, p, w, 2, 512) for p in (64, 128) for w in (4, 8)]
    grid += [(32, 64, 4, 2, programs) for programs in (256, 1024)]
    cases = [Case(prompt, answer) for prompt, answer in ((128, 128), (2048, 100))]
    for queries, places, warps, stages, programs in grid:
        shared_places.TILE = {"places": places, "warps": warps, "stages": stages}
        shared_places.MAX_QUERIES, paged_decode.MIN_PROGRAMS = queries, programs
        try:
            found = [time_us(case.cascade()) for case in cases]
        except Exception as error:  # a tile that does not fit
            found, name = [], type(error).__name__
            print(f"tiles: {name}", end=" ")
        text = ", ".join(f"{one:.1f}" for one in found)
        print(
            f"tiles: queries {queries} places {places} warps {warps} stages {stages} programs "
            f"{programs}: {text} us",
            flush=True,
        )


PARTS = {part.__name__: part for part in (count, kernel, kernel_8, tiles)}

if __name__ == "__main__":
    for part in sys.argv[1:] or PARTS:
        PARTS[part]()
