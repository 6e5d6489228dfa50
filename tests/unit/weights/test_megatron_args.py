"""Megatron's arguments: what a config.json says is written or refused, what differs is named."""

import json
import shutil

import pytest
import torch
from megatron_models import MODELS, config_of, hf_folder, run, tensors_of

from pentad.core.errors import UserError
from pentad.models.conversion_files import RECORD
from pentad.models.families import dims_of
from pentad.weights.megatron.arguments import NOT_ALONE, command_line
from pentad.weights.megatron.model_args import model_args

LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 = {**LLAMA3, "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
WINDOWS = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}


def args_of(folder):
    return torch.load(folder / "release" / "common.pt", weights_only=False)["args"]


def change(folder, **changes):
    content = torch.load(folder / "release" / "common.pt", weights_only=False)
    vars(content["args"]).update(changes)
    torch.save(content, folder / "release" / "common.pt")
    (folder / RECORD).unlink(missing_ok=True)  # it would name the changed file first


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """torch_dist folders of a dense model, a mixture, and one whose scores are sigmoids."""
    root = tmp_path_factory.mktemp("made")
    for kind in ("qwen2", "shared", "glm", "llama, biases"):
        run(hf_folder(root / kind / "hf", kind), root / kind / "mg", "torch_dist")
    return root


def refusal(source, target, to="hf"):
    with pytest.raises(UserError) as caught:
        run(source, target, to)
    assert not target.exists()
    return str(caught.value)


DENSE = {
    "normalization": "LayerNorm",
    "swiglu": False,
    "squared_relu": True,
    "apply_layernorm_1p": True,
    "apply_residual_connection_post_layernorm": True,
    "rotary_interleaved": True,
    "no_rope_freq": 4,
    "multi_latent_attention": True,
    "experimental_attention_variant": "dsa",
    "linear_attention_freq": 4,
    "attention_output_gate": True,
    "qk_l2_norm": True,
    "softmax_scale": 0.3,
    "softmax_type": "learnable",
    "glu_linear_offset": 1.0,
    "activation_func_clamp_value": 7.0,
    "num_layers": 6,
    "hidden_size": 48,
    "ffn_hidden_size": 96,
    "num_attention_heads": 8,
    "num_query_groups": 2,
    "kv_channels": 8,
    "untie_embeddings_and_output_weights": False,
    "add_bias_linear": True,
    "add_qkv_bias": False,
    "qk_layernorm": True,
    "norm_epsilon": 1e-5,
    "position_embedding_type": "yarn",
    "rotary_base": 1000000,
    "rotary_percent": 0.5,
    "rotary_seq_len_interpolation_factor": 2.0,
    "use_rope_scaling": True,
    "window_size": (5, 0),
}
MIXTURE = {
    "num_experts": 8,
    "moe_ffn_hidden_size": 32,
    "moe_layer_freq": 2,
    "moe_shared_expert_intermediate_size": None,
    "moe_shared_expert_gate": False,
    "moe_router_topk": 4,
    "moe_router_score_function": "sigmoid",
    "moe_router_pre_softmax": False,
    "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 1.5,
    "moe_router_num_groups": 3,
    "moe_apply_probs_on_input": True,
    "moe_latent_size": 16,
}
SIGMOID = {
    "moe_router_topk_scaling_factor": None,
    "moe_layer_freq": [0, 0, 1, 1],
    "rotary_percent": 1.0,
}
CHANGES = [
    *[("qwen2", name, value) for name, value in DENSE.items()],
    *[("shared", name, value) for name, value in MIXTURE.items()],
    *[("glm", name, value) for name, value in SIGMOID.items()],
]


@pytest.mark.parametrize(("kind", "name", "value"), CHANGES)
def test_an_argument_that_changes_the_numbers_is_refused(made, tmp_path, kind, name, value):
    folder = shutil.copytree(made / kind / "mg", tmp_path / "mg")
    was = getattr(args_of(folder), name)
    change(folder, **{name: value})
    text = refusal(folder, tmp_path / "hf")
    assert f"args.{name} = {value}" in text
    assert f", but config.json makes it {was}" in text


def test_no_argument_of_the_table_is_without_a_test():
    dims = dims_of({**config_of("shared"), "rope_parameters": YARN | {"rope_theta": 1e4}})
    tested = {name for _, name, _ in CHANGES} | {"rope_scaling_factor"}
    yarn = {name for name in model_args(dims) if name.startswith("yarn_")}
    assert tested == model_args(dims).keys() - NOT_ALONE - yarn


def test_all_differences_are_in_one_sentence(made, tmp_path):
    folder = shutil.copytree(made / "qwen2" / "mg", tmp_path / "mg")
    change(folder, rotary_base=5, swiglu=False, norm_epsilon=0.1)
    text = refusal(folder, tmp_path / "hf")
    assert len(text.strip().splitlines()) == 1
    assert "args.norm_epsilon = 0.1, but config.json makes it 1e-06; args.rotary_base = 5" in text
    assert "; args.swiglu = False, but" in text


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("qwen2", {"rotary_base": 10000, "ffn_hidden_size": None, "softmax_scale": None}),
        ("qwen2", {"moe_router_topk": 7, "moe_layer_freq": 2}),
        ("qwen2", {"window_size": (-1, 0)}),
        ("qwen2", {"rope_scaling_factor": 32.0, "yarn_mscale": 9.0}),
        ("llama, biases", {"add_qkv_bias": False}),
        ("shared", {"moe_router_topk_scaling_factor": 1.0, "ffn_hidden_size": 5}),
        ("shared", {"moe_layer_freq": [1, 1, 1, 1]}),
        ("glm", {"moe_router_num_groups": 1, "moe_router_group_topk": 1}),
        ("glm", {"moe_router_pre_softmax": True}),
    ],
)
def test_arguments_that_say_the_same_in_other_words_are_read(made, tmp_path, kind, changes):
    folder = shutil.copytree(made / kind / "mg", tmp_path / "mg")
    change(folder, **changes)
    assert run(folder, tmp_path / "hf", "hf").status == "written"


@pytest.mark.parametrize(
    "changes",
    [{"window_size": 5}, {"moe_layer_freq": 0}, {"moe_layer_freq": "x"}, {"rotary_base": "x"}],
)
def test_arguments_of_no_known_kind_are_differences(made, tmp_path, changes):
    folder = shutil.copytree(made / "shared" / "mg", tmp_path / "mg")
    change(folder, **changes)
    ((name, value),) = changes.items()
    assert f"args.{name} = {value}" in refusal(folder, tmp_path / "hf")


def with_config(folder, kind, **changes):
    """A HF folder whose config.json says more than its tensors show."""
    hf_folder(folder, kind)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


@pytest.mark.parametrize(
    ("config", "written"),
    [
        ({"rope_scaling": LLAMA3}, {"use_rope_scaling": True, "rope_scaling_factor": 32.0}),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.5}},
            {"rotary_seq_len_interpolation_factor": 2.5, "use_rope_scaling": False},
        ),
        (
            {"rope_scaling": YARN},
            {
                "position_embedding_type": "yarn",
                "use_rotary_position_embeddings": False,  # Megatron would make it rope again
                "yarn_rotary_scaling_factor": 4.0,
                "yarn_original_max_position_embeddings": 32768,
                "yarn_beta_fast": 32.0,
                "yarn_beta_slow": 1.0,
                "yarn_mscale": 1.0,
                "yarn_mscale_all_dim": 0.0,
                "yarn_correction_range_round_to_int": True,
            },
        ),
        (
            {"rope_scaling": {**YARN, "beta_fast": 16, "truncate": False, "mscale": 2.0,
                              "mscale_all_dim": 0.5}},
            {
                "yarn_beta_fast": 16.0,
                "yarn_mscale": 2.0,
                "yarn_mscale_all_dim": 0.5,
                "yarn_correction_range_round_to_int": False,
            },
        ),
        (WINDOWS, {"window_size": (6, 0), "window_attn_skip_freq": [0, 0, 1, 1]}),
        (
            {**WINDOWS, "max_window_layers": 0},
            {"window_size": (6, 0), "window_attn_skip_freq": None},
        ),
    ],
)  # fmt: skip
def test_rope_and_windows_are_written_and_come_back(tmp_path, config, written):
    source = with_config(tmp_path / "hf", "qwen2", **config)
    run(source, tmp_path / "mg", "torch_dist")
    args = vars(args_of(tmp_path / "mg"))
    assert {name: args[name] for name in written} == written
    run(tmp_path / "mg", tmp_path / "again", "hf")
    back, wanted = tensors_of(tmp_path / "again"), tensors_of(source)
    assert all(torch.equal(back[name], wanted[name]) for name in wanted)
    plain = hf_folder(tmp_path / "plain", "qwen2")  # the same tensors, without the setting
    (tmp_path / "mg" / RECORD).unlink()
    (tmp_path / "mg" / "config.json").write_text((plain / "config.json").read_text())
    changed = [name for name in ("position_embedding_type", *written) if name != "yarn_mscale"]
    text = refusal(tmp_path / "mg", tmp_path / "other")
    assert any(f"args.{name} = {args[name]}" in text for name in changed)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("yarn_rotary_scaling_factor", 8.0),
        ("yarn_original_max_position_embeddings", 4096),
        ("yarn_beta_fast", 16.0),
        ("yarn_beta_slow", 2.0),
        ("yarn_mscale", 0.5),
        ("yarn_correction_range_round_to_int", False),
    ],
)
def test_every_setting_of_yarn_is_held_against_the_config(tmp_path, name, value):
    source = with_config(tmp_path / "hf", "qwen2", rope_scaling=YARN)
    run(source, tmp_path / "mg", "torch_dist")
    change(tmp_path / "mg", yarn_mscale=None, yarn_mscale_all_dim=None)  # the default, unsaid
    assert run(tmp_path / "mg", tmp_path / "same", "hf").status == "written"
    change(tmp_path / "mg", **{"yarn_mscale_all_dim": 0.0, name: value})
    assert f"args.{name} = {value}" in refusal(tmp_path / "mg", tmp_path / "other")


def test_the_factor_of_llama3_is_held_against_the_config(tmp_path):
    run(with_config(tmp_path / "hf", "qwen2", rope_scaling=LLAMA3), tmp_path / "mg", "torch_dist")
    change(tmp_path / "mg", rope_scaling_factor=8.0)
    text = refusal(tmp_path / "mg", tmp_path / "other")
    assert "args.rope_scaling_factor = 8.0, but config.json makes it 32.0" in text


@pytest.mark.parametrize(
    ("kind", "config", "expected"),
    [
        (
            "qwen2",
            {"rope_scaling": {**LLAMA3, "high_freq_factor": 8.0}},
            "rope_type = llama3, high_freq_factor = 8: Megatron has only low_freq_factor = 1, ",
        ),
        (
            "qwen2",
            {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 4096}},
            "rope_type = llama3, original_max_position_embeddings = 4096: Megatron has only",
        ),
        (
            "glm",
            {"rope_scaling": {**YARN, "partial_rotary_factor": 0.5}},
            "rope_type = yarn: it turns 4 of 8 numbers, Megatron's yarn all of them",
        ),
        (
            "qwen2",
            {"rope_scaling": {**YARN, "factor": 1.0, "attention_factor": 1.5}},
            "attention_factor = 1.5: Megatron makes it 1",
        ),
    ],
)
def test_what_megatron_has_no_argument_for_is_refused(tmp_path, kind, config, expected):
    source = with_config(tmp_path / "hf", kind, **config)
    for to in ("torch_dist", "legacy"):
        assert expected in refusal(source, tmp_path / "mg", to)


@pytest.mark.parametrize(
    ("kind", "config", "having"),
    [
        ("llama, few kv heads", {"attention_bias": True}, "q, k, v and o"),
        ("llama, few kv heads", {"mlp_bias": True}, "mlp"),
        ("experts", {"attention_bias": True}, "q, k, v and o"),
    ],
)
def test_biases_that_megatron_could_not_load_are_refused(
    tmp_path, monkeypatch, kind, config, having
):
    monkeypatch.setitem(MODELS, "biased", {**MODELS[kind], **config})
    source = hf_folder(tmp_path / "hf", "biased")
    expected = f"biases on {having}: Megatron has them only on q, k, v or on every linear layer"
    assert expected in refusal(source, tmp_path / "mg", "torch_dist")


def test_what_megatron_does_not_take_from_a_checkpoint_is_said():
    dims = dims_of({**config_of("qwen3"), **WINDOWS})
    assert command_line(dims) == (
        "--norm-epsilon 1e-06 --qk-layernorm --window-size 6,0 --window-attn-skip-freq [0,0,1,1]"
    )
    llama3 = {**config_of("llama, few kv heads"), "rope_scaling": LLAMA3, "rms_norm_eps": 1e-5}
    assert command_line(dims_of(llama3)) == "--use-rope-scaling --rope-scaling-factor 32.0"
    assert "TransformerConfig yarn_rotary_scaling_factor=4.0 yarn_orig" in command_line(
        dims_of({**config_of("qwen2"), "rope_scaling": YARN})
    )
