"""The learners of an RL run, made from its config: engines by role, weight tags, the update.

Everything here follows from the config and two numbers that only the data tell, so that whoever
trains a batch again makes the same learners.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import torch

from pentad.config.derived import layout_of
from pentad.config.rules.algorithm import longest_sample, sample_limit
from pentad.config.schema import Config
from pentad.core.algorithms import AlgorithmSettings
from pentad.core.errors import Problem, UserError
from pentad.core.roles import Learner
from pentad.core.seeds import derive_seed
from pentad.core.sizes import RunSize
from pentad.engine.engine import Engine, build_engine
from pentad.telemetry.log import NOTICE
from pentad.trainer.preflight import Checked
from pentad.trainer.start import Role, backend_of, weights_folder
from pentad.trainer.translate import engine_settings
from pentad.trainer.update import BatchUpdate

log = logging.getLogger(__name__)


def size_of(config: Config, checked: Checked, num_steps: int) -> RunSize:
    context = checked.dims.max_position
    longest = max(checked.stream.lengths(), default=context)
    return RunSize(num_steps, longest_sample(config, longest, context))


def build_learner(config: Config, role: Role, size: RunSize, *, device: torch.device) -> Engine:
    """The same call on every rank of the role's layout."""
    return build_role(
        config,
        role,
        device=device,
        temperature=config.gconfig.temperature,
        total_steps=size.num_steps * config.updates_per_batch,
        max_row_tokens=size.max_row_tokens,
        strict=config.strict and role != "critic",
    )


def build_role(
    config: Config,
    role: Role,
    *,
    device: torch.device,
    temperature: float,
    total_steps: int,
    max_row_tokens: int,
    strict: bool = False,
) -> Engine:
    """The engine of a role, for rollouts or for examples."""
    is_critic = role == "critic"
    model = config.critic if is_critic else config.actor
    path = model.path or config.actor.path
    assert path is not None, "checked with the config"
    weights, layout = weights_folder(config, role), layout_of(config, role)
    settings = engine_settings(
        model,
        device,
        pp=layout.pp,
        world=layout.world,
        temperature=temperature,
        total_steps=total_steps,
        max_row_tokens=max_row_tokens,
        strict=strict,
        balance_data=config.balance_data,
    )
    return build_engine(
        path,
        settings,
        device=device,
        layout=layout,
        value_head=is_critic,
        init_from_scratch=weights is None,
        seed=derive_seed(config.seed, "critic") if is_critic else config.seed,
        tokenizer_folder=path,
        weights=weights,
        backend=backend_of(config, role),
    )


def build_scorer(
    config: Config,
    role: str,
    max_row_tokens: int,
    *,
    device: torch.device,
    weights: Path | None = None,
) -> Engine:
    """The engine of `ref` or `teacher` on ranks of its own; it computes as the actor does.

    Without `weights` of another folder a reference without one is the actor as it was before the
    first step.
    """
    given = config.ref.path if role == "ref" else config.teacher.path
    path, layout = given or config.actor.path, layout_of(config, role)
    assert path is not None, "checked with the config"
    settings = engine_settings(
        config.actor,
        device,
        pp=layout.pp,
        world=layout.world,
        temperature=config.gconfig.temperature,
        total_steps=0,
        max_row_tokens=max_row_tokens,
        strict=config.strict,
    )
    if weights is None:
        weights = Path(given).expanduser() if given else weights_folder(config, "actor")
    return build_engine(
        path,
        replace(settings, optimizer=None),
        device=device,
        layout=layout,
        init_from_scratch=weights is None,
        seed=config.seed,
        weights=weights,
        backend=backend_of(config, role),
    )


def build_update(
    config: Config,
    algorithm: AlgorithmSettings,
    learner: Learner,
    critic: Learner | None,
    scored_apart: Collection[str],
) -> BatchUpdate:
    return BatchUpdate(
        learner,
        algorithm,
        critic=critic,
        scored_apart=scored_apart,
        max_new_tokens=sample_limit(config),
        num_updates=config.updates_per_batch,
        compute_advantages=config.compute_advantages_and_returns,
        seed=config.seed,
    )


def load_tags(
    learner: Learner, config: Config, needed: Collection[str], step: int, *, keeps_ref: bool
) -> None:
    """The frozen weights that the learner scores with and does not have yet, after `step` steps.
    `keeps_ref`: so far the reference was the actor as it was before the first of them."""
    if "ref" in needed and config.ref.path:
        learner.load_tag("ref", config.ref.path)
    elif "ref" in needed and keeps_ref:
        folder = weights_folder(config, "actor")
        if folder is None:
            rule = "the reference was the actor with its first weights so far, and those are random"
            remedy = "go on in mode: async, with a component for the reference"
            raise UserError(Problem(f"mode = {config.mode}", rule, remedy))
        learner.load_tag("ref", folder)
    elif "ref" in needed:
        learner.save_tag("ref")
        if step:
            log.info("the reference is the actor as it is after step %d", step, extra=NOTICE)
    if "teacher" in needed:
        assert config.teacher.path is not None, "checked with the config"
        learner.load_tag("teacher", config.teacher.path)
