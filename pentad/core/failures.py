"""The two ways a rollout fails: by its machinery (tried elsewhere) or its data (dropped)."""

from __future__ import annotations

import asyncio

from pentad.core.errors import RunError


class InfraFailure(Exception):
    """A replica, a connection or the reward pool failed; the prompt itself is not to blame."""


class FlawedAnswer(InfraFailure):
    """What a replica answered is no answer, though it lives: waiting for it would not help."""


class GivenUp(RunError):
    """A part of the machinery that was started again as often as it may be: the run ends."""


class DataFailure(Exception):
    """This prompt cannot become a group; the caller drops it and counts the reason."""

    def __init__(self, reason: str, detail: str, *, is_final: bool = False) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        """A short word for counting, such as too_long or reward_timeout."""
        self.detail = detail
        self.is_final = is_final
        """Fresh samples would fail the same way, so none are drawn."""


def is_cancelled() -> bool:
    """Whether somebody cancelled this task, and not only something that it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
