"""Where the first weights of a run come from: a HF folder, a Megatron folder, or a conversion."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from pentad.config.derived import component_of
from pentad.config.schema import Config, ModelConfig
from pentad.core.dims import ModelDims
from pentad.models.conversion import Conversion, convert
from pentad.models.families import dims_of, known_families, read_config
from pentad.models.hf_weights import native_shards
from pentad.models.language_model import LanguageModel
from pentad.models.registry import build_model, open_weights
from pentad.weights import transfer

Role = Literal["actor", "critic"]
FAMILY_NAMES = {"qwen2.5": "qwen2"}
"""What others call a family -> its `model_type`."""


def backend_of(config: Config, role: str) -> Literal["archon", "fsdp"]:
    """Whose models a role has."""
    return "fsdp" if component_of(config, role).backend == "fsdp" else "archon"


def trained_dims(config: Config, path: str) -> ModelDims:
    """The dimensions of the actor's model: of its family where there is a model file."""
    if backend_of(config, "actor") == "archon":
        return dims_of(path)
    family = str(read_config(path).get("model_type"))
    if family in known_families():
        return dims_of(path)
    # Here and below, since transformers takes seconds to import.
    from pentad.models.hf.config import dims_of_hf

    return dims_of_hf(path)


def weights_folder(config: Config, role: Role) -> Path | None:
    """The folder a role's weights are read from; None when they are random."""
    model = _origin(config, role)
    if model.init_from_scratch:
        return None
    folder = model.checkpoint_load_path or model.path
    assert folder is not None, "checked with the config"
    return Path(folder).expanduser()


def _origin(config: Config, role: Role) -> ModelConfig:
    """The block that says where weights come from. A critic that is made from the actor's folder
    and names no weights of its own begins as the actor does."""
    critic = config.critic
    has_own = critic.init_from_scratch or critic.checkpoint_load_path is not None
    if role == "critic" and (has_own or critic.path not in (None, config.actor.path)):
        return critic
    return config.actor


def start_run(config: Config, roles: tuple[Role, ...]) -> None:
    """Makes the Megatron folder of `megatron.use_hf_ckpt`, or finds that it was made.

    Called once for a run, before its folder is made and before its ranks start.
    """
    convertor, path = config.megatron.ckpt_convertor, config.actor.path
    if not config.megatron.use_hf_ckpt:
        return
    assert path is not None and convertor.save_path is not None, "checked with the config"
    conversion = Conversion(
        source=str(Path(convertor.hf_model_path or path).expanduser()),
        target=str(Path(convertor.save_path).expanduser()),
        to="legacy",
        tp=convertor.tensor_model_parallel_size,
        pp=convertor.pipeline_model_parallel_size,
        model=FAMILY_NAMES.get(convertor.model_type or "", convertor.model_type),
    )
    convert(conversion, processes=convertor.process_num)
    for role in roles:
        check_weights(config, role)


def check_start(config: Config, role: Role) -> None:
    """As `check_weights`; what is yet to be converted is checked when that is done."""
    if not (config.megatron.use_hf_ckpt and _origin(config, role) is config.actor):
        check_weights(config, role)


def check_weights(config: Config, role: Role) -> None:
    """Raises UserError if the role's model cannot be built or filled; reads metadata only."""
    folder = weights_folder(config, role)
    path = (config.critic.path if role == "critic" else None) or config.actor.path
    if path is None:
        return
    face = _face(config, path, role)
    if folder is not None:
        reader = open_weights(folder, face.dims)
        transfer.check(native_shards(face), face.map_for(reader.infos), reader)


def _face(config: Config, path: str, role: Role) -> LanguageModel:
    """The role's model without memory."""
    is_critic = role == "critic"
    if backend_of(config, role) == "archon":
        dims = dims_of(path)
        return build_model(dims, device="meta", dtype=torch.float32, value_head=is_critic)
    from pentad.engine.transformers_model import match_layout
    from pentad.models.hf.config import read_hf_config
    from pentad.models.hf.module import build_hf_model

    model = build_hf_model(read_hf_config(path), dtype=torch.float32, value_head=is_critic)
    component = component_of(config, role)
    archon = config.critic.archon if is_critic else config.actor.archon
    match_layout(model, component.layout(archon.dp_replicate))
    return model
