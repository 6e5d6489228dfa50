"""Compares mathematical answers by the library `math-verify`: fractions, LaTeX, sets, intervals.

Runs in a worker of the reward pool, because simplifying an expression may never end. The library's
time limits use signals, which do not interrupt sympy, and are disabled.
"""

from __future__ import annotations

import logging
from typing import Any

from math_verify import parse, verify

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its limits are disabled

BOX = "\\boxed"
DELIMITERS = ("$", BOX, "\\(", "\\[")


def result_of(completion: str) -> str | None:
    """The completion's result in the library's notation; with several boxes, the last one."""
    found = parse(completion[max(0, completion.rfind(BOX)) :], parsing_timeout=None)
    return str(found[0]) if found else None


def math(completion: str, answer: object) -> dict[str, Any]:
    """Scores 1 if the result of the completion equals the answer mathematically.

    Of several boxed results the last one counts, or all of them as a set. A completion without a
    result, or with one that the library cannot compare, is wrong; the parts `parsed` and
    `uncomparable` show how often that happens.
    """
    expected = parse(as_latex(str(answer)), parsing_timeout=None, raise_on_error=True)
    if not expected:
        raise ValueError(f"the expected answer {str(answer)[:80]!r} is not mathematics")
    readings = [completion]
    if completion.count(BOX) > 1:
        readings.append(completion[completion.rfind(BOX) :])
    results = [parse(reading, parsing_timeout=None) for reading in readings]
    is_correct, uncomparable = False, False
    try:
        is_correct = any(
            verify(expected, result, timeout_seconds=None, raise_on_error=True)
            for result in results
        )
    except Exception:  # sympy may raise any exception on unusual pairs
        uncomparable = True
    parts = {"correct": is_correct, "parsed": any(results), "uncomparable": uncomparable}
    return {"value": float(is_correct), "parts": {k: float(v) for k, v in parts.items()}}


def as_latex(answer: str) -> str:
    """Puts bare LaTeX in a box, because without delimiters 3\\sqrt{2} would be read as 3."""
    answer = answer.rpartition("####")[2].strip()
    return answer if any(mark in answer for mark in DELIMITERS) else f"{BOX}{{{answer}}}"


# Builds the library's patterns and parser tables (0.25 s) when this module is imported;
# the processes of jobs are forked afterwards and inherit them.
assert math(r"\boxed{\frac{1}{2}} and 3.5", "x^2")["value"] == 0.0
