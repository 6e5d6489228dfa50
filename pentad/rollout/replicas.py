"""The samplers of a run: which one takes a group, which ones are in doubt, and what each answers.

A replica that fails is suspect: it gets no work until its health check passes. With one replica
and no failure nothing here depends on time.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

from pentad.core.errors import GivenUp, InfraFailure, UserError, is_cancelled
from pentad.core.roles import Sampler
from pentad.core.seeds import derive_seed
from pentad.core.types import Generation, Prompt, Request
from pentad.rollout.checks import Drawn, check_generations
from pentad.runtime.awake import awake_s

log = logging.getLogger(__name__)

HEALTH_TIMEOUT_S = 10.0
ABORT_TIMEOUT_S = 5.0
MAX_BACKOFF_S = 30.0

_request_numbers = itertools.count()
"""Shared by all executors of the process: two that use one sampler never use one id."""


@dataclass(slots=True, eq=False)
class Replica:
    """One sampler and how far it is trusted."""

    name: str
    sampler: Sampler
    load: int = 0
    """Samples given to it and not yet back."""
    last_error: str | None = None
    """Why it is suspect; None when it is trusted."""
    num_failures: int = 0
    """Since it last answered well."""
    probe: asyncio.Task[bool] | None = None

    def fail(self, reason: str) -> None:
        self.last_error = reason
        self.num_failures += 1

    async def is_healthy(self) -> bool:
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                await self.sampler.health()
        except Exception as failure:
            self.fail(f"{type(failure).__name__}: {failure}")
            return False
        self.last_error = None
        return True


class Fleet:
    """The replicas of a run."""

    def __init__(
        self, samplers: Mapping[str, Sampler], patience_s: float, backoff_s: float
    ) -> None:
        self.replicas = {name: Replica(name, sampler) for name, sampler in samplers.items()}
        self.patience_s = patience_s
        self.backoff_s = backoff_s

    async def pick(self, prompt: Prompt, num_samples: int) -> Replica:
        """Reserves the prompt's own replica, where its prefix may be cached, or an idler one.

        The caller gives the load back.
        """
        deadline = awake_s() + self.patience_s
        while True:
            trusted = [r for r in self.replicas.values() if r.last_error is None]
            self._probe_suspects(at_once=not trusted)
            if trusted:
                least = min(trusted, key=lambda r: r.load)
                home = least
                if len(trusted) > 1:
                    home = max(trusted, key=lambda r: derive_seed(r.name, *prompt.ids))
                picked = home if home.load <= least.load + num_samples else least
                picked.load += num_samples
                return picked
            await self._next_probe(deadline)

    def _probe_suspects(self, *, at_once: bool) -> None:
        for replica in self.replicas.values():
            if replica.last_error is not None and replica.probe is None:
                replica.probe = asyncio.create_task(self._probe(replica, at_once=at_once))

    async def _probe(self, replica: Replica, *, at_once: bool) -> bool:
        """Asks a suspect for its health; after the first time it is left alone for a while."""
        if not at_once or replica.num_failures > 1:
            pause_s = self.backoff_s * 2 ** min(replica.num_failures - 1, 10)
            await asyncio.sleep(min(MAX_BACKOFF_S, pause_s))
        healthy = await replica.is_healthy()
        replica.probe = None
        return healthy

    async def _next_probe(self, deadline: float) -> None:
        """Waits until a replica may be well again."""
        left_s = deadline - awake_s()
        if left_s <= 0:
            reasons = [f"{r.name}: {r.last_error}" for r in self.replicas.values()]
            raise InfraFailure(f"no replica can serve ({'; '.join(reasons)})")
        probes = [r.probe for r in self.replicas.values() if r.probe is not None]
        await asyncio.wait(probes, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)

    def close(self) -> None:
        for replica in self.replicas.values():
            if replica.probe is not None:
                replica.probe.cancel()


class CheckedSampler:
    """One replica as a workflow sees it for one group: answers checked, abandoned work aborted."""

    def __init__(self, replica: Replica, vocab_size: int) -> None:
        self.replica = replica
        self.vocab_size = vocab_size
        self.drawn = Drawn()
        self.was_waiting = False
        """Whether an answer was outstanding when the group was cancelled."""

    async def generate(self, request: Request) -> list[Generation]:
        request = replace(request, id=f"{self.replica.name}-{next(_request_numbers)}")
        replica = self.replica
        task = asyncio.ensure_future(replica.sampler.generate(request))
        try:
            answers = await asyncio.shield(task)
            check_generations(request, answers, self.vocab_size)
        except asyncio.CancelledError:
            await self._abort(request.id, task)
            if is_cancelled():
                self.was_waiting = True
                raise
            raise InfraFailure(f"replica {replica.name} dropped the request") from None
        except (UserError, InfraFailure, GivenUp):
            raise
        except Exception as failure:
            raise InfraFailure(f"{type(failure).__name__}: {failure}") from failure
        self.drawn.add(request, answers)
        return answers

    async def _abort(self, request_id: str, task: asyncio.Task[list[Generation]]) -> None:
        """Stops the work, not only the waiting."""
        sampler = self.replica.sampler
        try:
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                if "abort" in sampler.capabilities:
                    await sampler.abort(request_id)
        except Exception as failure:
            self.replica.fail(f"abort failed: {type(failure).__name__}: {failure}")
            log.warning("%s: could not abort %s: %s", self.replica.name, request_id, failure)
        task.cancel()
