"""Decoding on a GPU: one token for each row, as one captured graph per padded batch size.

All inputs of a step travel in one pinned buffer, the block table in a second, ids and log-probs
come back in a third: one wait a step. Buffers stand still, so a graph captured once follows the
batch; padded rows work on the scratch block. Without a GPU (or for models whose forward talks
to the host) the same body runs uncaptured.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from pentad.infer.attend import KVCache
from pentad.infer.draw_kernel import draw_fused
from pentad.infer.sampling import uniforms
from pentad.infer.sequence import Table
from pentad.infer.strict import head_logits, strict_logprobs
from pentad.models.decoder import Decoder
from pentad.models.moe import Routes
from pentad.ops.fused import store
from pentad.ops.invariant_kernels import Tiles, attend
from pentad.ops.paged_decode import paged_decode

IDS, POSITIONS, LENGTHS, PLACES, UNIFORMS, TEMPERATURES, WIDTH = range(7)
"""Rows of the input buffer, int64 each; the two of reals hold their fp64 bits."""


def batch_sizes(max_rows: int) -> Iterator[int]:
    """1, 2, 4, 8, 16, 24, 32, 48, 64, 96...: padding stays below a half of the batch."""
    size = 1
    while size < max_rows:
        yield size
        if size >= 16 and size * 3 // 2 < max_rows:
            yield size * 3 // 2
        size *= 2
    yield max_rows


class DecodeAttend:
    """The attention core of a step of one token per row."""

    def __init__(
        self, cache: KVCache, places_S: Tensor, blocks: Tensor, width: Tensor, lengths_S: Tensor
    ) -> None:
        self.cache = cache
        self.places_S = places_S
        self.blocks = blocks
        self.width = width
        self.lengths_S = lengths_S

    def __call__(
        self, layer: int, q_SHd: Tensor, k_SKd: Tensor, v_SKd: Tensor, window: int | None = None
    ) -> Tensor:
        k_BbKd, v_BbKd = self.cache.k[layer], self.cache.v[layer]
        store(k_BbKd.flatten(0, 1), v_BbKd.flatten(0, 1), self.places_S, k_SKd, v_SKd)
        return paged_decode(q_SHd, k_BbKd, v_BbKd, self.blocks, self.width, self.lengths_S, window)


class StrictDecode:
    """The same by the kernel that training uses: one tile a row."""

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
        self, layer: int, q_SHd: Tensor, k_SKd: Tensor, v_SKd: Tensor, window: int | None = None
    ) -> Tensor:
        k_PKd, v_PKd = self.cache.k[layer].flatten(0, 1), self.cache.v[layer].flatten(0, 1)
        store(k_PKd, v_PKd, self.places_S, k_SKd.contiguous(), v_SKd.contiguous())
        return attend(q_SHd.contiguous(), k_PKd, v_PKd, self.tiles, window)


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
    ) -> None:
        self.model = model
        self.cache = cache
        self.table = table
        self.capture_graphs = capture
        self.strict = strict
        num_rows = len(table.sequences)
        self.sizes = list(batch_sizes(num_rows))
        max_blocks = -(-max_context // cache.block_size)
        device = cache.k.device
        pin = device.type == "cuda"
        self.inputs_host = torch.zeros((7, num_rows), dtype=torch.int64, pin_memory=pin)
        self.blocks_host = torch.zeros(num_rows * max_blocks, dtype=torch.int32, pin_memory=pin)
        self.outputs_host = torch.zeros((2, num_rows), dtype=torch.int64, pin_memory=pin)
        self.inputs = torch.zeros_like(self.inputs_host, device=device)
        self.blocks = torch.zeros_like(self.blocks_host, device=device)
        self.outputs = torch.zeros_like(self.outputs_host, device=device)
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.pool = torch.cuda.graph_pool_handle() if pin else None

    def run(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, Tensor]:
        """Computes the last token of each row; drawn ids, log-probs, and the logits on the device.

        The logits are valid until the next run.
        """
        num = len(rows)
        size = next(size for size in self.sizes if size >= num)
        self.fill(rows, size)
        logits_NV = self.replay(size) if self.capture_graphs else self.body(size)
        self.outputs_host.copy_(self.outputs, non_blocking=True)
        if self.cache.k.device.type == "cuda":
            torch.cuda.current_stream(self.cache.k.device).synchronize()
        out = self.outputs_host.numpy()
        logprobs = out[1].view(np.float64)[:num].astype(np.float32)
        return out[0, :num].copy(), logprobs, logits_NV[:num]

    def fill(self, rows: np.ndarray, size: int) -> None:
        table, block_size, num = self.table, self.cache.block_size, len(rows)
        host = self.inputs_host.numpy()
        lengths = table.num_tokens[rows]
        last = lengths - 1
        host[:, num:size] = 0
        host[IDS, :num] = table.tokens[rows, last]
        host[POSITIONS, :num] = last
        host[LENGTHS, :num] = lengths
        host[LENGTHS, num:size] = 1
        host[PLACES, :num] = table.blocks[rows, last // block_size]
        host[PLACES, :num] = host[PLACES, :num] * block_size + last % block_size
        host[UNIFORMS].view(np.float64)[:num] = uniforms(table.seed[rows], lengths)
        host[TEMPERATURES].view(np.float64)[:num] = table.temperature[rows]
        width = int(table.num_blocks[rows].max())
        host[WIDTH, 0] = width
        blocks = self.blocks_host.numpy()[: size * width].reshape(size, width)
        blocks[:num] = table.blocks[rows, :width]
        blocks[num:] = 0
        self.inputs.copy_(self.inputs_host, non_blocking=True)
        self.blocks[: size * width].copy_(self.blocks_host[: size * width], non_blocking=True)

    def body(self, size: int) -> Tensor:
        """One step over the static buffers; returns the logits."""
        ids, positions, lengths, places, uniform, temperature = self.inputs[:6, :size]
        width = self.inputs[WIDTH, :1]
        core: DecodeAttend | StrictDecode
        if self.strict:
            core = StrictDecode(self.cache, places, self.blocks, width, positions)
        else:
            core = DecodeAttend(self.cache, places, self.blocks, width, lengths)
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

    def replay(self, size: int) -> Tensor:
        if size not in self.graphs:
            self.graphs[size] = self.capture(size)
        graph, logits_SV = self.graphs[size]
        graph.replay()
        return logits_SV

    def capture(self, size: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """The warm-up computes the very step that is then replayed, so it leaves no trace."""
        device = self.cache.k.device
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            self.body(size)
        torch.cuda.current_stream(device).wait_stream(side)
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        # Other threads of this process (a learner) may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            logits_SV = self.body(size)
        return graph, logits_SV
