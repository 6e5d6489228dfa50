"""What every rank of a scorer runs: a frozen model that writes its log-probs of groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pentad.config.schema import Config
from pentad.core.types import Prompt, Row
from pentad.data.store import GroupStore, open_store
from pentad.engine.engine import Engine
from pentad.runtime.rank import Rank
from pentad.trainer.learners import build_scorer
from pentad.trainer.update import column_of, on_host, samples_of


class ScorerService:
    """Holds no state: started again, it gives the same numbers."""

    mild: frozenset[str] = frozenset()

    def __init__(self, config: Config, rank: Rank, device: torch.device, role: str) -> None:
        self.config = config
        self.rank = rank
        self.device = device
        self.role = role
        self.store: GroupStore | None = None

    def build(self, max_row_tokens: int, weights: str | None = None) -> None:
        """The model, also in the place of an earlier one; the number follows from the data."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # of the thread that makes all calls
        self.engine: Engine | None = None  # a model at a time
        folder = None if weights is None else Path(weights)
        self.engine = build_scorer(
            self.config, self.role, max_row_tokens, device=self.device, weights=folder
        )

    def open_store(self, address: dict[str, Any]) -> None:
        """Where the groups are; a score does not ask for their prompts."""
        self.store = open_store(address, lambda gid: Prompt(gid, (), {}))

    def score(self, gids: list[int]) -> None:
        """Writes the column of these groups."""
        assert self.store is not None and self.engine is not None, "it is built and opened first"
        groups = self.store.get(gids)
        rows = [Row(torch.from_numpy(sample.ids), {}) for sample in samples_of(groups)]
        column = on_host([output["logprobs"] for output in self.engine.forward(rows)])
        for group in groups if self.rank.rank == 0 else ():
            own, column = column[: len(group.samples)], column[len(group.samples) :]
            self.store.write(group.gid, group.attempt, {column_of(self.role): own})

    def close(self, *, is_failed: bool) -> None:
        """The store is that of the run where both are one process."""
        if self.store is not None and self.store.address["kind"] != "memory":
            self.store.close()
