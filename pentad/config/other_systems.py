"""Keys of other systems that have another name in Pentad or do not exist there."""

from __future__ import annotations

import difflib
import re

from pentad.core.errors import Problem

LORA = re.compile(r"(^|[._])(lora|qlora|peft)([._]|$)")
"""Matches the name of every LoRA key: `lora.r`, `use_peft`, `actor.lora_rank`, `peft_config.r`."""
LORA_NAMES = {
    **dict.fromkeys(("r", "rank", "lora_r", "lora_rank", "dim"), "rank"),
    **dict.fromkeys(("alpha", "lora_alpha"), "alpha"),
    **dict.fromkeys(("target_modules", "targets", "modules", "lora_target_modules"), "targets"),
    **dict.fromkeys(("lora_path", "adapter_path", "lora_adapter_path"), "init_path"),
}
"""Last word of a LoRA key of another system -> its name in `actor.lora`."""
NO_LORA = {
    "dropout": "trainer and sampler would compute with different factors",
    "dora": "it scales by norms of merged weights, which no sampler computes unmerged",
    "rslora": "the scale is alpha / rank; set actor.lora.alpha to alpha * sqrt(rank) instead",
    "bias": "only the factors are trained, biases are frozen",
    "modules_to_save": "only the factors are trained, no whole module",
    "qlora": "the frozen weights are held in actor.dtype, not quantised",
}
"""Part of a LoRA key -> why it is not supported."""

TRL = {
    "model_name_or_path": ("actor.path", "a folder, or a name on the Hub"),
    "dataset_name": ("train_dataset.path", "a file, a folder, or OWNER/NAME:CONFIG:SPLIT"),
    "output_dir": ("fileroot", "with experiment_name and trial_name below it"),
    "run_name": ("trial_name", ""),
    "learning_rate": ("actor.optimizer.lr", ""),
    "lr_scheduler_type": ("actor.optimizer.lr_scheduler_type", "constant, linear or cosine"),
    "warmup_ratio": ("actor.optimizer.warmup_steps_proportion", ""),
    "warmup_steps": ("actor.optimizer.warmup_steps_proportion", "a share of all steps"),
    "weight_decay": ("actor.optimizer.weight_decay", ""),
    "adam_beta1": ("actor.optimizer.beta1", ""),
    "adam_beta2": ("actor.optimizer.beta2", "default 0.95 instead of 0.999"),
    "adam_epsilon": ("actor.optimizer.eps", ""),
    "max_grad_norm": ("actor.optimizer.gradient_clipping", ""),
    "num_train_epochs": ("total_train_epochs", ""),
    "max_steps": ("total_train_steps", ""),
    "per_device_train_batch_size": (
        "train_dataset.batch_size",
        "prompts of all devices",
    ),
    "generation_batch_size": ("train_dataset.batch_size", "counts prompts, not completions"),
    "gradient_accumulation_steps": ("actor.mb_spec.n_mbs", "if unset, chosen to fit the memory"),
    "steps_per_generation": ("updates_per_batch", "optimizer steps per generated batch"),
    "num_iterations": ("updates_per_batch", "each on an equal part of the samples, no second pass"),
    "num_generations": ("gconfig.n_samples", ""),
    "num_generations_eval": ("evaluator.n_samples", ""),
    "max_completion_length": ("gconfig.max_new_tokens", ""),
    "max_prompt_length": ("train_dataset.max_length", "longer rows are dropped and counted"),
    "max_length": ("train_dataset.max_length", "in sft: tokens of prompt and answer"),
    "temperature": ("gconfig.temperature", ""),
    "top_p": ("gconfig.top_p", "1 for training"),
    "top_k": ("gconfig.top_k", "0 for training"),
    "beta": ("algorithm.kl_coef", "0 unless set, as in TRL"),
    "epsilon": ("algorithm.eps_clip", ""),
    "epsilon_high": ("algorithm.eps_clip_higher", ""),
    "delta": ("algorithm.c_clip", "on by default: 3"),
    "loss_type": (
        "algorithm.name",
        "or algorithm.loss_norm for the averaging alone",
    ),
    "importance_sampling_level": ("algorithm.name", "sequence is gspo"),
    "scale_rewards": ("algorithm.name", "without it: dr_grpo"),
    "mask_truncated_completions": ("algorithm.mask_truncated", ""),
    "sync_ref_model": ("ref_update_interval", ""),
    "ref_model_sync_steps": ("ref_update_interval", ""),
    "vllm_importance_sampling_correction": ("algorithm.correction", "tis"),
    "vllm_importance_sampling_cap": ("algorithm.correction_cap", ""),
    "use_vllm": ("allocation_mode", "vllm:d1|archon:d1"),
    "vllm_mode": ("allocation_mode", "| shares devices, + separates them"),
    "vllm_gpu_memory_utilization": ("rollout.server.gpu_memory_share", ""),
    "vllm_tensor_parallel_size": ("allocation_mode", "t: vllm:d1t2+archon:d2"),
    "reward_funcs": ("reward.fn", ""),
    "bf16": ("actor.dtype", "bfloat16; auto on a GPU"),
    "gradient_checkpointing": ("actor.gradient_checkpointing", ""),
    "save_steps": ("saver.freq_steps", ""),
    "save_strategy": ("saver.freq_epochs", "or freq_steps"),
    "resume_from_checkpoint": ("recover.mode", "auto: the same command resumes a run"),
    "eval_steps": ("evaluator.freq_steps", ""),
    "eval_strategy": ("evaluator.freq_steps", "or freq_epochs; needs valid_dataset.path"),
    "report_to": ("telemetry", "tensorboard: true, wandb.project or trackio.project"),
    "log_completions": ("telemetry.samples_per_step", "always, in samples.jsonl"),
    "packing": ("actor.mb_spec.max_tokens_per_mb", "rows are always packed, without leaking"),
    "dataset_text_field": ("train_dataset.response_key", "beside prompt_key or messages_key"),
    "completion_only_loss": ("train_dataset.response_key", "always: prompts are not trained"),
    "assistant_only_loss": ("train_dataset.messages_key", "always: only answers are trained"),
    "use_peft": ("actor.lora.rank", "the block actor.lora switches it on"),
    "peft_config": ("actor.lora.rank", "beside alpha and targets"),
    "lora_r": ("actor.lora.rank", ""),
    "lora_alpha": ("actor.lora.alpha", ""),
    "lora_target_modules": ("actor.lora.targets", "words: q k v o gate up down experts"),
}
"""Argument of TRL's GRPOConfig, SFTConfig and their parents -> (key here, remark)."""

VERL = {
    "actor_rollout_ref.model.path": ("actor.path", "a folder, or a name on the Hub"),
    "actor_rollout_ref.model.enable_gradient_checkpointing": ("actor.gradient_checkpointing", ""),
    "actor_rollout_ref.model.use_remove_padding": ("actor.pad_to_maximum", "packed by default"),
    "actor_rollout_ref.actor.strategy": ("allocation_mode", "archon or fsdp"),
    "actor_rollout_ref.actor.optim.lr": ("actor.optimizer.lr", ""),
    "actor_rollout_ref.actor.optim.weight_decay": ("actor.optimizer.weight_decay", ""),
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": (
        "actor.optimizer.warmup_steps_proportion",
        "",
    ),
    "actor_rollout_ref.actor.grad_clip": ("actor.optimizer.gradient_clipping", ""),
    "actor_rollout_ref.actor.ppo_mini_batch_size": (
        "updates_per_batch",
        "train_batch_size divided by it",
    ),
    "actor_rollout_ref.actor.ppo_epochs": ("updates_per_batch", "no second pass over a batch"),
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": (
        "actor.mb_spec.max_tokens_per_mb",
        "counts tokens",
    ),
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": ("actor.mb_spec.max_tokens_per_mb", ""),
    "actor_rollout_ref.actor.use_dynamic_bsz": ("actor.mb_spec.max_tokens_per_mb", "always"),
    "actor_rollout_ref.actor.clip_ratio": ("algorithm.eps_clip", ""),
    "actor_rollout_ref.actor.clip_ratio_low": ("algorithm.eps_clip", ""),
    "actor_rollout_ref.actor.clip_ratio_high": ("algorithm.eps_clip_higher", ""),
    "actor_rollout_ref.actor.clip_ratio_c": ("algorithm.c_clip", ""),
    "actor_rollout_ref.actor.loss_agg_mode": ("algorithm.loss_norm", "token-mean is token"),
    "actor_rollout_ref.actor.entropy_coeff": ("algorithm.entropy_coef", ""),
    "actor_rollout_ref.actor.use_kl_loss": ("use_kl_loss", ""),
    "actor_rollout_ref.actor.kl_loss_coef": ("algorithm.kl_coef", "with algorithm.kl_in: loss"),
    "actor_rollout_ref.actor.kl_loss_type": ("algorithm.kl_estimator", "low_var_kl is k3"),
    "actor_rollout_ref.actor.fsdp_config.param_offload": ("actor.archon.offload_params", ""),
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": ("actor.archon.offload_params", ""),
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": ("allocation_mode", "c: archon:d2c2"),
    "actor_rollout_ref.rollout.name": ("allocation_mode", "embedded, vllm or sglang"),
    "actor_rollout_ref.rollout.n": ("gconfig.n_samples", ""),
    "actor_rollout_ref.rollout.temperature": ("gconfig.temperature", ""),
    "actor_rollout_ref.rollout.top_p": ("gconfig.top_p", "1 for training"),
    "actor_rollout_ref.rollout.top_k": ("gconfig.top_k", "0 for training, not -1"),
    "actor_rollout_ref.rollout.tensor_model_parallel_size": ("allocation_mode", "vllm:d1t2+..."),
    "actor_rollout_ref.rollout.gpu_memory_utilization": ("rollout.server.gpu_memory_share", ""),
    "actor_rollout_ref.rollout.max_num_seqs": ("rollout.max_running", ""),
    "actor_rollout_ref.rollout.max_num_batched_tokens": ("rollout.max_batch_tokens", ""),
    "actor_rollout_ref.rollout.val_kwargs.n": ("evaluator.n_samples", ""),
    "actor_rollout_ref.rollout.val_kwargs.temperature": ("evaluator.temperature", ""),
    "critic.model.path": ("critic.path", ""),
    "critic.optim.lr": ("critic.optimizer.lr", ""),
    "critic.cliprange_value": ("algorithm.eps_clip_value", ""),
    "algorithm.adv_estimator": ("algorithm.name", "gae is ppo"),
    "algorithm.norm_adv_by_std_in_grpo": ("algorithm.name", "false is dr_grpo"),
    "algorithm.use_kl_in_reward": ("algorithm.kl_in", "reward"),
    "algorithm.kl_penalty": ("algorithm.kl_estimator", "kl is k1"),
    "algorithm.kl_ctrl.kl_coef": ("algorithm.kl_coef", "with algorithm.kl_in: reward"),
    "algorithm.filter_groups.enable": ("algorithm.dynamic_filter", ""),
    "data.train_files": ("train_dataset.path", ""),
    "data.val_files": ("valid_dataset.path", ""),
    "data.prompt_key": ("train_dataset.messages_key", "text: train_dataset.prompt_key"),
    "data.train_batch_size": ("train_dataset.batch_size", "prompts a step"),
    "data.max_prompt_length": ("train_dataset.max_length", "longer rows are dropped and counted"),
    "data.max_response_length": ("gconfig.max_new_tokens", ""),
    "data.shuffle": ("train_dataset.shuffle", ""),
    "custom_reward_function.path": ("reward.fn", "path/to/file.py:function"),
    "custom_reward_function.name": ("reward.fn", "path/to/file.py:function"),
    "reward_model.overlong_buffer.len": ("algorithm.overlong_buffer", ""),
    "reward_model.overlong_buffer.penalty_factor": ("algorithm.overlong_penalty", ""),
    "trainer.n_gpus_per_node": ("cluster.n_gpus_per_node", "if unset, the GPUs are counted"),
    "trainer.nnodes": ("cluster.n_nodes", ""),
    "trainer.total_epochs": ("total_train_epochs", ""),
    "trainer.total_training_steps": ("total_train_steps", ""),
    "trainer.save_freq": ("saver.freq_steps", ""),
    "trainer.resume_mode": ("recover.mode", "auto; disable is off"),
    "trainer.max_actor_ckpt_to_keep": ("recover.keep_last", ""),
    "trainer.test_freq": ("evaluator.freq_steps", ""),
    "trainer.logger": ("telemetry", "tensorboard: true, wandb.project or trackio.project"),
    "trainer.project_name": ("experiment_name", "of W&B: telemetry.wandb.project"),
    "trainer.experiment_name": ("trial_name", ""),
    "trainer.default_local_dir": ("fileroot", ""),
    "actor_rollout_ref.model.lora_rank": ("actor.lora.rank", ""),
    "actor_rollout_ref.model.lora_alpha": ("actor.lora.alpha", ""),
    "actor_rollout_ref.model.target_modules": ("actor.lora.targets", "all-linear, or words"),
}
"""Key of verl -> (key here, remark)."""

READ = {
    "model.path": "actor.path",
    "model.tokenizer_path": "actor.path",
    "model.dtype": "actor.dtype",
    "model.aux_loss_coef": "actor.archon.moe_aux_loss_coef",
    "model.z_loss_coef": "actor.archon.moe_z_loss_coef",
    "training.data_path": "train_dataset.path",
    "training.global_batch_size": "train_dataset.batch_size",
    "training.batch_size": "train_dataset.batch_size",
    "training.seq_len": "train_dataset.max_length",
    "training.seq_length": "train_dataset.max_length",
    "training.lr": "actor.optimizer.lr",
    "training.learning_rate": "actor.optimizer.lr",
    "training.weight_decay": "actor.optimizer.weight_decay",
    "training.beta1": "actor.optimizer.beta1",
    "training.beta2": "actor.optimizer.beta2",
    "training.eps": "actor.optimizer.eps",
    "training.grad_clip": "actor.optimizer.gradient_clipping",
    "training.max_grad_norm": "actor.optimizer.gradient_clipping",
    "training.lr_schedule": "actor.optimizer.lr_scheduler_type",
    "training.min_lr_ratio": "actor.optimizer.min_lr_ratio",
    "training.total_steps": "total_train_steps",
    "training.max_steps": "total_train_steps",
    "training.seed": "seed",
    "rollout.model_dir": "actor.path",
    "runner.output_dir": "fileroot",
    "runner.experiment_name": "experiment_name",
}
"""Keys of other systems -> Pentad's key that takes their value unchanged."""

IN_CONFIG_JSON = ("actor.path", "defined by the config.json of that folder")
MOE_ENGINE = {
    **{
        f"model.{name}": IN_CONFIG_JSON
        for name in (
            *("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"),
            *("d_model", "n_layers", "n_heads", "d_ff", "head_dim", "vocab_size", "max_seq_len"),
            *("num_experts", "top_k", "num_experts_per_tok", "moe_intermediate_size"),
        )
    },
    "training.micro_batch_size": ("actor.mb_spec.max_tokens_per_mb", "counts tokens"),
    "training.gradient_accumulation_steps": (
        "actor.mb_spec.n_mbs",
        "if unset, chosen to fit the memory",
    ),
    "training.warmup_steps": ("actor.optimizer.warmup_steps_proportion", "a share of all steps"),
    "training.checkpoint_interval": ("recover.freq_steps", ""),
    "training.log_interval": ("telemetry", "every step is recorded"),
    "elastic.min_nodes": ("elastic.min_ranks", "counts ranks; torchrun has --nnodes MIN:MAX"),
    "elastic.rendezvous": ("scheduler", "torchrun's: scripts/launch.sh takes RDZV_BACKEND"),
    "elastic.rdzv_backend": ("scheduler", "torchrun's: scripts/launch.sh takes RDZV_BACKEND"),
    "elastic.rdzv_endpoint": ("scheduler", "torchrun's: scripts/launch.sh takes RDZV_ENDPOINT"),
    "telemetry.log_dir": ("fileroot", "records go to its logs/USER/EXPERIMENT/TRIAL"),
    "elastic.max_restarts": ("recover.retries", "without a new step in between"),
    "elastic.heartbeat_interval": ("elastic.heartbeat_interval_s", ""),
    "elastic.heartbeat_interval_sec": ("elastic.heartbeat_interval_s", ""),
    "elastic.drop_grace": ("elastic.drop_grace_s", ""),
    "elastic.drop_grace_sec": ("elastic.drop_grace_s", ""),
}
"""Keys of moe-engine with another meaning or place in Pentad -> (key here, remark)."""

BY_COMPILE = ("actor.archon.enable_compile", "torch.compile fuses these operations")
BY_AC = ("actor.archon.ac_mode", "full or selective; with selective, ac_selective takes a stride")
RLINF = {
    "rollout.backend": ("allocation_mode", "sglang:d1|archon:d1"),
    "rollout.rollout_backend": ("allocation_mode", "sglang:d1|archon:d1"),
    "runner.seq_length": (
        "train_dataset.max_length",
        "of prompts; answers: gconfig.max_new_tokens",
    ),
    "actor.model.precision": ("actor.dtype", "float32 or bfloat16; fp16 is rejected"),
    "actor.model.tensor_model_parallel_size": ("allocation_mode", "t: archon:d1t2"),
    "actor.model.pipeline_model_parallel_size": ("allocation_mode", "p: archon:d1p2"),
    "actor.model.sequence_parallel": ("allocation_mode", "always with t"),
    "actor.model.recompute_method": BY_AC,
    "actor.model.recompute_granularity": BY_AC,
    "actor.model.recompute_num_layers": BY_AC,
    "actor.model.seq_length": ("train_dataset.max_length", "and gconfig.max_new_tokens"),
    "actor.model.encoder_seq_length": ("train_dataset.max_length", "and gconfig.max_new_tokens"),
    "actor.model.variable_seq_lengths": ("actor.pad_to_maximum", "off: rows are packed"),
    "actor.model.moe_token_dispatcher_type": ("allocation_mode", "e; always all-to-all"),
    "megatron.distributed_timeout_minutes": ("stall_abort_s", "seconds"),
    **{
        f"actor.model.{name}": IN_CONFIG_JSON
        for name in ("add_bias_linear", "activation", "normalization", "position_embedding_type")
    },
    **{
        f"actor.model.{name}": BY_COMPILE
        for name in (
            *("apply_rope_fusion", "bias_dropout_fusion", "bias_activation_fusion"),
            *("persist_layer_norm", "gradient_accumulation_fusion"),
        )
    },
}
"""Key of RLinf's Megatron recipes -> (key here, remark)."""

ONE_FORMAT = "recovery checkpoints have one format, and pentad convert writes Megatron's"
NO_OVERLAP = "Megatron's tensor-parallel communication is not overlapped with computation"
DEVICE = "runs use the GPUs that are visible, or the CPU; CUDA_VISIBLE_DEVICES selects them"
NO_CHOICE = {
    "device": DEVICE,
    "actor.device": DEVICE,
    "trainer.device": DEVICE,
    "actor.group_name": "processes have the names of their roles",
    "resource.actor_fwd": "the actor computes the log-probs of its samples on its own devices",
    "resource.advantages": "the trainer computes advantages, on no extra device",
    "resource.critic": "the critic is trained on the actor's devices",
    "rollout.group_name": "processes have the names of their roles",
    "actor.mcore_gpt": "the model of actor.path is built from its config.json",
    "actor.spec_name": "the model of actor.path is built from its config.json",
    "actor.model.attention_softmax_in_fp32": "it always is",
    "actor.model.batch_p2p_comm": "the schedule determines the sends between stages",
    "actor.model.use_cpu_initialization": "weights are read straight into their shards",
    "megatron.ddp_bucket_size": "gradients are summed once a step, in buckets of Megatron's choice",
    "megatron.distributed_backend": "ranks communicate by NCCL on GPUs and by gloo on CPUs",
    "megatron.ckpt_format": ONE_FORMAT,
    "megatron.use_dist_ckpt": ONE_FORMAT,
    "megatron.tp_comm_bootstrap_backend": NO_OVERLAP,
    "megatron.tp_comm_overlap_cfg": NO_OVERLAP,
}
"""Key of another system -> why Pentad has no such key."""

SPELLED = {
    "model": "actor",
    "training": "train_dataset and actor.optimizer",
    "fully_async": "mode: async",
    "hybrid": "mode: hybrid",
    "colocate": "mode: colocate",
    "async_training": "mode: async",
    "stats_logger": "telemetry",
    "tokenizer_path": "actor.path",
    "precision": "actor.dtype",
    "actor.precision": "actor.dtype",
    "actor.model": "actor.path",
    "actor.megatron": "megatron",
    "checkpoint_load_path": "actor.checkpoint_load_path",
    "actor.group_size": "gconfig.n_samples",
    "actor.kl_ctl": "algorithm.kl_coef",
    "actor.ppo_n_minibatches": "updates_per_batch",
    "actor.use_decoupled_loss": "algorithm.correction",
    "actor.use_lora": "actor.lora.rank",
    "actor.lora_rank": "actor.lora.rank",
    "actor.recompute_logprob": "algorithm.correction",
    "actor.optimizer.learning_rate": "actor.optimizer.lr",
    "rollout.max_head_offpolicyness": "max_staleness",
    "rollout.max_concurrent_rollouts": "rollout.max_concurrent_groups",
    "rollout.n": "gconfig.n_samples",
    "group_size": "gconfig.n_samples",
    "reward_fn": "reward.fn",
    "total_epochs": "total_train_epochs",
    "checkpoint.nvme_dir": "checkpoint.local_dir",
    "checkpoint.local_nvme_dir": "checkpoint.local_dir",
    "checkpoint.dir": "checkpoint.local_dir",
    "checkpoint.s3_uri": "checkpoint.remote_uri",
    "checkpoint.remote": "checkpoint.remote_uri",
    "checkpoint.s3_endpoint": "checkpoint.endpoint_url",
    "checkpoint.s3_endpoint_url": "checkpoint.endpoint_url",
    "checkpoint.io_workers": "checkpoint.async_workers",
    "checkpoint.num_workers": "checkpoint.async_workers",
    "checkpoint.keep_last": "checkpoint.retention",
    "resource.ref": "resource.reference",
}
"""Key of another system -> key here, where name similarity would not find it."""

REMARKED = {**TRL, **VERL, **MOE_ENGINE, **RLINF}
SPELLED.update(READ)
SPELLED.update({key: here for key, (here, _) in REMARKED.items()})


WORDS = {
    **{key.rpartition(".")[2]: here for key, (here, _) in VERL.items()},
    **{key: here for key, (here, _) in TRL.items()},
    **dict.fromkeys(
        ("clip_grad", "gradient_clip", "grad_norm"), "actor.optimizer.gradient_clipping"
    ),
    **dict.fromkeys(("clip_range", "cliprange", "clip_eps"), "algorithm.eps_clip"),
    **dict.fromkeys(("warmup", "num_warmup_steps"), "actor.optimizer.warmup_steps_proportion"),
    **dict.fromkeys(("lr_schedule", "scheduler_type"), "actor.optimizer.lr_scheduler_type"),
    **dict.fromkeys(("model_path", "model_name", "tokenizer", "tokenizer_path"), "actor.path"),
    **dict.fromkeys(("dataset", "dataset_path", "train_file"), "train_dataset.path"),
    **dict.fromkeys(("epochs", "num_epochs"), "total_train_epochs"),
    **dict.fromkeys(("num_steps", "train_steps"), "total_train_steps"),
    **dict.fromkeys(("log_dir", "logging_dir", "logdir"), "fileroot"),
    **dict.fromkeys(("max_tokens", "max_response_len"), "gconfig.max_new_tokens"),
    **dict.fromkeys(("num_samples", "group_size"), "gconfig.n_samples"),
    **dict.fromkeys(("num_gpus", "n_gpus", "gpus_per_node"), "cluster.n_gpus_per_node"),
    **dict.fromkeys(("num_nodes", "nodes"), "cluster.n_nodes"),
    **dict.fromkeys(("micro_batch_size", "mini_batch_size"), "actor.mb_spec.max_tokens_per_mb"),
    **dict.fromkeys(("kl_beta", "init_kl_coef"), "algorithm.kl_coef"),
    **dict.fromkeys(("betas", "adam_betas"), "actor.optimizer.beta1"),
    "target_modules": "actor.lora.targets",
}
"""Last word of another system's key, in any block -> key here."""
TOO_COMMON = ("enable", "len", "model", "n", "name", "path")
"""Words too general for WORDS: their meaning differs between blocks."""


def lora_answer(key: str, where: str) -> Problem | None:
    """The problem of a LoRA key that is not in `actor.lora`; None for any other key."""
    if not LORA.search(key) or hint(key):
        return None
    word = key.rpartition(".")[2]
    for part, reason in NO_LORA.items():
        if part in word:
            return Problem(where, reason, "leave it out")
    if name := LORA_NAMES.get(word):
        return Problem(where, "there is no such key", f"its name here is actor.lora.{name}")
    keys = ("rank", "alpha", "targets", "experts", "init_path")
    near = difflib.get_close_matches(word, keys, n=1, cutoff=0.5)
    remedy = f"did you mean actor.lora.{near[0]}?" if near else ""
    remedy = remedy or f"the keys of actor.lora are {', '.join(keys[:-1])} and {keys[-1]}"
    return Problem(where, "there is no such key", remedy)


def hint(key: str) -> str:
    """The remedy for a key of another system, such as its name here; empty if unknown."""
    if reason := NO_CHOICE.get(key):
        return f"{reason}: leave it out"
    here, remark = REMARKED.get(key, (SPELLED.get(key, ""), ""))
    return f"its name here is {here}" + (f" ({remark})" if remark else "") if here else ""


def by_last_word(key: str) -> str:
    """Pentad's key for the last word of an unknown key; in the block `critic`, the critic's key."""
    block, _, word = key.rpartition(".")
    here = "" if word in TOO_COMMON else WORDS.get(word, "")
    is_critic = block.partition(".")[0] == "critic"
    return here.replace("actor.", "critic.", 1) if is_critic else here


def is_block(key: str) -> bool:
    """Whether a block of that name has keys known from other systems."""
    names = (*SPELLED, *NO_CHOICE)
    return not LORA.search(key) and any(name.startswith(f"{key}.") for name in names)


HALF = ("fp16", "float16", "half")
"""Names of fp16, which other systems train in."""
