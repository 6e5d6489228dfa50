"""The learners of an RL run, made from its config: engines by role, weight tags, the update. They
depend only on the config and on two numbers computed from the data, so a replay of a batch builds
the same learners."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path
from typing import Literal

import torch

from pentad.config.schema import Config
from pentad.core.dims import ModelDims
from pentad.core.errors import Problem, UserError, raise_problems
from pentad.core.layout import TRAINING, Backend
from pentad.core.section import chosen
from pentad.core.seeds import derive_seed
from pentad.core.sizes import RunSize
from pentad.engine.engine import Engine, build_engine
from pentad.engine.frozen import spec_of_lora
from pentad.engine.section import (
    EngineSettings,
    ModelConfig,
    carrying_problems,
    uncompiled_problems,
)
from pentad.models.families import dims_of
from pentad.models.hf_weights import native_shards
from pentad.models.language_model import LanguageModel
from pentad.models.registry import build_whole, dims_to_sample, meta_unfiled, open_weights
from pentad.models.towers import by_adapter_names
from pentad.runtime.helper import HelperPool
from pentad.telemetry.log import NOTICE
from pentad.weights import transfer
from pentad.weights.megatron.model_args import unsayable
from pentad.weights.peft import fit_problems, read_adapter, spec_problems

Role = Literal["actor", "critic"]
VALUE_HEAD = "score.weight"
FAMILY_NAMES = {"qwen2.5": "qwen2"}
"""Names of model families in other systems -> their `model_type`."""


def backend_of(config: Config, role: str) -> Backend:
    """Returns the backend that builds a role's model."""
    backend = config.component(role).backend
    return next(one for one in TRAINING if one == backend)


def trained_dims(config: Config, path: str) -> ModelDims:
    """The dimensions of the actor's model: those of its family if there is a model file."""
    return (dims_to_sample if backend_of(config, "actor") == "fsdp" else dims_of)(path)


def weights_folder(config: Config, role: Role) -> Path | None:
    """Returns the folder of a role's initial weights; None if they are random."""
    model = _origin(config, role)
    if model.init_from_scratch:
        return None
    folder = model.checkpoint_load_path or model.path
    return Path(chosen(folder, "actor.path")).expanduser()


def _origin(config: Config, role: Role) -> ModelConfig:
    """Returns the config block that names the initial weights. A critic made from the actor's
    folder that names no weights starts from the actor's."""
    critic, actor = config.critic, config.actor
    is_own = critic.has_other_weights or critic.path not in (None, actor.path)
    return critic if role == "critic" and is_own else actor


def roles_of(config: Config) -> tuple[Role, ...]:
    """The learners of an RL run: the actor, and a critic if the algorithm has one."""
    return ("actor", "critic") if config.algorithm.facts.needs_critic else ("actor",)


def start_run(config: Config, roles: tuple[Role, ...]) -> None:
    """Makes the Megatron folder of `megatron.use_hf_ckpt`, or finds an existing one. Called once
    per run, before the run folder is made and the ranks start."""
    convertor = config.megatron.ckpt_convertor
    if not config.megatron.use_hf_ckpt:
        return
    target = chosen(convertor.save_path, "megatron.ckpt_convertor.save_path")
    # Imported here: few runs convert, and it imports torch.distributed.checkpoint.
    from pentad.models.catalog import quantization
    from pentad.models.conversion import Conversion, convert

    source = str(Path(convertor.hf_model_path or config.model_folder()).expanduser())
    conversion = Conversion(
        source=source,
        dequantize=config.actor.dequantize and quantization(source) is not None,
        target=str(Path(target).expanduser()),
        to="legacy",
        tp=convertor.tensor_model_parallel_size,
        pp=convertor.pipeline_model_parallel_size,
        model=FAMILY_NAMES.get(convertor.model_type or "", convertor.model_type),
    )
    num = convertor.process_num
    convert(conversion, pool=HelperPool(num) if num > 1 else None)
    for role in roles:
        check_weights(config, role)


def check_start(config: Config, role: Role) -> None:
    """Calls `check_weights`, unless the folder will be converted: the conversion checks it."""
    if not (config.megatron.use_hf_ckpt and _origin(config, role) is config.actor):
        check_weights(config, role)


def check_models(config: Config) -> None:
    """Raises UserError with every reason why the models of a run cannot be built."""
    problems: list[Problem | str] = []
    for role in roles_of(config) if config.task == "train" else ("actor",):
        try:
            _meta_model(config, role)
        except UserError as error:
            problems += error.problems
    if config.task == "train" and not problems:
        check_sampled(config)
    if problems:
        raise UserError(dict.fromkeys(problems))


def check_weights(config: Config, role: Role) -> None:
    """Raises UserError if the role's model cannot be built or loaded; reads metadata only."""
    folder = weights_folder(config, role)
    if config.actor.path is None and (role != "critic" or config.critic.path is None):
        return
    model = _meta_model(config, role)
    if folder is not None:
        dequantize = _origin(config, role).dequantize
        reader = open_weights(folder, model.dims, dequantize=dequantize)
        transfer.check(native_shards(model), model.map_for(reader.infos), reader)
        lora = config.actor.lora
        is_new = role == "critic" and config.critic.lora is not None
        if is_new and VALUE_HEAD in reader.infos:
            rule = f"it has a value head ({VALUE_HEAD}), which critic.lora would replace"
            remedy = "give a folder without one, or leave critic.lora out"
            raise UserError(Problem(f"critic.path = {folder}", rule, remedy))
        if role == "actor" and lora is not None and lora.init_path is not None:
            where = f"actor.lora.init_path = {lora.init_path}"
            adapter = read_adapter(lora.init_path)
            problems = [*spec_problems(adapter, spec_of_lora(model, lora), where)]
            problems += fit_problems(
                adapter, by_adapter_names(folder, reader.infos), where, str(folder)
            )
            raise_problems(problems)


def has_value_head(config: Config, role: Role) -> bool:
    """Whether a role's model returns values instead of log-probs."""
    return role == "critic" or config.trains_reward


def _meta_model(config: Config, role: Role) -> LanguageModel:
    """The role's model without memory."""
    is_critic = role == "critic"
    path = config.model_folder(role)
    backend = backend_of(config, role)
    if backend == "megatron":
        raise_problems(unsayable(dims_of(path)))
    if backend != "fsdp":
        return build_whole(path, backend, value_head=has_value_head(config, role))
    # Imported here: transformers takes seconds to import.
    from pentad.engine.transformers_model import match_layout, splits_experts
    from pentad.models.hf.config import read_hf_config
    from pentad.models.hf.module import build_hf_model

    head = has_value_head(config, role)
    model = build_hf_model(read_hf_config(path), dtype=torch.float32, value_head=head)
    component, keys = config.component(role), config.critic if is_critic else config.actor
    layout, key = component.layout(keys.archon.dp_replicate), "critic" if is_critic else "actor"
    match_layout(model, layout)
    if splits_experts(model, layout):
        raise_problems(uncompiled_problems(model.dims.family, key, keys.archon, layout))
    if not model.packs_rows:
        compiles = keys.archon.enable_compile is True
        has_lora = keys.lora is not None
        raise_problems(
            carrying_problems(model.dims.family, key, has_lora=has_lora, compiles=compiles)
        )
    if keys.lora is not None:
        model.lora_words(keys.lora)
    return model


def check_sampled(config: Config) -> None:
    """Raises UserError if the embedded sampler cannot compute a model without a model file."""
    rollout, folder = config.part("rollout"), config.model_folder()
    if rollout is None or rollout.backend != "embedded" or config.only == "train":
        return
    if not trained_dims(config, folder).is_whole:
        meta_unfiled(folder, torch.float32)


log = logging.getLogger(__name__)


def build_learner(config: Config, role: Role, size: RunSize, *, device: torch.device) -> Engine:
    """Builds the learner; called with the same arguments on every rank of the role's layout."""
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
    """Builds the engine of a role, for rollouts or for examples."""
    is_critic = role == "critic"
    model = config.critic if is_critic else config.actor
    path = config.model_folder(role)
    weights, layout = weights_folder(config, role), config.layout(role)
    settings = EngineSettings(
        model=model.model_copy(update={"dequantize": _origin(config, role).dequantize}),
        temperature=temperature,
        total_steps=total_steps,
        max_row_tokens=max_row_tokens,
        strict=strict,
        balance_data=config.balance_data,
        transformer_impl=config.megatron.transformer_impl,
        offloads=bool(config.offload_train),
    )
    return build_engine(
        path,
        settings,
        device=device,
        layout=layout,
        value_head=has_value_head(config, role),
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
    """Builds the engine of `ref` or `teacher` on separate ranks; it computes like the actor.
    Without `weights`, a reference without a folder has the actor's initial weights."""
    given = config.ref.path if role == "ref" else config.teacher.path
    path, layout = config.model_folder(role), config.layout(role)
    settings = EngineSettings(
        model=config.actor.model_copy(update={"lora": None}),
        temperature=config.gconfig.temperature,
        max_row_tokens=max_row_tokens,
        strict=config.strict,
        transformer_impl=config.megatron.transformer_impl,
    )
    if weights is None:
        weights = Path(given).expanduser() if given else weights_folder(config, "actor")
    return build_engine(
        path,
        settings,
        device=device,
        layout=layout,
        init_from_scratch=weights is None,
        seed=config.seed,
        weights=weights,
        backend=backend_of(config, role),
    )


def load_tags(
    learner: Engine, config: Config, needed: Collection[str], step: int, *, keeps_ref: bool
) -> None:
    """Loads the frozen weights that the learner needs for scoring and lacks, after `step` steps.
    `keeps_ref`: until now the reference had the actor's initial weights."""
    if "ref" in needed and config.ref.path:
        learner.load_tag("ref", config.ref.path)
    elif "ref" in needed and keeps_ref:
        folder = weights_folder(config, "actor")
        if folder is None:
            rule = "so far the reference had the actor's initial weights, which are random"
            remedy = "continue in mode: async, with a component for the reference"
            raise UserError(Problem(f"mode = {config.mode}", rule, remedy))
        learner.load_tag("ref", folder)
    elif "ref" in needed:
        learner.save_tag("ref")
        if step:
            log.info("the reference has the actor's weights after step %d", step, extra=NOTICE)
    if "teacher" in needed:
        learner.load_tag("teacher", chosen(config.teacher.path, "teacher.path"))
