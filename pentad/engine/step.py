"""What an optimizer step has gathered between `begin_step` and `end_step`."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True)
class OpenStep:
    loss_sum: float = 0.0
    count: float = 0.0
    num_tokens: int = 0
    num_microbatches: int = 0
    is_complete: bool = False
    """Whether the last rows were added."""

    def add(
        self,
        loss_sum: float,
        count: float,
        num_tokens: int,
        num_microbatches: int,
        *,
        is_last: bool,
    ) -> None:
        self.loss_sum += loss_sum
        self.count += count
        self.num_tokens += num_tokens
        self.num_microbatches += num_microbatches
        self.is_complete = is_last

    def why_skipped(self, norm: float) -> str:
        """Empty when the weights may move."""
        if self.count == 0:
            return "nothing to train: the counts of all rows sum to 0"
        if self.count < 0:
            return f"the counts of all rows sum to {self.count}, which is negative"
        if not math.isfinite(norm):
            return f"the gradient is not finite (norm {norm}, loss sum {self.loss_sum})"
        if not math.isfinite(self.loss_sum):
            return f"the loss is not finite (sum {self.loss_sum}, norm of the gradient {norm})"
        return ""
