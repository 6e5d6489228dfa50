"""The tunables of an algorithm, and the rules that they must keep among themselves."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Literal, get_args

from pentad.core.errors import Problem
from pentad.rl.corrections import Correction, CorrectionKind, CorrectionLevel
from pentad.rl.kl import KlEstimator
from pentad.rl.losses import Clip
from pentad.rl.normalise import LossNorm

AdvantageScope = Literal["group", "batch"]
KlPlace = Literal["loss", "reward"]
RatioLevel = Literal["token", "sequence", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmSettings:
    """One algorithm with all its numbers: plain data. Made by `algorithms.settings_for`."""

    name: str
    advantage_scope: AdvantageScope
    """group: advantages need the sample's own group; batch: all groups of the step."""
    needs_critic: bool = False
    needs_teacher: bool = False
    min_group_size: int = 1
    """Fewer samples per prompt than this can carry no signal."""
    ratio_level: RatioLevel = "token"
    """Whose ratio the clip bounds; none: the loss has no ratio."""

    eps_clip: float = 0.2
    """The ratio may fall to 1 - eps_clip; from 1 on there is no lower bound."""
    eps_clip_higher: float | None = None
    """The ratio may rise to 1 + this. None: as eps_clip."""
    c_clip: float = 3.0
    """Dual clip: largest ratio where the advantage is negative, which the clip itself leaves
    unbounded. verl's default."""
    kl_coef: float = 0.0
    """0: no KL term, no reference model."""
    kl_estimator: KlEstimator = "k3"
    kl_in: KlPlace = "loss"
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
    decoupled: bool = False
    """The clip is centred at log-probs recomputed by the trainer; the sampler's enter by the
    correction."""
    allow_uncorrected: bool = False
    """Off-policy data may go without a correction."""
    dynamic_filter: bool = False
    """Groups without signal are replaced before they are trained."""
    overlong_buffer: int | None = None
    """Tokens before the length limit over which the penalty rises. None: a fifth of the limit."""
    overlong_penalty: float = 0.0
    reward_scale: float = 1.0
    reward_clip: float | None = None
    """Of distillation: largest difference of a token's log-probs."""
    max_reward: float = 1e6
    """A reward beyond it, scaled and clipped, stops the run: no sum of squares would hold it."""

    @property
    def needs_ref(self) -> bool:
        return self.kl_coef != 0

    def needs_old_logprobs(self, num_updates: int) -> bool:
        """Whether `actor_logprobs` are read when a batch makes that many optimizer steps."""
        if self.ratio_level == "none" or self.correction == "sampler_ratio":
            return False
        return self.decoupled or num_updates > 1

    @property
    def needs_tags(self) -> frozenset[str]:
        """The frozen weights that score samples: of ref, teacher."""
        tags = {"ref": self.needs_ref, "teacher": self.needs_teacher}
        return frozenset(tag for tag in tags if tags[tag])

    @property
    def clip(self) -> Clip:
        higher = self.eps_clip if self.eps_clip_higher is None else self.eps_clip_higher
        return Clip(self.eps_clip, higher, self.c_clip)

    @property
    def correction_settings(self) -> Correction:
        return Correction(
            kind=self.correction,
            level=self.correction_level,
            cap=self.correction_cap,
            floor=self.correction_floor,
        )


FACTS = (
    "name",
    "advantage_scope",
    "needs_critic",
    "needs_teacher",
    "min_group_size",
    "ratio_level",
)
"""Fields that the table decides."""
TUNABLES = tuple(field.name for field in fields(AlgorithmSettings) if field.name not in FACTS)
CHOICES: dict[str, tuple[str, ...]] = {
    "kl_estimator": get_args(KlEstimator),
    "kl_in": get_args(KlPlace),
    "loss_norm": get_args(LossNorm),
    "correction": get_args(CorrectionKind),
    "correction_level": get_args(CorrectionLevel),
}
POSITIVE = (
    *("eps_clip", "eps_clip_higher", "eps_clip_value", "correction_cap"),
    *("reward_clip", "max_reward"),
)
NOT_NEGATIVE = ("kl_coef", "entropy_coef", "value_coef", "correction_floor", "overlong_penalty")
SHARES = ("gamma", "lam")
NEUTRAL: dict[str, object] = {
    "gamma": 1.0,
    "reward_scale": 1.0,
    "overlong_penalty": 0.0,
    "decoupled": False,
    "allow_uncorrected": False,
    "dynamic_filter": False,
}
"""Values that ask for nothing, hence pass also where a setting is not read."""


def where(name: str, value: object) -> str:
    return f"algorithm.{name} = {value}"


def override_problems(given: Mapping[str, object]) -> Iterator[Problem]:
    """Overrides that are wrong by themselves: unknown names, values out of range."""
    for name, value in given.items():
        if name not in TUNABLES:
            near = difflib.get_close_matches(name, TUNABLES, n=1)
            remedy = f"did you mean {near[0]}?" if near else f"known are {', '.join(TUNABLES)}"
            yield Problem(where(name, value), "no algorithm has this setting", remedy)
        elif rule := _broken_rule(name, value):
            yield Problem(where(name, value), rule)


def _broken_rule(name: str, value: object) -> str:
    if name in CHOICES:
        return "" if value in CHOICES[name] else f"must be one of {', '.join(CHOICES[name])}"
    if name in ("decoupled", "allow_uncorrected", "dynamic_filter"):
        return "" if isinstance(value, bool) else "must be true or false"
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return "must be a finite number"
    if name == "overlong_buffer" and (value < 1 or value != int(value)):
        return "must be a whole number of tokens, at least 1"
    if name in POSITIVE and value <= 0:
        return "must be greater than 0"
    if name in NOT_NEGATIVE and value < 0:
        return "must not be negative"
    if name in SHARES and not 0 <= value <= 1:
        return "must lie in 0 ... 1"
    if name == "c_clip" and value <= 1:
        return "must be greater than 1, the ratio of an unchanged policy"
    if name == "reward_scale" and value == 0:
        return "must not be 0, which would make all rewards equal"
    return ""


def conflict_problems(
    settings: AlgorithmSettings, given: Mapping[str, object], unused: Mapping[str, str]
) -> Iterator[Problem]:
    """Overrides that contradict each other or would have no effect.

    `unused` says of the tunables that this algorithm does not read why that is so.
    """
    for name, value in given.items():
        if name in unused and not (name in NEUTRAL and value == NEUTRAL[name]):
            rule = f"has no effect with algorithm.name = {settings.name}: {unused[name]}"
            yield Problem(where(name, value), rule, "leave it out")
    yield from _switched_off(settings, given)
    if not settings.correction_floor <= 1 <= settings.correction_cap:
        band = f"[{settings.correction_floor}, {settings.correction_cap}]"
        rule = f"the band {band} of correction_floor and correction_cap must hold the ratio 1"
        name = "correction_cap" if settings.correction_cap < 1 else "correction_floor"
        yield Problem(where(name, given.get(name)), rule)
    if settings.decoupled and not settings.correction_settings.weighs:
        yield Problem(
            where("decoupled", True),
            "needs the weight of the recomputed policy over the sampling one, which "
            f"algorithm.correction = {settings.correction} drops",
            "set algorithm.correction to tis or mis, or leave it out",
        )
    if settings.correction == "sampler_ratio":
        yield from _without_weight(settings, given)


def _without_weight(settings: AlgorithmSettings, given: Mapping[str, object]) -> Iterator[Problem]:
    if settings.ratio_level == "none":
        rule = f"has no effect with algorithm.name = {settings.name}: its loss has no ratio"
        yield Problem(where("correction", "sampler_ratio"), rule, "set it to tis or mis")
    for name in ("correction_level", "correction_cap", "correction_floor"):
        if name in given:
            rule = "has no effect with algorithm.correction = sampler_ratio: the clip bounds it"
            yield Problem(where(name, given[name]), rule, "set algorithm.correction to tis or mis")


SWITCHES = (
    ("kl_coef", ("kl_estimator", "kl_in"), "give a coefficient greater than 0"),
    (
        "correction",
        ("correction_level", "correction_cap", "correction_floor"),
        "set it to tis or mis",
    ),
    ("overlong_penalty", ("overlong_buffer",), "give a penalty greater than 0"),
)
"""(switch, settings that it governs, how to turn it on)."""


def _switched_off(settings: AlgorithmSettings, given: Mapping[str, object]) -> Iterator[Problem]:
    """Details of a part that nobody turned on; an explicit "off" is a decision and passes."""
    state: dict[str, object] = {
        "kl_coef": settings.kl_coef,
        "correction": settings.correction,
        "overlong_penalty": settings.overlong_penalty,
    }
    for switch, details, remedy in SWITCHES:
        if state[switch] not in (0, "none") or switch in given:
            continue
        for name in details:
            if name in given:
                rule = f"has no effect while {where(switch, state[switch])}"
                yield Problem(where(name, given[name]), rule, remedy)


def run_problems(
    settings: AlgorithmSettings,
    *,
    group_size: int,
    max_new_tokens: int,
    max_staleness: int = 0,
    num_updates: int = 1,
) -> list[Problem]:
    """What is wrong between an algorithm and the sampling of a run."""
    problems = []
    is_off_policy = max_staleness > 0 or num_updates > 1
    if is_off_policy and settings.correction == "none" and not settings.allow_uncorrected:
        rule = (
            f"with max_staleness = {max_staleness} and updates_per_batch = {num_updates} the "
            "policy that is trained is not the one that sampled"
        )
        remedy = "leave it out, or set algorithm.allow_uncorrected=true"
        problems.append(Problem(where("correction", "none"), rule, remedy))
    if group_size < settings.min_group_size:
        rule = (
            f"{settings.name} compares samples of one prompt and learns nothing from "
            f"{group_size} of them"
        )
        remedy = f"draw at least {settings.min_group_size}"
        problems.append(Problem(f"gconfig.n_samples = {group_size}", rule, remedy))
    buffer = settings.overlong_buffer
    if settings.overlong_penalty and buffer is not None and buffer > max_new_tokens:
        rule = f"must not exceed the {max_new_tokens} tokens that a sample may have"
        problems.append(Problem(where("overlong_buffer", buffer), rule))
    return problems
