"""Digests tell apart what differs and agree on what is equal."""

import pytest
import torch

from pentad.ops.digest import (
    HOST_WORDS,
    Hasher,
    _mix,
    are_same,
    are_same_cast,
    digest_of,
    tensor_checksum,
    words_of,
)


def test_equal_bytes_give_equal_checksums_whatever_the_strides():
    x = torch.randn(7, 5)
    assert tensor_checksum(x) == tensor_checksum(x.clone())
    assert tensor_checksum(x.t().contiguous().t()) == tensor_checksum(x)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.flip(0),
        lambda x: x.roll(1, 1),
        lambda x: x.t().reshape(6, 6),
        lambda x: x + 1e-7 * x.abs().max() * torch.eye(6),
        lambda x: torch.where(torch.eye(6).bool(), -x, x),
        torch.zeros_like,
    ],
)
def test_a_changed_tensor_has_another_checksum(change):
    x = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
    assert tensor_checksum(change(x)) != tensor_checksum(x)


@pytest.mark.parametrize("seed", range(5))
def test_every_single_flipped_bit_is_seen(seed):
    x = torch.randn(8, generator=torch.Generator().manual_seed(seed))
    seen = {tensor_checksum(x)}
    for i in range(8):
        for bit in range(32):
            y = x.clone()
            y.view(torch.int32)[i] ^= torch.tensor(1 << bit if bit < 31 else -(1 << 31)).int()
            seen.add(tensor_checksum(y))
    assert len(seen) == 8 * 32 + 1


def test_chunks_do_not_change_the_sum(monkeypatch):
    x = torch.randn(1000)
    whole = tensor_checksum(x)
    monkeypatch.setattr("pentad.ops.digest.HOST_WORDS", 64)
    assert tensor_checksum(x) == whole
    assert HOST_WORDS > 64


@pytest.mark.parametrize("words", [3, 64, 1 << 14])
@pytest.mark.parametrize(
    "box",
    [
        [(0, 9), (0, 4), (0, 6)],
        [(2, 5), (0, 4), (0, 6)],
        [(0, 9), (1, 3), (0, 6)],
        [(0, 9), (0, 4), (2, 4)],
    ],
)
def test_a_host_hashes_a_block_as_the_formula_says(monkeypatch, words, box):
    """`_mix` is what a GPU without Triton does."""
    monkeypatch.setattr("pentad.ops.digest.HOST_WORDS", words)
    x = torch.randn(9, 4, 6)
    position = torch.arange(1, x.numel() + 1)
    mixed = _mix(words_of(x).to(torch.int64), position).view(x.shape)
    part = tuple(slice(start, stop) for start, stop in box)
    hasher = Hasher()
    hasher.add_block(x[part].contiguous(), x.shape, box)
    assert hasher.finish() == [int(mixed[part].sum()) % 2**64]


def test_bytes_beyond_the_last_word_count():
    x = torch.arange(7, dtype=torch.uint8)
    y = x.clone()
    y[6] = 9
    assert tensor_checksum(x) != tensor_checksum(y)


def test_the_digest_covers_names_dtypes_and_shapes_but_not_order():
    a, b = torch.randn(2, 3), torch.randn(3)
    whole = digest_of([("a", a), ("b", b)]).hex()
    assert digest_of([("b", b), ("a", a)]).hex() == whole
    assert digest_of([("a", a), ("c", b)]).hex() != whole
    assert digest_of([("a", a.view(3, 2)), ("b", b)]).hex() != whole
    assert digest_of([("a", a), ("b", b.bfloat16())]).hex() != whole
    assert digest_of([("a", a)]).hex() != whole


@pytest.mark.parametrize("words", [1, 7, 64, 1 << 20])
def test_batches_do_not_change_the_digest(monkeypatch, words):
    weights = [(f"w{n}", torch.randn(n, 3)) for n in (1, 5, 40)] + [("b", torch.ones(3).bfloat16())]
    expected = {name: tensor_checksum(tensor) for name, tensor in weights}
    monkeypatch.setattr("pentad.ops.digest.HOST_WORDS", words)
    entries = digest_of(weights).entries
    assert {name: int(entry.rpartition("/")[2], 16) for name, entry in entries.items()} == expected


def test_hashing_leaves_the_tensor_alone():
    x = torch.arange(10)
    tensor_checksum(x)
    assert torch.equal(x, torch.arange(10))


def test_empty_tensors_have_a_checksum():
    assert (
        digest_of([("none", torch.zeros(0, 3))]).hex()
        != digest_of([("none", torch.zeros(0))]).hex()
    )


def test_a_name_given_twice_is_a_defect():
    with pytest.raises(AssertionError, match="twice"):
        digest_of([("a", torch.ones(1)), ("a", torch.ones(1))])


def test_a_part_that_begins_in_mid_word_is_hashed_by_its_bytes():
    whole = torch.arange(9, dtype=torch.bfloat16)
    assert tensor_checksum(whole[1:]) == tensor_checksum(whole[1:].clone())


def test_memory_that_was_digested_can_still_be_given_back():
    tensor = torch.ones(64)
    digest_of([("a", tensor)])
    tensor.untyped_storage().resize_(0)
    assert tensor.untyped_storage().nbytes() == 0


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_weights_that_are_compared_must_be_the_same_bytes(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch.manual_seed(0)
    whole = torch.randn(9, 5, device=device).bfloat16()
    one = [("a", whole[1:4]), ("b", torch.randn(7, 3, device=device)), ("c", whole[0, :1])]

    def copies():
        return {name: tensor.clone() for name, tensor in one}

    assert are_same(one, copies().items())
    for name in "abc":
        changed = copies()
        changed[name].view(-1)[-1] = -changed[name].view(-1)[-1]
        assert not are_same(one, changed.items()), f"another sign in {name} is not seen"
    zero = [("z", torch.zeros(4, device=device))]
    assert not are_same(zero, [("z", -zero[0][1])]), "-0 equals 0, and is not the same"
    fewer = copies()
    del fewer["b"]
    assert not are_same(one, fewer.items()) and not are_same(one[:2], copies().items())
    assert not are_same(one, [*copies().items()][:2] + [("c", whole[0, :1].float())])


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_weights_are_compared_in_the_dtype_in_which_they_arrived(monkeypatch, device, joins):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    monkeypatch.setattr("pentad.ops.digest.JOINED_ELEMENTS", 20)
    torch.manual_seed(0)
    sent = {name: torch.randn(3, 4, device=device) for name in "abcd"}
    sent["d"][0, 0] = 0.0
    kept = torch.randn(6, 4, device=device).bfloat16()
    kept[1:4] = sent["a"]
    own = {"a": kept[1:4], "b": sent["b"].clone(), "c": sent["c"].bfloat16(), "d": sent["d"].half()}
    assert are_same_cast(own, sent, joins=joins)
    for name in "abcd":
        at = own[name].view(-1)
        at[0] = -at[0]
        assert not are_same_cast(own, sent, joins=joins), f"another sign in {name} is not seen"
        at[0] = -at[0]
    assert not are_same_cast(own, {name: sent[name] for name in "abc"}, joins=joins)
