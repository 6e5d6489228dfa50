"""The router on one GPU: exactness, then launch sizes (`pentad bench router` has the times).

    python benchmarks/router_gpu.py            # checks
    python benchmarks/router_gpu.py --sweep    # rows of a program, warps

Needs torch with CUDA and Triton. Exits 1 when a check fails or the kernels are not TARGET times as
fast as eager torch in each direction.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from pentad.ops import router  # noqa: E402
from pentad.ops.router import RouteRule, fused_route, reference_route  # noqa: E402
from pentad_tools.bench.bench_kernels import SHAPES, both_ways, measure_router  # noqa: E402

TARGET = 5.0
"""Times eager torch, forward and backward each, at the first shape."""


def check(num_tokens: int, num_experts: int, num_chosen: int) -> list[str]:
    """Sentences about what is wrong: choices, weights and gradients against fp64, with ties."""
    problems = []
    for score in ("softmax", "sigmoid"):
        for renormalise in (True, False):
            for is_biased in (False, True):
                rule = RouteRule(num_chosen, score, renormalise)  # type: ignore[arg-type]
                logits = 3 * torch.randn(num_tokens, num_experts, device="cuda")
                bias = 0.1 * torch.randn(num_experts, device="cuda") if is_biased else None
                leaf = logits.clone().requires_grad_()
                weights, chosen = fused_route(leaf, rule, bias)
                direction = torch.randn_like(weights)
                (mine,) = torch.autograd.grad(weights, leaf, direction)
                wide = logits.double().requires_grad_()
                wanted, _ = reference_route(wide, rule, bias, chosen)
                (theirs,) = torch.autograd.grad(wanted, wide, direction.double())
                error = float((weights - wanted).abs().max())
                slope = float((mine - theirs).abs().max())
                coarse = (4 * logits).round() / 4
                same = torch.equal(
                    fused_route(coarse, rule)[1], reference_route(coarse, rule)[1]
                )  # fmt: skip
                name = f"{score}{', renormalised' if renormalise else ''}"
                name += ", biased" if is_biased else ""
                print(f"  {name:32s} weights {error:.1e}  gradient {slope:.1e}  ties {same}")
                if not (error < 1e-5 and slope < 1e-5 and same):
                    problems.append(f"{name} at {num_tokens, num_experts, num_chosen}")
    return problems


def sweep() -> None:
    """Rows of a program and warps, at the first shape."""
    num_tokens, num_experts, num_chosen = SHAPES[0]
    logits = torch.randn(num_tokens, num_experts, device="cuda")
    for block in (2, 4, 8, 16):
        for warps in (1, 2, 4):
            router._launch = lambda _, b=block, w=warps: {"BLOCK": b, "num_warps": w}
            times = both_ways(lambda x: fused_route(x, RouteRule(num_chosen))[0], logits)
            print(f"  rows {block:3d} warps {warps}: {times[0]:6.1f} {times[1]:6.1f} us")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    if not (torch.cuda.is_available() and router.HAS_TRITON):
        print("needs a GPU and Triton")
        return 2
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("Exactness against fp64")
    problems = check(1000, 128, 8) + check(333, 60, 4)
    if options.sweep:
        print("Sweep: forward, backward")
        sweep()
    slow = [x for x in [a / b for a, b in measure_router(*SHAPES[0])] if x < TARGET]
    problems += [f"{x:.1f}x is below {TARGET}x" for x in slow]
    for problem in problems:
        print(f"FAILED: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
