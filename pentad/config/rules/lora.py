"""The rules of `actor.lora`: what an adapter goes with, and what is not built."""

from __future__ import annotations

from collections.abc import Iterator

from pentad.config.rules.rule import RUNS, Rules, RunFacts
from pentad.config.schema import Config
from pentad.config.topology import scorers
from pentad.core.errors import Problem
from pentad.core.fit import splits_backward
from pentad.models.catalog import known_dims
from pentad.models.families import is_known, spec_of
from pentad.weights.lora_map import fused_words, target_problems, target_words

RULES = Rules()


@RULES.add(commands=RUNS)
def targets_exist(config: Config) -> list[Problem]:
    """Each word of the targets names matrices of the model."""
    lora, dims = config.actor.lora, known_dims(config.actor.path)
    if lora is None or dims is None or not is_known(dims.family):
        return []
    rules = spec_of(dims.family).rules
    words, fused = target_words(rules, dims), fused_words(rules, dims)
    return target_problems(lora, words, dims.family, fused)


@RULES.add(commands=RUNS)
def frozen_weights_come_from_a_folder(config: Config) -> Iterator[Problem]:
    """A checkpoint holds the factors and the path of the rest."""
    actor = config.actor
    if actor.lora is None:
        return
    remedy = "give the weights in actor.path, or leave actor.lora out"
    if actor.init_from_scratch:
        rule = "actor.lora would freeze random weights"
        yield Problem("actor.init_from_scratch = true", rule, remedy)
    if actor.checkpoint_load_path is not None:
        where = f"actor.checkpoint_load_path = {actor.checkpoint_load_path}"
        yield Problem(where, "actor.lora stands on a Hugging Face folder", remedy)


@RULES.add(commands=RUNS)
def only_factors_are_trained(config: Config) -> Iterator[Problem]:
    actor = config.actor
    if actor.lora is None:
        return
    if actor.param_dtype != "float32":
        rule = "factors and their optimizer state are float32 under actor.lora"
        yield Problem(f"actor.param_dtype = {actor.param_dtype}", rule, "leave it out")
    if actor.archon.offload_params:
        rule = "frozen weights have no gradients and no optimizer state to offload"
        yield Problem("actor.archon.offload_params = true", rule, "leave it out with actor.lora")
    for key in ("moe_bias_rate", *actor.archon.router_losses):
        if value := getattr(actor.archon, key):
            where = f"actor.archon.{key} = {value:g}"
            yield Problem(where, "routers are frozen under actor.lora", "leave it out")


@RULES.add(commands=RUNS)
def adapters_of_the_actor_alone(config: Config) -> Iterator[Problem]:
    if config.critic.lora is not None and config.algorithm.facts.needs_critic:
        rule = "a critic with an adapter is not built"
        yield Problem("critic.lora", rule, "leave it out: the critic trains all its weights")


@RULES.add(commands=RUNS)
def layouts_of_adapters(config: Config) -> Iterator[Problem]:
    actor = config.part("actor")
    if config.actor.lora is None or actor is None:
        return
    where = f"allocation_mode = {config.allocation_mode}"
    if actor.backend == "fsdp":
        rule = f"actor.lora is built for archon, and {actor} trains models of transformers"
        yield Problem(where, rule, "use archon, or leave actor.lora out")
    schedule = config.actor.archon.pp_schedule
    if actor.size("p") > 1 and splits_backward(schedule):
        rule = "it splits the backward pass by parameters, which are frozen under actor.lora"
        yield Problem(f"actor.archon.pp_schedule = {schedule}", rule, "use Interleaved1F1B or 1F1B")


@RULES.add()
def samplers_of_adapters(config: Config, facts: RunFacts) -> Iterator[Problem]:
    rollout = config.part("rollout")
    if config.actor.lora is None or rollout is None or not facts.samples(config):
        return
    if rollout.backend == "sglang":
        rule = "SGLang does not say which factors it holds, so what it draws from is not known"
        remedy = "sample with embedded or vllm, or leave actor.lora out"
        yield Problem(f"allocation_mode = {config.allocation_mode}", rule, remedy)
    if config.only is not None:
        rule = "a run of one side alone is not built with actor.lora"
        yield Problem(f"only = {config.only}", rule, "leave one of the two out")


@RULES.add()
def frozen_models_beside_adapters(config: Config) -> Iterator[Problem]:
    """A learner holds one set of frozen weights."""
    if config.actor.lora is None:
        return
    apart, remedy = scorers(config), "give it its own devices (mode: async)"
    for role, path in (("ref", config.ref.path), ("teacher", config.teacher.path)):
        if path is not None and path != config.actor.path and role not in apart:
            rule = f"a learner with actor.lora holds the frozen weights of {config.actor.path} only"
            yield Problem(f"{role}.path = {path}", rule, remedy)
    if config.actor.lora.init_path is not None and "ref" in apart and config.ref.path is None:
        rule = "the reference on its own devices would be without the adapter it starts from"
        yield Problem(f"mode = {config.mode}", rule, "use hybrid or colocate")
