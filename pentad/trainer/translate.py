"""From the config to the settings of each part: the one place where both are known."""

from __future__ import annotations

import os

import torch

from pentad.config.derived import num_running, reshards
from pentad.config.rules.algorithm import sample_limit
from pentad.config.schema import Config, DatasetConfig, ModelConfig
from pentad.core.algorithms import AlgorithmSettings
from pentad.core.dims import ModelDims
from pentad.core.errors import UserError
from pentad.core.layout import Allocation, Component, parse_allocation
from pentad.core.seeds import derive_seed
from pentad.core.sizes import default_microbatch_tokens
from pentad.core.types import SamplingParams
from pentad.data.render import Columns, DataSettings
from pentad.data.tokenizer import Tokenizer
from pentad.engine.settings import DType, EngineSettings, OptimizerSettings
from pentad.infer.settings import SamplerSettings
from pentad.models.balance import BalanceSettings
from pentad.models.families import register
from pentad.rewards.sandbox import SandboxSettings
from pentad.rewards.scorer import RewardSettings
from pentad.rl.algorithms import settings_for
from pentad.rl.bounds import Bounds, BoundSettings
from pentad.rl.overrides import run_problems
from pentad.rollout.executor import ExecutorSettings


def allocation_of(config: Config) -> Allocation:
    assert config.allocation_mode is not None, "the config is resolved"
    return parse_allocation(config.allocation_mode)


def component_of(config: Config, role: str) -> Component:
    """Where a role stands; a critic without a component of its own is where the actor is."""
    allocation = allocation_of(config)
    found = allocation.find(role)
    if role == "critic":
        found = found or allocation.find("actor")
    assert found is not None, "checked with the config"
    return found


def register_models(config: Config) -> None:
    """Makes the families of `model_files` known in this process; every rank calls it."""
    for path in config.model_files:
        register(path)


def algorithm_settings(config: Config) -> AlgorithmSettings:
    """Raises UserError with what is wrong between the algorithm and its overrides."""
    settings = settings_for(config.algorithm.name, **config.algorithm.given)
    problems = run_problems(
        settings,
        group_size=config.gconfig.n_samples,
        max_new_tokens=sample_limit(config),
        max_staleness=config.max_staleness,
        num_updates=config.updates_per_batch,
    )
    if problems:
        raise UserError(problems)
    return settings


def bounds_of(config: Config) -> Bounds:
    return Bounds(BoundSettings(**config.guards.model_dump()))


def compute_dtype(model: ModelConfig, device: torch.device) -> DType:
    if model.dtype == "auto":
        return "bfloat16" if device.type == "cuda" else "float32"
    return model.dtype


def engine_settings(
    model: ModelConfig,
    device: torch.device,
    *,
    temperature: float,
    total_steps: int,
    max_row_tokens: int,
    pp: int = 1,
    world: int = 1,
    strict: bool = False,
) -> EngineSettings:
    """`max_row_tokens` is the longest sequence the run can meet: no microbatch is smaller.

    `pp` counts the pipeline ranks of the layout, `world` all of them.
    """
    archon, optimizer = model.archon, model.optimizer
    is_cuda = device.type == "cuda"
    budget = model.mb_spec.max_tokens_per_mb
    num_stages = pp * (archon.stages_per_rank or 1) if pp > 1 else 1
    budget = budget or default_microbatch_tokens(max_row_tokens, device.type, num_stages)
    saves_memory = is_cuda and model.gradient_checkpointing
    return EngineSettings(
        compute_dtype=compute_dtype(model, device),
        param_dtype=model.param_dtype,
        reduce_dtype=model.reduce_dtype,
        temperature=temperature,
        max_tokens_per_mb=budget,
        n_mbs=model.mb_spec.n_mbs,
        gradient_checkpointing=model.gradient_checkpointing,
        pad_to_maximum=model.pad_to_maximum is True,
        ac_mode="selective" if archon.ac_mode == "auto" else archon.ac_mode,
        ac_selective=archon.ac_selective or "op",
        ac_memory_budget=archon.ac_memory_budget,
        ac_debug=archon.ac_debug,
        compile=archon.enable_compile is True
        or (archon.enable_compile == "auto" and is_cuda and not strict),
        strict=strict,
        reshard_after_forward=reshards(archon, pp, world),
        offload_params=archon.offload_params,
        pp_schedule=archon.pp_schedule,
        stages_per_rank=archon.stages_per_rank,
        layers_per_stage=archon.layers_per_stage,
        balance=BalanceSettings(
            aux_loss_coef=archon.moe_aux_loss_coef,
            z_loss_coef=archon.moe_z_loss_coef,
            bias_rate=archon.moe_bias_rate,
        ),
        deterministic=archon.use_deterministic_algorithms,
        tag_memory="host" if saves_memory else "device",
        optimizer=OptimizerSettings(
            lr=optimizer.lr,
            weight_decay=optimizer.weight_decay,
            beta1=optimizer.beta1,
            beta2=optimizer.beta2,
            eps=optimizer.eps,
            lr_scheduler_type=optimizer.lr_scheduler_type,
            warmup_steps_proportion=optimizer.warmup_steps_proportion,
            min_lr_ratio=optimizer.min_lr_ratio,
            gradient_clipping=optimizer.gradient_clipping,
            total_steps=total_steps,
        ),
    )


def sampling_params(config: Config, tokenizer: Tokenizer) -> SamplingParams:
    gconfig = config.gconfig
    return SamplingParams(
        max_new_tokens=gconfig.max_new_tokens,
        temperature=gconfig.temperature,
        top_p=gconfig.top_p,
        top_k=gconfig.top_k,
        stop_ids=tuple(dict.fromkeys((*tokenizer.stop_ids, *gconfig.stop_token_ids))),
        stop_strings=gconfig.stop,
    )


def eval_params(config: Config, tokenizer: Tokenizer) -> SamplingParams:
    train = sampling_params(config, tokenizer)
    return SamplingParams(
        max_new_tokens=config.evaluator.max_new_tokens or train.max_new_tokens,
        temperature=config.evaluator.temperature,
        stop_ids=train.stop_ids,
        stop_strings=train.stop_strings,
    )


def sampler_settings(config: Config, dims: ModelDims) -> SamplerSettings:
    rollout = config.rollout
    kv_bytes = None if rollout.kv_cache_gb is None else int(rollout.kv_cache_gb * 2**30)
    return SamplerSettings(
        max_running=num_running(config),
        max_batch_tokens=max(rollout.max_batch_tokens, num_running(config)),
        max_context=dims.max_position,
        kv_cache_bytes=kv_bytes,
        on_update=rollout.on_update,
        record_routes=rollout.replay_routes,
        strict=config.strict,
    )


def executor_settings(
    config: Config, dims: ModelDims, params: SamplingParams, num_samples: int, *, purpose: str
) -> ExecutorSettings:
    """`purpose` keeps the random numbers of training and evaluation apart."""
    return ExecutorSettings(
        params=params,
        num_samples=num_samples,
        run_seed=derive_seed(config.seed, purpose),
        vocab_size=dims.vocab_size,
        max_total_tokens=dims.max_position,
        max_sampled_tokens=config.gconfig.max_sampled_tokens if purpose == "train" else None,
        deadline_s=config.rollout.deadline_s,
        max_retries=config.rollout.max_retries,
    )


def reward_settings(config: Config, answer_key: str) -> RewardSettings | None:
    """None if no reward is named. `answer_key` is that of the dataset that is scored."""
    reward = config.reward
    if not reward.functions:
        return None
    sandbox = SandboxSettings(
        num_workers=reward.num_workers or default_reward_workers(),
        timeout_s=reward.timeout_s,
        max_memory_bytes=reward.memory_mb * 2**20,
        allow_processes=reward.allow_processes,
        allow_weaker=reward.allow_weaker,
    )
    return RewardSettings(
        fn=reward.functions,
        weights=reward.weights or (),
        answer_field=answer_key,
        on_failure=reward.on_failure,
        sandbox=sandbox,
    )


def default_reward_workers() -> int:
    """Half the cores, at most 8."""
    return max(1, min(8, (os.cpu_count() or 2) // 2))


def data_settings(
    data: DatasetConfig, key: str, *, seed: int, max_tokens: int, streaming: bool = False
) -> DataSettings:
    """`max_tokens` is what the model's context has room for."""
    assert data.path is not None, f"{key}.path was checked before"
    return DataSettings(
        path=data.path,
        format=data.format,
        columns=columns(data, key),
        shuffle=data.shuffle,
        seed=seed,
        max_tokens=min(data.max_length or max_tokens, max_tokens),
        limit=data.limit,
        streaming=streaming,
    )


def columns(data: DatasetConfig, key: str) -> Columns:
    return Columns(
        key=key,
        prompt_key=data.prompt_key,
        messages_key=data.messages_key,
        response_key=data.response_key,
        chat_template=data.chat_template,
    )
