"""Rewards: what counts as right, what a function may take and return, and how failures end."""

import asyncio
import json
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pentad.core.errors import DataFailure, InfraFailure, UserError
from pentad.core.types import Group, Prompt, Sample
from pentad.rewards import verifiers
from pentad.rewards.code_tests import program_in, read_tests, same_output, same_value
from pentad.rewards.functions import BUILT_IN, as_scored
from pentad.rewards.sandbox import JobFailed
from pentad.rewards.scorer import RewardScorer
from pentad.rewards.section import RewardConfig
from pentad.trainer.records import mean_parts


def group_of(texts, answer="42", **fields) -> Group:
    samples = [
        Sample(
            ids=np.array([1, 2, 3 + i]),
            mask=np.array([False, False, True]),
            rollout_logprobs=np.zeros(3, np.float32),
            versions=np.array([-1, -1, 0]),
            finish="stop",
            text=text,
        )
        for i, text in enumerate(texts)
    ]
    return Group(Prompt(9, (1, 2), {"answer": answer, **fields}, "what?"), samples)


def score(fn, group: Group, use=None, **changes) -> Group:
    """Scores one group, or does what `use(scorer)` says."""
    beside = {"seed", "answer_field"} & {*changes}
    beside = {name: changes.pop(name) for name in beside}
    keys = {"num_workers": 1, "timeout_s": 20.0} | changes

    async def run():
        name = fn if isinstance(fn, tuple) else str(fn)
        scorer = RewardScorer(RewardConfig(fn=name, **keys), **beside)
        await scorer.start()
        try:
            return await (use(scorer) if use else scorer.score(group))
        finally:
            await scorer.close()

    return asyncio.run(run())


def rewards(group: Group) -> list[float | None]:
    return [sample.reward for sample in group.samples]


# --- built-ins that compare -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "completion", "answer", "expected"),
    [
        ("exact_match", " 42\n", "42", 1),
        ("exact_match", "42.", "42", 0),
        ("exact_match", "42", 42, 1),
        ("numeric", "so 6 * 7 = 42.", "42", 1),
        ("numeric", "it is 1,234,567.50 dollars", "1234567.5", 1),
        ("numeric", "it is -3", "-3", 1),
        ("numeric", "x = \u22123", "-3", 1),
        ("numeric", "from 5-3", "3", 1),
        ("numeric", "42 or rather 41", "42", 0),
        ("numeric", "no idea", "42", 0),
        ("numeric", "", "0", 0),
        ("numeric", "9" * 100_000, "9", 0),
        ("gsm8k", "6 * 7 = 42\n#### 42", "thinking 7\n#### 42", 1),
        ("gsm8k", "#### $1,000", "1000", 1),
        ("gsm8k", "#### 41\n#### 42 apples, 7 pears", "#### 42", 1),
        ("gsm8k", "the answer is 42", "#### 42", 0),
        ("gsm8k", "####", "#### 42", 0),
        ("sort_digits", "01234", "01234", 1),
        ("sort_digits", "01243", "01234", 0.5 * 3 / 5),
        ("sort_digits", "0123", "01234", 0.5 * 4 / 5),
        ("sort_digits", "0123401234", "01234", 0.5 * 5 / 10),
        ("sort_digits", "", "01234", 0),
    ],
)
def test_comparisons(name, completion, answer, expected):
    group = score(name, group_of([completion], answer))
    assert rewards(group) == [expected]
    assert group.samples[0].reward_parts == {"correct": float(expected == 1)}


@given(st.fractions(), st.booleans())
def test_numeric_accepts_every_spelling_of_a_decimal(value, separators):
    value = round(value, 3)
    text = f"{float(value):,.3f}" if separators else f"{float(value):.3f}"
    if abs(value) < Fraction(10**9):  # beyond that a float no longer has three decimals
        assert verifiers.numeric(f"answer: {text} units", text).value == 1.0
        assert verifiers.numeric(f"answer: {text}", f"{float(value + 1):.3f}").value == 0.0


def test_an_expected_answer_without_a_number_is_the_datas_fault_and_no_zero():
    with pytest.raises(DataFailure, match="'none' holds no number") as caught:
        score("numeric", group_of(["42"], "none"))
    assert caught.value.reason == "reward_error"


MATHS = [
    (r"so the result is \boxed{\frac{1}{2}}", "1/2", 1),
    (r"\boxed{0.5}", r"\frac{1}{2}", 1),
    (r"$\frac{2}{4}$", "0.5", 1),
    (r"\boxed{3\sqrt{2}}", r"3\sqrt{2}", 1),
    (r"\boxed{3}", r"3\sqrt{2}", 0),
    (r"\boxed{\sqrt{18}}", r"3\sqrt{2}", 1),
    (r"\boxed{1+x^2}", "x^2+1", 1),
    (r"\boxed{\{2,1\}}", r"\{1,2\}", 1),
    (r"\boxed{[0,1)}", "[0,1)", 1),
    (r"\boxed{[0,1]}", "[0,1)", 0),
    (r"first \boxed{1}. No, that is wrong: \boxed{2}", "2", 1),
    (r"first \boxed{1}. No, that is wrong: \boxed{2}", "1", 0),
    (r"\boxed{1} and \boxed{2}", r"\{1,2\}", 1),
    ("the answer is 72", "reasoning\n#### 72", 1),
    (r"\boxed{10\%}", r"10\%", 1),
    ("I do not know", "5", 0),
    ("", "5", 0),
]


def test_mathematical_answers_are_compared_as_mathematics():
    async def use(scorer):
        got = {}
        for completion, answer, _ in MATHS:
            group = await scorer.score(group_of([completion], answer))
            got[completion, answer] = group.samples[0].reward
        return got

    expected = {(completion, answer): value for completion, answer, value in MATHS}
    assert score("math", group_of([]), use) == expected


TOWER = r"\boxed{9^{9^{9^{9}}}}"


@pytest.mark.parametrize("mates", [[], [r"\boxed{7}"], [TOWER]])
def test_a_tower_of_powers_ends_in_time_and_is_wrong(mates):
    """Alone, beside a right answer, and where all answers are such."""
    limits = {"num_workers": 1, "timeout_s": 2.0 if mates == [r"\boxed{7}"] else 1.0}
    group = score("math", group_of([TOWER, *mates], "7"), **limits)
    assert rewards(group) == [0.0, *(float(mate != TOWER) for mate in mates)]
    assert group.samples[0].reward_parts["correct"] == 0.0
    assert group.samples[0].reward_parts["reward_failed"] == 1.0


def test_a_row_whose_own_answer_is_a_tower_drops_its_group():
    limits = {"num_workers": 1, "timeout_s": 0.5}
    with pytest.raises(DataFailure) as caught:
        score("math", group_of([r"\boxed{7}"], TOWER), **limits)
    assert caught.value.reason in ("reward_timeout", "reward_memory")


# --- code -------------------------------------------------------------------------------------

ADD = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
IO = json.dumps([{"input": "1 2\n", "output": "3\n"}, {"input": "5 6", "output": "11"}])
CALLS = json.dumps({"fn_name": "add", "inputs": [[1, 2], [5, 6]], "outputs": [3, 11]})
CODE = {
    "right": (f"Here it is:\n{ADD}\ndone", IO, 1, 1.0),
    "the last block counts": (f"```python\nprint(0)\n```\nbetter:\n{ADD}", IO, 1, 1.0),
    "no fence": ("print(sum(map(int, input().split())))", IO, 1, 1.0),
    "right once": ("```\nprint(3)\n```", IO, 0, 0.5),
    "wrong": ("```\nprint(4)\n```", IO, 0, 0.0),
    "no program": ("I would rather not.", IO, 0, 0.0),
    "raises after printing": ("print(sum(map(int, input().split())))\n1/0", IO, 0, 0.0),
    "hangs": ("while True: pass", IO, 0, 0.0),
    "forks": ("import os\nos.fork()\nprint(sum(map(int, input().split())))", IO, 0, 0.0),
    "floods": ("while True: print('x' * 99999)", IO, 0, 0.0),
    "lies about its verdict": ("import os\nfor f in range(3, 9):\n  try: os.write(f, b'+3')\n"
                               "  except OSError: pass\nos._exit(0)", IO, 0, 0.0),
    "function": ("def add(a, b): return a + b", CALLS, 1, 1.0),
    "method": ("class Solution:\n  def add(self, a, b): return a + b", CALLS, 1, 1.0),
    "wrong function": ("def sub(a, b): return a - b", CALLS, 0, 0.0),
    "asserts": ("def f(x): return x", ["assert f(1) == 1", "assert f(2) == 2"], 1, 1.0),
    "failing assert": ("def f(x): return 1", ["assert f(1) == 1", "assert f(2) == 2"], 0, 0.5),
    "leaves before its asserts": ("import os; os._exit(0)", ["assert False"], 0, 0.0),
}  # fmt: skip


def test_programs_are_judged_by_what_they_do():
    async def use(scorer):
        ends = {}
        for name, (completion, tests, _, _) in CODE.items():
            [sample] = (await scorer.score(group_of([completion], tests))).samples
            ends[name] = (sample.reward, sample.reward_parts["passed"])
            assert sample.reward_parts["timeout"] == float(name == "hangs")
        return ends

    limits = {"num_workers": 1, "timeout_s": 2.0, "memory_mb": 512}
    expected = {name: (value, passed) for name, (_, _, value, passed) in CODE.items()}
    assert score("code", group_of([]), use, **limits) == expected


@pytest.mark.parametrize(
    "tests", ["", "[]", '{"inputs": [1]}', 7, '{"inputs": [1], "outputs": []}']
)
def test_tests_in_no_known_form_are_the_datas_fault_and_no_zero(tests):
    with pytest.raises(DataFailure, match="reward_error"):
        score("code", group_of([ADD], tests))


def test_outputs_are_compared_word_by_word():
    assert same_output("1 2\n3\n", "1  2 3") and not same_output("1 2", "1 2 3")
    assert same_output("0.33333333", "0.3333333333") and not same_output("0.3334", "0.33333333")
    assert not same_output("0.3333333", "1/3") and not same_output("3.0", "3")
    assert same_value([1, 2.0], [1, 2.0000001]) and not same_value([1], [1, 1])
    assert not same_value(True, 1) and not same_value("1", 1) and same_value(None, None)
    assert same_value({"a": [1]}, {"a": [1]}) and not same_value({"a": 1}, {"b": 1})
    assert program_in("no fence") == "no fence" and read_tests("assert f()").kind == "assert"


# --- rewards of one's own ---------------------------------------------------------------------


@pytest.fixture
def custom(tmp_path):
    def write(source: str) -> str:
        file = tmp_path / "mine.py"
        file.write_text("import os, time\nfrom pathlib import Path\n" + source)
        return f"{file}:reward"

    return write


@pytest.mark.parametrize(
    ("source", "value", "parts"),
    [
        ("def reward(completion): return len(completion)", 2.0, {}),
        ("def reward(completion, answer): return completion == answer", 1.0, {}),
        ("async def reward(completion, answer='x'): return float(answer)", 42.0, {}),
        ("def reward(completion, **rest): return len(rest)", 6.0, {}),
        ("def reward(completion, extra, level=7): return extra * level", 7.0, {}),
        ("def reward(ids, prompt): return {'id': ids[0], 'len': len(prompt)}", 8.0,
         {"id": 3.0, "len": 5.0}),
        ("def reward(sample, fields): return sample['mask'][2] * len(fields)", 2.0, {}),
        ("def reward(*, completion, level=1): return level", 1.0, {}),
        ("from dataclasses import dataclass, field\n@dataclass\nclass Scored:\n  value: float\n"
         "  parts: dict\ndef reward(completion): return Scored(0.5, {'format': 1})", 0.5,
         {"format": 1.0}),
        ("import numpy\ndef reward(completion): return numpy.float32(0.5)", 0.5, {}),
    ],
)  # fmt: skip
def test_a_reward_takes_and_returns_what_it_likes_of_what_there_is(custom, source, value, parts):
    [sample] = score(custom(source), group_of(["42"], extra=1)).samples
    assert sample.reward == value and sample.reward_parts == parts


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("def reward(completion, /): pass", r"'completion \(positional only\)'"),
        ("def reward(answer): pass", "it cannot see the answer"),
        ("reward = 3", "is not a function"),
        ("def other(): pass", r"\.py has no attribute 'reward' \(it defines other\)"),
        ("import no_such_library", "No module named 'no_such_library'"),
    ],
)
def test_a_signature_that_cannot_work_is_refused_before_the_run(custom, source, sentence):
    with pytest.raises(UserError, match=sentence):
        score(custom(source), group_of(["42"]))


def test_unknown_names_list_the_built_in_ones():
    with pytest.raises(UserError, match=f"there are {', '.join(BUILT_IN)}"):
        score("gsm8", group_of(["42"]))


def test_a_missing_answer_field_names_the_fields_there_are(custom):
    group = Group(Prompt(9, (1,), {"question": "q", "solution": "42"}), group_of(["42"]).samples)
    with pytest.raises(UserError, match=r"no field 'answer'.*\['question', 'solution'\]"):
        score("numeric", group)
    assert rewards(score("numeric", group, answer_field="solution")) == [1.0]


def test_relative_files_work_from_any_folder(custom, tmp_path, monkeypatch):
    custom("from beside import VALUE\ndef reward(completion): return VALUE")
    (tmp_path / "beside.py").write_text("VALUE = 0.75\n")
    monkeypatch.chdir(tmp_path)
    assert rewards(score("mine.py:reward", group_of(["42"]))) == [0.75]


FAILURES = {
    "time.sleep(600)": "timeout",
    "os._exit(1)": "crash",
    "return 3_000_000 * 'x'": "output",
    "held = [bytes(1 << 20) for _ in range(4000)]": "memory",
    "raise ValueError('bad row')": "error",
    "return None": "error",
    "return float('nan')": "error",
    "return {'a': 'high'}": "error",
    "return '[' * 3000": "error",
}
"""What a function of the user's does on an answer, and what that counts as."""
LIMITS = {"num_workers": 1, "timeout_s": 3.0, "memory_mb": 512}


def function_that(body: str, *, is_batched: bool) -> str:
    """2 for every answer, but for `bad`, on which it does this."""
    if not is_batched:
        return f"def reward(completion):\n  if completion == 'bad':\n    {body}\n  return 2.0"
    return (
        f"def one(completion):\n  if completion == 'bad':\n    {body}\n  return 2.0\n"
        "def reward(completions, **rest): return [one(text) for text in completions]"
    )


@pytest.mark.parametrize("is_batched", [False, True])
@pytest.mark.parametrize("body", FAILURES)
def test_an_answer_that_a_reward_fails_on_costs_its_mates_nothing(custom, body, is_batched):
    """No answer drops its group. What it does to the process scores it 0; what makes the function
    raise may be the function's mistake, and leaves it the mean of its mates."""
    fn, kind = custom(function_that(body, is_batched=is_batched)), FAILURES[body]
    group = score(fn, group_of(["good", "bad", "good"]), **LIMITS)
    assert rewards(group) == [2.0, 2.0 if kind == "error" else 0.0, 2.0]
    parts = [sample.reward_parts for sample in group.samples]
    assert parts == [{}, {"reward_failed": 1.0, f"reward_failed/{kind}": 1.0}, {}]


@pytest.mark.parametrize("is_batched", [False, True])
@pytest.mark.parametrize("body", FAILURES)
def test_a_reward_that_fails_on_all_answers_drops_the_group_and_is_no_zero(
    custom, body, is_batched
):
    fn = custom(function_that(body, is_batched=is_batched))
    group = group_of(["bad", "bad"])
    limits = LIMITS | ({"timeout_s": 1.0} if FAILURES[body] == "timeout" else {})
    with pytest.raises(DataFailure) as caught:
        score(fn, group, **limits)
    assert caught.value.reason == f"reward_{FAILURES[body]}"
    assert rewards(group) == [None, None]


@pytest.mark.parametrize("other", ["if completion == 'good': 1 / 0\n  return 2.0", "return None"])
@pytest.mark.parametrize("texts", [["bad", "good"], ["good", "bad"]])
def test_a_group_in_which_no_answer_has_all_its_rewards_is_dropped(custom, texts, other):
    """Each function works on one of the answers, so none of them is to blame."""
    first = "def reward(completion):\n  if completion == 'bad': 1 / 0\n  return None"
    fn = custom(f"{first}\ndef other(completion):\n  {other}")
    with pytest.raises(DataFailure) as caught:
        score((fn, fn.replace(":reward", ":other")), group_of(texts), **LIMITS)
    assert caught.value.reason == "reward_error"


def test_an_answer_is_blamed_only_if_the_reward_works_on_a_mate_at_that_time(custom, tmp_path):
    """A service that goes away between two answers of a group."""
    fn = custom(
        f"def reward(completion):\n  mark = Path({str(tmp_path / 'away')!r})\n"
        "  if completion == 'last': mark.touch()\n"
        "  if mark.exists(): os._exit(1)\n  return 1.0"
    )

    async def use(scorer):
        scorer.functions[0].waits_together = False
        scorer.functions[0].call_s = 1.0  # one job after the other, on one worker
        await scorer.score(group_of(["first", "last"]))

    with pytest.raises(DataFailure, match="reward_crash"):
        score(fn, None, use)


def test_a_failing_answer_is_scored_no_better_than_its_mates(custom):
    """Else crashing the reward would pay where rewards are penalties."""
    fn = custom("def reward(completion):\n  if completion == 'bad': os._exit(1)\n  return -1.5")
    assert rewards(score(fn, group_of(["x", "bad"]))) == [-1.5, -1.5]


def test_answers_that_write_to_the_pipe_of_their_result_are_wrong_and_cost_their_mates_nothing():
    write = "import os\nfor f in range(3, 60):\n  try: os.write(f, b'{}')\n  except OSError: pass\n"
    texts = [
        f"```python\n{write.format(text)}os._exit(0)\n```"
        for text in ('["value"]', '"value"', "7", "null", '{"value": 3}{', "[" * 10_000, "{}", "-")
    ]
    right = "```python\ndef f(): return 3\n```"
    answer = {"fn_name": "f", "inputs": [[]], "outputs": [3]}
    group = score("code", group_of([right, *texts, right], answer))
    assert rewards(group) == [1.0, *[0.0] * len(texts), 1.0]


def test_zero_for_a_failed_reward_has_to_be_asked_for_and_is_marked(custom):
    fn = custom("def reward(completion): return 1 / (completion != 'bad')")
    group = score(fn, group_of(["good", "bad"]), on_failure="zero")
    assert rewards(group) == [1.0, 0.0]
    marks = {"reward_failed": 1.0, "reward_failed/error": 1.0}
    assert [s.reward_parts for s in group.samples] == [{}, marks]


def test_a_row_that_cannot_travel_is_named(custom):
    fn = custom("def reward(completion, fields): return 1.0")
    with pytest.raises(UserError, match="its arguments cannot be sent to another process"):
        score(fn, group_of(["x"], extra=lambda: None))


def test_a_reward_that_fails_once_is_tried_again(custom, tmp_path):
    fn = custom(
        f"def reward(completion):\n  mark = Path({str(tmp_path / 'mark')!r})\n"
        "  if mark.exists(): return 0.5\n  mark.touch()\n  os._exit(1)"
    )
    assert rewards(score(fn, group_of(["x"]))) == [0.5]


@pytest.mark.parametrize(("fn", "answer"), [("math", "1"), ("code", IO), ("code", ["assert f()"])])
def test_a_lost_worker_is_the_machinerys_fault_and_no_verdict(fn, answer):
    async def use(scorer):
        async def lost(*args, **kwargs):
            return JobFailed("lost", "its pipe is closed")

        scorer.pools[0].run = lost
        await scorer.score(group_of(["x"], answer))

    with pytest.raises(InfraFailure, match="the reward pool lost a worker: its pipe is closed"):
        score(fn, group_of(["x"]), use, on_failure="zero")


def test_samples_are_scored_at_the_same_time(custom, tmp_path):
    """Two jobs that each wait for the other's mark can only end if both run."""
    fn = custom(
        f"def reward(completion):\n  here = Path({str(tmp_path)!r})\n"
        "  (here / completion).touch()\n"
        "  while not ((here / 'a').exists() and (here / 'b').exists()): time.sleep(0.01)\n"
        "  return 1.0"
    )
    limits = {"num_workers": 2, "timeout_s": 60.0}
    assert rewards(score(fn, group_of(["a", "b"]), **limits)) == [1.0, 1.0]


def test_quick_calls_share_a_job_and_do_not_see_what_others_did_to_their_arguments(custom):
    fn = custom(
        "def reward(completion, fields):\n"
        "  fields['seen'] = fields.get('seen', 0) + 1\n"
        "  return {'pid': os.getpid(), 'seen': fields['seen']}"
    )

    def num_jobs(samples):
        return len({sample.reward_parts["pid"] for sample in samples})

    async def use(scorer):
        first = (await scorer.score(group_of("abcdefgh"))).samples
        for _ in range(30):  # on busy cores a quick call may look like a slow one at first
            later = (await scorer.score(group_of("abcdefgh"))).samples
            if num_jobs(later) == 1:
                break
        return first, later

    first, second = score(fn, None, use)
    assert num_jobs(first) == 8 and num_jobs(second) == 1
    assert {sample.reward_parts["seen"] for sample in [*first, *second]} == {1.0}


@pytest.mark.parametrize("body", ["while True: pass", "os._exit(1)", "raise KeyError('x')"])
def test_one_bad_sample_of_a_shared_job_costs_the_others_nothing(custom, body):
    fn = custom(f"def reward(completion):\n  if completion == 'bad':\n    {body}\n  return 1.0")
    limits = {"num_workers": 1, "timeout_s": 1.5 if "while" in body else 20.0}

    async def use(scorer):
        await scorer.score(group_of(["a"]))  # it is a quick one
        return await scorer.score(group_of(["a", "bad", "b"]))

    group = score(fn, None, use, **limits, on_failure="zero")
    assert rewards(group) == [1.0, 0.0, 1.0]
    assert group.samples[1].reward_parts["reward_failed"] == 1.0


def test_slow_calls_have_jobs_of_their_own_and_coroutines_wait_together(custom):
    slow = "reward(completion):\n  {}time.sleep(0.2)\n  return os.getpid()"
    source = "import asyncio\nclass time:\n  sleep = staticmethod(asyncio.sleep)\n"

    async def use(scorer):
        await scorer.score(group_of(["a"]))
        return await scorer.score(group_of("abcd"))

    limits = {"num_workers": 2, "timeout_s": 60.0}
    group = score(custom("def " + slow.format("")), None, use, **limits)
    assert len(set(rewards(group))) == 4
    group = score(custom(source + "async def " + slow.format("await ")), None, use, **limits)
    assert len(set(rewards(group))) == 1


def test_what_a_reward_raises_is_told_with_its_place(custom):
    fn = custom("def help(x):\n  return x + answr\n\ndef reward(completion):\n  return help(1)")
    with pytest.raises(DataFailure) as caught:
        score(fn, group_of(["x"]))
    assert caught.value.detail == (
        f"NameError: name 'answr' is not defined ({fn.rpartition(':')[0]}, line 4)"
    )


# --- whole groups, several functions ----------------------------------------------------------

TRL = """
def reward(completions, answer, **kwargs):
    assert sorted(kwargs) == ["completion_ids", "prompts", "solution"], sorted(kwargs)
    assert kwargs["prompts"] == ["what?"] * len(completions)
    assert kwargs["completion_ids"] == [[3 + i] for i in range(len(completions))]
    same = [c == a for c, a in zip(completions, answer)]
    return [float(s) + 0.1 * (sol == "s") for s, sol in zip(same, kwargs["solution"])]
"""


def test_a_batched_function_is_called_once_for_a_group(custom):
    fn = custom(TRL)

    async def use(scorer):
        [pool] = scorer.pools
        run, jobs = pool.run, []

        async def counted(spec, *args):
            jobs.append(spec)
            return await run(spec, *args)

        pool.run = counted
        group = await scorer.score(group_of(["42", "41", "42"], solution="s", prompt="q"))
        return rewards(group), len(jobs)

    assert score(fn, None, use) == ([1.1, 0.1, 1.1], 1)


@pytest.mark.parametrize(
    ("source", "detail"),
    [
        ("return [1.0]", "it returned 1 values for 2 completions"),
        ("return 1.0", "it returned '1.0' where a list of numbers is required"),
        ("return ['x' for _ in completions]", "it returned 'x' where a number"),
        ("return [None for _ in completions]", "it returned None where a number"),
        ("return completions[0][0]['content']", "TypeError: string indices must be integers"),
    ],
)
def test_a_batched_function_that_returns_something_else_fails(custom, source, detail):
    with pytest.raises(DataFailure) as caught:
        score(custom(f"def reward(completions, **kwargs): {source}"), group_of(["a", "b"]))
    assert caught.value.detail.startswith(detail)


def test_several_functions_add_up_by_their_weights_and_stay_parts(custom):
    fn = custom(
        "def reward(completions, **kwargs):\n"
        "  return [None if c == 'x' else len(c) for c in completions]\n"
        "def style(completion): return {'upper': completion.isupper(), 'bonus': 2}"
    )
    names = ("exact_match", fn, fn.replace(":reward", ":style"))
    group = score(names, group_of(["42", "x"]), weights=(1.0, 0.5, 2.0))
    assert rewards(group) == [1.0 + 0.5 * 2 + 2.0 * 2, 2.0 * 2]
    parts = {"exact_match": 1.0, "correct": 1.0, "reward": 2.0}
    style = {"style": 2.0, "style/upper": 0.0, "style/bonus": 2.0}
    assert group.samples[0].reward_parts == {**parts, **style}
    assert group.samples[1].reward_parts == {"exact_match": 0.0, "correct": 0.0, **style}


def test_a_failure_of_one_of_several_functions_names_it(custom):
    fn = custom("def reward(completion): return 1 / 0")
    with pytest.raises(DataFailure, match="reward_error: reward: ZeroDivisionError"):
        score(("exact_match", fn), group_of(["42"]))
    with pytest.raises(UserError, match=r"mine.reward is in it twice"):
        score((fn, fn), group_of(["42"]))


def test_a_function_that_requires_an_absent_column_is_told_which_there_are(custom):
    async def use(scorer):
        scorer.check_columns(["question", "solution"])

    fn = custom("def reward(completion, soluton): pass")
    with pytest.raises(UserError) as caught:
        score(fn, None, use)
    assert (
        "it requires 'soluton', and rows have no such column; the columns are question, solution"
        in str(caught.value)
    )
    score(custom("def reward(completion, solution, answer): pass"), None, use)
    score(custom("def reward(completions, solution, answer, **rest): pass"), None, use)


MAY = """
import socket, subprocess, sys, threading
HERE = Path(__file__).parent

def refused(act):
    try:
        act()
    except PermissionError:
        return True

def reward(completion):
    with socket.socket():
        pass
    thread = threading.Thread(target=(HERE / "written").touch)
    thread.start(), thread.join()  # the worker may end with the answer
    Path("own").write_text("x")
    return {
        "reads beside itself": (HERE / "data.txt").read_text() == "d",
        "starts in a folder of its own": [p.name for p in Path(".").iterdir()] == ["own"],
        "sees no GPU": os.environ["CUDA_VISIBLE_DEVICES"] == "",
        "has one thread": os.environ["OMP_NUM_THREADS"] == "1",
        "has the environment": os.environ["MY_JUDGE"] == "url",
        "has no standard input": sys.stdin.read() == "",
        "starts no process": refused(lambda: subprocess.run(["true"])) and refused(os.fork),
    }
"""


def test_a_reward_may_do_what_the_page_says(custom, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_JUDGE", "url")
    (tmp_path / "data.txt").write_text("d")
    [sample] = score(custom(MAY), group_of(["x"])).samples
    assert [name for name, holds in sample.reward_parts.items() if not holds] == []
    assert (tmp_path / "written").exists(), "files outside of its folder stay"


def test_what_a_workflow_has_scored_is_left_alone():
    group = group_of(["41", "42"])
    group.samples[0].reward = 0.3
    assert rewards(score("numeric", group)) == [0.3, 1.0]


def test_values_are_read_with_care():
    assert as_scored({"value": 1, "parts": {"a": True}}).parts == {"a": 1.0}
    assert as_scored({}).kind == "error" and as_scored([1.0]).kind == "error"
    assert as_scored({"value": "1", "parts": {}}).kind == "error"
    assert as_scored(JobFailed("timeout", "")).kind == "timeout"


def test_gsm8k_solutions_score_themselves_and_not_each_other():
    rows = [
        "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nAltogether 72.\n#### 72",
        "The cost is $<<2*5=10>>10.\n#### 1,080",
    ]
    for i, row in enumerate(rows):
        assert verifiers.gsm8k(row, row).value == 1.0
        assert verifiers.gsm8k(row, rows[1 - i]).value == 0.0


# --- random numbers ---------------------------------------------------------------------------

DRAWING = """
import random
import numpy

def one(completion):
    return random.random() + numpy.random.random()

def many(completions):
    return [random.random() + numpy.random.random() for _ in completions]

async def waiting(completion):
    return random.random()
"""


@pytest.mark.parametrize("name", ["one", "many", "waiting"])
def test_what_a_reward_draws_follows_from_seed_prompt_and_sample(tmp_path, name):
    file = tmp_path / "drawing.py"
    file.write_text(DRAWING)

    async def twice(scorer):
        """The first group of a function is not batched as later ones are."""
        scored = [await scorer.score(group_of(["a", "a", "a", "b"])) for _ in range(3)]
        return [rewards(group) for group in scored]

    def drawn(seed, num_workers):
        limits = {"num_workers": num_workers, "timeout_s": 20.0}
        return score(f"{file}:{name}", None, twice, seed=seed, **limits)

    first, *later = drawn(3, 1)
    assert len(set(first)) == 4, "samples draw apart"
    assert all(one == first for one in [*later, *drawn(3, 2)])
    assert not set(first) & set(drawn(4, 1)[0])


def test_the_share_of_failed_rewards_is_one_of_all_samples():
    group = group_of("abcd")
    group.samples[0].reward_parts = {"reward_failed": 1.0, "reward_failed/timeout": 1.0}
    group.samples[1].reward_parts = {"correct": 1.0}
    shares = {"correct": 1.0, "reward_failed": 0.25, "reward_failed/timeout": 0.25}
    assert mean_parts([group]) == shares
