"""Rules between the keys of an algorithm: switches that contradict, details that nobody reads.

What `pentad.rl.overrides` refuses as well is a function of `pentad.core.algorithms`.
"""

from __future__ import annotations

from pentad.config.describe import show
from pentad.config.rules.rule import Rules
from pentad.config.schema import Config
from pentad.core.algorithms import (
    ON_POLICY,
    correction_problems,
    decoupled_problems,
    idle_problems,
    unread_problems,
)
from pentad.core.errors import Problem

RULES: Rules[[Config]] = Rules()


@RULES.add("use_kl_loss", "algorithm.kl_coef", "algorithm.kl_in", "algorithm.name")
def the_kl_switch_agrees(config: Config) -> Problem | None:
    coef, place = config.algorithm.kl_coef, config.algorithm.kl_in
    where = f"use_kl_loss = {show(config.use_kl_loss)}"
    if config.use_kl_loss and coef == 0:
        return Problem(where, "algorithm.kl_coef = 0 switches it off", "leave one of the two out")
    if config.use_kl_loss and place == "reward":
        rule = "algorithm.kl_in = reward takes the KL term out of the loss"
        return Problem(where, rule, "leave one of the two out")
    if config.use_kl_loss is False and coef and place != "reward":
        rule = f"algorithm.kl_coef = {coef:g} asks for a KL term"
        return Problem(where, rule, "set algorithm.kl_coef=0, or algorithm.kl_in=reward")
    return None


@RULES.add("ref_update_interval", "algorithm.kl_coef", "use_kl_loss")
def a_refreshed_reference_is_used(config: Config) -> Problem | None:
    if config.ref_update_interval is None or config.algorithm.kl_coef:
        return None
    where = f"ref_update_interval = {config.ref_update_interval}"
    coef = show(config.algorithm.kl_coef)
    rule = f"nothing reads the reference model with algorithm.kl_coef = {coef}"
    return Problem(where, rule, "leave it out, or give a coefficient")


@RULES.add("use_tis", "algorithm.correction")
def the_tis_switch_agrees(config: Config) -> Problem | None:
    correction = config.algorithm.correction
    if config.use_tis is None or correction is None or config.use_tis == (correction == "tis"):
        return None
    where = f"use_tis = {show(config.use_tis)}"
    rule = f"algorithm.correction = {correction} says otherwise"
    return Problem(where, rule, "leave one of the two out")


@RULES.add("algorithm", "use_kl_loss", "use_tis")
def details_belong_to_something(config: Config) -> list[Problem]:
    """Details of a part that nobody turned on. An explicit "off" is a decision and passes."""
    algorithm = config.algorithm
    return list(idle_problems(algorithm.settings, algorithm.given, show))


@RULES.add("algorithm.decoupled", "algorithm.correction", "use_tis")
def decoupled_ppo_has_a_correction(config: Config) -> list[Problem]:
    return list(decoupled_problems(config.algorithm.settings))


@RULES.add("algorithm", "use_tis")
def the_ratio_against_the_sampler_is_read(config: Config) -> list[Problem]:
    return list(correction_problems(config.algorithm.settings, config.algorithm.given, show))


@RULES.add("algorithm.correction", "use_tis", "max_staleness", "updates_per_batch")
def off_policy_data_are_corrected(config: Config) -> Problem | None:
    algorithm = config.algorithm
    asked = off_policy(config)
    if not asked or algorithm.correction != "none" or algorithm.allow_uncorrected:
        return None
    where = "use_tis = false" if config.use_tis is False else "algorithm.correction = none"
    rule = f"{asked} trains a policy that is not the one that sampled"
    remedy = "leave it out for the default, or set algorithm.allow_uncorrected=true"
    return Problem(where, rule, remedy)


def off_policy(config: Config) -> str:
    """The keys by which the policy that is trained leaves the one that sampled; empty: none."""
    values = {key: value for key, value in config if key in ON_POLICY}
    found = [f"{key} = {n}" for key, n in values.items() if n > ON_POLICY[key]]
    return " and ".join([*found, *(["only = train"] if config.only == "train" else [])])


@RULES.add("algorithm.name", "algorithm", is_by_key=True)
def every_override_is_read(config: Config) -> list[Problem]:
    algorithm = config.algorithm
    return list(unread_problems(algorithm.name, algorithm.facts, algorithm.given, show))


@RULES.add("algorithm.reward_scale")
def rewards_are_not_wiped_out(config: Config) -> Problem | None:
    if config.algorithm.reward_scale != 0:
        return None
    return Problem("algorithm.reward_scale = 0", "would make all rewards equal", "use 1")


@RULES.add("algorithm.overlong_buffer", "gconfig.max_new_tokens", "gconfig.max_sampled_tokens")
def the_overlong_buffer_fits(config: Config) -> Problem | None:
    buffer, longest = config.algorithm.overlong_buffer, sample_limit(config)
    if buffer is None or buffer <= longest:
        return None
    where = f"algorithm.overlong_buffer = {buffer}"
    given = config.gconfig.max_sampled_tokens
    key = "max_sampled_tokens" if longest == given else "max_new_tokens"
    rule = f"must be at most gconfig.{key} = {longest}"
    return Problem(where, rule, "a fifth of it is usual")


@RULES.add("algorithm", "gconfig.max_sampled_tokens", "rollout.workflow")
def the_length_that_counts_is_bounded(config: Config) -> Problem | None:
    """A turn's limit is none of the sample: lengths would be measured against the wrong one."""
    algorithm, workflow = config.algorithm, config.rollout.workflow
    if workflow == "single_turn" or config.gconfig.max_sampled_tokens is not None:
        return None
    penalty = algorithm.settings.overlong_penalty
    if algorithm.settings.loss_norm != "constant" and not penalty:
        return None
    reader = "the overlong penalty" if penalty else "algorithm.loss_norm = constant"
    rule = f"{reader} of algorithm.name = {algorithm.name} measures samples against it"
    remedy = "give the most tokens of a sample, all turns together"
    where = f"gconfig.max_sampled_tokens = null with rollout.workflow = {workflow}"
    return Problem(where, rule, remedy)


def sample_limit(config: Config) -> int:
    """Most tokens sampled in one sample; where nothing limits several turns, those of one."""
    given, turn = config.gconfig.max_sampled_tokens, config.gconfig.max_new_tokens
    if given is None or config.rollout.workflow == "single_turn":
        return min(turn, given or turn)
    return given


def longest_sample(config: Config, prompt_tokens: int, max_position: int) -> int:
    """Most tokens of a sample. With several turns what environments say comes on top: it is
    bounded by the model's context alone, and not counted where `max_sampled_tokens` is given."""
    is_open = config.gconfig.max_sampled_tokens is None
    if is_open and config.rollout.workflow != "single_turn":
        return max_position
    return min(prompt_tokens + sample_limit(config), max_position)
