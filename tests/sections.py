"""Builds sections of the config, and what parts take beside them, from one flat list of values."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from pentad.core.roles import Sampler, Scorer
from pentad.data.render import DataSource
from pentad.data.section import DatasetConfig
from pentad.engine.section import (
    ArchonConfig,
    EngineSettings,
    MicrobatchConfig,
    ModelConfig,
    OptimizerConfig,
)
from pentad.infer.section import SamplerSettings
from pentad.rl.section import AlgorithmConfig
from pentad.rollout.environments import RolloutTokenizer
from pentad.rollout.executor import Executor
from pentad.rollout.replicas import Fleet
from pentad.rollout.section import RolloutConfig
from pentad.rollout.workflows import Context, Workflow

PLAIN = {
    "dtype": "float32",
    "ac_mode": "none",
    "ac_selective": "op",
    "enable_compile": False,
    "reshard_after_forward_policy": "always",
}
"""What tests of an engine begin with, on every device."""
RUN = {field.name for field in fields(EngineSettings)} - {"model"}


def settings_for(name: str, **given: Any) -> AlgorithmConfig:
    """An algorithm with the keys of its block."""
    return AlgorithmConfig(name=name, **given)


def sampler_settings(**given: Any) -> SamplerSettings:
    """Keys of the block `rollout` go into it, without the bounds of recipes."""
    keys = _taken(given, RolloutConfig.model_fields)
    return SamplerSettings(rollout=RolloutConfig().model_copy(update=keys), **given)


def make_executor(
    samplers: Mapping[str, Sampler],
    workflow: Workflow,
    reward: Scorer | None,
    tokenizer: RolloutTokenizer,
    **given: Any,
) -> Executor:
    """Keys of the block `rollout` go into it, values of the context into that."""
    keys = _taken(given, RolloutConfig.model_fields)
    context = Context(tokenizer=tokenizer, **_taken(given, [f.name for f in fields(Context)]))
    # Without the bounds of recipes: tests have short deadlines.
    rollout = RolloutConfig().model_copy(update=keys)
    patience = {
        name.removeprefix("replica_"): given.pop(name)
        for name in ("replica_patience_s", "replica_backoff_s")
        if name in given
    }
    fleet = Fleet(samplers, **patience)
    return Executor(fleet, workflow, reward, context, rollout, **given)


def data_source(**given: Any) -> DataSource:
    """Keys of the dataset's block go into it, the rest beside it."""
    keys = _taken(given, DatasetConfig.model_fields)
    return DataSource(data=DatasetConfig(**keys), **given)


def engine_keys(**given: Any) -> ModelConfig:
    """The block of a model whose nested keys are given flat. Without the checks of recipes: tests
    compute in float64, too."""
    given = PLAIN | given
    keys = {
        "archon": ArchonConfig().model_copy(update=_taken(given, ArchonConfig.model_fields)),
        "mb_spec": MicrobatchConfig().model_copy(
            update=_taken(given, MicrobatchConfig.model_fields)
        ),
        **_taken(given, ModelConfig.model_fields),
    }
    assert not given, f"no such keys: {given}"
    return ModelConfig().model_copy(update=keys)


def planned_keys(**given: Any) -> ModelConfig:
    """As `engine_keys`, in what a plan counts with by default."""
    return engine_keys(
        **{"dtype": "bfloat16", "ac_mode": "selective", "pp_schedule": "1F1B"} | given
    )


def engine_settings(*, optimizer: OptimizerConfig | None = None, **given: Any) -> EngineSettings:
    """Without an optimizer of its own it has the default one."""
    beside = {"total_steps": 1} | _taken(given, RUN)
    return EngineSettings(
        model=engine_keys(optimizer=optimizer or OptimizerConfig(), **given), **beside
    )


def _taken(given: dict[str, Any], names: Any) -> dict[str, Any]:
    return {name: given.pop(name) for name in [*given] if name in names}
