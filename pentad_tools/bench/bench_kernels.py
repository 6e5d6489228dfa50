"""Benchmarks of single operations for `pentad bench`: router, mixture layer, lm head.

Device times are measured on replayed CUDA graphs, so they exclude launch overhead.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pentad.ops.experts import grouped_linear, sort_pairs, sum_rows, take_rows, take_weights
from pentad.ops.gated import weighted_silu_mul
from pentad.ops.logprob import token_logprobs
from pentad.ops.router import RouteRule, fused_route, gate_logits

SHAPES = [(16384, 128, 8), (16384, 256, 8), (32768, 128, 8), (1024, 128, 8)]
"""(tokens, experts, chosen) of the router; scores by softmax, the k largest, renormalised."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number, which later runs compare with."""

    key: str
    value: float
    unit: str


@dataclass(frozen=True, slots=True)
class Line:
    """One output line: a figure, its text, and further figures to store."""

    figure: Figure
    cells: list[str]
    besides: tuple[Figure, ...] = ()


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
    """Times of (forward, backward) in microseconds; backward is the increase with autograd."""
    direction = torch.randn_like(forward(logits.detach()))

    def train() -> None:
        leaf = logits.detach().requires_grad_()
        torch.autograd.grad(forward(leaf), leaf, direction)

    alone = device_us(lambda: forward(logits.detach()))
    return alone, device_us(train) - alone


def eager_route(logits_TE: Tensor, num_chosen: int) -> Tensor:
    """Plain router as in user code; topk does not define the order of ties."""
    weights_Tk, _ = logits_TE.softmax(-1).topk(num_chosen, dim=-1)
    return weights_Tk / weights_Tk.sum(-1, keepdim=True)


def measure_router(num_tokens: int, num_experts: int, num_chosen: int) -> list[list[float]]:
    """[eager, fused] microseconds of forward and backward, without the gate's matrix product."""
    rule = RouteRule(num_chosen)
    logits = torch.randn(num_tokens, num_experts, device="cuda")
    eager = both_ways(lambda x: eager_route(x, num_chosen), logits)
    fused = both_ways(lambda x: fused_route(x, rule)[0], logits)
    return [[old, new] for old, new in zip(eager, fused, strict=True)]


def router_lines() -> list[Line]:
    lines = []
    for num_tokens, num_experts, num_chosen in SHAPES:
        key = f"router T={num_tokens} E={num_experts} k={num_chosen}"
        times = measure_router(num_tokens, num_experts, num_chosen)
        for way, (eager, fused) in zip(("forward", "backward"), times, strict=True):
            cells = [f"{eager:.1f}", f"{fused:.1f}", f"{eager / fused:.1f}"]
            lines.append(Line(Figure(f"{key}, {way}", fused, "us"), cells))
    return lines


def mixture_lines(num_tokens: int = 16384) -> list[Line]:
    """Benchmarks one mixture layer: gate, router, dispatch, experts, sum."""
    width, inner, num_experts, num_chosen = 2048, 768, 128, 8
    rule = RouteRule(num_chosen)

    def weight(*shape: int) -> Tensor:
        return (0.02 * torch.randn(*shape, device="cuda")).to(torch.bfloat16).requires_grad_()

    gate = weight(num_experts, width)
    gate_up, down = weight(num_experts, 2, inner, width), weight(num_experts, width, inner)
    x = torch.randn(num_tokens, width, device="cuda").to(torch.bfloat16).requires_grad_()

    def mixture() -> Tensor:
        weights, chosen = fused_route(gate_logits(x, gate), rule)
        pairs = sort_pairs(chosen, num_experts)
        rows = take_rows(x, pairs)
        h = grouped_linear(rows, gate_up.flatten(1, 2), pairs.ends_E)
        a = weighted_silu_mul(h, take_weights(weights, pairs))
        return sum_rows(grouped_linear(a, down, pairs.ends_E), pairs)

    direction = torch.randn_like(x)
    leaves = (x, gate, gate_up, down)
    with torch.no_grad():
        forward = device_us(mixture, rounds=5, replays=5)
    both = device_us(lambda: torch.autograd.grad(mixture(), leaves, direction), 5, 5)
    flops = 2 * num_tokens * num_chosen * 3 * width * inner
    lines = []
    for way, us, work in (("forward", forward, flops), ("forward and backward", both, 3 * flops)):
        key = f"mixture layer of Qwen3-30B-A3B, T={num_tokens}, {way}"
        lines.append(Line(Figure(key, us, "us"), [f"{us:.0f}", f"{work / us / 1e6:.0f}"]))
    return lines


def head_lines(device: torch.device, num_rounds: int = 3) -> list[Line]:
    """Benchmarks log-probs of all tokens and their gradients, without materialising all logits."""
    is_gpu = device.type == "cuda"
    num_tokens, vocab_size, width = (32768, 151936, 1024) if is_gpu else (1024, 8192, 128)
    dtype = torch.bfloat16 if is_gpu else torch.float32
    hidden = torch.randn(num_tokens, width, device=device, dtype=dtype, requires_grad=True)
    weight = (0.02 * torch.randn(vocab_size, width, device=device)).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab_size, (num_tokens,), device=device)

    def run() -> None:
        logprobs_T, _ = token_logprobs(hidden, weight, labels)
        torch.autograd.grad(logprobs_T.sum(), (hidden, weight))

    run()
    held = 0
    if is_gpu:
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for _ in range(num_rounds):
        run()
    if is_gpu:
        torch.cuda.synchronize()
    ms = (time.perf_counter() - start) / num_rounds * 1e3
    key = f"log-probs T={num_tokens} V={vocab_size} D={width}"
    logits_gib = num_tokens * vocab_size * 4 / 2**30
    if not is_gpu:  # no peak memory on a CPU
        return [Line(Figure(key, ms, "ms"), [f"{ms:.1f}", "", f"{logits_gib:.2f}"])]
    peak = (torch.cuda.max_memory_allocated() - held) / 2**30
    cells = [f"{ms:.1f}", f"{peak:.2f}", f"{logits_gib:.2f}"]
    return [Line(Figure(key, ms, "ms"), cells, (Figure(f"{key}, peak", peak, "GiB"),))]
