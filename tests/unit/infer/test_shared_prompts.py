"""Rows whose first blocks are the same: their tiles, and the tokens of an engine that uses them."""

import asyncio
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from closeness import ROUNDING
from sections import sampler_settings

from pentad.infer import shared
from pentad.infer.sampler import EmbeddedSampler
from pentad.infer.sequence import Table
from pentad.infer.shared import Grouping, max_tiles, row_tiles
from pentad.models.hf_weights import iter_hf
from pentad.models.registry import create_model

SIZE = 16


def tables(generator, sizes, prompts):
    """The block table of groups with these numbers of rows and of shared full blocks."""
    width = max(prompts) + 6
    free = iter(generator.permutation(10_000) + 1)
    blocks, num_full = [], []
    for size, prompt in zip(sizes, prompts, strict=True):
        common = [next(free) for _ in range(prompt)]
        for _ in range(size):
            own = int(generator.integers(0, 5))
            row = common + [next(free) for _ in range(own + 1)]
            blocks.append(row + [0] * (width - len(row)))
            num_full.append(prompt + own)
    return np.array(blocks, np.int32), np.array(num_full)


def check_tiles(found, blocks, num_full, max_rows):
    """Tiles are apart, and their rows really have these places in the same full blocks."""
    in_tile = np.zeros(len(blocks), int)
    assert len(found.firsts) == len(found.counts) <= max_tiles(len(blocks))
    for first, count in zip(found.firsts, found.counts, strict=True):
        rows = slice(first, first + count)
        in_tile[rows] += 1
        assert 0 < count <= max_rows and len(set(found.shared[rows])) == 1
        num = found.shared[first] // SIZE
        assert num * SIZE == found.shared[first] >= shared.MIN_TOKENS
        assert (blocks[rows, :num] == blocks[first, :num]).all() and num <= num_full[rows].min()
    assert (in_tile == (found.shared > 0)).all()


@pytest.mark.parametrize("seed", range(20))
def test_tiles_of_random_groups_hold_each_long_enough_group_once(seed):
    generator = np.random.default_rng(seed)
    least = shared.MIN_TOKENS // SIZE
    sizes = generator.integers(1, 40, 6)
    prompts = generator.integers(1, 3 * least, 6)
    blocks, num_full = tables(generator, sizes, prompts)
    found = row_tiles(blocks, num_full, SIZE, shared.MIN_TOKENS, max_rows=16)
    wanted = np.repeat(np.where((sizes >= shared.MIN_ROWS) & (prompts >= least), prompts, 0), sizes)
    if not wanted.any():
        assert found is None
        return
    check_tiles(found, blocks, num_full, 16)
    assert (found.shared == SIZE * wanted).all()
    tiles = (wanted > 0).sum() - len(found.firsts)
    assert found.num_saved <= (found.shared.sum()) and tiles > 0


def test_a_beginning_that_all_prompts_share_does_not_shorten_those_of_groups():
    least = shared.MIN_TOKENS // SIZE
    blocks, num_full = tables(np.random.default_rng(0), [5, 6, 2, 1, 4], [least + 4] * 5)
    blocks[:, :least] = np.arange(1, least + 1)
    found = row_tiles(blocks, num_full, SIZE, shared.MIN_TOKENS, max_rows=16)
    check_tiles(found, blocks, num_full, 16)
    assert (found.shared[:11] == SIZE * (least + 4)).all()
    assert (found.shared[14:] == SIZE * (least + 4)).all()


def test_empty_columns_are_not_equal_blocks():
    blocks = np.zeros((8, 40), np.int32)
    blocks[:, 0] = 1 + np.arange(8)
    assert row_tiles(blocks, np.zeros(8, int), SIZE, SIZE, max_rows=16) is None
    blocks[:, 0] = 1
    assert row_tiles(blocks, np.ones(8, int), SIZE, 2 * SIZE, max_rows=16) is None


def test_tiles_are_kept_while_the_same_sequences_run():
    least = shared.MIN_TOKENS // SIZE
    table = Table(8, SIZE)
    blocks, num_full = tables(np.random.default_rng(0), [8], [least])
    table.blocks = blocks
    grouping, rows = Grouping(table, 4, is_small=False), np.arange(8)
    found = grouping.tiles(rows, (num_full[None] + 1) * SIZE)
    assert found.counts.tolist() == [4, 4]
    table.blocks = blocks[::-1] * 0
    assert grouping.tiles(rows, (num_full[None] + 1) * SIZE) is found
    table.num_seated[3] += 1  # another sequence has row 3
    assert grouping.tiles(rows, (num_full[None] + 1) * SIZE) is None
    places = 3 * SIZE * (num_full + 1).sum()
    assert grouping.saved_share == 2 * 6 * least * SIZE / places


needs_kernels = pytest.mark.skipif(
    not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs a GPU, or TRITON_INTERPRET=1",
)


@needs_kernels
def test_the_tokens_are_those_of_rows_that_read_alone(make_request, windowed_dims, monkeypatch):
    """A layer with a window and one without; a group that is preempted, one of one, and one that is
    too small; weights that arrive between requests."""
    pytest.importorskip("triton", reason="the kernels need Triton")
    monkeypatch.setattr("pentad.ops.paged_decode.MIN_PROGRAMS", 8)
    monkeypatch.setattr(shared, "MIN_TOKENS", 8)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dims = replace(windowed_dims, num_heads=2, num_kv_heads=1)
    sizes = {"max_running": 8, "kv_cache_tokens": 60, "block_size": 4}
    requests = [
        make_request("a", range(11), n=5, max_new_tokens=5),
        make_request("b", range(20, 29), n=1, max_new_tokens=4),
        make_request("c", range(13), n=2, max_new_tokens=3, temperature=0.0),
    ]

    async def drawn(kernels):
        model = create_model(dims, seed=1, device=device)
        sampler = EmbeddedSampler(model, sampler_settings(**sizes, kernels=kernels))
        first = await asyncio.gather(*(sampler.generate(r) for r in requests))
        await sampler.install(1, list(iter_hf(create_model(dims, seed=2, device=device))))
        await sampler.sleep()
        await sampler.wake()
        second = await sampler.generate(requests[0])
        await sampler.close()
        return [g for one in [*first, second] for g in one], sampler.stats()

    plain, plain_stats = asyncio.run(drawn("torch"))
    found, stats = asyncio.run(drawn("triton"))
    assert plain_stats.pop("kv_reads_saved") == 0 and stats.pop("kv_reads_saved") > 0.1
    assert plain_stats == stats and stats["preemptions"] > 0
    for a, b in zip(found, plain, strict=True):
        assert a.ids == b.ids and a.versions == b.versions
        assert a.logprobs == pytest.approx(b.logprobs, abs=10 * ROUNDING)


@needs_kernels
@pytest.mark.parametrize(
    ("dims", "settings", "reads_once"),
    [
        ({}, {}, True),
        ({}, {"shares_prompts": False}, False),
        ({}, {"strict": True}, False),
        ({}, {"kernels": "torch"}, False),
        ({"sliding_layers": (True, True)}, {}, False),
        ({"attn_sinks": True, "family": "gpt_oss"}, {}, False),
    ],
)
def test_which_engines_read_prompts_together(windowed_dims, dims, settings, reads_once):
    model = create_model(replace(windowed_dims, **dims), seed=1)
    sampler = EmbeddedSampler(model, sampler_settings(**({"kernels": "triton"} | settings)))
    assert (sampler.engine.runner.grouping is not None) == reads_once
    asyncio.run(sampler.close())
