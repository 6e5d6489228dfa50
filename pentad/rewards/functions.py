"""A reward function: its parameters, and its calls on the samples of a group.

A function of `completion` scores one sample; a function of `completions` scores all samples of a
group at once, as in TRL. Both may have columns of the dataset row as parameters.
"""

from __future__ import annotations

import asyncio
import math
import sys
import zlib
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from pentad.core.errors import Problem, UserError
from pentad.core.roles import Scored
from pentad.core.seeds import derive_seed
from pentad.core.specs import absolute
from pentad.core.types import Prompt, Sample
from pentad.rewards import code_tests, verifiers
from pentad.rewards.calls import BATCH, EACH, SeededCall
from pentad.rewards.judge import Judge
from pentad.rewards.sandbox import JobFailed, pickled
from pentad.rewards.section import MODELS
from pentad.rewards.sharing import SHARED_JOB_TIMEOUT_S, SharedJobs

if TYPE_CHECKING:
    from pentad.rewards.reward_model import RewardModel

PARAMETERS = {
    "completion": "the sampled text",
    "prompt": "the prompt as text",
    "answer": "the answer field of the dataset row",
    "fields": "the whole dataset row",
    "ids": "the sampled token ids",
    "sample": "a dict: ids, mask, text, finish, reward_parts",
    "environment": "attributes of the sample's environment at its end",
}
OF_A_SAMPLE = ("completion", "ids", "sample", "environment")
"""Parameters that differ between the samples of a group; a reward takes at least one."""
BATCHED = {
    "completions": "the sampled texts of a group",
    "prompts": "the prompt as text, once for each",
    "completion_ids": "the sampled token ids of each",
    "environments": "attributes of the environment of each at its end",
}
"""Parameters of functions that score a whole group; columns are also lists."""
LEFT_OUT = {"prompt", "completion"}
"""Columns not passed to a batched function with `**`, which has them under other names."""

INLINE: dict[str, tuple[Callable[[str, object], Scored], Callable[[str], object]]] = {
    "exact_match": (verifiers.exact_match, str.strip),
    "numeric": (verifiers.numeric, verifiers.numeric_result),
    "gsm8k": (verifiers.gsm8k, verifiers.gsm8k_result),
    "sort_digits": (verifiers.sort_digits, str.strip),
}
"""Trusted functions of linear time, which run in the caller: the reward, and the function that
extracts a completion's result. Completions with equal results get equal rewards."""
POOLED = {"math": ("pentad.rewards.mathematics:math", "pentad.rewards.mathematics:result_of")}
"""Functions that extract results, for rewards that run in the pool."""
BUILT_IN = (*INLINE, *POOLED, "code")

JOB_S = 0.1
"""A job combines calls of a group that take about this many seconds together."""

T = TypeVar("T")
Verdict = Scored | JobFailed | None
"""None: the function abstains from scoring this sample."""
WANTED = "a number, a dict of named numbers or a Scored"
ABSTAINED = JobFailed("error", f"it returned None where {WANTED} is required")


@dataclass(frozen=True, slots=True)
class Takes:
    """The parameters of a function."""

    names: frozenset[str]
    """Names from PARAMETERS or BATCHED, and columns."""
    required: frozenset[str]
    is_batched: bool = False
    takes_any: bool = False
    """Whether it takes all available values (`**`)."""

    @property
    def known(self) -> dict[str, str]:
        """Returns name -> meaning of the available values besides columns."""
        return BATCHED | {"answer": PARAMETERS["answer"]} if self.is_batched else PARAMETERS

    @property
    def needs_environment(self) -> bool:
        """Whether it cannot be called on a sample without an environment."""
        return bool(self.required & {"environment", "environments"})


COMPARES = Takes(frozenset({"completion", "answer"}), frozenset({"completion", "answer"}))


def read_signature(fn: str, signature: Mapping[str, Any]) -> Takes:
    """Returns the parameters of a function, from `core.specs.describe`. UserError if it takes no
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
    """Raises UserError if the function requires a column that these rows lack."""
    there = sorted(columns)
    missing = sorted(takes.required - {*takes.known, *there})
    if missing:
        names = ", ".join(map(repr, missing))
        rule = f"it requires {names}, and rows have no such column"
        known = ", ".join(f"{name} ({meaning})" for name, meaning in takes.known.items())
        remedy = f"the columns are {', '.join(there) or 'none'}; every reward is given {known}"
        raise UserError(Problem(f"reward.fn = {fn}", rule, remedy))


class RewardFunction:
    """A built-in reward, or a user's function. A pool runs functions that may not end."""

    def __init__(self, fn: str, answer_field: str, seed: int = 0) -> None:
        self.fn = fn
        self.seed = seed
        self.spec = absolute(POOLED[fn][0] if fn in POOLED else fn)
        self.answer_field = answer_field
        self.takes = COMPARES
        self.model: Judge | RewardModel | None = None
        """The model of the functions `judge` and `reward_model`."""
        self.jobs: SharedJobs | None = None
        """The queue of the pool that runs its calls."""
        self.call_s: float | None = None
        """Recent mean seconds of a call (on a sample or a whole group); None: not known yet."""
        self.may_abstain = False
        """Whether None is a valid result, which needs another function."""
        self.waits_together: bool | None = None
        """Whether the calls of a group run concurrently in one job, as coroutines do; None: unknown
        yet."""

    @property
    def is_pooled(self) -> bool:
        return self.fn not in INLINE and self.fn not in ("code", *MODELS)

    def give_model(self, model: Judge | RewardModel) -> None:
        self.model = model
        names = model.names | {"completion"}
        self.takes = Takes(names, names)

    @property
    def name(self) -> str:
        """The function's own name."""
        return self.fn.rpartition(":")[2]

    @property
    def long_name(self) -> str:
        """The function's name, with its file or module if two functions have one name."""
        place = self.fn.rpartition(":")[0]
        return f"{Path(place).stem if place.endswith('.py') else place}.{self.name}"

    async def judge(
        self,
        prompt: Prompt,
        samples: Sequence[Sample],
        *,
        mates: Sequence[Sample] = (),
        repeats: bool = True,
    ) -> list[Verdict]:
        """Returns a result per sample, in order. `mates`: scored samples of the group. `repeats`: a
        failed call in the pool is repeated once; a model repeats its calls itself, and other
        functions would fail again.

        If a sample fails again alone, while the function works for another completion of the row,
        the sample is the cause. For an exception of a user's function the cause stays `unclear`: it
        may be an error of the function.
        """
        self._check_row(prompt)
        verdicts = await self._judge_once(prompt, samples)
        failed = [i for i, verdict in enumerate(verdicts) if isinstance(verdict, JobFailed)]
        if not failed or not repeats or self.jobs is None:
            return verdicts
        if self.takes.is_batched and len(samples) > 1:
            return await self._judge_batch_again(prompt, samples)
        good = [s for s, v in zip(samples, verdicts, strict=True) if not isinstance(v, JobFailed)]
        good += [] if self.takes.needs_environment else mates  # a mate's environment is closed
        controls = self._controls(prompt, samples[0]) if self.fn in POOLED else good[:1]
        works = self.is_pooled and controls and await self._works(prompt, controls)
        again = [self._judge_once(prompt, [samples[i]], is_alone=True) for i in failed]
        for i, [verdict] in zip(failed, await asyncio.gather(*again), strict=True):
            verdicts[i] = self._blamed(verdict) if works else verdict
        return verdicts

    async def _judge_once(
        self, prompt: Prompt, samples: Sequence[Sample], *, is_alone: bool = False
    ) -> list[Verdict]:
        if self.model is not None:
            return [*await self.model.score(prompt, samples, self._columns(prompt))]
        if self.takes.is_batched:
            return await self._judge_batch(prompt, samples, is_alone=is_alone)
        if self.is_pooled:
            return await self._judge_pooled(prompt, samples, is_alone=is_alone)
        return await asyncio.gather(*(self._compare(prompt, sample) for sample in samples))

    async def _works(self, prompt: Prompt, controls: Sequence[Sample]) -> bool:
        """Whether the function now returns a result for each of these."""
        verdicts = await self._judge_once(prompt, controls, is_alone=True)
        return not any(isinstance(verdict, JobFailed) for verdict in verdicts)

    def _controls(self, prompt: Prompt, sample: Sample) -> list[Sample]:
        """Returns completions that `math` can compare with any suitable answer. Other samples may
        have passed only because they contain no result."""
        answer = prompt.fields[self.answer_field]
        return [replace(sample, text=f"\\boxed{{{result}}}") for result in (answer, 1234567)]

    def _blamed(self, verdict: Verdict) -> Verdict:
        """Marks a failure as caused by the sample; returns failures of the pool unchanged."""
        if not isinstance(verdict, JobFailed) or verdict.kind == "lost":
            return verdict
        is_raised = verdict.kind == "error" and self.fn not in POOLED
        return replace(verdict, cause="unclear" if is_raised else "sample")

    async def _judge_batch_again(self, prompt: Prompt, samples: Sequence[Sample]) -> list[Verdict]:
        """Scores all samples again. If that fails, finds those that fail alone, and scores the
        others together."""
        verdicts = await self._judge_batch(prompt, samples, is_alone=True)
        if not all(isinstance(verdict, JobFailed) for verdict in verdicts):
            return list(map(self._blamed, verdicts))
        alone = [await self._judge_batch(prompt, [sample], is_alone=True) for sample in samples]
        good = [i for i, [verdict] in enumerate(alone) if not isinstance(verdict, JobFailed)]
        rest = await self._judge_batch(prompt, [samples[i] for i in good], is_alone=True)
        if not 0 < len(good) < len(samples) or any(isinstance(v, JobFailed) for v in rest):
            return verdicts
        judged = dict(zip(good, rest, strict=True))
        return [judged.get(i, self._blamed(verdict)) for i, [verdict] in enumerate(alone)]

    def _check_row(self, prompt: Prompt) -> None:
        """Raises UserError for a row that lacks required columns."""
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
        """Returns columns of the row that the function takes, without reserved parameter names."""
        columns = {k: v for k, v in prompt.fields.items() if k not in self.takes.known}
        if self.answer_field in prompt.fields:
            columns["answer"] = prompt.fields[self.answer_field]
        return {name: value for name, value in columns.items() if self._wants(name)}

    def _shared(self, prompt: Prompt) -> dict[str, Any]:
        """Returns the arguments that are equal for all samples of the prompt."""
        values = {"prompt": prompt.text, "fields": dict(prompt.fields)}
        given = {name: value for name, value in values.items() if self._wants(name)}
        return self._columns(prompt) | given

    def _own(self, prompt: Prompt, samples: Sequence[Sample]) -> list[SeededCall]:
        """Returns each sample's arguments and random seed."""
        values: dict[str, Callable[[Sample], Any]] = {
            "completion": lambda sample: sample.text,
            "ids": lambda sample: sample.ids[sample.mask].tolist(),
            "sample": _as_dict,
            "environment": self._environment,
        }
        if samples[0].environment is None and "environment" not in self.takes.names:
            del values["environment"]
        wanted = [(name, value) for name, value in values.items() if self._wants(name)]
        return [
            (self._seed(prompt, sample), {name: value(sample) for name, value in wanted})
            for sample in samples
        ]

    def _environment(self, sample: Sample) -> SimpleNamespace | None:
        if sample.environment is not None:
            return SimpleNamespace(**sample.environment)
        if not self.takes.needs_environment:
            return None
        rule = "it takes the environment, and the workflow of the run has none"
        remedy = "set rollout.workflow: class:FILE:Class"
        raise UserError(Problem(f"reward.fn = {self.fn}", rule, remedy))

    def _seed(self, prompt: Prompt, sample: Sample | None = None) -> int:
        """Returns a seed from the sample's content, not its index: it may be retried alone."""
        own = 0 if sample is None else zlib.crc32(sample.ids.tobytes())
        return derive_seed(self.seed, "reward", self.name, prompt.gid, own)

    # --- in the caller, or as the program of a sample ------------------------------------------

    async def _compare(self, prompt: Prompt, sample: Sample) -> Verdict:
        answer, completion = prompt.fields[self.answer_field], sample.text
        try:
            if self.fn in INLINE:
                return INLINE[self.fn][0](completion, answer)
            tests = code_tests.read_tests(answer)
        except (ValueError, KeyError, TypeError, RecursionError) as failure:
            # an expected answer of unknown form
            return JobFailed("error", f"{type(failure).__name__}: {failure}")
        assert self.jobs is not None, "start() comes first"
        return await code_tests.judge(self.jobs.pool, completion, tests)

    # --- in the pool, sample by sample ---------------------------------------------------------

    async def _judge_pooled(
        self, prompt: Prompt, samples: Sequence[Sample], *, is_alone: bool
    ) -> list[Verdict]:
        shared = pickled(self.fn, self._shared(prompt))
        own = self._own(prompt, samples)
        if is_alone:
            return [await self._alone(shared, one) for one in own]
        size = self._calls_per_job(len(own))
        parts = [own[i : i + size] for i in range(0, len(own), size)]
        judged = await together([self._share_job(shared, part) for part in parts])
        return [verdict for part in judged for verdict in part]

    def _calls_per_job(self, num: int) -> int:
        """Calls per job: fast calls share a job; their duration is known after the first group."""
        if self.waits_together:
            return num
        if self.call_s is None:
            return 1
        return max(1, min(num, int(JOB_S / max(self.call_s, 1e-6))))

    async def _share_job(self, shared: bytes, own: Sequence[SeededCall]) -> list[Verdict]:
        verdicts = await self._call(shared, own, is_alone=False)
        if not isinstance(verdicts, JobFailed):
            return verdicts
        if len(own) == 1:
            return [verdicts]
        if verdicts.kind == "timeout":
            self.waits_together = False
        return await asyncio.gather(*(self._alone(shared, one) for one in own))

    async def _alone(self, shared: bytes, own: SeededCall) -> Verdict:
        answer = await self._call(shared, [own], is_alone=True)
        return answer if isinstance(answer, JobFailed) else answer[0]

    async def _call(
        self, shared: bytes, own: Sequence[SeededCall], *, is_alone: bool
    ) -> list[Verdict] | JobFailed:
        assert self.jobs is not None, "start() comes first"
        payload = {"spec": self.spec, "shared": shared, "own": list(own)}
        is_shared = len(own) > 1 and not self.waits_together
        timeout_s = self.jobs.pool.reward.timeout_s
        limit = min(SHARED_JOB_TIMEOUT_S, timeout_s) if is_shared else None
        answer = await self._run(EACH, payload, limit, num_calls=len(own), is_alone=is_alone)
        if isinstance(answer, JobFailed):
            return answer
        results = answer.get("results") if isinstance(answer, dict) else None
        if not isinstance(results, list) or len(results) != len(own):
            return JobFailed("crash", f"its process did not return {len(own)} values")
        if self.waits_together is None:
            self.waits_together = bool(answer.get("is_async"))
        return [self._read(result) for result in results]

    def _read(self, result: Any) -> Verdict:
        verdict = read_result(result)
        return ABSTAINED if verdict is None and not self.may_abstain else verdict

    async def _run(
        self,
        call: str,
        payload: dict[str, Any],
        limit: float | None,
        *,
        num_calls: int = 1,
        is_alone: bool,
    ) -> Any | JobFailed:
        """Runs the job, together with waiting ones unless it must run alone, and measures its
        time."""
        assert self.jobs is not None, "start() comes first"
        cost_s = None if is_alone or self.call_s is None else num_calls * self.call_s
        answer = await self.jobs.run(call, payload, limit, cost_s=cost_s)
        seconds = answer.get("seconds") if isinstance(answer, dict) else None
        if isinstance(seconds, float):
            taken_s = seconds / num_calls
            self.call_s = taken_s if self.call_s is None else 0.8 * self.call_s + 0.2 * taken_s
        return answer

    # --- in the pool, a group at once -----------------------------------------------------------

    async def _judge_batch(
        self, prompt: Prompt, samples: Sequence[Sample], *, is_alone: bool
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
        if "environments" in self.takes.names or samples[0].environment is not None:
            given = list(map(self._environment, samples))
            arguments |= {"environments": given} if self._wants("environments") else {}
        pickled(self.fn, arguments)  # rejects arguments under this function's name
        payload = {"spec": self.spec, "arguments": arguments, "seed": self._seed(prompt)}
        answer = await self._run(BATCH, payload, None, is_alone=is_alone)
        if isinstance(answer, dict) and "error" in answer:
            answer = JobFailed("error", str(answer["error"]))
        values = answer.get("values") if isinstance(answer, dict) else None
        if not isinstance(values, list) or len(values) != num:
            sentence = f"its process did not return {num} values"
            failed = answer if isinstance(answer, JobFailed) else JobFailed("crash", sentence)
            return [failed] * num
        return [self._read({"value": value}) for value in values]


async def together(jobs: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Like `asyncio.gather`, without a task for a single coroutine."""
    return [await jobs[0]] if len(jobs) == 1 else await asyncio.gather(*jobs)


def read_result(result: Any) -> Verdict:
    if not isinstance(result, dict) or not result.keys() & {"error", "value"}:
        return JobFailed("crash", "its process returned no value")
    if "error" in result:
        return JobFailed("error", str(result["error"]))
    return None if result["value"] is None else as_scored(result["value"])


def as_scored(result: Any) -> Scored | JobFailed:
    """Parses the return value of a reward function, decoded from JSON."""
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
        return JobFailed("error", f"it returned {str(result)[:80]!r} where {WANTED} is required")
    if not all(map(math.isfinite, (scored.value, *scored.parts.values()))):
        return JobFailed("error", f"it returned {result!r}, which is not finite"[:200])
    return scored


def _is_number(value: object) -> bool:
    """Whether it is a number; JSON integers that exceed the range of floats are not."""
    is_float = isinstance(value, float)
    return is_float or (isinstance(value, int) and abs(value) <= sys.float_info.max)


def _are_parts(value: object) -> bool:
    """Whether it is a dict of numbers with printable names, which become columns of records."""
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
