"""Any layout gives one rank's numbers: outputs, loss, every gradient, norm and next weights."""

import pytest
import torch
from parity_cases import train_step

from pentad.core.layout import Layout

pytestmark = pytest.mark.dist
"""Tolerances: sums of a few hundred fp32 terms in another order."""
REFERENCES: dict[tuple, dict] = {}


def reference(model: str, **kwargs):
    key = (model, *sorted(kwargs.items()))
    if key not in REFERENCES:
        REFERENCES[key] = train_step(model, Layout(), **kwargs)
    return REFERENCES[key]


def check(pool, model: str, layout: Layout, expected: dict | None = None, **kwargs) -> None:
    true = expected or reference(model, **kwargs)
    mine = pool.run(
        layout.world, "parity_cases", "train_step", model=model, layout=layout, **kwargs
    )
    for key in ("scored", "outputs"):
        for row, (a, b) in enumerate(zip(mine[key], true[key], strict=True)):
            assert a.keys() == b.keys()
            for name in a:
                assert torch.allclose(a[name], b[name], rtol=1e-4, atol=1e-4), (key, row, name)
    assert mine["loss_sum"] == pytest.approx(true["loss_sum"], rel=1e-5)
    assert len(mine["stats"]) == len(true["stats"])
    for a, b in zip(mine["stats"], true["stats"], strict=True):
        assert a == pytest.approx(b, rel=1e-4)
    assert mine["gradients"].keys() == true["gradients"].keys()
    for name, gradient in true["gradients"].items():
        assert mine["gradients"][name].shape == gradient.shape, name
        error = (mine["gradients"][name] - gradient).norm() / gradient.norm()
        assert error < 1e-5, f"{name}: relative error {error:.2e}"
    assert mine["result"].grad_norm == pytest.approx(true["result"].grad_norm, rel=1e-5)
    assert mine["result"].grad_norm > 0.5, "so the step was clipped"
    assert mine["result"].loss == pytest.approx(true["result"].loss, rel=1e-5)
    for name, weight in true["weights"].items():
        # A first AdamW step moves every weight by about lr = 1e-2, whatever its gradient: fp32
        # noise in a small gradient shows as a few percent of that.
        torch.testing.assert_close(mine["weights"][name], weight, rtol=1e-3, atol=5e-4, msg=name)


DENSE = [
    Layout(dp_shard=2),
    Layout(dp_replicate=2),
    Layout(tp=2),
    Layout(cp=2),
    Layout(dp_shard=3),
    Layout(dp_shard=4),
    Layout(dp_replicate=2, dp_shard=2),
    Layout(tp=4),
    Layout(cp=4),
    Layout(dp_shard=2, tp=2),
    Layout(dp_shard=2, cp=2),
    Layout(dp_replicate=2, tp=2),
    Layout(dp_replicate=2, cp=2),
    Layout(cp=2, tp=2),
    Layout(dp_shard=2, cp=2, tp=2),
    Layout(dp_replicate=2, cp=2, tp=2),
    Layout(dp_replicate=2, dp_shard=2, tp=2),
    Layout(dp_replicate=2, dp_shard=2, cp=2),
    Layout(cp=4, tp=2),
    Layout(cp=2, tp=4),
]


@pytest.mark.parametrize("layout", DENSE, ids=str)
def test_dense(pool, layout):
    check(pool, "dense", layout)
