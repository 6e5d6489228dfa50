"""Decoding on a GPU: one token for each row, as one captured graph per padded batch size, or two: a
second one for steps in which rows read shared places together.

Several steps are launched together: all inputs except the sampled ids are known before the first.
They are copied in one pinned buffer, the block table in a second, ids and log-probs in a third: one
synchronisation for all. A step reads its part of the inputs by a counter on the device, and the ids
of the step before it there. Buffers keep their addresses, so a captured graph is valid for every
batch; padded rows use the scratch block. Without a GPU (or for models whose forward synchronises
with the host) the same code runs uncaptured.

Steps can be launched before those in progress are read. Two sets of host buffers alternate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pentad.core.types import Attend
from pentad.infer.attend import KVCache
from pentad.infer.blocks import SCRATCH
from pentad.infer.draw_kernel import draw_fused
from pentad.infer.sampling import uniforms
from pentad.infer.sequence import Table
from pentad.infer.shared import Grouping, max_tiles
from pentad.infer.states import StateSlots, TokenMemory
from pentad.infer.strict import head_logits, strict_logprobs
from pentad.models.decoder import Decoder
from pentad.models.moe import Routes
from pentad.ops.capture import capturing
from pentad.ops.delta import RememberingAttend
from pentad.ops.fused import store
from pentad.ops.invariant_kernels import Tiles, attend
from pentad.ops.latent_decode import decode
from pentad.ops.shared_places import SharedRows

IDS, POSITIONS, LENGTHS, PLACES, UNIFORMS, TEMPERATURES, WIDTH, ORIGINS, ROWS = range(9)
SHARED, FIRSTS, COUNTS = range(9, 12)
"""Rows of the input buffer, all int64; the two with real numbers contain fp64 bits. IDS: -1 for the
id that the previous step sampled at ORIGINS; ROWS: index in the table; the last three:
`SharedRows`."""


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
    """Steps in progress."""

    rows: np.ndarray
    seats: np.ndarray
    """For each row the count of `Table.num_seated`, which identifies its sequence."""
    num_steps: int
    outputs: Tensor
    logits_NV: Tensor | None
    """Those of the last decode step; valid until the next steps are launched."""
    is_done: torch.cuda.Event | None

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """Waits for the steps; returns ids and log-probs by step and row."""
        if self.is_done is not None:
            self.is_done.synchronize()
        num, out_K2R = len(self.rows), self.outputs.numpy()[: self.num_steps]
        logprobs_KN = out_K2R[:, 1].view(np.float64)[:, :num].astype(np.float32)
        return out_K2R[:, 0, :num].copy(), logprobs_KN


class GraphDecoder:
    """Runs decode steps over static buffers."""

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        table: Table,
        max_context: int,
        max_steps: int,
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
                torch.zeros((max_steps, 12, num_rows), dtype=torch.int64, pin_memory=pin),
                torch.zeros(num_rows * max_blocks, dtype=torch.int32, pin_memory=pin),
                torch.zeros((max_steps, 2, num_rows), dtype=torch.int64, pin_memory=pin),
            )
            for _ in range(2)
        ]
        self.inputs = torch.zeros_like(self.hosts[0].inputs, device=device)
        self.blocks = torch.zeros_like(self.hosts[0].blocks, device=device)
        self.outputs = torch.zeros_like(self.hosts[0].outputs, device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        """Index of the step in `inputs` and `outputs`."""
        self.each_K11 = torch.arange(max_steps, device=device).view(-1, 1, 1)
        self.drawn = torch.zeros(num_rows, dtype=torch.int64, device=device)
        """The ids that the previous step sampled."""
        self.grouping = grouping
        self.graphs: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        """By the number of rows, and whether some read shared places together."""
        self.pool = torch.cuda.graph_pool_handle() if pin else None

    def launch(self, rows: np.ndarray, num_steps: int, after: Launched | None = None) -> Launched:
        """Computes the last token of each row and samples the next, `num_steps` times; a row at its
        limit computes a token that is ignored. With `after`, the last token is that of the steps in
        progress, whose rows include these."""
        size = next(size for size in self.sizes if size >= len(rows))
        self.hosts.reverse()
        host = self.hosts[0]
        is_shared = self.fill(host, rows, size, num_steps, after)
        run = self.replay if self.capture_graphs else self.body
        for _ in range(num_steps):
            logits_NV = run(size, is_shared=is_shared)
        host.outputs[:num_steps].copy_(self.outputs[:num_steps], non_blocking=True)
        return self.launched(rows, num_steps, host, logits_NV[: len(rows)])

    def adopt(self, rows: np.ndarray, ids_N: Tensor, logprobs_N: Tensor) -> Launched:
        """Makes a step that was computed elsewhere one in progress, which others may follow."""
        self.hosts.reverse()
        host, num = self.hosts[0], len(rows)
        self.drawn[:num] = ids_N
        host.outputs[0, 0, :num].copy_(ids_N, non_blocking=True)
        real_R = host.outputs[0, 1].view(torch.float64)
        real_R[:num].copy_(logprobs_N.double(), non_blocking=True)
        return self.launched(rows, 1, host, None)

    def launched(
        self, rows: np.ndarray, num_steps: int, host: HostBuffers, logits_NV: Tensor | None
    ) -> Launched:
        is_done = None
        if self.cache.device.type == "cuda":
            is_done = torch.cuda.Event()
            is_done.record()
        seats = self.table.num_seated[rows]
        return Launched(rows, seats, num_steps, host.outputs, logits_NV, is_done)

    def fill(
        self,
        host: HostBuffers,
        rows: np.ndarray,
        size: int,
        num_steps: int,
        after: Launched | None = None,
    ) -> bool:
        """Copies the inputs of the steps; returns whether some rows read shared places together."""
        table, block_size, num = self.table, self.cache.block_size, len(rows)
        inputs_KIR = host.inputs.numpy()[:num_steps]
        first_N = table.num_tokens[rows] + (0 if after is None else after.num_steps)
        lengths_KN = first_N + np.arange(num_steps)[:, None]
        is_over_KN = lengths_KN >= table.limit[rows]
        lengths_KN = np.minimum(lengths_KN, table.limit[rows] - 1)
        last_KN = lengths_KN - 1
        places_KN = table.blocks[rows, last_KN // block_size].astype(np.int64) * block_size
        places_KN += last_KN % block_size
        inputs_KIR[:, :, num:size] = 0
        inputs_KIR[:, LENGTHS, num:size] = 1
        inputs_KIR[:, POSITIONS, :num] = last_KN
        inputs_KIR[:, LENGTHS, :num] = lengths_KN
        inputs_KIR[:, PLACES, :num] = np.where(is_over_KN, SCRATCH, places_KN)
        real_KIR = inputs_KIR.view(np.float64)
        real_KIR[:, UNIFORMS, :num] = uniforms(table.seed[rows], lengths_KN)
        real_KIR[:, TEMPERATURES, :num] = table.temperature[rows]
        scratch_slot = len(table.sequences)
        inputs_KIR[:, ROWS, num:size] = scratch_slot
        inputs_KIR[:, ROWS, :num] = np.where(is_over_KN, scratch_slot, rows)
        width = int(table.num_blocks[rows].max())
        inputs_KIR[:, WIDTH, 0] = width
        inputs_KIR[:, IDS, :num] = -1
        inputs_KIR[:, ORIGINS, :num] = np.arange(num)
        if after is None:
            inputs_KIR[0, IDS, :num] = table.tokens[rows, last_KN[0]]
        else:
            place = np.zeros(len(table.sequences), np.int64)
            place[after.rows] = np.arange(len(after.rows))
            inputs_KIR[0, ORIGINS, :num] = place[rows]
        tiles = None if self.grouping is None else self.grouping.tiles(rows, lengths_KN)
        if tiles is not None:
            inputs_KIR[:, COUNTS, :size] = 0
            inputs_KIR[:, SHARED, :num] = tiles.shared
            inputs_KIR[:, FIRSTS, : len(tiles.firsts)] = tiles.firsts
            inputs_KIR[:, COUNTS, : len(tiles.counts)] = tiles.counts
        blocks = host.blocks.numpy()[: size * width].reshape(size, width)
        blocks[:num] = table.blocks[rows, :width]
        blocks[num:] = 0
        self.inputs[:num_steps].copy_(host.inputs[:num_steps], non_blocking=True)
        self.blocks[: size * width].copy_(host.blocks[: size * width], non_blocking=True)
        self.step.zero_()
        return tiles is not None

    def body(self, size: int, *, is_shared: bool) -> Tensor:
        """One step over the static buffers; returns the logits."""
        inputs = self.inputs.index_select(0, self.step)[0]
        known_S = inputs[IDS, :size]
        drawn_S = self.drawn.index_select(0, inputs[ORIGINS, :size])
        ids_S = torch.where(known_S < 0, drawn_S, known_S)
        logits_SV, drawn_S, logprobs_S = self.compute(inputs, ids_S, is_shared=is_shared)
        self.drawn[:size] = drawn_S
        found_2S = torch.stack((drawn_S, logprobs_S.double().view(torch.int64)))
        outputs_K2S = self.outputs[:, :, :size]
        outputs_K2S.copy_(torch.where(self.each_K11 == self.step, found_2S, outputs_K2S))
        self.step += 1
        return logits_SV

    def compute(
        self, inputs: Tensor, ids_S: Tensor, *, is_shared: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns logits, sampled ids and their log-probs."""
        size = len(ids_S)
        positions, lengths, places, uniform, temperature = inputs[POSITIONS:WIDTH, :size]
        width = inputs[WIDTH, :1]
        core: Attend
        if self.strict:
            core = StrictDecode(self.cache, places, self.blocks, width, positions)
        else:
            shared = None
            if is_shared:
                firsts, counts = inputs[FIRSTS : COUNTS + 1, : max_tiles(size)]
                shared = SharedRows(inputs[SHARED, :size], firsts, counts)
            core = DecodeAttend(self.cache, places, self.blocks, width, lengths, shared)
        if self.slots is not None:
            memory = TokenMemory(self.slots, inputs[ROWS, :size], positions)
            core = RememberingAttend(core, memory)
        routes: Routes | None = None if self.cache.routes is None else {}
        hidden_SD = self.model(ids_S, positions, core, routes)
        if routes is not None:
            self.cache.write_routes(places, routes)
        logits_SV = head_logits(self.model, hidden_SD, strict=self.strict)
        drawn_S, logprobs_S = draw_fused(
            logits_SV, uniform.view(torch.float64), temperature.view(torch.float64)
        )
        if self.strict:
            logprobs_S = strict_logprobs(logits_SV, drawn_S, temperature.view(torch.float64))
        return logits_SV, drawn_S, logprobs_S

    def replay(self, size: int, *, is_shared: bool) -> Tensor:
        key = size, is_shared
        if key not in self.graphs:
            self.graphs[key] = self.capture(size, is_shared=is_shared)
        graph, logits_SV = self.graphs[key]
        graph.replay()
        return logits_SV

    def capture(self, size: int, *, is_shared: bool) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Captures a graph. The warm-up computes the step that is then replayed, so what a step
        reads and changes is put back: the counter, the previous ids, and states, for which the
        warm-up uses the scratch slot."""
        device = self.cache.device
        rows = self.inputs[:, ROWS, :size]
        changed = [rows, self.step, self.drawn]
        own = [tensor.clone() for tensor in changed]
        if self.slots is not None:
            rows.fill_(self.slots.scratch)
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            self.body(size, is_shared=is_shared)
        torch.cuda.current_stream(device).wait_stream(side)
        for tensor, before in zip(changed, own, strict=True):
            tensor.copy_(before)
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, self.pool):
            logits_SV = self.body(size, is_shared=is_shared)
        return graph, logits_SV
