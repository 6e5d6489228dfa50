"""A layout that the config accepts is accepted where the engine is built, and the other way."""

import random

import pytest
from family_toys import FAMILY_CONFIGS, SIZES

from pentad.config.load import read_config
from pentad.config.resolve import resolve
from pentad.config.rules.layout import layout_problems
from pentad.core.dims import ModelDims
from pentad.core.errors import UserError
from pentad.core.fit import check_fit
from pentad.core.layout import parse_allocation
from pentad.engine.held import check_balance
from pentad.engine.section import EngineSettings
from pentad.models.families import dims_of, known_families, map_of
from pentad.parallel.pipeline import plan_pipeline

NUM_DRAWS = 600


def draw_dims(draw: random.Random) -> ModelDims:
    heads = draw.choice([4, 6, 8])
    is_mixture = draw.random() < 0.5
    extra = {}
    if is_mixture:
        extra = {
            "num_experts": draw.choice([4, 6, 8]),
            "num_experts_per_token": 2,
            "moe_intermediate_size": draw.choice([12, 16]),
            "moe_layers": (True,) * 6,
        }
    return ModelDims(
        family="qwen3_moe" if is_mixture else "qwen3",
        vocab_size=draw.choice([5, 37]),
        hidden_size=24,
        num_layers=6,
        num_heads=heads,
        num_kv_heads=draw.choice([n for n in (1, 2, 3, 4) if heads % n == 0]),
        head_dim=6,
        intermediate_size=draw.choice([32, 36]),
        qk_norm=True,
        **extra,
    )


def draw_allocation(draw: random.Random, has_experts: bool) -> str:
    def axis(letter: str, *sizes: int) -> str:
        size = draw.choice(sizes)
        return f"{letter}{size}" if size > 1 or letter == "d" else ""

    d, p, t = axis("d", 1, 2, 3, 4), axis("p", 1, 1, 2, 3), axis("t", 1, 2, 3, 4)
    c, e = axis("c", 1, 1, 2, 4), axis("e", 1, 1, 2, 3)
    if has_experts and draw.random() < 0.5:  # of a dense model the string itself is refused
        return f"archon:(attn:{d}{p}{t}{c}|ffn:{p}{axis('t', 1, 2)}{e or 'e1'})"
    return f"archon:{d}{p}{t}{c}{e}"


def draw_options(draw: random.Random) -> list[str]:
    choices = {
        "dp_replicate": [1, 1, 1, 2],
        "pp_schedule": ["1F1B", "I1F1B", "IZB", "ZBV"],
        "stages_per_rank": ["null", "null", 1, 2, 3],
        "layers_per_stage": ["null"] * 4 + ["[3,3]", "[2,1,2,1]", "[2,2,2]", "[4,4]"],
        "enable_compile": ["auto", "auto", "true", "false"],
        "ac_mode": ["auto", "none", "selective", "full", "memory_budget"],
        "ac_selective": ["null", "op", 2],
        "reshard_after_forward_policy": ["default", "always", "never"],
        "moe_aux_loss_coef": [0, 0, 0, 0.01],
        "moe_bias_rate": [0, 0, 0, 0, 0, 0.01],
    }
    return [f"actor.archon.{key}={draw.choice(values)}" for key, values in choices.items()]


def engine_refuses(config, dims: ModelDims) -> str:
    """What `build_engine` asks before any rank talks to another."""
    (component,) = parse_allocation(config.allocation_mode)
    try:
        layout = component.layout(config.actor.archon.dp_replicate)
        keys = EngineSettings(model=config.actor).settled("cuda", layout).model
        check_fit(layout, dims)
        plan_pipeline(dims, layout, keys)
        check_balance(keys.archon, dims)
    except (UserError, AssertionError) as error:
        return str(error) or type(error).__name__
    return ""


def test_config_and_engine_refuse_the_same_layouts():
    draw = random.Random(11)
    seen = {True: 0, False: 0}
    for _ in range(NUM_DRAWS):
        dims, options = draw_dims(draw), draw_options(draw)
        allocation = draw_allocation(draw, dims.num_experts > 0)
        reading = read_config(None, [f"allocation_mode={allocation}", *options])
        assert not reading.problems, reading.problems
        config, _ = resolve(reading.config)
        said = layout_problems(config, dims)
        try:
            parse_allocation(allocation)
        except UserError:
            assert said, f"{allocation} does not parse"
            continue
        archon = config.actor.archon
        if archon.ac_mode == "memory_budget" and archon.enable_compile is False:
            continue  # a rule between keys (config.rules.check), not of the layout
        refused = engine_refuses(config, dims)
        what = f"{allocation} {options} {dims}\nconfig: {said}\nengine: {refused}"
        assert bool(said) == bool(refused), what
        seen[bool(said)] += 1
    assert min(seen.values()) > NUM_DRAWS // 10, f"both kinds must be drawn: {seen}"


def test_config_and_engine_keep_no_logits_in_a_pipeline():
    keys = ["allocation_mode=archon:d1p2", "actor.archon.keep_logits=true"]
    config, _ = resolve(read_config(None, keys).config)
    dims = draw_dims(random.Random(0))
    said = "keep_logits = true: a pipeline would hold the logits of several microbatches at once"
    assert [str(one) for one in layout_problems(config, dims)] == [
        f"actor.archon.{said}; leave it out."
    ]
    assert engine_refuses(config, dims).startswith(said)


BIASED = {"deepseek_v3", "dots1", "ernie4_5_moe", "glm4_moe", "glm4_moe_lite", "minimax_m2"}


@pytest.mark.parametrize("family", known_families())
def test_families_with_a_place_for_a_bias_are_known_without_torch(family):
    dims = dims_of(FAMILY_CONFIGS.get(family, {"model_type": family, **SIZES}))
    names = map_of(dims).entries
    has_place = not dims.moe_bias and any(name.endswith("router.bias") for name in names)
    assert has_place == dims.router_bias
    assert has_place == (family in BIASED)
