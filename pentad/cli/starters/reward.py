"""The reward of this task: `score` is called for every sampled answer."""

import re


def score(completion: str, answer: str) -> dict[str, float]:
    """1 for the right number as the last one of the answer, and up to 0.2 for digits in place.

    Parameters are columns of the row, besides `completion`. The parts are added up; `correct` is
    what evaluation reports as accuracy. A partial reward such as `places` shows the way while few
    answers are right.
    """
    numbers = re.findall(r"\d+", completion)
    said = numbers[-1] if numbers else ""
    places = sum(a == b for a, b in zip(said, answer, strict=False))
    return {"correct": float(said == answer), "places": 0.2 * places / len(answer)}
