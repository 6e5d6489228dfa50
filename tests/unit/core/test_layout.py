"""Allocation strings print back as written, and say where they are wrong."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pentad.core.errors import UserError
from pentad.core.layout import (
    AXES,
    INFERENCE,
    Allocation,
    AllocationProblem,
    Component,
    Coords,
    Layout,
    parse_allocation,
)

SIZES = st.sampled_from([1, 2, 3, 4, 8, 16])


@st.composite
def dims(draw, letters: str):
    chosen = draw(
        st.permutations(draw(st.lists(st.sampled_from(letters), min_size=1, unique=True)))
    )
    return tuple((letter, draw(SIZES)) for letter in chosen)


@st.composite
def components(draw, name: str | None):
    backend = draw(st.sampled_from([*INFERENCE, "archon", "fsdp", "megatron"]))
    attn = dict(draw(dims(AXES[backend])))
    if backend not in ("archon", "megatron") or draw(st.booleans()):
        ranks = math.prod(attn.get(x, 1) for x in "dtc")
        if "e" in attn:
            attn["e"] = draw(st.sampled_from([i for i in range(1, ranks + 1) if ranks % i == 0]))
        return Component(backend, name, tuple(attn.items()))
    attn.pop("e", None)
    attn = attn or {"d": 2}
    ranks = math.prod(attn.get(x, 1) for x in "dtc")
    ep = draw(st.sampled_from([i for i in range(1, ranks + 1) if ranks % i == 0]))
    rest = ranks // ep
    etp = draw(st.sampled_from([i for i in range(1, rest + 1) if rest % i == 0]))
    ffn = {"e": ep, "t": etp}
    if draw(st.booleans()):
        ffn["d"] = rest // etp
    if draw(st.booleans()):
        ffn["p"] = attn.get("p", 1)
    shuffled = draw(st.permutations(list(ffn.items())))
    return Component(backend, name, tuple(attn.items()), tuple(shuffled))


@st.composite
def allocations(draw):
    count = draw(st.integers(1, 4))
    members = [draw(components(f"name_{i}")) for i in range(count)]
    groups: list[tuple[Component, ...]] = [(members[0],)]
    for member in members[1:]:
        if draw(st.booleans()):
            groups[-1] += (member,)
        else:
            groups.append((member,))
    return Allocation(tuple(groups))


@given(allocations())
def test_every_allocation_prints_back_exactly(allocation):
    text = str(allocation)
    parsed = parse_allocation(text)
    assert parsed == allocation and str(parsed) == text
    spaced = "".join(f" {char}" if char in "+|:[]()" else char for char in text)
    assert parse_allocation(spaced) == allocation


@given(allocations())
def test_devices_lie_side_by_side_and_groups_share_them(allocation):
    used: list[int] = []
    for group in allocation.groups:
        starts = {allocation.devices(component).start for component in group}
        assert starts == {len(used)}
        longest = max((allocation.devices(component) for component in group), key=len)
        used += longest
    assert used == list(range(allocation.num_devices))


def test_bars_bind_tighter_than_plus():
    allocation = parse_allocation("vllm[rollout]:d2|archon[actor]:d4+archon[ref]:d3")
    assert [[c.role for c in group] for group in allocation.groups] == [
        ["rollout", "actor"],
        ["ref"],
    ]
    actor, ref = allocation.find("actor"), allocation.find("ref")
    assert allocation.num_devices == 7
    assert allocation.devices(ref) == range(4, 7)
    assert allocation.shares_devices(actor, allocation.find("rollout"))
    assert not allocation.shares_devices(actor, ref)


def test_unnamed_components_have_the_roles_of_their_kind():
    allocation = parse_allocation("sglang:d4t2+archon:d4p2t2")
    assert [component.role for component in allocation] == ["rollout", "actor"]
    assert allocation.find("critic") is None


@pytest.mark.parametrize(
    ("text", "layout", "efsdp"),
    [
        ("archon:d4p2t2", Layout(dp_shard=4, pp=2, tp=2), 8),
        ("archon:d2c2e4", Layout(dp_shard=2, cp=2, ep=4), 1),
        ("archon:d4t2e2", Layout(dp_shard=4, tp=2, ep=2), 4),
        # The MoE example of the Archon tutorial, with and without the derived d.
        (
            "archon:(attn:d1p4t2c2|ffn:d1p4t1e4)",
            Layout(pp=4, tp=2, cp=2, ep=4),
            1,
        ),
        ("archon:(attn:d1p4t2c2|ffn:e2)", Layout(pp=4, tp=2, cp=2, ep=2), 2),
        # moe-engine's 256 devices: tp 8, pp 4, dp 4, ep 2, counted on the expert side.
        (
            "archon:(attn:d8p4t8|ffn:d4p4t8e2)",
            Layout(pp=4, dp_shard=8, tp=8, ep=2, etp=8),
            4,
        ),
    ],
)
def test_layouts_of_known_strings(text, layout, efsdp):
    (component,) = parse_allocation(text)
    assert component.layout() == layout
    assert layout.efsdp == efsdp
    assert layout.world == component.world


def test_the_golden_example_has_256_devices():
    assert parse_allocation("archon:(attn:d8p4t8|ffn:d4p4t8e2)").num_devices == 256


@given(allocations())
def test_coordinates_number_both_meshes_without_gap(allocation):
    for component in allocation:
        layout = component.layout()
        if layout.world > 4096:
            continue
        seen = [layout.coords(rank) for rank in range(layout.world)]
        dense = [
            (((c.pp * layout.dp_replicate + c.dp_replicate) * layout.dp_shard + c.dp_shard)
             * layout.cp + c.cp) * layout.tp + c.tp
            for c in seen
        ]  # fmt: skip
        experts = [
            (((c.pp * layout.dp_replicate + c.dp_replicate) * layout.efsdp + c.efsdp)
             * layout.ep + c.ep) * layout.etp + c.etp
            for c in seen
        ]  # fmt: skip
        assert dense == experts == list(range(layout.world))
        assert all(c.tp < layout.tp and c.ep < layout.ep and c.etp < layout.etp for c in seen)


def test_coordinates_with_replicas():
    (component,) = parse_allocation("archon:(attn:d4p2t2|ffn:t1e2)")
    layout = component.layout(dp_replicate=2)
    assert (layout.dp_shard, layout.efsdp, layout.world) == (2, 2, 16)
    expected = Coords(pp=1, dp_replicate=0, dp_shard=1, cp=0, tp=1, efsdp=1, ep=1, etp=0)
    assert layout.coords(11) == expected


def test_layout_prints_the_line_of_the_start_log():
    layout = Layout(pp=2, dp_shard=4, tp=2)
    assert str(layout) == "pp=2, dp_shard=4, tp=2, cp=1, ep=1, etp=1"


@pytest.mark.parametrize(
    ("text", "column", "rule", "remedy"),
    [
        ("", 0, "is empty", "archon:d1"),
        ("archon", 6, "':' and the axes must follow archon", "archon:d1"),
        ("archon:", 7, "an axis such as d1 is expected here", "axes of archon"),
        ("archn:d1", 0, "'archn' is not a backend", "did you mean archon"),
        ("d4t2", 0, "'d4t2' is not a backend", "did you mean embedded:d4t2|archon:d4t2?"),
        ("archon:d1+", 10, "a backend is expected here", "vllm, sglang"),
        ("archon:d1,vllm:d1", 9, "',' is not an axis", "d (data parallel)"),
        ("archon:d2x2", 9, "'x' is not an axis", "e (expert parallel)"),
        ("archon:d0", 8, "from 1 to 999999, not 0", "d2"),
        ("archon:d02", 8, "not 02", "d2"),
        ("archon:dp2", 8, "which is missing", "d2"),
        ("archon:d1234567", 8, "not 1234567", "d2"),
        ("archon:d2t2d4", 11, "the axis d is given twice", "keep one"),
        ("archon[:d1", 7, "a name is expected between", "archon[actor]"),
        ("archon[1a]:d1", 7, "a name is expected between", "archon[actor]"),
        ("archon[a:d1", 8, "must end with ']', not ':'", "letters"),
        ("archon:attn:d1|ffn:e1", 7, "must be in parentheses", "archon:(attn:"),
        ("archon:(ffn:e1|attn:d1)", 8, "'attn:' is expected here", "archon:(attn:"),
        ("archon:(attn:d1)", 15, "'|' and the ffn side", "archon:(attn:"),
        ("archon:(attn:d1|ffn:e1", 22, "')' must close", "archon:(attn:"),
        ("archon:d1)", 9, "')' does not belong here", "+ (own devices)"),
        ("fsdp:(attn:d1|ffn:e1)", 5, "no separate expert layout", "archon:(attn:"),
        ("fsdp:d2p2", 7, "fsdp does not take p", "axes of fsdp: d"),
        ("fsdp:d2e4", 7, "e4 must divide d*c*t = 2", "e can be 1, 2, or use fsdp:d4e4"),
        ("vllm:d2c2", 7, "vllm does not take c", "axes of vllm: d"),
        ("embedded:d1e1", 11, "embedded does not take e", "axes of embedded"),
        ("archon:(attn:d1e2|ffn:e1)", 15, "attn does not take e", "axes of attn"),
        ("archon:(attn:c2|ffn:c2e2)", 20, "ffn does not take c", "axes of ffn"),
        ("archon:(attn:d1p2|ffn:p3)", 22, "p3 of ffn must equal p2", "p2 on both"),
        ("archon:(attn:d1t4|ffn:e3)", 22, "t*e = 3", "with t1, e can be 1, 2, 4"),
        ("archon:(attn:d4|ffn:d1e2)", 20, "attn has d*t*c = 4", "write d2"),
        ("sglang:d4+archon:d1p2e2", 21, "e2 must divide d*c*t = 1", "archon:d2p2e2 (4 devices)"),
        ("archon:d2c3e4", 11, "e4 must divide d*c*t = 6", "e can be 1, 2, 3, 6, or"),
        ("archon:d1+archon:d1", 10, "two components would be the actor", "archon[critic]:"),
        ("vllm[x]:d1|archon[x]:d1", 11, "two components would be the x", "archon[critic]:"),
    ],
)  # fmt: skip
def test_faults_are_pointed_at(text, column, rule, remedy):
    with pytest.raises(UserError) as caught:
        parse_allocation(text)
    (problem,) = caught.value.problems
    assert isinstance(problem, AllocationProblem)
    assert problem.column == column
    assert rule in problem.rule and remedy in problem.remedy
    sentence, line, caret = str(problem).split("\n")
    assert sentence.startswith("allocation_mode: ") and sentence.endswith(".")
    assert line.strip() == text and caret.index("^") == 4 + column


def test_all_faults_of_meaning_are_told_together():
    with pytest.raises(UserError) as caught:
        parse_allocation("vllm:c2+fsdp:e2p2+archon:d2d2")
    rules = [problem.rule for problem in caught.value.problems]
    assert [rule.split(":")[0] for rule in rules] == [
        "vllm does not take c",
        "fsdp does not take p",
        "e2 must divide d*c*t = 1, the ranks of one pipeline stage",
        "the axis d is given twice",
        "with 3 components each needs a name",
        "with 3 components each needs a name",
        "with 3 components each needs a name",
    ]


@given(st.text(alphabet="archonvlmsgdptce0123456789[]()|+: _\u00e9\t", max_size=40))
def test_any_text_parses_or_is_refused_in_words(text):
    try:
        parse_allocation(text)
    except UserError as error:
        assert all(0 <= problem.column <= len(text) for problem in error.problems)
