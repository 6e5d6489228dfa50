"""Attention over the paged key-value cache in plain torch, for any device, dtype and chunk.

Shape letters: T tokens of the step (all sequences, flat), S sequences of a bucket, L queries and P
places (tokens in the cache) of each, B blocks, b places of a block, H query heads, K key-value
heads, d head width.

Sequences of similar size are batched in buckets, so padding at most doubles the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pentad.core.dims import ModelDims
from pentad.core.types import Attend
from pentad.models.moe import Routes
from pentad.ops.pages import LARGEST, Pages
from pentad.ops.sinks import attend_limited, attend_with_sinks


class KVCache:
    """Keys and values of all attention layers, block by block."""

    def __init__(
        self,
        dims: ModelDims,
        num_blocks: int,
        block_size: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        expanded: bool = False,
    ) -> None:
        """A dtype in `EIGHT_BITS` adds scales. `expanded`: for latent attention the cache stores
        keys and values of every head instead of the latents."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = device
        self.capped = dims.score_cap is not None
        self.has_values = expanded or not dims.kv_latent  # latents contain the values
        self.held: list[Tensor] = []
        """Tensors with blocks as second dim: keys for all layers of one shape, values, and their
        scales."""
        self.layers: dict[int, Pages] = {}
        by_shape: dict[tuple[int, int, int], list[int]] = {}
        for layer in dims.cached_layers:
            shape = dims.of_layer(layer).cache_shape(expanded=expanded)
            by_shape.setdefault(shape, []).append(layer)
        for (num_heads, width, _), layers in by_shape.items():
            size = (len(layers), num_blocks, block_size, num_heads, width)
            stacks = [torch.zeros(size, device=device, dtype=dtype) for _ in range(self.num_parts)]
            if dtype in LARGEST:
                stacks += [torch.ones(size[:-1], device=device) for _ in range(2)]
            self.held += stacks
            for n, layer in enumerate(layers):
                k_BbKd, *others = (stack[n] for stack in stacks)
                others = others or [k_BbKd[..., : dims.kv_latent]]
                self.layers[layer] = Pages(k_BbKd, *others)
        self.widths = sorted({width for _, width, _ in by_shape})
        """Widths of key heads."""
        self.routes: Tensor | None = None
        """[blocks, places, MoE layers, k]: the experts of each cached token; stored like keys and
        values, so that sequences with a shared prefix share its routes."""

    @property
    def num_parts(self) -> int:
        return 1 + self.has_values

    def keep_routes(self, dims: ModelDims) -> None:
        num_layers = sum(map(dims.is_moe, range(dims.num_layers)))
        dtype = torch.uint8 if dims.num_experts <= 256 else torch.int16
        shape = (self.num_blocks, self.block_size, num_layers, dims.num_experts_per_token)
        self.routes = torch.zeros(shape, device=self.device, dtype=dtype)

    def write_routes(self, places_T: Tensor, routes: Routes) -> None:
        assert self.routes is not None
        chosen_TLk = torch.stack([routes[layer] for layer in sorted(routes)], dim=1)
        self.routes.flatten(0, 1).index_copy_(0, places_T, chosen_TLk.to(self.routes.dtype))

    def read_routes(self, blocks: Tensor, num_tokens: int) -> np.ndarray:
        """Returns the routes of the first tokens of a sequence in these blocks."""
        assert self.routes is not None
        found: np.ndarray = self.routes[blocks].flatten(0, 1)[:num_tokens].cpu().numpy()
        return found

    def layer(self, number: int) -> Pages:
        return self.layers[number]

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        for held in self.held:
            bits = held.view(torch.uint8) if held.dtype in LARGEST else held
            bits[:, targets] = bits[:, sources]
        if self.routes is not None:
            self.routes[targets] = self.routes[sources]


class Bucket:
    """Sequences of one step with similar numbers of queries and blocks."""

    def __init__(
        self,
        first_S: np.ndarray,
        starts_S: np.ndarray,
        counts_S: np.ndarray,
        blocks_SB: np.ndarray,
        block_size: int,
        device: torch.device,
    ) -> None:
        """`first_S`: flat index of each sequence's first query; `starts_S`: its position."""
        self.num = len(first_S)
        self.length = int(counts_S.max())
        self.num_places = blocks_SB.shape[1] * block_size
        self.blocks = torch.from_numpy(blocks_SB.reshape(-1)).to(device)
        offset_L = np.arange(self.length)
        self.position_SL = torch.from_numpy(starts_S[:, None] + offset_L).to(device)
        token_SL = first_S[:, None] + np.minimum(offset_L, counts_S[:, None] - 1)
        is_real = (offset_L < counts_S[:, None]).reshape(-1)
        self.token_P = torch.from_numpy(token_SL.reshape(-1)).to(device)
        self.real_T: Tensor | None = None  # None: no query is padding
        if not is_real.all():
            self.real_T = torch.from_numpy(np.flatnonzero(is_real)).to(device)
        self.masks: dict[int | None, Tensor] = {}

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Returns [S, 1, L, P]: 0 for the places a query attends to, else -inf. Computed once per
        step, because every layer would convert booleans to this."""
        if window not in self.masks:
            place_P = torch.arange(self.num_places, device=self.position_SL.device)
            distance = self.position_SL[:, None, :, None] - place_P
            hidden = distance < 0
            if window is not None:
                hidden |= distance >= window
            zeros = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            self.masks[window] = zeros.masked_fill_(hidden, float("-inf"))
        return self.masks[window]

    def attend(
        self,
        q_THd: Tensor,
        pages: Pages,
        mask: Tensor,
        sinks: Tensor | None = None,
        cap: float | None = None,
    ) -> Tensor:
        """Returns outputs of the bucket's real queries, in the order of `token_P`."""
        num_kv_heads, width = pages.k_BbKd.shape[-2:]
        num_heads = q_THd.shape[1]
        keys, values = (
            x.view(self.num, self.num_places, *x.shape[-2:]).transpose(1, 2)
            for x in pages.read(self.blocks, q_THd.dtype)
        )
        if self.length == 1:  # the query heads of one key-value head are used as queries
            q = q_THd.reshape(self.num, num_kv_heads, num_heads // num_kv_heads, width)
            if cap is not None:
                out = attend_limited(q, keys, values, cap, seen=mask)
            elif sinks is None:
                out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
            else:
                sinks = sinks.view(num_kv_heads, -1)
                out = attend_with_sinks(q, keys, values, sinks, seen=mask)
            return out.reshape(self.num, num_heads, out.shape[-1])
        q = q_THd.view(self.num, self.length, num_heads, width).transpose(1, 2)
        gqa = num_heads != num_kv_heads
        if pages.is_latent:  # not repeated, which would copy values
            gqa, keys, values = False, *(x.expand(-1, num_heads, -1, -1) for x in (keys, values))
        if cap is not None:
            out = attend_limited(q, keys, values, cap, seen=mask)
        elif sinks is None:
            out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=gqa)
        else:
            out = attend_with_sinks(q, keys, values, sinks, seen=mask)
        o_PHd = out.transpose(1, 2).reshape(-1, num_heads, out.shape[-1])
        return o_PHd if self.real_T is None else o_PHd.index_select(0, self.real_T)


@dataclass(frozen=True, slots=True)
class StepRows:
    """The sequences of one step: i has `counts[i]` new tokens, from position `starts[i]` on."""

    starts: np.ndarray
    counts: np.ndarray
    blocks: np.ndarray
    """The block table, one row per sequence."""
    places_T: Tensor
    """Cache places of the new tokens' keys and values."""


class PagedAttend:
    """The attention core of one step: writes the new keys and values, then attends."""

    def __init__(self, cache: KVCache, rows: StepRows) -> None:
        self.cache = cache
        self.places_T = rows.places_T
        self.buckets = []
        starts, counts = rows.starts, rows.counts
        first = np.cumsum(counts) - counts
        num_blocks = -(-(starts + counts) // cache.block_size)
        kinds = 64 * ceil_log2(counts) + ceil_log2(num_blocks)
        for kind in np.unique(kinds):
            members = np.flatnonzero(kinds == kind)
            width = int(num_blocks[members].max())
            table = rows.blocks[members, :width].astype(np.int64)
            # Places after a sequence's own blocks are masked; any valid block serves there.
            table *= np.arange(width) < num_blocks[members, None]
            self.buckets.append(
                Bucket(
                    first[members],
                    starts[members],
                    counts[members],
                    table,
                    cache.block_size,
                    rows.places_T.device,
                )
            )

    def __call__(
        self,
        layer: int,
        q_THd: Tensor,
        k_TKd: Tensor,
        v_TKd: Tensor,
        window: int | None = None,
        sinks: Tensor | None = None,
        cap: float | None = None,
    ) -> Tensor:
        self.cache.layer(layer).write(self.places_T, k_TKd, v_TKd)
        return self.attend(layer, q_THd, window, sinks, cap)

    def attend(
        self,
        layer: int,
        q_THd: Tensor,
        window: int | None,
        sinks: Tensor | None = None,
        cap: float | None = None,
    ) -> Tensor:
        """Attends to keys and values that are already in the cache."""
        pages = self.cache.layer(layer)
        if len(self.buckets) == 1 and self.buckets[0].real_T is None:
            (bucket,) = self.buckets  # its queries are all tokens in order
            return bucket.attend(q_THd, pages, bucket.mask(window, q_THd.dtype), sinks, cap)
        o_THd = q_THd.new_empty(*q_THd.shape[:2], pages.v_BbKd.shape[-1])
        for bucket in self.buckets:
            q_PHd = q_THd.index_select(0, bucket.token_P)
            out = bucket.attend(q_PHd, pages, bucket.mask(window, q_THd.dtype), sinks, cap)
            tokens = bucket.token_P
            if bucket.real_T is not None:
                tokens = tokens.index_select(0, bucket.real_T)
            o_THd.index_copy_(0, tokens, out)
        return o_THd


class OrderedAttend:
    """The attention core for a model whose attention calls have no layer index: the n-th call of a
    forward pass uses the n-th layer of the cache."""

    def __init__(self, core: Attend, shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> None:
        self.core = core
        self.shapes = shapes
        self.dtype = dtype
        """The dtype of the model; some families compute parts of a layer in a wider one."""
        self.num_calls = 0

    def __call__(
        self,
        layer: int,
        q_THd: Tensor,
        k_TKd: Tensor,
        v_TKd: Tensor,
        window: int | None = None,
        sinks: Tensor | None = None,
        cap: float | None = None,
    ) -> Tensor:
        place, self.num_calls = self.num_calls, self.num_calls + 1
        assert k_TKd.shape[1:] == self.shapes[place], f"call {place} has keys {k_TKd.shape}"
        q, k, v = (x.to(self.dtype) for x in (q_THd, k_TKd, v_TKd))
        return self.core(place, q, k, v, window, sinks, cap).to(q_THd.dtype)

    def check_whole(self) -> None:
        num = len(self.shapes)
        assert self.num_calls == num, f"{self.num_calls} calls of attention, where {num} were"


def ceil_log2(numbers: np.ndarray) -> np.ndarray:
    """Returns ceil(log2): 0 for 1, 1 for 2, 2 for 3 and 4, 3 for 5 to 8..."""
    return np.ceil(np.log2(numbers)).astype(np.int64)
