"""The environment of this task: the policy guesses a digit and reads "higher" or "lower"."""

from collections.abc import Mapping
from typing import Any

from pentad.rollout.environments import Step
from pentad.rollout.workflows import MultiTurn


class GuessTheDigit:
    """The environment of one episode; each episode has a separate object."""

    async def reset(self, fields: Mapping[str, Any]) -> None:
        """Starts the episode; `fields` is the row of the dataset."""
        self.secret = int(fields["answer"])

    async def step(self, text: str) -> Step:
        """Returns the observation, whether the episode is over, and the reward."""
        digits = [int(letter) for letter in text if letter in "0123456789"]
        if not digits:
            parts = {"correct": 0.0, "no_digit": -0.1}
            return Step("Say a digit.", is_done=False, reward_parts=parts)
        is_right = digits[-1] == self.secret
        hint = "higher" if digits[-1] < self.secret else "lower"
        return Step(hint, is_done=is_right, reward_parts={"correct": float(is_right)})

    async def close(self) -> None:
        """Called once at the end of the episode, also after an error."""


def workflow() -> MultiTurn:
    return MultiTurn(GuessTheDigit, max_turns=4)
