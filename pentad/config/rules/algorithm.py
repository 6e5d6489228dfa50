"""Rules on sampling and the algorithm: contradicting switches, and settings that are never read."""

from __future__ import annotations

from collections.abc import Iterator

from pentad.config.describe import show, value_at
from pentad.config.rules.rule import Rules, RunFacts
from pentad.config.schema import Config
from pentad.core.errors import Problem
from pentad.core.sizes import MIN_TEMPERATURE
from pentad.rl.facts import unused_settings
from pentad.rl.section import SWITCHES

RULES = Rules()
ON_POLICY = {"max_staleness": 0, "updates_per_batch": 1, "rollout.oversample": 1}
"""Above these values the trained policy differs from the one that sampled."""
NEUTRAL: dict[str, object] = {
    "gamma": 1.0,
    "reward_scale": 1.0,
    "overlong_penalty": 0.0,
    "decoupled": False,
    "allow_uncorrected": False,
    "dynamic_filter": False,
    "prox_logp_method": "recompute",
    "mask_truncated": False,
    "kl_weighted": False,
}
"""Values without effect, which are accepted even if a setting is not read."""
TURN_ON = {
    "kl_coef": "give it, for instance 0.001",
    "correction": "set it to tis or mis",
    "overlong_penalty": "give it, for instance 1.0",
    "rejection": "set it to token, sequence, geometric or binary_kl",
}


@RULES.add()
def a_refreshed_reference_is_used(config: Config) -> Problem | None:
    if config.ref_update_interval is None or config.algorithm.kl_coef:
        return None
    where = f"ref_update_interval = {config.ref_update_interval}"
    coef = show(config.algorithm.given.get("kl_coef"))
    rule = f"the reference model is not used with algorithm.kl_coef = {coef}"
    return Problem(where, rule, "leave it out, or give a coefficient")


@RULES.add()
def details_belong_to_something(config: Config) -> Iterator[Problem]:
    """Reports settings of a feature that is not switched on. An explicit "off" is accepted."""
    algorithm, given = config.algorithm, config.algorithm.given
    for switch, details in SWITCHES.items():
        if getattr(algorithm, switch) not in (0, "none") or switch in given:
            continue
        for name in [name for name in details if name in given]:
            rule = f"has no effect while algorithm.{switch} is not set"
            yield Problem(f"algorithm.{name} = {show(given[name])}", rule, TURN_ON[switch])


@RULES.add()
def a_rejection_has_its_own_bounds(config: Config) -> Iterator[Problem]:
    level, given = config.algorithm.rejection, config.algorithm.given
    others = ("rejection_cap", "rejection_floor") if level == "binary_kl" else ("rejection_kl",)
    for name in [name for name in others if name in given and level != "none"]:
        where = f"algorithm.{name} = {show(given[name])}"
        rule = f"algorithm.rejection = {level} does not read it"
        yield Problem(where, rule, "leave it out, or choose another rejection")


@RULES.add(depends_on=("algorithm",))
def decoupled_ppo_has_a_correction(config: Config) -> Problem | None:
    algorithm = config.algorithm
    if not algorithm.decoupled or algorithm.correction_settings.weighs:
        return None
    rule = f"needs the weight that algorithm.correction = {algorithm.correction} drops"
    remedy = "set algorithm.correction to tis or mis, or leave it out"
    return Problem("algorithm.decoupled = true", rule, remedy)


@RULES.add(depends_on=("algorithm",))
def an_interpolated_policy_is_an_old_one(config: Config) -> Problem | None:
    algorithm, method = config.algorithm, config.algorithm.prox_logp_method
    if method == "recompute" or "prox_logp_method" in unused_settings(algorithm.facts):
        return None
    where, off = f"algorithm.prox_logp_method = {method}", "leave it out"
    if config.only == "train":
        rule = "needs the age of each token, and groups_from has the samples of another run"
        return Problem(where, rule, off)
    if algorithm.correction == "sampler_ratio":
        rule = "algorithm.correction = sampler_ratio clips against the sampler's log-probs"
        return Problem(where, rule, f"{off}, or set algorithm.correction=tis")
    if not algorithm.has_proximal(config.updates_per_batch):
        rule = "updates_per_batch = 1 needs no old log-probs: the current policy is the old one"
        return Problem(where, rule, f"{off}, or set algorithm.decoupled=true")
    if config.max_staleness == 0 and not config.oversamples:
        rule = "interpolates by the age of samples, and max_staleness = 0 makes all of age 0"
        remedy = f"{off}, or set algorithm.correction=sampler_ratio, which needs no forward either"
        return Problem(where, rule, remedy)
    return None


@RULES.add()
def the_ratio_against_the_sampler_is_read(config: Config) -> Iterator[Problem]:
    """With `sampler_ratio`, requires a loss that uses the ratio, and no second weight."""
    algorithm, given = config.algorithm, config.algorithm.given
    where = "algorithm.correction = sampler_ratio"
    if algorithm.correction != "sampler_ratio":
        return
    if algorithm.facts.ratio_level == "none":
        rule = f"has no effect with algorithm.name = {algorithm.name}: its loss has no ratio"
        yield Problem(where, rule, "set it to tis or mis")
        return
    rule = f"has no effect with {where}: the clip bounds the ratio"
    for name in [name for name in given if name in SWITCHES["correction"]]:
        yield Problem(f"algorithm.{name} = {show(given[name])}", rule, "set that to tis or mis")


@RULES.add(depends_on=("algorithm",))
def a_weighted_kl_term_is_unbiased(config: Config) -> Problem | None:
    algorithm = config.algorithm
    if not algorithm.kl_weighted or not algorithm.kl_coef:
        return None
    if (algorithm.kl_estimator, algorithm.kl_in) == ("k3", "loss"):
        return None
    found = f"kl_estimator = {algorithm.kl_estimator} and kl_in = {algorithm.kl_in}"
    rule = f"only k3 in the loss is unbiased when it is weighted, and algorithm.{found}"
    return Problem("algorithm.kl_weighted = true", rule, "use k3 and loss, or leave it out")


@RULES.add()
def a_penalty_on_moving_needs_several_updates(config: Config) -> Problem | None:
    if config.algorithm.name != "kl_cov" or config.updates_per_batch > 1:
        return None
    rule = "penalises changes by earlier updates of a batch, and updates_per_batch = 1 has none"
    return Problem("algorithm.name = kl_cov", rule, "use at least 2, or clip_cov")


@RULES.add()
def covariances_have_a_range(config: Config) -> Problem | None:
    algorithm = config.algorithm
    if algorithm.name != "clip_cov" or algorithm.cov_low < algorithm.cov_high:
        return None
    where = f"algorithm.cov_low = {algorithm.cov_low:g}"
    return Problem(
        where, f"must be below algorithm.cov_high = {algorithm.cov_high:g}", "use 1 and 5"
    )


@RULES.add()
def off_policy_data_are_corrected(config: Config) -> Problem | None:
    algorithm, asked = config.algorithm, off_policy(config)
    if not asked or algorithm.correction != "none" or algorithm.allow_uncorrected:
        return None
    rule = f"{asked} trains a policy that is not the one that sampled"
    remedy = "leave it out for the default, or set algorithm.allow_uncorrected=true"
    return Problem("algorithm.correction = none", rule, remedy)


def off_policy(config: Config) -> str:
    """Settings by which the trained policy differs from the sampling one; empty: none."""
    values = {key: value_at(config, key) for key in ON_POLICY}
    found = [f"{key} = {n:g}" for key, n in values.items() if n > ON_POLICY[key]]
    return " and ".join([*found, *(["only = train"] if config.only == "train" else [])])


@RULES.add(depends_on=("algorithm.name",))
def every_override_is_read(config: Config) -> Iterator[Problem]:
    name, given = config.algorithm.name, config.algorithm.given
    unused = unused_settings(config.algorithm.facts)
    for key in [key for key in given if key in unused]:
        if key not in NEUTRAL or given[key] != NEUTRAL[key]:
            rule = f"has no effect with algorithm.name = {name}: {unused[key]}"
            yield Problem(f"algorithm.{key} = {show(given[key])}", rule, "leave it out")


@RULES.add()
def rewards_are_not_wiped_out(config: Config) -> Problem | None:
    if config.algorithm.reward_scale != 0:
        return None
    return Problem("algorithm.reward_scale = 0", "would make all rewards equal", "use 1")


@RULES.add()
def the_overlong_buffer_fits(config: Config) -> Problem | None:
    buffer, longest = config.algorithm.overlong_buffer, sample_limit(config)
    if buffer is None or buffer <= longest:
        return None
    where = f"algorithm.overlong_buffer = {buffer}"
    given = config.gconfig.max_sampled_tokens
    key = "max_sampled_tokens" if longest == given else "max_new_tokens"
    rule = f"must be at most gconfig.{key} = {longest}"
    return Problem(where, rule, "a fifth of it is usual")


@RULES.add(depends_on=("algorithm", "gconfig.max_sampled_tokens", "rollout"))
def the_length_that_counts_is_bounded(config: Config) -> Problem | None:
    """Rejects a limit per turn only: lengths would be compared with the wrong limit."""
    algorithm, rollout = config.algorithm, config.rollout
    if rollout.is_single_turn or config.gconfig.max_sampled_tokens is not None:
        return None
    penalty = algorithm.overlong_penalty
    if algorithm.loss_norm != "constant" and not penalty:
        return None
    reader = "the overlong penalty" if penalty else "algorithm.loss_norm = constant"
    rule = f"{reader} of algorithm.name = {algorithm.name} measures samples against it"
    remedy = "give the largest number of tokens of a sample, over all turns"
    workflow = next(spec for spec in rollout.specs if spec != "single_turn")
    where = f"gconfig.max_sampled_tokens = null with rollout.workflow = {workflow}"
    return Problem(where, rule, remedy)


def sample_limit(config: Config) -> int:
    """Maximum number of sampled tokens per sample; if several turns have no limit, that of one
    turn."""
    given, turn = config.gconfig.max_sampled_tokens, config.gconfig.max_new_tokens
    if given is None or config.rollout.is_single_turn:
        return min(turn, given or turn)
    return given


def longest_sample(config: Config, prompt_tokens: int, max_position: int) -> int:
    """Maximum number of tokens of a sample. With several turns the text of environments is added:
    it is bounded by the model's context only, and not counted if `max_sampled_tokens` is given."""
    is_open = config.gconfig.max_sampled_tokens is None
    if is_open and not config.rollout.is_single_turn:
        return max_position
    return min(prompt_tokens + sample_limit(config), max_position)


@RULES.add()
def training_samples_at_random(config: Config) -> Problem | None:
    given = config.gconfig.temperature
    if given >= MIN_TEMPERATURE:
        return None
    if given > 0:
        rule = f"below {MIN_TEMPERATURE} logits leave the range of fp32"
        return Problem(f"gconfig.temperature = {given:g}", rule, "use 1.0")
    rule = "training needs samples that differ, and at 0 all of them are the most likely one"
    return Problem("gconfig.temperature = 0", rule, "use 1.0; evaluator.temperature may be 0")


@RULES.add()
def training_draws_from_the_whole_distribution(config: Config) -> Problem | None:
    if config.gconfig.top_p == 1:
        return None
    rule = "must be 1 for training: the trainer's log-probs are those of the whole distribution"
    return Problem(f"gconfig.top_p = {config.gconfig.top_p}", rule, "leave it out")


@RULES.add()
def training_draws_from_all_tokens(config: Config) -> Problem | None:
    if config.gconfig.top_k == 0:
        return None
    rule = "must be 0 for training: the trainer's log-probs are those of the whole distribution"
    return Problem(f"gconfig.top_k = {config.gconfig.top_k}", rule, "leave it out")


@RULES.add(commands=("train", "plan", "eval"))
def stop_texts_are_not_empty(config: Config) -> Problem | None:
    if "" not in config.gconfig.stop:
        return None
    where = f"gconfig.stop = {list(config.gconfig.stop)}"
    return Problem(where, "every text contains the empty text", "leave it out")


@RULES.add()
def groups_have_something_to_compare(config: Config) -> Problem | None:
    name, least = config.algorithm.name, config.algorithm.facts.min_group_size
    if config.gconfig.n_samples >= least:
        return None
    rule = f"{name} compares the samples of a prompt, so every advantage would be 0"
    remedy = f"use at least {least}, or an algorithm such as reinforce_plus_plus"
    return Problem(f"gconfig.n_samples = {config.gconfig.n_samples}", rule, remedy)


@RULES.add()
def chunks_are_not_empty(config: Config) -> Problem | None:
    chunks, prompts = config.num_iters_per_train_update, config.train_dataset.batch_size
    if chunks <= prompts:
        return None
    rule = f"train_dataset.batch_size = {prompts} prompts cannot be split into {chunks} chunks"
    return Problem(f"num_iters_per_train_update = {chunks}", rule, f"use at most {prompts}")


@RULES.add()
def updates_are_of_equal_size(config: Config) -> Problem | None:
    updates = config.updates_per_batch
    samples = config.train_dataset.batch_size * config.gconfig.n_samples
    if samples % updates == 0:
        return None
    rule = f"must divide train_dataset.batch_size * gconfig.n_samples = {samples}"
    below = max(n for n in range(1, min(updates, samples) + 1) if samples % n == 0)
    return Problem(f"updates_per_batch = {updates}", rule, f"use for instance {below}")


@RULES.add()
def someone_computes_advantages(config: Config) -> Problem | None:
    if config.compute_advantages_and_returns or "single_turn" not in config.rollout.specs:
        return None
    where = "compute_advantages_and_returns = false"
    rule = "rollout.workflow = single_turn delivers no advantages"
    return Problem(where, rule, "set it to true, or give a workflow of your own")


@RULES.add()
def every_running_sequence_gets_its_token(config: Config) -> Problem | None:
    tokens, running = config.rollout.max_batch_tokens, config.num_running
    if tokens is None or tokens >= running:
        return None
    rule = f"each of rollout.max_running = {running} sequences needs one token a step"
    remedy = f"give at least {running}, or lower max_running"
    return Problem(f"rollout.max_batch_tokens = {tokens}", rule, remedy)


@RULES.add(commands=("sft",))
def kto_compares_answers(config: Config) -> Problem | None:
    is_kto = config.preference is not None and config.preference.loss == "kto"
    if not is_kto or config.train_dataset.batch_size > 1:
        return None
    rule = "preference.loss = kto compares each answer with others of its batch"
    return Problem("train_dataset.batch_size = 1", rule, "give 2 or more")


@RULES.add(commands=("sft",))
def a_reward_has_its_own_command(config: Config, facts: RunFacts) -> Iterator[Problem]:
    if facts.command == "dpo" and config.trains_reward:
        rule = "trains a reward model, and dpo trains a policy"
        yield Problem("preference.loss = reward", rule, "use pentad reward-model")
    if config.trains_reward and config.actor.lora is not None:
        rule = "adapters of reward models are not supported"
        yield Problem("actor.lora", rule, "leave it out: a reward model trains all its weights")
