"""Rewards by plain comparison, in time linear in the text.

They run in the caller's process, because they cannot hang, crash or change anything. The part
`correct` (1 or 0) is what evaluation counts as accuracy.
"""

from __future__ import annotations

import re
from fractions import Fraction

from pentad.core.roles import Scored

MAX_DIGITS = 200
"""Longer digit strings are not compared, because converting them takes quadratic time."""

# A minus is a sign only if it is not a subtraction: "5-3" contains 5 and 3.
NUMBER = re.compile(r"(?:(?<![\w.)])-)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?", re.ASCII)
GSM8K_MARK = "####"


def numbers_in(text: str) -> list[str]:
    """Every decimal number in the text, thousands separators removed."""
    plain = text.replace("\u2212", "-")
    return [match.replace(",", "") for match in NUMBER.findall(plain)]


def value_of(number: str) -> Fraction | None:
    return Fraction(number) if len(number) <= MAX_DIGITS else None


def expected_number(answer: object) -> Fraction:
    """Returns the number in a dataset row's answer; the last one if there are several."""
    found = numbers_in(str(answer))
    value = value_of(found[-1]) if found else None
    if value is None:
        raise ValueError(f"the expected answer {str(answer)[:80]!r} holds no number")
    return value


def verdict(is_correct: bool) -> Scored:
    return Scored(float(is_correct), {"correct": float(is_correct)})


def numeric_result(completion: str) -> Fraction | None:
    """Returns the last number of the completion."""
    found = numbers_in(completion)
    return value_of(found[-1]) if found else None


def gsm8k_result(completion: str) -> Fraction | None:
    """Returns the number after the last "####"."""
    _, mark, tail = completion.rpartition(GSM8K_MARK)
    found = numbers_in(tail) if mark else []
    return value_of(found[0]) if found else None


def exact_match(completion: str, answer: object) -> Scored:
    """Scores 1 if the completion equals the answer, apart from white space at both ends."""
    return verdict(completion.strip() == str(answer).strip())


def numeric(completion: str, answer: object) -> Scored:
    """Scores 1 if the completion's last number equals the answer as a number (1,000.0 is 1000)."""
    return verdict(numeric_result(completion) == expected_number(answer))


def gsm8k(completion: str, answer: object) -> Scored:
    """Scores 1 if the number after the last "####" equals the answer's; without the mark 0.

    The answer may be the whole GSM8K solution (its own "####" counts) or the number alone.
    """
    expected = expected_number(str(answer).rpartition(GSM8K_MARK)[2])
    return verdict(gsm8k_result(completion) == expected)


def sort_digits(completion: str, answer: object) -> Scored:
    """The demo task: scores 1 if exact, else half the share of characters at the right position."""
    got, expected = completion.strip(), str(answer).strip()
    if got == expected:
        return verdict(True)
    num_right = sum(a == b for a, b in zip(got, expected, strict=False))
    share = num_right / max(len(got), len(expected), 1)
    return Scored(0.5 * share, {"correct": 0.0})
