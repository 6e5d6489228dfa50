"""`gym:ID`: an environment of Gymnasium, whose actions are the policy's answers as text.

`gym:ID?name=value` passes options to `gymnasium.make`. To change texts and actions, subclass
`GymEnvironment`, override `show` and `parse`, and set `class:FILE:Class`.
"""

from __future__ import annotations

import re
from typing import Any

import gymnasium
import numpy as np

NUMBERS = re.compile(r"-?\d+(?:\.\d+)?(?:[eE]-?\d+)?")


class GymEnvironment:
    target = ""
    """The environment ID, set by subclasses."""

    def __init__(self, target: str = "", **options: Any) -> None:
        self.env = gymnasium.make(target or self.target, **options)
        self.num_steps = 0

    def reset(self, **row: Any) -> str:
        """Resets the environment; the row may have columns `seed` and `options`."""
        seed, options = row.get("seed"), row.get("options")
        observation, _ = self.env.reset(seed=None if seed is None else int(seed), options=options)
        return "\n" + self.show(observation)

    def step_text(self, text: str) -> tuple[str | None, float, bool]:
        """Steps the environment; an answer without a valid action ends the episode."""
        try:
            action = self.parse(text)
        except ValueError:
            return None, 0.0, True
        observation, reward, is_terminated, is_truncated, _ = self.env.step(action)
        self.num_steps += 1
        is_done = bool(is_terminated or is_truncated)
        return self.show(observation), float(reward), is_done

    def show(self, observation: Any) -> str:
        """Returns the observation as text; the rendering if `render_mode=ansi` is set."""
        if self.env.render_mode == "ansi":
            return str(self.env.render())
        return (
            np.array2string(observation)
            if isinstance(observation, np.ndarray)
            else str(observation)
        )

    def parse(self, text: str) -> Any:
        """Returns the action: the last number for a discrete space, one number per element for a
        box, else the text. ValueError if there is none."""
        space = self.env.action_space
        if isinstance(space, gymnasium.spaces.Text):
            action: Any = text.strip()
        else:
            numbers = [float(found) for found in NUMBERS.findall(text)]
            size = int(np.prod(space.shape)) if space.shape else 1
            if len(numbers) < size:
                raise ValueError(f"{text!r} has no action")
            last = np.array(numbers[-size:], dtype=space.dtype)
            action = last.reshape(space.shape) if space.shape else last[0]
        if not space.contains(action):
            raise ValueError(f"{action} is no action of {space}")
        return action

    def close(self) -> None:
        self.env.close()
