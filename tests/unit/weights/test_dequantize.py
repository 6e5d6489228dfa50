"""Quantised folders are read as transformers dequantises them, in any blocks."""

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from pentad.core.errors import UserError
from pentad.core.quantization import Quantization, quantization_of
from pentad.weights import dequantize
from pentad.weights.dequantize import DequantizedFolder
from pentad.weights.hf import HfFolder
from pentad.weights.regions import full_box, slices

MXFP4 = Quantization("mxfp4")


def folder_of(path, tensors, quantization) -> DequantizedFolder:
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return DequantizedFolder(HfFolder(path), quantization)


def fp8(rows: int, columns: int, block: tuple[int, int], dtype: torch.dtype):
    torch.manual_seed(rows)
    shape = [-(-size // step) for size, step in zip((rows, columns), block, strict=True)]
    numbers = torch.randn(rows, columns).mul(50).to(torch.float8_e4m3fn)
    return numbers, (torch.rand(shape) * 1e-3).to(dtype)


def mxfp4(experts: int, rows: int, groups: int):
    torch.manual_seed(experts)
    packed = torch.randint(0, 256, (experts, rows, groups, 16), dtype=torch.uint8)
    return packed, torch.randint(0, 255, (experts, rows, groups), dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_is_dequantised_as_by_transformers(tmp_path, dtype, monkeypatch):
    monkeypatch.setattr(dequantize, "BUFFER_BYTES", 1000)
    numbers, scales = fp8(24, 40, (8, 10), dtype)
    plain = torch.randn(3, dtype=torch.bfloat16)
    tensors = {"a.weight": numbers, "a.weight_scale_inv": scales, "norm": plain}
    reader = folder_of(tmp_path, tensors, Quantization("fp8", (8, 10)))
    assert reader.infos.keys() == {"a.weight", "norm"}
    assert torch.equal(reader.read("norm", ((1, 3),)), plain[1:])
    for wanted in (torch.float32, torch.bfloat16):
        true = Fp8Dequantize(None)._dequantize_one(numbers, scales, wanted)
        for box in (full_box((24, 40)), ((7, 23), (9, 31)), ((3, 3), (0, 40))):
            out = torch.empty([stop - start for start, stop in box], dtype=wanted)
            reader.read_into("a.weight", box, out)
            assert torch.equal(out, true[slices(box)])


def test_the_last_blocks_may_be_cut_off(tmp_path):
    """As the keys of DeepSeek-V3: 576 rows in blocks of 128."""
    numbers, scales = fp8(9, 11, (4, 4), torch.float32)
    tensors = {"a.weight": numbers, "a.weight_scale_inv": scales}
    reader = folder_of(tmp_path, tensors, Quantization("fp8", (4, 4)))
    spread = scales.repeat_interleave(4, 0).repeat_interleave(4, 1)[:9, :11]
    assert torch.equal(reader.read("a.weight", full_box((9, 11))), numbers.float() * spread)


def test_mxfp4_is_dequantised_as_by_transformers(tmp_path):
    packed, exponents = mxfp4(3, 6, 2)
    tensors = {"down_proj_blocks": packed, "down_proj_scales": exponents}
    reader = folder_of(tmp_path, tensors, MXFP4)
    true = convert_moe_packed_tensors(packed, exponents)
    assert reader.infos["down_proj"].shape == tuple(true.shape) == (3, 64, 6)
    for box in (full_box(true.shape), ((1, 3), (5, 50), (2, 5)), ((0, 1), (33, 34), (0, 6))):
        assert torch.equal(reader.read("down_proj", box), true[slices(box)])


def test_scales_that_do_not_fit_are_named(tmp_path):
    numbers, scales = fp8(8, 8, (4, 4), torch.float32)
    with pytest.raises(UserError, match="_scale_inv: missing; the weight needs it as .2, 2"):
        folder_of(tmp_path, {"a.weight": numbers}, Quantization("fp8", (4, 4)))
    tensors = {"a.weight": numbers, "a.weight_scale_inv": scales}
    with pytest.raises(UserError, match=r"shape \[2, 2\]; the weight needs it as \[1, 1\]"):
        folder_of(tmp_path, tensors, Quantization("fp8"))
    packed, exponents = mxfp4(1, 2, 2)
    with pytest.raises(UserError, match="x_blocks: is .*, not bytes of 32 numbers each"):
        tensors = {"x_blocks": packed[..., :8].contiguous(), "x_scales": exponents}
        folder_of(tmp_path, tensors, MXFP4)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, None),
        ({"quant_method": "mxfp4"}, MXFP4),
        ({"quant_method": "fp8"}, Quantization("fp8", (128, 128))),
        ({"quant_method": "fp8", "weight_block_size": [64, 32]}, Quantization("fp8", (64, 32))),
    ],
)
def test_kinds_are_read_from_the_config(given, found):
    assert quantization_of({"quantization_config": given}) == found


@pytest.mark.parametrize(
    "given",
    [
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "fp8", "weight_block_size": None},
        {"quant_method": "fp8", "weight_block_size": [0, 128]},
        {"bits": 4},
        "fp8",
    ],
)
def test_other_kinds_are_refused(given):
    with pytest.raises(UserError, match="quantised in a way that is not read.*16-bit weights"):
        quantization_of({"quantization_config": given})
