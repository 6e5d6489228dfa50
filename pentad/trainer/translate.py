"""From the config to the settings of each part: the one place where both are known."""

from __future__ import annotations

from pentad.config.derived import chosen, num_running
from pentad.config.rules.algorithm import sample_limit
from pentad.config.schema import Config
from pentad.core.algorithms import AlgorithmSettings
from pentad.core.dims import ModelDims
from pentad.core.errors import UserError
from pentad.core.remote import Remote
from pentad.core.seeds import derive_seed
from pentad.core.settings import into
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
