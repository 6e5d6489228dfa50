"""Any layout gives one rank's numbers: outputs, loss, every gradient, norm and next weights."""

import random

import pytest
import torch
import torch.distributed as dist
from closeness import assert_stepped
from family_toys import ALL_CONFIGS, FAMILY_CONFIGS, LINEAR_FAMILIES, SHARED_KEYS
from parity_cases import rounded_steps, train_step
from tables import table

from pentad.core.layout import Layout
from pentad.engine.section import LoraConfig

pytestmark = pytest.mark.dist
"""Tolerances: sums of a few hundred fp32 terms in another order."""
COARSE = {*LINEAR_FAMILIES, "gemma4_text", SHARED_KEYS}
REFERENCES: dict[tuple, dict] = {}


def reference(model: str, **kwargs):
    key = (model, *sorted(kwargs.items()))
    if key not in REFERENCES:
        REFERENCES[key] = train_step(model, Layout(), **kwargs)
        if dist.is_initialized():  # mixed precision makes a process group of one
            dist.destroy_process_group()
    return REFERENCES[key]


def check(pool, model: str, layout: Layout, expected: dict | None = None, **kwargs) -> None:
    true = expected or reference(model, **kwargs)
    given = {"model": model, "layout": layout, "routes": true["routes"]}
    mine = pool.run(layout.world, "parity_cases", "train_step", **given, **kwargs)
    check_routes(mine["routes"], true["routes"])
    for key in ("scored", "outputs"):
        for row, (a, b) in enumerate(zip(mine[key], true[key], strict=True)):
            assert a.keys() == b.keys()
            for name in a:
                assert torch.allclose(a[name], b[name], rtol=1e-4, atol=1e-4), (key, row, name)
    # Terms of both signs: their sum is far smaller than what is rounded.
    assert mine["loss_sum"] == pytest.approx(true["loss_sum"], rel=1e-5, abs=2e-4)
    assert len(mine["stats"]) == len(true["stats"])
    for a, b in zip(mine["stats"], true["stats"], strict=True):
        assert a == pytest.approx(b, rel=1e-4)
    assert mine["gradients"].keys() == true["gradients"].keys()
    # A delta net carries what is rounded in one token's state to all tokens after it.
    # Scores that are not divided by a root make more of what is rounded, too.
    limit = 1e-4 if model in COARSE else 1e-5
    for name, gradient in true["gradients"].items():
        assert mine["gradients"][name].shape == gradient.shape, name
        error = (mine["gradients"][name] - gradient).norm() / gradient.norm()
        assert error < limit, f"{name}: relative error {error:.2e}"
    assert mine["result"].grad_norm == pytest.approx(true["result"].grad_norm, rel=1e-5)
    assert mine["result"].grad_norm > 0.5, "so the step was clipped"
    assert mine["result"].loss == pytest.approx(true["result"].loss, rel=1e-5, abs=2e-6)
    for name, weight in true["weights"].items():
        if name.endswith("router.bias"):  # the same routes give the same loads
            assert torch.equal(mine["weights"][name], weight), name
        gradient = true["gradients"].get(name)
        assert_stepped(name, mine["weights"][name], weight, gradient, limit)


def check_routes(mine: list | None, true: list | None) -> None:
    """Chosen freely, experts agree but for ties within rounding."""
    if mine is None or true is None:
        return
    a, b = torch.cat(mine), torch.cat(true)
    assert a.shape == b.shape
    differ = (a.sort(-1).values != b.sort(-1).values).any(-1).float().mean()
    assert differ < 0.02, f"{differ:.1%} of the choices differ"


DENSE = [
    Layout(dp_shard=2),
    Layout(dp_replicate=2),
    Layout(tp=2),
    Layout(cp=2),
    Layout(dp_shard=3),
    Layout(dp_replicate=2, dp_shard=2),
    Layout(tp=4),
    Layout(cp=4),
    Layout(dp_shard=2, tp=2),
    Layout(dp_shard=2, cp=2),
    Layout(dp_replicate=2, tp=2),
    Layout(dp_replicate=2, cp=2),
    Layout(cp=2, tp=2),
    Layout(dp_shard=2, cp=2, tp=2),
    Layout(cp=4, tp=2),
    Layout(cp=2, tp=4),
]


DENSE_REST = [
    *(Layout(dp_shard=2), Layout(dp_replicate=2), Layout(tp=2), Layout(cp=2), Layout(tp=4)),
    *(Layout(dp_shard=2, tp=2), Layout(dp_shard=2, cp=2), Layout(cp=2, tp=2), Layout(cp=4, tp=2)),
]


@pytest.mark.parametrize("layout", table(DENSE, DENSE_REST), ids=str)
def test_dense(pool, layout):
    """Every pair of axes, an odd size, and key-value heads that two ranks hold; what `make
    test-full` adds is a part of these."""
    check(pool, "dense", layout)


@pytest.mark.parametrize(
    "layout", [Layout(dp_shard=3), Layout(tp=2), Layout(dp_shard=2, tp=2)], ids=str
)
def test_groups_as_trees(pool, layout):
    """What rows begin with in common is computed once, on any layout; held against one rank that
    computes every row whole."""
    whole = train_step("dense", Layout(), grouped=True, enable_tree_training=False)
    check(pool, "dense", layout, whole, grouped=True)


def test_groups_as_trees_in_a_pipeline(pool):
    """Each rank has the gradients of its own stages; their norm is that of all."""
    whole = train_step("dense", Layout(), grouped=True, enable_tree_training=False)
    given = {"layout": Layout(pp=2), "grouped": True, "pp_schedule": "1F1B", "n_mbs": 2}
    mine = pool.run(2, "parity_cases", "train_step", model="dense", **given)
    assert mine["result"].left_out, "prompts were computed once for several rows"
    assert mine["result"].grad_norm == pytest.approx(whole["result"].grad_norm, rel=1e-5)
    assert mine["loss_sum"] == pytest.approx(whole["loss_sum"], rel=1e-5, abs=2e-4)
    for key in ("scored", "outputs"):
        for a, b in zip(mine[key], whole[key], strict=True):
            torch.testing.assert_close(a["logprobs"], b["logprobs"], rtol=1e-4, atol=1e-4)


MOE = [
    Layout(dp_shard=2),
    Layout(dp_shard=2, ep=2),
    Layout(tp=2),
    Layout(tp=2, ep=2),
    Layout(tp=2, etp=2),
    Layout(cp=2, ep=2),
    Layout(cp=2, etp=2),
    Layout(dp_replicate=2, ep=1),
    Layout(dp_shard=3),
    Layout(dp_shard=3, ep=3),  # 3, 3 and 2 experts
    Layout(dp_shard=6, ep=3),
    Layout(dp_shard=3, tp=2, ep=3, etp=2),
    Layout(dp_shard=4, ep=2, etp=2),
    Layout(dp_shard=2, tp=2, ep=2),
    Layout(dp_shard=2, tp=2, ep=4),
    Layout(dp_shard=2, tp=2, etp=2),
    Layout(dp_shard=2, cp=2, ep=4),
    Layout(cp=2, tp=2, ep=2, etp=2),
    Layout(dp_replicate=2, tp=2, ep=2),
    Layout(dp_shard=2, cp=2, tp=2, ep=2, etp=2),
    Layout(dp_shard=2, cp=2, tp=2, ep=2, etp=4),
    Layout(dp_shard=2, tp=4, ep=8),
]


MOE_REST = [
    *(Layout(dp_shard=3), Layout(dp_shard=6, ep=3), Layout(dp_shard=3, tp=2, ep=3, etp=2)),
    *(Layout(dp_shard=2), Layout(dp_shard=2, ep=2), Layout(tp=2, ep=2), Layout(tp=2, etp=2)),
    *(Layout(cp=2, ep=2), Layout(dp_replicate=2, ep=1), Layout(dp_shard=2, tp=2, ep=2)),
    *(Layout(dp_shard=2, tp=2, etp=2), Layout(cp=2, tp=2, ep=2, etp=2)),
    *(Layout(dp_shard=2, cp=2, tp=2, ep=2, etp=4), Layout(dp_shard=2, tp=4, ep=8)),
]


@pytest.mark.parametrize("layout", table(MOE, MOE_REST), ids=str)
def test_mixture(pool, layout):
    """Every axis of the dense part with ep and with etp, experts whole under tp, and ep over two
    axes."""
    check(pool, "moe", layout)


BALANCED = [
    ("six", Layout(dp_shard=4, ep=4), {}),  # 2, 2, 1 and 1 experts
    ("six", Layout(tp=2, cp=2, ep=4), {"offload_params": True}),
    ("moe", Layout(dp_shard=5, ep=5), {}),  # 2, 2, 2, 1 and 1
    ("six", Layout(dp_shard=5, ep=5), {"crowd": True}),
    ("moe", Layout(dp_shard=7, ep=7), {}),  # 2, and 1 on each other
    ("six", Layout(dp_shard=4, tp=2, ep=4), {}),  # each stored on two ranks
    ("six", Layout(dp_shard=4, tp=2, ep=4, etp=2), {}),
    ("six", Layout(dp_replicate=2, dp_shard=4, ep=4), {}),
]
BALANCED_REST = [BALANCED[1], BALANCED[3], BALANCED[4], BALANCED[6], BALANCED[7]]


@pytest.mark.parametrize(("model", "layout", "settings"), table(BALANCED, BALANCED_REST), ids=str)
def test_experts_over_any_number_of_ranks(pool, model, layout, settings):
    """Where torch.chunk would leave a rank without one."""
    check(pool, model, layout, **settings)


FAMILIES = [
    (family, layout)
    for family in ALL_CONFIGS
    for layout in (Layout(tp=2), Layout(cp=2), Layout(dp_shard=2, tp=4))
    if not (layout.cp > 1 and family in LINEAR_FAMILIES)
] + [
    ("qwen3_next", Layout(dp_shard=2, ep=2)),
    ("qwen3_5_moe_text", Layout(dp_shard=2, tp=2, ep=2, etp=2)),
]
FAMILIES_HERE = [
    ("olmo2", Layout(dp_shard=2, tp=4)),
    ("gemma2", Layout(cp=2)),
    ("glm4", Layout(tp=2)),
    ("ministral3", Layout(cp=2)),
    ("qwen3_5_text", Layout(tp=2)),
    ("qwen3_next", Layout(dp_shard=2, ep=2)),
]
LATENT = [
    ("deepseek_v3", Layout(cp=2, tp=2, ep=4)),
    ("deepseek_v3", Layout(dp_shard=2, tp=2, ep=2, etp=2)),
]
OSS = [
    ("gpt_oss", Layout(dp_shard=2, ep=2)),
    ("gpt_oss", Layout(tp=2, etp=2)),
    ("gpt_oss", Layout(dp_shard=2, tp=2, ep=2, etp=2)),
    ("gpt_oss", Layout(cp=2, tp=2, ep=4)),
]
MIXTURES = [
    ("dots1", Layout(cp=2, ep=2)),
    ("dots1", Layout(dp_shard=2, tp=2, ep=2)),
    ("ernie4_5_moe", Layout(tp=2, ep=2)),
    ("ernie4_5_moe", Layout(dp_shard=2, tp=2, ep=2, etp=2)),
    ("granitemoe", Layout(tp=2, etp=2)),
    ("hunyuan_v1_moe", Layout(dp_shard=2, tp=2, ep=4)),
    ("minimax_m2", Layout(dp_shard=2, ep=2)),
    ("minimax_m2", Layout(cp=2, tp=2, ep=2, etp=2)),
    ("mixtral", Layout(tp=2, ep=2)),
    ("mixtral", Layout(cp=2, tp=2, ep=4)),
    ("olmoe", Layout(dp_shard=2, tp=2, etp=2)),
]
BY_LAYER = [
    ("gemma4_text", Layout(dp_shard=2, ep=2)),
    ("gemma4_text", Layout(dp_shard=2, tp=2, ep=2, etp=2)),
    ("gemma4_text", Layout(cp=2, tp=2, ep=4)),
    (SHARED_KEYS, Layout(dp_shard=2, cp=2, tp=2)),
]
FAMILIES += LATENT + OSS + MIXTURES + BY_LAYER
FAMILIES_HERE += [LATENT[0], OSS[3], MIXTURES[2], MIXTURES[7], *BY_LAYER[2:]]


@pytest.mark.parametrize(
    ("model", "layout"), table(FAMILIES, [one for one in FAMILIES if one not in FAMILIES_HERE])
)
def test_families(pool, model, layout):
    """Norms over a width that is cut, key heads that two ranks hold, norms behind the sums; sinks
    and experts' biases."""
    check(pool, model, layout)


@pytest.mark.parametrize(
    "model",
    table(list(FAMILY_CONFIGS), sorted({*FAMILY_CONFIGS} - {"gemma2", "olmo3", "qwen3_5_text"})),
)
def test_families_in_a_pipeline(pool, model):
    whole = train_step(model, Layout())
    given = {"layout": Layout(pp=2), "pp_schedule": "1F1B", "n_mbs": 2}
    mine = pool.run(2, "parity_cases", "train_step", model=model, **given)
    assert mine["result"].grad_norm == pytest.approx(whole["result"].grad_norm, rel=1e-5)
    assert mine["loss_sum"] == pytest.approx(whole["loss_sum"], rel=1e-5, abs=2e-4)


LORA = [
    ("dense", Layout(dp_replicate=2, dp_shard=2, tp=2), {}),
    ("dense", Layout(cp=2, tp=4), {}),  # kv heads that two ranks hold
    ("moe", Layout(dp_shard=2, tp=2, ep=2, etp=2), {}),
    ("moe", Layout(dp_shard=2, cp=2, ep=4), {"experts": "each"}),
    ("six", Layout(dp_shard=4, ep=4), {"experts": "each"}),
    ("deepseek_v3", Layout(dp_shard=2, tp=2), {"alpha": 4.0}),  # of latents, which tp does not cut
    ("mixtral", Layout(tp=2, ep=2), {"experts": "each"}),
    # Heads and widths that differ by layer, values that are keys, a dense ffn beside experts.
    ("gemma4_text", Layout(tp=2), {"targets": [*"qkvo", "gate", "up", "down"]}),
    ("gemma4_text", Layout(dp_shard=2, tp=4), {"targets": [*"qkvo", "gate", "up", "down"]}),
    (SHARED_KEYS, Layout(cp=2, tp=2), {}),
]


@pytest.mark.parametrize(
    ("model", "layout", "keys"), table(LORA, [*LORA[1:4], *LORA[5:7], LORA[8]]), ids=str
)
def test_factors_of_adapters(pool, model, layout, keys):
    check(pool, model, layout, lora=LoraConfig(rank=4, **keys))


def test_factors_of_adapters_in_a_pipeline(pool):
    lora = LoraConfig(rank=4)
    whole = train_step("dense", Layout(), lora=lora)
    given = {"layout": Layout(pp=2), "pp_schedule": "1F1B", "n_mbs": 2, "lora": lora}
    mine = pool.run(2, "parity_cases", "train_step", model="dense", **given)
    assert mine["result"].grad_norm == pytest.approx(whole["result"].grad_norm, rel=1e-5)
    for name, gradient in mine["gradients"].items():
        error = (gradient - whole["gradients"][name]).norm() / gradient.norm()
        assert error < 1e-5, f"{name}: relative error {error:.2e}"


CORNERS = {
    "a sequence's sum is spread over cp ranks": ("dense", Layout(cp=4), {"loss": "sequence"}),
    "sequence loss, three axes": ("dense", Layout(dp_shard=2, cp=2, tp=2), {"loss": "sequence"}),
    "value head": ("dense", Layout(dp_shard=2, tp=2), {"loss": "value"}),
    "value head over cp": ("dense", Layout(cp=2, tp=2), {"loss": "value"}),
    "biases after the sum": ("biased", Layout(tp=2), {}),
    "biases, kv heads held twice": ("biased", Layout(tp=4), {}),
    "biases, kv heads held twice, in shards": ("biased", Layout(dp_shard=2, tp=4), {}),
    "fewer rows than ranks": ("dense", Layout(dp_shard=4), {"num_rows": 2}),
    "fewer rows than ranks, experts": ("moe", Layout(dp_shard=4, ep=4), {"num_rows": 2}),
    "many microbatches and calls": (
        "dense",
        Layout(dp_shard=2, tp=2),
        {"calls": 3, "max_tokens_per_mb": 40},
    ),
    "many microbatches, experts": (
        "moe",
        Layout(dp_shard=2, cp=2, ep=2),
        {"calls": 2, "max_tokens_per_mb": 60, "n_mbs": 2},
    ),
    "all tokens to the experts of one rank": (
        "moe",
        Layout(tp=2, dp_shard=2, ep=4),
        {"crowd": True},
    ),
    "all tokens to one expert group": ("moe", Layout(cp=2, tp=2, ep=2, etp=2), {"crowd": True}),
    "a shared expert, cut by all axes": ("shared", Layout(cp=2, tp=2, ep=2, etp=2), {}),
    "a selection bias, heads turned in part": ("glm_moe", Layout(dp_shard=2, tp=2, ep=2), {}),
    "a selection bias over all axes": (
        "glm_moe",
        Layout(cp=2, tp=2, ep=2, etp=2),
        {"ac_mode": "full"},
    ),
    "a selection bias, parameters on the host": (
        "glm_moe",
        Layout(dp_shard=2),
        {"offload_params": True},
    ),
    "selective recomputation by op": ("moe", Layout(cp=2, tp=2, ep=2), {"ac_mode": "selective"}),
    "selective recomputation by layer": (
        "dense",
        Layout(cp=2, tp=2),
        {"ac_mode": "selective", "ac_selective": 2},
    ),
    "gathered weights kept": ("moe", Layout(dp_shard=4), {"reshard_after_forward_policy": "never"}),
    "masters in another dtype": ("moe", Layout(dp_shard=2, tp=2, ep=2), {"param_dtype": "float64"}),
    "filled up to one size": (
        "moe",
        Layout(dp_shard=2, cp=2, ep=2),
        {"max_tokens_per_mb": 90, "pad_to_maximum": True},
    ),
    "filled up to one size, all axes": (
        "moe",
        Layout(dp_shard=2, cp=2, tp=2, ep=2),
        {"max_tokens_per_mb": 90, "pad_to_maximum": True},
    ),
    "parameters on the host": ("moe", Layout(dp_shard=2, tp=2, ep=2), {"offload_params": True}),
    "parameters on the host, many microbatches": (
        "dense",
        Layout(dp_replicate=2, cp=2),
        {"offload_params": True, "calls": 2, "max_tokens_per_mb": 40},
    ),
    "logits kept": ("dense", Layout(dp_shard=2, tp=2), {"keep_logits": True, "temperature": 0.7}),
    "temperature, small chunks of the vocabulary": (
        "dense",
        Layout(tp=4),
        {"temperature": 0.7, "logprob_bytes": 2000},
    ),
}


CORNERS_REST = [
    "biases, kv heads held twice, in shards",
    "filled up to one size, all axes",
    "sequence loss, three axes",
    "value head over cp",
    "biases after the sum",
    "fewer rows than ranks",
    "many microbatches and calls",
    "all tokens to the experts of one rank",
    "a selection bias, heads turned in part",
    "parameters on the host, many microbatches",
]
"""Each has a kin among the others that passes the same code and more."""


@pytest.mark.parametrize(
    "name", table(sorted(CORNERS, key=lambda name: CORNERS[name][1].world), CORNERS_REST)
)
def test_corner(pool, name):
    model, layout, settings = CORNERS[name]
    check(pool, model, layout, **settings)


@pytest.mark.parametrize(
    ("model", "layout", "beside"),
    [
        pytest.param("dense", Layout(dp_shard=2, tp=2), Layout(tp=4), marks=pytest.mark.full),
        ("moe", Layout(dp_shard=2, tp=2, ep=4), Layout(cp=2, tp=2, ep=2, etp=2)),
    ],
    ids=["dense", "moe"],
)
def test_an_engine_keeps_to_its_axes_beside_one_of_another_layout(pool, model, layout, beside):
    check(pool, model, layout, reference(model), beside=beside)


DRAWN = [("moe", 2), ("moe", 4), ("dense", 4)]


@pytest.mark.parametrize(("model", "num_layouts"), table(DRAWN, DRAWN[1:]))
def test_any_split_gives_one_gradient_in_double_precision(pool, model, num_layouts):
    """Layouts, microbatches and calls drawn at random against one rank with one of each."""
    double = {"param_dtype": "float64", "dtype": "float64", "reduce_dtype": "float64"}
    true = train_step(model, Layout(), num_rows=9, **double)
    draw = random.Random(5)
    drawn = draw.sample(MOE if model == "moe" else DENSE, num_layouts)
    for layout in sorted(drawn, key=lambda x: x.world):
        how = {
            "calls": draw.randint(1, 4),
            "n_mbs": draw.randint(1, 3),
            "max_tokens_per_mb": draw.choice([None, 40, 80]),
            "logprob_bytes": draw.choice([None, 4000]),
        }
        given = {"model": model, "layout": layout, "routes": true["routes"], "num_rows": 9}
        mine = pool.run(layout.world, "parity_cases", "train_step", **given, **how, **double)
        for name, gradient in true["gradients"].items():
            error = (mine["gradients"][name] - gradient).norm() / gradient.norm()
            # Norms of the model compute in fp32, per token, whatever the split.
            assert error < 1e-6, f"{layout} {how} {name}: {error:.1e}"


ROUNDED = [
    *(("dense", layout) for layout in (Layout(dp_shard=3), Layout(dp_shard=2, tp=2, cp=2))),
    ("dense", Layout(dp_replicate=2, tp=2)),
    ("biased", Layout(dp_shard=2, tp=4)),
    ("moe", Layout(dp_shard=5, ep=5)),
    ("moe", Layout(dp_shard=3, tp=2, ep=3, etp=2)),
    ("moe", Layout(dp_shard=2, cp=2, tp=2, ep=2, etp=2)),
    ("glm_moe", Layout(dp_shard=2, tp=2, ep=4)),
    ("ernie4_5_moe", Layout(dp_shard=2, ep=2)),  # its routers stay in float32
]
ROUNDED_REST = [ROUNDED[1], ROUNDED[3], ROUNDED[5], ROUNDED[7]]
"""Rounding knows a tensor's name and the place of a shard in it: every axis that cuts is among the
others, with an odd size, copies, and experts that ranks hold unevenly."""


@pytest.mark.parametrize(("model", "layout"), table(ROUNDED, ROUNDED_REST), ids=str)
def test_bfloat16_is_rounded_alike_on_any_layout(pool, model, layout):
    """Bit for bit, given the gradient."""
    wanted = rounded_steps(model, Layout())
    found = pool.run(layout.world, "parity_cases", "rounded_steps", model=model, layout=layout)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert tensor.dtype == torch.bfloat16 or name.endswith("router.weight"), name
        assert torch.equal(found[name], tensor), name
