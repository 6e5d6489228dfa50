"""verify-parallel: what it runs, what it refuses, and that wrong numbers fail it."""

import json
import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from pentad.core.errors import RunError, UserError
from pentad.core.fit import check_fit
from pentad.core.layout import Layout
from pentad.engine.section import ModelConfig
from pentad.models.catalog import known_config, public_dims
from pentad.models.families import dims_of
from pentad.parallel.pipeline import plan_pipeline
from pentad_tools.parallel import parallel_ranks
from pentad_tools.parallel.parallel_cases import (
    LayoutCase,
    choose_cases,
    config_at,
    read_subject,
    shrink,
)
from pentad_tools.parallel.parallel_ranks import engine_settings_of
from pentad_tools.parallel.verify_parallel import judge, run_verify_parallel

MODELS = public_dims()

RECIPE = """
allocation_mode: sglang:d4+archon:(attn:d2p2t2|ffn:d1p2t1e4)
actor:
  path: Qwen/Qwen3-30B-A3B
  archon: {pp_schedule: ZBV, ac_mode: selective}
"""


@pytest.fixture(autouse=True)
def no_rank(monkeypatch):
    for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(key, raising=False)


def texts(cases: list[LayoutCase]) -> list[str]:
    return [case.text for case in cases]


def test_a_recipe_brings_its_model_its_layout_and_its_settings(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE)
    subject = read_subject([str(file)])
    assert subject.dims == MODELS["Qwen3-30B-A3B"]
    (case,) = choose_cases(subject, None, [])
    assert case.layout == Layout(pp=2, dp_shard=2, tp=2, ep=4)
    settings = engine_settings_of(config_at(subject, case.text).actor, case.layout)
    archon = settings["archon"]
    assert archon["pp_schedule"] == "ZBVZeroBubble"
    assert archon["reshard_after_forward_policy"] == "never"
    assert (archon["ac_mode"], archon["ac_selective"]) == ("selective", 2)
    other = read_subject([str(file), "actor.archon.ac_mode=full", "actor.archon.pp_schedule=1F1B"])
    settings = engine_settings_of(config_at(other, case.text).actor, case.layout)
    assert settings["archon"]["ac_mode"] == "full"
    assert settings["archon"]["reshard_after_forward_policy"] == "never"


POLICIES = ("default", "always", "never")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "qwen2_moe", "glm4_moe"])
def test_every_layout_that_is_chosen_gets_the_settings_of_a_run(family, policy):
    """A layout that the engine would refuse with them is not chosen."""
    subject = read_subject([family, f"actor.archon.reshard_after_forward_policy={policy}"])
    cases = [case for world in (2, 4, 8) for case in choose_cases(subject, world, [])]
    assert any(case.layout.pp > 1 for case in cases) == (policy != "always" or family == "qwen3")
    for case in cases:
        layout = case.layout
        keys = ModelConfig(**engine_settings_of(config_at(subject, case.text).actor, layout))
        wanted = {"default": "always" if layout.pp == 1 else "never"}.get(policy, policy)
        assert keys.archon.reshard_after_forward_policy == wanted, case.text
        check_fit(layout, subject.dims)
        plan_pipeline(subject.dims, layout, keys)


def test_a_folder_is_taken_with_its_switches(tmp_path):
    config = known_config("Qwen3-8B") | {"attention_bias": True, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    subject = read_subject([str(tmp_path)])
    assert subject.dims.qkv_bias and subject.folder is None
    small = dims_of(shrink(subject.hf_config, subject.dims, [LayoutCase("t2", Layout(tp=2))], 1))
    assert small.qkv_bias and small.num_heads == 32 and small.num_kv_heads == 8
    assert small.num_layers == 4 and small.num_params < 2_000_000


def test_a_small_model_keeps_what_decides_how_it_is_cut():
    subject = read_subject(["Qwen3-30B-A3B"])
    cases = choose_cases(subject, None, ["d2t4e8", "(attn:p4t2|ffn:p4t2)"])
    small = dims_of(shrink(subject.hf_config, subject.dims, cases, stages=8))
    kept = ("num_heads", "num_kv_heads", "num_experts", "num_experts_per_token", "qk_norm")
    for name in kept:
        assert getattr(small, name) == getattr(subject.dims, name), name
    assert small.num_layers == 8
    assert small.intermediate_size % 4 == 0 and small.moe_intermediate_size % 2 == 0
    assert small.num_params < 10_000_000


LISTS = {"moe_topk": [8] * 32, "num_shared_expert": [1] * 32, "moe_intermediate_size": [3072] * 32}
WINDOWS = ["sliding_attention"] * 5 + ["full_attention"]
OF_FOLDERS = {
    "DeepSeek-V3": {},
    "MiniMax-M2": {"attn_type_list": [1] * 62},
    "Hunyuan-A13B-Instruct": LISTS,
    "OLMoE-1B-7B-0924": {},
    "gemma-4-26B-A4B": {
        "layer_types": WINDOWS * 5,
        "per_layer_config": {f"{i:02}": {"head_dim": 512} for i in range(5, 30, 6)},
    },
    "gemma-4-E2B": {},
}
"""Public models -> keys of their folders beside those that are known."""


@pytest.mark.parametrize("name", OF_FOLDERS)
def test_a_released_model_is_small_in_every_part(name):
    """Also where widths belong together, and where a list has a number for each layer."""
    config = known_config(name) | OF_FOLDERS[name]
    dims = dims_of(config)
    layout = Layout(dp_shard=2, tp=2, **({"ep": 2, "etp": 2} if dims.num_experts else {}))
    small = dims_of(shrink(config, dims, [LayoutCase("", layout)], stages=1))
    check_fit(layout, small)
    kept = ("num_heads", "num_experts", "num_experts_per_token", "router_bias", "values_are_keys")
    assert all(getattr(small, key) == getattr(dims, key) for key in kept)
    assert small.shares_keys == dims.shares_keys and len(small.kinds) == min(len(dims.kinds), 4)
    assert small.num_layers == 4 and small.num_params < 6e6


def test_without_layouts_every_plain_one_of_the_world_is_run():
    dense = choose_cases(read_subject(["qwen3"]), 4, [])
    assert sorted(texts(dense)) == [
        "archon:c4",
        "archon:d2c2",
        "archon:d2p2",
        "archon:d2t2",
        "archon:d4",
        "archon:p2c2",
        "archon:p2t2",
        "archon:p4",
        "archon:t2c2",
        "archon:t4",
    ]
    mixture = choose_cases(read_subject(["qwen3_moe"]), 2, [])
    assert sorted(texts(mixture)) == [
        "archon:c2",
        "archon:c2e2",
        "archon:d2",
        "archon:d2e2",
        "archon:p2",
        "archon:t2",
        "archon:t2e2",
    ]


@pytest.mark.parametrize(
    ("words", "world", "layouts", "expected"),
    [
        ([], 2, [], "model: is not given"),
        (["actor.path=x"], 2, [], "model: is not given"),
        (["no/such/model"], 2, [], "neither a folder nor known"),
        (["qwen3"], None, [], "--world: is not given"),
        (["qwen3"], None, ["t3"], "t3 * c1 = 3 must divide num_heads = 8"),
        (["qwen3"], None, ["d2 t3"], "t3 * c1 = 3 must divide num_heads = 8"),
        (["qwen3"], 4, ["d2"], "needs 2 ranks, --world is 4"),
        (["qwen3"], None, ["d1"], "one rank is the reference of the comparison"),
        (["qwen3"], None, ["d2e2"], "e2 needs experts"),
        (["qwen3"], None, ["d2t"], "t takes a number"),
        (["qwen3"], None, ["embedded:d1|archon:d2"], "archon and fsdp are run here, not embedded"),
        (["qwen3"], None, ["d2 fsdp:t2"], "have the backends archon and fsdp"),
        (["qwen3"], None, ["fsdp:d2p2"], "fsdp does not take p"),
        (["qwen3", "actor.archon.nonsense=1"], 2, [], "there is no such key"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_starts(words, world, layouts, expected):
    with pytest.raises(UserError) as caught:
        choose_cases(read_subject(words), world, layouts)
    assert expected in str(caught.value)


def test_under_torchrun_it_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="start it without torchrun"):
        run_verify_parallel(["qwen3"], world=2)


ALONE = {"loss": 2.0, "grad_norm": 3.0, "next_loss": 1.9}
GOOD = {**ALONE, "gradient_error": 1e-6, "worst": "norm.weight", "routes_differ": 0.0}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, None),
        ({"loss": 2.00001}, None),
        ({"loss": 2.001}, "loss is 2.001, on one rank 2"),
        ({"loss": float("nan")}, "loss is nan"),
        ({"grad_norm": 3.1}, "grad_norm is 3.1, on one rank 3"),
        ({"next_loss": 1.8}, "next_loss is 1.8"),
        ({"gradient_error": 1e-3}, "the gradient of norm.weight is off by 1.0e-03"),
        ({"gradient_error": float("inf")}, "the gradient of norm.weight is off by inf"),
        ({"routes_differ": 0.5}, "50.0% of the tokens choose other experts"),
    ],
)
def test_every_number_that_differs_is_a_fault(change, expected):
    faults = judge("archon:d2", {**GOOD, **change}, ALONE).faults
    assert (faults == ()) if expected is None else (len(faults) == 1 and expected in faults[0])


@pytest.mark.full  # the next test passes the same command; here are more layouts
@pytest.mark.dist
def test_the_example_of_the_docs_agrees(capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    page = (Path(__file__).parents[3] / "docs" / "layouts.md").read_text()
    block = page.partition("\npentad verify-parallel ")[2].partition("\n\nWithout ")[0]
    lines = [line.strip() for line in block.splitlines() if not line.startswith("```")]
    words, *shown = filter(None, lines)
    name, option, layouts = shlex.split(words)
    assert option == "--layouts"
    assert run_verify_parallel([name], layouts=[layouts], device="cpu") == 0
    out = [line.strip() for line in capfd.readouterr().out.splitlines() if line.strip()]
    assert (out[0], out[-1]) == (shown[0], shown[-1])
    # What a machine rounds and how long it takes are its own.
    assert [line.split()[0] for line in out] == [line.split()[0] for line in shown]
    assert out[2].split()[2][:6] == shown[2].split()[2][:6]


@pytest.mark.dist
def test_experts_of_transformers_are_compared_with_one_rank_of_theirs(capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert run_verify_parallel(["mixtral"], layouts=["fsdp:d2e2"], device="cpu") == 0
    assert "The layout gives one rank's numbers." in capfd.readouterr().out


@pytest.mark.dist
def test_layouts_that_agree_are_shown_with_their_figures(capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")  # narrower, figures are cut
    assert run_verify_parallel(["qwen3_moe"], layouts=["t2 (attn:d2|ffn:t2)"], device="cpu") == 0
    out, err = capfd.readouterr()
    lines = out.splitlines()
    assert lines[0].startswith("qwen3_moe: 4 layers, width 48, 8 heads (2 kv), 8 experts")
    alone = next(line.split() for line in lines if line.startswith("one rank"))
    for layout in ("archon:t2", "archon:(attn:d2|ffn:t2)"):
        row = next(line.split() for line in lines if line.startswith(layout))
        assert row[-1] == "same"
        assert float(row[1]) == pytest.approx(float(alone[2]), rel=1e-5)
        assert 0 < float(row[3]) < 5e-5 and float(row[4]) < 0.7 * float(alone[4])
    assert lines[-1] == "All 2 layouts give one rank's numbers."
    assert "Warning" not in err


def sabotaged(monkeypatch, name):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    service = getattr(import_module("sabotaged_ranks"), name)
    monkeypatch.setattr(parallel_ranks, "LayoutService", service)


@pytest.mark.dist
def test_a_wrong_gradient_and_a_dead_rank_fail_it_and_are_named(capfd, monkeypatch):
    sabotaged(monkeypatch, "Sabotaged")
    code = run_verify_parallel(["qwen3"], layouts=["d2", "t2"], device="cpu", json=True)
    assert code == 1
    report = json.loads(capfd.readouterr().out)
    dead, wrong = report["layouts"]
    assert dead["text"] == "archon:d2" and dead["measured"] == {}
    assert re.search("rank 1 of 2, .*: ended with exit code 9", dead["faults"][0])
    assert wrong["text"] == "archon:t2" and wrong["measured"]["gradient_error"] > 0.1
    assert "norm.weight is off by" in " ".join(wrong["faults"])


@pytest.mark.dist
def test_ranks_that_fail_at_their_end_end_the_command(monkeypatch):
    sabotaged(monkeypatch, "FailingLate")
    with pytest.raises(RunError, match="the 2 ranks failed after their last layout: no way out"):
        run_verify_parallel(["qwen3"], layouts=["d2"], device="cpu", json=True)
