"""Checks that samplers and learner have one policy: the start-up self-test, then probes.

The self-test takes seconds:

1. Packing: sequences scored together and alone get the same log-probs.
2. Weights: samplers have the learner's weights; checked by digest at the publish.
3. Log-probs: the learner gives the tokens of each sampler the same log-probs.
4. With an adapter: other LoRA factors change both sides equally (`check_adapter`). A failed check
stops the run with the reason.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from pentad.core.errors import InfraFailure, RunError, Transient
from pentad.core.quantization import WeightDtype
from pentad.core.roles import Sampler
from pentad.core.seeds import derive_seed
from pentad.core.sizes import EIGHT_BIT_CACHES, CacheDtype
from pentad.core.types import Request, SamplingParams
from pentad.engine.frozen import BASE
from pentad.rl.bounds import Bounds, gap_of
from pentad.runtime.learner_client import LearnerClient

log = logging.getLogger(__name__)

MAX_APART = 0.5
"""Maximum difference of trainer and sampler with an adapter, relative to the adapter's effect. A
sampler that ignores the adapter has 1."""
SHAKES = (1.0, 4.0, 16.0)
"""Strengths of the test's factors. Their effect on log-probs differs between models; if 16-bit
rounding is as large, the next strength is tried."""
PROBE_NEW_TOKENS = 16
PROBE_SAMPLES = 4
NUM_PROBES = 3


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest single and largest mean log-prob difference that rounding can cause."""

    max_difference: float
    mean_difference: float


FLOAT32 = Tolerance(1e-3, 1e-4)
"""Measured on CPU: 2e-6 with models of the demo's size; the margin is for deeper models."""
BFLOAT16 = Tolerance(2.0, 0.1)
"""bf16 has 8 bits of mantissa: unlikely tokens differ by tenths, the mean by hundredths."""
FP8_WEIGHTS = Tolerance(4.0, 0.5)
"""Servers then compute with activations in fp8, too: 3 bits of mantissa. Emulated in float32 for
SmolLM2-135M: 1.7 and 0.16; larger models differ by less."""


def tolerance_of(
    compute_dtype: str,
    *,
    strict: bool = False,
    cache_dtype: CacheDtype = "auto",
    weight_dtype: WeightDtype = "auto",
) -> Tolerance:
    if strict:
        return Tolerance(0.0, 0.0)
    if weight_dtype == "fp8":
        return FP8_WEIGHTS
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
    """Mean absolute log-prob differences to the frozen weights, with random factors."""

    trainer: float
    sampler: float
    apart: float
    """Mean absolute difference between the sampler's and the trainer's log-probs."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A few tokens of a sampler, with the log-probs it reported."""

    ids: list[int]
    """Ids of the prompt and of the sampled tokens."""
    start: int
    """Index of the first sampled token."""
    logprobs: list[float]
    versions: tuple[int, ...]


def score(
    learner: LearnerClient, rows: Sequence[list[int]], tag: str = "actor"
) -> list[np.ndarray]:
    """Returns the learner's log-probs of each row of ids."""
    named = {} if tag == "actor" else {"tag": tag}
    found = learner.call_all("forward", rows=list(rows), **named)
    return [np.asarray(logprobs, dtype=np.float32) for logprobs in found]


def check_packing(
    learner: LearnerClient, rows: Sequence[list[int]], tolerance: Tolerance, interval: int = 1
) -> float:
    """Scores every `interval`-th row alone and compares with its score in a packed batch."""
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


INTERVAL = 5
"""Versions between two comparisons while all samplers agree; after a large difference every version
is compared."""
TIMEOUT_S = 60.0
"""Time limit in seconds; a slower sampler is not compared (liveness is checked elsewhere)."""


@dataclass(eq=False, kw_only=True)
class Prober:
    """Compares the samplers with the learner on a few tokens that they sample, before the first
    step and during a run.

    Log-probs of stale samples differ from the trainer's by design, so they cannot be used. Instead
    each sampler samples a few tokens after a publish, and the learner scores them before its next
    update. On-policy, the trained tokens are compared; several samplers are also probed, because a
    wrong one among many hardly changes the mean.
    """

    samplers: Sequence[Sampler]
    prompts: Sequence[tuple[int, ...]]
    learner: LearnerClient
    temperature: float
    seed: int
    bounds: Bounds | None = None
    """Set if samplers are compared during the run."""
    next_version: int = INTERVAL

    async def draw(self, sampler: Sampler, name: str) -> list[Probe]:
        params = SamplingParams(max_new_tokens=PROBE_NEW_TOKENS, temperature=self.temperature)
        requests = [
            Request(
                id=f"{name}-{p}",
                prompt_ids=prompt,
                params=params,
                seeds=tuple(derive_seed(self.seed, "selftest", p, i) for i in range(PROBE_SAMPLES)),
            )
            for p, prompt in enumerate(self.prompts[:NUM_PROBES])
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

    async def differences(self, probes: Sequence[Probe], tag: str = "actor") -> np.ndarray:
        """Returns the learner's log-probs of the sampled tokens minus the sampler's."""
        rows = [probe.ids for probe in probes]
        scores = await self.learner.run(partial(score, self.learner, rows, tag))
        return np.concatenate(
            [
                said[probe.start :] - np.asarray(probe.logprobs, dtype=np.float32)
                for said, probe in zip(scores, probes, strict=True)
            ]
        )

    async def selftest(
        self,
        weights_digest: str,
        tolerance: Tolerance,
        *,
        stall_s: float | None = None,
        packing: Tolerance | None = None,
    ) -> SelfTest:
        """Runs the self-test. Raises RunError at the first failed check; a sampler without an
        answer for `stall_s` is a transient failure. `packing`: the learner's own tolerance, if it
        is not that of the samplers."""
        probes: list[Probe] = []
        for s, sampler in enumerate(self.samplers):
            try:
                async with asyncio.timeout(stall_s) as limit:
                    probes += await self.draw(sampler, f"selftest-{s}")
            except TimeoutError:
                if not limit.expired():
                    raise
                text = f"self-test: sampler {s} gave no answer for stall_abort_s = {stall_s:g} s"
                raise Transient(text) from None
        given = [probe.ids for probe in probes], packing or tolerance, PROBE_SAMPLES + 1
        packed = await self.learner.run(partial(check_packing, self.learner, *given))
        differences = np.abs(await self.differences(probes))
        largest, mean = float(differences.max()), float(differences.mean())
        if not (largest <= tolerance.max_difference and mean <= tolerance.mean_difference):
            raise RunError(
                f"self-test: log-probs of the same tokens differ between sampler and trainer by "
                f"{largest:.3g} at most and {mean:.3g} in the mean, rounding explains "
                f"{tolerance.max_difference:g} and {tolerance.mean_difference:g}; the sampler does "
                "not run the policy that is trained"
            )
        return SelfTest(packed, largest, mean, weights_digest)

    async def check_adapter(self, publish: Callable[[], Awaitable[object]]) -> AdapterTest:
        """Publishes other adapter factors and checks that the log-probs of samplers and trainer
        change equally. Raises RunError if not; always restores and publishes the original
        factors."""
        try:
            for strength in SHAKES:
                await self.learner.call("shake_adapter", strength=strength)
                await publish()
                probes: list[Probe] = []
                for s, sampler in enumerate(self.samplers):
                    probes += await self.draw(sampler, f"adapter-{s}")
                moved, base = await self.differences(probes), await self.differences(probes, BASE)
                means = (float(np.abs(x).mean()) for x in (moved - base, base, moved))
                trainer, drawn, apart = means
                if is_alike := trainer > 0 and apart <= MAX_APART * trainer:
                    break
        finally:
            await self.learner.call("shake_adapter", strength=0.0)
        await publish()
        if not is_alike:
            raise RunError(
                f"self-test: an adapter moves the trainer's log-probs by {trainer:.3g} and the "
                f"sampler's by {drawn:.3g}, and they are {apart:.3g} apart; the sampler does not "
                "compute with the adapter that is trained"
            )
        return AdapterTest(trainer, drawn, apart)

    def is_due(self, version: int) -> bool:
        return self.bounds is not None and version >= self.next_version

    async def probe(self, version: int) -> None:
        """Raises RunError if a sampler has differed too much for too long."""
        assert self.bounds is not None, "it is due"
        gaps = [await self._gap(i, version) for i in range(len(self.samplers))]
        for index, gap in enumerate(gaps):
            if sentence := self.bounds.past_probe(index, gap):
                raise RunError(f"version {version}: {sentence}")
        is_doubted = any(map(self.bounds.is_doubted, range(len(gaps))))
        self.next_version = version + (1 if is_doubted else INTERVAL)

    async def _gap(self, index: int, version: int) -> float | None:
        """Returns the mean difference; None if the sampler gave no answer or has other weights."""
        sampler = self.samplers[index]
        if sampler.version != version:
            return None
        try:
            async with asyncio.timeout(TIMEOUT_S):
                probes = await self.draw(sampler, f"probe-{version}-{index}")
        except (RunError, InfraFailure, TimeoutError) as failure:
            # The next groups fail too, and are retried on another sampler.
            log.info("sampler %d was not compared at version %d: %s", index, version, failure)
            return None
        if any(held != version for probe in probes for held in probe.versions):
            return None
        return gap_of((await self.differences(probes)).astype(np.float64))
