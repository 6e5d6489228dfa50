"""Combines short jobs that wait for a worker of the reward pool into one message.

A message costs one fork and one answer for any number of jobs. It is composed when a worker is
free, so a job that finds a free worker is sent at once, alone. If a message fails, each of its jobs
is run again alone, and only that result counts.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pentad.rewards.calls import SEVERAL
from pentad.rewards.sandbox import MIB, JobFailed, Sandbox, Worker, pickled

MESSAGE_S = 0.02
"""Maximum work of a message in seconds: ten times its overhead, but short, because another worker
may become free meanwhile."""
MESSAGE_BYTES = MIB
MESSAGE_JOBS = 64
SHARED_JOB_TIMEOUT_S = 1.0
"""Time limit of jobs that share a process, in seconds; then each is run again alone."""


@dataclass(slots=True, eq=False)
class WaitingJob:
    """A job and the message that contains it."""

    spec: str
    body: bytes
    cost_s: float
    timeout_s: float | None
    answer: asyncio.Future[Any]
    message: list[WaitingJob] = field(default_factory=list)
    sender: asyncio.Task[None] | None = None


class SharedJobs:
    """The waiting jobs of a pool that may share its workers."""

    def __init__(self, pool: Sandbox) -> None:
        self.pool = pool
        self.waiting: deque[WaitingJob] = deque()
        self.senders: set[asyncio.Task[None]] = set()
        """One task for each message that is in progress or waits for a worker."""
        self.max_jobs = MESSAGE_JOBS
        """Maximum jobs of a message; reduced after a failed one, because all its jobs run again."""

    async def run(
        self,
        spec: str,
        payload: Mapping[str, Any],
        timeout_s: float | None = None,
        *,
        cost_s: float | None = None,
    ) -> Any | JobFailed:
        """Like `Sandbox.run`; `cost_s`: the estimated duration of the job, which otherwise runs
        alone."""
        if cost_s is None or cost_s > MESSAGE_S / 2:
            return await self.pool.run(spec, payload, timeout_s)
        future = asyncio.get_running_loop().create_future()
        job = WaitingJob(spec, pickled(spec, dict(payload)), cost_s, timeout_s, future)
        self.waiting.append(job)
        self._wake()
        try:
            answer = await future
        except asyncio.CancelledError:
            if job.sender is not None and all(other.answer.done() for other in job.message):
                job.sender.cancel()  # no caller waits for any of its jobs
            raise
        if isinstance(answer, JobFailed) and len(job.message) > 1:
            return await self.pool.run(spec, payload, timeout_s)
        return answer

    def _wake(self) -> None:
        while self.waiting and self.waiting[0].answer.done():
            self.waiting.popleft()
        if self.waiting and len(self.senders) < self.pool.num_workers:
            sender = asyncio.create_task(self._send())
            self.senders.add(sender)
            sender.add_done_callback(self._sent)

    def _sent(self, sender: asyncio.Task[None]) -> None:
        self.senders.discard(sender)
        self._wake()

    async def _send(self) -> None:
        """Sends one message to the next free worker."""
        worker = await self.pool.idle.get()
        message = self._take()
        if not message:
            self.pool.idle.put_nowait(worker)
            return
        for job in message:
            job.message, job.sender = message, asyncio.current_task()
        try:
            answers = await self._answers(worker, message)
        except Exception as failure:
            for job in message:
                if not job.answer.done():
                    job.answer.set_exception(failure)
            return
        for job, answer in zip(message, answers, strict=True):
            if not job.answer.done():
                job.answer.set_result(answer)

    def _take(self) -> list[WaitingJob]:
        """This worker's share of the waiting jobs, assuming that the other free workers take
        theirs."""
        share = math.ceil(len(self.waiting) / (1 + self.pool.idle.qsize()))
        message: list[WaitingJob] = []
        cost_s = num_bytes = 0.0
        while self.waiting and len(message) < min(share, self.max_jobs):
            job = self.waiting[0]
            cost_s, num_bytes = cost_s + job.cost_s, num_bytes + len(job.body)
            if message and (cost_s > MESSAGE_S or num_bytes > MESSAGE_BYTES):
                break
            self.waiting.popleft()
            if not job.answer.done():
                message.append(job)
        return message

    async def _answers(self, worker: Worker, message: list[WaitingJob]) -> list[Any | JobFailed]:
        if len(message) == 1:
            [job] = message
            return [await self.pool.run_on(worker, job.spec, job.body, job.timeout_s)]
        body = pickled(SEVERAL, {"jobs": [(job.spec, job.body) for job in message]})
        limit = min(SHARED_JOB_TIMEOUT_S, self.pool.reward.timeout_s)
        answers = await self.pool.run_on(worker, SEVERAL, body, limit)
        if isinstance(answers, list) and len(answers) == len(message):
            self.max_jobs = min(MESSAGE_JOBS, self.max_jobs + 1)
            return answers
        self.max_jobs = max(2, len(message) // 2)
        failed = answers if isinstance(answers, JobFailed) else JobFailed("error", "no list")
        return [failed] * len(message)
