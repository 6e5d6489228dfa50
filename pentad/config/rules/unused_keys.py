"""Keys that a run does not read, given its other keys: each is reported, none is silently ignored.

A table defines when a key is read. A key that differs from its default and is not read gives one
message, in `plan` and at the start of a run; it is not an error, because recipes are used for
several layouts and commands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from pentad.config.describe import fields, show, value_at
from pentad.config.environments import is_evaluated
from pentad.config.resolve import DEFAULT_RECOVERY
from pentad.config.rules.environments import rewards_of
from pentad.config.rules.rule import ON_EXAMPLES, Command
from pentad.config.schema import Config, ModelConfig
from pentad.config.topology import find_topology
from pentad.core.section import Section
from pentad.data.section import DatasetConfig
from pentad.rewards.section import JUDGE, REWARD_MODEL


@dataclass(frozen=True, slots=True)
class KeyUse:
    """The condition under which some keys are read."""

    keys: tuple[str, ...]
    """Dotted keys; a block stands for all its keys."""
    reads: Callable[[Config], object]
    """True if the run reads them."""
    why: str
    """The reason if it does not."""


def unread(config: Config, command: Command = "plan") -> list[str]:
    """A message for each key that is set and that a command does not read."""
    readers = list(READERS)
    for role, model in config.trained_models.items():
        readers += model_readers(role, model)
    for key, data in (
        ("train_dataset", config.train_dataset),
        ("valid_dataset", config.valid_dataset),
    ):
        readers += dataset_readers(key, data, command)
    if command in ON_EXAMPLES:
        keys = [*OF_ROLLOUT, *(() if command == "dpo" else ("ref",))]
        keys += ["actor.enable_tree_training"] if command in ("sft", "pretrain") else []
        readers.append(KeyUse(tuple(keys), lambda _: False, f"{command} does not sample"))
        why = f"{command} uses all devices"
        readers.append(KeyUse(("offload_train",), lambda config: not config.offload_train, why))
    found: dict[str, str] = {}  # one message per key; its block may be listed, too
    for reader in readers:
        if not reader.reads(config):
            for key, value in [pair for name in reader.keys for pair in given(config, name)]:
                found.setdefault(key, f"{key} = {show(value)}: without effect, {reader.why}")
    return list(found.values())


def given(config: Config, key: str) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of all values at or below a key that differ from their default."""
    default: Any = fields()[key].default
    value: Any = config
    for name in key.split("."):
        if value is None:  # its block is unset
            return
        value = getattr(value, name)
    if isinstance(value, Section):
        for name in type(value).model_fields:
            if name in value.model_fields_set:
                yield from given(config, f"{key}.{name}")
    elif value != default:
        yield key, value


def rest_of(block: str, *names: str) -> tuple[str, ...]:
    """The keys of a block except those named."""
    but = {f"{block}.{name}" for name in names}
    return tuple(key for key in fields() if key.startswith(f"{block}.") and key not in but)


def samples_with(config: Config, *backends: str) -> bool:
    """Whether the sampler is one of these, or unknown."""
    rollout = config.part("rollout")
    return not rollout or rollout.backend in backends


def has_reward(name: str, config: Config) -> bool:
    """Whether this reward scores samples of the run, or of one of its environments."""
    return any(name in block.functions for block in rewards_of(config).values())


def has_units(config: Config) -> bool:
    placed = find_topology(config)
    return placed is not None and placed.has_storage_units


def has_sampler_processes(config: Config) -> bool:
    """Whether the run has sampler processes; also true if their number is unknown."""
    placed = find_topology(config)
    return placed is None or not placed.is_one_process


def saves_by(key: str, config: Config) -> bool:
    """Whether a run uses this frequency of its recovery checkpoints, or it has its default."""
    return config.only != "rollout" or value_at(config, key) == DEFAULT_RECOVERY.get(key)


def model_readers(role: str, model: ModelConfig) -> list[KeyUse]:
    archon, key = model.archon, f"{role}.archon"
    keeps = archon.ac_mode if model.gradient_checkpointing else "none"
    return [
        KeyUse(
            (f"{key}.pp_schedule", f"{key}.stages_per_rank", f"{key}.layers_per_stage"),
            lambda config: config.pipeline_size(role) > 1,
            "the layout has no pipeline (p1)",
        ),
        KeyUse(
            (f"{key}.ac_selective",),
            lambda _: keeps in ("selective", "auto"),
            f"{key}.ac_mode = {archon.ac_mode} does not select",
        ),
        KeyUse(
            (f"{key}.ac_memory_budget",),
            lambda _: keeps == "memory_budget",
            f"{key}.ac_mode = {archon.ac_mode} has no budget",
        ),
        KeyUse(
            (f"{key}.keep_logits",),
            lambda _: role == "actor",
            "a critic's head gives one value a token",
        ),
        KeyUse(
            (f"{role}.optimizer.min_lr_ratio",),
            lambda _: model.optimizer.lr_scheduler_type != "constant",
            f"{role}.optimizer.lr_scheduler_type = constant does not decay",
        ),
    ]


def dataset_readers(
    key: str, data: DatasetConfig | None, command: Command = "plan"
) -> list[KeyUse]:
    if data is None:
        return []
    if command == "pretrain":
        keys = tuple(f"{key}.{name}" for name in OF_PROMPTS)
        return [KeyUse(keys, lambda _: False, f"pretrain reads {key}.text_key")]
    has_messages = data.messages_key is not None
    why = f"{key}.messages_key = {data.messages_key} takes its place"
    return [
        KeyUse((f"{key}.prompt_key",), lambda _: not has_messages, why),
        KeyUse(
            tuple(f"{key}.{name}" for name in OF_TEXTS), lambda _: False, "only pretrain reads it"
        ),
    ]


READERS = (
    KeyUse(
        ("reward.judge",),
        partial(has_reward, JUDGE),
        "reward.fn has no judge",
    ),
    KeyUse(
        ("reward.model",),
        partial(has_reward, REWARD_MODEL),
        "reward.fn has no reward_model",
    ),
    KeyUse(
        ("critic",),
        lambda config: config.algorithm.facts.needs_critic,
        "the algorithm has no critic",
    ),
    KeyUse(
        ("ref.path",), lambda config: "ref" in config.frozen_models, "there is no reference model"
    ),
    KeyUse(
        ("teacher.path",),
        lambda config: config.algorithm.facts.needs_teacher,
        "only algorithm.name = distill has a teacher",
    ),
    KeyUse(
        ("megatron.transformer_impl",),
        lambda config: any(part.backend == "megatron" for part in config.parsed_allocation or ()),
        "the layout trains nothing by megatron",
    ),
    KeyUse(
        ("megatron.ckpt_convertor.use_gpu_num", "megatron.ckpt_convertor.use_gpu_index"),
        lambda _: False,
        "the conversion runs on the CPU",
    ),
    KeyUse(
        ("megatron.ckpt_convertor",),
        lambda config: config.megatron.use_hf_ckpt,
        "megatron.use_hf_ckpt = false converts nothing",
    ),
    KeyUse(
        rest_of("checkpoint", "local_dir", "remote_uri"),
        lambda config: config.checkpoint.remote_uri is not None,
        "checkpoint.remote_uri = null names no store",
    ),
    KeyUse(
        rest_of("elastic", "enabled"),
        lambda config: config.elastic.enabled,
        "elastic.enabled = false",
    ),
    KeyUse(
        ("cluster.n_cpus_per_node", "cluster.memory_gb_per_node"),
        lambda config: config.scheduler.type == "slurm",
        "scheduler.type is not slurm",
    ),
    KeyUse(
        ("num_data_storage_units",),
        lambda config: config.only is None and has_units(config),
        "groups are in memory or in files",
    ),
    KeyUse(
        ("evaluator.n_samples", "evaluator.temperature", "evaluator.max_new_tokens"),
        is_evaluated,
        "there is no valid_dataset",
    ),
    KeyUse(
        ("saver.keep_last", "saver.keep_best"),
        lambda config: config.saver.is_periodic,
        "the model is saved at the end only; saver.freq_steps=N saves it every N steps",
    ),
    KeyUse(
        ("valid_dataset", "evaluator"),
        lambda config: config.only is None,
        "a run with `only` evaluates nothing",
    ),
    KeyUse(("store",), lambda config: config.only is None, "a run with `only` needs none"),
    KeyUse(
        (
            *("actor.optimizer", "critic", "saver", "guards", "telemetry.keep_batches"),
            *("ref_update_interval", "updates_per_batch", "num_iters_per_train_update"),
        ),
        lambda config: config.only != "rollout",
        "only = rollout trains nothing, and keeps the groups of every step",
    ),
    *(
        KeyUse(
            (f"recover.freq_{unit}",),
            partial(saves_by, f"recover.freq_{unit}"),
            "only = rollout resumes after the last step of batches/",
        )
        for unit in ("epochs", "steps", "secs")
    ),
    KeyUse(
        ("rollout", "reward", "train_dataset", "use_streaming_dataset", "max_staleness"),
        lambda config: config.only != "train",
        "only = train does not sample",
    ),
    KeyUse(
        ("offload_train",),
        lambda config: config.only is None or not config.offload_train,
        "a run with `only` uses all devices",
    ),
    KeyUse(("valid_dataset.batch_size",), lambda _: False, "held-out rows are in one batch"),
    KeyUse(
        ("reward",),
        lambda config: config.reward.functions or config.rollout.workflows,
        "reward.fn is not set",
    ),
    KeyUse(
        ("rollout.oversample",),
        lambda config: config.only is None,
        "only = rollout waits for every group: its weights do not change",
    ),
    KeyUse(
        ("rollout.max_carries",),
        lambda config: config.oversamples,
        "rollout.oversample = 1 aborts no group",
    ),
    KeyUse(
        ("rollout.history",),
        lambda config: not config.rollout.is_single_turn,
        "single answers have no history",
    ),
    KeyUse(
        ("rollout.restarts",),
        lambda config: samples_with(config, "embedded") and has_sampler_processes(config),
        "the sampler is not a process that the run can restart",
    ),
    KeyUse(
        ("rollout.max_batch_tokens",),
        lambda config: samples_with(config, "embedded", "vllm"),
        "SGLang chooses it; rollout.server.args can override it",
    ),
    KeyUse(
        (
            *("rollout.kv_cache_gb", "rollout.max_batch_tokens", "rollout.max_running"),
            *("rollout.server.python", "rollout.server.args", "rollout.server.start_timeout_s"),
            "rollout.server.gpu_memory_share",
        ),
        lambda config: not config.rollout.server.addresses,
        "the servers of rollout.server.addresses run already",
    ),
    KeyUse(
        ("rollout.server.transfer_folder",),
        lambda config: config.rollout.server.weight_transport == "disk",
        "only rollout.server.weight_transport = disk writes there",
    ),
)
"""For every run. Unused keys of the algorithm are rejected by its own rules."""
OF_PROMPTS = (
    *("prompt_key", "messages_key", "tools_key", "answer_key", "response_key", "chat_template"),
)
OF_TEXTS = ("text_key", "mask_documents")
OF_ROLLOUT = (
    *("gconfig", "reward", "rollout", "algorithm", "teacher", "max_staleness"),
    *("num_iters_per_train_update", "updates_per_batch", "use_streaming_dataset"),
    *("store", "num_data_storage_units"),
    *("ref_update_interval", "compute_advantages_and_returns", "strict"),
    *("evaluator.n_samples", "evaluator.temperature", "evaluator.max_new_tokens"),
    *("guards.max_logprob_gap", "only", "groups_from"),
)
"""Read by `train` only."""
