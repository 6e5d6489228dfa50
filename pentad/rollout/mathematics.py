"""Mathematical answers compared by the `math-verify` library: fractions, LaTeX, sets, intervals.

Runs in a worker of the reward pool, because simplifying an expression may take for ever. The
library's own time limits use signals, which do not reach into sympy; they are switched off.
"""

from __future__ import annotations

from typing import Any

from math_verify import parse, verify

DELIMITERS = ("$", "\\boxed", "\\(", "\\[")


def math(completion: str, answer: object) -> dict[str, Any]:
    """1 if the last boxed or written-out result of the completion equals the answer.

    An answer the library finds no result in, or cannot compare, is wrong; the parts `parsed` and
    `uncomparable` show how often that happens.
    """
    expected = parse(as_latex(str(answer)), parsing_timeout=None, raise_on_error=True)
    if not expected:
        raise ValueError(f"the expected answer {str(answer)[:80]!r} is no mathematics")
    given = parse(completion, parsing_timeout=None)
    is_correct, uncomparable = False, False
    try:
        is_correct = verify(expected, given, timeout_seconds=None, raise_on_error=True)
    except Exception:  # sympy raises almost anything on strange pairs
        uncomparable = True
    parts = {"correct": is_correct, "parsed": bool(given), "uncomparable": uncomparable}
    return {"value": float(is_correct), "parts": {k: float(v) for k, v in parts.items()}}


def as_latex(answer: str) -> str:
    """Bare LaTeX is boxed: outside of delimiters 3\\sqrt{2} would be read as 3."""
    answer = answer.rpartition("####")[2].strip()
    return answer if any(mark in answer for mark in DELIMITERS) else f"\\boxed{{{answer}}}"
