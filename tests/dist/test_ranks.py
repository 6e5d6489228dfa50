"""Ranks stay together: equal copies, one norm, one decision; weights and state leave whole."""

import pytest
from parity_cases import (
    CONFIGS,
    copied_state,
    expert_norms,
    make,
    snapshot_held,
    train_step,
)
from sections import planned_keys
from tables import table

from pentad.core.layout import Layout
from pentad.models.families import dims_of
from pentad.ops.digest import digest_of
from pentad.planner.memory import Training, num_snapshots, snapshot_bytes, training_phases

pytestmark = pytest.mark.dist


def run(pool, layout: Layout, function: str, **kwargs):
    return pool.run(layout.world, "parity_cases", function, layout=layout, **kwargs)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("moe", Layout(tp=2)),  # router gates diverged over tp where their gradient was not summed
        ("dense", Layout(cp=2)),  # cp ranks clipped by different norms
        ("moe", Layout(dp_replicate=2, tp=2, ep=2)),
        ("dense", Layout(tp=4)),  # each kv head is held twice
        pytest.param("six", Layout(dp_replicate=2, dp_shard=4, ep=4), marks=pytest.mark.full),
        ("moe", Layout(dp_shard=2, cp=2, tp=2, ep=4, etp=2)),
    ],
    ids=str,
)
def test_what_ranks_hold_in_common_stays_equal_bit_by_bit(pool, model, layout):
    seen = run(pool, layout, "ranks_agree", model=model)
    assert all(results == seen["results"][0] for results in seen["results"])
    holders: dict[tuple, set[int]] = {}
    num_shared = 0
    for held in seen["held"]:
        for name, (box, checksum) in held.items():
            num_shared += (name, box) in holders
            holders.setdefault((name, box), set()).add(checksum)
    assert all(len(checksums) == 1 for checksums in holders.values())
    assert num_shared > 0 or layout.tp * layout.dp_replicate == 1


@pytest.fixture(scope="module")
def true_norms():
    routes = train_step("moe", Layout())["routes"]
    return routes, expert_norms(Layout(), routes)


@pytest.mark.parametrize(
    "layout",
    [Layout(tp=2), Layout(tp=2, ep=2), Layout(cp=2), Layout(dp_replicate=2, tp=2, etp=2)],
    ids=str,
)
def test_the_norm_counts_experts_and_routers_exactly_once(pool, layout, true_norms):
    routes, true = true_norms
    mine = run(pool, layout, "expert_norms", routes=routes)
    assert mine == pytest.approx(true, rel=1e-5)
    assert true["experts"] > 0.05 * true["all"] and true["routers"] > 0.001 * true["all"]


@pytest.mark.parametrize(
    ("model", "layout", "on_last_rank"),
    [
        ("dense", Layout(dp_shard=2), True),
        ("dense", Layout(pp=2), False),
        ("dense", Layout(pp=2), True),
        ("dense", Layout(cp=2, tp=2), False),
        ("moe", Layout(pp=2, dp_shard=2, ep=2), True),
    ],
    ids=str,
)
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(
    pool, model, layout, on_last_rank
):
    one_stage = {"pp_schedule": "1F1B"}
    given = {"model": model, "on_last_rank": on_last_rank, **one_stage}
    seen = run(pool, layout, "broken_gradient", **given)
    for result, is_still, after, num_skipped in seen["ranks"]:
        assert result.skipped and "not finite" in result.reason
        assert is_still and num_skipped == 1 and not after.skipped


def test_ranks_that_are_given_different_rows_are_told(pool):
    assert "the ranks received different rows" in run(pool, Layout(tp=2), "different_rows")


def test_a_copy_of_the_state_brings_a_layout_back_bit_by_bit(pool):
    assert copied_state(Layout())
    assert run(pool, Layout(dp_shard=2, tp=2, ep=2), "copied_state")


LEAVING = [
    ("dense", Layout(dp_shard=3)),
    ("dense", Layout(dp_replicate=2, tp=4)),
    ("moe", Layout(dp_shard=2, cp=2, tp=2, ep=2, etp=2)),
    ("moe", Layout(dp_shard=4)),
    ("six", Layout(dp_shard=4, ep=4)),
    ("moe", Layout(dp_shard=5, ep=5)),
]
LEAVING_REST = [LEAVING[3], LEAVING[5]]
"""Experts whole on each rank leave as dense weights do, and those of six ranks unevenly as well."""


@pytest.mark.parametrize(("model", "layout"), table(LEAVING, LEAVING_REST), ids=str)
def test_weights_leave_whole_from_every_layout(pool, tmp_path, model, layout):
    folder = tmp_path / "out"
    seen = run(pool, layout, "weights_out", model=model, folder=str(folder))
    true = dict(make(model, Layout()).iter_weights())
    assert list(seen["weights"]) == list(true)
    assert set(seen["digests"]) == {digest_of(true.items()).hex()}
    assert seen["is_same"], "loaded, as an engine and as a tag, from the folder it wrote"
    assert set(seen["refusals"]) <= {"RunError", "FileNotFoundError"}


@pytest.mark.parametrize(("dtype", "copy"), [("float32", False), ("bfloat16", True)])
def test_a_publish_in_the_process_holds_the_bytes_that_a_plan_counts(dtype, copy):
    held = snapshot_held(model="moe", layout=Layout(), copy=copy, dtype=dtype)
    training = Training(
        dims=dims_of(CONFIGS["moe"]),
        layout=Layout(),
        model=planned_keys(dtype=dtype),
        microbatch_tokens=8,
        publishes=True,
        overlaps=copy,
        max_staleness=1,
        device="cpu",
    )
    assert held == pytest.approx(snapshot_bytes(training), rel=0.06)
    phase = training_phases(training, 0)["publish"]
    count = num_snapshots(training)["publish"]
    assert count == 1 + copy
    assert phase.device.get("snapshot", 0.0) == pytest.approx(count * held, rel=0.06)
