"""Compiled blocks give the numbers of plain ones on any layout, from few graphs for all layers."""

import hf_cases
import parity_cases
import pipeline_cases
import pytest
from tables import table

from pentad.core.layout import Layout

pytestmark = pytest.mark.dist
STEPS = {
    "parity_cases": parity_cases.train_step,
    "pipeline_cases": pipeline_cases.train_step,
    "hf_cases": hf_cases.train_step,
}
CASES = {
    "context parallel": ("parity_cases", {"model": "biased"}, Layout(cp=2), "full"),
    "experts, by operation": ("parity_cases", {"model": "moe"}, Layout(tp=2, ep=2), "selective"),
    "experts, scored too": ("parity_cases", {"model": "moe"}, Layout(tp=2, ep=2), "selective"),
    "experts, full": ("parity_cases", {"model": "shared"}, Layout(dp_shard=2, ep=2), "full"),
    "experts, cut": ("parity_cases", {"model": "moe"}, Layout(tp=2, etp=2), "none"),
    "pipeline": ("pipeline_cases", {"model": "tied5", "num_rows": 4}, Layout(pp=2), "selective"),
    "pipeline, many shapes": ("pipeline_cases", {"model": "tied5"}, Layout(pp=2), "selective"),
    "fsdp, tensor parallel": ("hf_cases", {"source": "qwen3"}, Layout(tp=2), "selective"),
}

TRAINED_ONLY = ("experts, by operation", "experts, full", "experts, cut")
"""Graphs without gradients take half of the time, and the other cases have them."""


HERE = ("experts, by operation",)
"""A case is traced for up to a minute: the others run by `make test-full`. Compiled blocks in one
process are those of tests/unit/engine, pipelines without compiled blocks those of test_pipeline."""


@pytest.mark.parametrize("name", table(list(CASES), [name for name in CASES if name not in HERE]))
def test_compiled_layout(pool, name):
    cases, how, layout, ac_mode = CASES[name]
    true = STEPS[cases](layout=Layout(), **how)
    if true.get("routes"):
        how = how | {"routes": true["routes"]}
    if name in TRAINED_ONLY:
        how = how | {"scores": False}
    mine = pool.run(
        layout.world,
        "compiled_cases",
        "compiled_step",
        timeout_s=400,
        cases=cases,
        layout=layout,
        ac_mode=ac_mode,
        **how,
    )
    for key, gradient in true["gradients"].items():
        error = (mine["gradients"][key] - gradient).norm() / gradient.norm()
        assert error < 1e-5, f"{key}: relative error {error:.2e}"
    assert mine["loss_sum"] == pytest.approx(true["loss_sum"], rel=1e-5, abs=2e-4)
    has_experts = how.get("model") in ("moe", "shared") and ac_mode != "selective"
    assert has_experts or not mine["breaks"], mine["breaks"]
    # One graph with gradients and one without; a kind of block each where dense layers and
    # mixtures alternate, and each shape of the CPU's attention under a pipeline.
    assert 0 < mine["num_graphs"] <= (24 if has_experts else 16 if layout.pp > 1 else 8)
