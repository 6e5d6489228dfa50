"""What a pipeline's ranks hold leaves and comes back whole: weights, folders."""

import pipeline_cases
import pytest
import torch

from pentad.core.layout import Layout
from pentad.models.registry import load_model

pytestmark = pytest.mark.dist
CASE_S = 300.0
ZERO_BUBBLE = {"pp_schedule": "ZBVZeroBubble", "reshard_after_forward_policy": "never"}


def run(pool, layout: Layout, function: str, **kwargs):
    if layout.world == 1:
        return vars(pipeline_cases)[function](layout=layout, **kwargs)
    return pool.run(layout.world, "pipeline_cases", function, CASE_S, layout=layout, **kwargs)


@pytest.mark.parametrize(
    ("model", "layout", "loss", "settings"),
    [
        ("tied5", Layout(pp=2), "token", {}),
        ("tied5", Layout(pp=2, dp_shard=2), "value", {}),
        ("tied5", Layout(pp=2), "value", ZERO_BUBBLE),
        ("moe5", Layout(pp=2, tp=2, ep=2), "token", {}),
        ("glm5", Layout(pp=2, dp_shard=2, ep=2), "token", {}),
    ],
    ids=str,
)
def test_weights_are_handed_out_saved_and_taken_whole(
    pool, tmp_path, model, layout, loss, settings
):
    folder = str(tmp_path / "hf")
    kwargs = {"model": model, "loss": loss, "folder": folder, **settings}
    seen = run(pool, layout, "weights_out", **kwargs)
    alone = pipeline_cases.make(model, Layout(), loss)
    true = dict(alone.iter_weights())
    assert list(seen["weights"]) == list(true), "in layer order"
    for name, tensor in true.items():
        assert torch.equal(seen["weights"][name], tensor), name
    assert len(set(seen["digests"])) == 1 and seen["is_same"]
    read = load_model(folder, value_head=loss == "value")
    assert {n for n, _ in read.named_parameters()} == set(alone.parameters)
    for row, other in zip(seen["scored"], alone.forward(pipeline_cases.make_rows(4)), strict=True):
        for name in row:
            torch.testing.assert_close(row[name], other[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"pp_schedule": "ZBVZeroBubble"}, "wrong gradients with parameters sharded in between"),
        (ZERO_BUBBLE | {"ac_mode": "selective"}, "needs the kept results twice"),
        (ZERO_BUBBLE | {"stages_per_rank": 3}, "stages_per_rank = 3"),
        ({"pp_schedule": "1F1B", "stages_per_rank": 2}, "pp_schedule = 1F1B takes exactly 1"),
        ({"pp_schedule": "GPipe"}, "is no pipeline schedule"),
        ({"stages_per_rank": 3}, "= 6 stages, and the model has 5 layers"),
        ({"layers_per_stage": (2, 2, 1)}, "3 numbers for p2 x 2 stages a rank = 4"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_in_a_sentence(pool, settings, words):
    assert words in run(pool, Layout(pp=2), "refusal", **settings)
