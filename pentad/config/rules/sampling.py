"""Rules on how answers are sampled and how a batch of them is cut."""

from __future__ import annotations

from pentad.config.derived import num_running
from pentad.config.rules.rule import Rules
from pentad.config.schema import Config
from pentad.core.algorithms import group_problems
from pentad.core.errors import Problem
from pentad.core.sizes import MIN_TEMPERATURE

RULES: Rules[[Config]] = Rules()


@RULES.add("gconfig.temperature")
def training_samples_at_random(config: Config) -> Problem | None:
    given = config.gconfig.temperature
    if given >= MIN_TEMPERATURE:
        return None
    if given > 0:
        rule = f"below {MIN_TEMPERATURE} logits leave the range of fp32"
        return Problem(f"gconfig.temperature = {given:g}", rule, "use 1.0")
    rule = "training needs samples that differ, and at 0 they are all the likeliest one"
    return Problem("gconfig.temperature = 0", rule, "use 1.0; evaluator.temperature may be 0")


@RULES.add("gconfig.top_p")
def training_draws_from_the_whole_distribution(config: Config) -> Problem | None:
    if config.gconfig.top_p == 1:
        return None
    rule = "must be 1 for training: the trainer's log-probs are those of the whole distribution"
    return Problem(f"gconfig.top_p = {config.gconfig.top_p}", rule, "leave it out")


@RULES.add("gconfig.top_k")
def training_draws_from_all_tokens(config: Config) -> Problem | None:
    if config.gconfig.top_k == 0:
        return None
    rule = "must be 0 for training: the trainer's log-probs are those of the whole distribution"
    return Problem(f"gconfig.top_k = {config.gconfig.top_k}", rule, "leave it out")


@RULES.add("gconfig.stop", commands=("train", "plan", "eval"))
def stop_texts_are_not_empty(config: Config) -> Problem | None:
    if "" not in config.gconfig.stop:
        return None
    where = f"gconfig.stop = {list(config.gconfig.stop)}"
    return Problem(where, "every text holds the empty one", "leave it out")


@RULES.add("gconfig.n_samples", "algorithm.name")
def groups_have_something_to_compare(config: Config) -> list[Problem]:
    algorithm = config.algorithm
    return list(group_problems(algorithm.name, algorithm.facts, config.gconfig.n_samples))


@RULES.add("num_iters_per_train_update", "train_dataset.batch_size")
def chunks_are_not_empty(config: Config) -> Problem | None:
    chunks, prompts = config.num_iters_per_train_update, config.train_dataset.batch_size
    if chunks <= prompts:
        return None
    rule = f"a batch of train_dataset.batch_size = {prompts} prompts has no {chunks} chunks"
    return Problem(f"num_iters_per_train_update = {chunks}", rule, f"use at most {prompts}")


@RULES.add("updates_per_batch", "train_dataset.batch_size", "gconfig.n_samples")
def updates_are_of_equal_size(config: Config) -> Problem | None:
    updates = config.updates_per_batch
    samples = config.train_dataset.batch_size * config.gconfig.n_samples
    if samples % updates == 0:
        return None
    rule = f"must divide train_dataset.batch_size * gconfig.n_samples = {samples}"
    below = max(n for n in range(1, min(updates, samples) + 1) if samples % n == 0)
    return Problem(f"updates_per_batch = {updates}", rule, f"use for instance {below}")


@RULES.add("compute_advantages_and_returns", "rollout.workflow")
def someone_computes_advantages(config: Config) -> Problem | None:
    if config.compute_advantages_and_returns or config.rollout.workflow != "single_turn":
        return None
    where = "compute_advantages_and_returns = false"
    rule = "rollout.workflow = single_turn delivers no advantages"
    return Problem(where, rule, "set it to true, or give a workflow of your own")


@RULES.add("rollout.max_batch_tokens", "rollout.max_running")
def every_running_sequence_gets_its_token(config: Config) -> Problem | None:
    tokens, running = config.rollout.max_batch_tokens, num_running(config)
    if tokens >= running:
        return None
    rule = f"each of rollout.max_running = {running} sequences needs one token a step"
    remedy = f"give at least {running}, or lower max_running"
    return Problem(f"rollout.max_batch_tokens = {tokens}", rule, remedy)
