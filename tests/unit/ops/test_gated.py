"""The gated activation and its gradient: kernels against plain torch, interpreted where there is no
GPU."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="the kernel needs Triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from pentad.ops import fused, gated, gated_kernel  # noqa: E402

WIDTHS = [1, 70, 96, gated_kernel.MAX_BLOCK + 5, 3 * gated_kernel.MAX_BLOCK]
ROUNDING = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}
"""Relative: a number is rounded once; twice the half of its last bit."""


def draw(num_rows, width, dtype):
    seed = torch.Generator().manual_seed(num_rows + width)
    grad, gate, up = (torch.randn(num_rows, width, generator=seed) for _ in range(3))
    h = torch.cat([3 * gate, up], dim=-1)
    weights = torch.rand(num_rows, generator=seed)
    return grad.to(DEVICE, dtype), h.to(DEVICE, dtype), weights.to(DEVICE)


def wanted_of(grad, h, weights):
    """In fp64, by autograd."""
    h, weights = h.double().requires_grad_(), weights.double().requires_grad_()
    gate, up = h.chunk(2, dim=-1)
    a = weights[:, None] * torch.nn.functional.silu(gate) * up
    return torch.autograd.grad(a, (h, weights), grad.double())


def assert_rounded_once(found, wanted, dtype):
    torch.testing.assert_close(found.double(), wanted, rtol=ROUNDING[dtype], atol=1e-6)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_both_halves_are_computed_wide_and_rounded_once(dtype, width):
    grad, h, weights = draw(5, width, dtype)
    found = gated_kernel.silu_mul_gradient(grad, h)
    assert found.dtype == dtype and found.is_contiguous()
    assert_rounded_once(found, wanted_of(grad, h, torch.ones_like(weights))[0], dtype)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_weights_scale_it_and_their_gradient_is_summed_wide(dtype, width):
    grad, h, weights = draw(5, width, dtype)
    found, dweights = gated_kernel.weighted_silu_mul_gradient(grad, h, weights)
    wanted, dwanted = wanted_of(grad, h, weights)
    assert_rounded_once(found, wanted, dtype)
    assert dweights.dtype == torch.float32
    torch.testing.assert_close(dweights.double(), dwanted, rtol=1e-5, atol=1e-4)


def test_rows_may_lie_apart_and_gradients_may_be_views():
    grad, h, weights = draw(6, 40, torch.float32)
    wide = torch.zeros(6, 100, device=DEVICE)
    wide[:, 7:87] = h
    by_columns = grad.t().contiguous().t()
    wanted = gated_kernel.weighted_silu_mul_gradient(grad, h, weights)
    every_other = torch.stack([weights, weights], dim=1)[:, 0]
    found = gated_kernel.weighted_silu_mul_gradient(by_columns, wide[:, 7:87], every_other)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    one = torch.ones((), device=DEVICE).expand(6, 40)
    wanted = gated_kernel.silu_mul_gradient(one.contiguous(), h)
    assert torch.equal(gated_kernel.silu_mul_gradient(one, wide[:, 7:87]), wanted)


def test_nothing_gives_nothing():
    grad, h, weights = draw(0, 8, torch.float32)
    found, dweights = gated_kernel.weighted_silu_mul_gradient(grad, h, weights)
    assert found.shape == gated_kernel.silu_mul_gradient(grad, h).shape == (0, 16)
    assert gated_kernel.silu_mul(h, weights).shape == (0, 8)
    assert dweights.shape == (0,)


def test_large_gates_have_the_slopes_of_their_ends():
    gate = torch.tensor([[-200.0, -90.0, 0.0, 90.0, 200.0]], device=DEVICE)
    h = torch.cat([gate, torch.full_like(gate, 2.0)], dim=-1)
    found = gated_kernel.silu_mul_gradient(torch.ones_like(gate), h)
    wanted = torch.tensor([[0, 0, 1, 2, 2, 0, 0, 0, 90, 200]], device=DEVICE, dtype=torch.float)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-30)


def test_a_row_does_not_depend_on_the_others():
    grad, h, weights = draw(9, 130, torch.float32)
    whole = gated_kernel.weighted_silu_mul_gradient(grad, h, weights)
    part = gated_kernel.weighted_silu_mul_gradient(grad[4:6], h[4:6], weights[4:6])
    assert all(torch.equal(a[4:6], b) for a, b in zip(whole, part, strict=True))


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_forward_is_that_of_the_sampler_and_rounds_as_plain_torch(dtype, is_weighted):
    _, h, weights = draw(7, 1100, dtype)
    given = weights if is_weighted else None
    gate, up = h.chunk(2, dim=-1)
    found = gated_kernel.silu_mul(h, given)
    assert found.dtype == dtype
    assert torch.equal(found, fused.silu_mul(gate, up, given))
    wanted = fused.reference_silu_mul(gate, up, given)
    # Rounded up to three times, and the interpreter cuts off instead.
    torch.testing.assert_close(found, wanted, rtol=4 * ROUNDING[dtype], atol=1e-6)


@pytest.mark.parametrize("is_weighted", [False, True])
def test_experts_and_dense_layers_have_the_gradients_of_plain_torch(monkeypatch, is_weighted):
    grad, h, weights = draw(7, 33, torch.float32)
    leaves = [h.requires_grad_()] + [weights.requires_grad_()] * is_weighted
    runs = []
    for has_kernel in (True, False):
        monkeypatch.setattr(gated, "has_kernel", lambda h, answer=has_kernel: answer)
        a = gated.weighted_silu_mul(*leaves) if is_weighted else gated.silu_mul(h)
        runs.append((a, *torch.autograd.grad(a, leaves, grad)))
    for mine, true in zip(*runs, strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_on_a_cpu_it_is_plain_torch_bit_by_bit(dtype):
    grad, h, _ = (x.cpu() for x in draw(7, 33, dtype))
    h.requires_grad_()
    gate, up = h.chunk(2, dim=-1)
    wanted = torch.nn.functional.silu(gate) * up
    found = gated.silu_mul(h)
    assert torch.equal(found, wanted)
    gradients = [torch.autograd.grad(y, h, grad)[0] for y in (found, wanted)]
    assert torch.equal(*gradients)


def test_the_operations_are_what_they_say_to_the_compiler():
    grad, h, weights = draw(4, 6, torch.float32)
    ops = torch.ops.pentad
    torch.library.opcheck(ops.silu_mul_gradient.default, (grad, h))
    torch.library.opcheck(ops.weighted_silu_mul_gradient.default, (grad, h, weights))
    h.requires_grad_()
    torch.library.opcheck(ops.silu_mul.default, (h, None))
    torch.library.opcheck(ops.silu_mul.default, (h, weights.requires_grad_()))
