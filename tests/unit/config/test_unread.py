"""Every key that is given and not read is reported, and what is read is not."""

import pytest

from pentad.config.describe import fields, section_of
from pentad.config.load import load_config
from pentad.config.resolve import resolve
from pentad.config.rules.unused_keys import (
    OF_ROLLOUT,
    READERS,
    dataset_readers,
    model_readers,
    unread,
)

PPO = "algorithm.name=ppo"


def said(*overrides, command="plan"):
    return unread(resolve(load_config(None, overrides))[0], command)


@pytest.mark.parametrize(
    ("override", "why", "read_with"),
    [
        ("actor.archon.layers_per_stage=[1, 1]", "no pipeline", ["allocation_mode=archon:d1p2"]),
        ("actor.archon.stages_per_rank=2", "no pipeline", ["allocation_mode=archon:d1p2"]),
        ("actor.archon.pp_schedule=1F1B", "no pipeline", ["allocation_mode=archon:d1p2"]),
        (
            "critic.archon.layers_per_stage=[1, 1]",
            "has no critic",
            [PPO, "allocation_mode=archon:d1p2"],
        ),
        (
            "actor.archon.ac_selective=2",
            "ac_mode = full does not select",
            ["actor.archon.ac_mode=selective"],
        ),
        (
            "actor.archon.ac_memory_budget=0.25",
            "has no budget",
            ["actor.archon.ac_mode=memory_budget"],
        ),
        ("critic.archon.keep_logits=true", "has no critic", None),
        (
            "actor.optimizer.min_lr_ratio=0.1",
            "constant does not decay",
            ["actor.optimizer.lr_scheduler_type=cosine"],
        ),
        ("critic.path=x", "has no critic", [PPO]),
        ("critic.optimizer.lr=0.5", "has no critic", [PPO]),
        ("ref.path=x", "no reference model", ["algorithm.kl_coef=0.01"]),
        ("teacher.path=x", "distill has a teacher", ["algorithm.name=distill"]),
        (
            "megatron.transformer_impl=local",
            "nothing by megatron",
            ["allocation_mode=embedded:d1|megatron:d1"],
        ),
        ("megatron.ckpt_convertor.process_num=4", "converts", ["megatron.use_hf_ckpt=true"]),
        ("checkpoint.retention=9", "names no store", ["checkpoint.remote_uri=s3://abc/x"]),
        ("evaluator.n_samples=4", "no valid_dataset", ["valid_dataset.path=x"]),
        ("reward.timeout_s=3", "reward.fn is not set", ["reward.fn=gsm8k"]),
        (
            "rollout.max_batch_tokens=512",
            "SGLang chooses it",
            ["allocation_mode=vllm:d1|archon:d1"],
        ),
        (
            "rollout.server.transfer_folder=x",
            "disk writes there",
            ["rollout.server.weight_transport=disk"],
        ),
        (
            "num_data_storage_units=2",
            "groups are in memory or in files",
            ["scheduler.type=ray", "allocation_mode=embedded:d1+archon:d1"],
        ),
        ("megatron.ckpt_convertor.use_gpu_num=1", "runs on the CPU", None),
    ],
)
def test_a_key_that_is_not_read_is_told_until_it_is_read(override, why, read_with):
    other = {
        "actor.archon.ac_selective=2": ["actor.archon.ac_mode=full"],
        "rollout.max_batch_tokens=512": ["allocation_mode=sglang:d1|archon:d1"],
        "rollout.server.transfer_folder=x": ["rollout.server.weight_transport=broadcast"],
    }.get(override, [])
    (sentence,) = said(override, *other)
    key, _, value = override.partition("=")
    assert sentence.startswith(f"{key} = {value}: without effect, ")
    assert why in sentence
    if read_with is not None:
        assert [text for text in said(override, *read_with) if text.startswith(f"{key} =")] == []


def test_a_critic_has_the_engine_keys_of_the_actor():
    assert said(PPO, "critic.archon.layers_per_stage=[1, 1]") == [
        "critic.archon.layers_per_stage = [1, 1]: without effect, the layout has no pipeline (p1)"
    ]


def test_a_critic_has_no_logits_to_keep():
    assert said(PPO, "critic.archon.keep_logits=true") == [
        "critic.archon.keep_logits = true: without effect, a critic's head gives one value a token"
    ]


def test_another_prompt_column_is_not_read_beside_messages():
    given = ["train_dataset.prompt_key=q", "train_dataset.messages_key=m"]
    assert said(*given) == [
        "train_dataset.prompt_key = q: without effect, train_dataset.messages_key = m takes its "
        "place"
    ]
    assert said(given[0]) == []


def test_only_steps_that_oversample_carry_groups():
    assert said("rollout.max_carries=2", "rollout.oversample=1.5") == []
    assert said("rollout.max_carries=2") == [
        "rollout.max_carries = 2: without effect, rollout.oversample = 1 aborts no group"
    ]
    assert said("rollout.oversample=1.5", "only=rollout") == [
        "rollout.oversample = 1.5: without effect, only = rollout waits for every group: its "
        "weights do not change"
    ]


def test_servers_that_run_are_not_told_how_to_start():
    given = ["allocation_mode=vllm:d1+archon:d1", "rollout.server.args=[--x]"]
    address = "rollout.server.addresses=[http://a:1]"
    assert said(*given) == []
    assert said(*given, address, "rollout.max_running=3") == [
        "rollout.max_running = 3: without effect, the servers of rollout.server.addresses run "
        "already",
        "rollout.server.args = [--x]: without effect, the servers of rollout.server.addresses run "
        "already",
    ]


def test_sft_tells_what_only_train_reads():
    assert said("strict=true", "gconfig.top_k=3", command="train") == []
    assert said("strict=true", "gconfig.top_k=3", command="sft") == [
        "gconfig.top_k = 3: without effect, sft does not sample",
        "strict = true: without effect, sft does not sample",
    ]


@pytest.mark.parametrize(
    ("side", "keys"),
    [
        (
            "train",
            {
                *("offload_train=true", "reward.fn=math", "reward.timeout_s=3", "max_staleness=2"),
                *("train_dataset.batch_size=3", "train_dataset.max_length=9"),
                *("train_dataset.limit=7", "train_dataset.answer_key=a"),
                *("use_streaming_dataset=true", "store=ray", "num_data_storage_units=2"),
            },
        ),
        (
            "rollout",
            {
                *("recover.freq_steps=5", "recover.freq_secs=9", "ref_update_interval=2"),
                *("updates_per_batch=2", "num_iters_per_train_update=2", "offload_train=true"),
                *("store=ray", "num_data_storage_units=2"),
            },
        ),
    ],
)
def test_one_side_alone_tells_what_it_does_not_read(side, keys):
    assert said(f"only={side}", command="train") == []
    (other,) = {"train", "rollout"} - {side}
    found = {text.partition(": without")[0] for text in said(f"only={side}", *keys)}
    assert found == {key.replace("=", " = ") for key in keys}
    both = {"offload_train=true", "store=ray", "num_data_storage_units=2"}
    assert said(f"only={other}", *sorted(keys - both)) == []
    assert said("scheduler.type=ray", *sorted(keys)) == []


def test_defaults_are_silent():
    for command in ("train", "sft", "plan"):
        assert said(command=command) == []
        assert said(PPO, "allocation_mode=embedded:d2|archon:d2p2", command="train") == []


def test_every_key_of_the_table_is_a_key():
    config = load_config(None, ["valid_dataset.path=x"])
    readers = [
        *READERS,
        *model_readers("actor", config.actor),
        *model_readers("critic", config.critic),
        *dataset_readers("train_dataset", config.train_dataset),
    ]
    keys = {key for reader in readers for key in reader.keys} | set(OF_ROLLOUT)
    assert keys <= set(fields())
    assert section_of(fields()["critic"].annotation) is not None
