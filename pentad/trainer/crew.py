"""What of a run outlives its learners: the event loop, the samplers, and how weights reach them."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from pentad.core.roles import Sampler
from pentad.runtime.awake import AwakeLoop, awake_s
from pentad.runtime.group_calls import RankGroup
from pentad.runtime.roles import Runtime
from pentad.runtime.standby import StandbyPool
from pentad.sync.handoff import Handoff
from pentad.telemetry.log import NOTICE
from pentad.trainer.recovery import RecoverHandler

log = logging.getLogger(__name__)


class Regroup(Exception):
    """The group of ranks is to be formed anew after a checkpoint; nothing has failed."""


@dataclass(slots=True)
class Recovery:
    """From the loss of learners to the end of the next step, by monotonic clock."""

    cause: str
    seen_at: float
    """The last sign of life of the rank that was lost first."""
    failed_at: float
    """The group was given up."""
    fenced_at: float = 0.0
    """No process of it was left."""
    joined_at: float = 0.0
    """All ranks of the next one had met."""
    loaded_at: float = 0.0
    """They had the state of the checkpoint."""
    num_losses: int = 1

    def seconds(self, now: float) -> dict[str, float]:
        marks = [self.seen_at, self.failed_at, self.fenced_at, self.joined_at, self.loaded_at, now]
        names = ("detect_s", "fence_s", "spawn_s", "load_s", "first_step_s")
        spans = zip(names, marks, marks[1:], strict=False)
        return {name: round(end - start, 3) for name, start, end in spans}


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
        self.group: RankGroup | None = None
        """The learners, where they are processes of their own."""
        self.is_loaded = False
        """Whether they have the state they go on from, and are in a step or between two."""
        self.standbys: StandbyPool | None = None
        self.recovery: Recovery | None = None
        """Under way, since learners were lost that have not trained again."""
        self.facts: dict[str, Any] = {}
        """What a record of a recovery says of the group."""
        self.records: Path | None = None
        """The file of these records."""
        self.has_returned: Callable[[], bool] = bool
        """Whether the group could be larger than it is."""

    def note_lost(self, error: Exception) -> None:
        """The group has ended with this failure, and all its processes."""
        group, now, before = self.group, awake_s(), self.recovery
        assert group is not None, "it was there to be lost"
        is_own = group.failure is not None
        seen, failed = (group.seen_at, group.failed_at) if is_own else (now, now)
        if before is not None:  # lost again before it trained
            seen, failed = min(before.seen_at, seen), min(before.failed_at, failed)
        cause = str(error).partition("\n")[0]
        num = before.num_losses + 1 if before else 1
        self.recovery = Recovery(cause, seen, failed, fenced_at=now, num_losses=num)

    def note_loaded(self) -> None:
        """The learners have the state they go on from."""
        self.is_loaded = True
        if self.recovery is not None and self.group is not None:
            self.recovery.joined_at, self.recovery.loaded_at = (self.group.joined_at, awake_s())

    def regroup_if_due(self, recover: RecoverHandler, step: int) -> None:
        """Raises Regroup where ranks have returned and this step is committed."""
        if self.has_returned() and recover.settle(step):
            text = "elastic: ranks have returned, the group is formed anew after step %d"
            log.info(text, step + 1, extra=NOTICE)
            raise Regroup

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
        if self.standbys is not None:
            self.standbys.fill()
        done, self.recovery = self.recovery, None
        if done is None:
            return
        now = awake_s()
        split, total = done.seconds(now), now - done.seen_at
        words = ", ".join(
            f"{name.removesuffix('_s').replace('_', ' ')} {value:.1f}"
            for name, value in split.items()
        )
        text = "the learners train again: %.1f s from their loss to the end of a step (%s)"
        log.info(text, total, words, extra=NOTICE)
        if self.records is not None:
            line = {
                "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                **self.facts,
                "cause": done.cause,
                "num_losses": done.num_losses,
                **split,
                "total_s": round(total, 3),
            }
            with self.records.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

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
            if self.standbys is not None:
                self.standbys.close()
