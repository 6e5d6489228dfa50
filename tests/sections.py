"""Builds sections of the config, and what parts take beside them, from one flat list of values."""

from dataclasses import fields
from typing import Any

from pentad.data.render import DataSource
from pentad.data.section import DatasetConfig
from pentad.engine.section import (
    ArchonConfig,
    EngineSettings,
    MicrobatchConfig,
    ModelConfig,
    OptimizerConfig,
)

PLAIN = {
    "dtype": "float32",
    "ac_mode": "none",
    "ac_selective": "op",
    "enable_compile": False,
    "reshard_after_forward_policy": "always",
}
"""What tests of an engine begin with, on every device."""
RUN = {field.name for field in fields(EngineSettings)} - {"model"}


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


def engine_settings(*, optimizer: OptimizerConfig | None = None, **given: Any) -> EngineSettings:
    """Without an optimizer of its own it has the default one."""
    beside = {"total_steps": 1} | _taken(given, RUN)
    return EngineSettings(
        model=engine_keys(optimizer=optimizer or OptimizerConfig(), **given), **beside
    )


def _taken(given: dict[str, Any], names: Any) -> dict[str, Any]:
    return {name: given.pop(name) for name in [*given] if name in names}
