"""Sorted pairs, grouped products and their sums against the plain loop over experts."""

import pytest
import torch

from pentad.ops import experts
from pentad.ops.experts import (
    can_group,
    grouped_linear,
    loop_linear,
    reference_mixture,
    sort_pairs,
    sum_rows,
    take_rows,
    take_weights,
)
from pentad.ops.gated import weighted_silu_mul

T, K, E, D, M = 23, 3, 6, 16, 8


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


def choose(num_tokens: int = T, num_experts: int = E, num_chosen: int = K) -> torch.Tensor:
    return torch.rand(num_tokens, num_experts).topk(num_chosen, dim=-1).indices


def make(dtype: torch.dtype, num_tokens: int = T, width: int = M) -> list[torch.Tensor]:
    """x, weights, gate_up, down."""
    shapes = [(num_tokens, D), (num_tokens, K), (E, 2, width, D), (E, D, width)]
    return [torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in shapes]


def run_experts(x, gate_up, down, ends, weights=None):
    h = grouped_linear(x, gate_up.flatten(1, 2), ends)
    return grouped_linear(weighted_silu_mul(h, weights), down, ends)


def mixture(x, weights, chosen, gate_up, down):
    pairs = sort_pairs(chosen, len(down))
    rows = take_rows(x, pairs)
    y = run_experts(rows, gate_up, down, pairs.ends_E, take_weights(weights, pairs))
    return sum_rows(y, pairs)


def test_pairs_are_sorted_by_expert_and_then_by_token():
    chosen = choose()
    pairs = sort_pairs(chosen, E)
    flat = chosen.flatten()
    wanted = sorted(range(T * K), key=lambda i: (int(flat[i]), i))
    assert pairs.order_N.tolist() == wanted
    assert pairs.order_N[pairs.place_N].tolist() == list(range(T * K))
    assert pairs.token_N.tolist() == [i // K for i in wanted]
    assert pairs.sizes_E.tolist() == torch.bincount(flat, minlength=E).tolist()
    assert int(pairs.ends_E[-1]) == T * K


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_mixture_and_all_its_gradients_equal_the_plain_loop(dtype):
    x, weights, gate_up, down = make(dtype)
    chosen = choose()
    chosen[chosen == 4] = 5  # an expert without a token; some tokens choose 5 twice
    assert can_group(x, down) == (dtype == torch.float32)
    inputs = (x, weights, gate_up, down)
    ours = mixture(x, weights, chosen, gate_up, down)
    wanted = reference_mixture(x, weights, chosen, gate_up, down)
    # rounding of sums of a few dozen terms
    tolerance = {"atol": 1e-12 if dtype == torch.float64 else 3e-4, "rtol": 1e-5}
    torch.testing.assert_close(ours, wanted, **tolerance)
    direction = torch.randn_like(ours)
    for mine, theirs in zip(
        torch.autograd.grad(ours, inputs, direction),
        torch.autograd.grad(wanted, inputs, direction),
        strict=True,
    ):
        assert theirs.abs().max() > 0.1
        torch.testing.assert_close(mine, theirs, **tolerance)


def test_gradients_equal_finite_differences():
    x, weights, gate_up, down = (t[:4] if i < 2 else t for i, t in enumerate(make(torch.float64)))
    chosen = choose(4)
    inputs = tuple(t.detach().requires_grad_() for t in (x, weights, gate_up, down))
    assert torch.autograd.gradcheck(
        lambda x, w, g, d: mixture(x, w, chosen, g, d), inputs, fast_mode=True
    )


def test_weights_wider_than_the_rows_are_used_unrounded():
    x, weights, gate_up, down = make(torch.bfloat16)
    chosen = choose()
    wide = weights.detach().float().requires_grad_()
    wide.data += 1e-3  # not a bfloat16 number
    ours = mixture(x, wide, chosen, gate_up, down)
    exact = reference_mixture(*(t.double() for t in (x, wide)), chosen, gate_up.double(),
                              down.double())  # fmt: skip
    assert ours.dtype == torch.bfloat16
    error = (ours - exact).abs().max() / exact.abs().max()
    assert error < 0.02  # a few roundings to 8 bits
    (gradient,) = torch.autograd.grad(ours.float().square().sum(), wide)
    assert gradient.dtype == torch.float32
    (wanted,) = torch.autograd.grad(exact.square().sum(), wide)
    assert (gradient - wanted).abs().max() < 0.05 * wanted.abs().max()


def test_rows_without_weights_are_taken_as_they_are():
    x, _, gate_up, down = make(torch.float32)
    pairs = sort_pairs(choose(), E)
    rows = take_rows(x, pairs)
    plain = run_experts(rows, gate_up, down, pairs.ends_E)
    ones = run_experts(rows, gate_up, down, pairs.ends_E, torch.ones(T * K))
    torch.testing.assert_close(plain, ones)


@pytest.mark.parametrize("width", [8, 10], ids=["aligned", "unaligned"])
def test_grouped_products_equal_the_loop_where_both_run(width):
    x, _, gate_up, _ = make(torch.float32, width=width)
    weight = gate_up[:, 0]
    pairs = sort_pairs(choose(), E)
    rows = take_rows(x, pairs)
    assert can_group(rows, weight) == (width == 8)
    ours, wanted = (f(rows, weight, pairs.ends_E) for f in (grouped_linear, loop_linear))
    torch.testing.assert_close(ours, wanted)


def test_a_rank_without_tokens_has_zero_gradients_not_none():
    x, weights, gate_up, down = make(torch.float32, num_tokens=0)
    chosen = torch.empty(0, K, dtype=torch.int64)
    out = mixture(x, weights, chosen, gate_up, down)
    assert out.shape == (0, D)
    gradients = torch.autograd.grad(out.sum(), (gate_up, down))
    assert all(float(g.abs().max()) == 0 for g in gradients)


def test_the_grouped_path_never_asks_the_device(monkeypatch):
    def refuse(*args):
        raise AssertionError("waited for the device")

    x, weights, gate_up, down = make(torch.float32)
    chosen = choose()
    monkeypatch.setattr(torch.Tensor, "tolist", refuse)
    monkeypatch.setattr(torch.Tensor, "item", refuse)
    monkeypatch.setattr(torch, "bincount", refuse)
    monkeypatch.setattr(experts, "loop_linear", refuse)
    mixture(x, weights, chosen, gate_up, down).square().sum().backward()


def test_the_same_batch_gives_the_same_bits():
    x, weights, gate_up, down = make(torch.float32)
    chosen = choose()
    first, second = (
        torch.autograd.grad(mixture(x, weights, chosen, gate_up, down).square().sum(), (x, weights))
        for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
