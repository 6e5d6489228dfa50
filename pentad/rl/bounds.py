"""Bounds of a run: signs of silent failures in training, and when they end the run.

A sign must last `patience_steps` steps or, if it is intermittent, occur in `patience_steps` of the
last twice as many; it ends the run with an error that contains the remedy. The log-probs of sampler
and trainer are compared before the update, if possible on samples drawn entirely with the trained
weights: there they differ only by rounding, even if the other data are far off-policy.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pentad.core.types import Sample, StepResult
from pentad.rl.section import GuardsConfig

STALE_FACTOR = 10.0
"""Factor of the bound if all tokens are from older weights."""
SHIFT_FACTOR = 3.0
"""Factor of a difference with the same sign for all tokens, because rounding has both signs."""
MIN_CONSTANT = 32
"""This number of tokens with one equal log-prob is an error, unless the trainer's are equal."""
CERTAIN = -0.3
"""Trainer's mean log-prob above which a sampler may report log-prob 0 for all tokens."""
SHARE_WINDOW = 20
"""Number of steps over which the share of steps without a usable gradient is computed."""


@dataclass(frozen=True, slots=True)
class Signs:
    """Comparison of sampler and trainer on trained tokens, before the update."""

    num_impossible: int
    """Tokens for which the policy itself has no finite log-prob."""
    constant: float | None
    """The single log-prob that the sampler reports for all tokens although the trainer's vary;
    None: the sampler's vary."""
    gap: float | None
    """Mean difference of log-probs; None without tokens."""
    is_fresh: bool
    """Whether the gap is over samples of the trained weights only; if there are none, it is over
    all samples."""


def compare(samples: Sequence[Sample], trainer: Sequence[np.ndarray], version: int) -> Signs:
    """`trainer`: each sample's token-aligned log-probs under the weights of `version`."""
    pairs = [pair for pair in zip(samples, trainer, strict=True) if pair[0].ids.size]
    if not pairs:
        return Signs(0, None, None, False)
    mask_T = np.concatenate([s.mask for s, _ in pairs])
    lengths = [s.ids.size for s, _ in pairs]
    versions_T = np.where(mask_T, np.concatenate([s.versions for s, _ in pairs]), version)
    oldest_S = np.minimum.reduceat(versions_T, np.cumsum([0, *lengths[:-1]])).clip(max=version)
    oldest_N = np.repeat(oldest_S, lengths)[mask_T]
    sampler_N, trainer_N = (
        np.concatenate(parts)[mask_T].astype(np.float64)
        for parts in ([s.rollout_logprobs for s, _ in pairs], [said for _, said in pairs])
    )
    impossible = int((~np.isfinite(trainer_N)).sum())
    gap = logprob_gap(trainer_N - sampler_N, oldest_N == version)
    return Signs(impossible, constant_logprob(sampler_N, trainer_N), *gap)


class Bounds:
    """Checks every step of a run and decides when the run must end."""

    def __init__(self, settings: GuardsConfig) -> None:
        self.settings = settings
        self.lasting: dict[str, int] = {}
        """Number of consecutive steps with each sign."""
        self.recent: dict[str, deque[bool]] = {}
        """Whether intermittent signs occurred, for the latest comparisons."""
        self.nonfinite: deque[bool] = deque(maxlen=SHARE_WINDOW)
        self.rollbacks: list[tuple[int, int]] = []
        """(step after which the run was rolled back, step of the restored checkpoint), counted from
        0."""
        self.is_lost = False
        """Whether the present weights give no usable gradient any more; earlier weights may."""

    def state(self) -> dict[str, Any]:
        """Returns the counters as JSON values."""
        recent = {sign: list(seen) for sign, seen in self.recent.items()}
        return {
            "lasting": self.lasting,
            "recent": recent,
            "nonfinite": list(self.nonfinite),
            "rollbacks": self.rollbacks,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.lasting = {sign: int(steps) for sign, steps in state["lasting"].items()}
        window = 2 * self.settings.patience_steps
        recent = state["recent"].items()
        self.recent = {sign: deque(map(bool, seen), window) for sign, seen in recent}
        self.nonfinite = deque(map(bool, state["nonfinite"]), SHARE_WINDOW)
        self.rollbacks = [(int(at), int(to)) for at, to in state.get("rollbacks", ())]

    @property
    def is_doubtful(self) -> bool:
        """Whether the last gradient of the present weights was unusable, or none was computed
        yet."""
        return self.lasting.get("nonfinite", 0) > 0 or self.lasting.get("unproven", 0) > 0

    @property
    def may_roll_back(self) -> bool:
        return self.is_lost and len(self.rollbacks) < self.settings.max_rollbacks

    def rolled_back(self, at: int, to: int) -> None:
        """Called after a rollback; resets the counts for the replaced weights."""
        self.rollbacks.append((at, to))
        self.lasting |= {"nonfinite": 0, "unproven": 1}
        self.is_lost = False
        self.nonfinite.clear()

    def past(self, steps: Sequence[StepResult], signs: Signs | None = None) -> str:
        """Returns the message that ends the run; empty if it may continue."""
        is_bad = any(not math.isfinite(step.grad_norm + step.loss) for step in steps)
        if signs is None:
            return self._gradients(is_bad)
        sentences = [
            self._gradients(is_bad or signs.num_impossible > 0),
            self._constant(signs.constant),
            self._gap(signs.gap, signs.is_fresh),
        ]
        return next((sentence for sentence in sentences if sentence), "")

    def past_probe(self, sampler: int, gap: float | None) -> str:
        """Like `past`, for tokens that a sampler drew for a comparison; `gap` None: none."""
        if gap is None or not self._recurs(f"sampler {sampler}", self.is_far(gap)):
            return ""
        return self._far_apart(gap, f"sampler {sampler} drew for the comparison")

    def is_doubted(self, sampler: int) -> bool:
        """Whether a recent comparison was out of bounds."""
        return any(self.recent.get(f"sampler {sampler}", ()))

    def is_far(self, gap: float | None, factor: float = 1.0) -> bool:
        limit = self.settings.max_logprob_gap
        return limit is not None and gap is not None and not gap <= factor * limit

    def _gradients(self, is_bad: bool) -> str:
        self.nonfinite.append(is_bad)
        if not is_bad:
            self.lasting["unproven"] = 0
        num, seen = sum(self.nonfinite), len(self.nonfinite)
        settings = self.settings
        self.is_lost = self._lasts("nonfinite", is_bad)
        if self.is_lost:
            when = f"for guards.patience_steps = {settings.patience_steps} steps in a row"
        elif seen == SHARE_WINDOW and num > settings.max_nonfinite_share * seen:
            share = f"guards.max_nonfinite_share = {settings.max_nonfinite_share:g}"
            when = f"in {num} of the last {seen} steps, more than {share}"
        else:
            return ""
        again = f", after {len(self.rollbacks)} rollbacks" if self.rollbacks else ""
        return (
            f"no usable gradient (not finite, or of impossible tokens) {when}{again}: nothing is "
            "learned; restart from an earlier export with a lower learning rate, and check the "
            "rewards and actor.dtype"
        )

    def _constant(self, value: float | None) -> str:
        if not self._lasts("constant", value is not None):
            return ""
        return (
            f"the sampler reports one log-prob, {value:g}, for all tokens, "
            f"{self.settings.patience_steps} steps long (guards.patience_steps): it is not that of "
            "what it draws; look at the server and its version"
        )

    def _gap(self, gap: float | None, is_fresh: bool) -> str:
        is_old = self._lasts("age", not is_fresh and self.is_far(gap, STALE_FACTOR))
        if is_fresh and self._recurs("gap", self.is_far(gap)) and gap is not None:
            return self._far_apart(gap, "were drawn with the weights they train")
        if not is_old:
            return ""
        limit, patience = self.settings.max_logprob_gap, self.settings.patience_steps
        return (
            f"trainer and sampler differ by {gap:.3g} per log-prob of tokens that were drawn with "
            f"older weights, more than guards.max_logprob_gap = {limit:g} times {STALE_FACTOR:g}, "
            f"{patience} steps in a row: nothing can be learned from data so far off-policy; lower "
            "the learning rate or max_staleness, or check that the sampler takes published weights"
        )

    def _far_apart(self, gap: float, which: str) -> str:
        limit, patience = self.settings.max_logprob_gap, self.settings.patience_steps
        return (
            f"trainer and sampler differ by {gap:.3g} per log-prob of tokens that {which} (a shift "
            f"of all counts {SHIFT_FACTOR:g} times), more than guards.max_logprob_gap = {limit:g}, "
            f"in {patience} of the last {2 * patience} comparisons: the sampler does not run the "
            "policy that is trained; check that it takes published weights, and its dtype and "
            "temperature, or raise the bound"
        )

    def _lasts(self, sign: str, is_there: bool) -> bool:
        self.lasting[sign] = self.lasting.get(sign, 0) + 1 if is_there else 0
        return self.lasting[sign] >= self.settings.patience_steps

    def _recurs(self, sign: str, is_there: bool) -> bool:
        """Whether a sign recurs, not necessarily in consecutive steps: a sampler may miss every
        second update."""
        patience = self.settings.patience_steps
        recent = self.recent.setdefault(sign, deque(maxlen=2 * patience))
        recent.append(is_there)
        return is_there and sum(recent) >= patience


def logprob_gap(gaps: np.ndarray, is_fresh: np.ndarray) -> tuple[float | None, bool]:
    """Returns the mean difference, and whether it is over samples of the trained weights; if there
    are none, it is over all samples. None without tokens."""
    kept = is_fresh if is_fresh.any() else np.ones_like(is_fresh)
    if not kept.any():
        return None, False
    gaps = gaps[kept & np.isfinite(gaps)]
    if not gaps.size:
        return None, bool(is_fresh.any())
    return (gap_of(gaps), True) if is_fresh.any() else (float(np.abs(gaps).mean()), False)


def gap_of(differences: np.ndarray) -> float:
    """Returns the larger of the mean absolute difference of log-probs and the weighted mean shift.
    NaN if any is NaN."""
    return float(max(np.abs(differences).mean(), SHIFT_FACTOR * abs(differences.mean())))


def constant_logprob(reported: np.ndarray, own: np.ndarray) -> float | None:
    """The one log-prob that the sampler reports for all tokens although the trainer's vary."""
    if reported.size < MIN_CONSTANT or reported.min() != reported.max():
        return None
    finite = own[np.isfinite(own)]
    if not finite.size or finite.max() - finite.min() <= 0.01:
        return None
    return None if reported[0] == 0 and finite.mean() > CERTAIN else float(reported[0])
