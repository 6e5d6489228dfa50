"""The reward of this task: `score` is called for every sampled answer."""

import re


def score(completion: str, answer: str) -> dict[str, float]:
    """Returns 1 if the last number of the answer is right, and up to 0.2 for digits in place.

    Parameters besides `completion` are columns of the row. The reward is the sum of the parts;
    evaluation reports `correct` as accuracy. A partial reward such as `places` gives a signal while
    few answers are right.
    """
    numbers = re.findall(r"\d+", completion)
    said = numbers[-1] if numbers else ""
    places = sum(a == b for a, b in zip(said, answer, strict=False))
    return {"correct": float(said == answer), "places": 0.2 * places / len(answer)}
