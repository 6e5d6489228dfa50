"""Models of transformers in the engine: each family's log-probs are those of its own logits."""

import json

import pytest
import torch
from closeness import assert_close
from engine_toys import CONFIG, PolicyLoss, make_rows
from sections import engine_settings
from transformers import AutoConfig, AutoModelForCausalLM

from pentad.checkpoint.exports import export_model
from pentad.core.errors import UserError
from pentad.core.layout import Layout
from pentad.core.types import Row
from pentad.engine.engine import build_engine
from pentad.engine.section import LoraConfig, OptimizerConfig
from pentad.engine.transformers_model import match_layout
from pentad.models.hf.config import read_hf_config
from pentad.models.hf.module import LogitRule, build_hf_model, read_logit_rule

SMALL = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
TWO = {"num_experts": 2, "num_experts_per_tok": 2}
FAMILIES = {
    "qwen3": {},
    "mistral": {"sliding_window": 4},
    "gemma3_text": {"sliding_window": 4, "query_pre_attn_scalar": 5},
    "gemma2": {
        "attn_logit_softcapping": 0.8,
        "final_logit_softcapping": 2.0,
        "sliding_window": 4,
    },
    "gemma4_text": {
        "final_logit_softcapping": 3.0,
        "vocab_size_per_layer_input": 40,
        "hidden_size_per_layer_input": 8,
    },
    "gemma3n_text": {
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 1,
        "sliding_window": 4,
        "vocab_size_per_layer_input": 40,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    "granite": {
        "logits_scaling": 4.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.5,
        "embedding_multiplier": 3.0,
    },
    "cohere": {"logit_scale": 0.25},
    "phi3": {},
    "olmo2": {},
    "gpt_neox": {},
    "gpt2": {},
    "apertus": {},
    "qwen3_moe": EXPERTS | {"use_sliding_window": True, "sliding_window": 4},
    "mixtral": EXPERTS,
    # Windows that reach attention in the mask alone.
    "qwen2_moe": EXPERTS
    | {"use_sliding_window": True, "sliding_window": 4, "shared_expert_intermediate_size": 16},
    "phimoe": EXPERTS | {"sliding_window": 4},
    # A window that the config names and the model does not have.
    "llama": {"use_sliding_window": True, "sliding_window": 4},
    "granitemoe": EXPERTS | {"logits_scaling": 2.0},
    "deepseek_v3": EXPERTS
    | {
        "num_key_value_heads": 4,
        "head_dim": 4,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 6,
        "first_k_dense_replace": 1,
    },
}


CARRYING = {
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "falcon_h1": {
        **{"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1},
        **{"mamba_d_ssm": 64, "lm_head_multiplier": 0.3, "key_multiplier": 0.8},
        "ssm_multipliers": [0.9, 1.2, 0.7, 1.1, 0.8],
    },
    "granitemoehybrid": EXPERTS
    | {
        **{"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1},
        "layer_types": ["mamba", "attention"],
    },
}
"""Layers carry state or convolve from token to token: rows are computed one by one."""
FAMILIES |= CARRYING


def config_of(family: str, **more: object):
    return AutoConfig.for_model(family, **{**SMALL, **FAMILIES.get(family, {}), **more})


def write(folder, family: str, **more: object):
    """A folder as transformers writes it, all weights off their first values."""
    torch.manual_seed(1)
    kwargs = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_config(config_of(family, **more), **kwargs).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(0.1 * torch.randn_like(tensor))
    model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, **kwargs).eval()


def rows_of(*lengths: int) -> list[Row]:
    gen = torch.Generator().manual_seed(5)
    return [Row(torch.randint(0, 40, (n,), generator=gen), {}) for n in lengths]


def own_logprobs(model, row: Row) -> torch.Tensor:
    with torch.no_grad():
        logits = model(row.ids[None]).logits[0].float()
    return torch.log_softmax(logits, -1)[:-1].gather(1, row.ids[1:, None])[:, 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logprobs_are_those_of_the_familys_own_logits(family, tmp_path):
    model = write(tmp_path / "model", family)
    engine = build_engine(tmp_path / "model", engine_settings(total_steps=None), backend="fsdp")
    rows = rows_of(7, 12, 3)
    for row, output in zip(rows, engine.forward(rows), strict=True):
        assert_close(output["logprobs"][1:], own_logprobs(model, row))
    export_model(engine, str(tmp_path / "saved"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    expected = model.state_dict()
    assert again.state_dict().keys() == expected.keys()
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_weights_go_out_under_their_names_on_disk(tmp_path):
    """Experts one by one, a renamed head: as samplers read them."""
    write(tmp_path / "moe", "qwen3_moe")
    engine = build_engine(tmp_path / "moe", engine_settings(), backend="fsdp")
    names = [name for name, _ in engine.iter_weights()]
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in names
    assert "model.layers.1.mlp.experts.down_proj" in engine.parameters
    index = build_engine(tmp_path / "moe", engine_settings())  # our own model of the same folder
    assert {n: tuple(t.shape) for n, t in engine.iter_weights()} == {
        n: tuple(t.shape) for n, t in index.iter_weights()
    }
    write(tmp_path / "neox", "gpt_neox")
    neox = build_engine(tmp_path / "neox", engine_settings(), backend="fsdp")
    assert "embed_out.weight" in dict(neox.iter_weights())


@pytest.mark.parametrize("family", ["gemma2", "granite", "olmo2", "qwen3_moe", *CARRYING])
def test_gradients_are_those_of_transformers(family, tmp_path):
    model = write(tmp_path / "model", family)
    settings = engine_settings(
        ac_mode="full",
        max_tokens_per_mb=16,
        optimizer=OptimizerConfig(lr=1.0, gradient_clipping=None),
    )
    engine = build_engine(tmp_path / "model", settings, backend="fsdp")
    rows = rows_of(7, 12, 3)
    for row in rows:
        row.columns = {"weights": torch.ones(len(row.ids)), "advantages": torch.ones(len(row.ids))}
        row.columns["weights"][0] = 0
        row.count = len(row.ids) - 1.0
    engine.begin_step()
    engine.accumulate(rows, PolicyLoss())
    ours = {name: p.grad.clone() for name, p in engine.parameters.items() if p.grad is not None}
    for row in rows:
        logits = model(row.ids[None]).logits[0]
        logp = torch.log_softmax(logits, -1)[:-1].gather(1, row.ids[1:, None])
        (-logp.sum()).backward()
    theirs = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        error = (ours[name] - gradient).norm() / gradient.norm()
        assert error < 1e-5, f"{name}: {error:.1e}"


def test_what_carries_state_is_neither_split_nor_adapted(tmp_path):
    write(tmp_path, "lfm2")
    settings = engine_settings(lora=LoraConfig(rank=2))
    with pytest.raises(UserError, match="actor.lora: layers of lfm2 use some of their matrices"):
        build_engine(tmp_path, settings, backend="fsdp")
    model = build_hf_model(read_hf_config(tmp_path), dtype=torch.float32)
    for layout in (Layout(tp=2), Layout(cp=2)):
        with pytest.raises(UserError, match="only d and e can be used"):
            match_layout(model, layout)


def test_blocks_are_recomputed(tmp_path):
    write(tmp_path / "model", "olmo2")
    calls = []
    for mode in ("none", "full"):
        engine = build_engine(tmp_path / "model", engine_settings(ac_mode=mode), backend="fsdp")
        block = engine.decoder.blocks[0]
        seen: list[int] = []
        block.mlp.register_forward_hook(lambda *args, seen=seen: seen.append(1))
        engine.begin_step()
        rows = make_rows(3)
        engine.accumulate(rows, PolicyLoss())
        calls.append(len(seen))
    assert calls == [1, 2]


def test_fresh_weights_are_drawn_as_transformers_draws_them():
    """Norms of Gemma start at zero, those of Qwen at one."""
    for family, start in (("gemma3_text", 0.0), ("qwen3", 1.0)):
        config = config_of(family).to_dict()
        make = {"init_from_scratch": True, "backend": "fsdp", "seed": 4}
        engine = build_engine(config, engine_settings(), **make)
        weights = dict(engine.iter_weights())
        norm = weights["model.layers.0.input_layernorm.weight"]
        assert torch.equal(norm, torch.full_like(norm, start))
        assert float(weights["model.layers.0.mlp.up_proj.weight"].std()) == pytest.approx(
            0.02, rel=0.1
        )
        again = dict(build_engine(config, engine_settings(), **make).iter_weights())
        assert all(torch.equal(weights[name], again[name]) for name in weights)


def test_a_critic_is_saved_as_a_classifier_of_its_family(tmp_path):
    write(tmp_path / "model", "mistral")
    engine = build_engine(tmp_path / "model", engine_settings(), backend="fsdp", value_head=True)
    rows = rows_of(6, 4)
    values = [output["values"] for output in engine.forward(rows)]
    assert all("logprobs" not in output for output in engine.forward(rows))
    export_model(engine, str(tmp_path / "critic"))
    saved = json.loads((tmp_path / "critic" / "config.json").read_text())
    assert saved["architectures"] == ["MistralForSequenceClassification"]
    again = build_engine(tmp_path / "critic", engine_settings(), backend="fsdp", value_head=True)
    for a, b in zip(values, again.forward(rows), strict=True):
        assert_close(a, b["values"])


def test_the_rule_of_the_logits_is_read_off_the_class():
    rules = {}
    for family in ("qwen3", "granite", "cohere", "gemma2", "nanochat"):
        with torch.device("meta"):
            causal = AutoModelForCausalLM.from_config(config_of(family))
        rules[family] = read_logit_rule(causal, family)
        assert type(causal.base_model).__name__ != "_Body", "the stand-ins are gone"
    assert rules == {
        "qwen3": LogitRule(),
        "granite": LogitRule(scale=0.25),
        "cohere": LogitRule(scale=0.25),
        "gemma2": LogitRule(cap=2.0),
        "nanochat": LogitRule(cap=15.0),
    }


REFUSED = [
    ("mamba2", {"num_heads": 4, "head_dim": 16, "n_groups": 1}, "not a body followed by a head"),
    ("llama4_text", {}, "kind chunked_attention"),
    ("bloom", {}, "0 times"),
    ("stablelm", {}, "does not pass keyword arguments"),
    ("falcon", {"head_dim": None}, "cannot build it"),
    ("gpt_oss", EXPERTS, "attention sinks"),
    ("phi", {}, "head has a bias"),
    ("bert", {}, "otherwise than causally"),
    ("modernbert-decoder", {"num_key_value_heads": None}, "head has a bias"),
    (
        "modernbert-decoder",
        {"num_key_value_heads": None, "decoder_bias": False},
        "not a body followed by a head",
    ),
    ("qwen3", {"is_causal": False}, "is_causal = false: tokens attend to later ones"),
    (
        "gemma",
        {"use_bidirectional_attention": True},
        "is_causal=False .tokens attend to later ones",
    ),
]


@pytest.mark.parametrize(("family", "more", "said"), REFUSED)
def test_what_cannot_be_packed_or_scored_is_refused(family, more, said):
    given = {k: v for k, v in {**SMALL, **more}.items() if v is not None}
    config = AutoConfig.for_model(family, **given).to_dict()
    with pytest.raises(UserError, match=said):
        build_hf_model(read_hf_config(config), dtype=torch.float32)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"model_type": "mamba"},
            "not an attention decoder: its config has no num_attention_heads",
        ),
        (
            SMALL
            | {
                "model_type": "phi3",
                "original_max_position_embeddings": 32,
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 4,
                    "long_factor": [2.0] * 4,
                },
            },
            "longrope depend on the longest row",
        ),
        ({"model_type": "nonesuch"}, "transformers cannot read it"),
        (SMALL | {"model_type": "olmo3", "num_hidden_layers": 10**9}, "num_hidden_layers = 1e.09"),
        (SMALL | {"model_type": "gpt2", "n_layer": 10**9}, "n_layer = 1e.09: must be a whole"),
        ({"model_type": "gemma3", "text_config": SMALL, "vision_config": {}}, "modalities"),
        (CONFIG | {"quantization_config": {"quant_method": "gptq"}}, "quantised"),
    ],
)
def test_configs_that_cannot_be_trained_are_refused(config, said):
    with pytest.raises(UserError, match=said):
        read_hf_config(config)


@pytest.mark.parametrize(
    ("family", "more", "layout", "said"),
    [
        ("qwen3", {}, Layout(pp=2), "supports only d, t, c and e; use archon"),
        ("qwen3_moe", {}, Layout(tp=2, etp=2), "supports only d, t, c and e; use archon"),
        ("qwen3", {}, Layout(dp_shard=2, ep=2), "qwen3 has no experts with .* leave out e"),
        ("olmoe", TWO, Layout(dp_shard=4, ep=4), "leave a rank of e4 none"),
        ("qwen3", {}, Layout(tp=4), "t4 of fsdp must divide num_kv_heads = 2"),
        ("qwen3", {}, Layout(tp=3), "t3 . c1 = 3 must divide num_heads = 4"),
        ("gpt2", {}, Layout(tp=2), "no tensor-parallel plan for this model; use t1"),
        ("starcoder2", {"intermediate_size": 47}, Layout(tp=2), "must divide intermediate_size"),
    ],
)
def test_layouts_that_cannot_cut_a_model_are_refused(family, more, layout, said):
    model = build_hf_model(config_of(family, **more), dtype=torch.float32)
    with pytest.raises(UserError, match=said):
        match_layout(model, layout)


def test_experts_of_another_shape_are_not_distributed():
    model = build_hf_model(config_of("qwen3_moe", **EXPERTS), dtype=torch.float32)
    layout = Layout(dp_shard=2, ep=2)
    assert match_layout(model, layout) == {}
    experts = model.blocks[0].mlp.experts
    experts.scale = torch.nn.Parameter(torch.empty(2, 4, device="meta"))
    with pytest.raises(UserError, match="0.mlp.experts.scale has the shape .2, 4., and only"):
        match_layout(model, layout)
    match_layout(model, Layout(dp_shard=2))


def test_settings_that_need_a_model_file_are_refused():
    settings = engine_settings(strict=True, moe_aux_loss_coef=0.1)
    with pytest.raises(UserError) as caught:
        build_engine(CONFIG, settings, backend="fsdp", init_from_scratch=True)
    said = str(caught.value)
    assert "strict = true" in said and "balance experts" in said


def test_a_folder_that_lacks_a_tensor_is_refused_by_its_name(tmp_path):
    write(tmp_path / "model", "olmo2")
    with pytest.raises(UserError, match=r"layers\.2\.self_attn\.q_proj\.weight.*missing"):
        config = json.loads((tmp_path / "model" / "config.json").read_text())
        (tmp_path / "model" / "config.json").write_text(
            json.dumps(config | {"num_hidden_layers": 3})
        )
        build_engine(tmp_path / "model", engine_settings(), backend="fsdp")


def test_mixed_precision_casts_for_compute_and_keeps_the_masters(tmp_path):
    model = write(tmp_path / "model", "olmo2")
    settings = engine_settings(dtype="float64")
    engine = build_engine(tmp_path / "model", settings, backend="fsdp")
    (row,) = rows_of(9)
    (output,) = engine.forward([row])
    assert output["logprobs"].dtype == torch.float64
    assert all(tensor.dtype == torch.float32 for tensor in engine.masters.values())
    expected = own_logprobs(model.double(), row).double()
    torch.testing.assert_close(output["logprobs"][1:], expected, rtol=1e-6, atol=1e-6)
