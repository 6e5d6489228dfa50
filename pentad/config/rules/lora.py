"""Rules of `actor.lora`: supported combinations, and those that are not implemented."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pentad.config.rules.rule import RUNS, Rules, RunFacts
from pentad.config.schema import SCORERS, Config
from pentad.config.topology import scorers
from pentad.core.errors import Problem
from pentad.core.fit import splits_backward
from pentad.core.folders import ADAPTER_CONFIG
from pentad.engine.section import LoraConfig, ModelConfig
from pentad.models.catalog import known_dims
from pentad.models.families import is_known, spec_of
from pentad.weights.lora_map import OF_FSDP, fused_words, target_problems, target_words

RULES = Rules(lambda config: config.actor.lora or config.critic.lora)


def adapted(config: Config) -> Iterator[tuple[str, ModelConfig, LoraConfig]]:
    """Yields the roles that train an adapter."""
    for role, model in config.trained_models.items():
        if model.lora is not None:
            yield role, model, model.lora


@RULES.add(commands=RUNS)
def targets_exist(config: Config, facts: RunFacts) -> Iterator[Problem]:
    """Each target must name matrices of the model. Models of the fsdp backend may name them
    differently: those that no sampler here runs are checked at the start, when they are loaded."""
    for role, model, lora in adapted(config):
        dims = known_dims(model.path or config.actor.path)
        if dims is None or not is_known(dims.family):
            continue
        rules, part = spec_of(dims.family).rules, config.part(role) or config.part("actor")
        words, fused, owner = target_words(rules, dims), fused_words(rules, dims), dims.family
        if part is not None and part.backend == "fsdp":
            if fused and (role == "critic" or not facts.samples(config)):
                continue
            fused += [word for word in words if word == "experts"]
            words = [word for word in words if word != "experts"]
            owner += OF_FSDP
        yield from target_problems(lora, words, owner, fused, role)


@RULES.add(commands=RUNS)
def frozen_weights_come_from_a_folder(config: Config) -> Iterator[Problem]:
    """Requires a folder of frozen weights, since checkpoints have only its path."""
    for role, model, _ in adapted(config):
        remedy = f"give the weights in {role}.path, or leave {role}.lora out"
        if model.init_from_scratch:
            rule = f"{role}.lora would freeze random weights"
            yield Problem(f"{role}.init_from_scratch = true", rule, remedy)
        if model.checkpoint_load_path is not None:
            where = f"{role}.checkpoint_load_path = {model.checkpoint_load_path}"
            yield Problem(where, f"{role}.lora needs a Hugging Face folder", remedy)


@RULES.add(commands=RUNS)
def the_adapter_to_start_from_is_there(config: Config) -> Problem | None:
    start = config.actor.lora.init_path if config.actor.lora is not None else None
    if start is None or (Path(start).expanduser() / ADAPTER_CONFIG).is_file():
        return None
    is_folder = Path(start).expanduser().is_dir()
    rule = f"no {ADAPTER_CONFIG} there" if is_folder else "there is no such folder"
    remedy = "give a folder that peft, or a run with actor.lora, has saved"
    return Problem(f"actor.lora.init_path = {start}", rule, remedy)


@RULES.add(commands=RUNS)
def only_factors_are_trained(config: Config) -> Iterator[Problem]:
    for role, model, _ in adapted(config):
        if model.param_dtype != "float32":
            rule = f"factors and their optimizer state are float32 under {role}.lora"
            yield Problem(f"{role}.param_dtype = {model.param_dtype}", rule, "leave it out")
        if model.archon.offload_params:
            rule = "frozen weights have no gradients and no optimizer state to offload"
            where, remedy = f"{role}.archon.offload_params = true", f"leave it out with {role}.lora"
            yield Problem(where, rule, remedy)
        for key in ("moe_bias_rate", *model.archon.router_losses):
            if value := getattr(model.archon, key):
                where = f"{role}.archon.{key} = {value:g}"
                yield Problem(where, f"routers are frozen under {role}.lora", "leave it out")


@RULES.add()
def adapters_of_critics(config: Config) -> Iterator[Problem]:
    for role, model, lora in adapted(config):
        if role != "critic":
            continue
        if lora.init_path is not None:
            where = f"critic.lora.init_path = {lora.init_path}"
            yield Problem(where, "a critic's factors cannot start from a folder", "leave it out")
        actor = config.actor
        is_actors = model.path in (None, actor.path) and not model.init_from_scratch
        if is_actors and actor.has_other_weights:
            rule = "the critic begins with the actor's weights, which are not in a folder to freeze"
            yield Problem("critic.lora", rule, "leave it out, or give critic.path")


@RULES.add(commands=RUNS)
def layouts_of_adapters(config: Config) -> Iterator[Problem]:
    for role, model, _ in adapted(config):
        part = config.part(role) or config.part("actor")
        if part is None:
            continue
        schedule = model.archon.pp_schedule
        if part.size("p") > 1 and splits_backward(schedule):
            rule = f"it splits the backward pass by parameters, which are frozen under {role}.lora"
            remedy = "use Interleaved1F1B or 1F1B"
            yield Problem(f"{role}.archon.pp_schedule = {schedule}", rule, remedy)


@RULES.add()
def samplers_of_adapters(config: Config, facts: RunFacts) -> Iterator[Problem]:
    rollout = config.part("rollout")
    if config.actor.lora is None or rollout is None or not facts.samples(config):
        return
    if rollout.backend == "sglang" and rollout.size("t") * rollout.size("p") > 1:
        rule = "an SGLang on several GPUs holds shards, which cannot be verified under actor.lora"
        remedy = "give it one GPU (t1p1), or sample with vllm"
        yield Problem(f"allocation_mode = {config.allocation_mode}", rule, remedy)
    if config.only is not None:
        rule = "is not supported with actor.lora"
        yield Problem(f"only = {config.only}", rule, "leave one of the two out")


@RULES.add()
def frozen_models_beside_adapters(config: Config) -> Iterator[Problem]:
    """Rejects frozen models other than the adapter's base."""
    if config.actor.lora is None:
        return
    apart, remedy = scorers(config), "give it its own devices (mode: async)"
    for role in SCORERS:
        path = getattr(config, role).path
        if path is not None and path != config.actor.path and role not in apart:
            rule = f"a learner with actor.lora holds the frozen weights of {config.actor.path} only"
            yield Problem(f"{role}.path = {path}", rule, remedy)
    if config.actor.lora.init_path is not None and "ref" in apart and config.ref.path is None:
        rule = "the reference on its own devices would be without the adapter it starts from"
        yield Problem(f"mode = {config.mode}", rule, "use hybrid or colocate")
