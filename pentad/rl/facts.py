"""Facts about each algorithm that do not depend on its settings, without torch.

Read by `plan` and the rules of `pentad.config`; `pentad.rl.algorithms` adds the functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

AdvantageScope = Literal["group", "batch"]
RatioLevel = Literal["token", "sequence", "none"]
CorrectionKind = Literal["none", "tis", "mis", "sampler_ratio"]
CorrectionLevel = Literal["token", "sequence", "geometric"]
ProximalMethod = Literal["recompute", "loglinear", "metrics"]
BEFORE_THE_BATCH = "it selects tokens by log-probs that are recomputed before the batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmFacts:
    """Facts about an algorithm that do not depend on its settings."""

    text: str
    """One line of description."""
    paper: str
    """Link to the paper."""
    scope: AdvantageScope
    """Input of the advantage function: the sample's own group, or all groups of the step."""
    needs_critic: bool = False
    needs_teacher: bool = False
    needs_greedy: bool = False
    """Whether each group needs the reward of a greedy answer to its prompt."""
    needs_old: bool = False
    """Whether the trainer's log-probs at the start of a batch are always needed, even with one
    update."""
    min_group_size: int = 1
    """Minimum number of samples per prompt for a signal."""
    ratio_level: RatioLevel = "token"
    """Level of the ratio that the surrogate clips; none: the loss has no ratio."""
    uses_gamma: bool = False
    """Whether the advantage function discounts."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Settings whose default differs from that of `AlgorithmConfig`."""
    off_policy: tuple[CorrectionKind, CorrectionLevel | None] = ("tis", None)
    """Correction of off-policy data, and its level if not the default: CISPO's clipped ratio
    already is a truncated weight, and GSPO's is the geometric mean of a sequence."""
    own: tuple[str, ...] = ()
    """Settings that only algorithms that list them here read."""
    unread: Mapping[str, str] = field(default_factory=dict)
    """Further settings that it never reads, besides those of `unused_settings`, with the reason."""


FACTS: dict[str, AlgorithmFacts] = {
    "grpo": AlgorithmFacts(
        text="Group-relative advantages, clipped ratio, mean over samples of token means.",
        paper="https://arxiv.org/abs/2402.03300",
        scope="group",
        min_group_size=2,
        defaults={"loss_norm": "sequence"},
    ),
    "dr_grpo": AlgorithmFacts(
        text="GRPO without its length and difficulty biases: no std, a constant divisor.",
        paper="https://arxiv.org/abs/2503.20783",
        scope="group",
        min_group_size=2,
        defaults={"loss_norm": "constant"},
    ),
    "dapo": AlgorithmFacts(
        text="GRPO with clip-higher, token mean, overlong penalty and dynamic filtering.",
        paper="https://arxiv.org/abs/2503.14476",
        scope="group",
        min_group_size=2,
        defaults={
            "eps_clip_higher": 0.28,
            "loss_norm": "token",
            "dynamic_filter": True,
            "overlong_penalty": 1.0,
        },
    ),
    "rloo": AlgorithmFacts(
        text="Leave-one-out baseline; the clip only acts when a batch makes several updates.",
        paper="https://arxiv.org/abs/2402.14740",
        scope="group",
        min_group_size=2,
        defaults={"loss_norm": "constant", "kl_in": "reward", "kl_estimator": "k1"},
    ),
    "reinforce": AlgorithmFacts(
        text="The plain policy gradient with the batch's mean reward as baseline.",
        paper="https://doi.org/10.1007/BF00992696",
        scope="batch",
        ratio_level="none",
        defaults={"loss_norm": "constant"},
    ),
    "remax": AlgorithmFacts(
        text="REINFORCE with the reward of the greedy answer to the same prompt as baseline.",
        paper="https://arxiv.org/abs/2310.10505",
        scope="group",
        needs_greedy=True,
        ratio_level="none",
        defaults={"loss_norm": "constant", "kl_in": "reward", "kl_estimator": "k1"},
    ),
    "reinforce_plus_plus": AlgorithmFacts(
        text="Per-token returns whitened over the whole batch; no critic, no groups needed.",
        paper="https://arxiv.org/abs/2501.03262",
        scope="batch",
        uses_gamma=True,
        defaults={"kl_in": "reward", "kl_estimator": "k1"},
    ),
    "ppo": AlgorithmFacts(
        text="A critic and generalised advantage estimation, whitened over the batch.",
        paper="https://arxiv.org/abs/1707.06347",
        scope="batch",
        needs_critic=True,
        uses_gamma=True,
        defaults={"lam": 0.95, "eps_clip_value": 0.2, "kl_in": "reward", "kl_estimator": "k1"},
    ),
    "gspo": AlgorithmFacts(
        text="GRPO with one ratio per sequence, the geometric mean of its tokens' ratios.",
        paper="https://arxiv.org/abs/2507.18071",
        scope="group",
        min_group_size=2,
        ratio_level="sequence",
        defaults={"eps_clip": 3e-4, "eps_clip_higher": 4e-4, "loss_norm": "sequence"},
        off_policy=("tis", "geometric"),
    ),
    "cispo": AlgorithmFacts(
        text="Clips the weight of a token, never its gradient; one-sided by default.",
        paper="https://arxiv.org/abs/2506.13585",
        scope="group",
        min_group_size=2,
        defaults={"eps_clip": 1.0, "eps_clip_higher": 3.0, "loss_norm": "token"},
        off_policy=("sampler_ratio", None),
        unread={"c_clip": "its ratio is bounded on both sides of every advantage"},
    ),
    "sapo": AlgorithmFacts(
        text="GRPO whose clip is a smooth gate on the ratio, steeper for negative advantages.",
        paper="https://arxiv.org/abs/2511.20347",
        scope="group",
        min_group_size=2,
        defaults={"loss_norm": "sequence"},
        own=("tau_pos", "tau_neg"),
        unread=dict.fromkeys(
            ("eps_clip", "eps_clip_higher", "c_clip"), "its gate is smooth: tau_pos and tau_neg"
        ),
    ),
    "gmpo": AlgorithmFacts(
        text="GRPO with the geometric mean of a sequence's clipped ratios; bounds are of its log.",
        paper="https://arxiv.org/abs/2507.20673",
        scope="group",
        min_group_size=2,
        ratio_level="sequence",
        defaults={"eps_clip": 0.4, "loss_norm": "sequence"},
        off_policy=("tis", "geometric"),
    ),
    "icepop": AlgorithmFacts(
        text="GRPO without the tokens on which trainer and sampler disagree, in every mode.",
        paper="https://arxiv.org/abs/2510.18855",
        scope="group",
        min_group_size=2,
        defaults={
            "loss_norm": "sequence",
            "correction": "mis",
            "correction_floor": 0.5,
            "correction_cap": 5.0,
        },
        off_policy=("mis", None),
    ),
    "kpop": AlgorithmFacts(
        text="GRPO without the tokens whose probabilities in trainer and sampler diverge, in "
        "every mode.",
        paper="https://ringtech.notion.site/kpop",
        scope="group",
        min_group_size=2,
        defaults={
            "loss_norm": "sequence",
            "correction": "tis",
            "correction_cap": 5.0,
            "rejection": "binary_kl",
        },
    ),
    "m2po": AlgorithmFacts(
        text="No clip; the tokens farthest from the sampler are left out until the second moment "
        "of log-ratios is small.",
        paper="https://arxiv.org/abs/2510.01161",
        scope="batch",
        min_group_size=2,
        needs_old=True,
        defaults={"loss_norm": "token", "correction": "sampler_ratio"},
        off_policy=("sampler_ratio", None),
        own=("m2_threshold",),
        unread={
            **dict.fromkeys(
                ("eps_clip", "eps_clip_higher", "decoupled"),
                "m2_threshold takes the place of its clip",
            ),
            "prox_logp_method": BEFORE_THE_BATCH,
        },
    ),
    "opo": AlgorithmFacts(
        text="The baseline of least variance: the group's rewards weighted by length; no std.",
        paper="https://arxiv.org/abs/2505.23585",
        scope="group",
        min_group_size=2,
        defaults={"loss_norm": "constant"},
    ),
    "gpg": AlgorithmFacts(
        text="The plain policy gradient on centred rewards, scaled up for groups without signal.",
        paper="https://arxiv.org/abs/2504.02546",
        scope="batch",
        min_group_size=2,
        ratio_level="none",
        defaults={"loss_norm": "token"},
    ),
    "lite_ppo": AlgorithmFacts(
        text="PPO's clip without a critic: the group's mean, the batch's std, a token mean.",
        paper="https://arxiv.org/abs/2508.08221",
        scope="batch",
        min_group_size=2,
        defaults={"loss_norm": "token"},
    ),
    "reinforce_plus_plus_baseline": AlgorithmFacts(
        text="REINFORCE++ with the mean of the group as baseline.",
        paper="https://arxiv.org/abs/2501.03262",
        scope="batch",
        min_group_size=2,
        defaults={"loss_norm": "token", "kl_estimator": "k2"},
    ),
    "clip_cov": AlgorithmFacts(
        text="GRPO that detaches a few tokens whose log-prob and advantage rise together, which "
        "keeps the entropy.",
        paper="https://arxiv.org/abs/2505.22617",
        scope="batch",
        min_group_size=2,
        defaults={"loss_norm": "token", "cov_share": 2e-4},
        own=("cov_share", "cov_low", "cov_high"),
        unread={"prox_logp_method": BEFORE_THE_BATCH},
    ),
    "kl_cov": AlgorithmFacts(
        text="GRPO with a penalty on moving the tokens of the highest covariance; for several "
        "updates a batch.",
        paper="https://arxiv.org/abs/2505.22617",
        scope="batch",
        min_group_size=2,
        defaults={"loss_norm": "token", "cov_share": 2e-3},
        own=("cov_share", "cov_kl_coef"),
        unread={
            "eps_clip": "its penalty takes the place of a clip",
            "eps_clip_higher": "its penalty takes the place of a clip",
            "prox_logp_method": BEFORE_THE_BATCH,
        },
    ),
    "distill": AlgorithmFacts(
        text="On-policy distillation: a teacher's log-probs judge every sampled token.",
        paper="https://arxiv.org/abs/2306.13649",
        scope="group",
        needs_teacher=True,
        uses_gamma=True,
        defaults={"gamma": 0.0, "reward_clip": 10.0},
    ),
}
PREFERENCES = "learns from recorded preferences, and algorithms here from samples that they draw"
ELSEWHERE = {
    **{name: f"{PREFERENCES}: pentad dpo preference.loss={name}" for name in ("dpo", "ipo", "kto")},
    **dict.fromkeys(("orpo", "simpo", "cpo"), f"{PREFERENCES}; pentad dpo has dpo, ipo and kto"),
    "sft": "supervised fine-tuning has its own command, pentad sft",
}
"""Names of methods that are not online algorithms -> the command that has them."""
AlgorithmName: TypeAlias = Literal[tuple(FACTS)]  # type: ignore[valid-type]


def unused_settings(facts: AlgorithmFacts) -> dict[str, str]:
    """Returns the settings that an algorithm never reads, each with the reason."""
    reasons = {
        "its loss has no ratio": (
            facts.ratio_level == "none",
            ("eps_clip", "eps_clip_higher", "c_clip", "decoupled", "prox_logp_method"),
        ),
        "it has no critic": (not facts.needs_critic, ("lam", "value_coef", "eps_clip_value")),
        "it does not discount": (not facts.uses_gamma, ("gamma",)),
        "a group of equal rewards still carries signal": (
            facts.min_group_size < 2,
            ("dynamic_filter",),
        ),
        "it learns from a teacher, not from rewards": (
            facts.needs_teacher,
            ("reward_scale", "max_reward", "overlong_penalty", "overlong_buffer"),
        ),
    }
    unused = {name: why for why, (holds, names) in reasons.items() if holds for name in names}
    for name in sorted({name for one in FACTS.values() for name in one.own} - set(facts.own)):
        readers = [one for one, known in FACTS.items() if name in known.own]
        verb = "reads" if len(readers) == 1 else "read"
        unused[name] = f"only {' and '.join(readers)} {verb} it"
    return unused | dict(facts.unread)
