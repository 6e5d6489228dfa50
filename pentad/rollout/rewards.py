"""Rewards by name or dotted path: which function scores a sample, where it runs, what if it fails.

A reward is a plain function or coroutine of any of PARAMETERS that returns a number, a dict of
named parts (their sum is the reward) or a Scored. Built-ins that cannot hang run in the caller;
everything else runs in the pool of killable workers. A reward that fails is tried again, then its
group is dropped with a reason, or scored zero where that was asked for.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pentad.core.errors import Problem, UserError
from pentad.core.roles import Scored
from pentad.core.types import Group, Prompt, Sample
from pentad.rollout import code_tests, verifiers
from pentad.rollout.failures import DataFailure, InfraFailure
from pentad.rollout.sandbox import JobFailed, Sandbox, SandboxSettings, Signature
from pentad.rollout.specs import absolute

PARAMETERS = {
    "completion": "the sampled text",
    "prompt": "the prompt as text",
    "answer": "the answer field of the dataset row",
    "fields": "the whole dataset row",
    "ids": "the sampled token ids",
    "sample": "a dict: ids, mask, text, finish, reward_parts",
}
SEES_THE_ANSWER = {"completion", "ids", "sample"}

INLINE: dict[str, Callable[[str, object], Scored]] = {
    "exact_match": verifiers.exact_match,
    "numeric": verifiers.numeric,
    "gsm8k": verifiers.gsm8k,
    "sort_digits": verifiers.sort_digits,
}
"""Trusted, linear in time, and so run where they are called."""
POOLED = {"math": "pentad.rollout.mathematics:math"}
RESULTS: dict[str, Callable[[str], object]] = {
    "exact_match": str.strip,
    "numeric": verifiers.numeric_result,
    "gsm8k": verifiers.gsm8k_result,
    "sort_digits": str.strip,
}
"""What a completion comes to under these rewards: equal results are judged alike."""
POOLED_RESULTS = {"math": "pentad.rollout.mathematics:result_of"}
BUILT_IN = (*INLINE, *POOLED, "code")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSettings:
    """Which reward, and what happens when it fails."""

    fn: str
    """A name of BUILT_IN, `package.module:function` or `path/to/file.py:function`."""
    answer_field: str = "answer"
    """Dataset field that is given as `answer`."""
    on_failure: Literal["drop", "zero"] = "drop"
    """After the last try: drop the group and count the reason, or score the sample 0."""
    max_retries: int = 1
    sandbox: SandboxSettings = field(default_factory=SandboxSettings)


class RewardScorer:
    """Scores the samples of a group, all at once. `start` before use, `close` after."""

    def __init__(self, settings: RewardSettings) -> None:
        self.settings = settings
        self.spec = absolute(POOLED.get(settings.fn, settings.fn))
        self.wanted: set[str] = {"completion", "answer"}
        self.needs_answer = True
        self.sandbox: Sandbox | None = None

    async def start(self) -> None:
        """Imports the reward where it will run and checks its signature. Raises UserError."""
        fn, limits = self.settings.fn, self.settings.sandbox
        if fn in INLINE:
            return
        if fn == "code":
            self.sandbox = Sandbox(replace(limits, isolate=True), [code_tests.CALL])
            await self.sandbox.start()
            return
        if ":" not in self.spec:
            rule = f"there is no built-in reward of that name; there are {', '.join(BUILT_IN)}"
            remedy = "for your own, give package.module:function or path/to/file.py:function"
            raise UserError(Problem(f"reward.fn = {fn}", rule, remedy))
        preload = [self.spec, *([POOLED_RESULTS[fn]] if fn in POOLED_RESULTS else [])]
        self.sandbox = Sandbox(limits, preload)
        try:
            signatures = await self.sandbox.start()
            self.wanted = wanted_parameters(fn, signatures[self.spec])
            self.needs_answer = "answer" in signatures[self.spec].required
        except UserError as failure:
            await self.close()
            if fn in POOLED and "No module named" in str(failure):
                install = "Install it with pip install 'pentad[math]'."
                raise UserError([*failure.problems, install]) from failure
            raise

    async def close(self) -> None:
        if self.sandbox is not None:
            await self.sandbox.close()
            self.sandbox = None

    async def score(self, group: Group) -> Group:
        """Fills in the reward of every sample its workflow has not scored itself."""
        waiting = [sample for sample in group.samples if sample.reward is None]
        payloads = [self._payload(group.prompt, sample) for sample in waiting]
        results = await asyncio.gather(*map(self._with_retries, payloads))
        for sample, result in zip(waiting, results, strict=True):
            scored = self._settle(result)
            sample.reward = scored.value
            sample.reward_parts |= scored.parts
        return group

    @property
    def has_results(self) -> bool:
        """Whether `results` can be asked for."""
        return self.settings.fn in RESULTS or self.settings.fn in POOLED_RESULTS

    async def results(self, group: Group) -> list[str | None]:
        """What each sample comes to, for votes among them; None: to nothing."""
        return await asyncio.gather(*(self._result(sample.text) for sample in group.samples))

    async def _result(self, completion: str) -> str | None:
        if self.settings.fn in RESULTS:
            found = RESULTS[self.settings.fn](completion)
            return None if found is None else str(found)
        assert self.sandbox is not None, "start() comes first"
        spec = POOLED_RESULTS[self.settings.fn]
        answer = await self.sandbox.run(spec, {"completion": completion})
        if isinstance(answer, JobFailed):
            if answer.kind == "lost":
                raise InfraFailure(f"the reward pool lost a worker: {answer.detail}")
            return None
        assert answer is None or isinstance(answer, str)
        return answer

    def _payload(self, prompt: Prompt, sample: Sample) -> dict[str, Any]:
        """What the function is given. A missing answer field is the user's to mend, now."""
        field_name = self.settings.answer_field
        wanted = self.wanted if field_name in prompt.fields else self.wanted - {"answer"}
        if self.needs_answer and "answer" not in wanted:
            rule = f"prompt {prompt.gid} has no field {field_name!r}, which the reward compares"
            remedy = f"set dataset.answer_key to one of {sorted(prompt.fields)}"
            raise UserError(Problem(f"reward.fn = {self.settings.fn}", rule, remedy))
        given: dict[str, Callable[[], Any]] = {
            "completion": lambda: sample.text,
            "prompt": lambda: prompt.text,
            "answer": lambda: prompt.fields[field_name],
            "fields": lambda: dict(prompt.fields),
            "ids": lambda: sample.ids[sample.mask].tolist(),
            "sample": lambda: _as_dict(sample),
        }
        return {name: value() for name, value in given.items() if name in wanted}

    async def _with_retries(self, payload: Mapping[str, Any]) -> Scored | JobFailed:
        result = await self._once(payload)
        for _ in range(self.settings.max_retries):
            if isinstance(result, Scored):
                break
            result = await self._once(payload)
        return result

    async def _once(self, payload: Mapping[str, Any]) -> Scored | JobFailed:
        fn = self.settings.fn
        try:
            if fn in INLINE:
                return INLINE[fn](payload["completion"], payload["answer"])
            assert self.sandbox is not None, "start() comes first"
            if fn == "code":
                return await code_tests.judge(
                    self.sandbox, payload["completion"], payload["answer"]
                )
        except (ValueError, KeyError, TypeError) as failure:  # an expected answer in no known form
            return JobFailed("error", f"{type(failure).__name__}: {failure}")
        return as_scored(await self.sandbox.run(self.spec, payload))

    def _settle(self, result: Scored | JobFailed) -> Scored:
        if isinstance(result, Scored):
            return result
        if result.kind == "lost":
            raise InfraFailure(f"the reward pool lost a worker: {result.detail}")
        if self.settings.on_failure == "zero":
            return Scored(0.0, {"reward_failed": 1.0})
        raise DataFailure(f"reward_{result.kind}", result.detail)


def wanted_parameters(fn: str, signature: Signature) -> set[str]:
    """Which of PARAMETERS the function takes. Raises UserError if it needs something else."""
    where = f"reward.fn = {fn}"
    known = ", ".join(f"{name} ({meaning})" for name, meaning in PARAMETERS.items())
    problems = [
        Problem(where, f"it requires {name!r}, which no reward is given", f"there are {known}")
        for name in signature.required
        if name not in PARAMETERS
    ]
    wanted = set(PARAMETERS) & {*signature.required, *signature.optional}
    if signature.takes_any:
        wanted = set(PARAMETERS)
    if not problems and not wanted & SEES_THE_ANSWER:
        rule = f"it takes none of {', '.join(sorted(SEES_THE_ANSWER))}: it cannot see the answer"
        problems.append(Problem(where, rule, f"there are {known}"))
    if problems:
        raise UserError(problems)
    return wanted


def as_scored(result: Any) -> Scored | JobFailed:
    """Reads what a reward function returned, after its way through JSON."""
    if isinstance(result, JobFailed):
        return result
    scored: Scored | None = None
    if isinstance(result, bool | int | float):
        scored = Scored(float(result))
    elif isinstance(result, dict) and result.keys() == {"value", "parts"}:
        if _is_number(result["value"]) and _are_parts(result["parts"]):
            scored = Scored(float(result["value"]), _floats(result["parts"]))
    elif isinstance(result, dict) and result and _are_parts(result):
        parts = _floats(result)
        scored = Scored(sum(parts.values()), parts)
    if scored is None:
        wanted = "a number, a dict of named numbers or a Scored"
        return JobFailed("error", f"it returned {str(result)[:80]!r} where {wanted} is wanted")
    if not all(map(math.isfinite, (scored.value, *scored.parts.values()))):
        return JobFailed("error", f"it returned {result!r}, which is not finite"[:200])
    return scored


def _is_number(value: object) -> bool:
    return isinstance(value, bool | int | float)


def _are_parts(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_number, value.values()))


def _floats(parts: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in parts.items()}


def _as_dict(sample: Sample) -> dict[str, Any]:
    return {
        "ids": sample.ids.tolist(),
        "mask": sample.mask.tolist(),
        "text": sample.text,
        "finish": sample.finish,
        "reward_parts": dict(sample.reward_parts),
    }
