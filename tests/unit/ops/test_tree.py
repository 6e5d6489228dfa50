"""Rows that begin alike, computed as a tree, give what whole rows give: values and gradients."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pentad.ops import flash4, tree
from pentad.ops.attention import reference_attention
from pentad.ops.tree import Copies, TreeAttend, build_tree_attend, plan_tree, spread, sum_copies

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
LENGTHS = [9, 7, 5, 8, 6]
PREFIXES = [(4, 5), (0, 0), (7, 2), (4, 5), (7, 2)]
"""Rows 0 and 3 share five tokens, rows 2 and 4 two, row 1 is alone."""


def test_each_token_of_a_row_is_one_of_the_tree():
    plan = plan_tree(LENGTHS, PREFIXES, filling=[3], num_filled=2)
    rows = np.split(plan.at_T[: sum(LENGTHS)], np.cumsum(LENGTHS)[:-1])
    assert rows[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert rows[3].tolist() == [0, 1, 2, 3, 4, 9, 10, 11]
    assert rows[1].tolist() == list(range(12, 19))
    assert (rows[2][:2] == rows[4][:2]).all() and rows[2][2] != rows[4][2]
    assert plan.num_real == sum(LENGTHS) - 5 - 2 and plan.num_tokens == plan.num_real + 3
    assert plan.queries == (5, 4, 3, 7, 2, 3, 4, 3) and plan.keys == (5, 9, 8, 7, 2, 5, 6, 3)
    # A token of the tree is taken from the first row that has it.
    assert (plan.at_T[plan.first_U[: plan.num_real]] == np.arange(plan.num_real)).all()
    assert plan.first_U[:5].tolist() == [0, 1, 2, 3, 4]


def varlen_reference(q, k, v, bounds_q, bounds_k, max_q, max_k, window, sinks=None) -> Tensor:
    """What the flash kernels compute: queries are the last tokens of their sequence."""
    out = []
    spans = zip(bounds_q[:-1], bounds_q[1:], bounds_k[:-1], bounds_k[1:], strict=True)
    for q0, q1, k0, k1 in spans:
        assert q1 - q0 <= max_q and k1 - k0 <= max_k
        before = q.new_zeros(k1 - k0 - (q1 - q0), *q.shape[1:])
        whole = reference_attention(
            torch.cat((before, q[q0:q1])), k[k0:k1], v[k0:k1], [int(k1 - k0)], window, sinks
        )
        out.append(whole[len(before) :])
    return torch.cat(out)


def tensors(num: int, *, dtype=torch.float64, device=CPU, width=8) -> list[Tensor]:
    gen = torch.Generator().manual_seed(1)
    return [
        torch.randn(num, heads, width, generator=gen, dtype=torch.float64)
        .to(device, dtype)
        .requires_grad_()
        for heads in (4, 2, 2)
    ]


def hold_against_whole_rows(attend, plan, given, lengths, window, **tolerance) -> None:
    """Values and gradients of attention over the tree beside those over whole rows."""
    ours = attend(0, *given, window)
    wide = [x.detach().double().cpu().requires_grad_() for x in given]
    at = torch.from_numpy(plan.at_T)
    whole = reference_attention(*(x[at] for x in wide), lengths, window)
    plain = whole[torch.from_numpy(plan.first_U)]
    upstream = torch.randn(plain.shape, dtype=torch.float64)
    upstream[plan.num_real :] = 0
    mine = torch.autograd.grad(ours, given, upstream.to(ours))
    real = slice(0, plan.num_real)
    for found, wanted in (
        (ours[real], plain[real]),
        *zip(mine, torch.autograd.grad(plain, wide, upstream), strict=True),
    ):
        torch.testing.assert_close(found.double().cpu(), wanted, **tolerance)


@pytest.mark.parametrize("window", [None, 1, 3, 1000])
@pytest.mark.parametrize("kind", ["whole rows", "flash"])
def test_values_and_gradients_equal_those_of_whole_rows(kind, window, monkeypatch):
    plan = plan_tree(LENGTHS, PREFIXES, filling=[3], num_filled=2)
    lengths = [*LENGTHS, 2]
    attend = build_tree_attend(
        plan, Copies(plan.at_T, plan.num_tokens, CPU), lengths,
        device=CPU, dtype=torch.float64, head_dim=8,
    )  # fmt: skip
    if kind == "flash":
        monkeypatch.setattr(tree, "varlen", varlen_reference)
        attend = TreeAttend(plan, device=CPU, is_flash4=False)
    given = tensors(plan.num_tokens)
    hold_against_whole_rows(attend, plan, given, lengths, window, rtol=1e-10, atol=1e-11)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=9))
def test_any_rows(drawn):
    shared = [0, 4, 9, 1]
    lengths = [shared[which] + rest for which, rest in drawn]
    plan = plan_tree(lengths, [(which, shared[which]) for which, _ in drawn])
    used = {which for which, _ in drawn}
    num = sum(rest for _, rest in drawn) + sum(shared[which] for which in used)
    assert plan.num_tokens == plan.num_real == num == sum(plan.queries)
    copies = Copies(plan.at_T, plan.num_tokens, CPU)
    attend = build_tree_attend(
        plan, copies, lengths, device=CPU, dtype=torch.float64, head_dim=8
    )  # fmt: skip
    given_ = tensors(plan.num_tokens)
    hold_against_whole_rows(attend, plan, given_, lengths, None, rtol=1e-10, atol=1e-11)


def test_copies_are_summed_in_backward():
    copies = Copies(np.array([0, 1, 1, 3, 0, 1]), 4, CPU)
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: spread(x, copies), (x,))
    summed = sum_copies(torch.arange(6.0)[:, None], copies.order, copies.bounds)
    assert summed[:, 0].tolist() == [4, 8, 0, 3]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("is_flash4", [False, True])
def test_flash_kernels_over_a_tree(is_flash4, window):
    if is_flash4 and not flash4.has_flash4(CUDA):
        pytest.skip("FlashAttention-4 is not installed")
    lengths = [700, 513, 650, 300, 513, 129]
    plan = plan_tree(lengths, [(1, 512), (1, 512), (1, 512), (2, 64), (1, 512), (2, 64)])
    attend = TreeAttend(plan, device=CUDA, is_flash4=is_flash4)
    given_ = tensors(plan.num_tokens, dtype=torch.bfloat16, device=CUDA, width=64)
    tolerance = {"rtol": 2e-2, "atol": 3e-2}
    hold_against_whole_rows(attend, plan, given_, lengths, window, **tolerance)


@pytest.mark.gpu
@needs_gpu
def test_the_sum_kernel_equals_plain_torch():
    source = np.sort(np.random.default_rng(0).integers(0, 50, 400))
    copies = Copies(np.random.default_rng(1).permutation(source), 50, CUDA)
    x = torch.randn(400, 2, 64, device=CUDA, dtype=torch.bfloat16)
    found = sum_copies(x, copies.order, copies.bounds)
    wanted = sum_copies(x.double(), copies.order, copies.bounds)
    torch.testing.assert_close(found.double(), wanted, rtol=2**-7, atol=1e-2)
