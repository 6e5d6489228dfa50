"""Rules between a run and its models, from their config.json, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from pentad.config.rules.rule import ON_EXAMPLES, RUNS, Rules, RunFacts
from pentad.config.schema import Config
from pentad.config.topology import scorers
from pentad.core.dims import ModelDims
from pentad.core.errors import Problem, UserError
from pentad.core.fit import strict_problems
from pentad.core.folders import read_object
from pentad.core.layout import Layout
from pentad.core.quantization import needs_key
from pentad.models.catalog import dims_of, known_dims, model_type, quantization
from pentad.models.families import (
    is_known,
    is_registered,
    known_families,
    language_config_of,
    no_such_family,
)

RULES = Rules()


@RULES.add(commands=RUNS)
def unknown_families(config: Config, facts: RunFacts) -> list[Problem]:
    """Problems of models without a model file, which only `fsdp` trains.

    None are reported if one of `model_files` could not be loaded: it may define the family.
    """
    allocation = config.parsed_allocation
    is_loaded = all(map(is_registered, config.model_files))
    if allocation is None or not is_loaded:
        return []
    actor = allocation.find("actor")
    if actor is not None and actor.backend == "fsdp":
        return []
    is_rl = facts.command not in ON_EXAMPLES
    has_critic = is_rl and config.algorithm.facts.needs_critic
    paths = [config.actor.path, config.critic.path if has_critic else None]
    found: dict[str, Problem] = {}
    for path in filter(None, paths):
        family = model_type(path)
        if family is not None and not is_known(family):
            found[family] = no_such_family(family, known_families())
    return list(found.values())


def uncounted(config: Config) -> str | None:
    """Why the memory of a plan is unknown; None if it is known, or if the model is rejected."""
    actor = config.part("actor")
    if actor is None or actor.backend != "fsdp" or config.actor.path is None:
        return None
    family = model_type(config.actor.path)
    if family is None or is_known(family):
        return None
    return f"memory unknown for this architecture (model_type = {family}): it is not counted"


@RULES.add(commands=RUNS, depends_on=("actor.path",))
def planned_models_are_known(config: Config, facts: RunFacts) -> list[Problem]:
    """Models whose dimensions are unknown; a run reports a missing folder instead."""
    if not facts.is_plan:
        return []
    problems: list[Problem] = []
    path = config.actor.path
    if path is not None and uncounted(config) is None and not unknown_families(config, facts):
        problems += _unknown("actor.path", path)
    has_critic = config.algorithm.facts.needs_critic
    paths = {"critic.path": config.critic.path if has_critic else None, **frozen_paths(config)}
    for key, path in paths.items():
        if path is not None and path != config.actor.path:
            problems += _unknown(key, path)
    return problems


def _unknown(key: str, path: str) -> list[Problem]:
    try:
        dims_of(path, key)
    except UserError as error:
        return error.as_problems()
    return []


def _sampled_dims(config: Config, facts: RunFacts) -> ModelDims | None:
    """Dimensions of the model that samples; None without one, or if it is unknown."""
    is_sampled = facts.command not in ON_EXAMPLES and config.has_sampler
    is_known = is_sampled and not unknown_families(config, facts)
    return known_dims(config.actor.path) if is_known else None


def _folder_dims(config: Config, facts: RunFacts) -> ModelDims | None:
    """Dimensions from a local folder only: models of one public name differ in context length."""
    path = config.actor.path
    is_folder = path is not None and (Path(path) / "config.json").is_file()
    return _sampled_dims(config, facts) if is_folder else None


@RULES.add(commands=RUNS)
def quantised_weights_are_read_by_a_key(config: Config, facts: RunFacts) -> Iterator[Problem]:
    """Rejects quantised folders whose block does not ask for 16-bit weights."""
    actor, critic = config.actor, config.critic
    blocks = {"actor": actor}
    is_rl = facts.command not in ON_EXAMPLES
    if is_rl and config.algorithm.facts.needs_critic and critic.path != actor.path:
        blocks["critic"] = critic
    read = {f"{r}.path": (r, b.path) for r, b in blocks.items() if not b.has_other_weights}
    read |= {key: ("actor", path) for key, path in frozen_paths(config).items()}
    for key, (role, path) in read.items():
        found = quantization(path) if path else None
        if found is not None and not blocks[role].dequantize:
            yield needs_key(f"{key} = {path}", found, f"{role}.dequantize")


@RULES.add(commands=RUNS)
def servers_load_16_bit_weights(config: Config, facts: RunFacts) -> Iterator[Problem]:
    """Rejects servers that would be started with a quantised folder: what a run publishes is not
    quantised."""
    is_sampled = facts.command not in ON_EXAMPLES and config.has_sampler
    rollout = config.part("rollout") if is_sampled else None
    if rollout is None or rollout.backend == "embedded" or config.rollout.server.addresses:
        return
    path = config.actor.path if config.rollout.weight_dtype == "auto" else None
    if path is not None and quantization(path) is not None:
        where = f"allocation_mode = {config.allocation_mode}"
        rule = f"{rollout.backend} would load the quantised weights of {path}"
        yield Problem(where, rule, "sample with embedded, or give a folder with 16-bit weights")


@RULES.add(commands=RUNS)
def towers_are_trained_natively(config: Config, facts: RunFacts) -> Iterator[Problem]:
    """Rejects features that are not supported for the text tower of a multimodal folder."""
    dims = None if unknown_families(config, facts) else known_dims(config.actor.path)
    if dims is None or not dims.tower_names:
        return
    whole = f"{config.actor.path} is a multimodal folder"
    for part in config.parsed_allocation or ():
        if part.backend in NO_TOWERS:
            where = f"allocation_mode = {config.allocation_mode}"
            yield Problem(where, f"{whole}, and {NO_TOWERS[part.backend]}", "train it with archon")
    rollout = config.part("rollout") if facts.command not in ON_EXAMPLES else None
    if rollout and rollout.backend != "embedded":
        yield from _tower_on_servers(config, rollout.backend, whole)
    if config.actor.init_from_scratch:
        rule = f"{whole}, and its other towers are copied from its files"
        yield Problem("actor.init_from_scratch = true", rule, "leave it out")


def _tower_on_servers(config: Config, backend: str, whole: str) -> Iterator[Problem]:
    """Servers get the tower as a language model, in a folder that the run makes."""
    own = "sample with embedded"
    if config.rollout.server.addresses:
        where = f"rollout.server.addresses = {list(config.rollout.server.addresses)}"
        yield Problem(where, f"{whole}, whose text tower only started servers serve", own)
    if config.actor.lora is not None:
        rule = f"{whole}, and {backend} would start without the frozen weights of its text tower"
        yield Problem("actor.lora", rule, own)
    path = Path(config.actor.path or "")
    try:
        if (path / "config.json").is_file():
            language_config_of(read_object(path / "config.json"))
    except UserError as error:
        where = f"allocation_mode = {config.allocation_mode}"
        yield Problem(
            where, f"{whole}, and {backend} serves its text tower as a language model: {error}", own
        )


@RULES.add(commands=RUNS)
def scalar_heads_are_of_language_models(config: Config, facts: RunFacts) -> Iterator[Problem]:
    """A critic or reward model of a multimodal folder is saved as a language model."""
    lora = None
    if facts.command == "reward-model":
        path = config.actor.path
    elif facts.command not in ON_EXAMPLES and config.algorithm.facts.needs_critic:
        path, lora = config.critic.path or config.actor.path, config.critic.lora
    else:
        return
    dims = None if path is None else known_dims(path)
    if path is None or dims is None or not dims.tower_names:
        return
    part = config.part("critic") or config.part("actor")
    if path != config.actor.path and part is not None and part.backend == "fsdp":
        rule = f"{path} is a multimodal folder, and {NO_TOWERS['fsdp']}"
        where = f"allocation_mode = {config.allocation_mode}"
        yield Problem(where, rule, "train it with archon")
    try:
        language_config_of(read_object(Path(path) / "config.json"))
    except UserError as error:
        yield Problem(f"model folder = {path}", str(error))
    if lora is not None:
        rule = f"{path} is a multimodal folder, and transformers has no class of it with a scalar "
        rule += "head, beside which the factors could be loaded"
        yield Problem("critic.lora", rule, "leave it out, or give a language model")


@RULES.add(commands=RUNS)
def context_fits(config: Config, facts: RunFacts) -> Iterator[Problem]:
    """Checks that the longest possible sequence of a run fits the model's positions."""
    dims = _folder_dims(config, facts)
    if dims is None:
        return
    limit = dims.max_position
    asked = {"gconfig": ("train_dataset", config.train_dataset, config.gconfig.max_new_tokens)}
    if config.valid_dataset is not None and config.evaluator.max_new_tokens is not None:
        answer = config.evaluator.max_new_tokens
        asked["evaluator"] = ("valid_dataset", config.valid_dataset, answer)
    for key, (name, data, answer) in asked.items():
        least = data.max_length or 1  # a prompt has at least one token
        if least + answer > limit:
            given = f" and a prompt of {name}.max_length = {least}" if data.max_length else ""
            rule = f"the answer{given} does not fit the model's {limit} positions"
            where = f"{key}.max_new_tokens = {answer}"
            yield Problem(where, rule, f"use at most {max(limit - least, 1)}")


@RULES.add(commands=RUNS)
def routes_exist(config: Config, facts: RunFacts) -> Iterator[Problem]:
    dims = _folder_dims(config, facts)
    if dims is None:
        return
    if config.rollout.replay_routes and not any(map(dims.is_moe, range(dims.num_layers))):
        rule = f"the model in {config.actor.path} has no mixture of experts"
        yield Problem("rollout.replay_routes = true", rule, "leave it out")


@RULES.add(commands=RUNS)
def strict_layers_exist(config: Config, facts: RunFacts) -> list[Problem]:
    dims = _sampled_dims(config, facts)
    if dims is None or not config.strict:
        return []
    return list(strict_problems(Layout(), "the actor", dims))


@RULES.add(commands=RUNS)
def stop_ids_are_words(config: Config, facts: RunFacts) -> Iterator[Problem]:
    dims = _folder_dims(config, facts)
    return iter(()) if dims is None else stop_id_problems(config, dims)


def stop_id_problems(config: Config, dims: ModelDims) -> Iterator[Problem]:
    ids = config.gconfig.stop_token_ids
    outside = [token for token in ids if token >= dims.vocab_size]
    if outside:
        rule = f"{outside[0]} is outside the model's vocabulary of {dims.vocab_size}"
        yield Problem(f"gconfig.stop_token_ids = {list(ids)}", rule, "leave it out")


@RULES.add(commands=RUNS)
def tags_are_alike(config: Config, facts: RunFacts) -> Iterator[Problem]:
    """Reference and teacher need the actor's architecture, as their weights are loaded into its
    model; on separate devices they need only the same vocabulary."""
    is_dpo = facts.command == "dpo" and not unknown_families(config, facts)
    actor = known_dims(config.actor.path) if is_dpo else _sampled_dims(config, facts)
    if actor is None:
        return
    apart = {f"{role}.path" for role in scorers(config)}
    for key, path in frozen_paths(config).items():
        dims = known_dims(path)
        if dims is None:
            continue
        names = [one.name for one in fields(dims) if one.compare]
        given, wanted = ({n: getattr(one, n) for n in names} for one in (dims, actor))
        asked = [OF_A_SCORER] if key in apart else [n for n in given if n not in OF_THE_ACTOR]
        unlike = [name for name in asked if given[name] != wanted[name]]
        if unlike:
            name = unlike[0]
            rule = f"its {name} is {given[name]} and the actor's {wanted[name]}"
            remedy = "give weights of the same architecture: both are loaded into the actor's model"
            if key in apart:
                remedy = "give a model with the tokenizer of the actor"
            yield Problem(f"{key} = {path}", rule, remedy)


def frozen_paths(config: Config) -> dict[str, str | None]:
    """Key -> folder of the models that score samples."""
    return {f"{role}.path": getattr(config, role).path for role in config.frozen_models}


NO_TOWERS = {"fsdp": "fsdp builds only language models of transformers"}
"""Backends without text towers, and why; Megatron-Core has a rule of its own."""
OF_THE_ACTOR = ("max_position", "initializer_range")
"""Dimensions that may differ between actor and tag: length and initialisation."""
OF_A_SCORER = "vocab_size"
