"""Ranks publish by shards: what is read is what a gather gives, and no rank has it all."""

import pytest
from parity_cases import CONFIGS
from sections import planned_keys
from tables import table

from pentad.core.layout import Layout
from pentad.models.families import dims_of
from pentad.planner.memory import Training, publish_params

pytestmark = pytest.mark.dist

CASES = [
    ("parity", "dense", Layout(dp_shard=2), "shm", {}),
    ("parity", "dense", Layout(tp=2), "shm", {"dtype": "bfloat16"}),
    ("parity", "moe", Layout(dp_shard=2, ep=2), "file", {"dtype": "bfloat16"}),
    ("hf", "qwen3", Layout(dp_shard=2), "file", {}),
    ("pipeline", "tied8", Layout(pp=2), "shm", {"dtype": "bfloat16"}),
    ("parity", "moe", Layout(dp_shard=3, ep=3), "shm", {"dtype": "bfloat16"}),
    ("parity", "dense", Layout(dp_shard=2, cp=2), "file", {}),
    ("parity", "moe", Layout(dp_shard=2, tp=2, ep=2), "shm", {"dtype": "bfloat16"}),
    ("parity", "glm_moe", Layout(pp=2, dp_shard=2, ep=2), "shm", {"pp_schedule": "1F1B"}),
    ("hf", "qwen3", Layout(dp_shard=2, tp=2), "shm", {"dtype": "bfloat16"}),
    ("parity", "six", Layout(dp_shard=4, ep=4), "file", {"dtype": "bfloat16"}),
    ("parity", "moe", Layout(dp_shard=5, ep=5), "shm", {}),
    ("parity", "dense", Layout(dp_replicate=2, tp=4), "shm", {"dtype": "bfloat16"}),
    ("parity", "ernie4_5_moe", Layout(tp=2, ep=2), "shm", {"dtype": "bfloat16"}),
    ("hf", "minimax_m2", Layout(dp_shard=2, tp=2, ep=4), "shm", {}),
]

CASES_REST = [CASES[0], CASES[3], CASES[7], CASES[10]]
"""Their axes, sources and kinds are those of larger layouts, too."""
EXPORTS = [(*case[:3], case[4]) for case in CASES if case[2].world in (2, 4, 8)]
"""Also shards of columns, mixtures, stages and transformers' models."""
EXPORTS_REST = [EXPORTS[n] for n in (0, 2, 3, 6, 10)]


@pytest.mark.parametrize(
    ("source", "model", "layout", "kind", "settings"), table(CASES, CASES_REST), ids=str
)
def test_the_files_of_all_ranks_are_the_weights(
    pool, tmp_path, source, model, layout, kind, settings
):
    out = pool.run(
        layout.world,
        "publish_cases",
        "published",
        source=source,
        model=model,
        layout=layout,
        kind=kind,
        folder=str(tmp_path),
        bucket=512 if "dtype" in settings else 0,
        **settings,
    )
    for version in out["seen"]:
        assert version == {"names": True, "equal": True, "digest": True}
    share = out["num_bytes"] / layout.world
    assert max(out["loads"]) < 1.6 * share, "each rank writes about its share"
    if source == "parity":
        training = Training(
            dims=dims_of(CONFIGS[model]),
            layout=layout,
            model=planned_keys(dtype=settings.get("dtype", "float32")),
            microbatch_tokens=8,
        )
        planned = training.compute_bytes * publish_params(training, 0)
        assert out["loads"][0] == pytest.approx(planned, rel=0.35), "small tensors are not cut"


@pytest.mark.parametrize(
    ("source", "model", "layout", "settings"), table(EXPORTS, EXPORTS_REST), ids=str
)
def test_exports_by_blocks_are_those_of_gathered_tensors_byte_for_byte(
    pool, tmp_path, source, model, layout, settings
):
    out = pool.run(
        layout.world,
        "publish_cases",
        "exported",
        source=source,
        model=model,
        layout=layout,
        folder=str(tmp_path),
        bucket=512 if "compute_dtype" in settings else 0,
        **settings,
    )
    assert out["error"] is None and out["same"] and "model.safetensors" in out["names"]
    assert not list(tmp_path.glob(".*"))
