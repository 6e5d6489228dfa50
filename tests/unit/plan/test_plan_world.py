"""`pentad plan --world N`: what an elastic run does that lost ranks."""

import pytest
from typer.testing import CliRunner

from pentad.cli.main import app
from pentad.cli.plan import left_with
from pentad.config.rules.elastic import fit_world
from pentad.core.errors import UserError
from pentad.planner.prepare import prepare

MOE = [
    "actor.path=Qwen/Qwen3-30B-A3B",
    "cluster.n_gpus_per_node=16",
    "cluster.allow_idle=true",
]


def config_of(allocation, *words):
    return prepare(None, [*MOE, f"allocation_mode={allocation}", *words])[0]


@pytest.mark.parametrize(
    ("allocation", "world", "expected"),
    [
        ("archon:(attn:d8|ffn:e8)", 6, "archon:(attn:d6|ffn:e6)"),
        ("archon:d4p2t2", 11, "archon:d2p2t2"),
        ("embedded:d2+archon:d4", 3, "embedded:d2+archon:d3"),
        (
            "embedded[rollout]:d1|archon[actor]:d4t2|archon[critic]:d8",
            7,
            "embedded[rollout]:d1|archon[actor]:d3t2|archon[critic]:d6",
        ),
    ],
)
def test_the_largest_layout_that_the_rules_allow(allocation, world, expected):
    more = ["algorithm.name=ppo"] if "critic" in allocation else []
    config = config_of(allocation, *more)
    fitted = fit_world(config, world)
    assert fitted is not None and fitted.config.allocation_mode == expected
    assert fitted.config.train_dataset == config.train_dataset and fitted.world <= world


def test_the_note_names_layout_reason_and_what_stays():
    config = config_of("archon:d4t2", "elastic.enabled=true", "elastic.min_ranks=6")
    fitted, note = left_with(config, 7)
    assert fitted.allocation_mode == "archon:d3t2"
    assert note == (
        "--world 7: archon:d3t2 for archon:d4t2 on 7 ranks: d 4 -> 3; 1 of them idle; the global "
        "batch (32) and the order of data stay"
    )
    assert "nothing changes" in left_with(config, 8)[1]
    assert "fewer than elastic.min_ranks = 6: a run would wait" in left_with(config, 5)[1]
    assert "a run would not do so" in left_with(config_of("archon:d4"), 2)[1]


def test_ranks_that_are_lost_are_not_taken_for_a_layout_that_leaves_devices_idle():
    words = ["actor.path=Qwen/Qwen3-8B", "cluster.n_gpus_per_node=8", "elastic.enabled=true"]

    def plan(*more):
        return CliRunner().invoke(app, ["plan", *words, "--gpu-memory", "80", *more])

    assert plan("allocation_mode=archon:d8", "--world", "4").exit_code == 0
    refused = plan("allocation_mode=archon:d4")
    assert refused.exit_code == 2 and "allow_idle=true" in refused.output


def test_a_world_larger_than_the_layout_is_refused():
    with pytest.raises(UserError, match="--world 9: archon:d8 has 8 ranks.*give at most 8"):
        left_with(config_of("archon:d8"), 9)


def test_stages_that_are_given_by_hand_are_balanced_anew():
    config = config_of("archon:p2", "actor.archon.layers_per_stage=[10,14,12,12]")
    assert left_with(config, 1)[0].actor.archon.layers_per_stage is None


def test_a_world_that_no_layout_fits_is_refused():
    config = config_of("archon:d2", "actor.archon.moe_z_loss_coef=0.1")
    config = config.model_copy(update={"allocation_mode": "fsdp:d2"})
    with pytest.raises(UserError, match="--world 1: no layout of so few ranks"):
        left_with(config, 1)
