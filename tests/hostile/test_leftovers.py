"""A job finds nothing of earlier samples in its process: no memory, no open file, no variable."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
from test_isolation import REFUSED, needs_namespaces, spoil  # noqa: E402
from test_results import group_of  # noqa: E402

from pentad.rewards.sandbox import JobFailed, Sandbox  # noqa: E402
from pentad.rewards.scorer import RewardScorer  # noqa: E402
from pentad.rewards.section import RewardConfig  # noqa: E402

RUN, CALL, ASSERTS, EACH = (
    f"pentad.rewards.calls:{name}" for name in ("print_output", "call", "asserts", "each")
)
READER = Path(__file__).with_name("memory_reader.py")


def mark(kind: str, num: int = 1) -> str:
    return f"LEFT-{kind}-{12345678} " * num


PLANTED = {
    "stdin and stdout": (RUN, {"source": "print(input())", "stdin": mark("stdin", 3000)}),
    "a program": (RUN, {"source": f"x = '{mark('source', 3000)}'", "stdin": ""}),
    "an output that is printed": (
        RUN,
        {"source": "print('LEFT', 'printed', '12345678 ' * 3000, sep='-')", "stdin": ""},
    ),
    "arguments and a result": (
        CALL,
        {
            "source": "f = lambda x: ['-'.join(('LEFT', 'result', '12345678'))] * 3000 + [x]",
            "function": "f",
            "arguments": [mark("arguments", 3000)],
        },
    ),
    "an error": (CALL, {"source": "f = 1 / 0", "function": mark("error", 3000), "arguments": []}),
    "tests of a row": (ASSERTS, {"source": "x = 1", "tests": [f"assert '{mark('tests', 3000)}'"]}),
}
"""Jobs that leave marks wherever their data goes."""


def found_after(planted, look, *, isolate=False, **limits) -> list[str]:
    """The kinds of marks that a job finds after the others, on the same worker."""

    async def run():
        reward = RewardConfig(num_workers=1, timeout_s=60.0, **limits)
        pool = Sandbox(reward, [RUN, EACH], isolate=isolate)
        await pool.start()
        try:
            for call, given in planted:
                await pool.run(call, given, capture="stdout" if call == RUN else "result")
            return await look(pool)
        finally:
            await pool.close()

    return asyncio.run(run())


async def look_from_inside(pool: Sandbox) -> list[str]:
    """By a program, which has no /proc."""
    source = READER.read_text() + "\nprint(json.dumps(marks_in_reach()))"
    seen = await pool.run(RUN, {"source": source, "stdin": ""}, capture="stdout")
    assert not isinstance(seen, JobFailed), seen
    return json.loads(seen)


@needs_namespaces
@pytest.mark.parametrize("name", [*PLANTED, "all of them"])
def test_a_program_finds_nothing_of_earlier_samples(monkeypatch, name):
    monkeypatch.setenv("PENTAD_TEST_SECRET", mark("environment"))
    planted = PLANTED.values() if name == "all of them" else [PLANTED[name]]
    assert found_after(planted, look_from_inside, isolate=True) == []


def test_nor_does_it_where_namespaces_are_refused(monkeypatch):
    spoil(monkeypatch, REFUSED)
    monkeypatch.setenv("PENTAD_TEST_SECRET", mark("environment"))
    assert found_after(PLANTED.values(), look_from_inside, isolate=True) == []


def test_a_reward_function_finds_nothing_of_earlier_samples():
    """In all of its memory, by /proc: neither completions nor answers nor results."""
    quoted = {"spec": f"{READER}:quote", "shared": b"\x80\x04}\x94.", "own": []}
    own = [(1, {"completion": mark("completion", 3000), "answer": mark("answer", 3000)})]

    async def look(pool):
        return await pool.run(f"{READER}:marks_in_memory", {})

    assert found_after([(EACH, quoted | {"own": own})], look) == []


def test_the_reader_finds_what_is_there():
    """The tests above can fail: the marks of a job's own arguments are found."""

    async def by_program(pool):
        source = READER.read_text() + "\nhere = input()\nprint(json.dumps(marks_in_reach()))"
        given = {"source": source, "stdin": mark("own", 3000)}
        seen = await pool.run(RUN, given, capture="stdout")
        assert not isinstance(seen, JobFailed), seen
        return json.loads(seen)

    async def by_function(pool):
        return await pool.run(f"{READER}:marks_in_memory", {"held": mark("own", 3000)})

    assert found_after([], by_program, isolate=True, allow_weaker=True) == ["own"]
    assert found_after([], by_function) == ["own"]


def test_a_job_has_no_file_open_but_its_own():
    async def look(pool):
        source = "import os\nfor f in range(200):\n  try: print(f, os.fstat(f).st_mode >> 12)\n"
        source += "  except OSError: pass"
        return await pool.run(RUN, {"source": source, "stdin": ""}, capture="stdout")

    kinds = [line.split()[1] for line in found_after([], look, isolate=True).splitlines()]
    pipe, character_device, regular = "1", "2", "8"
    # standard input is the test's, and was opened under another number; output is the job's pipe
    assert sorted(kinds) == [pipe, pipe, character_device, regular, regular]


@needs_namespaces
def test_a_program_that_computes_nothing_is_not_right_after_one_that_does():
    """The output of a right program is what a wrong one wants to find."""
    expected = mark("expected", 50).strip()
    answer = [{"input": "50", "output": expected}]
    right = "print('LEFT-expected-12345678 ' * int(input()))"
    thief = READER.read_text() + "\nprint(*[f'LEFT-{k}-12345678 ' * 50 for k in marks_in_reach()])"

    async def run():
        scorer = RewardScorer(RewardConfig(fn="code", num_workers=1, timeout_s=60.0))
        await scorer.start()
        try:
            scored = [await scorer.score(group_of(text, answer)) for text in (right, thief)]
        finally:
            await scorer.close()
        return [group.samples[0].reward for group in scored]

    assert asyncio.run(run()) == [1.0, 0.0]
