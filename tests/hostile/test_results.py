"""Whatever a job returns, says or dies of is a verdict on its sample, never the end of a run."""

import asyncio
import json
import logging
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pentad.core.errors import DataFailure, one_line, visible
from pentad.core.roles import Scored
from pentad.core.types import Group, Prompt, Sample
from pentad.rewards.code_tests import same_value
from pentad.rewards.functions import as_scored
from pentad.rewards.sandbox import JobFailed, _value_of
from pentad.rewards.scorer import RewardScorer
from pentad.rewards.section import RewardConfig
from pentad.telemetry.log import log_to

sys.path.append(str(Path(__file__).parent))
import programs  # noqa: E402

REWARDS = Path(__file__).with_name("rewards_of_doom.py")


def group_of(text: str, answer: object) -> Group:
    sample = Sample(
        ids=np.array([1, 2]),
        mask=np.array([False, True]),
        rollout_logprobs=np.zeros(2, np.float32),
        versions=np.array([-1, 0]),
        finish="stop",
        text=text,
    )
    return Group(Prompt(9, (1,), {"answer": answer}, "what?"), [sample])


def scores(fn: str, cases: list[tuple[str, object]]) -> list[object]:
    """The reward of each (completion, answer), or what dropped its group."""

    async def run():
        reward = RewardConfig(fn=fn, num_workers=1, timeout_s=20.0)
        scorer = RewardScorer(reward)
        await scorer.start()
        found = []
        for text, answer in cases:
            try:
                found.append((await scorer.score(group_of(text, answer))).samples[0].reward)
            except DataFailure as failure:
                found.append(failure)
        await scorer.close()
        return found

    return asyncio.run(run())


def test_programs_with_hostile_results_fail_their_test_and_the_next_is_judged():
    texts = [programs.CALLABLE.replace("{value}", value) for value in programs.VALUES]
    for expected in (1.5, 10**400, [[[]]]):
        answer = {"fn_name": "f", "inputs": [[]], "outputs": [expected]}
        got = scores("code", [(text, answer) for text in texts])
        good = programs.CALLABLE.replace("{value}", repr(expected))
        assert scores("code", [(good, answer)]) == [1.0]
        right = [value for value, score in zip(programs.VALUES, got, strict=True) if score]
        assert right == (["10**400"] if expected == 10**400 else [])


def test_a_dataset_row_nested_without_end_drops_its_group():
    [failure] = scores("code", [("x = 1", "[" * 200_000)])
    assert isinstance(failure, DataFailure) and failure.reason == "reward_error"


@pytest.mark.parametrize(
    ("name", "reason", "detail"),
    [
        ("signal_40", "reward_crash", "signal 40"),
        ("signal_9", "reward_crash", "SIGKILL"),
        ("beyond_floats", "reward_error", "it returned '1000"),
        ("beyond_floats_in_parts", "reward_error", "a number, a dict of named numbers"),
        ("not_finite", "reward_error", "not finite"),
        ("parts_that_overflow", "reward_error", "not finite"),
        ("deep", "reward_error", "nested deeper than 50 levels"),
        ("odd_names", "reward_error", "a number, a dict of named numbers"),
        ("half_a_pair", "reward_error", r"\ud800"),
        ("escapes", "reward_error", r"ValueError: \x1b[2J\x1b[1;1H\nerror: forged\u202e"),
        ("endless_text", "reward_error", "ValueError: x"),
        ("error_that_raises", "reward_error", "RuntimeError"),
    ],
)
def test_a_reward_that_does_its_worst_drops_its_group_with_a_line(name, reason, detail):
    [failure] = scores(f"{REWARDS}:{name}", [("x", "y")])
    assert isinstance(failure, DataFailure) and failure.reason == reason
    assert detail in failure.detail
    assert str(failure).isprintable() and len(str(failure)) < 600


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)
HUGE = st.integers(-(10**600), 10**600)


@settings(max_examples=300, deadline=None)
@given(JSON | HUGE | st.dictionaries(st.text(min_size=1), HUGE | st.floats()))
def test_any_value_is_read_to_a_finite_score_or_a_failure(value):
    found = as_scored(_value_of(json.dumps({"value": value}).encode()))
    if isinstance(found, Scored):
        assert all(map(math.isfinite, (found.value, *found.parts.values())))
        assert all(map(str.isprintable, found.parts))
    else:
        assert isinstance(found, JobFailed) and str(found).isprintable()
    for other in (value, 10**400, 1.5, [], {}):
        assert same_value(value, other) in (True, False)


@settings(max_examples=300, deadline=None)
@given(
    st.binary()
    | JSON.map(lambda value: json.dumps(value).encode())
    | JSON.map(lambda value: json.dumps({"failure": value, "detail": value}).encode())
    | st.sampled_from([b"[" * 10**5, b'{"value":' * 10**5, b'{"value": ' + b"9" * 5000 + b"}"])
)
def test_any_answer_of_a_job_is_a_value_or_a_failure(answer):
    found = _value_of(answer)
    assert not isinstance(found, JobFailed) or str(found).isprintable()


@given(st.text(st.characters()))
def test_shown_text_steers_no_terminal(text):
    assert visible(text).isprintable()
    assert one_line(text, 40).isprintable() and len(one_line(text, 40)) <= 40


def test_messages_reach_screen_and_log_with_their_control_characters_shown(tmp_path, capsys):
    with log_to(tmp_path / "log.txt"):
        logging.getLogger("pentad.x").warning("dropped: %s", "\x1b[31mred\x07\u202e")
    shown = capsys.readouterr().err
    assert shown == "warning: dropped: \\x1b[31mred\\x07\\u202e\n"
    assert r"\x1b[31mred" in (tmp_path / "log.txt").read_text()
