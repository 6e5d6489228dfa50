"""MiniMax-M2, ERNIE 4.5, Hunyuan and the like, beyond what verify-model sees: keys of released
configs that transformers passes over, layers that are left out, refusals, generation."""

import json
import logging

import pytest
import torch
import transformers
from family_toys import FAMILY_CONFIGS
from safetensors.torch import load_file, save_file

from pentad.core.errors import UserError
from pentad.engine.section import LoraConfig
from pentad.models.catalog import known_model, public_dims
from pentad.models.conversion import Conversion, convert
from pentad.models.decoder import causal_attend
from pentad.models.families import dims_of, lora_words
from pentad.models.hf.config import read_hf_config
from pentad.models.registry import create_model, load_model, save_model

IDS = torch.arange(13) * 7 % 37
MINIMAX = FAMILY_CONFIGS["minimax_m2"]
ERNIE = FAMILY_CONFIGS["ernie4_5_moe"]


def logits_of(model):
    return model.logits(model(IDS, torch.arange(len(IDS)), causal_attend))


def write(folder, config):
    """A folder of drawn weights with biases of routers."""
    model = create_model(dims_of(config), seed=4)
    with torch.no_grad():
        for name, bias in model.named_buffers():
            bias.copy_(torch.randn(len(bias), generator=torch.Generator().manual_seed(len(name))))
    save_model(model, folder, hf_config=config)
    return folder


def rewrite(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@torch.no_grad()
def test_rotary_dim_is_the_factor_that_transformers_knows(tmp_path):
    folder = write(tmp_path / "hf", MINIMAX)
    mine = logits_of(load_model(folder))
    rewrite(folder, rope_parameters={"rope_theta": 5e6, "partial_rotary_factor": 0.5})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)(IDS[None]).logits[0]
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    assert torch.equal(logits_of(load_model(folder)), mine)
    rewrite(folder, rope_parameters={"rope_theta": 5e6, "rope_type": "default"}, rotary_dim=8)
    assert (logits_of(load_model(folder)) - mine).abs().max() > 0.1


def test_rotary_dim_is_refused_where_transformers_would_turn_whole_heads():
    with pytest.raises(UserError, match="rotary_dim = 4: this transformers would turn 8 numbers"):
        read_hf_config(MINIMAX)
    said = {"rope_theta": 5e6, "rope_type": "default", "partial_rotary_factor": 0.5}
    assert read_hf_config(MINIMAX | {"rope_parameters": said}).rotary_dim == 4
    assert read_hf_config(MINIMAX | {"rotary_dim": None}).rotary_dim is None


EXTRA = {
    "minimax_m2": (MINIMAX, "num_mtp_modules", "model.layers.3.eh_proj.weight"),
    "ernie4_5_moe": (ERNIE, "num_nextn_predict_layers", "model.mtp_linear_proj.0.weight"),
}


@pytest.mark.parametrize("family", EXTRA)
def test_layers_that_predict_further_tokens_are_left_out(family, tmp_path, caplog):
    config, key, name = EXTRA[family]
    folder = write(tmp_path / "hf", config)
    rewrite(folder, **{key: 1})
    file = folder / "model.safetensors"
    save_file({**load_file(file), name: torch.ones(3, 5)}, file, metadata={"format": "pt"})
    with caplog.at_level(logging.WARNING):
        model = load_model(folder)
    assert f"1 tensors ({name}" in caplog.text and "are not trained" in caplog.text
    save_model(model, tmp_path / "out", source_folder=folder)
    assert json.loads((tmp_path / "out" / "config.json").read_text())[key] == 0
    assert name not in load_file(tmp_path / "out" / "model.safetensors")


def test_routers_of_16_bit_files_stay_in_float32(tmp_path):
    """As transformers keeps them: the bias has an axis of one row there."""
    folder = write(tmp_path / "hf", ERNIE)
    save_model(load_model(folder, dtype=torch.bfloat16), tmp_path / "out", source_folder=folder)
    first, last = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "out"))
    place = "model.layers.1.mlp."
    for name in (place + "gate.weight", place + "moe_statics.e_score_correction_bias"):
        assert torch.equal(first[name], last[name]) and first[name].any()
    assert last[place + "moe_statics.e_score_correction_bias"].shape == (1, 8)
    assert last["lm_head.weight"].dtype == torch.bfloat16


def test_a_released_config_of_hunyuan_gives_a_number_for_each_layer():
    config = FAMILY_CONFIGS["hunyuan_v1_moe"]
    lists = {"num_shared_expert": [1] * 3, "moe_intermediate_size": [16] * 3, "use_cla": False}
    dims = dims_of(config | lists)
    assert dims == dims_of(config | {"moe_topk": 3})
    assert (dims.num_experts_per_token, dims.shared_expert_size) == (3, 16)


@pytest.mark.parametrize(
    ("family", "targets"),
    [("mixtral", ["q", "k", "v", "o", "experts"]), ("granitemoe", ["q", "k", "v", "o"])],
)
def test_experts_take_adapters_where_files_hold_each_for_itself(family, targets):
    dims = dims_of(FAMILY_CONFIGS[family])
    assert [*lora_words(dims, LoraConfig(rank=4, targets=targets))] == targets
    if family == "granitemoe":
        with pytest.raises(UserError, match="granitemoe holds experts in shared tensors"):
            lora_words(dims, LoraConfig(rank=4, targets=["experts"]))


@pytest.mark.parametrize("to", ["torch_dist", "legacy"])
@pytest.mark.parametrize("family", ["mixtral", "dots1"])
def test_megatron_folders_give_the_same_files_back(family, to, tmp_path):
    config = {k: v for k, v in FAMILY_CONFIGS[family].items() if k not in ("n_group", "topk_group")}
    folder = write(tmp_path / "hf", config)
    convert(Conversion(source=str(folder), target=str(tmp_path / "mg"), to=to, tp=2, etp=1, ep=2))
    convert(Conversion(source=str(tmp_path / "mg"), target=str(tmp_path / "again"), to="hf"))
    first, last = load_file(folder / "model.safetensors"), {}
    for file in (tmp_path / "again").glob("*.safetensors"):
        last |= load_file(file)
    assert first.keys() == last.keys()
    assert all(torch.equal(tensor, last[name]) for name, tensor in first.items())


LACKS = {
    "minimax_m2": "norms of queries and keys over all heads",
    "olmoe": "norms of queries and keys over all heads",
    "ernie4_5_moe": "rotary over neighbouring numbers",
    "hunyuan_v1_moe": "norms of queries and keys after rotary",
    "granitemoe": "factors of layers' results or of logits",
    "dots1": "a choice among some groups of experts",
}


@pytest.mark.parametrize("family", LACKS)
def test_what_megatron_lacks_is_named(family, tmp_path):
    folder = write(tmp_path / "hf", FAMILY_CONFIGS[family])
    asked = Conversion(source=str(folder), target=str(tmp_path / "mg"), to="legacy")
    with pytest.raises(UserError, match=f"it has {LACKS[family]}, which Megatron's layers do not"):
        convert(asked)


REFUSED = {
    "noise of mixtral": (
        "mixtral",
        {"router_jitter_noise": 0.1},
        "router_jitter_noise = 0.1: noise on the inputs of mixtures is not supported",
    ),
    "two numbers of experts": (
        "mixtral",
        {"num_experts": 5},
        "num_experts = 5: must be num_local_experts = 8, of which this is another name",
    ),
    "scores of another kind": ("minimax_m2", {"scoring_func": "softmax"}, "only sigmoid is built"),
    "no selection bias": ("minimax_m2", {"use_routing_bias": False}, "only True is built"),
    "layers without softmax": (
        "minimax_m2",
        {"attn_type_list": [1, 0, 1]},
        r"attn_type_list = \[1, 0, 1\]: only \[1, 1, 1\] is built",
    ),
    "an odd part of a head": ("minimax_m2", {"rotary_dim": 3}, "rotary_dim = 3: must be even"),
    "more than a head": ("minimax_m2", {"rotary_dim": 10}, "at most head_dim = 8"),
    "two parts of a head": (
        "minimax_m2",
        {"partial_rotary_factor": 0.25},
        "rotary_dim = 4: must be the 2 numbers of partial_rotary_factor",
    ),
    "biases of ernie": ("ernie4_5_moe", {"use_bias": True}, "a bias of shared experts is not"),
    "a floor of sums": ("ernie4_5_moe", {"moe_norm_min": 0.1}, "moe_norm_min = 0.1: only 1e-12"),
    "no shared experts of dots": ("dots1", {"n_shared_experts": None}, "n_shared_experts = 0"),
    "a limit on queries": ("olmoe", {"clip_qkv": 0}, "clip_qkv = 0: limits on q, k and v"),
    "a window of olmoe": ("olmoe", {"sliding_window": 8}, "sliding_window = 8: a window, which"),
    "narrow heads of olmoe": ("olmoe", {"head_dim": 2}, "must be hidden_size / num_attention"),
    "keys of other layers": ("hunyuan_v1_moe", {"use_cla": True}, "use_cla = True: only False"),
    "experts of several widths": (
        "hunyuan_v1_moe",
        {"moe_intermediate_size": [16, 16, 8]},
        "moe_intermediate_size = .*: must be one number for all of 3 layers",
    ),
    "more experts of a token than there are": (
        "ernie4_5_moe",
        {"moe_k": 9},
        "moe_k = 9: must be at most the number of experts, 8",
    ),
    "two shared experts": ("hunyuan_v1_moe", {"num_shared_expert": 2}, "only 1 is built"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_family_does_not_do_is_refused_by_name(case):
    family, changes, sentence = REFUSED[case]
    with pytest.raises(UserError, match=sentence):
        dims_of({**FAMILY_CONFIGS[family], **changes})


def test_released_models_are_known_by_name():
    models = public_dims()
    minimax, ernie = models["MiniMax-M2"], models["ERNIE-4.5-21B-A3B-PT"]
    assert (minimax.rotary_dim, minimax.num_mtp_layers, sum(minimax.moe_layers)) == (64, 3, 62)
    assert (sum(ernie.moe_layers), ernie.shared_expert_size) == (27, 3072)
    assert known_model("tencent/Hunyuan-A13B-Instruct") is models["Hunyuan-A13B-Instruct"]
    assert known_model("Mixtral-8x7B-v0.1") is models["Mixtral-8x7B-v0.1"]
