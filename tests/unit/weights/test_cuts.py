"""What a layout cuts, held against torch slicing written out."""

import pytest
import torch

from pentad.core.dims import ModelDims
from pentad.core.errors import UserError
from pentad.weights.cuts import cut_entry, cut_range, split_dims
from pentad.weights.map import Planes, Qkv, Rule, build_map
from pentad.weights.transfer import source_block, target_block

DIMS = ModelDims(
    family="toy",
    vocab_size=11,
    hidden_size=7,
    num_layers=1,
    num_heads=12,
    num_kv_heads=4,
    head_dim=2,
    intermediate_size=6,
    num_experts=5,
    moe_intermediate_size=9,
)
PLAN = {"V": "tp", "Q": "tp", "K": "tp", "F": "tp", "E": "ep", "M": "etp", "P": "tp"}


def local(rule, coords, **sources):
    weight_map = build_map([rule], DIMS, extra_sizes={"P": 40})
    (entry,) = weight_map.entries.values()
    part = cut_entry(entry, PLAN, coords)
    out = torch.full(part.shape, float("nan"))
    for region in part.regions:
        target_block(out, region).copy_(source_block(sources[region.source], region))
    assert not out.isnan().any()
    return out


def numbers(*shape):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float).view(shape)


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 6, 12])
def test_query_rows_are_cut_in_whole_heads(tp):
    q = numbers(24, 7)
    for rank in range(tp):
        assert torch.equal(local(Rule("t", "Q D", "q"), {"tp": (tp, rank)}, q=q), q.chunk(tp)[rank])
        turned = local(Rule("t", "D Q", "o"), {"tp": (tp, rank)}, o=q.T)
        assert torch.equal(turned, q.T.chunk(tp, dim=1)[rank])


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_key_rows_are_cut_up_to_the_number_of_heads(tp):
    k = numbers(8, 7)
    for rank in range(tp):
        assert torch.equal(local(Rule("t", "K D", "k"), {"tp": (tp, rank)}, k=k), k.chunk(tp)[rank])


@pytest.mark.parametrize("tp", [8, 12])
def test_beyond_that_each_rank_has_the_head_its_queries_use(tp):
    k = numbers(8, 7)
    for rank in range(tp):
        part = local(Rule("t", "K D", "k"), {"tp": (tp, rank)}, k=k)
        head = (rank * 12 // tp) // 3  # 12 query heads, 3 to a key head
        assert torch.equal(part, k[2 * head : 2 * head + 2])


@pytest.mark.parametrize(
    ("symbol", "tp", "sentence"),
    [
        ("K", 3, "tp = 3: cannot split 4 key-value heads; use one of 1, 2, 4."),
        ("Q", 8, "tp = 8: cannot split 12 query heads; use one of 1, 2, 3, 4, 6, 12."),
    ],
)
def test_torn_heads_are_refused(symbol, tp, sentence):
    with pytest.raises(UserError, match=sentence):
        local(Rule("t", symbol, "x"), {"tp": (tp, 0)}, x=numbers(8))


def test_uneven_rows_are_cut_as_chunk_does():
    for size in range(1, 20):
        for num in range(1, 9):
            parts = torch.arange(size).chunk(num)
            for rank in range(num):
                expected = parts[rank].tolist() if rank < len(parts) else []
                assert list(range(*cut_range(size, num, rank))) == expected


def test_gate_and_up_are_each_cut_whether_stacked_or_under_each_other():
    pair = numbers(2, 6, 7)
    for rank in range(3):
        coords = {"tp": (3, rank)}
        expected = pair[:, 2 * rank : 2 * rank + 2]
        assert torch.equal(local(Rule("t", "2 F D", "x"), coords, x=pair), expected)
        fused = local(Rule("t", "F+F D", Planes("x")), coords, x=pair)
        assert torch.equal(fused, expected.reshape(4, 7))


@pytest.mark.parametrize("sizes", [[3, 2], [2, 2, 1], [2, 1, 1, 1], [1] * 5], ids=str)
def test_experts_are_dealt_over_ep_and_cut_over_etp(sizes):
    experts = numbers(5, 2, 9, 7)
    for ep_rank, part in enumerate(experts.split(sizes)):
        for etp_rank, expected in enumerate(part.split(3, dim=2)):
            coords = {"ep": (len(sizes), ep_rank), "etp": (3, etp_rank), "tp": (2, 1)}
            out = local(Rule("t", "E 2 M D", "x"), coords, x=experts)
            assert torch.equal(out, expected)


def test_interleaved_qkv_is_cut_in_plain_rows():
    q, k, v = numbers(24, 7), numbers(8, 7) + 1000, numbers(8, 7) + 2000
    groups = zip(q.chunk(4), k.chunk(4), v.chunk(4), strict=True)
    fused = torch.cat([part for group in groups for part in group])
    for tp in (1, 2, 4, 8):  # at 8 a rank holds half a group
        for rank in range(tp):
            out = local(Rule("t", "P D", Qkv("q", "k", "v")), {"tp": (tp, rank)}, q=q, k=k, v=v)
            assert torch.equal(out, fused.chunk(tp)[rank])


def test_split_dims_say_which_dim_an_axis_cuts():
    weight_map = build_map([Rule("t", "E 2 M D", "x")], DIMS)
    assert split_dims(weight_map.entries["t"], PLAN) == {"ep": 0, "etp": 2}
