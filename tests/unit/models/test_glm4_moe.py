"""GLM-4-MoE beyond what verify-model sees: extra layers, Megatron's place for the bias, counts."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pentad.core.errors import UserError
from pentad.models.catalog import public_dims
from pentad.models.conversion import Conversion, convert
from pentad.models.decoder import causal_attend
from pentad.models.families import dims_of
from pentad.models.registry import create_model, load_model, save_model

MODELS = public_dims()

CONFIG = {
    "model_type": "glm4_moe",
    "vocab_size": 31,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.3,
    "num_nextn_predict_layers": 1,
    "initializer_range": 0.3,
}
IDS = torch.arange(13) * 7 % 31
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
EXTRA = {"model.layers.3.eh_proj.weight": (24, 48), "model.layers.3.mlp.gate.weight": (6, 24)}


def logits_of(model):
    return model.logits(model(IDS, torch.arange(len(IDS)), causal_attend))


@pytest.fixture
def folder(tmp_path):
    """As released: with the tensors of a layer behind the last."""
    model = create_model(dims_of(CONFIG), seed=4)
    with torch.no_grad():
        for name, bias in model.named_buffers():
            bias.copy_(torch.randn(6, generator=torch.Generator().manual_seed(len(name))))
    save_model(model, tmp_path / "hf", hf_config=CONFIG)
    config = tmp_path / "hf" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_nextn_predict_layers": 1}))
    file = tmp_path / "hf" / "model.safetensors"
    more = {name: torch.randn(shape) for name, shape in EXTRA.items()}
    save_file({**load_file(file), **more}, file, metadata={"format": "pt"})
    return tmp_path / "hf"


def test_layers_that_predict_further_tokens_are_left_out_and_told(folder, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        model = load_model(folder)
    assert "2 tensors (model.layers.3." in caplog.text and "are not trained" in caplog.text
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(folder)(IDS[None]).logits[0]
        torch.testing.assert_close(logits_of(model), theirs, rtol=1e-4, atol=1e-4)
    save_model(model, tmp_path / "out", source_folder=folder)
    assert (
        json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    )
    assert load_file(tmp_path / "out" / "model.safetensors").keys().isdisjoint(EXTRA)
    caplog.clear()
    load_model(tmp_path / "out")
    assert not caplog.text


def test_other_tensors_behind_the_last_layer_are_not_known(folder):
    file = folder / "model.safetensors"
    odd = {"model.layers.4.eh_proj.weight": torch.ones(2)}
    save_file({**load_file(file), **odd}, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match="layers.4.eh_proj.weight: no rule of the map matches it"):
        load_model(folder)


def test_a_folder_without_the_bias_is_refused(folder):
    file = folder / "model.safetensors"
    rest = {name: x for name, x in load_file(file).items() if name != BIAS}
    save_file(rest, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match="e_score_correction_bias: missing; the model needs it"):
        load_model(folder)


@pytest.mark.parametrize("to", ["torch_dist", "legacy"])
def test_megatron_folders_hold_the_bias_in_float32(folder, tmp_path, to, caplog):
    there = {"source": str(folder), "target": str(tmp_path / "mg"), "to": to}
    with caplog.at_level(logging.WARNING):
        convert(Conversion(**there, dtype="bfloat16"))
    assert "2 tensors (model.layers.3." in caplog.text
    back = {"source": str(tmp_path / "mg"), "target": str(tmp_path / "again"), "to": "hf"}
    convert(Conversion(**back))
    first, last = load_file(folder / "model.safetensors"), {}
    for file in (tmp_path / "again").glob("*.safetensors"):
        last |= load_file(file)
    assert last.keys() == first.keys() - EXTRA.keys()
    assert torch.equal(last[BIAS], first[BIAS])
    assert last["lm_head.weight"].dtype == torch.bfloat16
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 0
    if to == "legacy":
        path = tmp_path / "mg" / "release" / "mp_rank_00" / "model_optim_rng.pt"
        content = torch.load(path, weights_only=False)
        bias = content["model"]["decoder.layers.1.mlp.router.expert_bias"]
        assert torch.equal(bias, first[BIAS])
        args = content["args"]
        assert (args.moe_router_score_function, args.moe_router_enable_expert_bias) == (
            "sigmoid",
            True,
        )
        assert (args.moe_router_topk_scaling_factor, args.rotary_percent) == (1.3, 0.5)
        assert (args.moe_layer_freq, args.moe_shared_expert_gate) == ([0, 1, 1], False)


def test_scores_that_megatron_would_divide_are_not_converted(folder, tmp_path):
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"norm_topk_prob": False}))
    asked = Conversion(source=str(folder), target=str(tmp_path / "mg"), to="legacy")
    with pytest.raises(UserError, match="norm_topk_prob = false: Megatron makes it true for"):
        convert(asked)


def test_released_models_are_known_by_name():
    air = MODELS["GLM-4.5-Air"]
    part = air.layer_parts(1)
    assert (air.rotary_dim, air.shared_expert_size, sum(air.moe_layers)) == (64, 1408, 45)
    assert part.shared_expert == part.expert == 3 * 4096 * 1408
    assert air.layer_parts(0).dense_ffn == 3 * 4096 * 10944 and air.layer_parts(0).router == 0
