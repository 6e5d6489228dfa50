"""The samplers of a run: assigns groups to them and checks their answers.

A replica that failed a request gets no further one until its health check passes. With one replica
and no failure, the result does not depend on time.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from pentad.core.errors import GivenUp, InfraFailure, UserError, is_cancelled
from pentad.core.roles import Sampler
from pentad.core.seeds import derive_seed
from pentad.core.types import Generation, Prompt, Request
from pentad.rollout.checks import Drawn, check_generations
from pentad.rollout.drafts import Draft
from pentad.rollout.retries import ReplicaFailed
from pentad.runtime.awake import awake_s
from pentad.telemetry.timeline import timeline

log = logging.getLogger(__name__)

HEALTH_TIMEOUT_S = 10.0
ABORT_TIMEOUT_S = 5.0
CUT_TIMEOUT_S = 30.0
"""Time limit for a sampler to return the tokens of an interrupted group, in seconds."""
MAX_BACKOFF_S = 30.0

_request_numbers = itertools.count()
"""Counter of request ids, shared by all executors so that two on one sampler use different ids."""


@dataclass(slots=True, eq=False)
class Candidate:
    """A sampler to which groups can be assigned."""

    name: str
    sampler: Sampler
    backoff_s: float
    """Seconds before the health check after a failure; doubled with each consecutive failure."""
    is_alone: bool
    """Whether it is the only sampler; then the first health check is immediate."""
    load: int = 0
    """Number of assigned samples that are not finished."""
    last_error: str | None = None
    """Why it gets no groups; None if it gets some."""
    num_failures: int = 0
    """Consecutive failures."""
    checking: asyncio.Task[None] | None = None

    def fail(self, reason: str) -> None:
        self.last_error = reason
        self.num_failures += 1
        if self.checking is None or self.checking.done():
            self.checking = asyncio.create_task(self._check())

    async def _check(self) -> None:
        """Repeats the health check until it passes."""
        while self.last_error is not None:
            if not self.is_alone or self.num_failures > 1:
                pause_s = self.backoff_s * 2 ** min(self.num_failures - 1, 10)
                await asyncio.sleep(min(MAX_BACKOFF_S, pause_s))
            try:
                async with asyncio.timeout(HEALTH_TIMEOUT_S):
                    await self.sampler.health()
                self.last_error = None
            except Exception as failure:
                self.last_error = f"{type(failure).__name__}: {failure}"
                self.num_failures += 1


class Fleet:
    """Picks a replica for each group, after a failure another one if possible."""

    def __init__(
        self,
        samplers: Mapping[str, Sampler],
        patience_s: float = 60.0,
        backoff_s: float = 0.5,
    ) -> None:
        """`patience_s`: how long a group waits for a healthy replica. `backoff_s`: pause before the
        health check of a failed replica, doubled each time."""
        is_alone = len(samplers) == 1
        self.replicas = {
            name: Candidate(name, sampler, backoff_s, is_alone)
            for name, sampler in samplers.items()
        }
        self.patience_s = patience_s

    @asynccontextmanager
    async def pick(self, prompt: Prompt, num_samples: int) -> AsyncIterator[Candidate]:
        """Yields a replica for a group: the prompt's preferred one, which may have its prefix
        cached, or a less loaded one. An InfraFailure of the work becomes ReplicaFailed."""
        trusted = await self._trusted()
        least = min(trusted, key=lambda r: r.load)
        home = least
        if len(trusted) > 1:
            home = max(trusted, key=lambda r: derive_seed(r.name, *prompt.ids))
        picked = home if home.load <= least.load + num_samples else least
        picked.load += num_samples
        try:
            yield picked
            picked.num_failures = 0
        except InfraFailure as failure:
            picked.fail(str(failure))
            raise ReplicaFailed(f"{picked.name}: {failure}") from failure
        finally:
            picked.load -= num_samples

    async def _trusted(self) -> list[Candidate]:
        """Returns the healthy replicas; waits until there is one."""
        deadline = awake_s() + self.patience_s
        while not (found := [r for r in self.replicas.values() if r.last_error is None]):
            left_s = deadline - awake_s()
            if left_s <= 0:
                reasons = [f"{r.name}: {r.last_error}" for r in self.replicas.values()]
                raise InfraFailure(f"no replica can serve ({'; '.join(reasons)})")
            checks = [r.checking for r in self.replicas.values() if r.checking is not None]
            await asyncio.wait(checks, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        return found

    def close(self) -> None:
        for replica in self.replicas.values():
            if replica.checking is not None:
                replica.checking.cancel()


class CheckedSampler:
    """A replica for the workflow of one group: checks answers and aborts abandoned requests."""

    def __init__(
        self,
        replica: Candidate,
        vocab_size: int,
        draft: Draft | None = None,
        *,
        is_greedy: bool = False,
    ) -> None:
        """`draft`: tokens of an earlier step, for a group of one request. `is_greedy`: samples at
        temperature 0, whatever the requests have; the draft then only counts these requests."""
        self.replica = replica
        self.vocab_size = vocab_size
        self.draft = draft or Draft()
        self.is_greedy = is_greedy
        self.drawn = Drawn()
        self.was_waiting = False
        """Whether an answer was pending when the group was cancelled."""

    async def generate(self, request: Request) -> list[Generation]:
        request = replace(request, id=f"{self.replica.name}-{next(_request_numbers)}")
        replica, greedy = self.replica, replace(request.params, temperature=0.0)
        rest = replace(request, params=greedy) if self.is_greedy else self.draft.rest_of(request)
        if not rest.seeds:  # all samples were complete when it was interrupted
            self.drawn.add(request, self.draft.answers)
            return list(self.draft.answers)
        task = asyncio.ensure_future(replica.sampler.generate(rest))
        self.draft.note_sent()
        try:
            with timeline.span(replica.name, "generates"):
                answers = await asyncio.shield(task)
            self.draft.note_answered()
            check_generations(rest, answers, self.vocab_size)
        except asyncio.CancelledError:
            await self._abort(rest, task)
            if is_cancelled():
                self.was_waiting = True
                raise
            raise InfraFailure(f"replica {replica.name} dropped the request") from None
        except (UserError, InfraFailure, GivenUp):
            raise
        except Exception as failure:
            raise InfraFailure(f"{type(failure).__name__}: {failure}") from failure
        if not self.is_greedy:
            answers = self.draft.joined(answers)
            if self.draft.carries:
                self.draft.answers = answers
        self.drawn.add(request, answers)
        return answers

    async def _abort(self, request: Request, task: asyncio.Task[list[Generation]]) -> None:
        """Aborts the request on the sampler too; keeps its tokens if the group was interrupted."""
        sampler = self.replica.sampler
        try:
            async with asyncio.timeout(CUT_TIMEOUT_S if self.draft.is_cut else ABORT_TIMEOUT_S):
                if "abort" in sampler.capabilities:
                    await sampler.abort(request.id)
                    if self.draft.is_cut and not self.is_greedy:
                        self.draft.keep(request, await task, self.vocab_size)
        except Exception as failure:
            self.replica.fail(f"abort failed: {type(failure).__name__}: {failure}")
            log.warning("%s: could not abort %s: %s", self.replica.name, request.id, failure)
        task.cancel()
