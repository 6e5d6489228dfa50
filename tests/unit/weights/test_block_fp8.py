"""Weights in fp8 with a scale per block: as read from a folder, and as servers hold them."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from pentad.core.quantization import fp8_config, fp8_problems, is_quantised, quantization_of
from pentad.models.families import map_of, public_models
from pentad.weights.block_fp8 import FP8, dequantise, dequantised, quantise, quantised
from pentad.weights.dequantize import DequantizedFolder
from pentad.weights.hf import HfFolder
from pentad.weights.regions import full_box

QWEN = public_models()["Qwen/Qwen3-0.6B"]
MIXTURE = public_models()["Qwen/Qwen3-30B-A3B"]


def shapes_of(dims):
    return {name: source.shape for name, source in map_of(dims).sources.items()}


def weight(rows, columns, spread=1.0):
    generator = torch.Generator().manual_seed(rows + columns)
    return torch.randn(rows, columns, generator=generator).mul_(spread).bfloat16()


def test_a_block_is_scaled_to_the_largest_number_of_the_format():
    given = weight(256, 384)
    given[:128, :128] *= 1000
    small, scales = quantise(given)
    assert (small.dtype, small.shape, scales.shape) == (FP8, given.shape, (2, 3))
    for i in range(2):
        for j in range(3):
            rows, columns = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            block, found = given[rows, columns].float(), small[rows, columns].float()
            assert scales[i, j] == block.abs().max() / 448 and found.abs().max() == 448
            # Half a step of the largest binade, and of a number with three bits after the first.
            error = (found * scales[i, j] - block).abs()
            assert (error <= scales[i, j] * 16 * (1 + 1e-6)).all()
            is_normal = found.abs() >= 2**-6
            assert (error <= block.abs() * 2**-4 * (1 + 1e-6))[is_normal].all()


@pytest.mark.parametrize("value", [0.0, 1e-38])
def test_blocks_of_zeros_and_of_the_smallest_numbers_stay_finite(value):
    small, scales = quantise(torch.full((128, 256), value))
    found = dequantise(small, scales, torch.float32)
    assert scales.isfinite().all() and (found - value).abs().max() <= value * 2**-4


def test_a_folder_of_quantised_weights_reads_as_what_servers_compute_with(tmp_path):
    name = "model.layers.0.mlp.up_proj.weight"
    given = {name: weight(256, 128), "model.norm.weight": weight(1, 128)[0]}
    files = dict(quantised(given.items()))
    assert list(files) == [name, name + "_scale_inv", "model.norm.weight"]
    save_file(files, tmp_path / "model.safetensors")
    config = fp8_config({name: tensor.shape for name, tensor in given.items()})
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    kind = quantization_of({"quantization_config": config})
    folder = DequantizedFolder(HfFolder(tmp_path), kind)
    read = {n: folder.read(n, full_box(info.shape)) for n, info in folder.infos.items()}
    held = dict(dequantised(files.items(), torch.float32))
    assert read.keys() == held.keys() == given.keys()
    assert all(torch.equal(read[n], held[n]) for n in given)
    assert torch.equal(read["model.norm.weight"], given["model.norm.weight"])


def test_linear_layers_are_quantised_and_nothing_else():
    names = {n for n, shape in shapes_of(MIXTURE).items() if is_quantised(n, shape)}
    assert len(names) == 48 * (4 + 128 * 3)
    kept = fp8_config(shapes_of(MIXTURE))["modules_to_not_convert"]
    layers = {f"model.layers.{layer}.mlp.gate" for layer in range(48)}
    heads = {"lm_head", "score"}  # the second is that of a critic, in some folders
    assert set(kept) == layers | heads | {"model.embed_tokens"}


@pytest.mark.parametrize(
    ("dims", "ways", "rule"),
    [
        (QWEN, 1, None),
        (QWEN, 8, None),
        (MIXTURE, 2, None),
        (MIXTURE, 4, "experts.0.gate_proj.weight has 192 rows and 2048 columns on each of 4 GPUs"),
        (replace(QWEN, intermediate_size=3000), 1, "gate_proj.weight has 3000 rows"),
        (public_models()["HuggingFaceTB/SmolLM2-135M"], 1, "has 576 rows and 576 columns,"),
        (public_models()["openai/gpt-oss-20b"], 1, "experts of this family"),
        (public_models()["mistralai/Mixtral-8x7B-v0.1"], 1, "experts of this family"),
    ],
)
def test_models_without_whole_blocks_on_each_gpu_are_rejected(dims, ways, rule):
    found = list(fp8_problems(shapes_of(dims), dims, ways))
    assert bool(found) == bool(rule) and (not rule or rule in found[0].rule)
