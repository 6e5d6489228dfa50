"""Settings of algorithms, without torch: the keys of the blocks `algorithm`, `preference` and
`guards`.

`pentad.rl.facts` has the facts of algorithms; `docs/algorithms.md` explains how to add one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    ModelWrapValidatorHandler,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from pentad.core.section import (
    Count,
    NonNegative,
    NonNegativeInt,
    OrDefault,
    Positive,
    Section,
    Share,
)
from pentad.rl.facts import (
    FACTS,
    AlgorithmFacts,
    AlgorithmName,
    CorrectionKind,
    CorrectionLevel,
    ProximalMethod,
)

KlEstimator = Literal["k1", "k2", "k3"]
KlPlace = Literal["loss", "reward"]
LossNorm = Literal["token", "sequence", "group", "constant"]
RejectionLevel = Literal["none", "token", "sequence", "geometric", "binary_kl"]


SWITCHES = {
    "kl_coef": ("kl_estimator", "kl_in", "kl_weighted"),
    "correction": ("correction_level", "correction_cap", "correction_floor"),
    "overlong_penalty": ("overlong_buffer",),
    "rejection": ("rejection_cap", "rejection_floor", "rejection_kl"),
}
"""Settings that enable a part, each with the settings of this part."""


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
    level: CorrectionLevel | Literal["binary_kl"] = "token"
    """binary_kl is only a level of `rejection`; its cap is a divergence."""
    cap: float = 2.0
    floor: float = 0.0

    @property
    def weighs(self) -> bool:
        """Whether tokens get a weight in addition to the loss's ratio."""
        return self.kind in ("tis", "mis")


class AlgorithmConfig(Section):
    """Settings that are not given have the algorithm's default (`AlgorithmFacts.defaults`), else
    that of the field; records have null for them, so that another algorithm can be chosen."""

    name: AlgorithmName = "grpo"
    """The algorithm. It defines advantages, loss and corrections; the other keys of this block
    override single defaults. null: the algorithm's default, or the one here if it has none."""
    eps_clip: OrDefault[Positive] = 0.2
    """Clip range of the importance ratio below 1 (and above, unless `eps_clip_higher`)."""
    eps_clip_higher: Positive | None = None
    """Clip range above 1."""
    c_clip: OrDefault[Annotated[float, Field(gt=1)]] = 3.0
    """Dual clip: bound on the ratio if the advantage is negative. A large number disables it."""
    kl_coef: OrDefault[NonNegative] = 0.0
    """Weight of the KL term against the reference model; 0 switches it off."""
    kl_estimator: OrDefault[KlEstimator] = "k3"
    """Estimator of the KL term."""
    kl_in: OrDefault[KlPlace] = "loss"
    """Whether the KL term is part of the loss or subtracted from the reward of each token."""
    kl_weighted: OrDefault[bool] = False
    """Weights the KL term of a token by the ratio of the policy to the sampler's, so that value and
    gradient are those of KL(policy || reference) for data of any staleness. For k3 in the loss."""
    entropy_coef: OrDefault[NonNegative] = 0.0
    """Weight of the entropy bonus."""
    loss_norm: OrDefault[LossNorm] = "token"
    """Unit of averaging in the loss."""
    gamma: OrDefault[Share] = 1.0
    """Discount of future rewards."""
    lam: OrDefault[Share] = 1.0
    """Lambda of generalised advantage estimation."""
    value_coef: OrDefault[NonNegative] = 1.0
    """Weight of the value loss."""
    eps_clip_value: Positive | None = None
    """Clip range of the value loss."""
    correction: OrDefault[CorrectionKind] = "none"
    """Correction for data of an older or differently computed policy: truncated (tis) or masked
    (mis) importance weights, or the clipped ratio against the sampler's log-probs. null: the
    algorithm's default if `max_staleness`, `updates_per_batch` or `rollout.oversample` requires
    one, else none."""
    allow_uncorrected: OrDefault[bool] = False
    """Allows `correction: none` with `max_staleness` above 0, or `updates_per_batch` or
    `rollout.oversample` above 1."""
    correction_level: OrDefault[CorrectionLevel] = "token"
    """Level of the weight: the token, the sequence, or the geometric mean over the sequence."""
    correction_cap: OrDefault[Annotated[float, Field(ge=1)]] = 2.0
    """Largest weight."""
    correction_floor: OrDefault[Share] = 0.0
    """Smallest weight."""
    rejection: OrDefault[RejectionLevel] = "none"
    """Drops tokens, or whole sequences by their ratio or its geometric mean per token, if the
    policy has moved too far from the sampler's. binary_kl drops tokens by the divergence of their
    two probabilities, in both directions. Independent of `correction`. Dropped tokens still count
    in the divisor of the loss."""
    rejection_cap: OrDefault[Annotated[float, Field(ge=1)]] = 2.0
    """Largest ratio that is kept."""
    rejection_floor: OrDefault[Share] = 0.5
    """Smallest ratio that is kept."""
    rejection_kl: OrDefault[Positive] = 0.1
    """Largest divergence that binary_kl keeps."""
    decoupled: OrDefault[bool] = False
    """Decoupled PPO: clips the ratio to the recomputed policy, corrects for the sampling policy."""
    prox_logp_method: OrDefault[ProximalMethod] = "recompute"
    """Log-probs of the old policy, for `decoupled` or several updates per batch. loglinear saves
    the forward pass that recomputes them: it interpolates between those of the sampler and of the
    current policy, by the age of the token. metrics recomputes them and reports the error of the
    interpolation."""
    dynamic_filter: OrDefault[bool] = False
    """Replaces groups with all-equal rewards, which have no learning signal, by further prompts."""
    overlong_buffer: Count | None = None
    """Number of tokens before the length limit (`gconfig.max_sampled_tokens`) over which the
    overlong penalty rises. null: a fifth of the limit."""
    overlong_penalty: OrDefault[NonNegative] = 0.0
    """Penalty at the full length."""
    mask_truncated: OrDefault[bool] = False
    """Does not train truncated samples; their rewards still count in the baseline of their group
    (the overlong filter of DAPO)."""
    tau_pos: OrDefault[Positive] = 1.0
    """SAPO: steepness of the gate for positive advantages."""
    tau_neg: OrDefault[Positive] = 1.05
    """SAPO: steepness of the gate for negative advantages."""
    m2_threshold: OrDefault[Positive] = 0.04
    """M2PO: largest mean square of the log-ratios between trainer and sampler over a batch's
    trained tokens."""
    cov_share: OrDefault[Share] = 2e-4
    """Clip-Cov and KL-Cov: share of a batch's tokens that are detached or penalised."""
    cov_low: OrDefault[NonNegative] = 1.0
    """Clip-Cov: lowest covariance of tokens that can be detached."""
    cov_high: OrDefault[Positive] = 5.0
    """Clip-Cov: highest covariance of tokens that can be detached."""
    cov_kl_coef: OrDefault[NonNegative] = 1.0
    """KL-Cov: weight of the penalty."""
    reward_scale: OrDefault[float] = 1.0
    """Factor of every reward."""
    reward_clip: Positive | None = None
    """Scaled rewards are clipped to plus or minus this; in `distill` (null: 10) the difference
    between a token's log-prob and the teacher's."""
    max_reward: OrDefault[Annotated[float, Field(gt=0, le=1e15)]] = 1e6
    """A reward of this size or more, after scaling and clipping, stops the run."""

    @model_validator(mode="wrap")
    @classmethod
    def use_defaults_of_the_algorithm(
        cls, values: Any, make: ModelWrapValidatorHandler[Self]
    ) -> Self:
        """Fills the settings that are not given."""
        if not isinstance(values, dict):
            return make(values)
        given = {key: values[key] for key in values if key == "name" or values[key] is not None}
        facts = FACTS.get(str(given.get("name", "grpo")))
        made = make({**(facts.defaults if facts else {}), **given})
        if made.decoupled and "correction" not in given:
            made.__dict__["correction"] = "tis"
        made.__pydantic_fields_set__.intersection_update(given)
        return made

    @model_serializer(mode="wrap")
    def write_null_unless_given(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        given = {"name", *self.model_fields_set}
        return {key: value if key in given else None for key, value in write(self).items()}

    @property
    def facts(self) -> AlgorithmFacts:
        """Facts of the algorithm, independent of the settings."""
        return FACTS[self.name]

    @property
    def given(self) -> dict[str, Any]:
        """Returns the settings that were given in a recipe or chosen when it was resolved."""
        names = self.model_fields_set - {"name"}
        return {key: value for key, value in self if key in names}

    @property
    def needs_ref(self) -> bool:
        return self.kl_coef != 0

    def needs_old_logprobs(self, num_updates: int) -> bool:
        """Whether `actor_logprobs` are needed for this number of optimizer steps per batch."""
        if self.facts.needs_old:
            return True
        return self.has_proximal(num_updates) and self.prox_logp_method != "loglinear"

    def has_proximal(self, num_updates: int) -> bool:
        """Whether the ratio is relative to the policy at the start of the batch, and this policy
        differs from the current one, or is treated separately."""
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
        if self.rejection == "binary_kl":
            return Correction(kind="mis", level="binary_kl", cap=self.rejection_kl)
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
