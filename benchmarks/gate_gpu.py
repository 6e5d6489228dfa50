"""The gated activation on one GPU: compiled plain torch against the kernels, device times.

    python benchmarks/gate_gpu.py            # dense layers and experts, forward and backward
    python benchmarks/gate_gpu.py --sweep    # numbers of a program at most

Needs torch with CUDA and Triton. Exits 1 when a gradient is wrong, or when the kernels take longer
in backward than what they replace.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from pentad.ops import gated, gated_kernel  # noqa: E402
from pentad_tools.bench.bench_kernels import device_us  # noqa: E402

SHAPES = {
    "Qwen3-0.6B": (16384, 3072, False),
    "Qwen3-4B": (16384, 9728, False),
    "experts of Qwen3-30B-A3B": (32768 * 8, 768, True),
    "wide experts": (16384 * 2, 14336, True),
}
"""Rows, width, whether rows have weights."""


def run_of(has_kernel: bool, is_weighted: bool) -> Callable[[list[Tensor]], Tensor]:
    """Compiled as the blocks are: shapes may change."""

    def run(leaves: list[Tensor]) -> Tensor:
        return gated.weighted_silu_mul(*leaves) if is_weighted else gated.silu_mul(leaves[0])

    compiled = torch.compile(run, dynamic=True)

    def patched(leaves: list[Tensor]) -> Tensor:
        with patch.object(gated, "has_kernel", lambda h: has_kernel):
            result: Tensor = compiled(leaves)
            return result

    return patched


def measure(rows: int, width: int, is_weighted: bool) -> tuple[list[float], list[float], float]:
    """(forward, backward) microseconds of plain torch, those of the kernels, and by how much their
    gradients differ."""
    h = torch.randn(rows, 2 * width, device="cuda").bfloat16().requires_grad_()
    leaves = [h] + [torch.rand(rows, device="cuda").requires_grad_()] * is_weighted
    direction = torch.randn(rows, width, device="cuda").bfloat16()
    times, found = [], []
    for has_kernel in (False, True):
        torch._dynamo.reset()
        run = run_of(has_kernel, is_weighted)

        def train(run: Callable[[list[Tensor]], Tensor] = run) -> tuple[Tensor, ...]:
            return torch.autograd.grad(run(leaves), leaves, direction)

        def score(run: Callable[[list[Tensor]], Tensor] = run) -> None:
            with torch.no_grad():
                run(leaves)

        found.append(train())
        alone = device_us(score, 5, 10)
        times.append([alone, device_us(train, 5, 10) - alone])
    error = max(float((a - b).norm() / b.norm()) for a, b in zip(*found, strict=True))
    return times[0], times[1], error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    if not (torch.cuda.is_available() and gated.HAS_TRITON):
        print("needs a GPU and Triton")
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; us: plain, kernel, TB/s")
    problems = []
    for block in (512, 1024, 2048, 4096) if options.sweep else (gated_kernel.MAX_BLOCK,):
        gated_kernel.MAX_BLOCK = block
        for name, (rows, width, is_weighted) in SHAPES.items():
            plain, kernel, error = measure(rows, width, is_weighted)
            for way, old, new, moved in zip(
                ("forward", "backward"), plain, kernel, (3, 5), strict=True
            ):
                rate = rows * width * moved * 2 / new / 1e6
                print(f"  {block:5d} {name:25s} {way:9s} {old:8.0f} {new:8.0f} {rate:6.2f}")
            print(f"  {'':5s} {'':25s} gradients differ by {error:.1e}")
            if not error < 5e-3 or kernel[1] > plain[1]:
                problems.append(name)
    for problem in problems:
        print(f"FAILED: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
