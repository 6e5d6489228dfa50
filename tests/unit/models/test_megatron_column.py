"""Megatron's tensors, derived from the maps, against the fusing written out in torch."""

import pytest
import torch
import transformers

from pentad.models.families import dims_of, known_families, map_of, spec_of
from pentad.models.megatron_names import whole_name
from pentad.models.spec import padded_vocab
from pentad.weights import transfer
from pentad.weights.transfer import PairsReader, whole_shards

TINY = dict(
    vocab_size=211,
    hidden_size=60,
    intermediate_size=77,
    num_hidden_layers=3,
    num_attention_heads=12,
    num_key_value_heads=4,
    head_dim=14,
)
MOE = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=27, mlp_only_layers=[1])


@pytest.fixture(params=["qwen2", "qwen3", "llama", "qwen3_moe", "tied"])
def column(request):
    family = "qwen3" if request.param == "tied" else request.param
    extra = MOE if family == "qwen3_moe" else {}
    extra = {**extra, "attention_bias": True, "mlp_bias": True} if family == "llama" else extra
    tied = request.param == "tied"
    config = transformers.AutoConfig.for_model(family, **TINY, **extra, tie_word_embeddings=tied)
    dims = dims_of(config)
    weight_map = spec_of(family).megatron_map(dims, padded_vocab(211, tp=2))
    generator = torch.Generator().manual_seed(0)
    hf = {n: torch.randn(s.shape, generator=generator) for n, s in weight_map.sources.items()}
    theirs = {n: torch.zeros(e.shape) for n, e in weight_map.entries.items()}
    transfer.fill(whole_shards(theirs), weight_map, PairsReader(hf.items()))
    return dims, weight_map, hf, theirs


def test_attention_is_fused_by_query_group(column):
    dims, _, hf, theirs = column
    for i in range(3):
        for kind in ("weight", "bias") if dims.qkv_bias else ("weight",):
            q, k, v = (hf[f"model.layers.{i}.self_attn.{x}_proj.{kind}"] for x in "qkv")
            groups = [torch.cat(g) for g in zip(q.chunk(4), k.chunk(4), v.chunk(4), strict=True)]
            fused = theirs[f"decoder.layers.{i}.self_attention.linear_qkv.{kind}"]
            assert torch.equal(fused, torch.cat(groups))


def test_mlp_and_experts_are_gate_over_up(column):
    dims, _, hf, theirs = column
    for i in range(3):
        ours, other = f"model.layers.{i}.mlp.", f"decoder.layers.{i}.mlp."
        if not dims.is_moe(i):
            gate, up = hf[ours + "gate_proj.weight"], hf[ours + "up_proj.weight"]
            assert torch.equal(theirs[other + "linear_fc1.weight"], torch.cat([gate, up]))
            continue
        for e in range(5):
            gate, up = (hf[f"{ours}experts.{e}.{x}_proj.weight"] for x in ("gate", "up"))
            assert torch.equal(
                theirs[f"{other}experts.linear_fc1.weight{e}"], torch.cat([gate, up])
            )
            down = hf[f"{ours}experts.{e}.down_proj.weight"]
            assert torch.equal(theirs[f"{other}experts.linear_fc2.weight{e}"], down)


def test_vocabulary_is_padded_with_zeros(column):
    dims, _, hf, theirs = column
    table = theirs["embedding.word_embeddings.weight"]
    assert table.shape == (256, 60) and not table[211:].any()
    assert torch.equal(table[:211], hf["model.embed_tokens.weight"])
    head = hf["model.embed_tokens.weight" if dims.tie_embeddings else "lm_head.weight"]
    assert torch.equal(theirs["output_layer.weight"][:211], head)


def test_every_weight_but_the_value_head_comes_back(column):
    dims, weight_map, hf, theirs = column
    back = dict(transfer.iter_sources(theirs, weight_map))
    assert back.keys() == hf.keys() == map_of(dims).sources.keys() - {"score.weight"}
    assert all(torch.equal(back[name], hf[name]) for name in hf)


LAYER = "decoder.layers.{i}."
LOCAL_NAMES = {
    LAYER + "self_attention.linear_qkv.layer_norm_weight": LAYER + "input_layernorm.weight",
    LAYER + "mlp.linear_fc1.layer_norm_weight": LAYER + "pre_mlp_layernorm.weight",
    LAYER + "mlp.experts.linear_fc1.weight{e}": (
        LAYER + "mlp.experts.local_experts.{e}.linear_fc1.weight"
    ),
    LAYER + "mlp.experts.linear_fc2.weight{e}": (
        LAYER + "mlp.experts.local_experts.{e}.linear_fc2.weight"
    ),
}
"""Of megatron-core 0.16: what its local layer spec calls differently from Transformer-Engine's."""
SAME_NAMES = {
    "embedding.word_embeddings.weight",
    "output_layer.weight",
    "decoder.final_layernorm.weight",
    *(f"{LAYER}self_attention.linear_{x}.{y}" for x in ("qkv", "proj") for y in ("weight", "bias")),
    *(f"{LAYER}self_attention.{x}_layernorm.weight" for x in "qk"),
    *(f"{LAYER}mlp.linear_{x}.{y}" for x in ("fc1", "fc2") for y in ("weight", "bias")),
    *(f"{LAYER}mlp.shared_experts.linear_{x}.weight" for x in ("fc1", "fc2")),
    LAYER + "mlp.shared_experts.gate_weight",
    LAYER + "mlp.router.weight",
    LAYER + "mlp.router.expert_bias",
    LAYER + "pre_mlp_layernorm.weight",
}


@pytest.mark.parametrize("family", known_families())
def test_names_and_aliases_are_those_of_megatron_core(family):
    """An alias is read by no round trip through the other spelling, so it is held to a list."""
    rules = spec_of(family).megatron
    assert rules, "every family here has a column"
    for rule in rules:
        given = {rule.target: rule.alias[0] if rule.alias else rule.target}
        assert len(rule.alias) <= 1
        assert given.items() <= {**{name: name for name in SAME_NAMES}, **LOCAL_NAMES}.items()


SECOND_STAGE = {
    "embedding.word_embeddings.weight": "embedding.word_embeddings.weight",
    "decoder.layers.1.mlp.linear_fc1.layer_norm_weight": (
        "decoder.layers.5.mlp.linear_fc1.layer_norm_weight"
    ),
    "decoder.layers.0.mlp.experts.linear_fc1.weight1": (
        "decoder.layers.4.mlp.experts.linear_fc1.weight9"
    ),
    "decoder.layers.1.mlp.experts.local_experts.0.linear_fc2.weight": (
        "decoder.layers.5.mlp.experts.local_experts.8.linear_fc2.weight"
    ),
    "decoder.layers.0.mlp.router.weight": "decoder.layers.4.mlp.router.weight",
    "decoder.layers.1.mlp.shared_experts.linear_fc2.weight": (
        "decoder.layers.5.mlp.shared_experts.linear_fc2.weight"
    ),
    "decoder.final_layernorm.weight": "decoder.final_layernorm.weight",
}


@pytest.mark.parametrize(("name", "whole"), SECOND_STAGE.items())
def test_names_in_a_stage_are_counted_from_its_first_layer_and_expert(name, whole):
    """In both spellings: layers 4 and 5, and experts from the ninth on."""
    assert whole_name(name, [4, 5], first_expert=8) == whole
