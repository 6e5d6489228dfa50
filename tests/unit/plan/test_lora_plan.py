"""Plans of adapters: counts, 8B and 30B-A3B on one GPU, and the offer where all does not fit."""

import math

import pytest

from pentad.config.topology import Topology, facts_of, topology
from pentad.core.layout import Layout
from pentad.core.machine import GIB
from pentad.engine.section import LoraConfig
from pentad.models.families import dims_of, lora_map_of, public_models
from pentad.planner.adapters import JOINED_SHARE, num_factors
from pentad.planner.figures import Device
from pentad.planner.plan import build_plan
from pentad.planner.prepare import prepare
from pentad.planner.remedies import propose_adapter

SIZES = {
    "vocab_size": 211,
    "hidden_size": 40,
    "intermediate_size": 84,
    "num_hidden_layers": 3,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 6,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 28}
KINDS = {
    "dense": {"model_type": "qwen3"},
    "experts": {"model_type": "qwen3_moe", **EXPERTS},
    "mixed": {"model_type": "qwen3_moe", **EXPERTS, "mlp_only_layers": [1]},
    "shared": {"model_type": "qwen2_moe", **EXPERTS, "shared_expert_intermediate_size": 36},
}


@pytest.mark.parametrize("experts", ["each", "shared_outer"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_count_is_that_of_the_weight_map(kind, experts):
    dims = dims_of({**SIZES, **KINDS[kind]})
    for targets in ("all-linear", ("q", "v"), ("gate", "up", "down"), ("experts",)):
        if targets == ("experts",) and kind == "dense":
            continue
        if targets == ("gate", "up", "down") and kind == "experts":
            continue
        lora = LoraConfig(rank=3, targets=targets, experts=experts)
        entries = lora_map_of(dims, lora).entries.values()
        assert num_factors(dims, lora) == sum(math.prod(entry.shape) for entry in entries)


def test_axes_cut_what_they_cut_of_the_matrices():
    dims = dims_of({**SIZES, **KINDS["experts"]})
    lora = LoraConfig(rank=1, targets=("q", "k", "o"))
    cut = num_factors(dims, lora, Layout(tp=4), [0])
    assert cut == (40 + 72 // 4) + (40 + 24 // 4) + (72 // 4 + 40)
    shared = LoraConfig(rank=1, targets=("experts",))
    assert num_factors(dims, shared, Layout(dp_shard=2, ep=2), [0]) == 3 * (40 + 3 * 28)


LAYOUT = "allocation_mode=embedded:d1|archon:d1"
FSDP = LAYOUT.replace("archon", "fsdp")


def plan_of(model, memory, *overrides):
    words = [f"actor.path={model}", "train_dataset.path=x", "train_dataset.batch_size=32"]
    words += ["gconfig.n_samples=16", "gconfig.max_new_tokens=1024", "reward.fn=gsm8k"]
    layout = [] if any("allocation_mode" in word for word in overrides) else [LAYOUT]
    words += [*layout, *overrides]
    config, _ = prepare(None, words, "plan", gpu_memory=memory)
    return build_plan(config, Device("cuda", int(memory * GIB), "", False))


@pytest.mark.parametrize(
    ("model", "memory", "peak_gib", "factors"),
    [
        ("Qwen/Qwen3-8B", 80, 63.6, 87_293_952),
        ("Qwen/Qwen3-8B", 141, 125.7, 87_293_952),
        ("Qwen/Qwen3-30B-A3B", 80, 79.9, 489_000_000),
        ("Qwen/Qwen3-30B-A3B", 141, 126.3, 489_000_000),
    ],
)
def test_an_adapter_of_rank_32_fits_one_gpu(model, memory, peak_gib, factors):
    plan = plan_of(model, memory, "actor.lora.rank=32")
    assert plan.fits and plan.peak_bytes / GIB == pytest.approx(peak_gib, abs=0.1)
    lora = plan.config.actor.lora
    assert num_factors(public_models()[model], lora) == pytest.approx(factors, rel=1e-3)
    (phases,) = plan.trainers[0].phases
    load = phases["load"].device
    assert load["weights"] == 2 * plan.dims.num_params, "frozen weights once, without masters"
    assert load["optimizer"] == 2 * load["adapter"] == 8 * num_factors(plan.dims, lora)
    (sampler,) = plan.samplers
    copies = JOINED_SHARE[plan.dims.num_experts > 0]
    held = copies * load["adapter"]
    assert sampler.weights_bytes == held, "the frozen weights are the learner's"
    assert plan.files.checkpoint_bytes == 3 * load["adapter"]


def test_an_adapter_is_offered_where_all_weights_do_not_fit():
    plan = plan_of("Qwen/Qwen3-30B-A3B", 80)
    steps = propose_adapter(plan)
    assert steps[0].overrides == ("actor.lora.rank=32",)
    assert steps[-1].fits and steps[-1].num_devices == 1
    words = [word for step in steps for word in step.overrides]
    assert plan_of("Qwen/Qwen3-30B-A3B", 80, *words).peak_bytes == steps[-1].peak_bytes
    assert propose_adapter(plan_of("Qwen/Qwen3-30B-A3B", 80, "actor.lora.rank=32")) == []


def test_beside_transformers_layers_the_sampler_holds_frozen_weights_of_its_own():
    words = ("actor.lora.rank=32", "rollout.kv_cache_gb=4")
    mine, archon = (plan_of("Qwen/Qwen3-0.6B", 80, *words, one) for one in (FSDP, LAYOUT))
    (phases,), (theirs,) = mine.trainers[0].phases, archon.trainers[0].phases
    for key in ("weights", "adapter", "optimizer"):
        assert phases["load"].device[key] == theirs["load"].device[key], key
    held, shared = mine.samplers[0].weights_bytes, archon.samplers[0].weights_bytes
    assert held - shared == 2 * mine.dims.num_params


APART = ("allocation_mode=embedded:d1+archon:d1", "mode=hybrid", "actor.lora.rank=32")
ONE_GPU = ("cluster.share_gpus=true", "cluster.n_gpus_per_node=1", "rollout.kv_cache_gb=4")


@pytest.mark.parametrize("offloads", [False, True])
def test_a_sampler_in_another_process_on_the_gpu_adds_no_frozen_weights(offloads, monkeypatch):
    words = [*APART, *ONE_GPU]
    if offloads:
        turns = ["offload_train=true", "scheduler.processes=separate", "actor.lora.rank=32"]
        words = [LAYOUT, *ONE_GPU[1:], *turns]
    once = plan_of("Qwen/Qwen3-0.6B", 80, *words)
    assert any("1.1 GiB of frozen weights counted once" in note for note in once.notes)
    monkeypatch.setattr(Topology, "shares_base", False)
    twice = build_plan(once.config, once.device)
    assert any("in the learner and in each sampler" in note for note in twice.notes)
    ((one,), (other,)) = once.trainers[0].phases, twice.trainers[0].phases
    base = 2 * once.dims.num_params
    added = {name: other[name].device_bytes - one[name].device_bytes for name in one}
    # Of two, the learner's leave the GPU with it; the only ones stay.
    without = ("load", "rollout", "publish") if offloads else ("load",)
    assert added == {name: 0 if name in without else base for name in one}


def test_without_a_gpu_a_sampler_in_another_process_adds_no_frozen_weights(monkeypatch):
    words = ["train_dataset.path=x", "reward.fn=gsm8k", "actor.path=Qwen/Qwen3-0.6B", *APART]
    config, _ = prepare(None, [*words, "scheduler.processes=separate"], "plan")
    device = Device("cpu", int(64 * GIB), "", False)
    once = build_plan(config, device)
    monkeypatch.setattr(Topology, "shares_base", False)
    twice = build_plan(config, device)
    added = {name: twice.host_bytes[name] - once.host_bytes[name] for name in once.host_bytes}
    assert set(added.values()) == {4 * once.dims.num_params}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["allocation_mode=embedded:d1|archon:d1"], True),
        ([*APART, *ONE_GPU], True),
        ([*APART, "cluster.n_gpus_per_node=2", "scheduler.processes=separate"], False),
        ([*APART, *ONE_GPU, "allocation_mode=embedded:d1+fsdp:d1"], False),
        (["allocation_mode=embedded:d2|archon:d2", "cluster.n_gpus_per_node=2"], False),
        (["allocation_mode=vllm:d1|archon:d1"], False),
        ([*APART, *ONE_GPU, "scheduler.type=ray"], False),
    ],
)
def test_frozen_weights_are_shared_by_one_learner_and_a_sampler_on_its_gpu(words, expected):
    words = ["train_dataset.path=x", "reward.fn=gsm8k", "actor.path=Qwen/Qwen3-0.6B", *words]
    config, _ = prepare(None, [*words, "actor.lora.rank=8"], "plan", gpu_memory=80)
    assert topology(config, facts_of(config, "cuda")).shares_base is expected


@pytest.mark.parametrize(("model", "is_offered"), [("Qwen3-8B", True), ("Qwen3-30B-A3B", False)])
def test_fsdp_is_offered_an_adapter_of_a_dense_model(model, is_offered):
    """Experts of transformers take none, and without them it would be a rule's refusal."""
    plan = plan_of(f"Qwen/{model}", 141, FSDP, "algorithm.kl_coef=0.01")
    assert not plan.fits
    assert bool(propose_adapter(plan)) is is_offered
