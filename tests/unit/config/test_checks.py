"""Every rule is broken once, and names where, why and what to do."""

import json

import pytest

from pentad.config.load import load_config
from pentad.config.resolve import resolve
from pentad.config.rules import algorithm, checkpoint, elastic, environments, inputs, layout, modes
from pentad.config.rules.check import all_rules
from pentad.config.rules.rule import RunFacts
from pentad.core.errors import UserError
from pentad.infer import requests as sampler_requests
from pentad.planner.prepare import prepare

QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("folders")
    for name, files in {
        "model": ["config.json", "model.safetensors"],
        "no_weights": ["config.json"],
        "empty": [],
    }.items():
        (root / name).mkdir()
        for file in files:
            (root / name / file).write_text(json.dumps(QWEN3))
    batches = root / "runs/logs/me/default/a/batches"
    batches.mkdir(parents=True)
    (batches / "step1.groups").write_text("")
    (root / "data.jsonl").write_text('{"prompt": "1"}\n')
    return root


BASE = ["actor.path={root}/model", "train_dataset.path={root}/data.jsonl", "reward.fn=exact_match"]
HELD_OUT = ["valid_dataset.path={root}/data.jsonl"]
APART = ["allocation_mode=embedded:d1+archon:d1"]

CONVERT = ["megatron.use_hf_ckpt=true", "megatron.ckpt_convertor.save_path={root}/mg"]
SLURM = [
    *("scheduler.type=slurm", "cluster.n_nodes=2", "cluster.n_gpus_per_node=4"),
    "cluster.allow_idle=true",
]
BROKEN = [
    (
        "oversampled_steps_wait_for_their_groups",
        "plan",
        ["rollout.oversample=1.5", "mode=hybrid", "max_staleness=2"],
        "rollout.oversample = 1.5",
        "max_staleness = 2 samples the next batch meanwhile",
    ),
    (
        "what_shrinks_has_checkpoints",
        "plan",
        ["elastic.enabled=true", "recover.mode=off", "allocation_mode=embedded:d1|archon:d2"],
        "elastic.enabled = true",
        "a smaller group resumes from a checkpoint, and recover.mode = off",
    ),
    (
        "the_layout_can_shrink",
        "plan",
        ["elastic.enabled=true"],
        "elastic.enabled = true",
        "archon:d1 has one rank: without it, none is left",
    ),
    (
        "the_layout_can_shrink",
        "plan",
        ["elastic.enabled=true", "elastic.min_ranks=3", "allocation_mode=embedded:d1|archon:d2"],
        "elastic.min_ranks = 3",
        "archon:d2 has 2 ranks; give at most 2",
    ),
    (
        "the_layout_can_shrink",
        "plan",
        ["elastic.enabled=true", "elastic.min_ranks=3", "allocation_mode=embedded:d1|archon:d2t2"],
        "elastic.min_ranks = 3",
        "the largest layout of archon:d2t2 on so few uses 2; give 2",
    ),
    (
        "grace_is_within_the_wait",
        "plan",
        ["elastic.drop_grace_s=20", "elastic.wait_timeout_s=10"],
        "elastic.drop_grace_s = 20",
        "the run has ended by then: elastic.wait_timeout_s = 10",
    ),
    (
        "heartbeats_come_before_a_stall",
        "plan",
        ["elastic.heartbeat_interval_s=4", "stall_warning_s=5", "stall_abort_s=10"],
        "elastic.heartbeat_interval_s = 4",
        "stall_abort_s = 10 must be at least four times that",
    ),
    (
        "slurm_nodes_hold_the_layout",
        "plan",
        [*SLURM, "allocation_mode=embedded:d1|archon:d3"],
        "cluster.n_nodes = 2",
        "gives each node as many ranks, and archon:d3 has 3",
    ),
    (
        "slurm_nodes_hold_the_layout",
        "plan",
        [*SLURM, "allocation_mode=vllm:d1t2+archon:d6"],
        "cluster.n_nodes = 2",
        "no node with cluster.n_gpus_per_node = 4 has room for vllm-0 beside archon:d6",
    ),
    (
        "slurm_nodes_hold_the_layout",
        "plan",
        [
            *(*SLURM, "cluster.n_nodes=3", "algorithm.kl_coef=0.1"),
            *("mode=async", "allocation_mode=archon[ref]:d1+embedded[rollout]:d1+archon[actor]:d8"),
        ],
        "cluster.n_nodes = 3",
        "no node with cluster.n_gpus_per_node = 4 has room for ref-0: models that score run on the "
        "first node, beside archon[actor]:d8; use more nodes to train on, smaller axes",
    ),
    (
        "one_process_holds_one_of_each",
        "plan",
        ["scheduler.processes=one", "allocation_mode=embedded:d2+archon:d1"],
        "scheduler.processes = one",
        "embedded:d2 has a process for each device",
    ),
    (
        "every_process_reaches_the_store",
        "plan",
        ["store=transfer_queue"],
        "store = transfer_queue",
        "scheduler.type = local has no Ray cluster",
    ),
    (
        "every_process_reaches_the_store",
        "plan",
        ["store=memory", "allocation_mode=embedded:d1|archon:d2"],
        "store = memory",
        "archon:d2 trains in other processes than the scheduler's, which cannot read it",
    ),
    (
        "every_process_reaches_the_store",
        "plan",
        ["store=memory", "scheduler.processes=separate"],
        "store = memory",
        "archon:d1 trains in other processes",
    ),
    (
        "embedded_samplers_share_gpus",
        "plan",
        ["cluster.share_gpus=true", "allocation_mode=vllm:d1+archon:d1"],
        "cluster.share_gpus = true",
        "rollout.server.gpu_memory_share",
    ),
    (
        "allowed_keys_are_keys",
        "train",
        ["recover.allow=[actor.optimizer.lrr]"],
        "recover.allow = [actor.optimizer.lrr]",
        "actor.optimizer.lrr is not a key",
    ),
    ("a_model_is_named", "train", ["actor.path="], "actor.path", "is not set"),
    (
        "the_actor_is_a_model_folder",
        "train",
        ["actor.path={root}/nope"],
        "actor.path = {root}/nope",
        "no such folder",
    ),
    (
        "the_actor_is_a_model_folder",
        "sft",
        ["actor.path={root}/empty"],
        "actor.path = {root}/empty",
        "no config.json",
    ),
    (
        "the_actor_is_a_model_folder",
        "train",
        ["actor.path={root}/no_weights"],
        "actor.path = {root}/no_weights",
        "actor.init_from_scratch",
    ),
    (
        "a_conversion_knows_where_to",
        "plan",
        ["megatron.use_hf_ckpt=true"],
        "megatron.ckpt_convertor.save_path",
        "is not set",
    ),
    (
        "a_conversion_knows_where_to",
        "train",
        [*CONVERT, "actor.checkpoint_load_path={root}/empty"],
        "actor.checkpoint_load_path = {root}/empty",
        "starts from save_path = {root}/mg",
    ),
    (
        "a_conversion_knows_where_to",
        "train",
        ["megatron.use_hf_ckpt=true", "megatron.ckpt_convertor.save_path={root}/model"],
        "megatron.ckpt_convertor.save_path = {root}/model",
        "is the folder that is converted",
    ),
    (
        "what_is_converted_is_there",
        "train",
        [*CONVERT, "megatron.ckpt_convertor.hf_model_path={root}/no_weights"],
        "megatron.ckpt_convertor.hf_model_path = {root}/no_weights",
        "no *.safetensors",
    ),
    (
        "checkpoints_to_start_from_are_there",
        "sft",
        ["actor.checkpoint_load_path={root}/nope"],
        "actor.checkpoint_load_path = {root}/nope",
        "there is no such folder",
    ),
    (
        "checkpoints_to_start_from_are_there",
        "plan",
        ["actor.checkpoint_load_path={root}/nope"],
        "actor.checkpoint_load_path = {root}/nope",
        "there is no such folder",
    ),
    (
        "weights_have_one_origin",
        "plan",
        ["actor.init_from_scratch=true", "actor.checkpoint_load_path={root}/empty"],
        "actor.init_from_scratch = true",
        "gives the weights",
    ),
    (
        "what_is_evaluated_has_one_origin",
        "eval",
        [*HELD_OUT, "actor.checkpoint_load_path={root}/mg"],
        "actor.checkpoint_load_path = {root}/mg",
        "eval judges the weights in actor.path = {root}/model",
    ),
    (
        "the_store_has_an_address",
        "sft",
        ["checkpoint.remote_uri=/mnt/models"],
        "checkpoint.remote_uri = /mnt/models",
        "not the address of a store; give s3",
    ),
    (
        "the_store_has_an_address",
        "plan",
        ["checkpoint.remote_uri=s3://My_Bucket/runs"],
        "checkpoint.remote_uri = s3://My_Bucket/runs",
        "and here it is 'My_Bucket'",
    ),
    (
        "the_endpoint_is_a_url",
        "train",
        ["checkpoint.endpoint_url=127.0.0.1:9000"],
        "checkpoint.endpoint_url = 127.0.0.1:9000",
        "http://127.0.0.1:9000",
    ),
    (
        "the_endpoint_is_a_url",
        "plan",
        ["checkpoint.endpoint_url=http://key:secret@127.0.0.1:9000"],
        "checkpoint.endpoint_url",
        "has credentials in it",
    ),
    (
        "the_critic_is_a_model_folder",
        "train",
        ["algorithm.name=ppo", "critic.path={root}/empty"],
        "critic.path = {root}/empty",
        "no config.json",
    ),
    (
        "the_reference_is_a_model_folder",
        "train",
        ["algorithm.kl_coef=0.1", "ref.path={root}/nope"],
        "ref.path = {root}/nope",
        "no such folder",
    ),
    (
        "distillation_has_a_teacher",
        "train",
        ["algorithm.name=distill"],
        "teacher.path",
        "needs a teacher",
    ),
    (
        "the_teacher_is_a_model_folder",
        "train",
        ["algorithm.name=distill", "teacher.path={root}/nope"],
        "teacher.path = {root}/nope",
        "no such folder",
    ),
    ("there_are_prompts", "train", ["train_dataset.path="], "train_dataset.path", "not set"),
    (
        "there_is_training_data",
        "sft",
        ["train_dataset.path=nope.jsonl"],
        "train_dataset.path = nope.jsonl",
        "no such file",
    ),
    (
        "held_out_data_exists",
        "train",
        ["valid_dataset.path=nope.jsonl"],
        "valid_dataset.path = nope.jsonl",
        "no such file",
    ),
    ("held_out_data_exists", "train", ["valid_dataset.limit=3"], "valid_dataset.path", "not set"),
    ("answers_are_scored", "train", ["reward.fn="], "reward.fn", "grpo needs rewards"),
    (
        "the_reward_can_be_found",
        "plan",
        ["reward.fn=exact"],
        "reward.fn = exact",
        "is neither exact_match, numeric, gsm8k, sort_digits, math, code, judge or reward_model",
    ),
    (
        "the_reward_can_be_found",
        "train",
        ["reward.fn={root}/nope.py:score"],
        "reward.fn = {root}/nope.py:score",
        "no file {root}/nope.py",
    ),
    (
        "every_reward_has_a_weight",
        "plan",
        ["reward.fn=[gsm8k, math]", "reward.weights=[1]"],
        "reward.weights = [1]",
        "reward.fn names 2 functions",
    ),
    ("there_is_a_reward_to_try", "reward", ["reward.fn="], "reward.fn", "nothing to try"),
    (
        "the_workflow_can_be_found",
        "train",
        ["rollout.workflow=multi"],
        "rollout.workflow = multi",
        "is neither single_turn",
    ),
    (
        "the_workflow_can_be_found",
        "train",
        ["rollout.workflow=gym:"],
        "rollout.workflow = gym:",
        "nothing follows gym:",
    ),
    (
        "the_workflow_can_be_found",
        "train",
        ["rollout.workflow=class:no/such.py:Counter"],
        "rollout.workflow = class:no/such.py:Counter",
        "there is no file no/such.py",
    ),
    (
        "a_judge_can_be_asked",
        "train",
        ["reward.fn=judge", "reward.judge.model=m", "reward.judge.url=http://x/v1"],
        "reward.judge.template",
        "is not set, and reward.fn = judge needs it",
    ),
    (
        "an_agent_workflow_has_an_agent",
        "train",
        ["rollout.workflow=agent"],
        "rollout.agent",
        "is not set",
    ),
    (
        "names_can_be_folders",
        "sft",
        ["trial_name=a/b"],
        "trial_name = a/b",
        "names a folder",
    ),
    (
        "names_can_be_folders",
        "train",
        ["experiment_name='..'"],
        "experiment_name = ..",
        "names a folder",
    ),
    *(
        (
            "names_can_be_folders",
            "plan",
            [f"trial_name={json.dumps(name)}"],
            f"trial_name = {shown}",
            rule,
        )
        for name, shown, rule in [
            ("a\x1b[2Jb", "a\\x1b[2Jb", "U+001B (control character)"),
            ("a\u202egnp", "a\\u202egnp", "U+202E (right-to-left override)"),
            ("a\u200bb", "a\\u200bb", "U+200B (zero width space)"),
            ("a\nb", "a\\nb", "U+000A"),
            ("-rf", "-rf", "begins with -"),
            ("~", "~", "begins with ~"),
            (" a", " a", "begins or ends with a space"),
            ("", '""', "is empty"),
            ("a\\b", "a\\b", "leads to another folder"),
            ("x" * 300, "x" * 57 + "...", "is longer than the 255 bytes"),
        ]
    ),
    (
        "paths_can_be_read",
        "plan",
        ['fileroot="runs\\u202Eselif"'],
        "fileroot = runs\\u202eselif",
        "U+202E (right-to-left override)",
    ),
    (
        "paths_can_be_read",
        "plan",
        ['train_dataset.path="a\\eb.jsonl"'],
        "train_dataset.path = a\\x1bb.jsonl",
        "U+001B",
    ),
    (
        "the_best_is_known",
        "train",
        ["saver.keep_best=2", "saver.freq_steps=5"],
        "saver.keep_best = 2",
        "use saver.keep_last",
    ),
    (
        "evaluation_has_prompts",
        "train",
        ["evaluator.freq_secs=5"],
        "evaluator.freq_secs = 5",
        "no valid_dataset",
    ),
    (
        "the_mode_fits_the_devices",
        "train",
        ["mode=hybrid", "allocation_mode=embedded:d1|archon:d1"],
        "mode = hybrid",
        "join them with +",
    ),
    (
        "the_mode_fits_the_devices",
        "train",
        ["mode=colocate", *APART],
        "mode = colocate",
        "must share devices",
    ),
    (
        "colocation_is_on_policy",
        "train",
        ["max_staleness=2"],
        "max_staleness = 2",
        "must be 0 in mode = colocate",
    ),
    (
        "offloaded_training_takes_turns",
        "train",
        [*APART, "offload_train=true"],
        "offload_train = true",
        "no other component uses the trainer's devices in mode = hybrid",
    ),
    (
        "offloaded_training_takes_turns",
        "train",
        ["offload_train=true", "offload_rollout=false"],
        "offload_train = true",
        "offload_rollout = false: the sampler would not free memory when training resumes",
    ),
    (
        "offloaded_training_takes_turns",
        "plan",
        [
            "offload_train=true",
            "allocation_mode=vllm:d1|archon:d1",
            "cluster.n_gpus_per_node=1",
            "rollout.server.weight_transport=broadcast",
        ],
        "rollout.server.weight_transport = broadcast",
        "weights are not on the GPU when the server reads them",
    ),
    (
        "groups_are_for_a_run_that_only_trains",
        "train",
        ["only=train"],
        "groups_from",
        "only = train trains the groups of another run",
    ),
    (
        "groups_are_for_a_run_that_only_trains",
        "plan",
        ["groups_from=runs/logs/me/a/b"],
        "groups_from = runs/logs/me/a/b",
        "is read only with only = train",
    ),
    (
        "groups_are_there",
        "train",
        ["only=train", "groups_from={root}"],
        "groups_from = {root}",
        "no step*.groups in its batches/",
    ),
    (
        "groups_are_of_another_run",
        "train",
        [
            *("only=train", "fileroot={root}/runs", "user=me", "trial_name=a"),
            "groups_from={root}/runs/logs/me/default/../default/a",
        ],
        "groups_from = {root}/runs/logs/me/default/../default/a",
        "is this run's own folder",
    ),
    (
        "one_side_is_no_job",
        "plan",
        [*SLURM, "only=rollout", "allocation_mode=embedded:d1|archon:d2"],
        "only = rollout",
        "the job runs both training",
    ),
    (
        "strict_needs_the_embedded_sampler",
        "train",
        ["strict=true", "allocation_mode=vllm:d1|archon:d1"],
        "strict = true",
        "vllm",
    ),
    (
        "fsdp_trains_models_without_a_file",
        "train",
        ["strict=true", "allocation_mode=embedded:d1|fsdp:d1"],
        "strict = true",
        "fsdp:d1 trains without one; use archon",
    ),
    (
        "strict_is_not_compiled",
        "train",
        ["strict=true", "actor.archon.enable_compile=true"],
        "actor.archon.enable_compile = true",
        "in a different order",
    ),
    (
        "strict_cuts_no_layer",
        "plan",
        ["strict=true", "allocation_mode=embedded:d1+archon:d1t2"],
        "strict = true",
        "tp = 2",
    ),
    (
        "replay_needs_a_server_in_one_stage",
        "plan",
        [
            "rollout.replay_routes=true",
            "actor.path=Qwen/Qwen3-30B-A3B",
            "allocation_mode=archon:d1+sglang:d1p2",
        ],
        "rollout.replay_routes = true",
        "sglang:d1p2 has pipeline stages",
    ),
    (
        "servers_fit_the_allocation",
        "train",
        ["allocation_mode=vllm:d1|archon:d1", "rollout.server.addresses=[node7]"],
        "rollout.server.addresses = ['node7']",
        "http://",
    ),
    (
        "servers_fit_the_allocation",
        "train",
        [
            *("allocation_mode=vllm:d1|archon:d1", "scheduler.processes=separate"),
            "rollout.server.weight_transport=ipc",
        ],
        "rollout.server.weight_transport = ipc",
        "are in host memory",
    ),
    (
        "training_samples_at_random",
        "train",
        ["gconfig.temperature=0"],
        "gconfig.temperature = 0",
        "samples that differ",
    ),
    (
        "training_draws_from_the_whole_distribution",
        "plan",
        ["gconfig.top_p=0.9"],
        "gconfig.top_p = 0.9",
        "whole distribution",
    ),
    (
        "model_files_can_be_found",
        "plan",
        ["model_files=[mine.py]"],
        "model_files = mine.py",
        "is not of the form PLACE:NAME",
    ),
    (
        "stop_texts_are_not_empty",
        "train",
        ["gconfig.stop=['', a]"],
        "gconfig.stop = ['', 'a']",
        "every text contains",
    ),
    (
        "training_draws_from_all_tokens",
        "train",
        ["gconfig.top_k=5"],
        "gconfig.top_k = 5",
        "whole distribution",
    ),
    (
        "groups_have_something_to_compare",
        "train",
        ["gconfig.n_samples=1", "algorithm.name=rloo"],
        "gconfig.n_samples = 1",
        "rloo compares",
    ),
    (
        "chunks_are_not_empty",
        "train",
        ["num_iters_per_train_update=33"],
        "num_iters_per_train_update = 33",
        "use at most 32",
    ),
    (
        "updates_are_of_equal_size",
        "train",
        ["updates_per_batch=12"],
        "updates_per_batch = 12",
        "= 256; use for instance 8",
    ),
    (
        "someone_computes_advantages",
        "train",
        ["compute_advantages_and_returns=false"],
        "compute_advantages_and_returns = false",
        "delivers no advantages",
    ),
    (
        "every_running_sequence_gets_its_token",
        "train",
        ["rollout.max_batch_tokens=100", "rollout.max_running=256"],
        "rollout.max_batch_tokens = 100",
        "rollout.max_running = 256",
    ),
    (
        "a_refreshed_reference_is_used",
        "train",
        ["ref_update_interval=5", "algorithm.kl_coef=0"],
        "ref_update_interval = 5",
        "the reference model is not used with algorithm.kl_coef = 0",
    ),
    (
        "a_refreshed_reference_is_used",
        "train",
        ["ref_update_interval=5"],
        "ref_update_interval = 5",
        "the reference model is not used with algorithm.kl_coef = null",
    ),
    (
        "details_belong_to_something",
        "train",
        ["algorithm.kl_estimator=k2"],
        "algorithm.kl_estimator = k2",
        "algorithm.kl_coef is not set",
    ),
    (
        "details_belong_to_something",
        "train",
        ["algorithm.correction_cap=3"],
        "algorithm.correction_cap = 3",
        "set it to tis or mis",
    ),
    (
        "details_belong_to_something",
        "train",
        ["algorithm.overlong_buffer=3"],
        "algorithm.overlong_buffer = 3",
        "algorithm.overlong_penalty is not set",
    ),
    (
        "a_rejection_has_its_own_bounds",
        "train",
        ["algorithm.name=kpop", "algorithm.rejection_cap=3"],
        "algorithm.rejection_cap = 3",
        "algorithm.rejection = binary_kl does not read it",
    ),
    (
        "kto_compares_answers",
        "dpo",
        ["preference.loss=kto", "train_dataset.batch_size=1"],
        "train_dataset.batch_size = 1",
        "kto compares each answer with others of its batch",
    ),
    (
        "a_reward_has_its_own_command",
        "dpo",
        ["preference.loss=reward"],
        "preference.loss = reward",
        "use pentad reward-model",
    ),
    (
        "a_reward_model_can_be_read",
        "train",
        ["reward.fn=reward_model"],
        "reward.model.path",
        "is not set, and reward.fn = reward_model needs it",
    ),
    (
        "an_interpolated_policy_is_an_old_one",
        "train",
        ["algorithm.prox_logp_method=loglinear"],
        "algorithm.prox_logp_method = loglinear",
        "updates_per_batch = 1 needs no old log-probs",
    ),
    (
        "decoupled_ppo_has_a_correction",
        "train",
        ["algorithm.decoupled=true", "algorithm.correction=none"],
        "algorithm.decoupled = true",
        "algorithm.correction = none drops",
    ),
    (
        "the_ratio_against_the_sampler_is_read",
        "train",
        ["algorithm.name=reinforce", "algorithm.correction=sampler_ratio"],
        "algorithm.correction = sampler_ratio",
        "its loss has no ratio",
    ),
    (
        "the_ratio_against_the_sampler_is_read",
        "train",
        ["algorithm.correction=sampler_ratio", "algorithm.correction_cap=3"],
        "algorithm.correction_cap = 3",
        "the clip bounds the ratio",
    ),
    (
        "the_length_that_counts_is_bounded",
        "train",
        ["algorithm.name=dr_grpo", "rollout.workflow=my.module:Flow"],
        "gconfig.max_sampled_tokens = null with rollout.workflow = my.module:Flow",
        "algorithm.loss_norm = constant",
    ),
    (
        "the_length_that_counts_is_bounded",
        "train",
        ["algorithm.overlong_penalty=1", "rollout.workflow=my.module:Flow"],
        "gconfig.max_sampled_tokens = null with rollout.workflow = my.module:Flow",
        "the overlong penalty",
    ),
    (
        "a_weighted_kl_term_is_unbiased",
        "plan",
        ["algorithm.kl_coef=0.1", "algorithm.kl_weighted=true", "algorithm.kl_estimator=k1"],
        "algorithm.kl_weighted = true",
        "only k3 in the loss is unbiased",
    ),
    (
        "a_penalty_on_moving_needs_several_updates",
        "plan",
        ["algorithm.name=kl_cov"],
        "algorithm.name = kl_cov",
        "updates_per_batch = 1 has none",
    ),
    (
        "covariances_have_a_range",
        "plan",
        ["algorithm.name=clip_cov", "algorithm.cov_low=6"],
        "algorithm.cov_low = 6",
        "must be below algorithm.cov_high = 5",
    ),
    (
        "off_policy_data_are_corrected",
        "train",
        ["mode=hybrid", "max_staleness=2", "algorithm.correction=none"],
        "algorithm.correction = none",
        "max_staleness = 2",
    ),
    (
        "off_policy_data_are_corrected",
        "train",
        ["updates_per_batch=2", "use_tis=false"],
        "use_tis = false",
        "set algorithm.allow_uncorrected=true",
    ),
    (
        "every_override_is_read",
        "train",
        ["algorithm.lam=0.9"],
        "algorithm.lam = 0.9",
        "grpo: it has no critic",
    ),
    (
        "every_override_is_read",
        "train",
        ["algorithm.name=reinforce", "algorithm.eps_clip=0.1"],
        "algorithm.eps_clip = 0.1",
        "no ratio",
    ),
    (
        "rewards_are_not_wiped_out",
        "train",
        ["algorithm.reward_scale=0"],
        "algorithm.reward_scale = 0",
        "equal",
    ),
    (
        "the_overlong_buffer_fits",
        "train",
        ["algorithm.overlong_penalty=1", "algorithm.overlong_buffer=257"],
        "algorithm.overlong_buffer = 257",
        "gconfig.max_new_tokens = 256",
    ),
    (
        "the_actor_engine_agrees",
        "sft",
        ["actor.archon.ac_mode=memory_budget", "actor.archon.enable_compile=false"],
        "actor.archon.ac_mode = memory_budget",
        "needs compile",
    ),
    (
        "the_actor_engine_agrees",
        "train",
        ["actor.archon.ac_mode=full", "actor.gradient_checkpointing=false"],
        "actor.archon.ac_mode = full",
        "switches checkpointing off",
    ),
    (
        "the_actor_engine_agrees",
        "train",
        ["actor.archon.ac_debug=true", "actor.archon.ac_mode=memory_budget"],
        "actor.archon.ac_debug = true",
        "which ac_mode = memory_budget needs, hides the operations that it would log",
    ),
    (
        "the_critic_engine_agrees",
        "train",
        [
            "algorithm.name=ppo",
            "critic.archon.ac_mode=memory_budget",
            "critic.archon.enable_compile=false",
        ],
        "critic.archon.ac_mode = memory_budget",
        "needs compile",
    ),
    (
        "the_evaluated_model_has_weights",
        "eval",
        [*HELD_OUT, "actor.path={root}/no_weights", "actor.init_from_scratch=true"],
        "actor.path = {root}/no_weights",
        "starts from random weights",
    ),
    (
        "several_environments_are_apart",
        "train",
        ["rollout.workflows=[{{workflow: single_turn, data: '{root}'}}]"],
        "train_dataset.path",
        "rollout.workflows names the environments and their data",
    ),
    (
        "one_environment_is_looked_at",
        "eval",
        [*HELD_OUT, "rollout.workflows=[{{workflow: single_turn}}]"],
        "rollout.workflows",
        "eval supports one environment",
    ),
    (
        "there_is_data_to_evaluate_on",
        "eval",
        ["valid_dataset.path="],
        "valid_dataset.path",
        "is not set; give --data",
    ),
    (
        "there_is_data_to_evaluate_on",
        "eval",
        ["valid_dataset.path={root}/nope"],
        "valid_dataset.path = {root}/nope",
        "no such file",
    ),
    (
        "evaluated_answers_are_scored",
        "eval",
        [*HELD_OUT, "reward.fn="],
        "reward.fn",
        "so answers cannot be scored",
    ),
    (
        "several_answers_differ",
        "eval",
        [*HELD_OUT, "evaluator.n_samples=4"],
        "evaluator.n_samples = 4",
        "evaluator.temperature = 0",
    ),
    (
        "servers_to_evaluate_have_addresses",
        "eval",
        [*HELD_OUT, "rollout.server.addresses=[http://h:99999]"],
        "rollout.server.addresses = http://h:99999",
        "Port out of range",
    ),
]


def overrides_for(folders, overrides):
    return [override.format(root=folders) for override in [*BASE, *overrides]]


@pytest.mark.parametrize(
    ("command", "mode", "allocation"),
    [
        ("train", "colocate", "embedded:d1|archon:d1"),
        ("eval", "colocate", "embedded:d1|archon:d1"),
        ("sft", None, "archon:d1"),
    ],
)
def test_a_good_recipe_passes(folders, command, mode, allocation):
    config, notes = prepare(None, overrides_for(folders, HELD_OUT), command)
    assert (config.mode, config.allocation_mode) == (mode, allocation)


@pytest.mark.parametrize(("name", "command", "overrides", "where", "said"), BROKEN)
def test_each_rule_catches_what_it_is_for(folders, name, command, overrides, where, said):
    with pytest.raises(UserError) as caught:
        prepare(None, overrides_for(folders, overrides), command)
    (problem,) = caught.value.problems
    assert problem.where == where.format(root=folders)
    assert said.format(root=folders) in str(problem)
    assert problem.remedy


@pytest.mark.parametrize("command", ["plan", "train"])
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (["allocation_mode=vllm:d1|fsdp:d1"], "fsdp runs transformers' own layers"),
        (["allocation_mode=embedded:d1|archon:c2"], "c2 splits the tokens of whole rows"),
        (["strict=true"], "strict mode computes every row as the sampler does"),
    ],
)
def test_tree_training_is_refused_where_it_cannot_be(folders, command, changes, why):
    asked = ["actor.enable_tree_training=true", *changes]
    with pytest.raises(UserError) as caught:
        prepare(None, overrides_for(folders, asked), command)
    (problem,) = [p for p in caught.value.problems if "tree" in p.where]
    assert problem.where == "actor.enable_tree_training = true"
    assert why in problem.rule and problem.remedy == "leave it out"


@pytest.mark.parametrize("command", ["plan", "train"])
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (["allocation_mode=embedded:d1|archon:d2"], "communicate during a pass"),
        (["strict=true"], "strict mode prepares its kernels on the host"),
        (["actor.archon.offload_params=true"], "parameters are copied from the host"),
        (["offload_train=true", "mode=colocate"], "offload_train = true moves the weights"),
    ],
)
def test_graphs_are_refused_where_passes_cannot_be_captured(folders, command, changes, why):
    asked = ["actor.archon.cuda_graphs=true", *changes]
    with pytest.raises(UserError) as caught:
        prepare(None, overrides_for(folders, asked), command)
    (problem,) = [p for p in caught.value.problems if "graphs" in p.where]
    assert problem.where == "actor.archon.cuda_graphs = true"
    assert why in problem.rule
    assert problem.remedy == "leave it out"


def test_every_rule_is_broken_above():
    subjects = (inputs, environments, modes, algorithm, checkpoint, elastic, layout)
    names = {rule.check.__name__ for subject in subjects for rule in subject.RULES.all}
    of_layouts = {"there_is_a_sampler", "the_layout_is_valid", "idle_devices"}
    assert names - of_layouts == {name for name, *_ in BROKEN}


@pytest.mark.parametrize(("name", "command", "overrides", "where", "said"), BROKEN)
def test_a_rule_is_silent_when_a_key_it_reads_is_known_to_be_wrong(
    folders, name, command, overrides, where, said
):
    (rule,) = [rule for rule in all_rules() if rule.check.__name__ == name]
    config, _ = resolve(load_config(None, overrides_for(folders, overrides)))
    facts = RunFacts(command=command)
    assert rule.problems(config, facts, frozenset({"stall_warning_s"})), "a key that it ignores"
    keys = {override.partition("=")[0] for override in overrides} | {where.partition(" = ")[0]}
    wrong = [key for key in keys if not rule.problems(config, facts, frozenset({key}))]
    assert wrong, "it depends on a key that the user gave"
    for key in wrong:
        assert not rule.problems(config, facts, frozenset({key.partition(".")[0]})), "its block"


def test_a_rule_reports_everything_it_finds():
    overrides = ["algorithm.lam=0.9", "algorithm.gamma=0.9", "algorithm.kl_in=loss", "user=a/b"]
    overrides += ["algorithm.correction_cap=2", "algorithm.correction_level=token", "trial_name=."]
    with pytest.raises(UserError) as caught:
        prepare(None, ["actor.path=Qwen/Qwen3-0.6B", *overrides])
    found = {problem.where.split(" = ")[0] for problem in caught.value.problems}
    assert found == {override.partition("=")[0] for override in overrides}


def test_an_override_without_effect_is_reported_beside_other_mistakes_of_its_block():
    """A key that is unknown or wrong says nothing of the others in the block."""
    wrong = ["algorithm.eps_clip=wide", "algorithm.nothing=1", "algorithm.c_clips=3"]
    with pytest.raises(UserError) as caught:
        prepare(
            None, ["actor.path=Qwen/Qwen3-0.6B", "algorithm.name=grpo", "algorithm.lam=1", *wrong]
        )
    found = {problem.where.split(" = ")[0] for problem in caught.value.problems}
    assert found == {
        "algorithm.eps_clip",
        "algorithm.nothing",
        "algorithm.c_clips",
        "algorithm.lam",
    }


def test_a_run_that_only_trains_needs_nothing_to_sample_with(folders):
    groups = ["only=train", "groups_from={root}/runs/logs/me/default/a", "train_dataset.path="]
    for devices, allocation in (
        (2, "archon:d2"),
        (2, "embedded:d2+archon:d2"),
        (1, "vllm:d2|archon:d1"),
    ):
        layout = [f"cluster.n_gpus_per_node={devices}", f"allocation_mode={allocation}"]
        given = overrides_for(folders, [*groups, "reward.fn=", *layout])
        prepare(None, given, "train")
        with pytest.raises(UserError, match="train_dataset.path: is not set"):
            prepare(None, [one for one in given if "groups_from" not in one], "sft")
    wide = [*groups, "cluster.n_gpus_per_node=2", "allocation_mode=embedded:d1+archon:d4"]
    with pytest.raises(UserError, match="needs 4 devices, and"):
        prepare(None, overrides_for(folders, wide), "train")


def test_rules_for_rollout_do_not_stop_sft(folders):
    overrides = overrides_for(folders, ["gconfig.temperature=0", "reward.fn="])
    prepare(None, overrides, "sft")


@pytest.mark.parametrize("fn", ["math", "my.rewards:score", "{root}/data.jsonl:x", "a.b:c.d"])
def test_rewards_of_ones_own_are_taken(folders, fn):
    prepare(None, overrides_for(folders, [f"reward.fn={fn}"]), "train")


def test_plan_needs_no_files():
    prepare(None, ["actor.path=Qwen/Qwen3-0.6B"], "plan")


def test_problems_of_the_allocation_string_come_with_the_others(folders):
    with pytest.raises(UserError) as caught:
        prepare(
            None,
            overrides_for(folders, ["allocation_mode=archon:d1q2", "gconfig.temperature=0"]),
            "train",
        )
    temperature, allocation = map(str, caught.value.problems)
    assert temperature.startswith("gconfig.temperature = 0")
    assert allocation.endswith("    archon:d1q2\n             ^")


def test_a_converted_checkpoint_is_what_training_starts_from(folders):
    config, notes = prepare(None, overrides_for(folders, CONVERT), "train")
    assert config.actor.checkpoint_load_path == f"{folders}/mg"
    assert any("megatron.use_hf_ckpt = true" in note for note in notes)
    again, _ = resolve(config)
    assert again == config


def test_a_megatron_checkpoint_needs_no_hf_weights(folders):
    start = ["actor.path={root}/no_weights", "actor.checkpoint_load_path={root}/empty"]
    prepare(None, overrides_for(folders, start), "train")


def test_a_temperature_that_the_sampler_refuses_is_refused_before():
    with pytest.raises(UserError, match="gconfig.temperature = 0.0001: below 0.001"):
        prepare(None, ["actor.path=Qwen/Qwen3-8B", "gconfig.temperature=1e-4"])
    prepare(None, ["actor.path=Qwen/Qwen3-8B", "gconfig.temperature=1e-3"])
    assert sampler_requests.MIN_TEMPERATURE == algorithm.MIN_TEMPERATURE


def test_missing_starts_of_a_plan_are_reported_together():
    start = ["actor.lora.rank=8", "actor.lora.init_path=/nope/a", "critic.path=/nope/c"]
    start += ["actor.path=/nope/m", "algorithm.name=ppo", "critic.checkpoint_load_path=/nope/b"]
    with pytest.raises(UserError) as caught:
        prepare(None, start)
    found = sorted(problem.where for problem in caught.value.problems)
    assert found == [
        "actor.lora.init_path = /nope/a",
        "actor.path = /nope/m",
        "critic.checkpoint_load_path = /nope/b",
        "critic.path = /nope/c",
    ]


@pytest.mark.parametrize(
    "url, rule",
    [
        ("http://h", None),
        ("https://h:65535/v1", None),
        ("http://[::1]:9000", None),
        ("h:9000", "is not an address http://HOST:PORT"),
        ("ftp://h", "is not an address http://HOST:PORT"),
        ("http://:80", "is not an address http://HOST:PORT"),
        ("http://h:0", "0 is not a port"),
        ("http://h:65536", "Port out of range"),
        ("http://h:99999", "Port out of range"),
        ("http://h:x", "Port could not be cast"),
        ("http://[::1", "Invalid IPv6"),
    ],
)
def test_addresses_of_servers_are_refused_wherever_they_are_named(url, rule):
    said = inputs.url_problem(url)
    assert said == "" if rule is None else rule in said


@pytest.mark.parametrize(
    "overrides",
    [
        ["checkpoint.endpoint_url={url}"],
        ["reward.fn=judge", "reward.judge.url={url}"],
        ["rollout.workflow=openenv:{url}"],
        ["rollout.workflow=mcp:{url}"],
        ["allocation_mode=vllm:d1+archon:d1", "rollout.server.addresses=[{url}]"],
    ],
)
def test_no_address_has_a_port_beyond_the_range(folders, overrides):
    """The system would take it modulo 65,536, and ask another program."""
    with pytest.raises(UserError, match="http://h:99999.*Port out of range"):
        given = [one.format(url="http://h:99999") for one in overrides]
        prepare(None, overrides_for(folders, given), "plan")
