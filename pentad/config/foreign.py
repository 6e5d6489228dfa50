"""Keys that people know from the systems Pentad follows and that it spells otherwise, or lacks."""

from __future__ import annotations

NOT_BUILT = {
    "recover": "AReaL's recovery checkpoints",
    "elastic": "moe-engine's elastic runtime",
    "checkpoint": "moe-engine's checkpoint tiers",
    "megatron.ddp_bucket_size": "RLinf's Megatron backend",
    "megatron.distributed_backend": "RLinf's Megatron backend",
    "megatron.distributed_timeout_minutes": "RLinf's Megatron backend",
    "megatron.ckpt_format": "RLinf's Megatron backend",
    "megatron.use_dist_ckpt": "RLinf's Megatron backend",
    "megatron.tp_comm_bootstrap_backend": "RLinf's Megatron backend",
    "megatron.tp_comm_overlap_cfg": "RLinf's Megatron backend",
    "actor.lora_rank": "LoRA training",
    "actor.use_lora": "LoRA training",
}
"""Key -> what it belongs to. It and everything below it is honestly refused."""

SPELLED = {
    "parallelism": "allocation_mode",
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
    "actor.training_backend": "allocation_mode",
    "actor.group_size": "gconfig.n_samples",
    "actor.kl_ctl": "algorithm.kl_coef",
    "actor.ppo_n_minibatches": "updates_per_batch",
    "actor.use_decoupled_loss": "algorithm.correction",
    "actor.recompute_logprob": "algorithm.correction",
    "actor.optimizer.learning_rate": "actor.optimizer.lr",
    "algorithm.adv_estimator": "algorithm.name",
    "rollout.max_head_offpolicyness": "max_staleness",
    "rollout.max_concurrent_rollouts": "rollout.max_concurrent_groups",
    "rollout.n": "gconfig.n_samples",
    "group_size": "gconfig.n_samples",
    "learning_rate": "actor.optimizer.lr",
    "reward_fn": "reward.fn",
    "total_epochs": "total_train_epochs",
}
"""Key elsewhere -> key here, where the nearest name would not find it."""

HALF = ("fp16", "float16", "half")
"""A number format that other systems train in."""
