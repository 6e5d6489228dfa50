"""Every rule of a layout refuses what breaks it, says what would work, and lets the rest pass."""

import json

import pytest
from rule_checks import check_layout

from pentad.config.load import read_config
from pentad.config.resolve import resolve
from pentad.config.rules.layout import layout_notes, layout_problems
from pentad.core.dims import ModelDims
from pentad.models.catalog import public_dims

MODELS = public_dims()

DENSE = MODELS["Qwen3-8B"]  # 32 heads, 8 kv heads, 36 layers, width 12288
MOE = MODELS["Qwen3-30B-A3B"]  # 32 heads, 4 kv heads, 48 layers, 128 experts of 768
ODD = MODELS["Qwen2.5-7B"]  # 28 heads, 4 kv heads, 28 layers, width 18944
FORTY = MODELS["Qwen3-14B"]  # 40 heads, 8 kv heads


def problems(allocation: str, *overrides: str, dims: ModelDims = DENSE, devices: int | None = None):
    reading = read_config(None, [f"allocation_mode={allocation}", *overrides])
    assert not reading.problems
    config, _ = resolve(reading.config)
    return layout_problems(config, dims, devices)


RED = [
    # (rule, model, allocation and overrides, devices, what is said, what is offered)
    ("cluster_size", DENSE, ["sglang:d4t2+archon:d4p2t2"], 16, "16 + 8 = 24 devices", "n_nodes=2"),
    ("roles", DENSE, ["vllm[rollout]:d1+archon[actr]:d1"], None, "actr is not a role", "actor"),
    ("roles", DENSE, ["vllm[actor]:d1"], None, "vllm samples and cannot be actor", "rollout"),
    ("roles", DENSE, ["vllm:d1+archon[rollout]:d1"], None, "two components would be", "name this"),
    ("roles", DENSE, ["vllm:d1"], None, "has no component that trains", "archon:d1"),
    ("embedded", DENSE, ["embedded:d2t2+archon:d1"], None, "t2: the embedded", "embedded:d4, or"),
    ("embedded", DENSE, ["embedded:p2+archon:d1"], None, "p2: the embedded", "embedded:d2"),
    ("sampler", ODD, ["vllm:t8+archon:d1"], None, "t8 of vllm must divide num_heads = 28", "7, 14"),
    ("sampler", DENSE, ["vllm:p64+archon:d1"], None, "p64 of vllm exceeds num_layers = 36", "36"),
    ("fsdp", DENSE, ["fsdp:t16"], None, "t16 of fsdp must divide num_kv_heads = 8", "1, 2, 4, 8"),
    ("fsdp", MOE, ["fsdp:d2t8"], None, "t8 of fsdp must divide num_kv_heads = 4", "1, 2, 4"),
    ("fsdp", DENSE, ["fsdp:d2e2"], None, "e2 needs experts", "use fsdp:d2"),
    ("fsdp", MOE, ["fsdp:d256e256"], None, "leave a rank of e256 none", "e can be 1, 2, 4"),
    (
        "fsdp",
        MOE,
        ["fsdp:d2e2", "actor.archon.enable_compile=true"],
        None,
        "e2 of fsdp sends tokens to the experts of qwen3_moe, and does not compile that",
        "or use archon",
    ),
    (
        "fsdp",
        MOE,
        ["fsdp:d2t2e4", "actor.archon.ac_mode=memory_budget"],
        None,
        "t2 e4 of fsdp sends tokens",
        "use selective or full",
    ),
    ("fsdp", MOE, ["fsdp:d2", "actor.archon.moe_z_loss_coef=1"], None, "needs a model file", "out"),
    (
        "heads",
        ODD,
        ["archon:t8"],
        None,
        "t8 * c1 = 8 must divide num_heads = 28",
        "with c1, t can be 1, 2, 4",
    ),
    (
        "heads",
        DENSE,
        ["archon:t4c16"],
        None,
        "t4 * c16 = 64 must divide",
        "with c16, t can be 1, 2",
    ),
    (
        "heads",
        FORTY,
        ["archon:c5"],
        None,
        "divide num_kv_heads = 8 or be a mul",
        "with c5, t can be 8, or with t1, c can be 1, 2, 4, 8, 40",
    ),
    ("experts", DENSE, ["archon:d2e2"], None, "e2 needs experts", "use archon:d2"),
    ("experts", DENSE, ["archon:(attn:d2|ffn:e2)"], None, "an ffn side needs experts", "archon:d2"),
    (
        "experts",
        MOE,
        ["archon:d144e144"],
        None,
        "num_experts = 128 leave a rank of e144 none",
        "e can be 1, 2, 3, 4, 6, 8, 9, 12, 16, 18, 24, 36, 48, 72 on 144 ranks",
    ),
    (
        "replicas",
        DENSE,
        ["archon:d6", "actor.archon.dp_replicate=4"],
        None,
        "must divide d6",
        "3, 6",
    ),
    ("replicas", MOE, ["archon:d4e4", "actor.archon.dp_replicate=2"], None, "leaves 2 ranks", "1"),
    ("layers", DENSE, ["archon:p32"], None, "p32 x 2 stages a rank", "at most 18"),
    ("layers", DENSE, ["archon:p40", "actor.archon.pp_schedule=1F1B"], None, "40 stages", "36"),
    (
        "schedule",
        DENSE,
        ["archon:p2", "actor.archon.pp_schedule=1F1B", "actor.archon.stages_per_rank=2"],
        None,
        "1F1B takes exactly 1",
        "Interleaved1F1B, InterleavedZeroBubble, ZBVZeroBubble",
    ),
    (
        "schedule",
        DENSE,
        ["archon:p2", "actor.archon.stages_per_rank=1"],
        None,
        "Interleaved1F1B takes at least 2",
        "or use 1F1B",
    ),
    (
        "schedule",
        DENSE,
        ["archon:p2", "actor.archon.pp_schedule=ZBV", "actor.archon.stages_per_rank=3"],
        None,
        "ZBVZeroBubble takes exactly 2",
        "Interleaved1F1B",
    ),
    (
        "rounds",
        DENSE,
        ["archon:p4", "actor.mb_spec.n_mbs=9"],
        None,
        "rounds of p4 microbatches",
        "use 8 or 12",
    ),
]
RESHARD = "actor.archon.reshard_after_forward_policy=always"
RED += [
    ("given", DENSE, ["archon:p2", "actor.archon.layers_per_stage=[18,18]"], None,
     "2 numbers for p2 x 2 stages a rank = 4", "one for each stage"),
    ("given", DENSE, ["archon:p2", "actor.archon.layers_per_stage=[9,9,9,8]"], None,
     "sums to 35, and the model has 36 layers", "balanced"),
    ("logits", DENSE, ["archon:p2", "actor.archon.keep_logits=true"], None,
     "hold the logits of several microbatches at once", "leave it out"),
    ("experts", MOE, ["archon:p2", RESHARD], None,
     "which ac_selective = op cannot replay", "ac_selective: 2 or ac_mode: full"),
    ("balance", DENSE, ["archon:d1", "actor.archon.moe_z_loss_coef=0.1"], None,
     "the model has no experts", "leave it out"),
    ("balance", MOE, ["archon:d1", "actor.archon.moe_bias_rate=0.001"], None,
     "a saved qwen3_moe cannot store a bias", "aux_loss_coef"),
    ("balance", DENSE, ["archon:d1", "actor.archon.moe_bias_rate=0.001"], None,
     "the model has no experts", "leave it out"),
]  # fmt: skip
for schedule in ("IZB", "ZBV"):
    base = ["archon:p2", f"actor.archon.pp_schedule={schedule}"]
    RED += [
        ("zb compile", DENSE, [*base, "actor.archon.enable_compile=true"], None,
         "which compiled blocks do not support", "Interleaved1F1B"),
        ("zb op", DENSE, [*base, "actor.archon.ac_mode=selective", "actor.archon.ac_selective=op"],
         None, "dropped after the first use", "ac_selective: 2"),
        ("zb budget", DENSE, [*base, "actor.archon.ac_mode=memory_budget"], None,
         "needs compile, which", "ac_mode: full"),
        ("zb reshard", DENSE, [*base, "actor.archon.reshard_after_forward_policy=always"], None,
         "would give wrong gradients", "leave it out"),
    ]  # fmt: skip


@pytest.mark.parametrize("case", RED, ids=lambda case: f"{case[0]} {' '.join(case[2])}")
def test_rule_refuses(case):
    _, dims, (allocation, *overrides), devices, said, offered = case
    found = problems(allocation, *overrides, dims=dims, devices=devices)
    assert len(found) == 1, found
    assert said in found[0].rule and offered in found[0].remedy


@pytest.mark.parametrize(
    ("allocation", "dims", "overrides"),
    [
        ("sglang:d4t2+archon:d4p2t2", DENSE, []),
        ("sglang:d4t4+archon:(attn:d1p4t2c2|ffn:d1p4t1e4)", MOE, []),
        ("embedded:d1|archon:d1", DENSE, []),
        ("fsdp:d4t2c2", DENSE, []),
        ("fsdp:d4t2e8", MOE, []),
        ("archon:t4c4", DENSE, []),  # 16 ways over 8 kv heads: each is held twice
        ("archon:t4", ODD, []),
        ("archon:d4e4", MOE, ["actor.archon.dp_replicate=1"]),
        ("archon:d8e4", MOE, ["actor.archon.dp_replicate=2"]),
        ("archon:p4", DENSE, ["actor.mb_spec.n_mbs=12"]),
        ("archon:p4", DENSE, ["actor.mb_spec.n_mbs=9", "actor.archon.pp_schedule=ZBV"]),
        ("archon:p2", DENSE, ["actor.archon.pp_schedule=ZBV", "actor.archon.ac_mode=full"]),
        ("archon:p2", DENSE, ["actor.archon.pp_schedule=IZB"]),  # auto resolves to what fits
        # Without a pipeline the schedule is not used, so nothing conflicts with it.
        ("archon:d2", DENSE, ["actor.archon.pp_schedule=ZBV", "actor.archon.enable_compile=true"]),
        ("vllm[rollout]:d1+archon[actor]:d1+archon[critic]:d1", DENSE, []),
        ("archon:p2", DENSE, ["actor.archon.layers_per_stage=[10,10,10,6]"]),
        ("archon:d1", DENSE, ["actor.archon.layers_per_stage=[10,10]"]),  # not read without p
        ("archon:p2", DENSE, [RESHARD]),
        ("archon:p2", MOE, [RESHARD, "actor.archon.ac_mode=full"]),
        ("archon:d1", MOE, ["actor.archon.moe_aux_loss_coef=0.01"]),
    ],
)
def test_lawful_layouts_pass(allocation, dims, overrides):
    assert problems(allocation, *overrides, dims=dims) == []


def test_widths_must_be_cut_evenly():
    found = problems("archon:(attn:d1t5|ffn:t5)", dims=MOE)
    assert [p.rule for p in found] == [
        "t5 * c1 = 5 must divide num_heads = 32",
        "t5 of ffn must divide moe_intermediate_size = 768",
    ]
    assert found[0].remedy == "with c1, t can be 1, 2, 4, 8, 16, 32"  # no dense ffn to cut
    assert found[1].remedy == "t of ffn can be 1"
    (found,) = problems("archon:t28", dims=ODD)
    assert found.rule == "t28 must divide intermediate_size = 18944"
    assert found.remedy == "with c1, t can be 1, 2, 4"


def test_all_problems_come_at_once():
    found = problems(
        "vllm:t5+archon:d3p2t3e3",
        "actor.archon.pp_schedule=ZBV",
        "actor.archon.enable_compile=true",
        "actor.archon.dp_replicate=2",
        dims=DENSE,
        devices=8,
    )
    assert [p.rule.split(",")[0][:44] for p in found] == [
        "needs 18 + 5 = 23 devices",
        "t5 of vllm must divide num_heads = 32",
        "t3 * c1 = 3 must divide num_heads = 32",
        "e3 needs experts",
        "must divide d3 of archon:d3p2t3e3",
        "pp_schedule = ZBVZeroBubble splits backward",
    ]


def test_an_unreadable_string_is_the_only_layout_problem():
    (found,) = problems("sglang:d4+archon:d1p2e2")
    assert "use archon:d2p2e2 (4 devices)" in str(found)
    assert str(found).splitlines()[-1].endswith("^")


def test_a_critic_on_the_actors_devices_obeys_its_own_keys():
    overrides = ("algorithm.name=ppo", "critic.archon.dp_replicate=3")
    (found,) = problems("archon:d4", *overrides)
    assert found.where == "critic.archon.dp_replicate = 3"
    assert problems("archon:d4", "critic.archon.dp_replicate=3") == []


def config_of(*overrides: str):
    return resolve(read_config(None, list(overrides)).config)[0]


def test_the_model_is_looked_up():
    bad = config_of("actor.path=Qwen/Qwen3-30B-A3B", "allocation_mode=archon:d144e144")
    assert ["num_experts = 128" in p.rule for p in check_layout(bad)] == [True]
    unknown = config_of("actor.path=Qwen/Qwen3-9B", "allocation_mode=archon:d0")
    assert [p.where.split(" ")[0] for p in check_layout(unknown)] == [
        "actor.path",
        "allocation_mode",
    ]
    assert [p.where for p in check_layout(unknown, "train")] == ["allocation_mode"]
    skip = frozenset({"actor.path", "allocation_mode"})
    assert check_layout(unknown, bad=skip) == []


def test_answers_fit_the_positions_of_the_model(tmp_path):
    hf = {
        "model_type": "qwen3",
        "vocab_size": 10,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "intermediate_size": 8,
        "max_position_embeddings": 100,
    }
    (tmp_path / "config.json").write_text(json.dumps(hf))
    keys = [f"actor.path={tmp_path}", "gconfig.max_new_tokens=90"]
    assert check_layout(config_of(*keys, "train_dataset.max_length=10")) == []
    (found,) = check_layout(config_of(*keys, "train_dataset.max_length=11"))
    assert "100 positions" in found.rule and found.remedy == "use at most 89"
    long = ["train_dataset.max_length=11", "allocation_mode=archon:d1"]
    assert check_layout(config_of(*keys, *long)) == []  # a plan for sft: nothing is sampled
    hf["rope_scaling"] = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 100}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    # What a run samples and trains ends at max_position_embeddings, stretched or not.
    (found,) = check_layout(config_of(*keys, "train_dataset.max_length=110"))
    assert found.remedy == "use at most 1"


def test_train_needs_a_sampler_and_sft_and_plan_do_not():
    config = config_of("allocation_mode=archon:d2")
    (found,) = check_layout(config, "train")
    assert "no sampler" in found.rule and "embedded:d1|archon:d2" in found.remedy
    assert check_layout(config, "sft") == check_layout(config, "plan") == []


def test_notes_tell_what_is_lawful_and_odd():
    keys = ["cluster.n_nodes=2", "cluster.n_gpus_per_node=8", "train_dataset.batch_size=1"]
    config = config_of("allocation_mode=archon:t16", "gconfig.n_samples=4", *keys)
    assert layout_notes(config, MOE, 20) == [
        "4 of 20 devices stay idle",
        "archon:t16: t16 spans nodes of 8 devices, which is slow",
        "archon:t16: each kv head is held 4 times (t*c = 16)",
    ]
    keys += ["allocation_mode=embedded:d1+archon:d8", "cluster.share_gpus=true"]
    config = config_of("gconfig.n_samples=4", *keys)
    shared, note = layout_notes(config, DENSE, 8)
    assert "samples on the devices that train" in shared
    assert "a step has 4 samples for d * n_mbs = 8" in note
    assert layout_notes(config_of("actor.path=Qwen3-8B"), DENSE) == []
