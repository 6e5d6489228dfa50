"""Attention sinks against the written-out softmax: values, gradients, and flash kernels."""

from types import SimpleNamespace

import pytest
import torch

from pentad.ops import attention, flash4
from pentad.ops.attention import PaddedAttend, build_attend, reference_attention
from pentad.ops.experts import add_rows
from pentad.ops.gated import clamped_mul
from pentad.ops.sinks import _written_out, attend_with_sinks, in_parts
from pentad.ops.tree import Copies, TreeAttend, build_tree_attend, plan_tree

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
RAGGED = [5, 1, 40, 38, 7, 7, 2]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def tensors(num, kv_heads=2, heads=4, width=8):
    gen = torch.Generator().manual_seed(0)
    shapes = [(num, heads, width), (num, kv_heads, width), (num, kv_heads, width), (heads,)]
    return [
        torch.randn(*shape, generator=gen, dtype=torch.float64).requires_grad_() for shape in shapes
    ]


def assert_same(ours, plain, given, **tolerance):
    """Values and every gradient; fp64 on both sides, so only the order of sums differs."""
    upstream = torch.randn(plain.shape, dtype=plain.dtype)
    tolerance = tolerance or {"rtol": 1e-10, "atol": 1e-11}
    torch.testing.assert_close(ours, plain, **tolerance)
    mine = torch.autograd.grad(ours, given, upstream)
    for found, wanted in zip(mine, torch.autograd.grad(plain, given, upstream), strict=True):
        torch.testing.assert_close(found, wanted, **tolerance)


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("window", [None, 3, 1000])
def test_packed_attention_with_sinks_equals_the_reference(kv_heads, window):
    q, k, v, sinks = given = tensors(sum(RAGGED), kv_heads)
    ours = PaddedAttend(RAGGED, device=CPU)(0, q, k, v, window, sinks)
    assert_same(ours, reference_attention(q, k, v, RAGGED, window, sinks), given)


def test_gradients_are_those_of_finite_differences():
    *qkv, sinks = (x.detach() for x in tensors(3, kv_heads=2, heads=2, width=4))
    given = [x.transpose(0, 1)[None].requires_grad_() for x in qkv]
    run = torch.autograd.gradcheck
    assert run(lambda *xs: attend_with_sinks(*xs, is_causal=True), (*given, sinks.requires_grad_()))


def test_scores_in_parts_are_those_at_once(monkeypatch):
    """Where no backward needs them all; queries with a mask of their own, or one for all."""
    q, k, v, sinks = (x.detach() for x in tensors(6, kv_heads=4))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    for mask in (None, torch.randn(6, 6).double(), torch.randn(1, 6).double()):
        whole = _written_out(q, k, v, sinks[:, None], mask, is_causal=False)
        monkeypatch.setattr("pentad.ops.sinks.MAX_SCORES", 2 * q.shape[1] * 6)
        with torch.no_grad():
            parts = in_parts(q, k, v, sinks[:, None], mask)
        torch.testing.assert_close(parts, whole)


@pytest.mark.parametrize("is_causal", [True, False])
def test_the_way_without_a_kernel_is_the_same(is_causal):
    q, k, v, sinks = given = tensors(6, kv_heads=4)
    seen = None if is_causal else torch.rand(6, 6).triu().cumsum(0) < 1.5
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    mask = None if seen is None else torch.zeros(6, 6).double().masked_fill(~seen, -torch.inf)
    plain = _written_out(q, k, v, sinks[:, None], mask, is_causal)
    assert_same(attend_with_sinks(q, k, v, sinks, is_causal=is_causal, seen=seen), plain, given)


def test_a_sink_takes_all_weight_or_none():
    q, k, v, _ = (x.detach().bfloat16() for x in tensors(9))
    attend = PaddedAttend([4, 5], device=CPU)
    plain = attend(0, q, k, v)
    assert torch.equal(attend(0, q, k, v, None, torch.full((4,), -200.0)), plain)
    assert (attend(0, q, k, v, None, torch.full((4,), 200.0)) == 0).all()


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kind", ["whole rows", "flash"])
def test_rows_that_begin_alike(kind, window, monkeypatch):
    lengths = [9, 7, 5, 8, 6]
    plan = plan_tree(lengths, [(4, 5), (0, 0), (7, 2), (4, 5), (7, 2)])
    copies = Copies(plan.at_T, plan.num_tokens, CPU)
    shape = {"device": CPU, "dtype": torch.float64, "head_dim": 8}
    attend = build_tree_attend(plan, copies, lengths, **shape)
    if kind == "flash":  # whichever kernel is there, the one that takes sinks is used
        monkeypatch.setattr("pentad.ops.tree.varlen", varlen_in_torch)
        attend = TreeAttend(plan, device=CPU, is_flash4=True)
    q, k, v, sinks = given = tensors(plan.num_tokens)
    at, first = torch.from_numpy(plan.at_T), torch.from_numpy(plan.first_U)
    plain = reference_attention(q[at], k[at], v[at], lengths, window, sinks)[first]
    assert_same(attend(0, q, k, v, window, sinks), plain, given)


def varlen_in_torch(q, k, v, bounds_q, bounds_k, max_q, max_k, window, sinks):
    out = []
    for q0, q1, k0, k1 in zip(bounds_q, bounds_q[1:], bounds_k, bounds_k[1:], strict=False):
        before = q.new_zeros(k1 - k0 - (q1 - q0), *q.shape[1:])
        queries = torch.cat((before, q[q0:q1]))
        whole = reference_attention(queries, k[k0:k1], v[k0:k1], [len(queries)], window, sinks)
        out.append(whole[len(before) :])
    return torch.cat(out)


def flash_in_torch(q, k, v, *limits):
    """A flash kernel's contract over one sequence: results, and log-sum-exps [H, T]."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(torch.ones(len(q), len(q)).triu(1).bool(), -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1)


def flash_backward_in_torch(grad, q, k, v, out, lse, *limits):
    """Its backward: weights are rebuilt from the log-sum-exps that it is given."""
    group = q.shape[1] // k.shape[1]
    wide_k, wide_v = (x.repeat_interleave(group, 1) for x in (k, v))
    scale = q.shape[-1] ** -0.5
    scores = torch.einsum("qhd,khd->hqk", q, wide_k) * scale
    weights = (scores - lse[..., None]).exp().tril()
    inner = torch.einsum("qhd,khd->hqk", grad, wide_v) - (grad * out).sum(-1).t()[..., None]
    dscores = weights * inner * scale
    dk = torch.einsum("hqk,qhd->khd", dscores, q).unflatten(1, (-1, group)).sum(2)
    dv = torch.einsum("hqk,qhd->khd", weights, grad).unflatten(1, (-1, group)).sum(2)
    return torch.einsum("hqk,khd->qhd", dscores, wide_k), dk, dv


@pytest.mark.parametrize("kind", ["flash4", "varlen"])
def test_kernels_without_sinks_give_values_and_gradients_with_them(kind, monkeypatch):
    """The code around the kernels of a GPU, whose contract is written out in torch."""
    monkeypatch.setattr(flash4, "attend", flash_in_torch)
    monkeypatch.setattr(flash4, "flash4_backward", flash_backward_in_torch)
    monkeypatch.setattr(attention, "varlen_sinks_backward", flash_backward_in_torch)
    q, k, v, sinks = given = tensors(11)
    bounds, ctx = torch.tensor([0, 11]), SimpleNamespace(set_materialize_grads=bool)
    ctx.save_for_backward = lambda *saved: setattr(ctx, "saved_tensors", saved)
    with torch.no_grad():  # both operators begin alike; the second's kernel is in torch itself
        found = flash4.flash4._init_fn(q, k, v, bounds, 11, 0, sinks, 0.0)
    if kind == "flash4":
        module, inputs = flash4, (q, k, v, bounds, 11, 0, sinks, 0.0)
    else:
        module, inputs = attention, (q, k, v, sinks, bounds, bounds, 11, 11, 0)
    module._save(ctx, inputs, found)
    upstream = torch.randn_like(q)
    grads = [g for g in module._backward(ctx, upstream, None) if g is not None]
    plain = reference_attention(q, k, v, [11], None, sinks)
    torch.testing.assert_close(found[0], plain, rtol=1e-10, atol=1e-11)
    for mine, wanted in zip(grads, torch.autograd.grad(plain, given, upstream), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-10, atol=1e-11)


def test_torchs_kernel_is_called_as_it_is_declared():
    q, k, v, sinks = (x.detach().to("meta", torch.bfloat16) for x in tensors(7))
    bounds = torch.zeros(2, dtype=torch.int32, device="meta")
    for window in (0, 3):
        limits = (bounds, bounds, 7, 7, window)
        out, total = attention.varlen_sinks._init_fn(q, k, v, sinks, *limits)
        assert out.shape == q.shape and total.shape == (4, 7) and total.is_contiguous()
        grads = attention.varlen_sinks_backward._init_fn(q, q, k, v, out, total, *limits)
        assert [g.shape for g in grads] == [x.shape for x in (q, k, v)]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("lengths", [[1, 700, 129, 2, 64, 333], [256, 256], [3, 40]])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_kernels_of_a_gpu_equal_the_reference(window, lengths, compiled):
    given = [
        x.detach().to(CUDA, torch.bfloat16).requires_grad_()
        for x in tensors(sum(lengths), width=64)
    ]
    *qkv, sinks = given
    attend = build_attend(lengths, device=CUDA, dtype=torch.bfloat16, head_dim=64)
    run = torch.compile(attend) if compiled else attend
    ours = run(0, *qkv, window, sinks)
    exact = [x.detach().double().requires_grad_() for x in given]
    plain = reference_attention(*exact[:3], lengths, window, exact[3])
    wanted = torch.autograd.grad(plain.square().sum(), exact)
    found = torch.autograd.grad(ours.double().square().sum(), given)
    for mine, true in zip((ours, *found), (plain, *wanted), strict=True):
        assert (mine.double() - true).norm() < 2e-2 * true.norm()  # bf16 has 8 bits


def test_rows_of_experts_are_added_and_their_gradients_summed_by_expert():
    ends = torch.tensor([0, 3, 3, 5, 7], dtype=torch.int32)  # two experts have no row
    x, rows = (torch.randn(n, 4, dtype=torch.float64, requires_grad=True) for n in (7, 5))
    sizes = ends.diff(prepend=ends.new_zeros(1)).long()
    assert torch.equal(add_rows(x, rows, ends), x + rows.repeat_interleave(sizes, 0))
    assert torch.autograd.gradcheck(lambda *xs: add_rows(*xs, ends), (x, rows))
    assert add_rows(x[:0], rows, 0 * ends).shape == (0, 4)


def test_the_limited_activation_is_that_of_transformers():
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    sizes = {"hidden_size": 4, "intermediate_size": 6, "num_local_experts": 2}
    theirs = GptOssExperts(GptOssConfig(**sizes))
    h = (6 * torch.randn(50, 12, dtype=torch.float64)).requires_grad_()
    weights = torch.rand(50, dtype=torch.float64, requires_grad=True)
    assert (h.abs() > 7).any()
    plain = theirs._apply_gate(h) * weights[:, None]
    assert_same(clamped_mul(h, weights), plain, (h, weights))
