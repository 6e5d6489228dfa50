"""What of a run outlives a generation of its learners: the event loop, the samplers, and how
weights reach them."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from types import TracebackType

from pentad.core.roles import Sampler
from pentad.runtime.awake import AwakeLoop
from pentad.runtime.roles import Runtime
from pentad.runtime.standby import StandbyPool
from pentad.sync.weights_dir import WeightsDir


class Regroup(Exception):
    """The group of ranks is to be formed anew after a checkpoint; nothing has failed."""


class RunResources:
    def __init__(self) -> None:
        self.runner = asyncio.Runner(loop_factory=AwakeLoop)
        self.stack, self.sampler_stack = AsyncExitStack(), AsyncExitStack()
        self.runtime: Runtime | None = None
        """Where learners and samplers are started; None: on this machine."""
        self.weights_dir: WeightsDir | None = None
        self.samplers: dict[str, Sampler] | None = None
        self.holder = "rollout"
        """Which side had the devices last that samplers and learners share."""
        self.standbys: StandbyPool | None = None

    def note_holder(self, holder: str) -> None:
        self.holder = holder

    def close_samplers(self) -> None:
        """The next generation of the learners has samplers of its own."""
        self.samplers = self.weights_dir = None
        self.holder = "rollout"
        stack, self.sampler_stack = self.sampler_stack, AsyncExitStack()
        self.runner.run(stack.aclose())

    @property
    def is_spread(self) -> bool:
        """Whether learners and samplers may be on other machines, where Ray started them."""
        return self.runtime is not None and self.runtime.is_spread

    def __enter__(self) -> RunResources:
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
            if self.standbys is not None:
                self.standbys.close()
