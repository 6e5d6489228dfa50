"""The text of an answer as its tokens come: whole characters only, nothing that may be a stop."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pentad.core.types import FinishReason

BROKEN = "\ufffd"
"""What bytes that are no character, or not yet one, are decoded to."""
MAX_WINDOW = 256
"""Tokens decoded again at each step at most, in a text that never comes to a whole character."""


class TextStream:
    """Turns tokens into text, piece by piece; the pieces put together are the answer's text.

    A piece never ends within a character, and text that may become a stop string is held back.
    A token that ends the answer has no text, and neither has a stop string.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stop_strings: Sequence[str] = (),
        stop_ids: Sequence[int] = (),
        held: Sequence[str] = (),
    ) -> None:
        """From a text of `held` on nothing is sent before the end."""
        self.decode = decode
        self.stop_strings = tuple(stop_strings)
        self.stop_ids = frozenset(stop_ids)
        self.marks = (*stop_strings, *held)
        self.ids: list[int] = []
        self.text = ""
        """Decoded so far, what is held back included."""
        self.num_sent = 0
        self.offsets: list[int] = []
        """Where in the text each token begins."""
        self._settled = ""
        self._window = 0
        self._read = 0

    def push(self, token: int) -> str:
        """Takes one token; returns what can be sent now."""
        self.offsets.append(len(self.text))
        self.ids.append(token)
        if token in self.stop_ids:
            return ""
        # Decoding begins some tokens back: how a token is spelt may depend on the one before it.
        before = self.decode(self.ids[self._window : self._read])
        piece = self.decode(self.ids[self._window :])[len(before) :]
        is_whole = bool(piece) and not piece.endswith(BROKEN)
        self.text = self._settled + piece.rstrip(BROKEN)
        if is_whole or len(self.ids) - self._window > MAX_WINDOW:
            self._settled = self.text = self._settled + piece
            self._window, self._read = self._read, len(self.ids)
        return self._send(self._safe_end())

    def end(self, finish: FinishReason) -> str:
        """What is left to be sent once it is known why the answer ended."""
        ended_by_id = bool(self.ids) and self.ids[-1] in self.stop_ids
        until = len(self.ids) - ended_by_id
        before = self.decode(self.ids[self._window : self._read])
        self.text = self._settled + self.decode(self.ids[self._window : until])[len(before) :]
        cut = self._first(self.stop_strings) if finish == "stop" and not ended_by_id else None
        return self._send(len(self.text) if cut is None else cut)

    @property
    def sent(self) -> str:
        return self.text[: self.num_sent]

    def _send(self, end: int) -> str:
        piece = self.text[self.num_sent : end]
        self.num_sent = max(self.num_sent, end)
        return piece

    def _first(self, marks: Sequence[str]) -> int | None:
        found = [self.text.find(mark, self.num_sent) for mark in marks]
        return min((place for place in found if place >= 0), default=None)

    def _safe_end(self) -> int:
        """Up to where the text holds no mark and no beginning of one at its end."""
        first = self._first(self.marks)
        if first is not None:
            return first
        end = len(self.text)
        for stop in self.marks:
            for size in range(min(len(stop) - 1, len(self.text) - self.num_sent), 0, -1):
                if self.text.endswith(stop[:size]):
                    end = min(end, len(self.text) - size)
                    break
        return end
