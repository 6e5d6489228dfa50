"""A folder with quantised weights as a Megatron folder, and served, where a flag asks for it."""

import json
import shutil

import torch
from quantised_toys import BLOCK, as_fp8
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from pentad.cli import serve as serve_command
from pentad.cli.main import app
from pentad.models.families import dims_of
from pentad.models.registry import create_model, load_to_sample, save_model


def command(*words):
    return CliRunner().invoke(app, [*map(str, words)])


def test_quantised_folders_become_megatrons_and_can_be_served(byte_folder, tmp_path, monkeypatch):
    plain, quantised = tmp_path / "plain", tmp_path / "quantised"
    shutil.copytree(byte_folder, plain)
    model = create_model(dims_of(byte_folder), seed=1)
    save_model(model, plain, source_folder=byte_folder)
    shutil.copytree(plain, quantised)
    true, packed = load_file(plain / "model.safetensors"), {}
    for name, weight in true.items():
        given = {name: weight}
        if name.endswith("_proj.weight"):
            given, true[name] = as_fp8(name, weight)
        packed |= given
    save_file(packed, quantised / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    config |= {"quantization_config": {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}}
    (quantised / "config.json").write_text(json.dumps(config))
    words = ["--to", "legacy", "--tp", 2, "--dequantize"]
    assert command("convert", quantised, tmp_path / "mg", *words).exit_code == 0
    assert command("convert", tmp_path / "mg", tmp_path / "back").exit_code == 0
    found = load_file(tmp_path / "back/model.safetensors")
    assert found.keys() == true.keys()
    assert all(torch.equal(tensor, true[name]) for name, tensor in found.items())
    served = []

    def until_signal(endpoints, *_):
        served.append(endpoints.service.sampler.engine.runner.model)

    monkeypatch.setattr(serve_command, "until_signal", until_signal)
    monkeypatch.setattr(serve_command.asyncio, "run", lambda nothing: None)
    words = ["serve", quantised, "--port", "0", "--device", "cpu", "--dtype", "float32"]
    refused = command(*words)
    assert refused.exit_code == 2 and "give --dequantize" in " ".join(refused.output.split())
    assert command(*words, "--dequantize").exit_code == 0
    same = load_to_sample(tmp_path / "back", device="cpu", dtype=torch.float32).state_dict()
    assert all(torch.equal(tensor, same[name]) for name, tensor in served[0].state_dict().items())
    config = json.loads((plain / "config.json").read_text())
    other = shutil.copytree(plain, tmp_path / "other")
    config["quantization_config"] = {"quant_method": "awq", "bits": 4}
    (other / "config.json").write_text(json.dumps(config))
    refused = command("serve", other, "--dequantize")
    assert refused.exit_code == 2 and "quantised in a way that is not read" in " ".join(
        refused.output.split()
    )
    refused = command("serve", plain, "--dequantize")
    assert refused.exit_code == 2 and "not quantised; leave it out" in " ".join(
        refused.output.split()
    )
