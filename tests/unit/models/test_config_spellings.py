"""Whatever way a config.json spells rope and windows, logits are those transformers computes."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pentad.core.errors import UserError
from pentad.models.decoder import causal_attend
from pentad.models.families import dims_of
from pentad.models.registry import load_model

SIZES = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 8},
    "qwen3_moe": EXPERTS,
    "glm4_moe": {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1},
}
THETA = {"rope_theta": 300.0}
OLD_LENGTH = {"original_max_position_embeddings": 16}
LLAMA3 = {"factor": 3.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
KINDS = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {"rope_type": "llama3", **LLAMA3},
    "yarn": {"rope_type": "yarn", "factor": 3.0},
}
IDS = torch.randint(0, 61, (40,), generator=torch.Generator().manual_seed(3))


def old(scaling: dict) -> dict:
    return {"type": scaling["rope_type"], **{k: v for k, v in scaling.items() if k != "rope_type"}}


def spellings(scaling: dict) -> dict[str, dict]:
    """Every place in which a config.json may have a scaling."""
    plain = {"rope_type": "default", "rope_theta": 9.0}
    inner = {**scaling, **OLD_LENGTH} if scaling["rope_type"] != "linear" else scaling
    return {
        "rope_scaling": {"rope_scaling": inner, **THETA},
        "rope_scaling with type": {"rope_scaling": old(inner), **THETA},
        "rope_scaling with theta": {"rope_scaling": {**inner, **THETA}, "rope_theta": 7.0},
        "rope_parameters": {"rope_parameters": {**inner, **THETA}},
        "rope_parameters with type": {"rope_parameters": {**old(inner), **THETA}},
        "rope_parameters, theta beside": {"rope_parameters": inner, **THETA},
        "rope_scaling over rope_parameters": {"rope_scaling": inner, "rope_parameters": plain},
        "empty rope_scaling": {"rope_scaling": {}, "rope_parameters": {**inner, **THETA}},
        "no scaling over rope_parameters": {
            "rope_scaling": {"type": "default"},
            "rope_parameters": {**inner, **THETA},
        },
        "original length beside": {"rope_parameters": {**scaling, **THETA}, **OLD_LENGTH},
        "original length in both": {
            "rope_scaling": {**inner, "original_max_position_embeddings": 48},
            **THETA,
            **OLD_LENGTH,
        },
        "no original length": {"rope_parameters": {**scaling, **THETA}},
    }


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    """A folder with weights large enough that positions matter; its config is the test's."""
    place = tmp_path_factory.mktemp(request.param)
    config = AutoConfig.for_model(request.param, **SIZES, **FAMILIES[request.param])
    torch.manual_seed(2)
    AutoModelForCausalLM.from_config(config).save_pretrained(place)
    return place


def write_config(folder, **more: object) -> None:
    family = json.loads((folder / "config.json").read_text())["model_type"]
    config = {"model_type": family, **SIZES, **FAMILIES[family], **more}
    (folder / "config.json").write_text(json.dumps(config))


@torch.no_grad()
def both_logits(folder, **more: object) -> tuple[torch.Tensor, torch.Tensor]:
    write_config(folder, **more)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = load_model(folder)
    ours = model.logits(model(IDS, torch.arange(len(IDS)), causal_attend))
    return ours, theirs(IDS[None]).logits[0]


def assert_same(ours: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
    error = (ours - theirs).abs().max() / theirs.abs().max()
    # fp32 on both sides; another reading of a config is off by more than 1e-2.
    assert error < 1e-4, f"{what}: off by {error:.1e} of the largest logit"


@pytest.mark.parametrize("kind", KINDS)
def test_a_rope_scaling_is_read_from_every_place_it_may_stand_in(folder, kind):
    if kind != "yarn" and not folder.name.startswith(("llama", "glm4_moe")):
        pytest.skip("the families between the two read it with the same code")
    seen = {}
    for what, given in spellings(KINDS[kind]).items():
        ours, seen[what] = both_logits(folder, **given)
        assert_same(ours, seen[what], what)
    plain = seen["no scaling over rope_parameters"]
    differs = [what for what, logits in seen.items() if not torch.allclose(logits, plain)]
    assert len(differs) == len(seen) - 1, "positions must matter, or the test shows nothing"


def test_theta_is_read_from_every_place_it_may_stand_in(folder):
    for given in ({}, THETA, {"rope_parameters": THETA}, {"rope_scaling": {**THETA}}):
        assert_same(*both_logits(folder, **given), what=str(given))


WINDOWS = (
    {"use_sliding_window": True, "sliding_window": 7},
    {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    {"use_sliding_window": False, "sliding_window": 7, "max_window_layers": 0},
    {"use_sliding_window": True, "sliding_window": None, "layer_types": ["full_attention"] * 3},
    {
        "use_sliding_window": True,
        "sliding_window": 7,
        "layer_types": ["full_attention", "full_attention", "sliding_attention"],
    },
)


@pytest.mark.parametrize("number", range(len(WINDOWS)))
def test_a_window_applies_where_transformers_applies_it(folder, number):
    given = WINDOWS[number]
    if folder.name.startswith("qwen2_moe") and given["sliding_window"] is None:
        pytest.skip("transformers raises on it")
    assert_same(*both_logits(folder, **given), what=str(given))


@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling", ""])
def test_a_rotary_factor_of_nothing_is_refused_in_every_place(place):
    """transformers then turns nothing; it is not as good as left out."""
    config = {"model_type": "glm4_moe", **SIZES, **FAMILIES["glm4_moe"]}
    more: dict = {"partial_rotary_factor": 0}
    said = f"{place}.partial_rotary_factor" if place else "partial_rotary_factor"
    with pytest.raises(UserError, match=f"config.json: {said} = 0: must be a number above 0"):
        dims_of(config | ({place: more} if place else more))


def test_what_transformers_would_not_run_causally_is_refused(folder):
    write_config(folder, is_causal=False)
    with pytest.raises(UserError, match="is_causal = False: tokens attend to later ones"):
        load_model(folder)


def test_sliding_layers_without_a_window_are_refused():
    config = {"model_type": "qwen3", **SIZES, "layer_types": ["sliding_attention"] * 3}
    with pytest.raises(UserError, match="layer_types = .*set no window"):
        dims_of(config)
    assert dims_of(config | {"layer_types": 3}).sliding_window is None


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "llama"])
def test_a_bias_that_a_family_has_not_is_refused(family):
    config = {"model_type": family, **SIZES, **FAMILIES[family], "mlp_bias": True}
    with pytest.raises(UserError, match=f"mlp_bias = True: the ffn of {family} has no bias"):
        dims_of(config)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 10**12),
        ("num_hidden_layers", 10**9),
        ("vocab_size", 10**400),
        ("rms_norm_eps", 10**400),
        ("rope_theta", float("inf")),
        ("max_position_embeddings", 10**30),
    ],
)
def test_sizes_no_model_has_are_refused_by_name(key, value):
    with pytest.raises(UserError, match=f"config.json: {key} = ") as caught:
        dims_of({"model_type": "llama", **SIZES, key: value})
    assert len(str(caught.value)) < 300


def test_sizes_that_together_fit_nowhere_are_refused():
    with pytest.raises(UserError, match="makes [0-9]e.1[0-9] parameters"):
        dims_of({"model_type": "llama", **SIZES, "hidden_size": 1 << 24, "vocab_size": 1 << 24})
