"""Models of quantised folders, where a key asks for it, are those of the dequantised ones."""

import json
import shutil

import pytest
import torch
from engine_toys import PolicyLoss, make_rows, train
from family_toys import FAMILY_CONFIGS
from quantised_toys import BLOCK, as_fp8, as_mxfp4
from safetensors.torch import load_file, save_file
from sections import engine_settings
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from pentad.checkpoint.exports import export_model
from pentad.cli.main import app
from pentad.core.errors import UserError
from pentad.engine.engine import Engine, build_engine
from pentad.models.registry import load_to_sample
from pentad.weights.hf import HfFolder

CONFIGS = {
    "deepseek_v3": FAMILY_CONFIGS["deepseek_v3"],
    "gpt_oss": FAMILY_CONFIGS["gpt_oss"] | {"hidden_size": 32, "intermediate_size": 32},
}
KINDS = {
    "deepseek_v3": {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]},
    "gpt_oss": {"quant_method": "mxfp4"},
}


@pytest.fixture(scope="module", params=CONFIGS)
def folders(request, tmp_path_factory):
    """The folder with 8 or 4 bits, and the same numbers in 32."""
    family = request.param
    place = tmp_path_factory.mktemp(family)
    plain, quantised = place / "plain", place / "quantised"
    torch.manual_seed(4)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIGS[family])).save_pretrained(plain)
    true, packed = load_file(plain / "model.safetensors"), {}
    ends = ("gate_up_proj", "down_proj") if family == "gpt_oss" else ("_proj.weight", "mqa.weight")
    for name, weight in true.items():
        if name.endswith(ends):
            given, true[name] = (as_mxfp4 if family == "gpt_oss" else as_fp8)(name, weight)
            packed |= given
        else:
            packed[name] = weight
    assert len(packed) > len(true)
    save_file(true, plain / "model.safetensors", metadata={"format": "pt"})
    quantised.mkdir()
    save_file(packed, quantised / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = KINDS[family]
    (quantised / "config.json").write_text(json.dumps(config))
    return quantised, plain


def make(folder, backend: str, **settings) -> Engine:
    return build_engine(folder, engine_settings(dequantize=True, **settings), backend=backend)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", ["archon", "fsdp"])
def test_weights_are_the_dequantised_ones(folders, backend, dtype):
    if backend == "fsdp" and "gpt_oss" in str(folders[0]):
        pytest.skip("fsdp does not build attention sinks")
    mine, true = (make(folder, backend, param_dtype=dtype) for folder in folders)
    true = dict(true.iter_weights())
    mine = dict(mine.iter_weights())
    assert mine.keys() == true.keys()
    assert all(torch.equal(tensor, true[name]) for name, tensor in mine.items())


def test_exports_are_whole_and_not_quantised(folders, tmp_path):
    engine = make(folders[0], "archon", dtype="bfloat16")
    engine.load_tag("ref", folders[0])
    train(engine, make_rows(4), PolicyLoss())
    export_model(engine, str(tmp_path / "out"))
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"
    assert HfFolder(tmp_path / "out").infos.keys() == HfFolder(folders[1]).infos.keys()
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_nothing_is_dequantised_without_the_key(folders):
    said = r"model folder = .*quantised \((fp8|mxfp4)\); set actor.dequantize: true"
    with pytest.raises(UserError, match=said):
        build_engine(folders[0], engine_settings())
    place = {"device": "cpu", "dtype": torch.float32}
    with pytest.raises(UserError, match=said):
        load_to_sample(folders[0], **place)
    mine = load_to_sample(folders[0], **place, dequantize=True).state_dict()
    true = load_to_sample(folders[1], **place).state_dict()
    assert all(torch.equal(tensor, true[name]) for name, tensor in mine.items())


def convert(*words):
    done = CliRunner().invoke(app, ["convert", *map(str, words)])
    return done.exit_code, " ".join(done.output.split())


def test_a_converted_folder_holds_the_weights_it_stands_for(folders, tmp_path):
    quantised, plain = folders
    out, said = tmp_path / "out", "quantised ({}); give --dequantize to read them as 16-bit weights"
    kind = KINDS["gpt_oss" if "gpt_oss" in str(plain) else "deepseek_v3"]["quant_method"]
    code, printed = convert(quantised, out, "--to", "hf")
    assert code == 2 and said.format(kind) in printed and not out.exists()
    code, printed = convert(quantised, out, "--to", "hf", "--dequantize")
    assert code == 0, printed
    true, found = load_file(plain / "model.safetensors"), load_file(out / "model.safetensors")
    assert found.keys() == true.keys()
    assert all(torch.equal(tensor, true[name]) for name, tensor in found.items())
    config = json.loads((out / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "float32"
    AutoModelForCausalLM.from_pretrained(out)
    assert "nothing was done" in convert(quantised, out, "--to", "hf", "--dequantize")[1]
    words = ["--to", "hf", "--dequantize", "--dtype", "bfloat16"]
    assert convert(quantised, tmp_path / "b", *words)[0] == 0
    for name, tensor in load_file(tmp_path / "b/model.safetensors").items():
        # The family keeps the bias of the router in float32.
        dtype = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
        assert tensor.dtype == dtype and torch.equal(tensor, true[name].to(dtype)), name
    code, printed = convert(plain, tmp_path / "c", "--to", "hf", "--dequantize")
    assert code == 2 and "are not quantised; leave it out" in printed


def test_layers_that_are_not_read_are_left_out(folders, tmp_path):
    """And a folder that lacks a tensor is rejected."""
    if "deepseek_v3" not in str(folders[0]):
        pytest.skip("the other family has no layers for multi-token prediction")
    source = tmp_path / "source"
    shutil.copytree(folders[0], source)
    tensors = load_file(source / "model.safetensors")
    further = {**tensors, "model.layers.3.eh_proj.weight": torch.ones(2, 2)}
    save_file(further, source / "model.safetensors", metadata={"format": "pt"})
    assert convert(source, tmp_path / "out", "--to", "hf", "--dequantize")[0] == 0
    assert HfFolder(tmp_path / "out").infos.keys() == HfFolder(folders[1]).infos.keys()
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["num_nextn_predict_layers"] == 0
    del tensors["model.norm.weight"]
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    code, printed = convert(source, tmp_path / "b", "--to", "hf", "--dequantize")
    assert code == 2 and "model.norm.weight" in printed


def test_adapters_are_not_merged_into_quantised_weights(folders, tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text('{"peft_type": "LORA", "r": 1}')
    words = [tmp_path / "adapter", tmp_path / "out", "--merge", "--base", folders[0]]
    code, printed = convert(*words, "--dequantize")
    assert code == 2 and "--dequantize: an adapter is merged into 16-bit weights" in printed
