"""Builds sections of the config, and what parts take beside them, from one flat list of values."""

from typing import Any

from pentad.data.render import DataSource
from pentad.data.section import DatasetConfig


def data_source(**given: Any) -> DataSource:
    """Keys of the dataset's block go into it, the rest beside it."""
    keys = {name: given.pop(name) for name in [*given] if name in DatasetConfig.model_fields}
    return DataSource(data=DatasetConfig(**keys), **given)
