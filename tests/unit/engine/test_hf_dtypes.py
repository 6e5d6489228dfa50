"""Mixtures of transformers in 16 bits: routers and their biases stay in float32 as there."""

import pytest
import torch
from engine_toys import PolicyLoss, bring_back, keep_state, make_rows, train
from family_toys import FAMILY_CONFIGS
from sections import engine_settings
from transformers import AutoConfig, AutoModelForCausalLM

from pentad.checkpoint.exports import export_model
from pentad.engine.engine import Engine, build_engine
from pentad.weights.hf import HfFolder

CONFIGS = {
    "deepseek_v3": FAMILY_CONFIGS["deepseek_v3"],
    "ernie4_5_moe": FAMILY_CONFIGS["ernie4_5_moe"],
    "hunyuan_v1_moe": FAMILY_CONFIGS["hunyuan_v1_moe"] | {"rope_parameters": None},
}
NARROW = {"dtype": "bfloat16", "param_dtype": "bfloat16"}


@pytest.fixture(params=CONFIGS)
def folder(request, tmp_path):
    """A folder whose numbers need more than 16 bits."""
    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIGS[request.param]))
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(0.1 * torch.randn_like(tensor))
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def make(folder, **settings) -> Engine:
    return build_engine(folder, engine_settings(**settings), backend="fsdp")


def test_weights_are_held_and_saved_in_transformers_dtypes(folder, tmp_path):
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    wide = {name for name, tensor in theirs.items() if tensor.dtype == torch.float32}
    engine = make(folder, **NARROW)
    held = engine.weight_shards()
    assert wide
    assert held.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert held[name].tensor.dtype == tensor.dtype, name
        assert torch.equal(held[name].tensor, tensor), name
    export_model(engine, str(tmp_path / "saved"))
    saved = HfFolder(tmp_path / "saved").infos
    published = engine.published()[1]
    sources = {
        r.source for name in wide for r in engine.held.whole.weight_map.entries[name].regions
    }
    assert {name for name, info in saved.items() if info.dtype == torch.float32} == sources
    assert published == saved


@pytest.mark.parametrize(
    ("param_dtype", "reshard"),
    [("float32", "never"), ("float32", "always"), ("bfloat16", "always")],
)
def test_a_pass_computes_with_what_transformers_keeps_wide(folder, param_dtype, reshard):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    theirs = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    engine = make(
        folder,
        dtype="bfloat16",
        param_dtype=param_dtype,
        reshard_after_forward_policy=reshard,
    )
    seen = {}

    def note(name, module, args) -> None:
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if f"{name}.{key}" in theirs:
                seen[f"{name}.{key}"] = tensor.dtype

    for name, module in engine.decoder.named_modules():
        module.register_forward_pre_hook(lambda *args, name=name: note(name, *args))
    train(engine, make_rows(4), PolicyLoss())
    gates = {name for name in theirs if "gate.w" in name}
    assert gates & seen.keys() == gates
    assert all(theirs[name] == dtype for name, dtype in seen.items())


def test_recovery_brings_back_what_no_optimizer_moves(folder):
    engine = make(folder, **NARROW)
    kept = keep_state(engine)
    biases = {name for name in kept[0] if "e_score_correction_bias" in name}
    assert bool(biases) == ("hunyuan" not in engine.dims.family)
    before = {name: tensor.clone() for name, tensor in engine.iter_weights()}
    train(engine, make_rows(4), PolicyLoss())
    for name in biases:
        engine.state_tensors()[name].fill_(9.0)
    bring_back(engine, kept)
    for name, tensor in engine.iter_weights():
        assert torch.equal(tensor, before[name]), name
