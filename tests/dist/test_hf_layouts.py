"""The backend `fsdp`: any layout gives one rank's numbers, and those of the backend `archon`."""

import pytest
import torch
import torch.distributed as dist
from engine_toys import make_rows
from hf_cases import make, train_step
from tables import table
from transformers import AutoModelForCausalLM

from pentad.checkpoint.exports import export_model
from pentad.core.errors import UserError
from pentad.core.layout import Layout

pytestmark = pytest.mark.dist
REFERENCES: dict[tuple, dict] = {}


def alone(source: str, **kwargs):
    key = (source, *sorted(kwargs.items()))
    if key not in REFERENCES:
        REFERENCES[key] = train_step(source, Layout(), **kwargs)
        if dist.is_initialized():
            dist.destroy_process_group()
    return REFERENCES[key]


def compare(mine: dict, true: dict) -> None:
    """Tolerances: sums of a few hundred fp32 terms in another order."""
    for key in ("scored", "outputs"):
        for a, b in zip(mine[key], true[key], strict=True):
            assert a.keys() == b.keys()
            for name in a:
                torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-4)
    assert mine["loss_sum"] == pytest.approx(true["loss_sum"], rel=1e-5, abs=2e-4)
    assert mine["result"].grad_norm == pytest.approx(true["result"].grad_norm, rel=1e-5)
    assert mine["result"].loss == pytest.approx(true["result"].loss, rel=1e-5, abs=2e-6)
    assert mine["published"].keys() == true["published"].keys()
    for name, weight in true["published"].items():
        torch.testing.assert_close(mine["published"][name], weight, rtol=1e-5, atol=1e-5, msg=name)


def compare_gradients(mine: dict, true: dict) -> None:
    assert mine["gradients"].keys() == true["gradients"].keys()
    for name, gradient in true["gradients"].items():
        error = (mine["gradients"][name] - gradient).norm() / gradient.norm()
        assert error < 1e-5, f"{name}: relative error {error:.2e}"


LAYOUTS = [
    Layout(dp_shard=2),
    Layout(cp=2),
    Layout(tp=2),
    Layout(dp_shard=2, tp=2),
    Layout(dp_shard=2, cp=2),
    Layout(cp=2, tp=2),
    Layout(tp=4),
]


@pytest.mark.parametrize("layout", table(LAYOUTS, LAYOUTS[:3]), ids=str)
def test_a_layout_gives_one_ranks_numbers(pool, layout):
    """Every pair of axes, and key-value heads that two ranks hold."""
    mine = pool.run(layout.world, "hf_cases", "train_step", source="qwen3", layout=layout)
    compare(mine, alone("qwen3"))
    compare_gradients(mine, alone("qwen3"))


@pytest.mark.parametrize("family", ["olmo2", "phi3", "gemma3_text", "starcoder2", "untied"])
def test_transformers_plans_cut_families_right(pool, family):
    mine = pool.run(2, "hf_cases", "train_step", source=family, layout=Layout(tp=2))
    compare(mine, alone(family))
    compare_gradients(mine, alone(family))


D2E2, T2 = Layout(dp_shard=2, ep=2), Layout(tp=2)
MIXTURES = [
    *[("qwen3_moe", x) for x in (Layout(dp_shard=2), Layout(cp=2), T2, D2E2)],
    ("qwen3_moe", Layout(cp=2, ep=2)),
    ("qwen3_moe", Layout(tp=2, ep=2)),
    ("qwen3_moe", Layout(dp_shard=2, tp=2, ep=2)),
    ("qwen3_moe", Layout(dp_shard=2, tp=2, ep=4)),
    ("qwen3_moe", Layout(dp_replicate=2, dp_shard=2, ep=2)),
    ("qwen3_moe", Layout(cp=2, tp=2, ep=2)),
    ("mixtral", T2),
    ("mixtral", Layout(dp_shard=4, ep=2)),
    ("minimax_m2", Layout(tp=2, ep=2)),
    ("minimax_m2", Layout(dp_shard=2, tp=2, ep=4)),  # 2, 1, 1 and 1 experts of five
    ("deepseek_v2", T2),
    ("deepseek_v2", Layout(dp_shard=2, tp=2, ep=4)),  # 2, 2, 1 and 1 experts of six
    ("gemma4_text", T2),
    ("gemma4_text", Layout(dp_shard=2, tp=2, ep=2)),
    ("ernie4_5_moe", Layout(tp=2, ep=2)),
    ("phimoe", D2E2),
    ("phimoe", Layout(tp=2, ep=2)),
    ("hunyuan_v1_moe", T2),
    ("granitemoehybrid", D2E2),
    ("granitemoehybrid", Layout(dp_shard=3, ep=3)),
]
QUICK = {("qwen3_moe", D2E2), ("minimax_m2", Layout(tp=2, ep=2)), ("deepseek_v2", T2)}
QUICK |= {("gemma4_text", T2), ("phimoe", Layout(tp=2, ep=2)), ("granitemoehybrid", D2E2)}
QUICK |= {("deepseek_v2", Layout(dp_shard=2, tp=2, ep=4))}


REST = [case for case in MIXTURES if case not in QUICK]


@pytest.mark.parametrize(("family", "layout"), table(MIXTURES, REST), ids=str)
def test_experts_of_transformers_train_over_ranks(pool, family, layout):
    """Families whose layers, experts and projections are of different kinds, under every axis."""
    mine = pool.run(layout.world, "hf_cases", "train_step", source=family, layout=layout)
    compare(mine, alone(family))
    compare_gradients(mine, alone(family))


def test_a_rank_to_which_no_token_is_sent_has_gradients_of_zero(pool):
    layout = Layout(dp_shard=2, tp=2, ep=2)
    given = {"source": "qwen3_moe", "is_idle": True}
    mine, true = pool.run(4, "hf_cases", "train_step", layout=layout, **given), alone(**given)
    compare(mine, true)
    for name, gradient in true["gradients"].items():
        torch.testing.assert_close(mine["gradients"][name], gradient, rtol=1e-4, atol=1e-4)
        if "experts" in name:
            is_used = [bool(one.any()) for one in mine["gradients"][name]]
            assert is_used in ([True, True, False, False], [False, False, True, True]), name


@pytest.mark.parametrize("layout", [Layout(dp_shard=2), Layout(tp=2, ep=2)], ids=str)
def test_routers_in_16_bits_stay_wide_over_ranks(pool, layout):
    seen = pool.run(2, "hf_cases", "wide_weights", layout=layout)
    place = "model.layers.{}.mlp.{}"
    gates = {place.format(i, "gate.weight") for i in (1, 2)}
    biases = {place.format(i, "moe_statics.e_score_correction_bias") for i in (1, 2)}
    assert seen["in_pass"] == {torch.float32}
    assert seen["wide"] == gates | biases
    assert gates < seen["moved"]
    assert not biases & seen["moved"]
    assert all(torch.equal(x, seen["before"][name]) for name, x in seen["after"].items())


@pytest.mark.parametrize("layout", [Layout(dp_shard=2), Layout(dp_replicate=2)], ids=str)
def test_weights_of_two_dtypes_in_one_module_keep_them_over_ranks(pool, layout):
    """Tolerance: the losses of microbatches are sums of other rows."""
    given = {"source": "olmo_hybrid", "dtype": "bfloat16"}
    mine, true = pool.run(2, "hf_cases", "train_step", layout=layout, **given), alone(**given)
    for a, b in zip(mine["scored"], true["scored"], strict=True):
        assert torch.equal(a["logprobs"], b["logprobs"])
    for name, gradient in true["gradients"].items():
        error = (mine["gradients"][name] - gradient).norm() / gradient.norm()
        assert error < 1e-3, f"{name}: relative error {error:.2e}"
    assert mine["result"].grad_norm == pytest.approx(true["result"].grad_norm, rel=1e-3)
    for name, weight in true["published"].items():
        torch.testing.assert_close(mine["published"][name], weight, rtol=1e-3, atol=1e-3, msg=name)


def test_weights_of_two_dtypes_in_one_module_stay_on_the_device():
    with pytest.raises(UserError, match="offload_params = true: FSDP2 does not move .*A_log"):
        make("olmo_hybrid", Layout(), dtype="bfloat16", offload_params=True)


def test_a_critic_gives_one_ranks_values(pool):
    kwargs = {"source": "qwen3", "loss": "value"}
    layout = Layout(dp_shard=2, tp=2)
    mine = pool.run(layout.world, "hf_cases", "train_step", layout=layout, **kwargs)
    compare(mine, alone(**kwargs))
    compare_gradients(mine, alone(**kwargs))


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize(
    ("family", "layout"), [("qwen3", Layout(dp_shard=2)), ("qwen3_moe", Layout(tp=2, ep=2))]
)
def test_recomputed_blocks_give_the_same_numbers(pool, family, layout, mode):
    kwargs = {"source": family, "layout": layout, "ac_mode": mode}
    mine = pool.run(2, "hf_cases", "train_step", **kwargs)
    compare(mine, alone(family))
    compare_gradients(mine, alone(family))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("hf") / "qwen3"
    export_model(make("qwen3", Layout()), str(path))
    return str(path)


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2)], ids=str)
def test_both_backends_make_the_same_step(pool, folder, layout):
    other = alone(folder, backend="archon")
    if layout.world == 1:
        mine = train_step(folder, layout)
    else:
        mine = pool.run(layout.world, "hf_cases", "train_step", source=folder, layout=layout)
    compare(mine, other)


def test_exports_and_tags_are_whole(pool, tmp_path):
    layout = Layout(dp_shard=2, tp=2)
    kwargs = {"source": "untied", "layout": layout, "folder": str(tmp_path / "out")}
    seen = pool.run(layout.world, "hf_cases", "save_and_load", **kwargs)
    for a, b in zip(seen["again"], seen["moved"], strict=True):
        torch.testing.assert_close(a["logprobs"], b["logprobs"], rtol=1e-5, atol=1e-5)
    for key in ("kept", "restored"):
        for a, b in zip(seen[key], seen["before"], strict=True):
            assert torch.equal(a["logprobs"], b["logprobs"]), key
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    row = make_rows(6)[0]
    with torch.no_grad():
        logits = model(row.ids[None]).logits[0]
    expected = torch.log_softmax(logits, -1)[:-1].gather(1, row.ids[1:, None])[:, 0]
    torch.testing.assert_close(seen["moved"][0]["logprobs"][1:], expected, rtol=1e-5, atol=1e-5)


def test_a_plan_that_forgets_a_part_is_noticed(pool):
    said = pool.run(2, "hf_cases", "missing_plan_line", layout=Layout(tp=2))
    assert "plan does not name all" in said
