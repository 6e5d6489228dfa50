"""What a recipe with `megatron:` is told before anything starts."""

import json

import pytest
from rule_checks import start_facts

from pentad.config.rules import megatron
from pentad.config.rules.check import check, noted
from pentad.config.rules.checkpoint import judge_changes
from pentad.config.schema import Config
from pentad.core.errors import UserError
from pentad.planner import remedies
from pentad.planner.figures import Device
from pentad.planner.prepare import prepare
from pentad.planner.remedies import choose_layers
from pentad.telemetry import host

SMALL = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2048,
}


def config_of(*overrides: str) -> Config:
    allocation = "allocation_mode=embedded:d1+megatron:d2t2"
    given = ["actor.path=Qwen/Qwen3-0.6B", allocation, *overrides]
    return prepare(None, given, "plan")[0]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("actor.archon.enable_compile=true", "Megatron's layers are not compiled"),
        ("actor.archon.offload_params=true", "keeps parameters on the device"),
        ("actor.archon.ac_mode=memory_budget", "supports none, selective and full"),
        ("actor.archon.ac_selective=3", "has no other choice"),
        ("actor.archon.dp_replicate=2", "one group of data-parallel ranks"),
        ("actor.lora.rank=8", "adapters are supported by archon only"),
        ("strict=true", "bit for bit need archon"),
    ],
)
def test_keys_that_megatron_cannot_take_are_named(given, said):
    with pytest.raises(Exception, match=said):
        config_of(given)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "olmo2"}, "it has norms after attention and ffn, which Megatron's layers"),
        ({"model_type": "gemma3_text"}, "it has scaled embeddings or queries, which Megatron's"),
        ({"model_type": "llama", "attention_bias": True}, "biases on q, k, v and o: Megatron has"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "dynamic",
        ),
    ],
    ids=["norms", "scales", "biases", "rope"],
)
def test_a_plan_names_what_megatron_s_layers_lack(tmp_path, config, said):
    (tmp_path / "config.json").write_text(json.dumps(SMALL | config))
    with pytest.raises(UserError) as refused:
        config_of(f"actor.path={tmp_path}")
    said_of_it = [str(one) for one in refused.value.as_problems()]
    assert sum(said in one for one in said_of_it) == 1, said_of_it
    config_of(f"actor.path={tmp_path}", "allocation_mode=embedded:d1+archon:d2t2")


@pytest.mark.parametrize("layout", ["d2c2", "p2t2", "(attn:d4|ffn:e2)"])
def test_every_axis_is_taken(layout):
    model = "actor.path=Qwen/Qwen3-30B-A3B"
    config_of(f"allocation_mode=embedded:d1+megatron:{layout}", model, "rollout.replay_routes=true")


def test_a_pipeline_runs_the_schedules_that_megatron_has():
    layout = "allocation_mode=embedded:d1+megatron:p2"
    config_of(layout, "actor.archon.pp_schedule=1F1B")
    with pytest.raises(Exception, match="Megatron's pipelines run 1F1B and Interleaved1F1B"):
        config_of(layout, "actor.archon.pp_schedule=ZBVZeroBubble")


def test_the_backend_is_chosen_by_the_seed_s_key_where_the_layout_is_left_open():
    given = ["actor.path=Qwen/Qwen3-0.6B", "actor.training_backend=megatron"]
    cluster = "cluster.n_gpus_per_node=2"
    shared = prepare(None, [*given, cluster], "plan")[0]
    apart = prepare(None, [*given, cluster, "mode=hybrid"], "plan")[0]
    assert shared.allocation_mode == "embedded:d2|megatron:d2"
    assert apart.allocation_mode == "embedded:d1+megatron:d1"
    said = "embedded:d1.archon:d1 trains the actor by archon; write megatron: there"
    with pytest.raises(Exception, match=said):
        prepare(None, [*given, "allocation_mode=embedded:d1|archon:d1"], "plan")


def test_a_cpu_is_refused_unless_its_calls_of_cuda_are_replaced(monkeypatch):
    config, facts = config_of(), start_facts("cpu")
    said = "computes on GPUs, and this run computes on cpu"
    monkeypatch.delenv(megatron.ON_CPU, raising=False)
    assert any(said in str(problem) for problem in check(config, facts))
    monkeypatch.setenv(megatron.ON_CPU, "1")
    assert not any(said in str(problem) for problem in check(config, facts))


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (None, "needs the package megatron-core, which is not installed"),
        ("0.15.3", "written for megatron-core 0.16, and 0.15.3 is installed"),
        ("0.20.0", "and 0.20.0 is installed"),
        ("0.160.0", "and 0.160.0 is installed"),
        ("0.16.1", None),
        ("0.16rc0", None),
        ("0.16.0+local", None),
    ],
)
def test_a_plan_notes_a_package_that_is_absent_or_of_another_version(monkeypatch, version, said):
    monkeypatch.setattr(megatron, "installed", {"megatron-core": version}.get)
    found = [str(problem) for problem in noted(config_of()) if "megatron-core" in str(problem)]
    assert found == [] if said is None else said in found[0]


@pytest.mark.parametrize(
    ("version", "wanted", "said"),
    [
        (None, "auto", None),
        (None, "local", None),
        (None, "transformer_engine", "needs the package transformer-engine, which is not inst"),
        ("2.11.0", "transformer_engine", None),
        ("2.9.0.post1", "auto", None),
        (
            "2.12.0",
            "auto",
            "0.16 takes Transformer Engine 2.9, 2.10, 2.11, and 2.12.0 is installed",
        ),
        ("1.13.0", "transformer_engine", "and 1.13.0 is installed"),
        ("2.12.0", "local", None),
    ],
)
def test_a_plan_notes_a_transformer_engine_that_is_absent_or_of_another_version(
    monkeypatch, version, wanted, said
):
    packages = {"megatron-core": "0.16.1", "transformer-engine": version}
    monkeypatch.setattr(megatron, "installed", packages.get)
    found = noted(config_of(f"megatron.transformer_impl={wanted}"))
    found = [str(problem) for problem in found if "megatron" in str(problem)]
    assert found == [] if said is None else said in found[0]


def test_transformer_engine_is_refused_on_a_cpu(monkeypatch):
    monkeypatch.setenv(megatron.ON_CPU, "1")
    for wanted, count in (("transformer_engine", 1), ("auto", 0), ("local", 0)):
        config = config_of(f"megatron.transformer_impl={wanted}")
        problems = check(config, start_facts("cpu"))
        assert sum("its layers need CUDA" in str(problem) for problem in problems) == count


def test_a_run_records_the_layers_that_auto_chose_and_refuses_others(monkeypatch):
    def started(version, device, *overrides):
        monkeypatch.setattr(remedies, "installed", {"transformer-engine": version}.get)
        config, notes = choose_layers(config_of(*overrides), device)
        return config.model_dump(mode="json"), notes

    gpu, cpu = Device("cuda", 1 << 36, ""), Device("cpu", 1 << 36, "")
    plain, notes = started(None, gpu)
    key = "megatron.transformer_impl"
    assert plain["megatron"]["transformer_impl"] == "local"
    assert notes == [f"{key} = local: Transformer Engine is not installed"]
    fused, notes = started("2.11.0", gpu)
    assert fused["megatron"]["transformer_impl"] == "transformer_engine"
    assert notes == [f"{key} = transformer_engine: version 2.11.0 is installed"]
    assert started("2.11.0", cpu)[0] == plain
    (problem,) = judge_changes(plain, fused).refused
    assert problem.where == f"{key} = transformer_engine"
    assert problem.rule == "was local so far, and the training depends on it"
    kept, _ = started("2.11.0", gpu, f"{key}=local")  # the remedy
    assert judge_changes(plain, kept).refused == []
    earlier, _ = started(None, Device("cuda", 1 << 36, "", is_here=False))
    assert earlier["megatron"]["transformer_impl"] == "auto"
    assert judge_changes(earlier, fused).refused == []
    other, notes = started("2.11.0", gpu, "allocation_mode=embedded:d1+archon:d2")
    assert notes == []
    for record in (plain, fused):  # each backend resumes a run of the other
        assert judge_changes(record, other).refused == judge_changes(other, record).refused == []


def test_the_versions_of_megatron_s_packages_are_recorded(monkeypatch):
    monkeypatch.setattr(host, "_installed", lambda name: "1.2" if "e" in name else None)
    found = host.versions()
    assert found["transformer-engine"] == found["megatron-core"] == "1.2" and "ray" not in found
