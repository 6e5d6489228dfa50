"""What merging an adapter into bfloat16 weights loses: the table of docs/lora.md.

`python scripts/merge_table.py` merges factors after some steps of Adam's size, all in one
direction, which is the best case: B moves by the learning rate each step, A with it.
"""

from __future__ import annotations

import torch

from pentad.weights.merge import MergeLoss, merge_weight

SIZE, RANK, ALPHA, STD = 2048, 32, 32.0, 0.02
RATES, STEPS = (1e-5, 1e-4), (1, 10, 100, 1000)


def factors(lr: float, steps: int, size: int = SIZE) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B after so many steps of which each moves every number by the learning rate."""
    generator = torch.Generator().manual_seed(1)
    bound = size**-0.5
    a = torch.empty(RANK, size).uniform_(-bound, bound, generator=generator)
    signs = [
        torch.randn(shape, generator=generator).sign() for shape in ((RANK, size), (size, RANK))
    ]
    return a + lr * steps * signs[0], lr * steps * signs[1]


def loss_after(lr: float, steps: int, size: int = SIZE) -> MergeLoss:
    generator = torch.Generator().manual_seed(2)
    weight = (STD * torch.randn(size, size, generator=generator)).bfloat16()
    loss = MergeLoss("bfloat16")
    merge_weight(weight, factors(lr, steps, size), ALPHA / RANK, torch.bfloat16, loss)
    return loss


def table() -> str:
    lines = ["| lr | " + " | ".join(f"{n:,} steps" for n in STEPS) + " |"]
    lines.append("|---" * (len(STEPS) + 1) + "|")
    for lr in RATES:
        found = [loss_after(lr, steps) for steps in STEPS]
        cells = [f"{one.lost:.1%} lost, {one.changed:.1%} changed" for one in found]
        lines.append(f"| {lr:.0e} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
