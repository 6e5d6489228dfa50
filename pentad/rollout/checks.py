"""Checks of a sampler's answers and a workflow's samples, before they enter a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pentad.core.errors import InfraFailure, Problem, UserError
from pentad.core.types import Generation, Prompt, Request, Sample
from pentad.samplers.answers import are_sound, flaw_of

INT64, BOOL, FLOAT32 = map(np.dtype, ("int64", "bool", "float32"))
TYPES = INT64, BOOL, FLOAT32, INT64
"""Types of a sample's ids, mask, log-probs and versions."""


def check_generations(request: Request, answers: Sequence[Generation], vocab_size: int) -> None:
    """Raises InfraFailure if the sampler's answer does not fit the request."""
    if len(answers) != len(request.seeds):
        raise InfraFailure(f"{len(answers)} generations came for {len(request.seeds)} seeds")
    has_routes = any(answer.routes is not None for answer in answers)
    if not has_routes and are_sound(answers, request.params.max_new_tokens, vocab_size):
        return
    for index, answer in enumerate(answers):
        wrong = flaw_of(answer, request.params.max_new_tokens, vocab_size)
        num_tokens = len(request.prompt_ids) + len(answer.ids)
        if not wrong and answer.routes is not None and len(answer.routes) != num_tokens:
            wrong = f"routes of {len(answer.routes)} tokens came for {num_tokens}"
        if wrong:
            raise InfraFailure(f"generation {index}: {wrong}")


@dataclass(slots=True)
class LogprobSpan:
    """The log-probs of one generation, which begins after `start` tokens."""

    start: int
    logprobs: np.ndarray
    versions: np.ndarray


@dataclass(slots=True)
class Drawn:
    """All generations of one group, for comparison with its samples."""

    by_sequence: dict[bytes, list[LogprobSpan]] = field(default_factory=dict)
    """All ids up to the end of a generation -> its log-probs."""
    lengths: set[int] = field(default_factory=set)

    def add(self, request: Request, answers: Sequence[Generation]) -> None:
        start = len(request.prompt_ids)
        prompt = np.array(request.prompt_ids, dtype=np.int64).tobytes()
        for answer in answers:
            ids, logprobs, versions = answer.columns()
            span = LogprobSpan(start, logprobs, versions)
            self.by_sequence.setdefault(prompt + ids.tobytes(), []).append(span)
            self.lengths.add(start + len(answer.ids))

    def has(self, sample: Sample, prompt: bytes) -> bool:
        """Whether the sample is exactly a sampled sequence that begins with the prompt, so needs no
        other check. Most samples are."""
        ids, mask = sample.ids, sample.mask
        logprobs, versions = sample.rollout_logprobs, sample.versions
        if sample.columns or not ids.shape == mask.shape == logprobs.shape == versions.shape:
            return False
        if (ids.dtype, mask.dtype, logprobs.dtype, versions.dtype) != TYPES:
            return False
        key = ids.tobytes()
        spans = self.by_sequence.get(key)
        if spans is None or len(spans) > 1 or not key.startswith(prompt):
            return False
        start, num = spans[0].start, len(spans[0].logprobs)
        return (
            mask.tobytes() == bytes(start) + b"\1" * num
            and logprobs.tobytes() == bytes(4 * start) + spans[0].logprobs.tobytes()
            and versions.tobytes() == b"\xff" * (8 * start) + spans[0].versions.tobytes()
        )

    def covers(self, sample: Sample) -> np.ndarray:
        """Returns a mask of the tokens that were sampled at that position, with that log-prob and
        version."""
        known = np.zeros(len(sample.ids), dtype=bool)
        # The longest first: it covers all of an answer to one prompt.
        for end in sorted((n for n in self.lengths if n <= len(known)), reverse=True):
            if known[sample.mask].all():
                break
            for span in self.by_sequence.get(sample.ids[:end].tobytes(), []):
                part = slice(span.start, end)
                same = sample.rollout_logprobs[part] == span.logprobs
                known[part] |= same & (sample.versions[part] == span.versions)
        return known


def check_samples(
    prompt: Prompt,
    samples: Sequence[Sample],
    drawn: Drawn,
    num: int,
    *,
    own_prompts: bool = False,
    max_sampled: int | None = None,
) -> None:
    """Raises UserError if the workflow broke its contract, because such samples must not be
    trained. `own_prompts`: allows more samples, and samples that do not start with the prompt's
    ids. `max_sampled`: maximum number of trained tokens of a sample."""
    problems = []
    if len(samples) < num or (len(samples) > num and not own_prompts):
        problems.append(f"returned {len(samples)} samples where {num} were requested")
    prompt_ids = () if own_prompts else prompt.ids
    begin = np.array(prompt_ids, dtype=np.int64).tobytes()
    for index, sample in enumerate(samples):
        is_plain = sample.routes is None and sample.reward is None and drawn.has(sample, begin)
        wrong = None if is_plain else contract_breach(prompt_ids, sample, drawn)
        if wrong:
            problems.append(f"sample {index}: {wrong}")
        elif max_sampled is not None and sample.num_sampled > max_sampled:
            sampled = (
                f"{sample.num_sampled} tokens of it were sampled, gconfig.max_sampled_tokens = "
            )
            hint = "context.request takes how many were in earlier turns"
            problems.append(f"sample {index}: {sampled}{max_sampled}: {hint}")
    remedy = "build samples with pentad.rollout.workflows.Transcript"
    if problems:
        raise UserError([Problem(f"workflow, prompt {prompt.gid}", p, remedy) for p in problems])


def contract_breach(prompt_ids: tuple[int, ...], sample: Sample, drawn: Drawn) -> str | None:
    columns = {"mask": sample.mask, "rollout_logprobs": sample.rollout_logprobs}
    columns |= {"versions": sample.versions, **sample.columns}
    for name, column in columns.items():
        if column.shape != sample.ids.shape:
            return f"{name} has shape {column.shape}, ids {sample.ids.shape}"
    if sample.routes is not None and len(sample.routes) != len(sample.ids):
        return f"it has routes of {len(sample.routes)} tokens, and {len(sample.ids)} ids"
    if sample.ids.dtype != np.int64 or sample.mask.dtype != np.bool_:
        return f"ids are {sample.ids.dtype} and mask {sample.mask.dtype}, not int64 and bool"
    if tuple(sample.ids[: len(prompt_ids)].tolist()) != prompt_ids:
        return "its ids do not begin with those of the prompt"
    if not sample.mask.any():
        return "no token of it is trained"
    if sample.rollout_logprobs[~sample.mask].any() or (sample.versions[~sample.mask] != -1).any():
        return "a token that is not trained has a log-prob or a version"
    stray = np.flatnonzero(sample.mask & ~drawn.covers(sample))
    if len(stray):
        return f"token {stray[0]} is trained, but was not sampled there with this log-prob"
    if sample.reward is not None and not math.isfinite(sample.reward):
        return f"its reward is {sample.reward}"
    return None
