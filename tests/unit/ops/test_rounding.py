"""Stochastic rounding: right on average, and the same bits wherever an element lies."""

import os

import pytest
import torch

from pentad.engine.optim import HAS_TRITON, FusedAdamW
from pentad.engine.section import OptimizerConfig
from pentad.ops import rounding
from pentad.ops.rounding import Place, random_bits, round_up_or_down

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HAS_KERNEL = HAS_TRITON and (DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")
BOXES = [
    ((6, 10), ((0, 6), (0, 10))),
    ((6, 10), ((2, 5), (0, 10))),
    ((6, 10), ((0, 6), (3, 7))),
    ((6, 10), ((4, 4), (0, 10))),
    ((7,), ((3, 7),)),
    ((2, 6, 5), ((0, 2), (3, 6), (0, 5))),
    ((2, 6, 5), ((1, 2), (3, 6), (0, 5))),
    ((4, 2, 6, 5), ((2, 4), (0, 2), (1, 3), (0, 5))),
    ((4, 2, 6, 5), ((1, 3), (0, 2), (1, 3), (2, 5))),
    ((4, 3, 6, 5), ((1, 3), (1, 3), (1, 3), (2, 5))),
]


def cut(whole, box):
    return whole[tuple(slice(*ends) for ends in box)]


@pytest.mark.parametrize(("shape", "box"), BOXES, ids=str)
def test_elements_are_found_in_the_whole_tensor(shape, box):
    wanted = cut(torch.arange(torch.Size(shape).numel()).view(shape), box).flatten()
    place = Place.of(shape, box)
    assert torch.equal(place.indices(0, len(wanted)), wanted)
    if len(wanted):
        assert torch.equal(place.indices(1, len(wanted)), wanted[1:])
    assert len(place.sizes) <= 2 or shape[0] == 4, "dims that lie as one are joined"


def test_bits_are_even_and_differ_by_element_key_and_stream():
    index = torch.arange(1 << 16)
    streams = [*random_bits(index, 5), *random_bits(index, 6), *random_bits(index + (1 << 40), 5)]
    for bits in streams:
        assert bits.min() >= 0 and bits.max() < 1 << 16
        # 65,536 draws: the mean of a uniform one is off by 0.0011, three times that is rare.
        assert abs(bits.double().mean() / 65535 - 0.5) < 0.0035
        for bit in range(16):
            assert abs((bits >> bit & 1).double().mean() - 0.5) < 0.008
    for n, one in enumerate(streams):
        for other in streams[n + 1 :]:
            both = torch.stack([one, other]).double()
            assert abs(torch.corrcoef(both)[0, 1]) < 0.02
        assert abs(torch.corrcoef(torch.stack([one[1:], one[:-1]]).double())[0, 1]) < 0.02


def test_a_number_is_right_on_average():
    x = torch.tensor([1.0 + 2**-9, -0.02, 3e-5, 1e-40, -7.3]).repeat_interleave(1 << 16)
    bits = random_bits(torch.arange(len(x)), 3)[0]
    found = round_up_or_down(x, bits).double().view(5, -1)
    truth = x.double().view(5, -1)
    last_place = (found.max(1).values - found.min(1).values).clamp(min=1e-45)
    # The mean of 65,536 numbers that are one of two neighbours is off by 0.002 of their distance.
    assert ((found.mean(1) - truth[:, 0]).abs() / last_place < 0.01).all()
    assert (found != truth).all(), "none of them is a bfloat16"


@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -(2.0**-120), float("inf"), -float("inf")])
def test_what_can_be_held_stays(value):
    x = torch.full((4096,), value)
    found = round_up_or_down(x, random_bits(torch.arange(4096), 1)[0])
    assert torch.equal(found.float().view(torch.int32), x.view(torch.int32))


def test_what_is_no_number_stays_none():
    bits = torch.tensor([-1, 0x7FFFFFFF, 0x7FC00000], dtype=torch.int32)
    x = bits.view(torch.float32)
    assert round_up_or_down(x, torch.full((3,), 0xFFFF, dtype=torch.int32)).isnan().all()


def movement(dtype, num_steps=200, lr=1e-6, beta2=0.95):
    """How far weights of the usual size move against the sign of their gradient, and how many."""
    gen = torch.Generator().manual_seed(0)
    start = (torch.randn(128, 256, generator=gen) * 0.02).bfloat16()
    sign = torch.randn(128, 256, generator=gen).sign()
    parameter = start.to(dtype, copy=True)
    optimizer = FusedAdamW({"w": parameter}, OptimizerConfig(lr=lr, beta2=beta2))
    for number in range(num_steps):
        parameter.grad = (sign * torch.rand(128, 256, generator=gen)).to(dtype)
        optimizer.step(number=number)
    moved = (parameter.float() - start.float()) * -sign
    return float(moved.mean()), float((moved != 0).float().mean())


@pytest.mark.parametrize(("lr", "beta2"), [(1e-6, 0.95), (1e-5, 0.999), (1e-7, 0.95)])
def test_small_steps_move_bfloat16_as_far_as_float32(lr, beta2):
    wide, share = movement(torch.float32, lr=lr, beta2=beta2)
    narrow, _ = movement(torch.bfloat16, lr=lr, beta2=beta2)
    assert share > 0.9 or lr == 1e-7
    # 32,768 weights whose random walks over 200 steps are as long as the way: 0.6% of it, 1.7% of
    # a tenth of the way.
    assert narrow == pytest.approx(wide, rel=0.04 if lr == 1e-7 else 0.015)


def steps_of(parameter, gradients, optimizer):
    for number, gradient in enumerate(gradients):
        parameter.grad = gradient.clone()
        optimizer.step(0.5, number)
    return [parameter, *(optimizer.state[parameter][key] for key in ("exp_avg", "exp_avg_sq"))]


@pytest.mark.parametrize(("shape", "box"), BOXES, ids=str)
def test_a_shard_moves_bit_for_bit_as_its_part_of_the_whole_does(shape, box, monkeypatch):
    monkeypatch.setattr(rounding, "CHUNK", 7)
    gen = torch.Generator().manual_seed(1)
    start = torch.randn(shape, generator=gen).bfloat16()
    gradients = [torch.randn(shape, generator=gen).bfloat16() for _ in range(3)]
    settings = OptimizerConfig(lr=1e-3, weight_decay=0.1)
    whole = start.clone()
    wanted = steps_of(whole, gradients, FusedAdamW({"w": whole}, settings, "w", seed=4))
    part = cut(start, box).clone()
    optimizer = FusedAdamW({"w": part}, settings, "w", seed=4)
    optimizer.places["w"] = Place.of(shape, box)
    found = steps_of(part, [cut(one, box) for one in gradients], optimizer)
    for mine, whole_one in zip(found, wanted, strict=True):
        assert torch.equal(mine, cut(whole_one, box))
    other = start.clone()
    steps_of(other, gradients, FusedAdamW({"w": other}, settings, "w", seed=5))
    assert not torch.equal(other, whole), "another seed rounds otherwise"


@pytest.mark.skipif(not HAS_KERNEL, reason="needs a GPU, or TRITON_INTERPRET=1")
@pytest.mark.parametrize(("shape", "box"), [*BOXES, ((40, 70), ((3, 40), (0, 70)))], ids=str)
def test_the_kernel_rounds_with_the_same_bits(shape, box, monkeypatch):
    from pentad.engine import optim

    gen = torch.Generator().manual_seed(1)
    start = cut(torch.randn(shape, generator=gen), box).bfloat16().to(DEVICE)
    gradients = [torch.randn(start.shape, generator=gen).bfloat16().to(DEVICE) for _ in range(3)]
    found = []
    for has_kernel in (True, False):
        monkeypatch.setattr(optim, "_has_kernel", lambda moved, has=has_kernel: has)
        mine = start.clone()
        optimizer = FusedAdamW({"w": mine}, OptimizerConfig(lr=1e-3, weight_decay=0.1), "w")
        optimizer.places["w"] = Place.of(shape, box)
        if start.numel():
            found.append(steps_of(mine, gradients, optimizer))
    for kernel, plain in zip(*found, strict=True) if found else ():
        # Arithmetic may be contracted: a number whose last fp32 digit differs is rounded otherwise
        # in one of thousands of cases, and then to the neighbour.
        assert (kernel == plain).float().mean() > 0.99
        torch.testing.assert_close(kernel, plain, rtol=2**-7, atol=0)
