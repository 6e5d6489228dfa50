"""The RL fields of a step record, from the trained groups and the learner's outputs.

Pure functions. A field that does not apply, or is not a finite number, is None. Ratios are capped
at exp(MAX_LOG_RATIO), as in the losses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from pentad.core.flat_rows import has_column, join_column, lengths_of
from pentad.core.types import Group, Row
from pentad.rl.kl import MAX_LOG_RATIO
from pentad.rl.section import AlgorithmConfig
from pentad.rl.shaping import has_signal

Metrics = dict[str, float | None]


def compute_metrics(
    groups: Sequence[Group],
    rows: Sequence[Row],
    outputs: Sequence[Mapping[str, Tensor]],
    settings: AlgorithmConfig,
    *,
    stats: Mapping[str, float] | None = None,
) -> Metrics:
    """All scalar metrics. `outputs`: those of `rows`; `stats`: sums of the policy loss."""
    return {
        **sample_metrics(groups),
        **token_metrics(rows, outputs, settings),
        **loss_metrics(stats or {}, settings),
    }


def sample_metrics(groups: Sequence[Group]) -> Metrics:
    """Returns metrics of samples: rewards before shaping, lengths in sampled tokens."""
    samples = [sample for group in groups for sample in group.samples]
    rewards = np.array([s.reward for s in samples if s.reward is not None], dtype=np.float64)
    lengths = np.array([s.num_sampled for s in samples], dtype=np.float64)
    is_cut = np.array([s.finish == "length" for s in samples], dtype=np.float64)
    scored = [group for group in groups if all(s.reward is not None for s in group.samples)]
    greedy = np.array([g.greedy.reward for g in groups if g.greedy is not None], dtype=np.float64)
    without = [not has_signal([s.reward or 0.0 for s in group.samples]) for group in scored]
    return {
        "reward_mean": _mean(rewards),
        "reward_std": _std(rewards),
        "reward_min": _finite(rewards.min()) if rewards.size else None,
        "reward_max": _finite(rewards.max()) if rewards.size else None,
        "reward_greedy": _mean(greedy),
        "groups_without_variance": _mean(np.array(without, dtype=np.float64)),
        "length_mean": _mean(lengths),
        "length_min": _finite(lengths.min()) if lengths.size else None,
        "length_max": _finite(lengths.max()) if lengths.size else None,
        "truncated_share": _mean(is_cut),
    }


def token_metrics(
    rows: Sequence[Row], outputs: Sequence[Mapping[str, Tensor]], settings: AlgorithmConfig
) -> Metrics:
    """Metrics over trained tokens. `ratio`, `logprob_diff`, `kl_sampler`: trainer against sampler.

    kl_sampler is the k3 estimate of KL(sampler || trainer), kl_ref that of KL(trainer || ref).
    """
    lengths = lengths_of(rows)
    mask = _column(rows, "weights") != 0
    trainer = _flat([output["logprobs"] for output in outputs])[mask]
    sampler = _column(rows, "rollout_logprobs")[mask]
    advantages = _column(rows, "advantages")[mask]
    has_entropy = all("entropy" in output for output in outputs)
    entropy = _flat([o["entropy"] for o in outputs])[mask] if has_entropy else np.array([])
    log_ratio = trainer - sampler
    ratio = _exp(log_ratio)
    gap = np.abs(log_ratio)
    metrics: Metrics = {
        "advantage_mean": _mean(advantages),
        "advantage_std": _std(advantages),
        "entropy": _mean(entropy),
        "kl_sampler": _mean(_k3(-log_ratio)),
        "kl_ref": None,
        "ratio_mean": _mean(ratio),
        "ratio_p95": _quantile(ratio, 0.95),
        "ratio_max": _quantile(ratio, 1.0),
        "outside_clip_share": _outside_clip(log_ratio, mask, lengths, settings),
        "effective_sample_size": effective_sample_size(log_ratio),
        "logprob_diff_mean": _mean(gap),
        "logprob_diff_p95": _quantile(gap, 0.95),
        "logprob_diff_p99": _quantile(gap, 0.99),
        "logprob_diff_max": _quantile(gap, 1.0),
    }
    if rows and has_column(rows, "ref_logprobs"):
        ref = _column(rows, "ref_logprobs")[mask]
        metrics["kl_ref"] = _mean(_k3(trainer - ref))
    return metrics


def loss_metrics(stats: Mapping[str, float], settings: AlgorithmConfig) -> Metrics:
    """Returns sums of the loss over the number of trained tokens."""
    num_tokens = stats.get("tokens", 0.0)
    names = {
        "clip_fraction": "clipped_tokens",
        "corrected_share": "corrected_tokens",
        "correction_weight_mean": "correction_weight",
        "rejected_share": "rejected_tokens",
        "prox_logp_error": "proximal_error",
    }
    shares = {
        name: _finite(stats[source] / num_tokens) if num_tokens and source in stats else None
        for name, source in names.items()
    }
    if settings.facts.ratio_level == "none":
        shares["clip_fraction"] = None
    return shares


def staleness_histogram(groups: Sequence[Group], version: int) -> dict[str, int]:
    """Sampled tokens by lag: `version` (at the start of the step) minus the token's version."""
    versions = [s.versions[s.mask] for group in groups for s in group.samples]
    lags = version - np.concatenate(versions) if versions else np.array([], dtype=np.int64)
    return {
        str(lag): int(num) for lag, num in zip(*np.unique(lags, return_counts=True), strict=True)
    }


def effective_sample_size(log_ratio: np.ndarray) -> float | None:
    """(sum w)^2 / (n sum w^2) with w = exp(log_ratio): 1 when all weights are equal, 1/n at worst.

    Weights are taken relative to the largest, so no log-ratio overflows.
    """
    if not log_ratio.size or not np.isfinite(log_ratio).all():
        return None
    weights = np.exp(log_ratio - log_ratio.max())
    return _finite(weights.sum() ** 2 / (weights.size * np.square(weights).sum()))


def _outside_clip(
    log_ratio: np.ndarray, mask: np.ndarray, lengths: Sequence[int], settings: AlgorithmConfig
) -> float | None:
    """Share of trained tokens whose ratio against the sampler leaves the clip band."""
    if settings.facts.ratio_level == "none" or "eps_clip" in settings.facts.unread:
        return None
    if settings.facts.ratio_level == "sequence":
        before = np.concatenate([[0], np.cumsum(mask)])
        bounds = before[np.cumsum(lengths)][:-1]
        parts = [part for part in np.split(log_ratio, bounds) if part.size]
        means = [np.full(part.size, part.mean()) for part in parts]
        log_ratio = np.concatenate(means) if means else log_ratio
    ratio, clip = _exp(log_ratio), settings.clip
    return _mean(((ratio < 1 - clip.low) | (ratio > 1 + clip.high)).astype(np.float64))


def _column(rows: Sequence[Row], name: str) -> np.ndarray:
    return _flat([join_column(rows, name)] if rows else [])


def _flat(columns: Sequence[Tensor]) -> np.ndarray:
    """Returns the tokens of all rows in fp64, with one copy from the device."""
    if not columns:
        return np.array([], dtype=np.float64)
    flat: np.ndarray = torch.cat(list(columns)).detach().double().cpu().numpy()
    return flat


def _exp(log_ratio: np.ndarray) -> np.ndarray:
    return np.exp(log_ratio.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def _k3(d: np.ndarray) -> np.ndarray:
    """k3 of KL(p || q) for tokens of p, d = log p - log q."""
    d = d.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return np.expm1(-d) + d


def _quantile(x: np.ndarray, q: float) -> float | None:
    return _finite(np.quantile(x, q)) if x.size else None


def _mean(x: np.ndarray) -> float | None:
    return _finite(x.mean()) if x.size else None


def _std(x: np.ndarray) -> float | None:
    """Standard deviation; 0 for equal values, where numpy's rounding of the mean gives 1e-17."""
    if not x.size:
        return None
    return _finite(x.std()) if x.min() != x.max() else 0.0


def _finite(x: float | np.floating) -> float | None:
    return float(x) if np.isfinite(x) else None
