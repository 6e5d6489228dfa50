"""The router's kernels and the experts on one GPU: exactness, then device time in CUDA graphs.

    python benchmarks/router_gpu.py                        # checks, then tables
    python benchmarks/router_gpu.py --sweep                # rows of a program, warps
    python benchmarks/router_gpu.py --json router.json     # the figures, for baselines

Needs torch with CUDA and Triton. Times are those of a replayed CUDA graph, so launches do not
count; the gate product is not part of the router rows. Exits 1 when a check fails or the kernels
are not TARGET times as fast as eager torch in each direction.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))

from pentad.ops import router  # noqa: E402
from pentad.ops.experts import (  # noqa: E402
    reference_mixture,
    run_experts,
    sort_pairs,
    sum_rows,
    take_rows,
    take_weights,
)
from pentad.ops.router import RouteRule, fused_route, gate_logits, reference_route  # noqa: E402

TARGET = 5.0
"""Times eager torch, forward and backward each."""
SHAPES = [(16384, 128, 8), (16384, 256, 8), (32768, 128, 8), (1024, 128, 8)]
"""(tokens, experts, chosen); the first is the one the target is meant for."""
RULE = "softmax, the k largest, renormalised"


def eager_route(logits_TE: Tensor, rule: RouteRule) -> Tensor:
    """What a user would write; topk leaves ties open."""
    weights_Tk, _ = logits_TE.softmax(-1).topk(rule.num_chosen, dim=-1)
    return weights_Tk / weights_Tk.sum(-1, keepdim=True)


def device_us(run: Callable[[], Any], rounds: int = 20, replays: int = 50) -> float:
    """Median microseconds of one call inside a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / replays * 1000)
    return statistics.median(times)


def both_ways(forward: Callable[[Tensor], Tensor], logits: Tensor) -> tuple[float, float]:
    """(forward, backward) in microseconds; backward is what differentiating adds."""
    direction = torch.randn_like(forward(logits.detach()))

    def train() -> None:
        leaf = logits.detach().requires_grad_()
        torch.autograd.grad(forward(leaf), leaf, direction)

    alone = device_us(lambda: forward(logits.detach()))
    return alone, device_us(train) - alone


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


def router_rows() -> list[dict[str, Any]]:
    rows = []
    for num_tokens, num_experts, num_chosen in SHAPES:
        rule = RouteRule(num_chosen)
        logits = torch.randn(num_tokens, num_experts, device="cuda")
        eager = both_ways(lambda x, r=rule: eager_route(x, r), logits)
        ours = both_ways(lambda x, r=rule: fused_route(x, r)[0], logits)
        size = num_tokens * num_experts * 4
        rows.append(
            {
                "tokens": num_tokens,
                "experts": num_experts,
                "chosen": num_chosen,
                "eager_us": eager,
                "triton_us": ours,
                "speedup": [a / b for a, b in zip(eager, ours, strict=True)],
                "forward_gbps": size / ours[0] / 1000,
            }
        )
        row = rows[-1]
        print(
            f"  T={num_tokens:6d} E={num_experts:4d} k={num_chosen}:"
            f" forward {eager[0]:7.1f} -> {ours[0]:6.1f} us ({row['speedup'][0]:4.1f}x),"
            f" backward {eager[1]:7.1f} -> {ours[1]:6.1f} us ({row['speedup'][1]:4.1f}x),"
            f" {row['forward_gbps']:.0f} GB/s"
        )
    return rows


def sweep() -> None:
    """Rows of a program and warps, at the first shape."""
    num_tokens, num_experts, num_chosen = SHAPES[0]
    logits = torch.randn(num_tokens, num_experts, device="cuda")
    for block in (1, 2, 4, 8, 16, 32):
        for warps in (1, 2, 4, 8):
            router._launch = lambda _, b=block, w=warps: {"BLOCK": b, "num_warps": w}
            times = both_ways(lambda x: fused_route(x, RouteRule(num_chosen))[0], logits)
            print(f"  rows {block:3d} warps {warps}: {times[0]:6.1f} {times[1]:6.1f} us")


def expert_rows(num_tokens: int = 16384) -> list[dict[str, Any]]:
    """The mixture of Qwen3-30B-A3B: gate, router, dispatch, experts, sum; one layer, bf16."""
    width, inner, num_experts, num_chosen = 2048, 768, 128, 8
    rule = RouteRule(num_chosen)
    dtype = torch.bfloat16

    def weight(*shape: int) -> Tensor:
        return (0.02 * torch.randn(*shape, device="cuda")).to(dtype).requires_grad_()

    gate = weight(num_experts, width)
    gate_up, down = weight(num_experts, 2, inner, width), weight(num_experts, width, inner)
    x = torch.randn(num_tokens, width, device="cuda").to(dtype).requires_grad_()

    def mixture() -> Tensor:
        weights, chosen = fused_route(gate_logits(x, gate), rule)
        pairs = sort_pairs(chosen, num_experts)
        rows = take_rows(x, pairs)
        y = run_experts(rows, gate_up, down, pairs.ends_E, take_weights(weights, pairs))
        return sum_rows(y, pairs)

    with torch.no_grad():
        ours = mixture()[:64].float()
        weights, chosen = reference_route(F.linear(x.float(), gate.float()), rule)
        wanted = reference_mixture(
            x[:64].float(), weights[:64], chosen[:64], gate_up.float(), down.float()
        )
        error = float((ours - wanted).abs().max() / wanted.abs().max())
    direction = torch.randn_like(x)
    leaves = (x, gate, gate_up, down)
    with torch.no_grad():
        forward = device_us(mixture, rounds=5, replays=5)
    whole = device_us(lambda: torch.autograd.grad(mixture(), leaves, direction), 5, 5)
    flops = 2 * num_tokens * num_chosen * 3 * width * inner
    row = {
        "tokens": num_tokens,
        "forward_us": forward,
        "both_us": whole,
        "forward_tflops": flops / forward / 1e6,
        "both_tflops": 3 * flops / whole / 1e6,
        "error": error,
    }
    print(
        f"  T={num_tokens}: forward {forward:.0f} us = {row['forward_tflops']:.0f} TFLOP/s,"
        f" with backward {whole:.0f} us = {row['both_tflops']:.0f} TFLOP/s,"
        f" error {error:.1e} of the largest"
    )
    return [row]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not (torch.cuda.is_available() and router.HAS_TRITON):
        print("needs a GPU and Triton")
        return 2
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("Exactness against fp64")
    problems = check(1000, 128, 8) + check(333, 60, 4)
    print(f"Router: {RULE}")
    routers = router_rows()
    print("One mixture layer of Qwen3-30B-A3B")
    experts = expert_rows()
    if options.sweep:
        print("Sweep: forward, backward")
        sweep()
    slow = [x for x in routers[0]["speedup"] if x < TARGET]
    problems += [f"{x:.1f}x is below {TARGET}x" for x in slow]
    if experts[0]["error"] > 0.02:  # a few roundings to 8 bits
        problems.append(f"mixture differs by {experts[0]['error']:.1e}")
    if options.json:
        report = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        options.json.write_text(
            json.dumps({**report, "router": routers, "mixture": experts}, indent=2)
        )
    for problem in problems:
        print(f"FAILED: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
