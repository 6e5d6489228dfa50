"""Each word of the map language against torch written out, both directions, and wrong maps."""

import pytest
import torch

from pentad.core.dims import ModelDims
from pentad.core.errors import UserError
from pentad.weights import transfer
from pentad.weights.map import (
    Expert,
    Glu,
    Padded,
    Planes,
    Qkv,
    Rows,
    Rule,
    Stack,
    Transposed,
    build_map,
)
from pentad.weights.transfer import PairsReader, whole_shards

DIMS = ModelDims(
    family="toy",
    vocab_size=11,
    hidden_size=7,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=4,
    intermediate_size=5,
    num_experts=3,
    num_experts_per_token=2,
    moe_intermediate_size=9,
    moe_layers=(False, True, True),
)
V, D, Q, K, F, E, M = 11, 7, 24, 8, 5, 3, 9


def weights(**shapes):
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def assemble(rule, sources, sizes=None):
    """The target that a map of this one rule gives, and the sources it gives back."""
    weight_map = build_map([rule], DIMS, extra_sizes=sizes)
    targets = {n: torch.zeros(e.shape) for n, e in weight_map.entries.items()}
    transfer.fill(whole_shards(targets), weight_map, PairsReader(list(sources.items())))
    back = dict(transfer.iter_sources(targets, weight_map))
    assert back.keys() == sources.keys()
    for name, tensor in sources.items():
        assert torch.equal(back[name], tensor), name
    return targets


def test_plain_transposed_and_row_blocks():
    one = weights(a=(K, D))
    assert torch.equal(assemble(Rule("t", "K D", "a"), one)["t"], one["a"])
    turned = assemble(Rule("t", "D K", Transposed("a")), one)
    assert torch.equal(turned["t"], one["a"].T)


def test_row_blocks_share_a_fused_source():
    rules = [
        Rule(name, f"{s} D", Rows("qkv", "Q+K+K", n))
        for n, (name, s) in enumerate([("q", "Q"), ("k", "K"), ("v", "K")])
    ]
    fused = weights(qkv=(Q + 2 * K, D))["qkv"]
    weight_map = build_map(rules, DIMS)
    targets = {n: torch.zeros(e.shape) for n, e in weight_map.entries.items()}
    transfer.fill(whole_shards(targets), weight_map, PairsReader([("qkv", fused)]))
    for name, part in zip("qkv", fused.split([Q, K, K]), strict=True):
        assert torch.equal(targets[name], part)
    ((name, back),) = transfer.iter_sources(targets, weight_map)
    assert name == "qkv" and torch.equal(back, fused)


def test_gate_and_up_have_an_axis():
    parts = weights(g=(F, D), u=(F, D))
    target = assemble(Rule("t", "2 F D", Glu("g", "u")), parts)["t"]
    assert torch.equal(target, torch.stack([parts["g"], parts["u"]]))


def test_a_fused_gate_up_on_disk_is_cut_into_planes():
    disk = weights(gu=(2 * F, D))
    rule = Rule("t", "2 F D", Glu(Rows("gu", "F+F", 0), Rows("gu", "F+F", 1)))
    assert torch.equal(assemble(rule, disk)["t"], disk["gu"].view(2, F, D))


def test_experts_are_stacked():
    names = [f"{e}.{part}" for e in range(E) for part in ("g", "u")]
    parts = weights(**{name: (M, D) for name in names})
    target = assemble(Rule("t", "E 2 M D", Stack(Glu("{e}.g", "{e}.u"))), parts)["t"]
    for e in range(E):
        assert torch.equal(target[e, 0], parts[f"{e}.g"])
        assert torch.equal(target[e, 1], parts[f"{e}.u"])


def test_fused_qkv_is_interleaved_by_query_group():
    parts = weights(q=(Q, D), k=(K, D), v=(K, D))
    target = assemble(Rule("t", "Q+K+K D", Qkv("q", "k", "v")), parts)["t"]
    groups = zip(parts["q"].chunk(2), parts["k"].chunk(2), parts["v"].chunk(2), strict=True)
    assert torch.equal(target, torch.cat([part for group in groups for part in group]))
    biases = weights(q=(Q,), k=(K,), v=(K,))
    target = assemble(Rule("t", "Q+K+K", Qkv("q", "k", "v")), biases)["t"]
    groups = zip(biases["q"].chunk(2), biases["k"].chunk(2), biases["v"].chunk(2), strict=True)
    assert torch.equal(target, torch.cat([part for group in groups for part in group]))


def test_one_expert_of_a_stack_with_its_planes_under_each_other():
    native = weights(s=(E, 2, M, D))
    rules = [Rule("{i}.{e}", "M+M D", Expert(Planes("{i}.s")), lambda dims, i: i == 0)]
    weight_map = build_map(rules, DIMS)
    targets = {n: torch.zeros(e.shape) for n, e in weight_map.entries.items()}
    transfer.fill(whole_shards(targets), weight_map, PairsReader([("0.s", native["s"])]))
    assert list(targets) == ["0.0", "0.1", "0.2"]
    for e in range(E):
        assert torch.equal(targets[f"0.{e}"], native["s"][e].reshape(2 * M, D))
    assert [entry.expert for entry in weight_map.entries.values()] == [0, 1, 2]


def test_padding_stays_zero_and_is_not_read_back():
    table = weights(a=(V, D))
    target = assemble(Rule("t", "Vp D", Padded("a", "V")), table, {"Vp": 16})["t"]
    assert torch.equal(target[:V], table["a"]) and not target[V:].any()


def test_layers_come_in_order_and_conditions_hold_per_layer():
    rules = [
        Rule("first", "D", "a"),
        Rule("{i}.x", "D", "{i}.hx"),
        Rule("{i}.moe", "D", "{i}.hm", lambda dims, i: dims.is_moe(i)),
        Rule("last", "D", "z"),
    ]
    weight_map = build_map(rules, DIMS)
    expected = ["first", "0.x", "1.x", "1.moe", "2.x", "2.moe", "last"]
    assert list(weight_map.entries) == expected
    assert list(weight_map.sources) == ["a", "0.hx", "1.hx", "1.hm", "2.hx", "2.hm", "z"]


@pytest.mark.parametrize(
    ("rules", "sentence"),
    [
        ([Rule("a", "D", "x"), Rule("a", "D", "y")], "a: two rules give this tensor"),
        ([Rule("a", "D", "x"), Rule("b", "D", "x")], r"x: block \[0:7\] is given twice"),
        (
            [Rule("a", "D", "x"), Rule("b", "F", "x")],
            r"x: two rules give it shapes \[7\] and \[5\]",
        ),
        ([Rule("q", "Q D", Rows("x", "Q+K", 0))], "x: 56 of 224 elements are not covered"),
        ([Rule("a", "Q+K+K+K D", Qkv("q", "k", "v"))], "a: 56 of 336 elements are not covered"),
    ],
)
def test_a_map_that_is_not_exact_is_refused(rules, sentence):
    with pytest.raises(UserError, match=f"weight map of toy, {sentence}"):
        build_map(rules, DIMS)
