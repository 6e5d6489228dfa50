"""What a config says reaches the parts."""

import dataclasses

import pytest
import torch

from pentad.config.derived import known_config
from pentad.config.describe import fields
from pentad.config.load import load_config
from pentad.config.resolve import resolve
from pentad.core.machine import GIB
from pentad.core.settings import EngineKeys, OptimizerKeys, into
from pentad.core.sizes import SamplerPass, default_microbatch_tokens
from pentad.models.families import dims_of
from pentad.trainer.translate import algorithm_settings, engine_settings


def config_of(*overrides):
    return resolve(load_config(None, overrides))[0]


def test_engine_settings_follow_the_config():
    config = config_of(
        "actor.optimizer.lr=3e-5",
        "actor.optimizer.lr_scheduler_type=cosine",
        "actor.optimizer.gradient_clipping=null",
        "actor.mb_spec.n_mbs=3",
        "actor.mb_spec.max_tokens_per_mb=99",
        "actor.archon.ac_selective=2",
        "actor.archon.use_deterministic_algorithms=true",
    )
    made = engine_settings(
        config.actor, torch.device("cpu"), temperature=0.7, total_steps=10, max_row_tokens=50
    )
    assert made.optimizer.lr == 3e-5
    assert made.optimizer.lr_scheduler_type == "cosine"
    assert made.optimizer.total_steps == 10
    assert made.optimizer.gradient_clipping is None
    assert (made.n_mbs, made.max_tokens_per_mb) == (3, 99)
    assert (made.ac_mode, made.ac_selective) == ("selective", 2)
    assert made.deterministic and made.temperature == 0.7
    assert made.compute_dtype == "float32" and not made.compile


@pytest.mark.parametrize(("device", "mode"), [("cpu", "none"), ("cuda", "selective")])
def test_what_is_recomputed_by_default_depends_on_the_device(device, mode):
    how = {"temperature": 1.0, "total_steps": 10, "max_row_tokens": 50}
    made = engine_settings(config_of().actor, torch.device(device), **how)
    assert made.ac_mode == mode


def test_microbatches_are_as_large_as_the_plan_counts_them():
    config = config_of("allocation_mode=embedded:d1+archon:d1p2t2", "actor.path=Qwen/Qwen3-8B")
    how = {"temperature": 1.0, "total_steps": 10, "max_row_tokens": 50, "pp": 2, "world": 4}
    made = engine_settings(config.actor, torch.device("cuda"), **how)
    num_stages = 2 * config.actor.archon.stages_per_rank
    assert num_stages > 2
    assert made.max_tokens_per_mb == default_microbatch_tokens(50, "cuda", num_stages)


def test_memory_settings_reach_the_engine():
    config = config_of(
        "actor.archon.ac_mode=memory_budget",
        "actor.archon.ac_memory_budget=0.3",
        "actor.archon.offload_params=true",
        "actor.archon.layers_per_stage=[3,5]",
        "actor.archon.moe_aux_loss_coef=0.01",
        "actor.archon.moe_z_loss_coef=0.002",
        "actor.archon.moe_bias_rate=0.003",
        "critic.archon.ac_debug=true",
        "critic.pad_to_maximum=true",
        "algorithm.name=ppo",
    )
    how = {"temperature": 1.0, "total_steps": 10, "max_row_tokens": 50}
    made = engine_settings(config.actor, torch.device("cuda"), **how)
    assert (made.ac_mode, made.ac_memory_budget, made.compile) == ("memory_budget", 0.3, True)
    assert made.offload_params and made.layers_per_stage == (3, 5)
    balance = made.balance
    assert (balance.aux_loss_coef, balance.z_loss_coef, balance.bias_rate) == (0.01, 0.002, 0.003)
    critic = engine_settings(config.critic, torch.device("cuda"), **how)
    assert critic.ac_debug and not critic.compile
    assert critic.pad_to_maximum and critic.min_tokens_per_mb == 32768


@pytest.mark.parametrize(
    ("policy", "pp", "world", "reshards"),
    [
        ("default", 1, 4, True),
        ("default", 2, 4, False),
        ("default", 1, 1, False),
        ("always", 2, 4, True),
        ("always", 1, 1, True),
        ("never", 1, 4, False),
    ],
)
def test_the_pipeline_reaches_the_engine(policy, pp, world, reshards):
    config = config_of(
        "actor.archon.pp_schedule=ZBV", f"actor.archon.reshard_after_forward_policy={policy}"
    )
    made = engine_settings(
        config.actor,
        torch.device("cpu"),
        temperature=1.0,
        total_steps=1,
        max_row_tokens=50,
        pp=pp,
        world=world,
    )
    assert made.pp_schedule == "ZBVZeroBubble" and made.reshard_after_forward is reshards


def test_switches_reach_the_algorithm():
    settings = algorithm_settings(config_of("use_tis=true", "use_kl_loss=true"))
    assert settings.correction == "tis"
    assert settings.kl_coef > 0 and settings.kl_in == "loss"


def test_every_key_of_the_engine_reaches_it_by_its_name():
    """A key added to `EngineKeys` or `OptimizerKeys` is a key of recipes and a setting at once."""
    for keys, block in ((EngineKeys, "actor.archon"), (OptimizerKeys, "actor.optimizer")):
        for key in dataclasses.fields(keys):
            field = fields()[f"{block}.{key.name}"]
            assert (field.default, bool(field.description)) == (key.default, True)
    given = {"ac_mode": "full", "stages_per_rank": 3, "offload_params": "true"}
    given["keep_logits"] = "true"
    config = config_of(*(f"actor.archon.{key}={value}" for key, value in given.items()))
    made = engine_settings(
        config.actor, torch.device("cpu"), temperature=1, total_steps=1, max_row_tokens=8
    )
    for name in (key.name for key in dataclasses.fields(EngineKeys)):
        wanted = getattr(config.actor.archon, name)
        if name != "ac_selective":  # null where nobody reads it
            assert getattr(made, name) == wanted, name


def test_logits_are_kept_only_where_somebody_chose_it():
    how = {"temperature": 1.0, "total_steps": 10, "max_row_tokens": 50}
    for text, wanted in (("null", False), ("false", False), ("true", True)):
        config = config_of(f"actor.archon.keep_logits={text}")
        assert engine_settings(config.actor, torch.device("cuda"), **how).keep_logits is wanted


def test_a_section_that_lacks_a_value_is_noticed():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Wanted:
        n_mbs: int
        other: int

    section = config_of("actor.mb_spec.n_mbs=3").actor.mb_spec
    assert into(Wanted, section, other=1) == Wanted(n_mbs=3, other=1)
    with pytest.raises(TypeError, match="other"):
        into(Wanted, section)
    with pytest.raises(TypeError, match="unknown"):
        into(Wanted, section, other=1, unknown=2)
    with pytest.raises(AssertionError, match="n_mbs stands in several sections"):
        into(Wanted, section, section, other=1)


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


def test_a_forward_pass_of_the_sampler_has_bounds():
    dims = dims_of(known_config("Qwen3-0.6B"))
    assert SamplerPass(dims, 2, 256).tokens(100 * GIB) == 32768
    assert SamplerPass(dims, 2, 256).tokens(GIB) == SamplerPass(dims, 4, 256).tokens(None) == 8192
    assert SamplerPass(dims, 2, 10_000).tokens(GIB) == 10_000
    assert SamplerPass(dims, 2, 256, given=1000).tokens(100 * GIB) == 1000
