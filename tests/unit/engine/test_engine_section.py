"""What an engine chooses where its block of keys leaves it open; what a recipe says stays."""

import pytest

from pentad.config.load import load_config
from pentad.config.resolve import resolve
from pentad.core.layout import Layout
from pentad.core.machine import GIB
from pentad.core.sizes import SamplerPass, default_microbatch_tokens
from pentad.engine.section import EngineSettings
from pentad.models.catalog import known_config
from pentad.models.families import dims_of


def config_of(*overrides):
    return resolve(load_config(None, overrides))[0]


def settled(model, device="cpu", layout=None, **run):
    made = EngineSettings(model=model, **{"max_row_tokens": 50} | run)
    return made.settled(device, layout or Layout()).model


def test_what_a_recipe_says_stays():
    config = config_of(
        "actor.dtype=bf16",
        "actor.mb_spec.n_mbs=3",
        "actor.mb_spec.max_tokens_per_mb=99",
        "actor.archon.ac_mode=full",
        "actor.archon.ac_selective=2",
        "actor.archon.keep_logits=true",
        "actor.archon.enable_compile=true",
        "actor.archon.reshard_after_forward_policy=never",
    )
    assert settled(config.actor) == config.actor


@pytest.mark.parametrize(
    ("device", "mode", "compiles", "dtype"),
    [("cpu", "none", False, "float32"), ("cuda", "selective", True, "bfloat16")],
)
def test_what_is_left_open_depends_on_the_device(device, mode, compiles, dtype):
    made = settled(config_of().actor, device)
    assert (made.archon.ac_mode, made.archon.enable_compile) == (mode, compiles)
    assert made.dtype == dtype and made.archon.ac_selective == "op"
    assert not settled(config_of().actor, device, strict=True).archon.enable_compile


def test_settling_twice_is_settling_once():
    once = EngineSettings(model=config_of().actor, max_row_tokens=50).settled("cuda", Layout())
    assert once.settled("cpu", Layout()) == once


def test_microbatches_are_as_large_as_the_plan_counts_them():
    config = config_of("allocation_mode=embedded:d1+archon:d1p2t2", "actor.path=Qwen/Qwen3-8B")
    made = settled(config.actor, "cuda", Layout(pp=2, tp=2))
    num_stages = 2 * config.actor.archon.stages_per_rank
    assert num_stages > 2
    assert made.mb_spec.max_tokens_per_mb == default_microbatch_tokens(50, "cuda", num_stages)


def test_microbatches_that_are_filled_up_have_the_size_that_was_chosen():
    made = settled(config_of("actor.pad_to_maximum=true").actor, "cuda")
    assert made.min_tokens_per_mb == made.mb_spec.max_tokens_per_mb == 32768
    assert settled(config_of().actor, "cuda").min_tokens_per_mb == 1


@pytest.mark.parametrize(
    ("policy", "layout", "wanted"),
    [
        ("default", Layout(dp_shard=4), "always"),
        ("default", Layout(pp=2, dp_shard=2), "never"),
        ("default", Layout(), "never"),
        ("always", Layout(pp=2, dp_shard=2), "always"),
        ("always", Layout(), "always"),
        ("never", Layout(dp_shard=4), "never"),
    ],
)
def test_parameters_are_sharded_again_where_that_saves_something(policy, layout, wanted):
    config = config_of(f"actor.archon.reshard_after_forward_policy={policy}")
    made = settled(config.actor, layout=layout)
    assert made.archon.reshard_after_forward_policy == wanted


def test_logits_are_kept_only_where_that_was_chosen():
    for text, wanted in (("null", False), ("false", False), ("true", True)):
        config = config_of(f"actor.archon.keep_logits={text}")
        assert settled(config.actor, "cuda").archon.keep_logits is wanted


@pytest.mark.parametrize(
    ("name", "free_bytes", "wanted_bytes"),
    [("Qwen3-8B", 100 * GIB, 2 * GIB), ("Qwen3-8B", 10 * GIB, 1.25 * GIB)],
)
def test_a_forward_pass_of_the_sampler_takes_what_its_activations_may(
    name, free_bytes, wanted_bytes
):
    dims = dims_of(known_config(name))
    largest = SamplerPass(dims, 2, max_running=256)
    each = 2 * (5 * dims.hidden_size + 3 * dims.intermediate_size)
    assert largest.token_bytes == each
    assert wanted_bytes - each < largest.tokens(free_bytes) * each <= wanted_bytes


def test_states_of_running_sequences_take_memory_from_the_cache():
    dims = dims_of(known_config("Qwen3-0.6B"))
    plain, held = SamplerPass(dims, 2, 256), SamplerPass(dims, 2, 256, state_bytes=GIB // 8)
    assert held.slots_bytes == 257 * GIB // 8 and plain.slots_bytes == 0
    assert held.cache_bytes(100 * GIB) == (100 * GIB - held.slots_bytes) // 2
    assert not held.state_problems(100 * GIB)
    (problem,) = held.state_problems(10 * GIB)
    assert str(problem) == (
        "rollout.max_running = 256: their states take 32.1 GiB, and 10 GiB of the device are free; "
        "set it to less than 79: the cache needs memory too."
    )


def test_a_forward_pass_of_the_sampler_has_bounds():
    dims = dims_of(known_config("Qwen3-0.6B"))
    assert SamplerPass(dims, 2, 256).tokens(100 * GIB) == 32768
    assert SamplerPass(dims, 2, 256).tokens(GIB) == SamplerPass(dims, 4, 256).tokens(None) == 8192
    assert SamplerPass(dims, 2, 10_000).tokens(GIB) == 10_000
    assert SamplerPass(dims, 2, 256, given=1000).tokens(100 * GIB) == 1000
