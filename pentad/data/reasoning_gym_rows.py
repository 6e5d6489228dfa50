"""`reasoning_gym:NAME`: rows that the package reasoning-gym makes, and the reward for them.

`reasoning_gym:NAME?size=500&seed=1&min_terms=2` gives options of the task. Equal options give equal
rows. `score` runs in the processes of rewards.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from typing import Any
from urllib.parse import parse_qsl

import reasoning_gym
from reasoning_gym.utils import extract_answer

from pentad.core.errors import Problem, UserError
from pentad.core.roles import Scored

SIZE = 1000
"""Rows, where no option says how many."""
COLUMN = "reasoning_gym"
"""The column that `score` reads: the row's place, as JSON."""


@cache
def tasks_of(path: str) -> Any:
    """The dataset of a path. ValueError where there is no such task or option."""
    name, _, query = path.partition(":")[2].partition("?")
    options = {key: plain(value) for key, value in parse_qsl(query)}
    try:
        return reasoning_gym.create_dataset(name, **{"size": SIZE, "seed": 0, **options})
    except (TypeError, AssertionError) as error:
        raise ValueError(str(error)) from error


def plain(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


class ReasoningRows:
    """Rows with `prompt`, `answer` and COLUMN."""

    def __init__(self, path: str, *, limit: int | None, where: str) -> None:
        self.path = path
        try:
            tasks = tasks_of(path)
        except ValueError as error:
            raise UserError(Problem(where, f"reasoning-gym refuses it: {error}")) from error
        num = len(tasks) if limit is None else min(limit, len(tasks))
        self.rows = [self._row(index, tasks[index]) for index in range(num)]
        self.digest = hashlib.blake2b(json.dumps(self.rows).encode(), digest_size=16).digest()

    def _row(self, index: int, entry: Any) -> dict[str, Any]:
        place = {"path": self.path, "index": index}
        answer = None if entry["answer"] is None else str(entry["answer"])
        return {"prompt": entry["question"], "answer": answer, COLUMN: json.dumps(place)}

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, index: int) -> dict[str, Any]:
        return self.rows[index]

    def where(self, index: int) -> str:
        return f"{self.path}:{index + 1}"


def score(completion: str, reasoning_gym: str) -> Scored:
    """What the task's own `score_answer` says to the text within <answer> tags, or to all of it; an
    answer of full score is correct."""
    place = json.loads(reasoning_gym)
    tasks = tasks_of(place["path"])
    found = extract_answer(completion)
    answer = completion.strip() if found is None else found
    value = float(tasks.score_answer(answer=answer, entry=tasks[place["index"]]))
    return Scored(value, {"correct": float(value == 1.0)})
