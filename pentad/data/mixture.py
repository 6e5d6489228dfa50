"""Prompts of several environments in one sequence, mixed by weight.

Environment and prompt of a gid depend only on the weights, the data and the gid, so that a resumed
run needs no cursor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pentad.core.types import Prompt
from pentad.data.prompts import Prompts, PromptStream, RejectedPrompt
from pentad.data.shares import Turns, whole_shares
from pentad.data.stamp import check_same_data


class MixedPrompts(Prompts):
    """Alternates between several streams; each has separate epochs and a separate order.

    An epoch of the mixture ends when every row of every stream was drawn at least once. Streams
    that are small relative to their weight are then drawn several times.
    """

    def __init__(self, streams: Sequence[PromptStream], weights: Sequence[float]) -> None:
        super().__init__(streams[0].source)
        self.streams = tuple(streams)
        self.turns = Turns(whole_shares(weights))
        for stream in streams:
            self.warnings |= stream.warnings
            self.notes += stream.notes
        self.dropped = sum((stream.dropped for stream in streams), Counter())

    def __len__(self) -> int:
        return self.turns.until([len(stream) for stream in self.streams])

    def prompt(self, gid: int) -> Prompt:
        part, ordinal = self.turns.at(gid)
        try:
            return replace(self.streams[part].prompt(ordinal), gid=gid)
        except RejectedPrompt as error:
            raise RejectedPrompt(gid, error.reason, str(error)) from error

    def row_of(self, gid: int) -> str:
        part, ordinal = self.turns.at(gid)
        return self.streams[part].row_of(ordinal)

    def lengths(self) -> list[int]:
        return [length for stream in self.streams for length in stream.lengths()]

    def run_warnings(self, size: int) -> list[str]:
        return [*self.warnings]

    def summary(self) -> str:
        shares, total = self.turns.shares, self.turns.length
        return "; ".join(
            f"{stream.source.environment}, {share} of {total} prompts: {stream.summary()}"
            for stream, share in zip(self.streams, shares, strict=True)
        )

    def state(self) -> dict[str, Any]:
        shares = zip(self.streams, self.turns.shares, strict=True)
        return {
            "shares": {stream.source.environment: share for stream, share in shares},
            "environments": {one.source.environment: one.state() for one in self.streams},
        }

    def check_state(self, saved: Mapping[str, Any]) -> None:
        now = self.state()
        check_same_data(
            "rollout.workflows", {"shares": saved.get("shares")}, {"shares": now["shares"]}
        )
        for stream in self.streams:
            stream.check_state(saved["environments"][stream.source.environment])
