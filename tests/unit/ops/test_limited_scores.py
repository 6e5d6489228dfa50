"""Limited attention scores against the written-out softmax: values, gradients, and kernels."""

import pytest
import torch

from pentad.core.dims import ModelDims
from pentad.core.fit import no_tree
from pentad.core.layout import Layout
from pentad.ops.attention import EqualAttend, PaddedAttend, build_attend, reference_attention
from pentad.ops.sinks import _written_out, attend_limited

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
RAGGED = [5, 1, 40, 38, 7, 7, 2]
CAP = 0.7
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def tensors(num, kv_heads=2, width=8):
    gen = torch.Generator().manual_seed(0)
    shapes = [(num, heads, width) for heads in (4, kv_heads, kv_heads)]
    return [
        torch.randn(*shape, generator=gen, dtype=torch.float64).requires_grad_() for shape in shapes
    ]


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("window", [None, 3, 1000])
def test_packed_attention_with_a_limit_equals_the_reference(kv_heads, window):
    given = tensors(sum(RAGGED), kv_heads)
    ours = PaddedAttend(RAGGED, device=CPU)(0, *given, window, None, CAP)
    plain = reference_attention(*given, RAGGED, window, None, CAP)
    unlimited = reference_attention(*given, RAGGED, window)
    assert (plain - unlimited).abs().max() > 0.1, "the limit must have an effect"
    # fp64 on both sides, so only the order of sums differs
    torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-11)
    upstream = torch.randn_like(plain)
    found, wanted = (torch.autograd.grad(x, given, upstream) for x in (ours, plain))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-11)


def test_gradients_are_those_of_finite_differences():
    given = [x.detach().transpose(0, 1)[None].requires_grad_() for x in tensors(3, 2, 4)]
    assert torch.autograd.gradcheck(lambda *x: attend_limited(*x, CAP, is_causal=True), given)


def test_without_gradient_scores_are_computed_in_parts(monkeypatch):
    q, k, v = (x.detach().transpose(0, 1)[None] for x in tensors(6))
    monkeypatch.setattr("pentad.ops.sinks.MAX_SCORES", 2 * q.shape[1] * 6)
    with torch.no_grad():
        for is_causal, seen in ((True, None), (False, torch.rand(6, 6).triu() < 0.3)):
            mask = None if seen is None else torch.zeros(6, 6).double().masked_fill(~seen, -9e9)
            whole = _written_out(q, k, v, None, mask, is_causal=is_causal, cap=CAP)
            parts = attend_limited(q, k, v, CAP, is_causal=is_causal, seen=mask)
            torch.testing.assert_close(parts, whole)


def test_trees_are_rejected_with_the_reason():
    sizes = {"vocab_size": 9, "hidden_size": 8, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1}
    dims = ModelDims(family="gemma2", head_dim=8, intermediate_size=8, score_cap=CAP, **sizes)
    reason = no_tree(Layout(), "archon", strict=False, balanced=False, dims=dims)
    assert reason == "gemma2 limits attention scores, which the kernels of trees do not"


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("width", [128, 256])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("lengths", [[1, 700, 129, 2, 64, 333], [256, 256], [3, 40]])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_kernels_of_a_gpu_equal_the_reference(width, window, lengths, compiled):
    given = [
        x.detach().to(CUDA, torch.bfloat16).requires_grad_()
        for x in tensors(sum(lengths), width=width)
    ]
    how = {"device": CUDA, "dtype": torch.bfloat16, "head_dim": width}
    attend = build_attend(lengths, **how, capped=True)
    assert not isinstance(attend, EqualAttend), "cuDNN's kernel has no limit"
    run = torch.compile(attend) if compiled else attend
    ours = run(0, *given, window, None, CAP)
    exact = [x.detach().double().requires_grad_() for x in given]
    plain = reference_attention(*exact, lengths, window, None, CAP)
    wanted = torch.autograd.grad(plain.square().sum(), exact)
    found = torch.autograd.grad(ours.double().square().sum(), given)
    for mine, true in zip((ours, *found), (plain, *wanted), strict=True):
        assert (mine.double() - true).norm() < 2e-2 * true.norm()  # bf16 has 8 bits
