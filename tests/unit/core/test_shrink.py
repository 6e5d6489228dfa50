"""Fewer ranks: which layout is left, by the rules that `core.shrink` states."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pentad.core.dims import ModelDims
from pentad.core.errors import UserError
from pentad.core.fit import check_fit
from pentad.core.layout import parse_allocation
from pentad.core.shrink import describe, shrink

DENSE = ModelDims(
    family="qwen3",
    vocab_size=512,
    hidden_size=64,
    num_layers=8,
    num_heads=16,
    num_kv_heads=8,
    head_dim=8,
    intermediate_size=96,
)


def mixture(num_experts):
    return ModelDims(
        family="qwen3_moe",
        vocab_size=512,
        hidden_size=64,
        num_layers=8,
        num_heads=16,
        num_kv_heads=8,
        head_dim=8,
        intermediate_size=96,
        num_experts=num_experts,
        num_experts_per_token=2,
        moe_intermediate_size=32,
        moe_layers=(True,) * 8,
    )


def component_of(text):
    (component,) = parse_allocation(text)
    return component


def fits(dims):
    def works(component, replicas):
        layout = component.layout(replicas)
        try:
            check_fit(layout, dims)
        except UserError:
            return False
        return layout.pp <= dims.num_layers

    return works


def left_of(text, world, dims=DENSE, replicas=1):
    found = shrink(component_of(text), world, fits(dims), replicas)
    return found and (str(found[0]), found[1])


@pytest.mark.parametrize(
    ("text", "world", "expected"),
    [
        ("archon:d4", 4, "archon:d4"),
        ("archon:d4", 3, "archon:d3"),
        ("archon:d4t2", 7, "archon:d3t2"),
        ("archon:d2p2t2", 7, "archon:d1p2t2"),
        # Others than d only where d1 does not fit any more; t stays before p, p before c.
        ("archon:d2t2", 1, "archon:d1t1"),
        ("archon:p4", 3, "archon:p3"),
        ("archon:p2t2", 3, "archon:p1t2"),
        ("archon:p2t2c2", 7, "archon:p2t2c1"),
        ("archon:p4t2", 7, "archon:p3t2"),
        ("archon:t4", 3, "archon:t2"),  # three ranks do not share 16 heads
        ("archon:c8", 7, "archon:c4"),
    ],
)
def test_d_gives_way_first(text, world, expected):
    assert left_of(text, world) == (expected, 1)


@pytest.mark.parametrize(
    ("text", "world", "num_experts", "expected"),
    [
        ("archon:d4e4", 3, 12, "archon:d3e3"),
        ("archon:d4e4", 3, 8, "archon:d3e3"),  # 3, 3 and 2 experts
        ("archon:d4e4", 3, 4, "archon:d3e3"),  # 2, 1 and 1
        ("archon:d8e8", 7, 8, "archon:d7e7"),  # 2, and 1 on each other
        ("archon:d8e8", 5, 8, "archon:d5e5"),  # 2, 2, 2, 1 and 1
        ("archon:d7e7", 5, 8, "archon:d5e5"),
        ("archon:(attn:d8|ffn:e8)", 7, 8, "archon:(attn:d7|ffn:e7)"),
        ("archon:(attn:d4t2|ffn:e8)", 7, 6, "archon:(attn:d3t2|ffn:e6)"),
        ("archon:(attn:d4|ffn:e4)", 2, 8, "archon:(attn:d2|ffn:e2)"),
        ("archon:(attn:d2t2|ffn:d1t1e4)", 3, 8, "archon:(attn:d1t2|ffn:d1t1e2)"),
        ("archon:(attn:d4|ffn:t2e2)", 3, 8, "archon:(attn:d3|ffn:t1e1)"),
        ("archon:(attn:d4|ffn:d2e2)", 3, 6, "archon:(attn:d3|ffn:d3e1)"),
    ],
)
def test_experts_are_cut_anew(text, world, num_experts, expected):
    assert left_of(text, world, mixture(num_experts)) == (expected, 1)


def test_replicas_divide_what_is_left():
    assert left_of("archon:d4", 3, replicas=2) == ("archon:d3", 1)
    assert left_of("archon:d8", 6, replicas=2) == ("archon:d6", 2)


def test_it_says_what_changed():
    before = component_of("archon:(attn:d4t2|ffn:e8)")
    after, _ = shrink(before, 7, fits(mixture(8)))
    said = describe(before, after, 7)
    assert said == (
        "archon:(attn:d3t2|ffn:e6) for archon:(attn:d4t2|ffn:e8) on 7 ranks: d 4 -> 3, "
        "e of ffn 8 -> 6; 1 of them idle"
    )


SIZES = st.sampled_from([1, 2, 3, 4, 8])


@settings(max_examples=150, deadline=None)
@given(
    d=SIZES,
    p=SIZES,
    t=SIZES,
    c=SIZES,
    e=SIZES,
    experts=st.sampled_from([0, 6, 8, 12]),
    data=st.data(),
)
def test_what_is_left_is_valid_and_the_largest(d, p, t, c, e, experts, data):
    text = f"archon:d{d}p{p}t{t}c{c}" + (f"e{e}" if experts else "")
    dims = mixture(experts) if experts else DENSE
    works = fits(dims)
    try:
        component = component_of(text)
    except UserError:
        return
    if not works(component, 1):
        return
    world = data.draw(st.integers(1, component.world))
    after, replicas = shrink(component, world, works) or (None, 1)
    assert after is not None and after.world <= world and works(after, replicas)
    assert component_of(str(after)) == after
    if component.world <= world:
        assert after == component
    elif p * t * c <= world:  # only d and e are smaller, and d by no more than it must be
        assert [after.size(letter) for letter in "ptc"] == [p, t, c]
        assert after.size("d") == world // (p * t * c)
    assert all(after.size(letter) <= component.size(letter) for letter in "ptce")
