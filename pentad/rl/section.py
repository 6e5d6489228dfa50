"""Settings of algorithms, without torch: the keys of the blocks `algorithm`, `preference` and
`guards`.

`pentad.rl.facts` has the facts of algorithms; `docs/algorithms.md` explains how to add one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from pentad.core.section import Count, NonNegative, NonNegativeInt, Positive, Section, Share
from pentad.rl.facts import FACTS, AlgorithmFacts, AlgorithmName, CorrectionKind, CorrectionLevel

KlEstimator = Literal["k1", "k2", "k3"]
KlPlace = Literal["loss", "reward"]
LossNorm = Literal["token", "sequence", "group", "constant"]
RejectionLevel = Literal["none", "token", "sequence", "geometric"]


SWITCHES = {
    "kl_coef": ("kl_estimator", "kl_in", "kl_weighted"),
    "correction": ("correction_level", "correction_cap", "correction_floor"),
    "overlong_penalty": ("overlong_buffer",),
    "rejection": ("rejection_cap", "rejection_floor"),
}
"""Settings that enable a part, each with the settings of this part."""


class AlgorithmConfig(Section):
    name: AlgorithmName = "grpo"
    """The algorithm. It defines advantages, loss and corrections; the other keys of this block
    override single defaults and are null otherwise."""
    eps_clip: Positive | None = None
    """Clip range of the importance ratio below 1 (and above, unless `eps_clip_higher`)."""
    eps_clip_higher: Positive | None = None
    """Clip range above 1."""
    c_clip: Annotated[float, Field(gt=1)] | None = None
    """Dual clip: bound on the ratio if the advantage is negative. null: 3. A large number disables
    it."""
    kl_coef: NonNegative | None = None
    """Weight of the KL term against the reference model; 0 switches it off."""
    kl_estimator: KlEstimator | None = None
    """Estimator of the KL term."""
    kl_in: KlPlace | None = None
    """Whether the KL term is part of the loss or subtracted from the reward of each token."""
    kl_weighted: bool | None = None
    """Weights the KL term of a token by the ratio of the policy to the sampler's, so that value and
    gradient are those of KL(policy || reference) for data of any staleness. For k3 in the loss."""
    entropy_coef: NonNegative | None = None
    """Weight of the entropy bonus."""
    loss_norm: LossNorm | None = None
    """Unit of averaging in the loss."""
    gamma: Share | None = None
    """Discount of future rewards."""
    lam: Share | None = None
    """Lambda of generalised advantage estimation."""
    value_coef: NonNegative | None = None
    """Weight of the value loss."""
    eps_clip_value: Positive | None = None
    """Clip range of the value loss."""
    correction: CorrectionKind | None = None
    """Correction for data of an older or differently computed policy: truncated (tis) or masked
    (mis) importance weights, or the clipped ratio against the sampler's log-probs. null: the
    algorithm's default if `max_staleness`, `updates_per_batch` or `rollout.oversample` requires
    one, else none."""
    allow_uncorrected: bool | None = None
    """Allows `correction: none` with `max_staleness` above 0, or `updates_per_batch` or
    `rollout.oversample` above 1."""
    correction_level: CorrectionLevel | None = None
    """Level of the weight: the token, the sequence, or the geometric mean over the sequence."""
    correction_cap: Annotated[float, Field(ge=1)] | None = None
    """Largest weight."""
    correction_floor: Share | None = None
    """Smallest weight."""
    rejection: RejectionLevel | None = None
    """Drops tokens, or whole sequences by their ratio or its geometric mean per token, if the
    policy has moved too far from the sampler's. Independent of `correction`. Dropped tokens still
    count in the divisor of the loss. null: none."""
    rejection_cap: Annotated[float, Field(ge=1)] | None = None
    """Largest ratio that is kept. null: 2."""
    rejection_floor: Share | None = None
    """Smallest ratio that is kept. null: 0.5."""
    decoupled: bool | None = None
    """Decoupled PPO: clips the ratio to the recomputed policy, corrects for the sampling policy."""
    dynamic_filter: bool | None = None
    """Replaces groups with all-equal rewards, which have no learning signal, by further prompts."""
    overlong_buffer: Count | None = None
    """Number of tokens before the length limit (`gconfig.max_sampled_tokens`) over which the
    overlong penalty rises. null: a fifth of the limit."""
    overlong_penalty: NonNegative | None = None
    """Penalty at the full length."""
    mask_truncated: bool | None = None
    """Does not train truncated samples; their rewards still count in the baseline of their group
    (the overlong filter of DAPO)."""
    tau_pos: Positive | None = None
    """SAPO: steepness of the gate for positive advantages. null: 1."""
    tau_neg: Positive | None = None
    """SAPO: steepness of the gate for negative advantages. null: 1.05."""
    m2_threshold: Positive | None = None
    """M2PO: largest mean square of the log-ratios between trainer and sampler over a batch's
    trained tokens. null: 0.04."""
    cov_share: Share | None = None
    """Clip-Cov and KL-Cov: share of a batch's tokens that are detached or penalised."""
    cov_low: NonNegative | None = None
    """Clip-Cov: lowest covariance of tokens that can be detached. null: 1."""
    cov_high: Positive | None = None
    """Clip-Cov: highest covariance of tokens that can be detached. null: 5."""
    cov_kl_coef: NonNegative | None = None
    """KL-Cov: weight of the penalty. null: 1."""
    reward_scale: float | None = None
    """Factor of every reward."""
    reward_clip: Positive | None = None
    """Scaled rewards are clipped to plus or minus this; in `distill` (null: 10) the difference
    between a token's log-prob and the teacher's."""
    max_reward: Annotated[float, Field(gt=0, le=1e15)] | None = None
    """A reward of this size or more, after scaling and clipping, stops the run. null: 1e6."""

    @property
    def facts(self) -> AlgorithmFacts:
        """Facts of the algorithm, independent of the config."""
        return FACTS[self.name]

    @property
    def given(self) -> dict[str, Any]:
        """Returns the overrides that are not null."""
        return {key: value for key, value in self if key != "name" and value is not None}

    @property
    def settings(self) -> AlgorithmSettings:
        """Returns the algorithm's defaults with the overrides; does not check contradictions."""
        return AlgorithmSettings.of(self.name, self.facts, self.given)


@dataclass(frozen=True, slots=True)
class Clip:
    """The band of the ratio: [1 - low, 1 + high], and the dual clip's bound."""

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    """Steepness of SAPO's gate, which is used instead of a band."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Type of the importance-ratio correction, and the range of its values."""

    kind: CorrectionKind
    level: CorrectionLevel = "token"
    cap: float = 2.0
    floor: float = 0.0

    @property
    def weighs(self) -> bool:
        """Whether tokens get a weight in addition to the loss's ratio."""
        return self.kind in ("tis", "mis")


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmSettings:
    """Settings of an algorithm, with defaults."""

    name: str
    facts: AlgorithmFacts
    """Facts of the algorithm, independent of its settings."""

    eps_clip: float = 0.2
    """The ratio may fall to 1 - eps_clip; from 1 on there is no lower bound."""
    eps_clip_higher: float | None = None
    """The ratio may rise to 1 + this. None: as eps_clip."""
    c_clip: float = 3.0
    """Dual clip: largest ratio if the advantage is negative, which the clip does not bound. verl's
    default."""
    kl_coef: float = 0.0
    """0: no KL term, no reference model."""
    kl_estimator: KlEstimator = "k3"
    kl_in: KlPlace = "loss"
    kl_weighted: bool = False
    entropy_coef: float = 0.0
    loss_norm: LossNorm = "token"
    gamma: float = 1.0
    lam: float = 1.0
    value_coef: float = 1.0
    eps_clip_value: float | None = None
    """None: plain squared error."""
    correction: CorrectionKind = "none"
    correction_level: CorrectionLevel = "token"
    correction_cap: float = 2.0
    correction_floor: float = 0.0
    rejection: RejectionLevel = "none"
    rejection_cap: float = 2.0
    rejection_floor: float = 0.5
    decoupled: bool = False
    """Whether the clip is centred at log-probs recomputed by the trainer; the correction uses the
    sampler's."""
    allow_uncorrected: bool = False
    """Whether off-policy data may be trained without a correction."""
    dynamic_filter: bool = False
    """Whether groups without signal are replaced before training."""
    overlong_buffer: int | None = None
    """Tokens before the length limit over which the penalty rises. None: a fifth of the limit."""
    overlong_penalty: float = 0.0
    mask_truncated: bool = False
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    m2_threshold: float = 0.04
    cov_share: float = 2e-4
    cov_low: float = 1.0
    cov_high: float = 5.0
    cov_kl_coef: float = 1.0
    reward_scale: float = 1.0
    reward_clip: float | None = None
    """For distillation: largest difference of a token's log-probs."""
    max_reward: float = 1e6
    """A larger reward, after scaling and clipping, stops the run: its square could overflow."""

    @classmethod
    def of(cls, name: str, facts: AlgorithmFacts, given: Mapping[str, Any]) -> AlgorithmSettings:
        """Returns the algorithm's defaults with these overrides; does not check values."""
        settings: dict[str, Any] = {**facts.defaults, **given}
        if settings.get("decoupled") and "correction" not in given:
            settings["correction"] = "tis"
        return cls(name=name, facts=facts, **settings)

    @property
    def needs_ref(self) -> bool:
        return self.kl_coef != 0

    def needs_old_logprobs(self, num_updates: int) -> bool:
        """Whether `actor_logprobs` are needed for this number of optimizer steps per batch."""
        if self.facts.needs_old:
            return True
        if self.facts.ratio_level == "none" or self.correction == "sampler_ratio":
            return False
        return self.decoupled or num_updates > 1

    @property
    def needs_tags(self) -> frozenset[str]:
        """Returns the tags of the frozen weights that score samples: ref, teacher."""
        tags = {"ref": self.needs_ref, "teacher": self.facts.needs_teacher}
        return frozenset(tag for tag in tags if tags[tag])

    @property
    def clip(self) -> Clip:
        higher = self.eps_clip if self.eps_clip_higher is None else self.eps_clip_higher
        return Clip(self.eps_clip, higher, self.c_clip, self.tau_pos, self.tau_neg)

    @property
    def correction_settings(self) -> Correction:
        return Correction(
            kind=self.correction,
            level=self.correction_level,
            cap=self.correction_cap,
            floor=self.correction_floor,
        )

    @property
    def rejection_settings(self) -> Correction | None:
        if self.rejection == "none":
            return None
        cap, floor = self.rejection_cap, self.rejection_floor
        return Correction(kind="mis", level=self.rejection, cap=cap, floor=floor)


class PreferenceConfig(Section):
    """Settings of `pentad dpo` and `pentad reward-model`."""

    loss: Literal["dpo", "ipo", "kto", "reward"] = "dpo"
    """dpo and ipo learn from pairs of a preferred and a rejected answer, kto from answers that are
    labelled good or bad one by one. reward trains a reward model on pairs; `pentad reward-model`
    sets it."""
    beta: Positive = 0.1
    """Strength of the regularisation towards the reference; smaller: the policy may move
    further."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """dpo: assumed share of pairs with swapped labels."""
    desirable_weight: Positive = 1.0
    """kto: weight of good answers. Choose it so that good and bad ones weigh about the same."""
    undesirable_weight: Positive = 1.0
    """kto: weight of bad answers."""


class GuardsConfig(Section):
    """Bounds that stop a run with signs of a silent failure."""

    max_logprob_gap: Positive | None = 0.3
    """Largest mean difference of a token's log-prob between trainer and sampler, on samples from
    the trained weights (ten times the limit if all samples are from older weights); a shift of all
    log-probs counts three times. null: no limit."""
    patience_steps: Count = 5
    """Number of consecutive steps beyond a bound that stops the run (equal log-probs reported for
    all tokens, non-finite gradients); for log-prob differences, this many of the last twice as many
    comparisons."""
    max_nonfinite_share: Share = 0.5
    """Also stops when more than this share of the last 20 steps had no finite gradient."""
    max_rollbacks: NonNegativeInt = 2
    """How often a run with `patience_steps` consecutive non-finite gradients is rolled back to the
    weights and optimizer state of its newest recovery checkpoint (or an older one, if that did not
    help) instead of ending. Steps, data and learning rate continue: batches since that checkpoint
    are not trained again."""
    replica_check_steps: Count | None = 100
    """Interval in steps at which ranks compare their copies of weights and optimizer state bitwise;
    a difference ends the run before that step is saved. null: never."""
