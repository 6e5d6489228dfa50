"""Triton kernels of decoding against their plain references; interpreted where there is no GPU."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from pentad.ops import fused, paged_decode  # noqa: E402


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


def rand(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


DTYPES = [torch.float32] if DEVICE == "cpu" else [torch.float32, torch.bfloat16]
# the interpreter has no bf16 products
ATOL = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # values up to 8: rounding of sums; as stored


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "block_size", "window", "min_programs"),
    [
        (4, 2, 8, 4, None, 1),
        (16, 8, 64, 16, None, 512),
        (6, 2, 24, 16, 37, 40),
        (4, 1, 16, 4, 3, 8),
        (2, 2, 128, 16, None, 1),
    ],
)
def test_paged_decode(monkeypatch, dtype, heads, kv_heads, width, block_size, window, min_programs):
    monkeypatch.setattr(paged_decode, "MIN_PROGRAMS", min_programs)
    num_seqs, num_blocks, row = 4, 60, 12
    k, v = (rand(num_blocks, block_size, kv_heads, width, dtype=dtype) for _ in range(2))
    q = rand(num_seqs, heads, width, dtype=dtype)
    blocks = torch.stack([torch.randperm(num_blocks)[:row] for _ in range(num_seqs)])
    blocks = blocks.to(DEVICE, torch.int32)
    lengths = torch.tensor([1, block_size, row * block_size, 2 * block_size + 3], device=DEVICE)
    out = paged_decode.paged_decode(
        q, k, v, blocks.reshape(-1), torch.tensor([row], device=DEVICE), lengths, window
    )
    wanted = paged_decode.reference_decode(q, k, v, blocks, lengths, window)
    torch.testing.assert_close(out, wanted, atol=ATOL[dtype], rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm(dtype):
    x, weight = rand(5, 48, dtype=dtype), rand(48, dtype=dtype)
    wanted = fused.reference_norm(x, weight, 1e-6)
    torch.testing.assert_close(fused.norm(x, weight, 1e-6), wanted, atol=ATOL[dtype], rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_norm(dtype):
    x, y, weight = rand(5, 48, dtype=dtype), rand(5, 48, dtype=dtype), rand(48, dtype=dtype)
    total, normed = fused.add_norm(x, y, weight, 1e-6)
    wanted_total, wanted = fused.reference_add_norm(x, y, weight, 1e-6)
    assert torch.equal(total, wanted_total)
    torch.testing.assert_close(normed, wanted, atol=ATOL[dtype], rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (9, 3), (16, 8)])
def test_norm_rotate_of_parts_of_one_tensor(dtype, has_norm, heads, kv_heads):
    whole = rand(5, heads + kv_heads, 24, dtype=dtype)
    q, k = whole.split([heads, kv_heads], dim=1)
    weights = (rand(24, dtype=dtype), rand(24, dtype=dtype)) if has_norm else (None, None)
    angle = rand(5, 24)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    for x, weight, out in zip(
        (q, k), weights, fused.norm_rotate(q, k, *weights, cos, sin, 1e-6), strict=True
    ):
        wanted = fused.reference_rotate(x, weight, cos, sin, 1e-6)
        torch.testing.assert_close(out, wanted, atol=ATOL[dtype], rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [70, 1500])
def test_silu_mul_of_the_halves_of_one_tensor(dtype, width):
    gate, up = rand(5, 2 * width, dtype=dtype).chunk(2, dim=-1)
    wanted = fused.reference_silu_mul(gate, up)
    torch.testing.assert_close(fused.silu_mul(gate, up), wanted, atol=ATOL[dtype], rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_store(dtype):
    places = torch.randperm(20, device=DEVICE)[:5]
    k, v = rand(5, 4, 24, dtype=dtype).chunk(2, dim=1)
    ours = [torch.zeros(20, 2, 24, device=DEVICE, dtype=dtype) for _ in range(2)]
    theirs = [x.clone() for x in ours]
    fused.store(*ours, places, k, v)
    fused.reference_store(*theirs, places, k, v)
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
