"""Adapters of the backend `fsdp`: any layout gives one rank's factors, and those of `archon`."""

import hf_lora_cases
import pytest
import torch
import torch.distributed as dist
from hf_cases import make, train_step
from tables import table
from test_hf_layouts import compare, compare_gradients

from pentad.checkpoint.exports import export_model
from pentad.core.layout import Layout
from pentad.engine.section import LoraConfig

pytestmark = pytest.mark.dist
REFERENCES: dict[tuple, dict] = {}
LORA = LoraConfig(rank=4, alpha=6.0)
ATTENTION = LoraConfig(rank=4, targets=("q", "k", "v", "o"))
LATENT = LoraConfig(rank=4, targets=("q_a", "kv_a", "kv_b", "o"))


def run(pool, function: str, layout: Layout, **kwargs):
    if layout.world > 1:
        return pool.run(layout.world, "hf_lora_cases", function, layout=layout, **kwargs)
    found = vars(hf_lora_cases)[function](layout=layout, **kwargs)
    if dist.is_initialized():
        dist.destroy_process_group()
    return found


def alone(**kwargs):
    key = tuple(sorted(kwargs.items(), key=str)).__repr__()
    if key not in REFERENCES:
        REFERENCES[key] = train_step(layout=Layout(), **kwargs)
        if dist.is_initialized():
            dist.destroy_process_group()
    return REFERENCES[key]


LAYOUTS = [
    ("qwen3", Layout(dp_shard=2), LORA, "token"),
    ("qwen3", Layout(dp_replicate=2, tp=2), LORA, "token"),
    ("qwen3", Layout(cp=2, tp=2), LORA, "token"),
    ("starcoder2", Layout(tp=2), LORA, "token"),  # c_fc and c_proj, with biases
    ("phi3", Layout(tp=2), LORA, "token"),  # q, k and v are one layer, and gate and up
    ("gpt_neox", Layout(dp_shard=2), LORA, "token"),
    ("qwen3_moe", Layout(dp_shard=2), ATTENTION, "token"),
    ("qwen3_moe", Layout(tp=2, ep=2), ATTENTION, "token"),
    ("deepseek_v2", Layout(dp_shard=2, tp=2, ep=2), LATENT, "token"),
    ("qwen3", Layout(dp_shard=2, tp=2), LoraConfig(rank=4, targets=()), "value"),
    ("qwen3", Layout(dp_shard=2, tp=2), LORA, "value"),
]


@pytest.mark.parametrize(
    ("family", "layout", "lora", "loss"),
    table(LAYOUTS, [LAYOUTS[1], LAYOUTS[5], LAYOUTS[8], LAYOUTS[9]]),
    ids=str,
)
def test_a_layout_gives_one_ranks_factors(pool, family, layout, lora, loss):
    given = {"source": family, "lora": lora, "loss": loss}
    mine = pool.run(layout.world, "hf_cases", "train_step", layout=layout, **given)
    compare(mine, alone(**given))
    compare_gradients(mine, alone(**given))
    others = {name for name in mine["gradients"] if "lora" not in name}
    assert others == ({"value_head.weight"} if loss == "value" else set())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("hf") / "qwen3"
    export_model(make("qwen3", Layout()), str(path))
    return str(path)


def test_both_backends_train_the_same_factors_step_by_step(pool, folder):
    """Tolerances: sums of a few hundred fp32 terms in another order, over three steps."""
    given = {"source": folder, "lora": LORA}
    archon = run(pool, "steps", Layout(), backend="archon", **given)
    for layout in (Layout(), Layout(dp_shard=2)):
        mine = run(pool, "steps", layout, **given)
        assert mine["digest"] == archon["digest"], "the frozen weights are the same"
        assert mine["losses"] == pytest.approx(archon["losses"], rel=1e-5, abs=1e-5)
        assert mine["norms"] == pytest.approx(archon["norms"], rel=1e-5)
        assert mine["factors"].keys() == archon["factors"].keys()
        for name, factor in archon["factors"].items():
            torch.testing.assert_close(mine["factors"][name], factor, rtol=1e-4, atol=1e-5)
        for own, theirs in zip(mine["logprobs"], archon["logprobs"], strict=True):
            torch.testing.assert_close(own, theirs, rtol=1e-4, atol=1e-4)
        assert mine["is_still"] and mine["copies"] == [], "a reference without a copy"


PAIRS = [
    ("fsdp", Layout(), "fsdp", Layout()),
    ("archon", Layout(), "fsdp", Layout(tp=2)),
    ("fsdp", Layout(dp_shard=2), "archon", Layout()),
]


@pytest.mark.parametrize(("saved", "first", "loaded", "second"), PAIRS, ids=str)
def test_a_checkpoint_continues_in_the_other_backend(
    pool, folder, tmp_path, saved, first, loaded, second
):
    given = {"source": folder, "lora": LORA, "root": str(tmp_path)}
    kept = run(pool, "save", first, backend=saved, **given)
    found = run(pool, "load", second, backend=loaded, **given)
    then, now = kept["then"], found["then"]
    assert then["num_steps"] == now["num_steps"] == 2 and then["steps"] == now["steps"] == {2.0}
    for part in hf_lora_cases.STATE:
        assert then[part].keys() == now[part].keys() and all("lora_" in name for name in then[part])
        assert all(torch.equal(now[part][name], tensor) for name, tensor in then[part].items())
    for name, tensor in kept["after"]["model."].items():
        step = found["after"]["model."][name]
        if (saved, first) == (loaded, second):
            assert torch.equal(step, tensor), name
        else:  # sums of fp32 in another order
            torch.testing.assert_close(step, tensor, rtol=1e-4, atol=1e-5)
