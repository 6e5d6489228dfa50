"""Scores samples by reward functions, given by name or dotted path; handles their failures.

A reward is a plain function or coroutine that returns a number, a dict of named parts (their sum is
the reward) or a Scored; `functions.py` has its parameters. Several rewards are added with weights.
Built-ins that cannot hang run in the caller, all others in the pool of killable workers.

A failed reward is retried. If the sample is the cause, only this sample is affected; if not, its
group is dropped with a reason, or scored zero if configured.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import mean
from typing import TYPE_CHECKING, Literal

from pentad.core.errors import DataFailure, InfraFailure, Problem, UserError
from pentad.core.roles import Scored
from pentad.core.types import Group, Prompt, Sample
from pentad.rewards import code_tests
from pentad.rewards.calls import EACH
from pentad.rewards.functions import (
    ABSTAINED,
    BUILT_IN,
    INLINE,
    POOLED,
    RewardFunction,
    Verdict,
    check_columns,
    read_signature,
    together,
)
from pentad.rewards.judge import Judge
from pentad.rewards.sandbox import Cause, JobFailed, Sandbox
from pentad.rewards.section import JUDGE, MODELS, RewardConfig
from pentad.rewards.sharing import SharedJobs

if TYPE_CHECKING:
    from pentad.rewards.reward_model import RewardModel

log = logging.getLogger(__name__)
CAUSES: tuple[Cause, ...] = ("ours", "sample", "unclear")
"""Order of causes: if a sample has several failures, the first of these counts."""
CORRECT = "correct"
"""Reward part that evaluation counts as accuracy."""
FAILED = "reward_failed"
"""Reward part of samples without a reward; `reward_failed/KIND` is the reason."""


class RewardScorer:
    """Scores the samples of a group, all at once. Call `start` before use, `close` after.

    `answer_field`: the dataset field that functions receive as `answer`. Their random numbers
    depend on the run's `seed` and on the sample.
    """

    def __init__(
        self,
        reward: RewardConfig,
        *,
        answer_field: str = "answer",
        seed: int = 0,
    ) -> None:
        self.reward = reward
        self.answer_field = answer_field
        self.functions = [RewardFunction(fn, answer_field, seed) for fn in reward.functions]
        self.weights = reward.weights or (1.0,) * len(self.functions)
        self.names = part_names(self.functions)
        for function in self.functions:
            function.may_abstain = len(self.functions) > 1
        self.has_correct = any(function.fn in BUILT_IN for function in self.functions)
        """Whether rewards have the part `correct`."""
        self.shown: set[str] = set()
        """Kinds of failures that were logged."""
        self.pools: list[Sandbox] = []

    async def start(self) -> None:
        """Imports the functions in the processes that will run them and reads their parameters.
        Raises UserError."""
        for fn in self.reward.functions:
            if fn not in BUILT_IN and fn not in MODELS and ":" not in fn:
                names = ", ".join((*BUILT_IN, *MODELS))
                rule = f"there is no built-in reward of that name; there are {names}"
                remedy = "for your own, give package.module:function or path/to/file.py:function"
                raise UserError(Problem(f"reward.fn = {fn}", rule, remedy))
        for function in self.functions:
            if function.fn in MODELS:
                model = self._model(function.fn)
                model.start()
                function.give_model(model)
        pooled = [function for function in self.functions if function.is_pooled]
        programs = [function for function in self.functions if function.fn == "code"]
        if programs:
            pool = Sandbox(self.reward, [code_tests.CALL], isolate=True)
            await self._open_pool(programs, pool)
        if pooled:
            results = [POOLED[f.fn][1] for f in pooled if f.fn in POOLED]
            specs = [function.spec for function in pooled]
            await self._open_pool(pooled, Sandbox(self.reward, [*specs, *results, EACH]))

    def _model(self, fn: str) -> Judge | RewardModel:
        if fn == JUDGE:
            return Judge(self.reward.judge)
        from pentad.rewards.reward_model import RewardModel  # imports the engine

        return RewardModel(self.reward.model)

    async def _open_pool(self, functions: Sequence[RewardFunction], pool: Sandbox) -> None:
        jobs = SharedJobs(pool)
        self.pools.append(pool)
        try:
            signatures = await pool.start()
            for function in functions:
                function.jobs = jobs
                if function.is_pooled:
                    function.takes = read_signature(function.fn, signatures[function.spec])
        except UserError as failure:
            await self.close()
            is_missing = "No module named" in str(failure)
            if is_missing and any(function.fn in POOLED for function in functions):
                install = "Install it with pip install 'pentad[math]'."
                raise UserError([*failure.problems, install]) from failure
            raise

    def check_columns(self, columns: Iterable[str]) -> None:
        """Raises UserError if a function requires a column that these rows lack."""
        for function in self.functions:
            check_columns(function.fn, function.takes, columns)

    async def close(self) -> None:
        for function in self.functions:
            if function.model is not None:
                function.model.close()
        pools, self.pools = self.pools, []
        for pool in pools:
            await pool.close()

    async def score(self, group: Group) -> Group:
        """Sets the reward of every sample that its workflow has not scored."""
        waiting = [sample for sample in group.samples if sample.reward is None]
        mates = [sample for sample in group.samples if sample.reward is not None]
        passed = [sample for sample in mates if FAILED not in sample.reward_parts]
        verdicts = await self.judge(group.prompt, waiting, mates=passed)
        scored = [verdict for verdict in verdicts if isinstance(verdict, Scored)]
        self.has_correct |= any(CORRECT in one.parts for one in scored)
        known = [sample.reward for sample in mates if sample.reward is not None]
        known += [one.value for one in scored]
        settled = [self._settle(group.prompt, verdict, known) for verdict in verdicts]
        for sample, one in zip(waiting, settled, strict=True):
            sample.reward = one.value
            sample.reward_parts |= one.parts
        return group

    async def judge(
        self,
        prompt: Prompt,
        samples: Sequence[Sample],
        *,
        mates: Sequence[Sample] = (),
        repeats: bool = True,
    ) -> list[Scored | JobFailed]:
        """Returns a result per sample. `mates`: samples of the group that were scored before;
        `repeats`: failed calls are repeated once."""
        columns = await together(
            [f.judge(prompt, samples, mates=mates, repeats=repeats) for f in self.functions]
        )
        combined = [_bounded(self._combine(verdicts)) for verdicts in zip(*columns, strict=True)]
        works = any(isinstance(verdict, Scored) for verdict in combined)
        return [replace(v, cause="unclear") if v is ABSTAINED and works else v for v in combined]

    def _combine(self, verdicts: Sequence[Verdict]) -> Scored | JobFailed:
        first = verdicts[0]
        if len(verdicts) == 1 and isinstance(first, Scored) and self.weights[0] == 1:
            return first
        failed = [
            (name, verdict)
            for name, verdict in zip(self.names, verdicts, strict=True)
            if isinstance(verdict, JobFailed)
        ]
        if failed:  # a sample is the cause only if it caused all failures
            name, verdict = min(failed, key=lambda one: CAUSES.index(one[1].cause))
            detail = f"{name}: {verdict.detail}" if len(verdicts) > 1 else verdict.detail
            return JobFailed(verdict.kind, detail, verdict.cause)
        given = [
            (name, weight, verdict)
            for name, weight, verdict in zip(self.names, self.weights, verdicts, strict=True)
            if isinstance(verdict, Scored)
        ]
        if not given:
            return ABSTAINED
        value = sum(weight * scored.value for _, weight, scored in given)
        if len(self.functions) == 1:
            return Scored(value, given[0][2].parts)
        parts: dict[str, float] = {}
        for name, _, scored in given:
            parts[name] = scored.value
            for own, part in scored.parts.items():
                is_first = own == CORRECT and CORRECT not in parts
                parts[own if is_first else f"{name}/{own}"] = part
        return Scored(value, parts)

    @property
    def has_results(self) -> bool:
        """Whether `results` can be called."""
        return self._voting is not None

    @property
    def _voting(self) -> RewardFunction | None:
        """Returns the function whose results are votes; None if there is none, or several."""
        found = [f for f in self.functions if f.fn in INLINE or f.fn in POOLED]
        return found[0] if len(found) == 1 else None

    async def results(self, group: Group) -> list[str | None]:
        """Returns the result of each sample, for majority votes; None: no result."""
        return await asyncio.gather(*(self._result(sample.text) for sample in group.samples))

    async def _result(self, completion: str) -> str | None:
        function = self._voting
        assert function is not None, "has_results comes first"
        if function.fn in INLINE:
            found = INLINE[function.fn][1](completion)
            return None if found is None else str(found)
        assert function.jobs is not None, "start() comes first"
        answer = await function.jobs.run(POOLED[function.fn][1], {"completion": completion})
        if isinstance(answer, JobFailed):
            if answer.kind == "lost":
                raise InfraFailure(f"the reward pool lost a worker: {answer.detail}")
            return None
        assert answer is None or isinstance(answer, str)
        return answer

    def _settle(self, prompt: Prompt, result: Scored | JobFailed, mates: Sequence[float]) -> Scored:
        """Returns the reward of a failed sample. `mates`: the known rewards of its group; without
        any the group is dropped if the cause is unclear."""
        if isinstance(result, Scored):
            return result
        if result.kind == "lost":
            raise InfraFailure(f"the reward pool lost a worker: {result.detail}")
        value = reward_of_failed(mates, "sample") if result.cause == "sample" else 0.0
        is_open = result.cause == "ours" or (result.cause == "unclear" and not mates)
        if self.reward.on_failure == "drop" and is_open:
            raise DataFailure(f"reward_{result.kind}", result.detail)
        if self.reward.on_failure == "drop" and result.cause == "unclear":
            value = reward_of_failed(mates, "unclear")
        self._show_once(prompt, result, value)
        parts = {FAILED: 1.0, f"{FAILED}/{result.kind}": 1.0}
        is_wrong = self.has_correct and result.cause == "sample"
        return Scored(value, parts | ({CORRECT: 0.0} if is_wrong else {}))

    def _show_once(self, prompt: Prompt, failed: JobFailed, value: float) -> None:
        """Logs the first failure of each kind that drops no group."""
        if failed.kind not in self.shown:
            self.shown.add(failed.kind)
            rule = "the reward fails on an answer, which is scored"
            log.warning("prompt %d: %s %g (%s)", prompt.gid, rule, value, failed)


def reward_of_failed(mates: Sequence[float], cause: Literal["sample", "unclear"]) -> float:
    """Returns the reward of a failed sample, given those of its group. If the sample is the cause,
    it gets no reward above 0 or above theirs. If the cause is unclear, it gets their mean, so that
    it is neither rewarded nor punished."""
    return min([0.0, *mates]) if cause == "sample" else mean(mates)


def _bounded(verdict: Scored | JobFailed) -> Scored | JobFailed:
    """Fails a verdict whose weighted sum exceeds the range of floats."""
    if isinstance(verdict, Scored) and not math.isfinite(verdict.value):
        detail = f"with the weights of reward.weights its value is {verdict.value}"
        return JobFailed("error", detail, "sample")
    return verdict


def part_names(functions: Sequence[RewardFunction]) -> list[str]:
    """Returns the names of the functions' values among the parts of a sample's reward."""
    taken = Counter(function.name for function in functions)
    names = [f.name if taken[f.name] == 1 else f.long_name for f in functions]
    twice = [name for name, num in Counter(names).items() if num > 1]
    if twice:
        rule = f"{twice[0]} is in it twice, and parts of a reward have different names"
        raise UserError(Problem("reward.fn", rule, "rename one of the functions"))
    return names
