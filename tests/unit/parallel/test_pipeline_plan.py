"""The pipeline of a layout: stages, their ranks, what they hold, how many microbatches."""

import pytest
from sections import engine_keys

from pentad.core.layout import Layout
from pentad.models.families import dims_of
from pentad.parallel.pipeline import plan_pipeline

DIMS = dims_of(
    {
        "model_type": "qwen3",
        "vocab_size": 40,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 9,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 6,
    }
)


def plan(pp: int, schedule: str, **settings):
    keeps = {"reshard_after_forward_policy": "never", "pp_schedule": schedule, **settings}
    made = plan_pipeline(DIMS, Layout(pp=pp), engine_keys(**keeps))
    assert made is not None
    return made


def test_one_pipeline_rank_is_no_pipeline():
    assert plan_pipeline(DIMS, Layout(tp=2), engine_keys()) is None


@pytest.mark.parametrize(
    ("schedule", "held", "last_rank"),
    [
        ("1F1B", [(0,), (1,), (2,)], 2),
        ("Interleaved1F1B", [(0, 3), (1, 4), (2, 5)], 2),
        ("ZBVZeroBubble", [(0, 5), (1, 4), (2, 3)], 0),
    ],
)
def test_stages_lie_where_torchs_schedules_look_for_them(schedule, held, last_rank):
    made = plan(3, schedule)
    assert [made.stages(rank) for rank in range(3)] == held
    assert made.last_rank == last_rank
    assert all(stage in held[made.rank_of(stage)] for stage in range(made.num_stages))


def test_every_parameter_has_one_stage():
    made = plan(2, "Interleaved1F1B", layers_per_stage=(2, 3, 3, 1))
    assert made.layers == (range(2), range(2, 5), range(5, 8), range(8, 9))
    assert [made.stage_of(f"layers.{i}.attn.q.weight", i) for i in (0, 1, 2, 7, 8)] == [
        0,
        0,
        1,
        2,
        3,
    ]
    assert made.stage_of("embed.weight", None) == 0
    assert made.stage_of("norm.weight", None) == made.stage_of("value_head.weight", None) == 3


@pytest.mark.parametrize(
    ("pp", "schedule", "asked", "taken"),
    [
        (3, "1F1B", 1, 3),
        (3, "1F1B", 7, 7),
        (2, "Interleaved1F1B", 1, 4),
        (2, "Interleaved1F1B", 5, 6),
        (3, "InterleavedZeroBubble", 7, 8),  # two rounds of four
        (2, "ZBVZeroBubble", 5, 5),
    ],
)
def test_as_few_microbatches_as_the_schedule_takes(pp, schedule, asked, taken):
    assert plan(pp, schedule).take(asked) == taken


def test_backward_is_split_only_where_nothing_is_recomputed():
    assert plan(2, "ZBVZeroBubble").splits_backward
    assert not plan(2, "ZBVZeroBubble", ac_mode="full").splits_backward
    assert plan(2, "ZBVZeroBubble", ac_mode="full", gradient_checkpointing=False).splits_backward
    assert not plan(2, "Interleaved1F1B").splits_backward
