"""Attention over short sequences as one tile each, against the masked reference."""

import os

import pytest
import torch

from pentad.ops.attention import VarlenAttend, build_attend, reference_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

short_kernel = pytest.importorskip("pentad.ops.short_kernel")
DTYPE, LIMIT = (torch.bfloat16, 1e-2) if DEVICE == "cuda" else (torch.float32, 1e-5)
"""bf16 has 8 bits; the interpreter computes float32."""


def inputs(lengths, heads, kv_heads, width):
    gen = torch.Generator().manual_seed(0)
    shapes = [(sum(lengths), num, width) for num in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(s, generator=gen).to(DEVICE, DTYPE) for s in shapes]


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 1, 5, 1000])
@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "width"),
    [
        ([1, 7, 16, 3], 4, 2, 16),
        ([40, 1, 33, 90, 128, 64, 65], 9, 3, 64),
        ([2, 100], 2, 2, 24),
        ([3, 20], 2, 1, 8),
        ([5, 64], 4, 1, 128),
    ],
)
def test_values_and_gradients_equal_the_reference(lengths, heads, kv_heads, width, window):
    q, k, v, grad = inputs(lengths, heads, kv_heads, width)
    mine = [x.clone().requires_grad_() for x in (q, k, v)]
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    attend = VarlenAttend(lengths, device=torch.device(DEVICE), is_short=True)
    out = attend(0, *mine, window)
    plain = reference_attention(*exact, lengths, window)
    found = torch.autograd.grad(out, mine, grad)
    wanted = torch.autograd.grad(plain, exact, grad.double())
    for one, true in zip((out, *found), (plain, *wanted), strict=True):
        assert (one.double() - true).norm() <= LIMIT * true.norm()


@pytest.mark.gpu
def test_strided_inputs_and_repeated_runs_have_the_same_bits():
    lengths = [9, 30, 60]
    q, k, v, _ = inputs(lengths, 4, 2, 16)
    bounds = torch.tensor([0, 9, 39, 99], dtype=torch.int32, device=DEVICE)
    out = short_kernel.short_attend(q, k, v, bounds, 64, 0)
    apart = torch.cat([v, v], dim=-1)[..., :16]
    assert torch.equal(short_kernel.short_attend(q, k, apart, bounds, 64, 0), out)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize(
    ("lengths", "longest", "is_short"),
    [([3, 90], None, True), ([3, 90], 128, False), ([3, 90], 100, True), ([200, 3], 100, False)],
)
def test_the_kernel_takes_calls_without_longer_sequences(lengths, longest, is_short, monkeypatch):
    monkeypatch.setattr("pentad.ops.attention.flash4.has_flash4", lambda device: True)
    device = torch.device(DEVICE)
    attend = build_attend(
        lengths, device=device, dtype=torch.bfloat16, head_dim=64, longest=longest
    )
    assert attend.is_short is is_short
