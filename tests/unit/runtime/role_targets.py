"""Objects that the tests of role processes have served."""

import asyncio
import os
import random
import time
from pathlib import Path

import numpy as np

from pentad.core.errors import DataFailure, InfraFailure, Problem, RunError, Transient, UserError

ERRORS = {
    "RunError": RunError("it cannot go on"),
    "Transient": Transient("it was lost"),
    "UserError": UserError([Problem("x = 1", "is wrong", "use 2"), "and a word"]),
    "DataFailure": DataFailure("too_long", "17 tokens", is_final=True),
    "InfraFailure": InfraFailure("no replica"),
    "KeyError": KeyError("surprise"),
}


class Thing:
    def __init__(self, payload, emit):
        self.payload = payload
        self.emit = emit
        self.num_calls = 0
        self.num_cancelled = 0
        self.order = []

    def stats(self):
        return {"num_calls": self.num_calls, "num_cancelled": self.num_cancelled}

    async def echo(self, **values):
        self.num_calls += 1
        return values

    async def draw(self):
        return [random.random(), float(np.random.random())]

    async def double(self, array):
        return array * 2

    async def late(self, value, seconds):
        self.order.append(value)
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        return [value, list(self.order)]

    async def fail(self, kind):
        raise ERRORS[kind]

    async def say(self, count):
        for number in range(count):
            self.emit("said", number)

    async def big(self, size):
        return np.zeros(size, np.uint8)

    async def wrong(self):
        return {1, 2}

    async def block(self, until):
        """The whole process, until the file is there."""
        while not Path(until).exists():
            time.sleep(0.05)

    async def environment(self, names):
        return [os.getpid(), sorted(os.sched_getaffinity(0)), {n: os.environ.get(n) for n in names}]

    async def close(self):
        if path := self.payload.get("note"):
            with open(path, "w") as file:  # noqa: PTH123
                file.write("closed")


def make(payload, emit):
    if until := payload.get("made_when"):
        while not Path(until).exists():
            time.sleep(0.05)
    if kind := payload.get("fails"):
        raise ERRORS[kind]
    return Thing(payload, emit)
