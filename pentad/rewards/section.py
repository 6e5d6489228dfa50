"""The keys of the block `reward`, read by the scorer and its pool of processes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pentad.core.section import Count, Seconds, Section

REWARD_NAMES = ("exact_match", "numeric", "gsm8k", "sort_digits", "math", "code")


class RewardConfig(Section):
    fn: str | tuple[str, ...] | None = None
    """A built-in reward (exact_match, numeric, gsm8k, math, code, sort_digits), or your own:
    `package.module:function` or `path/to/file.py:function`. Or a list of them, which add up."""
    weights: tuple[float, ...] | None = None
    """What the value of each function of `fn` is multiplied by. null: 1 each."""
    timeout_s: Seconds = 10.0
    """After this long the process of a reward is ended and the sample counts as failed."""
    num_workers: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Processes that compute rewards. null: half the cores, at most 8."""
    memory_mb: Count = 1024
    """Memory limit of each of them."""
    on_failure: Literal["drop", "zero"] = "drop"
    """What a reward that failed twice does, where the sample is not the cause: drop, the group is
    given up and counted; zero, the sample is scored 0 and marked."""
    allow_processes: bool = False
    """Whether a reward of your own may start processes."""
    allow_weaker: bool = False
    """Goes on where this machine lacks a protection that rewards are run under."""

    @property
    def functions(self) -> tuple[str, ...]:
        """The functions of `fn`."""
        return (self.fn,) if isinstance(self.fn, str) else self.fn or ()
