"""The runner: turns a plan into one forward pass and draws, on the model's device.

It owns the key-value memory and everything that depends on the device; it decides nothing.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pentad.infer.attend import KVCache, PagedAttend
from pentad.infer.sampling import draw, uniforms
from pentad.infer.scheduler import Plan
from pentad.infer.sequence import Table
from pentad.models.decoder import Decoder

MAX_LOGITS = 1 << 26
"""Most logits (rows x vocabulary) held at once."""


class Runner:
    """A model with its cache."""

    def __init__(self, model: Decoder, table: Table, num_blocks: int, block_size: int) -> None:
        self.model = model.requires_grad_(False).eval()
        self.table = table
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = model.head_weight.device
        self.dtype = model.head_weight.dtype
        self.cache: KVCache | None = self.build_cache()

    def sleep(self) -> None:
        """Frees the cache, and on a GPU the weights, which wait in host memory."""
        self.cache = None
        if self.device.type != "cpu":
            self.move_weights(torch.device("cpu"))
            torch.cuda.empty_cache()

    def wake(self) -> None:
        self.move_weights(self.device)
        self.cache = self.build_cache()

    def move_weights(self, device: torch.device) -> None:
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(device)

    def build_cache(self) -> KVCache:
        return KVCache(
            self.model.dims,
            self.num_blocks,
            self.block_size,
            device=self.device,
            dtype=self.dtype,
        )

    @torch.inference_mode()
    def run(self, plan: Plan) -> tuple[np.ndarray, np.ndarray]:
        """Computes the planned tokens; ids and log-probs of the drawn rows."""
        hidden_TD = self.forward(plan)
        if plan.copies:
            sources, targets = np.array(plan.copies, np.int64).T
            assert self.cache is not None
            self.cache.copy_blocks(self.put(sources), self.put(targets))
        last = np.cumsum(plan.counts) - 1
        ids, logprobs = [], []
        step = max(1, MAX_LOGITS // self.model.dims.vocab_size)
        for start in range(0, len(plan.drawn_rows), step):
            part = slice(start, start + step)
            ends, which = np.unique(last[plan.drawn_from[part]], return_inverse=True)
            logits_NV = self.model.logits(hidden_TD.index_select(0, self.put(ends)))
            if len(ends) < len(which) or (np.diff(which) < 0).any():
                logits_NV = logits_NV.index_select(0, self.put(which))
            drawn = self.draw(plan.drawn_rows[part], logits_NV)
            ids.append(drawn[0])
            logprobs.append(drawn[1])
        if not ids:
            return np.zeros(0, np.int64), np.zeros(0, np.float32)
        return np.concatenate(ids), np.concatenate(logprobs)

    def forward(self, plan: Plan) -> Tensor:
        assert self.cache is not None, "the runner is asleep"
        table, size = self.table, self.block_size
        counts = plan.counts
        row_T = np.repeat(plan.rows, counts)
        first = np.cumsum(counts) - counts
        position_T = np.arange(len(row_T)) + np.repeat(plan.starts - first, counts)
        ids_T = table.tokens[row_T, position_T]
        places_T = table.blocks[row_T, position_T // size].astype(np.int64) * size
        places_T += position_T % size
        attend = PagedAttend(
            self.cache, plan.starts, counts, table.blocks[plan.rows], self.put(places_T)
        )
        return self.model(self.put(ids_T), self.put(position_T), attend)

    def draw(self, rows: np.ndarray, logits_NV: Tensor) -> tuple[np.ndarray, np.ndarray]:
        table = self.table
        uniform_N = uniforms(table.seed[rows], table.num_tokens[rows])
        top_k_N = top_p_N = None
        if table.is_truncated[rows].any():
            top_k_N, top_p_N = self.put(table.top_k[rows]), self.put(table.top_p[rows])
        ids_N, logprobs_N = draw(
            logits_NV, self.put(uniform_N), self.put(table.temperature[rows]), top_k_N, top_p_N
        )
        return ids_N.cpu().numpy(), logprobs_N.cpu().numpy()

    def put(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self.device.type == "cpu" else tensor.to(self.device)
