"""The `code` reward: runs the program in the completion on tests that it cannot read.

Programs run in isolated workers, which receive inputs and return outputs; the caller's process
compares. A program that fails, hangs or is killed has failed its test, which is a valid result; a
failure of the pool is not.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pentad.core.roles import Scored
from pentad.rewards.sandbox import JobFailed, Sandbox

FENCE = re.compile(r"```(?:python|py|python3)?[ \t]*\n(.*?)```", re.DOTALL)
FLOAT_TOLERANCE = 1e-6
"""Relative and absolute tolerance of printed decimals, because programs sum in different orders."""
RUN, CALL, ASSERT = (f"pentad.rewards.calls:{f}" for f in ("print_output", "call", "asserts"))


@dataclass(frozen=True, slots=True)
class Tests:
    """The tests of a program. Example: Tests("stdin", "", [("1 2\\n", "3")])."""

    kind: Literal["stdin", "call", "assert"]
    function: str
    """The function to call; empty for the other kinds."""
    cases: list[tuple[Any, Any]]
    """(input, expected output); for asserts (statement, None)."""


def read_tests(answer: object) -> Tests:
    """Reads the tests of a dataset row, in the formats of public datasets (see docs/rewards.md)."""
    if isinstance(answer, str):
        text = answer.strip()
        answer = json.loads(text) if text[:1] in ("{", "[") else [text]
    if isinstance(answer, Mapping) and {"inputs", "outputs"} <= answer.keys():
        function = str(answer.get("fn_name") or "")
        inputs = map(list, answer["inputs"]) if function else answer["inputs"]
        cases = list(zip(inputs, answer["outputs"], strict=True))
        tests = Tests("call" if function else "stdin", function, cases)
    elif isinstance(answer, list) and all(isinstance(case, Mapping) for case in answer):
        tests = Tests("stdin", "", [(case["input"], case["output"]) for case in answer])
    elif isinstance(answer, list) and all(isinstance(case, str) for case in answer):
        tests = Tests("assert", "", [(case, None) for case in answer if case.strip()])
    else:
        raise ValueError("tests are {inputs, outputs}, [{input, output}] or assert statements")
    if not tests.cases:
        raise ValueError("there are no tests")
    return tests


def program_in(completion: str) -> str:
    """Returns the last fenced block, or the whole text if there is none."""
    blocks = FENCE.findall(completion)
    return blocks[-1] if blocks else completion


async def judge(sandbox: Sandbox, completion: str, tests: Tests) -> Scored | JobFailed:
    """Scores 1 if every test passes. Stops at the first failure, so a hanging program costs one
    timeout."""
    source = program_in(completion)
    if tests.kind == "assert":
        return await _judge_asserts(sandbox, source, [case for case, _ in tests.cases])
    for num_passed, (given, expected) in enumerate(tests.cases):
        job: dict[str, Any] = {"source": source}
        if tests.kind == "stdin":
            got = await sandbox.run(RUN, job | {"stdin": _as_text(given)}, capture="stdout")
        else:
            job |= {"function": tests.function, "arguments": given}
            got = await sandbox.run(CALL, job)
        if isinstance(got, JobFailed) and got.kind == "lost":
            return got
        is_right = not isinstance(got, JobFailed) and (
            same_output(got, _as_text(expected))
            if tests.kind == "stdin"
            else same_value(got, expected)
        )
        if not is_right:
            return _scored(num_passed, len(tests.cases), got)
    return _scored(len(tests.cases), len(tests.cases), None)


async def _judge_asserts(sandbox: Sandbox, source: str, tests: list[str]) -> Scored | JobFailed:
    got = await sandbox.run(ASSERT, {"source": source, "tests": tests})
    if isinstance(got, JobFailed):
        return got if got.kind == "lost" else _scored(0, len(tests), got)
    num_passed = got if type(got) is int and 0 <= got <= len(tests) else 0
    return _scored(num_passed, len(tests), None)


def _scored(num_passed: int, num_tests: int, last: object) -> Scored:
    is_correct = float(num_passed == num_tests)
    hung = float(isinstance(last, JobFailed) and last.kind == "timeout")
    parts = {"correct": is_correct, "passed": num_passed / num_tests, "timeout": hung}
    return Scored(is_correct, parts)


def _as_text(value: object) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def same_output(got: str, expected: str) -> bool:
    """Whether outputs are equal word by word; decimals may differ by rounding."""
    left, right = got.split(), expected.split()
    return len(left) == len(right) and all(map(_same_word, left, right))


def _same_word(got: str, expected: str) -> bool:
    if got == expected:
        return True
    try:
        return "." in expected and same_value(float(got), float(expected))
    except ValueError:
        return False


def same_value(got: Any, expected: Any) -> bool:
    """Whether values are equal as JSON; floats may differ by rounding, booleans are no numbers."""
    if isinstance(got, bool) or isinstance(expected, bool):
        return got is expected
    if isinstance(got, int | float) and isinstance(expected, int | float):
        if isinstance(got, int) and isinstance(expected, int):
            return got == expected
        if not all(abs(number) <= sys.float_info.max for number in (got, expected)):
            return got == expected  # integers too large for a float, infinities, nan
        return abs(got - expected) <= FLOAT_TOLERANCE * max(1.0, abs(expected))
    if isinstance(got, list) and isinstance(expected, list):
        return len(got) == len(expected) and all(map(same_value, got, expected))
    if isinstance(got, dict) and isinstance(expected, dict):
        return got.keys() == expected.keys() and all(
            same_value(got[key], expected[key]) for key in got
        )
    return bool(type(got) is type(expected) and got == expected)
