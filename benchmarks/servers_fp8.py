"""Weights in fp8 on a real server, asked of one by `servers_gpu.py`: what it holds, how far its
log-probs are from the trainer's, publish, speed.

An answer is compared with three policies: the weights as trained, the same weights rounded to fp8
(the server also rounds activations), and other weights.
"""

from __future__ import annotations

import asyncio
import re
import statistics
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sampler_load import forced, random_model, requests
from servers_contract import DRAWING_S, Policies, Report, ask, compare_held

from pentad.core.dims import ModelDims
from pentad.core.errors import InfraFailure
from pentad.core.types import Generation, Request
from pentad.models.hf_weights import install_hf
from pentad.ops.digest import digest_of
from pentad.samplers.server_sampler import ServerSampler
from pentad.weights.block_fp8 import dequantised, quantised
from pentad.weights.dequantize import SCALES

KERNELS = re.compile(r"fp8|deep.?gemm|kernel|backend|quantiz", re.IGNORECASE)
SHARED = 0.5
"""Largest difference to the trained weights, as a share of that to other weights."""


class Rounded(Policies):
    """Two sets of weights, and each as rounded to fp8."""

    def __init__(self, dims: ModelDims) -> None:
        super().__init__(dims)
        self.rounded = [random_model(dims, 9) for _ in self.models]
        for model, pairs in zip(self.rounded, self.pairs, strict=True):
            install_hf(model, list(dequantised(quantised(pairs), torch.bfloat16)))

    def gaps(self, which: int, request: Request, drawn: Generation, part: slice) -> list[float]:
        """Mean differences to the trained weights, to the rounded ones, to the others."""
        models = self.models[which], self.rounded[which], self.models[1 - which]
        said = torch.tensor(drawn.logprobs)[part]
        return [float((said - forced(m, request, drawn)[part]).abs().mean()) for m in models]

    def compared(self, figures: list[list[float]]) -> str:
        trained, rounded, other = (statistics.mean(column) for column in zip(*figures, strict=True))
        told = f"mean |log-prob difference| {trained:.4f} to the trained weights, {rounded:.4f} to "
        told += f"these in fp8, {other:.2f} to others"
        assert max(f[0] for f in figures) < SHARED * min(f[2] for f in figures), told
        return told


def flipped(tensor: torch.Tensor) -> torch.Tensor:
    """Its rows in reverse."""
    return tensor.view(torch.uint8).flip(0).view(tensor.dtype)


def kernels_of(log: Path) -> list[str]:
    """What the server's log says of its kernels, each line once."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    found = [line.partition("] ")[2][:200] or line[:200] for line in lines if KERNELS.search(line)]
    return list(dict.fromkeys(line for line in found if "config:" not in line))[:30]


async def fp8(kind: str, sampler: ServerSampler, two: Rounded, log: Path, report: Report) -> None:
    dialect: Any = sampler.dialect
    sent = [list(quantised(pairs)) for pairs in two.pairs]

    async def first() -> str:
        began = time.perf_counter()
        receipt = await sampler.install(0, two.pairs[0])
        seconds = time.perf_counter() - began
        assert receipt.digest == digest_of(two.pairs[0]).hex()
        sizes = [sum(t.nbytes for _, t in pairs) / 1e6 for pairs in (two.pairs[0], sent[0])]
        scales = sum(name.endswith(SCALES) for name, _ in sent[0])
        return (
            f"{len(sent[0])} tensors, {scales} of them scales, installed and compared as held in "
            f"{seconds:.2f} s; {sizes[0]:.0f} MB are {sizes[1]:.0f} MB, {receipt.num_bytes} sent"
        )

    async def same() -> str:
        request = ask("fp8", 8, new=128)
        answers = await sampler.generate(request)
        return two.compared([two.gaps(0, request, g, slice(None)) for g in answers])

    async def damaged() -> str:
        """A matrix, then scales, are others than those published, and must be found."""
        told = []
        for ending in ("q_proj.weight", "down_proj.weight" + SCALES):
            name = next(n for n, _ in sent[0] if n.endswith(ending))
            bad = [(n, flipped(t) if n == name else t) for n, t in sent[0]]
            await dialect.pause()
            await dialect.load_tensors(0, bad)
            try:
                await compare_held(sampler, sent[0])
            except InfraFailure as failure:
                found = str(failure).partition(": ")[2].split(" has ")[0]
            else:
                raise AssertionError(f"{name} was replaced and not found")
            await dialect.load_tensors(0, sent[0])
            await compare_held(sampler, sent[0])
            await dialect.resume()
            told.append(f"replaced {name}, found in {found}")
        return "; ".join(told)

    async def under_way() -> str:
        request = ask("moved", 2, new=2000)
        task = asyncio.create_task(sampler.generate(request))
        await asyncio.sleep(DRAWING_S)
        await sampler.install(1, two.pairs[1])
        figures, old = [], []
        for g in await task:
            old.append(g.versions.count(0))
            assert set(g.versions) == {0, 1} and len(g.ids) == 2000, old
            figures.append(two.gaps(0, request, g, slice(0, old[-1])))
            figures.append(two.gaps(1, request, g, slice(old[-1], None)))
        return f"{old} of 2000 tokens are old; {two.compared(figures)}"

    async def publish() -> str:
        seconds = []
        for number in range(6):
            began = time.perf_counter()
            await sampler.install(2 + number, two.pairs[number % 2])
            seconds.append(time.perf_counter() - began)
        torch.cuda.synchronize()
        began = time.perf_counter()
        list(quantised(two.pairs[0]))
        torch.cuda.synchronize()
        alone = time.perf_counter() - began
        request = ask("again", 4)
        answers = await sampler.generate(request)
        told = two.compared([two.gaps(1, request, g, slice(None)) for g in answers])
        return (
            f"publish by ipc, median of 6 {statistics.median(seconds):.3f} s, of it quantising "
            f"{alone:.3f} s; {told}"
        )

    async def said() -> str:
        return "\n    ".join(["in its log:", *kernels_of(log)])

    await report.part(kind, "fp8: kernels", said)
    await report.part(kind, "fp8: weights as held", first)
    await report.part(kind, "fp8: log-probs", same)
    await report.part(kind, "fp8: weights that are not as published", damaged)
    await report.part(kind, "fp8: install with answers under way", under_way)
    await report.part(kind, "fp8: publish", publish)
    await speeds(kind, sampler, report)


async def speeds(kind: str, sampler: ServerSampler, report: Report) -> None:
    for num in (256, 1024):
        await report.part(kind, f"{num} requests of 128 + 256", partial(speed, sampler, num), 120)


async def speed(sampler: ServerSampler, num: int) -> str:
    rates = []
    for turn in range(2):
        load = [replace(r, id=f"speed-{num}-{turn}-{r.id}") for r in requests(num)]
        began = time.perf_counter()
        results = await asyncio.gather(*(sampler.generate(r) for r in load))
        tokens = sum(len(g.ids) for answers in results for g in answers)
        rates.append(tokens / (time.perf_counter() - began))
    return f"{rates[-1]:.0f} tok/s (first {rates[0]:.0f})"
