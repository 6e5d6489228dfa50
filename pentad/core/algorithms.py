"""The algorithms without their tensor functions: what each is, what it reads, and its settings.

`pentad.config` plans with these facts and `pentad.rl` trains with them; nothing here needs torch.
Adding an algorithm is an entry in `FACTS` and its functions in `pentad.rl.algorithms`;
`docs/algorithms.md` walks through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from pentad.core.errors import Problem

AdvantageScope = Literal["group", "batch"]
RatioLevel = Literal["token", "sequence", "none"]
KlEstimator = Literal["k1", "k2", "k3"]
KlPlace = Literal["loss", "reward"]
LossNorm = Literal["token", "sequence", "group", "constant"]
CorrectionKind = Literal["none", "tis", "mis", "sampler_ratio"]
CorrectionLevel = Literal["token", "sequence", "geometric"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmFacts:
    """What is known of an algorithm before any number is chosen."""

    text: str
    """One line for people."""
    paper: str
    """Link."""
    scope: AdvantageScope
    """What the advantage function must see at once: the sample's own group, or all of the step."""
    needs_critic: bool = False
    needs_teacher: bool = False
    min_group_size: int = 1
    """Fewer samples per prompt than this can carry no signal."""
    ratio_level: RatioLevel = "token"
    """Whose ratio the surrogate clips; none: the loss has no ratio."""
    uses_gamma: bool = False
    """Whether the advantage function discounts."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Tunables that differ from those of `AlgorithmSettings`."""
    off_policy: tuple[CorrectionKind, CorrectionLevel | None] = ("tis", None)
    """Correction of off-policy data, and its level if not the default: the ratio that CISPO clips
    is a truncated weight already, and GSPO's is the geometric mean of a sequence."""
    unread: Mapping[str, str] = field(default_factory=dict)
    """Tunables that it never reads for reasons of its own, beside those of `unused_settings`."""


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
    **dict.fromkeys(("dpo", "ipo", "kto", "orpo", "simpo", "cpo"), PREFERENCES),
    "sft": "supervised fine-tuning is a command of its own, pentad sft",
}
"""Names of methods that are no online algorithm -> why they are none of these."""


@dataclass(frozen=True, slots=True)
class Clip:
    """The band of the ratio: [1 - low, 1 + high], and the dual clip's bound."""

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Which ratio, and which of its values are let through."""

    kind: CorrectionKind
    level: CorrectionLevel = "token"
    cap: float = 2.0
    floor: float = 0.0

    @property
    def weighs(self) -> bool:
        """Whether tokens get a weight beside the loss's own ratio."""
        return self.kind in ("tis", "mis")


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmSettings:
    """One algorithm with all its numbers: plain data. Made by `rl.algorithms.settings_for`."""

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

    @classmethod
    def of(cls, name: str, facts: AlgorithmFacts, given: Mapping[str, Any]) -> AlgorithmSettings:
        """The algorithm's own choices, overridden by what is given: values are not checked."""
        settings: dict[str, Any] = {**facts.defaults, **given}
        if settings.get("decoupled") and "correction" not in given:
            settings["correction"] = "tis"
        return cls(
            name=name,
            advantage_scope=facts.scope,
            needs_critic=facts.needs_critic,
            needs_teacher=facts.needs_teacher,
            min_group_size=facts.min_group_size,
            ratio_level=facts.ratio_level,
            **settings,
        )

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


_DECIDED = {"name", "advantage_scope", *(field.name for field in fields(AlgorithmFacts))}
TUNABLES = tuple(one.name for one in fields(AlgorithmSettings) if one.name not in _DECIDED)
"""The settings that a recipe can override."""


def unused_settings(facts: AlgorithmFacts) -> dict[str, str]:
    """The tunables that an algorithm never reads, each with the reason."""
    reasons = {
        "its loss has no ratio": (
            facts.ratio_level == "none",
            ("eps_clip", "eps_clip_higher", "c_clip", "decoupled"),
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
    return unused | dict(facts.unread)


NEUTRAL: dict[str, object] = {
    "gamma": 1.0,
    "reward_scale": 1.0,
    "overlong_penalty": 0.0,
    "decoupled": False,
    "allow_uncorrected": False,
    "dynamic_filter": False,
}
"""Values that ask for nothing, hence pass also where a setting is not read."""


def unread_overrides(facts: AlgorithmFacts, given: Mapping[str, object]) -> dict[str, str]:
    """Overrides that the algorithm does not read, each with the reason."""
    unused = unused_settings(facts)
    names = [name for name in given if name in unused]
    return {n: unused[n] for n in names if n not in NEUTRAL or given[n] != NEUTRAL[n]}


SWITCHES = {
    "kl_coef": ("kl_estimator", "kl_in"),
    "correction": ("correction_level", "correction_cap", "correction_floor"),
    "overlong_penalty": ("overlong_buffer",),
}
"""Settings that turn a part on, each with the details of that part."""


def idle_details(
    settings: AlgorithmSettings, given: Mapping[str, object]
) -> list[tuple[str, str, object]]:
    """(detail, switch, value of the switch) of overrides of a part that nobody turned on.

    An explicit "off" is a decision and passes.
    """
    return [
        (name, switch, value)
        for switch, details in SWITCHES.items()
        if (value := getattr(settings, switch)) in (0, "none") and switch not in given
        for name in details
        if name in given
    ]


TURN_ON = {
    "kl_coef": "give it, for instance 0.001",
    "correction": "set it to tis or mis",
    "overlong_penalty": "give it, for instance 1.0",
}
Show = Callable[[object], str]
"""How a value is written in a sentence."""


def unread_problems(
    name: str, facts: AlgorithmFacts, given: Mapping[str, object], show: Show = str
) -> Iterator[Problem]:
    for key, why in unread_overrides(facts, given).items():
        rule = f"has no effect with algorithm.name = {name}: {why}"
        yield Problem(f"algorithm.{key} = {show(given[key])}", rule, "leave it out")


def idle_problems(
    settings: AlgorithmSettings, given: Mapping[str, object], show: Show = str
) -> Iterator[Problem]:
    """Details of a part that nobody turned on."""
    for name, switch, _ in idle_details(settings, given):
        rule = f"has no effect while algorithm.{switch} is not set"
        yield Problem(f"algorithm.{name} = {show(given[name])}", rule, TURN_ON[switch])


def correction_problems(
    settings: AlgorithmSettings, given: Mapping[str, object], show: Show = str
) -> Iterator[Problem]:
    """A ratio against the sampler that is not read, or that needs no weight beside it."""
    if settings.correction != "sampler_ratio":
        return
    where = "algorithm.correction = sampler_ratio"
    if settings.ratio_level == "none":
        rule = f"has no effect with algorithm.name = {settings.name}: its loss has no ratio"
        yield Problem(where, rule, "set it to tis or mis")
        return
    rule = f"has no effect with {where}: the clip bounds the ratio"
    for name in [name for name in given if name in SWITCHES["correction"]]:
        yield Problem(f"algorithm.{name} = {show(given[name])}", rule, "set that to tis or mis")


def decoupled_problems(settings: AlgorithmSettings) -> Iterator[Problem]:
    if settings.decoupled and not settings.correction_settings.weighs:
        rule = f"needs the weight that algorithm.correction = {settings.correction} drops"
        remedy = "set algorithm.correction to tis or mis, or leave it out"
        yield Problem("algorithm.decoupled = true", rule, remedy)


def group_problems(name: str, facts: AlgorithmFacts, num_samples: int) -> Iterator[Problem]:
    if num_samples < facts.min_group_size:
        rule = f"{name} compares the samples of a prompt, so every advantage would be 0"
        remedy = f"use at least {facts.min_group_size}, or an algorithm such as reinforce_plus_plus"
        yield Problem(f"gconfig.n_samples = {num_samples}", rule, remedy)


ON_POLICY = {"max_staleness": 0, "updates_per_batch": 1}
"""Above these values of a run the policy that is trained is not the one that sampled."""
