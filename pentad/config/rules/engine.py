"""Rules on the training engine, for the actor and the critic alike."""

from __future__ import annotations

from collections.abc import Iterator

from pentad.config.derived import pipeline_size
from pentad.config.rules.rule import Rules
from pentad.config.schema import Config, ModelConfig
from pentad.core.errors import Problem
from pentad.core.fit import splits_backward

RULES: Rules[[Config]] = Rules()


@RULES.add(
    "actor.archon",
    "actor.gradient_checkpointing",
    "actor.pad_to_maximum",
    "allocation_mode",
    commands=("train", "sft", "plan"),
)
def the_actor_engine_agrees(config: Config) -> list[Problem]:
    return list(_engine_problems(config, "actor", config.actor))


@RULES.add(
    "critic.archon",
    "critic.gradient_checkpointing",
    "critic.pad_to_maximum",
    "allocation_mode",
    "algorithm.name",
)
def the_critic_engine_agrees(config: Config) -> list[Problem]:
    if not config.algorithm.facts.needs_critic:
        return []
    return list(_engine_problems(config, "critic", config.critic))


def _engine_problems(config: Config, role: str, model: ModelConfig) -> Iterator[Problem]:
    archon = model.archon
    where = f"{role}.archon.ac_mode = {archon.ac_mode}"
    is_zero_bubble = pipeline_size(config, role) > 1 and splits_backward(archon.pp_schedule)
    if archon.ac_mode not in ("auto", "none") and not model.gradient_checkpointing:
        rule = f"{role}.gradient_checkpointing = false switches checkpointing off"
        yield Problem(where, rule, "leave one of the two out")
    yield from archon.compile_problems(
        f"{role}.archon.",
        compiles=archon.enable_compile,
        keeps=model.gradient_checkpointing and not is_zero_bubble,
    )
    own_losses = {
        "moe_aux_loss_coef": archon.moe_aux_loss_coef,
        "moe_z_loss_coef": archon.moe_z_loss_coef,
    }
    for key, value in own_losses.items():
        if model.pad_to_maximum is True and value:
            rule = f"{role}.archon.{key} = {value:g} would train the router on what is padded"
            yield Problem(f"{role}.pad_to_maximum = true", rule, "leave one of the two out")
