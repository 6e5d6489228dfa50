"""Pipelines give one rank's numbers: every schedule, alone and with other axes, ragged rows."""

import pipeline_cases
import pytest
import torch
from closeness import assert_stepped
from tables import table

from pentad.core.layout import Layout

pytestmark = pytest.mark.dist
REFERENCES: dict[tuple, dict] = {}
CASE_S = 300.0


def reference(model: str, **kwargs):
    key = (model, *sorted(kwargs.items()))
    if key not in REFERENCES:
        REFERENCES[key] = pipeline_cases.train_step(model, Layout(), **kwargs)
    return REFERENCES[key]


def check(
    pool,
    model: str,
    layout: Layout,
    *,
    schedule: str,
    loss: str = "token",
    calls: int = 1,
    num_rows: int = 12,
    **settings,
) -> None:
    true = reference(model, loss=loss, calls=calls, num_rows=num_rows)
    if schedule.endswith("ZeroBubble"):
        settings.setdefault("reshard_after_forward_policy", "never")
    mine = pool.run(
        layout.world,
        "pipeline_cases",
        "train_step",
        timeout_s=CASE_S,
        model=model,
        layout=layout,
        loss=loss,
        calls=calls,
        num_rows=num_rows,
        routes=true["routes"],
        pp_schedule=schedule,
        **settings,
    )
    compare(mine, true)


def compare(mine: dict, true: dict) -> None:
    """Tolerances: sums of a few hundred fp32 terms in another order."""
    for key in ("scored", "outputs"):
        for row, (a, b) in enumerate(zip(mine[key], true[key], strict=True)):
            assert a.keys() == b.keys()
            for name in a:
                assert torch.allclose(a[name], b[name], rtol=1e-4, atol=1e-4), (key, row, name)
    assert mine["loss_sum"] == pytest.approx(true["loss_sum"], rel=1e-5)
    for a, b in zip(mine["stats"], true["stats"], strict=True):
        assert a == pytest.approx(b, rel=1e-4)
    assert mine["gradients"].keys() == true["gradients"].keys()
    for name, gradient in true["gradients"].items():
        error = (mine["gradients"][name] - gradient).norm() / gradient.norm()
        assert error < 1e-5, f"{name}: relative error {error:.2e}"
    assert all(result == mine["result"] for result in mine["results"])
    assert mine["result"].grad_norm == pytest.approx(true["result"].grad_norm, rel=1e-5)
    assert mine["result"].grad_norm > 0.5, "so the step was clipped"
    assert mine["weights"].keys() == true["weights"].keys()
    for name, weight in true["weights"].items():
        gradient = true["gradients"].get(name)
        assert_stepped(name, mine["weights"][name], weight, gradient, 1e-5)
    for a, b in zip(mine["after"], true["after"], strict=True):  # both ends of a tie moved alike
        for name in a:
            torch.testing.assert_close(a[name], b[name], rtol=1e-2, atol=1e-2)


SCHEDULES = ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")


TWO_RANKS = [
    *(("tied5", schedule) for schedule in SCHEDULES),
    ("own5", "1F1B"),
    ("own5", "InterleavedZeroBubble"),  # the others with a given split
    ("moe5", "Interleaved1F1B"),
    ("moe5", "ZBVZeroBubble"),
]
TWO_RANKS_REST = [
    *(("tied5", schedule) for schedule in SCHEDULES if schedule != "ZBVZeroBubble"),
    ("moe5", "ZBVZeroBubble"),
]


@pytest.mark.parametrize(("model", "schedule"), table(TWO_RANKS, TWO_RANKS_REST))
def test_two_ranks(pool, schedule, model):
    """Every schedule and every model once; ties under every schedule with more axes."""
    check(pool, model, Layout(pp=2), schedule=schedule)


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])  # the others with another axis
def test_four_ranks(pool, schedule):
    """Fewer rows than microbatches (below) pass as many ranks, under every schedule."""
    check(pool, "tied8", Layout(pp=4), schedule=schedule)


MORE_AXES = [
    ("tied5", Layout(pp=2, tp=2), "1F1B"),
    ("tied5", Layout(pp=2, cp=2), "1F1B"),
    ("tied5", Layout(pp=2, dp_replicate=2), "1F1B"),
    ("tied5", Layout(pp=2, dp_replicate=2), "Interleaved1F1B"),
    ("tied5", Layout(pp=2, dp_replicate=2), "InterleavedZeroBubble"),
    ("tied5", Layout(pp=2, dp_replicate=2), "ZBVZeroBubble"),
    ("moe5", Layout(pp=2, dp_shard=2, ep=2), "Interleaved1F1B"),
    ("moe5", Layout(pp=2, tp=2, etp=2), "1F1B"),
    ("moe5", Layout(pp=2, tp=2, etp=2), "Interleaved1F1B"),
    ("moe5", Layout(pp=2, tp=2, etp=2), "InterleavedZeroBubble"),
    *(("moe5", Layout(pp=2, cp=2, ep=2), schedule) for schedule in SCHEDULES),
    ("tied5", Layout(pp=2, dp_shard=2, tp=2), "Interleaved1F1B"),
    ("tied5", Layout(pp=2, cp=2, tp=2), "ZBVZeroBubble"),
    ("tied5", Layout(pp=2, dp_shard=2, cp=2), "InterleavedZeroBubble"),
    ("tied5", Layout(pp=2, dp_replicate=2, dp_shard=2), "1F1B"),
    ("tied8", Layout(pp=4, tp=2), "InterleavedZeroBubble"),
    ("tied8", Layout(pp=4, dp_shard=2), "ZBVZeroBubble"),
    ("moe5", Layout(pp=2, cp=2, tp=2, ep=4), "Interleaved1F1B"),
    ("moe5", Layout(pp=2, dp_shard=2, tp=2, ep=2, etp=2), "ZBVZeroBubble"),
    ("moe5", Layout(pp=2, dp_shard=2, cp=2, ep=2), "InterleavedZeroBubble"),
    ("moe5", Layout(pp=2, dp_replicate=2, tp=2, ep=2), "1F1B"),
]
MORE_AXES_REST = [
    ("moe5", Layout(pp=2, dp_replicate=2, tp=2, ep=2), "1F1B"),
    ("moe5", Layout(pp=2, cp=2, tp=2, ep=4), "Interleaved1F1B"),
    ("moe5", Layout(pp=2, dp_shard=2, cp=2, ep=2), "InterleavedZeroBubble"),
    ("tied5", Layout(pp=2, cp=2, tp=2), "ZBVZeroBubble"),
    ("tied5", Layout(pp=2, tp=2), "1F1B"),
    ("tied5", Layout(pp=2, cp=2), "1F1B"),
    ("moe5", Layout(pp=2, dp_shard=2, ep=2), "Interleaved1F1B"),
    ("tied5", Layout(pp=2, dp_shard=2, tp=2), "Interleaved1F1B"),
    ("tied5", Layout(pp=2, dp_shard=2, cp=2), "InterleavedZeroBubble"),
    ("tied5", Layout(pp=2, dp_replicate=2, dp_shard=2), "1F1B"),
    ("tied8", Layout(pp=4, tp=2), "InterleavedZeroBubble"),
    ("tied8", Layout(pp=4, dp_shard=2), "ZBVZeroBubble"),
]


@pytest.mark.parametrize(("model", "layout", "schedule"), table(MORE_AXES, MORE_AXES_REST), ids=str)
def test_with_more_axes(pool, model, layout, schedule):
    """Every schedule with every axis, here or below: dp_shard with several calls, and with
    recomputed blocks."""
    check(pool, model, layout, schedule=schedule)


@pytest.mark.parametrize("schedule", table(SCHEDULES, ("1F1B", "InterleavedZeroBubble")))
def test_several_calls_reduce_once_and_scoring_may_come_between(pool, schedule):
    check(pool, "tied5", Layout(pp=2, dp_shard=2), schedule=schedule, calls=3)


SPLIT_LOSSES = [(s, x) for s in ("Interleaved1F1B", "ZBVZeroBubble") for x in ("value", "sequence")]


@pytest.mark.parametrize(("schedule", "loss"), table(SPLIT_LOSSES, SPLIT_LOSSES[1:3]))
def test_values_and_segments_come_from_the_last_stage(pool, schedule, loss):
    check(pool, "tied5", Layout(pp=2, cp=2), schedule=schedule, loss=loss)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_fewer_rows_than_microbatches(pool, schedule):
    check(pool, "tied8", Layout(pp=4), schedule=schedule, num_rows=3)


EACH_SECOND = {"ac_mode": "selective", "ac_selective": 2}
RECOMPUTED = [
    *((schedule, {"ac_mode": "full"}) for schedule in SCHEDULES),
    ("Interleaved1F1B", EACH_SECOND),
    ("ZBVZeroBubble", EACH_SECOND),
]
RECOMPUTED_REST = [RECOMPUTED[1], RECOMPUTED[2], RECOMPUTED[5]]
"""Backward whole and in two parts, all blocks and some of them, are tried without them."""


@pytest.mark.parametrize(("schedule", "ac"), table(RECOMPUTED, RECOMPUTED_REST), ids=str)
def test_recomputed_blocks(pool, schedule, ac):
    check(pool, "moe5", Layout(pp=2, dp_shard=2, ep=2), schedule=schedule, **ac)


@pytest.mark.parametrize("schedule", table(["1F1B", "Interleaved1F1B"], ["1F1B"]))
def test_recomputed_operations(pool, schedule):
    ac = {"ac_mode": "selective", "ac_selective": "op", "reshard_after_forward_policy": "never"}
    check(pool, "moe5", Layout(pp=2, tp=2), schedule=schedule, **ac)


@pytest.mark.parametrize(
    "schedule", table(["Interleaved1F1B", "InterleavedZeroBubble"], ["Interleaved1F1B"])
)
def test_more_stages_than_fsdp_keeps_gathered(pool, schedule):
    check(pool, "tied8", Layout(pp=2, dp_shard=2), schedule=schedule, stages_per_rank=4)


@pytest.mark.parametrize(
    "schedule", table(["Interleaved1F1B", "ZBVZeroBubble"], ["Interleaved1F1B"])
)
def test_a_given_split(pool, schedule):
    check(pool, "own5", Layout(pp=2), schedule=schedule, layers_per_stage=(1, 1, 2, 1))


def test_microbatches_are_of_unequal_length_and_their_number_suits_the_schedule(pool):
    def sizes(num_rows: int, **budget: int) -> list[int]:
        kwargs = {"layout": Layout(pp=2), "num_rows": num_rows, "pp_schedule": "Interleaved1F1B"}
        return pool.run(2, "pipeline_cases", "shapes_seen", CASE_S, **kwargs, **budget)

    assert len(sizes(12)) == 4 and len(set(sizes(5))) == 4
    assert sizes(2)[2:] == [1, 1], "filling, since there are four stages"
    assert len(sizes(12, n_mbs=7)) == 8, "rounds of two"
    many = sizes(12, max_tokens_per_mb=31)
    assert len(many) > 4 and len(many) % 2 == 0 and max(many) <= 31
    check(pool, "tied5", Layout(pp=2), schedule="Interleaved1F1B", max_tokens_per_mb=31)


SPLIT = ["ZBVZeroBubble", "InterleavedZeroBubble"]


@pytest.mark.parametrize("split", table(SPLIT, SPLIT[1:]))
def test_gradients_computed_in_bfloat16_add_up_in_float32_where_backward_is_split(pool, split):
    """Both round each microbatch's gradient alike; bfloat16 sums would differ by 1e-3."""
    seen = [
        pool.run(
            4,
            "pipeline_cases",
            "train_step",
            timeout_s=CASE_S,
            model="own5",
            layout=Layout(pp=2, dp_shard=2),
            pp_schedule=schedule,
            reshard_after_forward_policy="never",
            dtype="bfloat16",
            n_mbs=12,
        )["gradients"]
        for schedule in ("Interleaved1F1B", split)
    ]
    for whole, other in ([one[name] for one in seen] for name in seen[0]):
        assert whole.dtype == torch.float32 and whole.norm() > 0
        assert (other - whole).norm() / whole.norm() < 1e-5


@pytest.mark.parametrize("schedule", table(["1F1B", "ZBVZeroBubble"], ["1F1B"]))
def test_parameters_on_the_host(pool, schedule):
    """The ends of a tie meet by way of the device, on one rank and on two."""
    layout = Layout(pp=2, dp_shard=2)
    check(pool, "tied5", layout, schedule=schedule, calls=2, offload_params=True)
