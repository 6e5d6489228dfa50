"""Decoding on a GPU: one token for each row, as one captured graph per padded batch size, or two: a
second one for steps in which rows read shared places together.

All inputs of a step are copied in one pinned buffer, the block table in a second, ids and log-probs
in a third: one synchronisation per step. Buffers keep their addresses, so a captured graph is valid
for every batch; padded rows use the scratch block. Without a GPU (or for models whose forward
synchronises with the host) the same code runs uncaptured.

A step can be launched before the ids of the previous one are known on the host: it reads them on
the device. Two sets of host buffers alternate, so two steps can be in progress.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pentad.core.types import Attend
from pentad.infer.attend import KVCache
from pentad.infer.draw_kernel import draw_fused
from pentad.infer.sampling import uniforms
from pentad.infer.sequence import Table
from pentad.infer.shared import Grouping, max_tiles
from pentad.infer.states import StateSlots, TokenMemory
from pentad.infer.strict import head_logits, strict_logprobs
from pentad.models.decoder import Decoder
from pentad.models.moe import Routes
from pentad.ops.delta import RememberingAttend
from pentad.ops.fused import store
from pentad.ops.invariant_kernels import Tiles, attend
from pentad.ops.latent_decode import decode
from pentad.ops.shared_places import SharedRows

IDS, POSITIONS, LENGTHS, PLACES, UNIFORMS, TEMPERATURES, WIDTH, ORIGINS, ROWS = range(9)
SHARED, FIRSTS, COUNTS = range(9, 12)
"""Rows of the input buffer, all int64; the two with real numbers contain fp64 bits. ORIGINS: index
in the previous step; ROWS: index in the table; the last three: `SharedRows`."""


def batch_sizes(max_rows: int) -> Iterator[int]:
    """Yields 1, 2, 4, 8, 16, 24, 32, 48, 64, 96...: padding is less than half of the batch."""
    size = 1
    while size < max_rows:
        yield size
        if size >= 16 and size * 3 // 2 < max_rows:
            yield size * 3 // 2
        size *= 2
    yield max_rows


class DecodeAttend:
    """The attention core of a step with one token per row."""

    def __init__(
        self,
        cache: KVCache,
        places_S: Tensor,
        blocks: Tensor,
        width: Tensor,
        lengths_S: Tensor,
        shared: SharedRows | None,
    ) -> None:
        self.cache = cache
        self.places_S = places_S
        self.blocks = blocks
        self.width = width
        self.lengths_S = lengths_S
        self.shared = shared

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
        pages = self.cache.layer(layer)
        store(pages, self.places_S, k_TKd, v_TKd)
        table = (self.blocks, self.width, self.lengths_S)
        return decode(q_THd, pages, *table, window, sinks, cap, shared=self.shared)


class StrictDecode:
    """`DecodeAttend` with the kernel that training uses: one tile per row."""

    def __init__(
        self, cache: KVCache, places_S: Tensor, blocks: Tensor, width: Tensor, positions_S: Tensor
    ) -> None:
        self.cache = cache
        self.places_S = places_S
        each_S = torch.arange(len(places_S), device=places_S.device)
        size = cache.block_size
        self.tiles = Tiles(
            each_S, positions_S, torch.ones_like(each_S), each_S, blocks, width, size, size
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
        pages = self.cache.layer(layer)
        store(pages, self.places_S, k_TKd.contiguous(), v_TKd.contiguous())
        k_PKd, v_PKd = pages.k_BbKd.flatten(0, 1), pages.v_BbKd.flatten(0, 1)
        return attend(q_THd.contiguous(), k_PKd, v_PKd, self.tiles, window, sinks, cap)


@dataclass(frozen=True, slots=True)
class HostBuffers:
    inputs: Tensor
    blocks: Tensor
    outputs: Tensor


@dataclass(frozen=True, slots=True)
class Launched:
    """A step in progress."""

    rows: np.ndarray
    seats: np.ndarray
    """For each row the count of `Table.num_seated`, which identifies its sequence."""
    outputs: Tensor
    logits_NV: Tensor
    """Valid until the next step is launched."""
    is_done: torch.cuda.Event | None

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """Waits for the step; returns ids and log-probs of the rows."""
        if self.is_done is not None:
            self.is_done.synchronize()
        num, out = len(self.rows), self.outputs.numpy()
        return out[0, :num].copy(), out[1].view(np.float64)[:num].astype(np.float32)


class GraphDecoder:
    """Runs decode steps over static buffers."""

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        table: Table,
        max_context: int,
        *,
        capture: bool,
        strict: bool = False,
        slots: StateSlots | None = None,
        grouping: Grouping | None = None,
    ) -> None:
        self.model = model
        self.cache = cache
        self.table = table
        self.capture_graphs = capture
        self.strict = strict
        self.slots = slots
        num_rows = len(table.sequences)
        self.sizes = list(batch_sizes(num_rows))
        max_blocks = -(-max_context // cache.block_size)
        device = cache.device
        pin = device.type == "cuda"
        self.hosts = [
            HostBuffers(
                torch.zeros((12, num_rows), dtype=torch.int64, pin_memory=pin),
                torch.zeros(num_rows * max_blocks, dtype=torch.int32, pin_memory=pin),
                torch.zeros((2, num_rows), dtype=torch.int64, pin_memory=pin),
            )
            for _ in range(2)
        ]
        self.inputs = torch.zeros_like(self.hosts[0].inputs, device=device)
        self.blocks = torch.zeros_like(self.hosts[0].blocks, device=device)
        self.outputs = torch.zeros_like(self.hosts[0].outputs, device=device)
        self.grouping = grouping
        self.graphs: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        """By the number of rows, and whether some read shared places together."""
        self.pool = torch.cuda.graph_pool_handle() if pin else None

    def launch(self, rows: np.ndarray, after: Launched | None = None) -> Launched:
        """Computes the last token of each row and samples the next. With `after`, the last token is
        that of the previous step, whose rows include these."""
        size = next(size for size in self.sizes if size >= len(rows))
        self.hosts.reverse()
        host = self.hosts[0]
        is_shared = self.fill(host, rows, size, after)
        run = self.replay if self.capture_graphs else self.body
        logits_NV = run(size, is_shared=is_shared)
        host.outputs.copy_(self.outputs, non_blocking=True)
        is_done = None
        if self.cache.device.type == "cuda":
            is_done = torch.cuda.Event()
            is_done.record()
        seats = self.table.num_seated[rows]
        return Launched(rows, seats, host.outputs, logits_NV[: len(rows)], is_done)

    def fill(
        self, host: HostBuffers, rows: np.ndarray, size: int, after: Launched | None = None
    ) -> bool:
        """Copies the step's inputs; returns whether some rows read shared places together."""
        table, block_size, num = self.table, self.cache.block_size, len(rows)
        inputs = host.inputs.numpy()
        lengths = table.num_tokens[rows] + (after is not None)
        last = lengths - 1
        inputs[:, num:size] = 0
        inputs[POSITIONS, :num] = last
        inputs[LENGTHS, :num] = lengths
        inputs[LENGTHS, num:size] = 1
        inputs[PLACES, :num] = table.blocks[rows, last // block_size]
        inputs[PLACES, :num] = inputs[PLACES, :num] * block_size + last % block_size
        inputs[UNIFORMS].view(np.float64)[:num] = uniforms(table.seed[rows], lengths)
        inputs[TEMPERATURES].view(np.float64)[:num] = table.temperature[rows]
        inputs[ROWS, :num] = rows
        inputs[ROWS, num:size] = len(table.sequences)  # the scratch slot
        width = int(table.num_blocks[rows].max())
        inputs[WIDTH, 0] = width
        tiles = None if self.grouping is None else self.grouping.tiles(rows, lengths)
        if tiles is not None:
            inputs[COUNTS, :size] = 0
            inputs[SHARED, :num] = tiles.shared
            inputs[FIRSTS, : len(tiles.firsts)] = tiles.firsts
            inputs[COUNTS, : len(tiles.counts)] = tiles.counts
        if after is None:
            inputs[IDS, :num] = table.tokens[rows, last]
        else:
            place = np.zeros(len(table.sequences), np.int64)
            place[after.rows] = np.arange(len(after.rows))
            inputs[ORIGINS, :num] = place[rows]
        blocks = host.blocks.numpy()[: size * width].reshape(size, width)
        blocks[:num] = table.blocks[rows, :width]
        blocks[num:] = 0
        self.inputs.copy_(host.inputs, non_blocking=True)
        self.blocks[: size * width].copy_(host.blocks[: size * width], non_blocking=True)
        if after is not None:
            origins = self.inputs[ORIGINS, :num]
            torch.index_select(self.outputs[0], 0, origins, out=self.inputs[IDS, :num])
        return tiles is not None

    def body(self, size: int, *, is_shared: bool) -> Tensor:
        """One step over the static buffers; returns the logits."""
        ids, positions, lengths, places, uniform, temperature = self.inputs[:6, :size]
        width = self.inputs[WIDTH, :1]
        core: Attend
        if self.strict:
            core = StrictDecode(self.cache, places, self.blocks, width, positions)
        else:
            shared = None
            if is_shared:
                firsts, counts = self.inputs[FIRSTS : COUNTS + 1, : max_tiles(size)]
                shared = SharedRows(self.inputs[SHARED, :size], firsts, counts)
            core = DecodeAttend(self.cache, places, self.blocks, width, lengths, shared)
        if self.slots is not None:
            memory = TokenMemory(self.slots, self.inputs[ROWS, :size], positions)
            core = RememberingAttend(core, memory)
        routes: Routes | None = None if self.cache.routes is None else {}
        hidden_SD = self.model(ids, positions, core, routes)
        if routes is not None:
            self.cache.write_routes(places, routes)
        logits_SV = head_logits(self.model, hidden_SD, strict=self.strict)
        drawn_S, logprobs_S = draw_fused(
            logits_SV, uniform.view(torch.float64), temperature.view(torch.float64)
        )
        if self.strict:
            logprobs_S = strict_logprobs(logits_SV, drawn_S, temperature.view(torch.float64))
        self.outputs[0, :size] = drawn_S
        self.outputs[1].view(torch.float64)[:size] = logprobs_S.double()
        return logits_SV

    def replay(self, size: int, *, is_shared: bool) -> Tensor:
        key = size, is_shared
        if key not in self.graphs:
            self.graphs[key] = self.capture(size, is_shared=is_shared)
        graph, logits_SV = self.graphs[key]
        graph.replay()
        return logits_SV

    def capture(self, size: int, *, is_shared: bool) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Captures a graph. The warm-up computes the step that is then replayed, so it only changes
        states, for which it uses the scratch slot."""
        device = self.cache.device
        rows = self.inputs[ROWS, :size]
        own = rows.clone()
        if self.slots is not None:
            rows.fill_(self.slots.scratch)
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            self.body(size, is_shared=is_shared)
        torch.cuda.current_stream(device).wait_stream(side)
        rows.copy_(own)
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        # Other threads of this process (a learner) may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            logits_SV = self.body(size, is_shared=is_shared)
        return graph, logits_SV
