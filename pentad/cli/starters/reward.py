"""The reward of this task: `score` is called for every sampled answer."""

import re


def score(completion: str, answer: str) -> dict[str, float]:
    """1 for the right number as the last one of the answer, and 0.1 for any number at all.

    Parameters are columns of the row, besides `completion`. The parts are added up; `correct` is
    what evaluation reports as accuracy.
    """
    numbers = re.findall(r"-?\d+", completion)
    return {"correct": float(numbers[-1:] == [answer]), "number": 0.1 * bool(numbers)}
