"""One reward function: what it takes, and how it is called on the samples of a group.

A function of `completion` scores one sample; one of `completions` scores all samples of a group at
once, as TRL's do. Either may ask for columns of the dataset row by their names.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pentad.core.errors import Problem, UserError
from pentad.core.roles import Scored
from pentad.core.specs import absolute
from pentad.core.types import Prompt, Sample
from pentad.rewards import code_tests, verifiers
from pentad.rewards.calls import BATCH, EACH
from pentad.rewards.sandbox import JobFailed, Sandbox, pickled
from pentad.rewards.sharing import SHARED_JOB_TIMEOUT_S, SharedJobs

PARAMETERS = {
    "completion": "the sampled text",
    "prompt": "the prompt as text",
    "answer": "the answer field of the dataset row",
    "fields": "the whole dataset row",
    "ids": "the sampled token ids",
    "sample": "a dict: ids, mask, text, finish, reward_parts",
}
OF_A_SAMPLE = ("completion", "ids", "sample")
"""Those that differ between the samples of a group; a reward takes at least one."""
BATCHED = {
    "completions": "the sampled texts of a group",
    "prompts": "the prompt as text, once for each",
    "completion_ids": "the sampled token ids of each",
}
"""Parameters of functions that take a whole group; columns come as lists, too."""
LEFT_OUT = {"prompt", "completion"}
"""Columns that a batched function of any keywords is not given: it has them by another name."""

INLINE: dict[str, tuple[Callable[[str, object], Scored], Callable[[str], object]]] = {
    "exact_match": (verifiers.exact_match, str.strip),
    "numeric": (verifiers.numeric, verifiers.numeric_result),
    "gsm8k": (verifiers.gsm8k, verifiers.gsm8k_result),
    "sort_digits": (verifiers.sort_digits, str.strip),
}
"""Trusted, linear in time, and so run where they are called: what judges a completion, and what it
comes to. Completions that come to the same are judged alike."""
POOLED = {"math": ("pentad.rewards.mathematics:math", "pentad.rewards.mathematics:result_of")}
"""The same, by name, for functions that run in the pool."""
BUILT_IN = (*INLINE, *POOLED, "code")

JOB_S = 0.1
"""Calls of a group that take about this long share a job."""

T = TypeVar("T")
Verdict = Scored | JobFailed | None
"""None: the function has no opinion on this sample."""


@dataclass(frozen=True, slots=True)
class Takes:
    """What a function is given."""

    names: frozenset[str]
    """Of PARAMETERS or BATCHED, and columns, where the row has them."""
    required: frozenset[str]
    is_batched: bool = False
    takes_any: bool = False
    """All that there is."""

    @property
    def known(self) -> dict[str, str]:
        """Name -> meaning of what is given besides columns."""
        return BATCHED | {"answer": PARAMETERS["answer"]} if self.is_batched else PARAMETERS


COMPARES = Takes(frozenset({"completion", "answer"}), frozenset({"completion", "answer"}))


def read_signature(fn: str, signature: Mapping[str, Any]) -> Takes:
    """What the function takes, from `core.specs.describe`. Raises UserError if it can see no
    completion."""
    required = frozenset(signature["required"])
    names = required | {*signature["optional"]}
    takes = Takes(names, required, "completions" in names, signature["takes_any"])
    positional = [n for n in signature["required"] if n.endswith("(positional only)")]
    where = f"reward.fn = {fn}"
    if positional:
        remedy = "rewards are called by keyword"
        raise UserError(Problem(where, f"it requires {positional[0]!r}", remedy))
    if not takes.takes_any and not names & {*OF_A_SAMPLE, "completions"}:
        rule = f"it takes none of {', '.join(OF_A_SAMPLE)}, completions: it cannot see the answer"
        raise UserError(Problem(where, rule, "give it one of them"))
    return takes


def check_columns(fn: str, takes: Takes, columns: Iterable[str]) -> None:
    """Raises UserError if the function requires what rows with these columns do not have."""
    there = sorted(columns)
    missing = sorted(takes.required - {*takes.known, *there})
    if missing:
        names = ", ".join(map(repr, missing))
        rule = f"it requires {names}, and rows have no such column"
        known = ", ".join(f"{name} ({meaning})" for name, meaning in takes.known.items())
        remedy = f"the columns are {', '.join(there) or 'none'}; every reward is given {known}"
        raise UserError(Problem(f"reward.fn = {fn}", rule, remedy))


class RewardFunction:
    """A built-in, or a function of the user's. `pool` runs what is not trusted to end."""

    def __init__(self, fn: str, answer_field: str, max_retries: int) -> None:
        self.fn = fn
        self.spec = absolute(POOLED[fn][0] if fn in POOLED else fn)
        self.answer_field = answer_field
        self.max_retries = max_retries
        self.takes = COMPARES
        self.pool: Sandbox | None = None
        self.jobs: SharedJobs | None = None
        """Of the pool."""
        self.call_s: float | None = None
        """Mean seconds of a call, of late, on a sample or a whole group; None: not known yet."""
        self.waits_together: bool | None = None
        """Whether the calls of a group wait in one job, as coroutines can; None: not known yet."""

    @property
    def is_pooled(self) -> bool:
        return self.fn not in INLINE and self.fn != "code"

    @property
    def name(self) -> str:
        """The function's own name."""
        return self.fn.rpartition(":")[2]

    @property
    def long_name(self) -> str:
        """With its file or module, where two functions have one name."""
        place = self.fn.rpartition(":")[0]
        return f"{Path(place).stem if place.endswith('.py') else place}.{self.name}"

    async def judge(
        self, prompt: Prompt, samples: Sequence[Sample], *, max_retries: int | None = None
    ) -> list[Verdict]:
        """A verdict a sample, in their order; what failed is tried again."""
        retries = self.max_retries if max_retries is None else max_retries
        self._check_row(prompt)
        if self.takes.is_batched:
            return await self._judge_batch(prompt, samples, retries)
        if self.is_pooled:
            return await self._judge_pooled(prompt, samples, retries)
        jobs = (self._compare(prompt, sample, retries) for sample in samples)
        return await asyncio.gather(*jobs)

    def _check_row(self, prompt: Prompt) -> None:
        """A row without what the function requires is the user's to mend, now."""
        columns = {"answer": self.answer_field}
        for name in sorted(self.takes.required):
            column = columns.get(name, name)
            if (name in self.takes.known and name != "answer") or column in prompt.fields:
                continue
            rule = f"prompt {prompt.gid} has no field {column!r}, which the reward requires"
            remedy = f"it has {sorted(prompt.fields)}"
            if name == "answer":
                remedy = f"set dataset.answer_key to one of {sorted(prompt.fields)}"
            raise UserError(Problem(f"reward.fn = {self.fn}", rule, remedy))

    def _wants(self, name: str) -> bool:
        return name in self.takes.names or self.takes.takes_any

    def _columns(self, prompt: Prompt) -> dict[str, Any]:
        """What the function takes of the row; a parameter's own meaning comes first."""
        columns = {k: v for k, v in prompt.fields.items() if k not in self.takes.known}
        if self.answer_field in prompt.fields:
            columns["answer"] = prompt.fields[self.answer_field]
        return {name: value for name, value in columns.items() if self._wants(name)}

    def _shared(self, prompt: Prompt) -> dict[str, Any]:
        """The arguments that are the same for all samples of the prompt."""
        values = {"prompt": prompt.text, "fields": dict(prompt.fields)}
        given = {name: value for name, value in values.items() if self._wants(name)}
        return self._columns(prompt) | given

    def _own(self, samples: Sequence[Sample]) -> list[dict[str, Any]]:
        """The arguments of each sample."""
        values: dict[str, Callable[[Sample], Any]] = {
            "completion": lambda sample: sample.text,
            "ids": lambda sample: sample.ids[sample.mask].tolist(),
            "sample": _as_dict,
        }
        wanted = [(name, value) for name, value in values.items() if self._wants(name)]
        return [{name: value(sample) for name, value in wanted} for sample in samples]

    # --- in the caller, or as the program of a sample ------------------------------------------

    async def _compare(self, prompt: Prompt, sample: Sample, retries: int) -> Verdict:
        answer = prompt.fields[self.answer_field]
        verdict = await self._compare_once(sample.text, answer)
        while isinstance(verdict, JobFailed) and retries:
            verdict, retries = await self._compare_once(sample.text, answer), retries - 1
        return verdict

    async def _compare_once(self, completion: str, answer: object) -> Scored | JobFailed:
        try:
            if self.fn in INLINE:
                return INLINE[self.fn][0](completion, answer)
            assert self.pool is not None, "start() comes first"
            return await code_tests.judge(self.pool, completion, answer)
        except (ValueError, KeyError, TypeError, RecursionError) as failure:
            # an expected answer in no known form
            return JobFailed("error", f"{type(failure).__name__}: {failure}")

    # --- in the pool, sample by sample ---------------------------------------------------------

    async def _judge_pooled(
        self, prompt: Prompt, samples: Sequence[Sample], retries: int
    ) -> list[Verdict]:
        shared = pickled(self.fn, self._shared(prompt))
        own = self._own(samples)
        size = self._calls_per_job(len(own))
        parts = [own[i : i + size] for i in range(0, len(own), size)]
        judged = await together([self._share_job(shared, part, retries) for part in parts])
        return [verdict for part in judged for verdict in part]

    def _calls_per_job(self, num: int) -> int:
        """Quick calls share a job; how quick they are shows at the first group."""
        if self.waits_together:
            return num
        if self.call_s is None:
            return 1
        return max(1, min(num, int(JOB_S / max(self.call_s, 1e-6))))

    async def _share_job(
        self, shared: bytes, own: Sequence[dict[str, Any]], retries: int
    ) -> list[Verdict]:
        verdicts = await self._call(shared, own, is_alone=False)
        if isinstance(verdicts, JobFailed) and len(own) == 1:
            verdicts = [verdicts]
        if isinstance(verdicts, JobFailed):  # which of them it was shows one by one
            if verdicts.kind == "timeout":
                self.waits_together = False
            return await asyncio.gather(*(self._alone(shared, one, 1 + retries) for one in own))
        return [
            await self._alone(shared, one, retries)
            if isinstance(verdict, JobFailed) and retries
            else verdict
            for one, verdict in zip(own, verdicts, strict=True)
        ]

    async def _alone(self, shared: bytes, own: dict[str, Any], tries: int) -> Verdict:
        answer = await self._call(shared, [own], is_alone=True)
        verdict = answer if isinstance(answer, JobFailed) else answer[0]
        if isinstance(verdict, JobFailed) and tries > 1:
            return await self._alone(shared, own, tries - 1)
        return verdict

    async def _call(
        self, shared: bytes, own: Sequence[dict[str, Any]], *, is_alone: bool
    ) -> list[Verdict] | JobFailed:
        assert self.pool is not None, "start() comes first"
        payload = {"spec": self.spec, "shared": shared, "own": list(own)}
        is_shared = len(own) > 1 and not self.waits_together
        limit = min(SHARED_JOB_TIMEOUT_S, self.pool.settings.timeout_s) if is_shared else None
        answer = await self._run(EACH, payload, limit, num_calls=len(own), is_alone=is_alone)
        if isinstance(answer, JobFailed):
            return answer
        if self.waits_together is None:
            self.waits_together = bool(answer["is_async"])
        return [read_result(result) for result in answer["results"]]

    async def _run(
        self,
        call: str,
        payload: dict[str, Any],
        limit: float | None,
        *,
        num_calls: int = 1,
        is_alone: bool,
    ) -> Any | JobFailed:
        """Runs the job, beside others that wait unless it shall be alone, and learns its time."""
        assert self.pool is not None and self.jobs is not None, "start() comes first"
        if is_alone or self.call_s is None:
            answer = await self.pool.run(call, payload, limit)
        else:
            cost_s = num_calls * self.call_s
            answer = await self.jobs.run(call, payload, limit, cost_s=cost_s)
        if not isinstance(answer, JobFailed) and "seconds" in answer:
            taken_s = answer["seconds"] / num_calls
            self.call_s = taken_s if self.call_s is None else 0.8 * self.call_s + 0.2 * taken_s
        return answer

    # --- in the pool, a group at once -----------------------------------------------------------

    async def _judge_batch(
        self, prompt: Prompt, samples: Sequence[Sample], retries: int
    ) -> list[Verdict]:
        if not samples:
            return []
        num = len(samples)
        columns = self._columns(prompt)
        for name in LEFT_OUT - self.takes.names:
            columns.pop(name, None)
        arguments = {name: [value] * num for name, value in columns.items()}
        arguments["completions"] = [sample.text for sample in samples]
        if self._wants("prompts"):
            arguments["prompts"] = [prompt.text] * num
        if self._wants("completion_ids"):
            arguments["completion_ids"] = [s.ids[s.mask].tolist() for s in samples]
        pickled(self.fn, arguments)  # or refused under its own name
        verdicts = await self._call_batch(arguments, num, is_alone=False)
        while any(isinstance(verdict, JobFailed) for verdict in verdicts) and retries:
            verdicts, retries = await self._call_batch(arguments, num, is_alone=True), retries - 1
        return verdicts

    async def _call_batch(
        self, arguments: dict[str, Any], num: int, *, is_alone: bool
    ) -> list[Verdict]:
        payload = {"spec": self.spec, "arguments": arguments}
        answer = await self._run(BATCH, payload, None, is_alone=is_alone)
        if isinstance(answer, JobFailed):
            return [answer] * num
        if "error" in answer:
            return [JobFailed("error", answer["error"])] * num
        return [read_result({"value": value}) for value in answer["values"]]


async def together(jobs: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """As `asyncio.gather`, without a task where there is but one."""
    return [await jobs[0]] if len(jobs) == 1 else await asyncio.gather(*jobs)


def read_result(result: Mapping[str, Any]) -> Verdict:
    if "error" in result:
        return JobFailed("error", str(result["error"]))
    return None if result["value"] is None else as_scored(result["value"])


def as_scored(result: Any) -> Scored | JobFailed:
    """Reads what a reward function returned, after its way through JSON."""
    if isinstance(result, JobFailed):
        return result
    if type(result) is float and math.isfinite(result):
        return Scored(result)
    scored: Scored | None = None
    if _is_number(result):
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
    """Whole numbers of JSON have any size: those beyond floats are none."""
    is_float = isinstance(value, float)
    return is_float or (isinstance(value, int) and abs(value) <= sys.float_info.max)


def _are_parts(value: object) -> bool:
    """Named numbers. The names become columns of records, so they must show."""
    if not isinstance(value, dict) or not all(map(str.isprintable, value)):
        return False
    return all(map(_is_number, value.values()))


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
