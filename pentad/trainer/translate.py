"""From the config to the settings of each part: the one place where both are known."""

from __future__ import annotations

import torch

from pentad.config.derived import chosen, num_running, reshards
from pentad.config.rules.algorithm import sample_limit
from pentad.config.schema import Config, ModelConfig
from pentad.core.algorithms import AlgorithmSettings
from pentad.core.dims import ModelDims
from pentad.core.errors import UserError
from pentad.core.remote import Remote
from pentad.core.section import DType
from pentad.core.seeds import derive_seed
from pentad.core.settings import BalanceSettings, EngineSettings, OptimizerSettings, into
from pentad.core.sizes import default_microbatch_tokens
from pentad.core.types import SamplingParams
from pentad.data.tokenizer import Tokenizer
from pentad.infer.settings import SamplerSettings
from pentad.rl.algorithms import settings_for
from pentad.rl.overrides import run_problems
from pentad.rollout.executor import ExecutorSettings


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


def compute_dtype(model: ModelConfig, device: torch.device) -> DType:
    if model.dtype == "auto":
        return "bfloat16" if device.type == "cuda" else "float32"
    return model.dtype


def engine_settings(
    model: ModelConfig,
    device: torch.device,
    *,
    temperature: float,
    total_steps: int | None,
    max_row_tokens: int,
    pp: int = 1,
    world: int = 1,
    strict: bool = False,
    balance_data: bool = True,
) -> EngineSettings:
    """`max_row_tokens` is the longest sequence the run can meet: no microbatch is smaller.

    `pp` counts the pipeline ranks of the layout, `world` all of them. Without `total_steps` the
    engine only scores: it has no optimizer, and no schedule that would need the number.
    """
    archon = model.archon
    is_cuda = device.type == "cuda"
    budget = model.mb_spec.max_tokens_per_mb
    num_stages = pp * (archon.stages_per_rank or 1) if pp > 1 else 1
    budget = budget or default_microbatch_tokens(max_row_tokens, device.type, num_stages)
    saves_memory = is_cuda and model.gradient_checkpointing
    return into(
        EngineSettings,
        model,
        model.mb_spec,
        archon.chosen(pp, device.type),
        compute_dtype=compute_dtype(model, device),
        temperature=temperature,
        max_tokens_per_mb=budget,
        n_mbs=model.mb_spec.fewest,
        max_row_tokens=max_row_tokens,
        balance_data=balance_data,
        pad_to_maximum=model.pad_to_maximum is True,
        compile=archon.enable_compile is True
        or (archon.enable_compile == "auto" and is_cuda and not strict),
        strict=strict,
        reshard_after_forward=reshards(archon, pp, world),
        balance=BalanceSettings(
            aux_loss_coef=archon.moe_aux_loss_coef,
            z_loss_coef=archon.moe_z_loss_coef,
            bias_rate=archon.moe_bias_rate,
        ),
        deterministic=archon.use_deterministic_algorithms,
        tag_memory="host" if saves_memory else "device",
        optimizer=None
        if total_steps is None
        else into(OptimizerSettings, model.optimizer, total_steps=total_steps),
    )


def sampling_params(config: Config, tokenizer: Tokenizer) -> SamplingParams:
    gconfig = config.gconfig
    stop_ids = tuple(dict.fromkeys((*tokenizer.stop_ids, *gconfig.stop_token_ids)))
    return into(SamplingParams, gconfig, stop_ids=stop_ids, stop_strings=gconfig.stop)


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
    return into(
        SamplerSettings,
        rollout,
        max_running=num_running(config),
        max_context=dims.max_position,
        kv_cache_bytes=kv_bytes,
        record_routes=rollout.replay_routes,
        strict=config.strict,
    )


def executor_settings(
    config: Config, dims: ModelDims, params: SamplingParams, num_samples: int, *, purpose: str
) -> ExecutorSettings:
    """`purpose` keeps the random numbers of training and evaluation apart."""
    return into(
        ExecutorSettings,
        config.rollout,
        params=params,
        num_samples=num_samples,
        run_seed=derive_seed(config.seed, purpose),
        vocab_size=dims.vocab_size,
        max_total_tokens=dims.max_position,
        max_sampled_tokens=config.gconfig.max_sampled_tokens if purpose == "train" else None,
        needs_reward=purpose != "train" or not config.algorithm.facts.needs_teacher,
    )


def remote_of(config: Config) -> Remote | None:
    """The place of this run's checkpoints in a store, where one is configured."""
    tiers = config.checkpoint
    if tiers.remote_uri is None:
        return None
    place = f"{chosen(config.user, 'user')}/{config.experiment_name}/{config.trial_name}"
    remote = into(Remote, tiers, uri=tiers.remote_uri, num_workers=tiers.async_workers)
    return remote.under(place)
