"""Checks that the numbers of a sampler's answer are possible. Does not import models."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pentad.core.types import Generation

LOGPROB_ROUNDING = 1e-3
"""A log-prob of at most this above 0 is rounding in low precision; more is an error."""


def are_sound(answers: Sequence[Generation], max_new_tokens: int, vocab_size: int) -> bool:
    """Whether `flaw_of` finds no defect in any answer; vectorised, because a batch has thousands.
    Also False if versions differ or numbers do not fit their types."""
    for answer in answers:
        num = len(answer.ids)
        if answer.finish not in ("stop", "length") or not 1 <= num <= max_new_tokens:
            return False
        if not num == len(answer.logprobs) == len(answer.versions):
            return False
    try:
        columns = zip(*(answer.columns() for answer in answers), strict=True)
        ids, logprobs, versions = map(np.concatenate, columns)
    except (TypeError, ValueError, OverflowError):
        return False
    return bool(
        (ids.view(np.uint64) < vocab_size).all()
        and np.isfinite(logprobs).all()
        and logprobs.max() <= LOGPROB_ROUNDING
        and versions.min() == versions.max() >= 0
    )


def flaw_of(answer: Generation, max_new_tokens: int, vocab_size: int) -> str | None:
    """Describes the defect of a sampler's answer; None if there is none."""
    num = len(answer.ids)
    if answer.finish == "abort":
        return f"aborted after {num} tokens"
    if answer.finish not in ("stop", "length"):
        return f"finish = {answer.finish!r} is none of stop, length, abort"
    if not num == len(answer.logprobs) == len(answer.versions):
        counts = f"{len(answer.logprobs)} log-probs and {len(answer.versions)} versions"
        return f"{counts} came for {num} ids"
    if not 1 <= num <= max_new_tokens:
        return f"{num} tokens came where 1 to {max_new_tokens} were requested"
    ids, logprobs, versions = map(np.array, (answer.ids, answer.logprobs, answer.versions))
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(outside):
        t = outside[0]
        return f"token {t}: id {ids[t]} is outside the vocabulary of {vocab_size}"
    wrong = np.flatnonzero(~(np.isfinite(logprobs) & (logprobs <= LOGPROB_ROUNDING)))
    if len(wrong):
        t = wrong[0]
        return f"token {t}: log-prob {logprobs[t]} is not a finite number of at most 0"
    if versions[0] < 0 or (np.diff(versions) < 0).any():
        return f"weight versions {sorted(set(answer.versions))} go backwards or below 0"
    return None
