"""Alarms: signs in the step records that a run has stopped learning, each a one-line message.

A pure function of the first and the latest records; it never stops a run. Records are mappings with
the fields of `metrics`; fields that are missing or None cause no alarm.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pentad.rl.facts import CorrectionKind

Record = Mapping[str, Any]

WINDOW = 5
"""Number of steps that a sign must last."""
MAX_FLAT_GROUPS = 0.9
"""Alarm above this share of groups whose rewards are all equal."""
MIN_ENTROPY_SHARE = 0.1
"""Alarm below this entropy, relative to the first step."""
MAX_RATIO_P95 = 2.0
"""Alarm if one token in twenty exceeds this importance ratio."""
MIN_SAMPLE_SIZE = 0.3
"""Alarm below this effective sample size, relative to the trained tokens."""
MIN_MISMATCH = 0.02
"""Mean log-prob difference below which drift is ignored (bf16 rounding is about as large)."""
MISMATCH_GROWTH = 3.0
"""Alarm above this growth of the difference since the first step."""
SOLVED_SHARE = 0.95
"""Mean reward, relative to the highest one given, from which a task counts as solved."""
MIN_ADAPTER_SHARE = 0.1
"""Alarm below this effect of an adapter on the sampler's log-probs, relative to the trainer's."""
MAX_TRUNCATED = 0.5
"""Alarm above this share of answers truncated at the length limit."""
LOSS_SPIKE = 1.5
"""Alarm above this loss on examples, relative to the highest of the previous steps."""


def find_alarms(
    recent: Sequence[Record],
    first: Record,
    *,
    correction: CorrectionKind = "none",
    has_penalty: bool = False,
    compares_samples: bool = True,
) -> list[str]:
    """Returns the alarms over the last WINDOW records; none if there are fewer records.

    `correction` and `has_penalty` (of overlong answers): present settings, which alarms do not
    advise. `compares_samples`: whether a group of equal rewards has no gradient.
    """
    window = recent[-WINDOW:]
    if len(window) < WINDOW:
        return []
    return [
        *_rewards(window, compares_samples),
        *_entropy(window, first),
        *_ratios(window, correction),
        *_mismatch(window, first),
        *_adapter(window),
        *_truncation(window, has_penalty),
        *_spike(window),
    ]


def _rewards(window: Sequence[Record], compares_samples: bool) -> Iterator[str]:
    spread, mean = _series(window, "reward_std"), _series(window, "reward_mean")
    if spread and max(spread) == 0 and mean and min(mean) == max(mean):
        yield (
            f"every sample of the last {WINDOW} steps got the same reward, {mean[-1]:g}: "
            "nothing can be learned; look at samples.jsonl and at what the reward compares"
        )
        return
    flat = _series(window, "groups_without_variance")
    if compares_samples and flat and min(flat) >= MAX_FLAT_GROUPS:
        prompts = "harder" if _is_solved(window) else "easier or harder"
        yield (
            f"in {flat[-1]:.0%} of groups all samples got the same reward, for {WINDOW} steps: "
            f"they carry no gradient; take {prompts} prompts, more samples per prompt, or "
            "algorithm.dynamic_filter=true"
        )


def _entropy(window: Sequence[Record], first: Record) -> Iterator[str]:
    entropy, start = _series(window, "entropy"), _number(first, "entropy")
    if not entropy or start is None or _is_solved(window):
        return
    if max(entropy) < MIN_ENTROPY_SHARE * start:
        yield (
            f"entropy has fallen from {start:.3g} to {entropy[-1]:.3g}: the policy hardly "
            "explores any more; lower the learning rate, raise algorithm.eps_clip_higher or "
            "algorithm.entropy_coef"
        )


def _is_solved(window: Sequence[Record]) -> bool:
    """Whether nearly all samples get the highest reward; then low entropy is no alarm."""
    mean, high = _series(window, "reward_mean"), _series(window, "reward_max")
    pairs = list(zip(mean, high, strict=False))
    return bool(pairs) and all(m >= SOLVED_SHARE * h > 0 for m, h in pairs)


def _ratios(window: Sequence[Record], correction: CorrectionKind) -> Iterator[str]:
    high, size = _series(window, "ratio_p95"), _series(window, "effective_sample_size")
    if high and min(high) > MAX_RATIO_P95:
        weigh = ", or set algorithm.correction=tis" if correction == "none" else ""
        yield (
            f"one token in twenty is more than {high[-1]:.3g} times likelier to the trainer than "
            "to the sampler: the data are far off policy; lower max_staleness or the learning "
            f"rate{weigh}"
        )
    if size and max(size) < MIN_SAMPLE_SIZE:
        drop = "algorithm.correction_cap" if correction == "mis" else "algorithm.correction=mis"
        verb = "lower" if correction == "mis" else "set"
        yield (
            f"the effective sample size is {size[-1]:.0%} of the tokens trained: a few tokens "
            f"decide the gradient; lower max_staleness or {verb} {drop}"
        )


def _mismatch(window: Sequence[Record], first: Record) -> Iterator[str]:
    gap, start = _series(window, "logprob_diff_mean"), _number(first, "logprob_diff_mean")
    lags = [record.get("staleness") for record in (first, *window)]
    if any(isinstance(found, Mapping) and any(str(lag) != "0" for lag in found) for found in lags):
        return  # older weights sampled these, so log-probs differ as configured
    if gap and start is not None and min(gap) > max(MIN_MISMATCH, MISMATCH_GROWTH * start):
        yield (
            f"trainer and sampler differ by {gap[-1]:.3g} per log-prob, {start:.3g} at the start: "
            "they drift apart; check that published weights arrive, and compare dtypes"
        )


def _adapter(window: Sequence[Record]) -> Iterator[str]:
    """Alarm for log-probs that equal the frozen weights': the adapter is ignored."""
    trainer, sampler = (_series(window, f"adapter_effect{side}") for side in ("", "_sampler"))
    pairs = list(zip(sampler, trainer, strict=False))
    if pairs and all(s < MIN_ADAPTER_SHARE * t for s, t in pairs):
        yield (
            f"the adapter moves the trainer's log-probs by {trainer[-1]:.3g} and the sampler's by "
            f"{sampler[-1]:.3g}: samples are drawn from the frozen weights; look at how adapters "
            "reach the sampler"
        )


def _truncation(window: Sequence[Record], has_penalty: bool) -> Iterator[str]:
    cut = _series(window, "truncated_share")
    if cut and min(cut) > MAX_TRUNCATED:
        penalise = "" if has_penalty else ", or set algorithm.overlong_penalty"
        yield (
            f"{cut[-1]:.0%} of answers are cut at the length limit: their rewards say little; "
            "raise gconfig.max_new_tokens (max_sampled_tokens where it is set, and max_turns of a "
            f"workflow){penalise}"
        )


def _spike(window: Sequence[Record]) -> Iterator[str]:
    """Alarms of loss spikes in runs on examples; the loss of a policy has no scale."""
    loss = _series(window, "loss")
    if not loss or _number(window[-1], "reward_mean") is not None:
        return
    *before, last = loss
    if last > LOSS_SPIKE * max(before) > 0:
        yield (
            f"the loss jumped from {before[-1]:.3g} to {last:.3g}: look at the data of this step "
            "and at grad_norm; if it does not come back, go back to an earlier checkpoint with a "
            "lower learning rate"
        )


def _series(window: Sequence[Record], name: str) -> list[float]:
    """Returns the field over the window; empty unless every record has it."""
    values = [_number(record, name) for record in window]
    present = [value for value in values if value is not None]
    return present if len(present) == len(values) else []


def _number(record: Record, name: str) -> float | None:
    value = record.get(name)
    return float(value) if isinstance(value, int | float) else None
