"""Models of quantised folders, where a key asks for it, are those of the dequantised ones."""

import json

import pytest
import torch
from engine_toys import PolicyLoss, make_rows, train
from family_toys import FAMILY_CONFIGS
from safetensors.torch import load_file, save_file
from sections import engine_settings
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from pentad.checkpoint.exports import export_model
from pentad.core.errors import UserError
from pentad.engine.engine import Engine, build_engine
from pentad.models.registry import load_to_sample
from pentad.weights.hf import HfFolder

BLOCK = 8
CONFIGS = {
    "deepseek_v3": FAMILY_CONFIGS["deepseek_v3"],
    "gpt_oss": FAMILY_CONFIGS["gpt_oss"] | {"hidden_size": 32, "intermediate_size": 32},
}
KINDS = {
    "deepseek_v3": {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]},
    "gpt_oss": {"quant_method": "mxfp4"},
}


def as_fp8(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors of a weight in files, and what they stand for."""
    rows, columns = weight.shape
    scales = torch.rand(-(-rows // BLOCK), -(-columns // BLOCK)) * 0.01
    spread = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :columns]
    numbers = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {name: numbers, f"{name}_scale_inv": scales}, numbers.float() * spread


def as_mxfp4(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    experts, ins, outs = weight.shape
    packed = torch.randint(0, 256, (experts, outs, ins // 32, 16), dtype=torch.uint8)
    exponents = torch.randint(121, 125, packed.shape[:-1], dtype=torch.uint8)
    tensors = {f"{name}_blocks": packed, f"{name}_scales": exponents}
    return tensors, convert_moe_packed_tensors(packed, exponents).float()


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
