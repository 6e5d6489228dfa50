"""The start-up self-test: seconds that prove the run is wired as its user thinks.

1. Packed equals unpacked: sequences scored together and alone get the same log-probs.
2. The samplers hold the learner's weights: checked by digest when they were published.
3. Trainer and sampler agree: tokens drawn by each sampler get the same log-probs from the learner.
A failure stops the run with the reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pentad.core.errors import RunError
from pentad.core.roles import Learner, Sampler
from pentad.core.seeds import derive_seed
from pentad.core.types import Request, Row, SamplingParams

PROBE_NEW_TOKENS = 16
PROBE_SAMPLES = 4
NUM_PROBES = 3


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest difference of a log-prob, and largest mean, that rounding explains."""

    max_difference: float
    mean_difference: float


FLOAT32 = Tolerance(1e-3, 1e-4)
"""Measured on CPU: 2e-6 on models of the demo's size; the margin is for deep ones."""
BFLOAT16 = Tolerance(2.0, 0.1)
"""bf16 has 8 bits of mantissa: single unlikely tokens differ by tenths, the mean by hundredths."""


def tolerance_of(compute_dtype: str, *, strict: bool = False) -> Tolerance:
    if strict:
        return Tolerance(0.0, 0.0)
    return FLOAT32 if compute_dtype in ("float32", "float64") else BFLOAT16


@dataclass(frozen=True, slots=True)
class SelfTest:
    """What was measured; goes into the manifest."""

    packed_max_difference: float
    sampler_max_difference: float
    sampler_mean_difference: float
    weights_digest: str


@dataclass(frozen=True, slots=True)
class Probe:
    """A few tokens of a sampler, with the log-probs it reported."""

    row: Row
    start: int
    """Where they begin in the row."""
    logprobs: Tensor
    versions: tuple[int, ...]


async def draw_probes(
    sampler: Sampler,
    prompts: Sequence[tuple[int, ...]],
    name: str,
    *,
    temperature: float,
    seed: int,
) -> list[Probe]:
    params = SamplingParams(max_new_tokens=PROBE_NEW_TOKENS, temperature=temperature)
    requests = [
        Request(
            id=f"{name}-{p}",
            prompt_ids=prompt,
            params=params,
            seeds=tuple(derive_seed(seed, "selftest", p, i) for i in range(PROBE_SAMPLES)),
        )
        for p, prompt in enumerate(prompts[:NUM_PROBES])
    ]
    answers = await asyncio.gather(*(sampler.generate(request) for request in requests))
    return [
        Probe(
            Row(torch.tensor([*request.prompt_ids, *generation.ids]), {}),
            len(request.prompt_ids),
            torch.tensor(generation.logprobs),
            tuple(generation.versions),
        )
        for request, generations in zip(requests, answers, strict=True)
        for generation in generations
    ]


def probe_differences(learner: Learner, probes: Sequence[Probe]) -> Tensor:
    """The learner's log-probs of the drawn tokens less those reported."""
    outputs = learner.forward([probe.row for probe in probes])
    return torch.cat(
        [
            output["logprobs"].float().cpu()[probe.start :] - probe.logprobs
            for output, probe in zip(outputs, probes, strict=True)
        ]
    )


async def run_selftest(
    learner: Learner,
    samplers: Sequence[Sampler],
    prompts: Sequence[tuple[int, ...]],
    *,
    temperature: float,
    weights_digest: str,
    tolerance: Tolerance,
    seed: int,
) -> SelfTest:
    """Raises RunError on the first thing that does not hold."""
    probes: list[Probe] = []
    for s, sampler in enumerate(samplers):
        probes += await draw_probes(
            sampler, prompts, f"selftest-{s}", temperature=temperature, seed=seed
        )
    rows = [probe.row for probe in probes]
    packed = check_packing(learner, rows[:: PROBE_SAMPLES + 1], rows, tolerance)
    differences = probe_differences(learner, probes).abs()
    largest, mean = float(differences.max()), float(differences.mean())
    if not (largest <= tolerance.max_difference and mean <= tolerance.mean_difference):
        raise RunError(
            f"self-test: log-probs of the same tokens differ between sampler and trainer by "
            f"{largest:.3g} at most and {mean:.3g} in the mean, rounding explains "
            f"{tolerance.max_difference:g} and {tolerance.mean_difference:g}; the sampler does not "
            "run the policy that is trained"
        )
    return SelfTest(packed, largest, mean, weights_digest)


def check_packing(
    learner: Learner, some: Sequence[Row], rows: Sequence[Row], tolerance: Tolerance
) -> float:
    """Scores some of the rows alone and holds that against their scores among all of them."""
    worst = 0.0
    scores = {
        id(row): out["logprobs"] for row, out in zip(rows, learner.forward(rows), strict=True)
    }
    for row in some:
        (alone,) = learner.forward([row])
        difference = float((alone["logprobs"] - scores[id(row)]).abs().max())
        worst = max(worst, difference)
        if not difference <= tolerance.max_difference:
            raise RunError(
                f"self-test: a sequence of {len(row.ids)} tokens gets log-probs in a packed batch "
                f"that differ by {difference:.3g} from those it gets alone, rounding explains "
                f"{tolerance.max_difference:g}; packed neighbours leak into each other"
            )
    return worst
