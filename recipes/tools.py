"""The environment of the recipe tools.yaml: a safe that opens by the number of the row."""

from __future__ import annotations

MAX_TRIES = 3


class Safe:
    """The policy presses a number; the safe says whether that is too low or too high."""

    def reset(self, answer: str, **row: object) -> None:
        self.number, self.tries, self.is_open = int(answer), 0, False

    def press(self, n: int) -> str:
        """Presses a number.

        Args:
            n: The number.
        """
        self.tries += 1
        self.is_open = self.is_open or (n == self.number and self.tries <= MAX_TRIES)
        return "open" if self.is_open else "low" if n < self.number else "high"

    def get_reward(self) -> dict[str, float]:
        """A point for an open safe, and a little for having pressed anything."""
        return {"correct": float(self.is_open), "pressed": 0.1 * (self.tries > 0)}
