"""A game of guessing as an OpenEnv server; runs where openenv-core is installed: PORT SESSIONS."""

import sys

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    number: int


class Word(Action):
    message: str


class Hint(Observation):
    hint: str


class Guessing(Environment):
    """The secret is that of the row."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        self.secret, self.tries = 0, 0

    def reset(self, seed=None, episode_id=None, secret=3, **more):
        self.secret, self.tries = int(secret), 0
        return Hint(hint="guess")

    def step(self, action, **more):
        self.tries += 1
        guess = action.number if isinstance(action, Guess) else len(action.message)
        if guess == 99:
            raise RuntimeError("the environment broke")
        is_done = guess == self.secret
        hint = "right" if is_done else "higher" if guess < self.secret else "lower"
        return Hint(hint=hint, done=is_done, reward=1.0 / self.tries if is_done else None)

    @property
    def state(self):
        return State(step_count=self.tries)


if __name__ == "__main__":
    port, sessions, action = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    app = create_app(
        Guessing, {"guess": Guess, "word": Word}[action], Hint, max_concurrent_envs=sessions
    )
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
