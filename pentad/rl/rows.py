"""Makes learner rows of scored groups: checks, shaped rewards, advantages, weights, columns.

Everything is computed in fp64 on the CPU and rounded once, into the rows' fp32 columns.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from pentad.core.errors import RunError
from pentad.core.flat_rows import FlatRows
from pentad.core.types import Greedy, Group, Row, Sample
from pentad.rl.advantages import Advantages
from pentad.rl.ragged import Rollouts
from pentad.rl.section import AlgorithmConfig
from pentad.rl.shaping import (
    drawn_from,
    highest,
    kl_rewards,
    normalise,
    overlong_penalties,
    proximal_shares,
    scale_rewards,
    teacher_rewards,
    token_covariances,
    within_second_moment,
)

CARRIED = ("actor_logprobs", "ref_logprobs", "teacher_logprobs", "values")
"""Columns of a sample that its row copies."""
DELIVERED = {"advantages", "returns"}
"""Columns of a sample that its row copies if advantages are not computed here."""


def build_rows(
    groups: Sequence[Group],
    settings: AlgorithmConfig,
    compute: Callable[[Rollouts, AlgorithmConfig], Advantages] | None,
    *,
    max_new_tokens: int,
    version: int = 0,
) -> Sequence[Row]:
    """Builds one row per sample; without `compute` uses the samples' own advantages. `version`:
    that of the weights that train them."""
    needed = needed_columns(settings, has_advantages=compute is None)
    check_groups(groups, needed, has_reward=not settings.facts.needs_teacher)
    needs_greedy = settings.facts.needs_greedy and compute is not None
    for group in groups if needs_greedy else ():
        if group.greedy is None or not math.isfinite(group.greedy.reward):
            has = "no greedy answer" if group.greedy is None else f"{group.greedy}"
            raise RunError(f"group {group.gid} has {has}, whose reward {settings.name} needs")
    samples = [sample for group in groups for sample in group.samples]
    if not samples:
        return []
    rollouts = flatten(groups, settings, max_new_tokens=max_new_tokens)
    norm = normalise(
        settings.loss_norm,
        _trained(rollouts.mask_T, samples, settings),
        rollouts.samples_T,
        rollouts.groups_S,
        max_new_tokens=max_new_tokens,
    )
    columns = {"weights": norm.weights_T}
    if compute is None:
        for name in DELIVERED & needed:
            columns[name] = rollouts.mask_T * _concatenate(samples, name)
    else:
        computed = compute(rollouts, settings)
        columns["advantages"] = computed.advantages_T
        if settings.facts.needs_critic:
            columns["returns"] = computed.returns_T
    if settings.prox_logp_method != "recompute":
        versions_T = torch.from_numpy(np.concatenate([sample.versions for sample in samples]))
        columns["proximal_share"] = proximal_shares(versions_T, version)
    if "cov_share" in settings.facts.own:
        _select(columns, samples, settings, seed=groups[0].gid)
    gids = [group.gid for group in groups for _ in group.samples]
    return _cut(samples, columns, norm.counts_S.tolist(), gids)


def flatten(groups: Sequence[Group], settings: AlgorithmConfig, *, max_new_tokens: int) -> Rollouts:
    """Returns the groups as flat fp64 tensors, with shaped rewards."""
    samples = [sample for group in groups for sample in group.samples]
    lengths = torch.tensor([sample.ids.size for sample in samples])
    mask_T = torch.from_numpy(np.concatenate([sample.mask for sample in samples])).bool()
    samples_T = torch.arange(len(samples)).repeat_interleave(lengths)
    group_sizes = torch.tensor([len(group.samples) for group in groups])
    groups_S = torch.arange(len(groups)).repeat_interleave(group_sizes)
    greedy = [group.greedy for group in groups if group.greedy is not None]
    baselines_S = None
    if len(greedy) == len(groups):
        baselines_S = _shaped_rewards(greedy, settings, max_new_tokens)[groups_S]
    return Rollouts(
        rewards_S=_shaped_rewards(samples, settings, max_new_tokens),
        groups_S=groups_S,
        baselines_S=baselines_S,
        mask_T=mask_T,
        samples_T=samples_T,
        token_rewards_T=_token_rewards(samples, mask_T, settings),
        values_T=_concatenate(samples, "values") if settings.facts.needs_critic else None,
    )


def _shaped_rewards(
    samples: Sequence[Sample | Greedy], settings: AlgorithmConfig, max_new_tokens: int
) -> Tensor:
    if settings.facts.needs_teacher:
        return torch.zeros(len(samples), dtype=torch.float64)
    rewards_S = torch.tensor([sample.reward for sample in samples], dtype=torch.float64)
    rewards_S = scale_rewards(rewards_S, scale=settings.reward_scale, clip=settings.reward_clip)
    _check_size(rewards_S, samples, settings.max_reward)
    if settings.overlong_penalty:
        rewards_S = rewards_S + overlong_penalties(
            torch.tensor([sample.num_sampled for sample in samples], dtype=torch.float64),
            max_new_tokens=max_new_tokens,
            buffer=settings.overlong_buffer,
            penalty=settings.overlong_penalty,
        )
    return rewards_S


def _check_size(rewards_S: Tensor, samples: Sequence[Sample | Greedy], max_reward: float) -> None:
    """Raises for rewards beyond the bound: their deviations overflow, or make all other rewards
    negligible."""
    worst = int(rewards_S.abs().argmax())
    if not rewards_S[worst].abs() < max_reward:
        raise RunError(
            f"a sample got the reward {samples[worst].reward:g} ({rewards_S[worst]:g} after "
            f"algorithm.reward_scale and reward_clip): algorithm.max_reward = {max_reward:g} "
            "stops the run; correct the reward, or set algorithm.reward_clip"
        )


def _token_rewards(
    samples: Sequence[Sample], mask_T: Tensor, settings: AlgorithmConfig
) -> Tensor | None:
    has_kl = settings.kl_coef != 0 and settings.kl_in == "reward"
    if not has_kl and not settings.facts.needs_teacher:
        return None
    # The sampling policy: the trainer's log-probs if computed, else the sampler's.
    drawn = [s.columns.get("actor_logprobs", s.rollout_logprobs) for s in samples]
    policy_T = torch.from_numpy(np.concatenate(drawn).astype(np.float64))
    rewards_T = torch.zeros_like(policy_T)
    if has_kl:
        rewards_T = rewards_T + kl_rewards(
            policy_T,
            _concatenate(samples, "ref_logprobs"),
            mask_T,
            kl_coef=settings.kl_coef,
            estimator=settings.kl_estimator,
        )
    if settings.facts.needs_teacher:
        teacher_T = _concatenate(samples, "teacher_logprobs")
        clip = settings.reward_clip
        rewards_T = rewards_T + teacher_rewards(teacher_T, policy_T, mask_T, clip=clip)
    return rewards_T


def _trained(mask_T: Tensor, samples: Sequence[Sample], settings: AlgorithmConfig) -> Tensor:
    """Returns the mask of trained tokens: sampled ones, except those of truncated samples with
    `mask_truncated`, and for M2PO only those close enough to the sampler's log-probs."""
    if settings.mask_truncated:
        lengths = torch.tensor([sample.ids.size for sample in samples])
        is_whole_S = torch.tensor([sample.finish != "length" for sample in samples])
        mask_T = mask_T & is_whole_S.repeat_interleave(lengths)
    if "m2_threshold" in settings.facts.own:
        drawn_T = _drawn(samples, "rollout_logprobs")
        log_ratio_T = _drawn(samples, "actor_logprobs") - drawn_T
        mask_T = within_second_moment(log_ratio_T, mask_T, settings.m2_threshold)
    return mask_T


def _select(
    columns: dict[str, Tensor], samples: Sequence[Sample], settings: AlgorithmConfig, *, seed: int
) -> None:
    """Clip-Cov: sets the advantages of the selected tokens to 0. KL-Cov: marks the tokens to
    penalise."""
    mask_T, advantages_T = columns["weights"] != 0, columns["advantages"]
    covariances_T = token_covariances(_drawn(samples, "actor_logprobs"), advantages_T, mask_T)
    if "cov_kl_coef" in settings.facts.own:
        columns["penalised"] = highest(covariances_T, mask_T, settings.cov_share).double()
        return
    among_T = mask_T & (covariances_T >= settings.cov_low) & (covariances_T <= settings.cov_high)
    num = int(settings.cov_share * int(mask_T.sum()))
    columns["advantages"] = advantages_T.masked_fill(drawn_from(among_T, num, seed), 0.0)


def _drawn(samples: Sequence[Sample], name: str) -> Tensor:
    """Returns log-probs of the policy at the start of the batch, or the sampler's if those were not
    computed (both policies are then equal)."""
    arrays = [s.columns.get(name, s.rollout_logprobs) for s in samples]
    return torch.from_numpy(np.concatenate(arrays).astype(np.float64))


def _concatenate(samples: Sequence[Sample], name: str) -> Tensor:
    arrays = [sample.columns[name] for sample in samples]
    return torch.from_numpy(np.concatenate(arrays).astype(np.float64))


def _cut(
    samples: Sequence[Sample],
    columns_T: dict[str, Tensor],
    counts: Sequence[float],
    gids: Sequence[int],
) -> Sequence[Row]:
    drawn = np.concatenate([s.rollout_logprobs for s in samples]).astype(np.float32, copy=False)
    columns_T = {name: x_T.float() for name, x_T in columns_T.items()}
    columns_T["rollout_logprobs"] = torch.from_numpy(drawn)
    have = Counter(name for sample in samples for name in sample.columns if name in CARRIED)
    whole = [name for name in CARRIED if have[name] == len(samples)]
    for name in whole:
        columns_T[name] = _concatenate(samples, name).float()
    ids_T = torch.from_numpy(np.concatenate([s.ids for s in samples]))
    flat = FlatRows(ids_T, columns_T, [s.ids.size for s in samples], counts, gids)
    if len(have) == len(whole) and all(sample.routes is None for sample in samples):
        return flat
    rows = list(flat)
    for row, sample in zip(rows, samples, strict=True):
        for name in set(have) - set(whole):
            if name in sample.columns:
                row.columns[name] = torch.from_numpy(np.asarray(sample.columns[name], np.float32))
        if sample.routes is not None:
            row.routes = torch.from_numpy(sample.routes).long()
    return rows


def needed_columns(settings: AlgorithmConfig, *, has_advantages: bool = False) -> set[str]:
    """Returns the columns that every sample must have."""
    wanted = {
        "rollout_logprobs": True,
        "values": settings.facts.needs_critic,
        "advantages": has_advantages,
        "returns": has_advantages and settings.facts.needs_critic,
    }
    scored = {f"{tag}_logprobs" for tag in settings.needs_tags}
    return scored | {name for name in wanted if wanted[name]}


def check_groups(groups: Sequence[Group], needed: set[str], *, has_reward: bool) -> None:
    """Raises for the first sample that cannot be trained."""
    if _are_sound([s for group in groups for s in group.samples], needed, has_reward):
        return
    for group in groups:
        for i, sample in enumerate(group.samples):
            if problem := _problem_of(sample, needed, has_reward):
                raise RunError(f"group {group.gid}, sample {i}: {problem}")


def _are_sound(samples: Sequence[Sample], needed: set[str], has_reward: bool) -> bool:
    """Whether `_problem_of` finds no problem in any sample; vectorised. Also False for samples with
    their own columns."""
    plain = needed == {"rollout_logprobs"} and not any(sample.columns for sample in samples)
    if not samples or not plain:
        return False
    for sample in samples:
        if has_reward and (sample.reward is None or not math.isfinite(sample.reward)):
            return False
        shape = sample.ids.shape
        if not shape[0] or not shape == sample.mask.shape == sample.rollout_logprobs.shape:
            return False
        if sample.mask[0]:
            return False
    mask = np.concatenate([sample.mask for sample in samples])
    logprobs = np.concatenate([sample.rollout_logprobs for sample in samples])
    return bool(np.isfinite(logprobs[mask]).all())


def _problem_of(sample: Sample, needed: set[str], has_reward: bool) -> str:
    if has_reward and (sample.reward is None or not math.isfinite(sample.reward)):
        # A missing reward never counts as 0, which would shift the group's baseline.
        return f"its reward is {sample.reward}, not a finite number"
    if sample.mask.shape != sample.ids.shape:
        return f"its mask has {sample.mask.size} entries for {sample.ids.size} tokens"
    if sample.mask.size and sample.mask[0]:
        return "its first token is marked as sampled, but no token precedes it"
    columns = {**sample.columns, "rollout_logprobs": sample.rollout_logprobs}
    for name in sorted(needed.union(name for name in CARRIED if name in columns)):
        if name not in columns:
            return f"it lacks the column {name}"
        if columns[name].shape != sample.ids.shape:
            return f"its {name} has {columns[name].size} entries for {sample.ids.size} tokens"
        bad = np.flatnonzero(sample.mask & ~np.isfinite(columns[name]))
        if bad.size:
            return f"its {name} is {columns[name][bad[0]]} at token {bad[0]}"
    return ""
