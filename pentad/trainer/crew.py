"""What of a run outlives its learners: the event loop, the samplers, and how weights reach them."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any

from pentad.core.roles import Sampler
from pentad.runtime.awake import AwakeLoop
from pentad.runtime.roles import Runtime
from pentad.sync.handoff import Handoff
from pentad.telemetry.log import NOTICE

log = logging.getLogger(__name__)


class Crew:
    """Learners that are processes of their own may be lost and started again meanwhile."""

    def __init__(self, checked: Any = None) -> None:
        self.checked = checked
        """What was read and found good before the learners were started; None: nothing yet."""
        self.runner = asyncio.Runner(loop_factory=AwakeLoop)
        self.stack, self.sampler_stack = AsyncExitStack(), AsyncExitStack()
        self.runtime: Runtime | None = None
        """Where learners and samplers are started; None: on this machine."""
        self.handoff: Handoff | None = None
        self.samplers: dict[str, Sampler] | None = None
        self.holder = "rollout"
        """Who had the devices last that samplers and learners share."""
        self.lost_at: float | None = None
        """When learners were lost that have not trained again."""

    def note_lost(self) -> None:
        self.lost_at = self.lost_at or time.monotonic()

    def note_holder(self, holder: str) -> None:
        self.holder = holder

    def close_samplers(self) -> None:
        """The next life of the learners has samplers of its own."""
        self.samplers = self.handoff = None
        self.holder = "rollout"
        stack, self.sampler_stack = self.sampler_stack, AsyncExitStack()
        self.runner.run(stack.aclose())

    def note_step(self) -> None:
        """A step was trained."""
        if self.lost_at is not None:
            seconds, self.lost_at = time.monotonic() - self.lost_at, None
            text = "the learners train again: %.1f s from their loss to the end of a step"
            log.info(text, seconds, extra=NOTICE)

    @property
    def is_spread(self) -> bool:
        """Whether learners and samplers may be on other machines, where Ray started them."""
        return self.runtime is not None and self.runtime.is_spread

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close_samplers()
            self.runner.run(self.stack.aclose())
        finally:
            self.runner.close()
