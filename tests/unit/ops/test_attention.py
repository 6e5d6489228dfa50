"""Packed attention equals one sequence at a time; a neighbour never changes my numbers."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pentad.ops import attention, flash4
from pentad.ops.attention import (
    EqualAttend,
    PaddedAttend,
    VarlenAttend,
    build_attend,
    has_cudnn_attention,
    has_varlen_attention,
    plan_buckets,
    reference_attention,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
RAGGED = [5, 1, 40, 38, 7, 7, 2]


def qkv(num_tokens: int, heads=4, kv_heads=2, width=8, seed=0) -> tuple[Tensor, Tensor, Tensor]:
    gen = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(num_tokens, n, width, generator=gen, dtype=torch.float64).requires_grad_()
        for n in (heads, kv_heads, kv_heads)
    )
    return q, k, v


@pytest.mark.parametrize("lengths", [RAGGED, [6], [6, 6, 6], [1, 1], [100, 3, 50]])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 1, 3, 1000])
def test_values_and_gradients_equal_the_masked_reference(lengths, kv_heads, window):
    q, k, v = qkv(sum(lengths), kv_heads=kv_heads)
    upstream = torch.randn_like(q)
    ours = PaddedAttend(lengths, device=CPU)(1, q, k, v, window)
    plain = reference_attention(q, k, v, lengths, window)
    # fp64 on both sides: only the order of sums differs.
    torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-12)
    for mine, true in zip(
        torch.autograd.grad(ours, (q, k, v), upstream),
        torch.autograd.grad(plain, (q, k, v), upstream),
        strict=True,
    ):
        torch.testing.assert_close(mine, true, rtol=1e-10, atol=1e-11)


def test_packed_equals_one_sequence_at_a_time():
    q, k, v = qkv(sum(RAGGED))
    packed = PaddedAttend(RAGGED, device=CPU)(0, q, k, v)
    parts = [
        PaddedAttend([len(a)], device=CPU)(0, a, b, c)
        for a, b, c in zip(*(x.split(RAGGED) for x in (q, k, v)), strict=True)
    ]
    torch.testing.assert_close(packed, torch.cat(parts), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("window", [None, 3])
def test_a_neighbour_changes_neither_my_values_nor_my_gradients(window):
    mine = slice(6, 46)  # the sequence of 40 tokens
    attend = PaddedAttend(RAGGED, device=CPU)
    outputs, grads = [], []
    for neighbour in (1.0, 1e6):
        q, k, v = qkv(sum(RAGGED))
        with torch.no_grad():
            for x in (q, k, v):
                x[: mine.start] *= neighbour
                x[mine.stop :] *= -neighbour
        out = attend(0, q, k, v, window)
        (out[mine] ** 2).sum().backward()
        outputs.append(out[mine])
        grads.append([x.grad for x in (q, k, v)])
    assert torch.equal(outputs[0], outputs[1])
    for a, b in zip(*grads, strict=True):
        assert a is not None and b is not None
        assert torch.equal(a[mine], b[mine])
        assert (b[: mine.start] == 0).all() and (b[mine.stop :] == 0).all()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=40))
def test_every_token_has_its_own_slot_and_padding_is_bounded(lengths):
    plan = plan_buckets(lengths)
    assert len(set(plan.slot_of_token.tolist())) == sum(lengths)
    assert plan.slot_of_token.max() < plan.num_slots
    assert sum(num for _, num, _ in plan.buckets) == len(lengths)
    assert plan.num_slots == sum(num * length for _, num, length in plan.buckets)
    # At most a third of the tokens (bucket ratio) or 16 slots a sequence are padding.
    assert plan.num_slots <= sum(max(n / 0.75, n + 16) for n in lengths)
    start = 0
    for n in lengths:  # a sequence lies in consecutive slots of one bucket row
        slots = plan.slot_of_token[start : start + n]
        assert (slots == slots[0] + range(n)).all()
        inside = [b for b in plan.buckets if b[0] <= slots[0] < b[0] + b[1] * b[2]]
        assert (slots[0] - inside[0][0]) % inside[0][2] == 0 and n <= inside[0][2]
        start += n


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "is_taken"),
    [
        ("cuda", torch.bfloat16, 256, True),
        ("cpu", torch.bfloat16, 256, False),
        ("cuda", torch.float32, 256, False),
        ("cuda", torch.bfloat16, 264, False),
        ("cuda", torch.bfloat16, 100, False),
    ],
)
def test_the_flash_kernel_is_taken_only_where_it_can_be(
    monkeypatch, device, dtype, head_dim, is_taken
):
    for options, has_windows in (({"window_size"}, True), ({"is_causal"}, False), ((), False)):
        monkeypatch.setattr(attention, "VARLEN_OPTIONS", frozenset(options))
        found = has_varlen_attention(torch.device(device), dtype, head_dim)
        assert found == (is_taken and has_windows)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("window", [None, 3, 1000])
@pytest.mark.parametrize("lengths", [[128], [256, 256, 256]])
def test_equal_lengths_equal_the_reference(kv_heads, window, lengths):
    device = torch.device("cuda")
    q, k, v = (
        x.detach().to(device, torch.bfloat16).requires_grad_()
        for x in qkv(sum(lengths), kv_heads=kv_heads, width=64)
    )
    attend = build_attend(lengths, device=device, dtype=torch.bfloat16, head_dim=64)
    assert isinstance(attend, EqualAttend) == has_cudnn_attention(device, 64)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    plain = reference_attention(*exact, lengths, window)
    wanted = torch.autograd.grad(plain.square().sum(), exact)
    ours = attend(0, q, k, v, window)
    found = torch.autograd.grad(ours.double().square().sum(), (q, k, v))
    for mine, true in zip((ours, *found), (plain, *wanted), strict=True):
        assert (mine.double() - true).norm() < 1e-2 * true.norm()  # bf16 has 8 bits


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("window", [None, 3, 1000])
def test_the_flash_kernel_equals_the_reference(kv_heads, window):
    device = torch.device("cuda")
    q, k, v = (
        x.detach().to(device).requires_grad_()
        for x in qkv(sum(RAGGED), kv_heads=kv_heads, width=64)
    )
    plain = reference_attention(q, k, v, RAGGED, window)
    plain.square().sum().backward()
    grads = [x.grad for x in (q, k, v)]
    q16, k16, v16 = (x.detach().bfloat16().requires_grad_() for x in (q, k, v))
    attend = VarlenAttend(RAGGED, device=device)
    ours = attend(0, q16, k16, v16, window)
    ours.float().square().sum().backward()
    # bf16 has 8 bits: relative error of a few parts in a hundred on values around 1.
    torch.testing.assert_close(ours.double(), plain, rtol=3e-2, atol=3e-2)
    for mine, true in zip((q16.grad, k16.grad, v16.grad), grads, strict=True):
        assert mine is not None and true is not None
        assert (mine.double() - true).norm() < 2e-2 * true.norm()


@pytest.mark.gpu
@pytest.mark.skipif(not flash4.has_flash4(CUDA), reason="needs flash-attn-4 and a Hopper GPU")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("head_dim", sorted(flash4.HEAD_DIMS))
@pytest.mark.parametrize(("kv_heads", "window"), [(2, None), (4, 100)])
def test_flash_attention_4_equals_the_reference(kv_heads, window, head_dim, compiled):
    lengths = [1, 700, 129, 2, 64, 333]
    q, k, v = (
        x.detach().to(CUDA, torch.bfloat16).requires_grad_()
        for x in qkv(sum(lengths), kv_heads=kv_heads, width=head_dim)
    )
    attend = build_attend(lengths, device=CUDA, dtype=torch.bfloat16, head_dim=head_dim)
    assert isinstance(attend, VarlenAttend) and attend.is_flash4
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    plain = reference_attention(*exact, lengths, window)
    wanted = torch.autograd.grad(plain.square().sum(), exact)
    run = torch.compile(attend, fullgraph=True) if compiled else attend
    ours = run(0, q, k, v, window)
    found = torch.autograd.grad(ours.double().square().sum(), (q, k, v))
    for mine, true in zip((ours, *found), (plain, *wanted), strict=True):
        assert (mine.double() - true).norm() < 1e-2 * true.norm()  # bf16 has 8 bits


def test_flash_attention_4_is_left_alone_at_widths_it_was_not_proven_at(monkeypatch):
    monkeypatch.setattr(flash4, "has_flash4", lambda device: True)
    for head_dim, is_taken in ((128, True), (64, True), (16, False), (48, False), (80, False)):
        assert flash4.takes(torch.bfloat16, head_dim) is is_taken
    assert not flash4.takes(torch.float32, 128)
    attend = build_attend([3, 5], device=CPU, dtype=torch.bfloat16, head_dim=16)
    assert not getattr(attend, "is_flash4", False)


@pytest.mark.parametrize(
    ("lengths", "longest", "is_taken"),
    [([3, 300], None, True), ([3, 90], None, False), ([3, 90], 300, True), ([3, 9], 127, False)],
)
def test_flash_attention_4_takes_sequences_that_are_worth_its_launch(
    monkeypatch, lengths, longest, is_taken
):
    monkeypatch.setattr(flash4, "has_flash4", lambda device: True)
    attend = build_attend(lengths, device=CPU, dtype=torch.bfloat16, head_dim=64, longest=longest)
    assert getattr(attend, "is_flash4", False) is is_taken


def test_compiled_kernels_are_kept_in_a_home_alone(tmp_path, monkeypatch):
    names = [f"FLASH_ATTENTION_CUTE_DSL_CACHE_{end}" for end in ("ENABLED", "DIR")]
    for name in (*names, "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    flash4.keep_compiled()
    assert not set(names) & set(os.environ)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    flash4.keep_compiled()
    assert os.environ[names[1]] == str(tmp_path / "pentad" / "flash4")
