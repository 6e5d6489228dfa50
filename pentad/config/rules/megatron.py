"""The rules of training on Megatron-Core: supported keys, and its package."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

from pentad.config.rules.layout import Placed, placed_components
from pentad.config.rules.model import unknown_families
from pentad.config.rules.rule import RUNS, Rules, RunFacts
from pentad.config.schema import Config
from pentad.core.errors import Problem
from pentad.core.layout import Component
from pentad.core.machine import installed
from pentad.engine.section import TRANSFORMER_ENGINES
from pentad.models.catalog import known_dims
from pentad.weights.megatron.model_args import unsayable


def megatron_components(config: Config) -> list[Component]:
    """The components that train on Megatron-Core."""
    return [part for part in config.parsed_allocation or () if part.backend == "megatron"]


RULES = Rules(megatron_components)
VERSIONS = ("0.16",)
"""The supported releases of megatron-core."""
SCHEDULES = ("1F1B", "Interleaved1F1B")
"""The pipeline schedules of megatron-core."""
ON_CPU = "PENTAD_MEGATRON_ON_CPU"
"""Environment variable, set if megatron-core's CUDA calls are replaced, as in its tests."""
REMEDY = "leave it out, or use archon"


def megatron_parts(config: Config, facts: RunFacts) -> list[Placed]:
    """The components that train on Megatron-Core, with their models."""
    dims = None if unknown_families(config, facts) else known_dims(config.actor.path)
    parts = placed_components(config, config.allocation, dims)
    return [part for part in parts if part.component.backend == "megatron"]


@RULES.add(commands=("train", "sft"), is_noted=True)
def megatron_is_installed(config: Config) -> Iterator[Problem]:
    where, version = f"allocation_mode = {config.allocation_mode}", installed("megatron-core")
    if version is None:
        rule = "needs the package megatron-core, which is not installed"
        yield Problem(where, rule, "pip install 'pentad[megatron]', or use archon")
    elif not is_known(version):
        rule = f"is written for megatron-core {', '.join(VERSIONS)}, and {version} is installed"
        yield Problem(where, rule, "pip install 'pentad[megatron]', or use archon")


@RULES.add(commands=("train", "sft"), is_noted=True)
def transformer_engine_is_installed(config: Config) -> Iterator[Problem]:
    """With `auto`, an absent package is no problem, and one of another version is."""
    wanted, version = config.megatron.transformer_impl, installed("transformer-engine")
    if wanted == "local":
        return
    where = f"megatron.transformer_impl = {wanted}"
    if version is None and wanted == "transformer_engine":
        rule = "needs the package transformer-engine, which is not installed"
        remedy = "pip install --no-build-isolation 'pentad[transformer-engine]', or set it to local"
        yield Problem(where, rule, remedy)
    elif version is not None and not is_known(version, TRANSFORMER_ENGINES):
        rule = (
            f"megatron-core {', '.join(VERSIONS)} takes Transformer Engine "
            f"{', '.join(TRANSFORMER_ENGINES)}, and {version} is installed"
        )
        yield Problem(where, rule, "install one of these, or set it to local")


@RULES.add(commands=("train", "sft"), stage="start")
def transformer_engine_needs_a_gpu(config: Config, facts: RunFacts) -> Iterator[Problem]:
    wanted = config.megatron.transformer_impl
    if wanted == "transformer_engine" and facts.kind == "cpu":
        where = f"megatron.transformer_impl = {wanted}"
        yield Problem(
            where, "its layers need CUDA, and this run computes on cpu", "set it to local"
        )


def is_known(version: str, releases: tuple[str, ...] = VERSIONS) -> bool:
    """Whether a version belongs to a supported release, as 0.16.1, 0.16rc0 and 0.16.0+local do."""
    return any(re.match(rf"{re.escape(known)}(?!\d)", version) for known in releases)


@RULES.add(commands=("train", "sft"), stage="start")
def megatron_needs_a_gpu(config: Config, facts: RunFacts) -> Iterator[Problem]:
    if facts.kind == "cpu" and not os.environ.get(ON_CPU):
        where = f"allocation_mode = {config.allocation_mode}"
        rule = "megatron-core computes on GPUs, and this run computes on cpu"
        remedy = "use archon; docs/megatron-training.md describes tests on a CPU"
        yield Problem(where, rule, remedy)


@RULES.add(commands=RUNS)
def megatron_has_the_layers(config: Config, facts: RunFacts) -> list[Problem]:
    """Settings of a config.json that Megatron does not support; roles of one model share them."""
    dims = [part.dims for part in megatron_parts(config, facts)]
    found = [problem for one in dims if one is not None for problem in unsayable(one)]
    return list({str(problem): problem for problem in found}.values())


@RULES.add(commands=RUNS)
def megatron_takes_the_keys(config: Config, facts: RunFacts) -> Iterator[Problem]:
    for part in megatron_parts(config, facts):
        trains = part.component.role in ("actor", "critic")
        for key, value, rule in _keys(part) if trains else ():
            shown = str(value).lower() if isinstance(value, bool) else value
            yield Problem(f"{part.key}.{key} = {shown}", rule, REMEDY)


def _keys(part: Placed) -> Iterator[tuple[str, Any, str]]:
    """(key, value, reason) of settings that a Megatron layer does not support."""
    archon, model = part.model.archon, part.model
    cannot: dict[str, tuple[bool, str]] = {
        "enable_compile": (archon.enable_compile is True, "Megatron's layers are not compiled"),
        "offload_params": (archon.offload_params, "Megatron keeps parameters on the device"),
        "ac_debug": (archon.ac_debug, "Megatron recomputes by layers, not by operations"),
        "ac_selective": (
            archon.ac_selective is not None,
            "selective recomputes the attention core in Megatron, and has no other choice",
        ),
        "ac_mode": (
            archon.ac_mode == "memory_budget",
            "Megatron supports none, selective and full",
        ),
        "dp_replicate": (archon.dp_replicate > 1, "Megatron has one group of data-parallel ranks"),
        "reshard_after_forward_policy": (
            archon.reshard_after_forward_policy == "always",
            "Megatron does not shard parameters between forward and backward",
        ),
        **{
            name: (bool(getattr(archon, name)), "experts are not balanced by this key in Megatron")
            for name in ("moe_aux_loss_coef", "moe_z_loss_coef", "moe_bias_rate")
        },
    }
    for name, (is_set, rule) in cannot.items():
        if is_set:
            yield f"archon.{name}", getattr(archon, name), rule
    if part.component.size("p") > 1 and archon.pp_schedule not in SCHEDULES:
        rule = f"Megatron's pipelines run {' and '.join(SCHEDULES)}"
        yield "archon.pp_schedule", archon.pp_schedule, rule
    if model.lora is not None:
        yield "lora.rank", model.lora.rank, "adapters are supported by archon only"


@RULES.add()
def megatron_is_not_strict(config: Config) -> Iterator[Problem]:
    if config.strict:
        rule = "log-probs that equal the sampler's bit for bit need archon"
        yield Problem("strict = true", f"{rule}, and the layout has megatron", REMEDY)
