"""The invariant kernels against their CPU versions, interpreted where there is no GPU."""

import os

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from pentad.ops import invariant, invariant_kernels  # noqa: E402
from pentad.ops.spans import Spans, packed_spans  # noqa: E402


@pytest.fixture(autouse=True)
def products_without_a_library(monkeypatch):
    """The interpreter multiplies tiles by NumPy's library, which on some CPUs rounds a row by its
    place in the tile. A GPU's products do not; here they are summed term by term."""
    if DEVICE == "cuda":
        return
    from triton.runtime import interpreter

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        product = (a.data[..., :, :, None] * b.data[..., None, :, :]).sum(-2, dtype=d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def test_products_are_those_of_the_reference_and_do_not_depend_on_the_rows():
    x, weight = random(70, 45), random(33, 45, seed=1)
    whole = invariant_kernels.linear(x, weight)
    torch.testing.assert_close(whole, x @ weight.T, atol=1e-5, rtol=1e-5)  # fp32, 45 terms
    for rows in (slice(0, 1), slice(64, 70), slice(3, 40)):
        assert torch.equal(invariant_kernels.linear(x[rows].contiguous(), weight), whole[rows])


def test_grouped_products_find_their_expert():
    x, weight = random(90, 32), random(5, 20, 32, seed=1)
    sizes = torch.tensor([0, 66, 1, 0, 23])
    ends = sizes.cumsum(0).to(torch.int32).to(DEVICE)
    whole = invariant_kernels.grouped_linear(x, weight, ends)
    parts = zip(x.split(sizes.tolist()), weight, strict=True)
    torch.testing.assert_close(whole, torch.cat([p @ w.T for p, w in parts]), atol=1e-5, rtol=1e-5)
    alone = invariant_kernels.linear(x[66:67].contiguous(), weight[2])
    assert torch.equal(alone[0], whole[66])


def test_logprobs_are_those_of_the_reference():
    logits = 3 * random(6, 5000)
    labels = torch.tensor([0, 17, 4999, -1, 5, 4096], device=DEVICE)
    scale = torch.tensor([1.0, 0.5, 2.0, 1.0, 1.0, 1.25], device=DEVICE)
    found = invariant_kernels.label_logprobs(logits, labels, scale)
    wanted = torch.log_softmax(logits * scale[:, None], -1)
    chosen = wanted.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    torch.testing.assert_close(found[0], chosen, atol=1e-5, rtol=1e-5)  # sums of 5000 in fp32
    entropy = -(wanted.exp() * wanted).sum(-1)
    torch.testing.assert_close(found[1], entropy, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("window", "has_sinks", "cap"),
    [(None, False, None), (9, False, None), (9, True, None), (9, False, 0.8)],
)
def test_attention_is_that_of_the_reference_packed_or_paged(window, has_sinks, cap):
    sinks = 2 * random(4, seed=3) if has_sinks else None
    lengths = [5, 70, 1, 33]
    num, heads, kv, width = sum(lengths), 4, 2, 16
    q, k, v = (
        random(num, heads, width),
        random(num, kv, width, seed=1),
        random(num, kv, width, seed=2),
    )
    packed = packed_spans(lengths)
    wanted = invariant.attend_spans(
        q.cpu(), k.cpu(), v.cpu(), packed, window, None if sinks is None else sinks.cpu(), cap
    ).to(DEVICE)
    device = torch.device(DEVICE)
    tiles = invariant_kernels.tiles_of(packed, heads // kv, device)
    whole = invariant_kernels.attend(q, k, v, tiles, window, sinks, cap)
    torch.testing.assert_close(whole, wanted, atol=1e-5, rtol=1e-5)  # fp32

    # The last token of each sequence, over blocks of 4 in any order.
    size = 4
    num_blocks = [-(-n // size) for n in lengths]
    order = np.random.default_rng(0).permutation(sum(num_blocks))
    table, at = np.zeros((4, max(num_blocks)), np.int64), 0
    k_paged, v_paged = (x.new_zeros(len(order) * size, kv, width) for x in (k, v))
    for s, (first, length) in enumerate(zip(packed.first_S, lengths, strict=True)):
        for b in range(num_blocks[s]):
            table[s, b], at = order[at], at + 1
            part = slice(first + b * size, first + min((b + 1) * size, length))
            to = slice(table[s, b] * size, table[s, b] * size + part.stop - part.start)
            k_paged[to], v_paged[to] = k[part], v[part]
    last = packed.first_S + packed.count_S - 1
    ones = np.ones(4, np.int64)
    paged = Spans(np.arange(4), packed.count_S - 1, ones, table, size, size)
    tiles = invariant_kernels.tiles_of(paged, heads // kv, device)
    q_last = q[torch.from_numpy(last).to(DEVICE)].contiguous()
    out = invariant_kernels.attend(q_last, k_paged, v_paged, tiles, window, sinks, cap)
    assert torch.equal(out, whole[torch.from_numpy(last).to(DEVICE)])


def test_the_digest_kernel_is_the_plain_sum():
    from pentad.ops.digest import tensor_checksum
    from pentad.ops.digest_kernel import checksums

    pieces = [random(n, seed=n).view(torch.int32) for n in (1, 5, 2048, 70001)]
    found = [value & 0xFFFFFFFFFFFFFFFF for value in checksums(pieces).tolist()]
    assert found == [tensor_checksum(piece.cpu()) for piece in pieces]
