"""Probes of a run under way: whether samplers serve the weights that were published to them.

Where data may be stale, the tokens that are trained cannot tell: their log-probs differ from the
trainer's by right. So each sampler draws a few tokens after a publish, and the learner scores them
before its weights move on. On-policy, the trained tokens themselves are compared; with several
samplers each of them is asked too, since one among many hardly moves the mean.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import numpy as np

from pentad.core.errors import InfraFailure, RunError
from pentad.core.roles import Sampler
from pentad.rl.bounds import Bounds, gap_of
from pentad.trainer.learner_thread import LearnerThread
from pentad.trainer.selftest import draw_probes, probe_differences

log = logging.getLogger(__name__)

INTERVAL = 5
"""Versions from one comparison to the next, as long as all samplers are where they should be; from
a doubt on every version is compared."""
TIMEOUT_S = 60.0
"""A sampler that takes longer is not compared; whether it still serves is others' concern."""


class Prober:
    def __init__(
        self,
        samplers: Sequence[Sampler],
        prompts: Sequence[tuple[int, ...]],
        learner: LearnerThread,
        bounds: Bounds,
        *,
        temperature: float,
        seed: int,
    ) -> None:
        self.samplers = samplers
        self.prompts = prompts
        self.learner = learner
        self.bounds = bounds
        self.temperature = temperature
        self.seed = seed
        self.next_version = INTERVAL

    def is_due(self, version: int) -> bool:
        return version >= self.next_version

    async def probe(self, version: int) -> None:
        """Raises RunError when a sampler has been too far away for too long."""
        gaps = [await self._gap(i, version) for i in range(len(self.samplers))]
        for index, gap in enumerate(gaps):
            if sentence := self.bounds.past_probe(index, gap):
                raise RunError(f"version {version}: {sentence}")
        is_doubted = any(map(self.bounds.is_doubted, range(len(gaps))))
        self.next_version = version + (1 if is_doubted else INTERVAL)

    async def _gap(self, index: int, version: int) -> float | None:
        """The mean difference; None where the sampler did not answer, or has other weights."""
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
        calls = self.learner.calls
        differences = await self.learner.run(lambda: probe_differences(calls, probes))
        return gap_of(differences.astype(np.float64))
