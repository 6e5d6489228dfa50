"""Proof that samplers and learner hold one policy: the start-up self-test, and probes afterwards.

The self-test takes seconds:

1. Packed equals unpacked: sequences scored together and alone get the same log-probs.
2. The samplers hold the learner's weights: checked by digest when they were published.
3. Trainer and sampler agree: the learner gives tokens of each sampler the same log-probs.
4. With frozen weights: other factors change both sides equally (`check_adapter`).
A failure stops the run with the reason.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from pentad.core.errors import InfraFailure, RunError, Transient
from pentad.core.roles import Sampler
from pentad.core.seeds import derive_seed
from pentad.core.sizes import EIGHT_BIT_CACHES, CacheDtype
from pentad.core.types import Request, SamplingParams
from pentad.engine.frozen import BASE
from pentad.rl.bounds import Bounds, gap_of
from pentad.trainer.learner_client import LearnerClient

MAX_APART = 0.5
"""Largest difference of trainer and sampler with an adapter, relative to the adapter's effect. A
sampler that ignores the adapter has 1."""
SHAKES = (1.0, 4.0, 16.0)
"""Strengths of the test's factors. Their effect on a log-prob differs between models; if 16-bit
rounding is as large, the next strength is tried."""
PROBE_NEW_TOKENS = 16
PROBE_SAMPLES = 4
NUM_PROBES = 3


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest difference of a log-prob, and largest mean difference, that rounding can cause."""

    max_difference: float
    mean_difference: float


FLOAT32 = Tolerance(1e-3, 1e-4)
"""Measured on CPU: 2e-6 on models of the demo's size; the margin is for deep ones."""
BFLOAT16 = Tolerance(2.0, 0.1)
"""bf16 has 8 bits of mantissa: single unlikely tokens differ by tenths, the mean by hundredths."""


def tolerance_of(
    compute_dtype: str, *, strict: bool = False, cache_dtype: CacheDtype = "auto"
) -> Tolerance:
    if strict:
        return Tolerance(0.0, 0.0)
    is_wide = compute_dtype in ("float32", "float64") and cache_dtype not in EIGHT_BIT_CACHES
    return FLOAT32 if is_wide else BFLOAT16


@dataclass(frozen=True, slots=True)
class SelfTest:
    """The measurements of the self-test, for the manifest."""

    packed_max_difference: float
    sampler_max_difference: float
    sampler_mean_difference: float
    weights_digest: str


@dataclass(frozen=True, slots=True)
class AdapterTest:
    """Mean distance of log-probs from those of the frozen weights, with random factors."""

    trainer: float
    sampler: float
    apart: float
    """Mean distance of the sampler's log-probs from the trainer's."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A few tokens of a sampler, with the log-probs it reported."""

    ids: list[int]
    """The ids after their prompt."""
    start: int
    """Where they begin."""
    logprobs: list[float]
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
            [*request.prompt_ids, *generation.ids],
            len(request.prompt_ids),
            generation.logprobs,
            tuple(generation.versions),
        )
        for request, generations in zip(requests, answers, strict=True)
        for generation in generations
    ]


def score(
    learner: LearnerClient, rows: Sequence[list[int]], tag: str = "actor"
) -> list[np.ndarray]:
    """The learner's log-probs of each row of ids."""
    named = {} if tag == "actor" else {"tag": tag}
    found = learner.call_all("forward", rows=list(rows), **named)
    return [np.asarray(logprobs, dtype=np.float32) for logprobs in found]


def probe_differences(
    learner: LearnerClient, probes: Sequence[Probe], tag: str = "actor"
) -> np.ndarray:
    """The learner's log-probs of the sampled tokens minus the sampler's."""
    scores = score(learner, [probe.ids for probe in probes], tag)
    return np.concatenate(
        [
            said[probe.start :] - np.asarray(probe.logprobs, dtype=np.float32)
            for said, probe in zip(scores, probes, strict=True)
        ]
    )


async def run_selftest(
    learner: LearnerClient,
    samplers: Sequence[Sampler],
    prompts: Sequence[tuple[int, ...]],
    *,
    temperature: float,
    weights_digest: str,
    tolerance: Tolerance,
    seed: int,
    stall_s: float | None = None,
) -> SelfTest:
    """Raises RunError at the first failed check; a sampler that gives no answer for `stall_s`
    counts as a transient failure."""
    probes: list[Probe] = []
    for s, sampler in enumerate(samplers):
        drawing = draw_probes(sampler, prompts, f"selftest-{s}", temperature=temperature, seed=seed)
        try:
            async with asyncio.timeout(stall_s) as limit:
                probes += await drawing
        except TimeoutError:
            if not limit.expired():
                raise
            text = f"self-test: sampler {s} gave no answer for stall_abort_s = {stall_s:g} s"
            raise Transient(text) from None
    rows = [probe.ids for probe in probes]
    packed = await learner.run(lambda: check_packing(learner, rows, tolerance, PROBE_SAMPLES + 1))
    differences = np.abs(await learner.run(lambda: probe_differences(learner, probes)))
    largest, mean = float(differences.max()), float(differences.mean())
    if not (largest <= tolerance.max_difference and mean <= tolerance.mean_difference):
        raise RunError(
            f"self-test: log-probs of the same tokens differ between sampler and trainer by "
            f"{largest:.3g} at most and {mean:.3g} in the mean, rounding explains "
            f"{tolerance.max_difference:g} and {tolerance.mean_difference:g}; the sampler does not "
            "run the policy that is trained"
        )
    return SelfTest(packed, largest, mean, weights_digest)


async def check_adapter(
    learner: LearnerClient,
    samplers: Sequence[Sampler],
    prompts: Sequence[tuple[int, ...]],
    publish: Callable[[], Awaitable[object]],
    *,
    temperature: float,
    seed: int,
) -> AdapterTest:
    """Checks that samplers and trainer move away from the frozen weights equally after a publish of
    other factors. RunError if one of them does not; the original factors are always restored and
    published."""
    try:
        for strength in SHAKES:
            await learner.call("shake_adapter", strength=strength)
            await publish()
            probes: list[Probe] = []
            for s, sampler in enumerate(samplers):
                probes += await draw_probes(
                    sampler, prompts, f"adapter-{s}", temperature=temperature, seed=seed
                )
            moved = await learner.run(partial(probe_differences, learner, probes))
            base = await learner.run(partial(probe_differences, learner, probes, BASE))
            trainer, drawn, apart = (float(np.abs(x).mean()) for x in (moved - base, base, moved))
            if is_alike := trainer > 0 and apart <= MAX_APART * trainer:
                break
    finally:
        await learner.call("shake_adapter", strength=0.0)
    await publish()
    if not is_alike:
        raise RunError(
            f"self-test: an adapter moves the trainer's log-probs by {trainer:.3g} and the "
            f"sampler's by {drawn:.3g}, and they are {apart:.3g} apart; the sampler does not "
            "compute with the adapter that is trained"
        )
    return AdapterTest(trainer, drawn, apart)


def check_packing(
    learner: LearnerClient, rows: Sequence[list[int]], tolerance: Tolerance, interval: int = 1
) -> float:
    """Scores every `interval`-th row alone and compares it with its score among all rows."""
    worst = 0.0
    for row, among in list(zip(rows, score(learner, rows), strict=True))[::interval]:
        (alone,) = score(learner, [row])
        difference = float(np.abs(alone - among).max())
        worst = max(worst, difference)
        if not difference <= tolerance.max_difference:
            raise RunError(
                f"self-test: a sequence of {len(row)} tokens gets log-probs in a packed batch "
                f"that differ by {difference:.3g} from those it gets alone, rounding explains "
                f"{tolerance.max_difference:g}; packed neighbours leak into each other"
            )
    return worst


log = logging.getLogger(__name__)

INTERVAL = 5
"""Versions between two comparisons while all samplers agree; after a doubtful one every version is
compared."""
TIMEOUT_S = 60.0
"""A slower sampler is not compared; whether it still serves is checked elsewhere."""


@dataclass(eq=False, kw_only=True)
class Prober:
    """Probes during a run: whether samplers serve the weights that were published to them.

    With stale data the trained tokens cannot show it: their log-probs rightly differ from the
    trainer's. So each sampler samples a few tokens after a publish, and the learner scores them
    before its next update. On-policy, the trained tokens themselves are compared; with several
    samplers each is probed too, because one among many hardly changes the mean.
    """

    samplers: Sequence[Sampler]
    prompts: Sequence[tuple[int, ...]]
    learner: LearnerClient
    bounds: Bounds
    temperature: float
    seed: int
    next_version: int = INTERVAL

    def is_due(self, version: int) -> bool:
        return version >= self.next_version

    async def probe(self, version: int) -> None:
        """Raises RunError if a sampler has differed too much for too long."""
        gaps = [await self._gap(i, version) for i in range(len(self.samplers))]
        for index, gap in enumerate(gaps):
            if sentence := self.bounds.past_probe(index, gap):
                raise RunError(f"version {version}: {sentence}")
        is_doubted = any(map(self.bounds.is_doubted, range(len(gaps))))
        self.next_version = version + (1 if is_doubted else INTERVAL)

    async def _gap(self, index: int, version: int) -> float | None:
        """The mean difference; None if the sampler did not answer, or has other weights."""
        sampler = self.samplers[index]
        if sampler.version != version:
            return None
        try:
            async with asyncio.timeout(TIMEOUT_S):
                probes = await draw_probes(
                    sampler,
                    self.prompts,
                    f"probe-{version}-{index}",
                    temperature=self.temperature,
                    seed=self.seed,
                )
        except (RunError, InfraFailure, TimeoutError) as failure:
            # The next groups meet the same failure, and are tried again elsewhere.
            log.info("sampler %d was not compared at version %d: %s", index, version, failure)
            return None
        if any(held != version for probe in probes for held in probe.versions):
            return None
        learner = self.learner
        differences = await learner.run(lambda: probe_differences(learner, probes))
        return gap_of(differences.astype(np.float64))
