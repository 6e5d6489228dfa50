"""Parts of a run that outlive a generation of its learners: the event loop, the samplers and the
transport of weights."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from types import TracebackType

from pentad.core.roles import Sampler
from pentad.runtime.awake import AwakeLoop
from pentad.runtime.launched import LaunchedRuntime
from pentad.runtime.roles import Runtime
from pentad.runtime.standby import StandbyPool
from pentad.sync.weights_dir import WeightsDir


class Regroup(Exception):
    """Raised to form a new group of ranks after a checkpoint; nothing has failed."""


class RunResources:
    def __init__(self, launched: LaunchedRuntime | None = None) -> None:
        """`launched`: the ranks that torchrun started, if it did."""
        self.launched = launched
        self.runner = asyncio.Runner(loop_factory=AwakeLoop)
        self.stack, self.sampler_stack = AsyncExitStack(), AsyncExitStack()
        self.runtime: Runtime | None = None
        """Starts learners and samplers; None: they run on this machine."""
        self.weights_dir: WeightsDir | None = None
        self.samplers: dict[str, Sampler] | None = None
        self.is_lent = False
        """Whether the samplers use memory of the present learners, and end with them."""
        self.holder = "rollout"
        """The role that used the shared devices of samplers and learners last."""
        self.standbys: StandbyPool | None = None

    def note_holder(self, holder: str) -> None:
        self.holder = holder

    def close_samplers(self) -> None:
        """Closes the samplers; the next generation of learners opens new ones."""
        self.samplers = self.weights_dir = None
        self.is_lent = False
        self.holder = "rollout"
        stack, self.sampler_stack = self.sampler_stack, AsyncExitStack()
        self.runner.run(stack.aclose())

    @property
    def is_spread(self) -> bool:
        """Whether learners and samplers may be on other machines."""
        placed = self.launched or self.runtime
        return placed is not None and placed.is_spread

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
