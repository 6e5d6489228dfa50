"""The keys of the blocks `algorithm` and `guards`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from pentad.core.algorithms import (
    FACTS,
    AlgorithmFacts,
    AlgorithmSettings,
    CorrectionKind,
    CorrectionLevel,
    KlEstimator,
    KlPlace,
    LossNorm,
)
from pentad.core.section import Count, NonNegative, NonNegativeInt, Positive, Section, Share

AlgorithmName: TypeAlias = Literal[tuple(FACTS)]  # type: ignore[valid-type]


class GuardsConfig(Section):
    """When a run that trains something else than it should is stopped."""

    max_logprob_gap: Positive | None = 0.3
    """Largest mean difference of a token's log-prob between trainer and sampler, on samples drawn
    with the weights that are trained (ten times as much where all are older); a shift of all
    log-probs counts three times. null: any."""
    patience_steps: Count = 5
    """Steps in a row past a bound (one log-prob reported for all tokens, gradients that are not
    finite) that stop the run; of log-prob differences, as many of the last twice as many."""
    max_nonfinite_share: Share = 0.5
    """Also stops when more than this share of the last 20 steps had no finite gradient."""
    max_rollbacks: NonNegativeInt = 2
    """How often a run that would stop, since `patience_steps` gradients in a row were not finite,
    goes back to the weights and optimizer state of its newest recovery checkpoint instead (of an
    older one if that has not helped). Steps, data and learning rate go on: what was trained since
    is not trained again."""
    replica_check_steps: Count | None = 100
    """Steps after which ranks compare what several of them hold copies of, weights and optimizer
    state, bit by bit; a difference ends the run before it is saved. null: never."""


class AlgorithmConfig(Section):
    name: AlgorithmName = "grpo"
    """The algorithm. It decides advantages, loss and corrections; the other keys of this block
    override single parts of it and are null as long as its own choice holds."""
    eps_clip: Positive | None = None
    """Clip range of the importance ratio below 1 (and above, unless `eps_clip_higher`)."""
    eps_clip_higher: Positive | None = None
    """Clip range above 1."""
    c_clip: Annotated[float, Field(gt=1)] | None = None
    """Dual clip: bound on the ratio where the advantage is negative. null: 3. A large number
    switches it off."""
    kl_coef: NonNegative | None = None
    """Weight of the KL term against the reference model; 0 switches it off."""
    kl_estimator: KlEstimator | None = None
    """Estimator of the KL term."""
    kl_in: KlPlace | None = None
    """Whether the KL term is part of the loss or taken from the reward of each token."""
    entropy_coef: NonNegative | None = None
    """Weight of the entropy bonus."""
    loss_norm: LossNorm | None = None
    """What the loss is a mean over."""
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
    (mis) importance weights, or the clipped ratio taken against the sampler's log-probs. null: one
    that fits the algorithm if `max_staleness` or `updates_per_batch` asks for it, else none."""
    allow_uncorrected: bool | None = None
    """Lets `correction: none` pass with `max_staleness` above 0 or `updates_per_batch` above 1."""
    correction_level: CorrectionLevel | None = None
    """Whether the weight is that of a token, of a sequence, or the sequence's geometric mean."""
    correction_cap: Annotated[float, Field(ge=1)] | None = None
    """Largest weight that is let through."""
    correction_floor: Share | None = None
    """Smallest weight that is let through."""
    decoupled: bool | None = None
    """Decoupled PPO: clips against the recomputed policy, corrects against the sampling one."""
    dynamic_filter: bool | None = None
    """Replaces groups whose rewards are all equal, which carry no signal, by further prompts."""
    overlong_buffer: Count | None = None
    """Tokens before the most that a sample may have (`gconfig.max_sampled_tokens`) over which the
    overlong penalty rises. null: a fifth of them."""
    overlong_penalty: NonNegative | None = None
    """Penalty at the full length."""
    reward_scale: float | None = None
    """Every reward is multiplied by it."""
    reward_clip: Positive | None = None
    """Scaled rewards are clipped to plus or minus this; in `distill` (where null is 10) a token's
    log-prob less the teacher's."""
    max_reward: Annotated[float, Field(gt=0, le=1e15)] | None = None
    """A reward of this size or more, after scaling and clipping, stops the run. null: 1e6."""

    @property
    def facts(self) -> AlgorithmFacts:
        """What the algorithm is by itself."""
        return FACTS[self.name]

    @property
    def given(self) -> dict[str, Any]:
        """The overrides that are not null."""
        return {key: value for key, value in self if key != "name" and value is not None}

    @property
    def settings(self) -> AlgorithmSettings:
        """Its own choices with the overrides; contradictions among them are not looked for."""
        return AlgorithmSettings.of(self.name, self.facts, self.given)
