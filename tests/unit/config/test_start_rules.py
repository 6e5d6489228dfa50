"""What a start refuses is said by `plan` too, in the same words, where it plans for here."""

import json
from dataclasses import replace

import pytest
from rule_checks import check_layout, start_facts, unbuilt
from sections import sampler_settings
from typer.testing import CliRunner

from pentad.cli.main import app
from pentad.config.load import load_config
from pentad.config.resolve import resolve
from pentad.config.rules import start as start_rules
from pentad.config.rules.inputs import data_path_problem
from pentad.config.rules.start import (
    cache_problems,
    disk_problems,
    process_problems,
    the_device_compiles,
    weight_format_problems,
)
from pentad.core.dims import ModelDims
from pentad.core.errors import UserError
from pentad.core.machine import GIB
from pentad.core.sizes import kv_token_bytes
from pentad.models.families import is_known, known_families, no_such_family, public_models
from pentad.planner import plan
from pentad.planner.prepare import prepare
from pentad.planner.present import absence_problems

APART = "embedded[rollout]:d1+archon[actor]:d1+archon[ref]:d1"
QWEN = "actor.path=Qwen/Qwen3-0.6B"
TINY = ModelDims(
    family="qwen3",
    vocab_size=10,
    hidden_size=8,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    intermediate_size=8,
    max_position=100,
)


def config_of(*overrides):
    return resolve(load_config(None, overrides))[0]


def planned(*overrides, gpu_memory=None):
    """What `plan` says of a recipe: its problems, as sentences."""
    try:
        prepare(None, [QWEN, *overrides], "plan", gpu_memory)
    except UserError as error:
        return [str(problem) for problem in error.problems]
    return []


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(plan, "find_gpus", lambda: ())
    monkeypatch.setattr(start_rules, "num_cores", lambda: 2)
    monkeypatch.setattr(start_rules, "host_memory", lambda: (16 * GIB, 8 * GIB))


def test_defaults_ask_for_nothing_that_is_not_built():
    assert unbuilt(config_of()) == []
    many = config_of("allocation_mode=embedded:d2+archon:d1")
    assert unbuilt(many) == []


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["mode=async", "algorithm.kl_coef=0.1", "allocation_mode=embedded:d1+archon:d1"],
            "ref scores on its own devices there, and allocation_mode = embedded:d1+archon:d1",
        ),
        (
            ["mode=hybrid", "algorithm.kl_coef=0.1", f"allocation_mode={APART}"],
            "archon[ref]:d1 and archon[actor]:d1 must use the same ranks",
        ),
        ([f"allocation_mode={APART}"], "the run needs no ref: algorithm.kl_coef = 0"),
        (
            [
                "algorithm.kl_coef=0.1",
                "allocation_mode=vllm[rollout]:d1+archon[actor]:d1+archon[ref]:d2",
            ],
            "archon[ref]:d2 has a process for each rank, and here it is a thread",
        ),
        (
            ["allocation_mode=embedded[rollout]:d1|archon[actor]:d2+archon[critic]:d2"],
            "must use the same ranks",
        ),
    ],
)
def test_layouts_that_are_only_planned_are_told(overrides, said):
    config = config_of(*overrides)
    (problem,) = unbuilt(config)
    assert said in problem.rule


def test_the_remedy_for_a_missing_scorer_starts():
    given = ["mode=async", "algorithm.kl_coef=0.1"]
    (problem,) = unbuilt(config_of(*given, "allocation_mode=embedded:d2+archon:d4"))
    layout = problem.remedy.split()[1].rstrip(",")
    assert layout == "embedded[rollout]:d2+archon[actor]:d4+archon[ref]:d1"
    assert unbuilt(config_of(*given, f"allocation_mode={layout}")) == []
    assert config_of(*given).allocation_mode == APART, "what mode async takes where none is given"


def test_sft_does_not_mind_a_sampler():
    given = ["allocation_mode=embedded:d2+archon:d1", "mode=async", "algorithm.kl_coef=0.1"]
    assert unbuilt(config_of(*given), "sft") == []


def test_what_needs_a_gpu_is_refused_where_there_is_none(no_gpu):
    given = [
        "actor.archon.ac_mode=memory_budget",
        "critic.archon.enable_compile=true",
        "algorithm.name=ppo",
    ]
    config = config_of(*given)
    assert list(the_device_compiles(config, start_facts("cuda"))) == []
    said = [str(problem) for problem in the_device_compiles(config, start_facts("cpu"))]
    assert said == [
        "actor.archon.ac_mode = memory_budget: the compiler enforces it: blocks are compiled on "
        "CUDA only, and this run computes on cpu; use selective or full.",
        "critic.archon.enable_compile = true: blocks are compiled on CUDA only, and this run "
        "computes on cpu; leave it out.",
    ]
    assert planned(*given) == said
    # A plan for GPUs needs none here.
    assert planned(*given, "cluster.n_gpus_per_node=8") == planned(*given, gpu_memory=80) == []


def test_what_servers_cannot_do_on_a_cpu_is_refused(no_gpu):
    given = [
        "allocation_mode=vllm:d1|archon:d1",
        "offload_rollout=true",
        "rollout.replay_routes=true",
        "rollout.server.weight_transport=ipc",
    ]
    assert planned(*given) == [
        "offload_rollout = true: vllm cannot give back memory on a CPU; leave it out.",
        "rollout.replay_routes = true: vLLM on a CPU cannot report the experts it used (its newer "
        "runner needs Triton); leave it out, or use embedded in allocation_mode.",
        "rollout.server.weight_transport = ipc: there is no GPU to share; use disk or broadcast.",
    ]


@pytest.mark.parametrize("command", ["train", "sft"])
def test_missing_folders_do_not_hide_what_a_start_refuses(tmp_path, monkeypatch, command):
    """All that `plan` refuses or notes as refused comes with them, in one answer."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    of_the_start = [
        "cluster.n_nodes=2",
        "actor.archon.enable_compile=true",
    ]
    words = ["actor.path=no/model", "train_dataset.path=no.jsonl", "trial_name=a/b", *of_the_start]
    result = CliRunner().invoke(app, [command, "reward.fn=gsm8k", *words])
    assert result.exit_code == 2
    for word in words:
        assert f"* {word.replace('=', ' = ')}: " in result.stderr
    assert result.stderr.startswith(f"{len(words)} problems")


@pytest.mark.parametrize(("d", "fits"), [(32, True), (33, False), (64, False)])
def test_ranks_that_share_cores_have_a_limit(no_gpu, d, fits):
    given = f"allocation_mode=archon:d{d}"
    said = [str(problem) for problem in process_problems(config_of(given), "cpu")]
    assert said == planned(given)
    assert (said == []) == fits
    assert process_problems(config_of(given), "cuda") == []
    gpus = ("cluster.n_nodes=8", "cluster.n_gpus_per_node=8", "cluster.allow_idle=true")
    assert planned(given, *gpus) == []
    if not fits:
        assert (
            f"archon:d{d}: starts {d} processes here, and 2 cores with 16 GiB hold at most 32"
            in (said[0])
        )


def test_memory_limits_ranks_too(no_gpu, monkeypatch):
    monkeypatch.setattr(start_rules, "host_memory", lambda: (2 * GIB, 1 * GIB))
    (problem,) = process_problems(config_of("allocation_mode=archon:d6"), "cpu")
    assert "with 2 GiB hold at most 5" in problem.rule
    assert process_problems(config_of("allocation_mode=archon:d5"), "cpu") == []


def test_a_cache_that_is_too_small_is_refused_under_its_own_key(no_gpu):
    # A token has 2 layers x (key + value) x 4 numbers of 4 bytes; a block 16 tokens.
    block_gb = 16 * 2 * 2 * 4 * 4 / GIB
    for num_blocks, fits in ((5, False), (6, True)):
        given = [f"rollout.kv_cache_gb={num_blocks * block_gb!r}", "gconfig.max_new_tokens=79"]
        found = cache_problems(config_of(*given), TINY, "cpu")
        assert (found == []) == fits
    (problem,) = cache_problems(config_of("rollout.kv_cache_gb=1e-9"), TINY, "cpu")
    assert problem.where == "rollout.kv_cache_gb = 1e-09"
    assert problem.rule == "holds 0 tokens, and prompt and answer may have 100"
    enough = problem.remedy.removeprefix("give at least ")
    assert cache_problems(config_of(f"rollout.kv_cache_gb={enough}"), TINY, "cpu") == []
    assert any(
        text.startswith("rollout.kv_cache_gb = 1e-09")
        for text in planned("rollout.kv_cache_gb=1e-9")
    )
    talks = config_of("rollout.kv_cache_gb=1e-9", "rollout.workflow=flows.py:talk", "reward.fn=x:y")
    (problem,) = cache_problems(talks, TINY, "cpu")
    assert f"may have {TINY.max_position}" in problem.rule, "several turns fill the context"
    # On a GPU numbers have half the bytes.
    half = f"rollout.kv_cache_gb={3 * block_gb!r}"
    assert cache_problems(config_of(half, "gconfig.max_new_tokens=79"), TINY, "cuda") == []


@pytest.mark.parametrize(
    ("form", "keys", "kind", "rule"),
    [
        ("int8", (), "cpu", None),
        ("fp8", (), "cuda", None),
        ("bf16", (), "cuda", None),
        ("bf16", (), "cpu", "computes in float32"),
        ("bf16", ("actor.dtype=bfloat16",), "cpu", None),
        ("int8", ("strict=true",), "cuda", "strict = true"),
        ("fp8", ("strict=true", "allocation_mode=vllm:d1+archon:d1"), "cuda", "strict = true"),
        ("int8", ("allocation_mode=vllm:d1+archon:d1",), "cuda", "vllm has no such cache"),
        ("fp8", ("allocation_mode=vllm:d1+archon:d1",), "cuda", None),
        ("fp8", ("allocation_mode=sglang:d1+archon:d1",), "cpu", "no such cache on a CPU"),
    ],
)
def test_the_sampler_has_the_format_of_its_cache(no_gpu, form, keys, kind, rule):
    config = config_of(f"rollout.kv_cache_dtype={form}", *keys)
    found = cache_problems(config, TINY, kind)
    assert [problem.where for problem in found] == [f"rollout.kv_cache_dtype = {form}"] * bool(rule)
    assert not rule or rule in found[0].rule


SERVER = "allocation_mode=vllm:d1+archon:d1"
SPLIT = "allocation_mode=sglang:d1t2+archon:d1"
QWEN_06B, GPT_OSS = (public_models()[n] for n in ("Qwen/Qwen3-0.6B", "openai/gpt-oss-20b"))


@pytest.mark.parametrize(
    ("keys", "dims", "kind", "rule"),
    [
        ((SERVER,), QWEN_06B, "cuda", None),
        ((SPLIT,), QWEN_06B, "cuda", None),
        ((SERVER,), None, "cuda", None),
        ((), QWEN_06B, "cuda", "the embedded sampler computes with the weights that are trained"),
        ((SERVER,), QWEN_06B, "cpu", "vllm has no such weights on a CPU"),
        ((SERVER, "actor.dtype=float32"), QWEN_06B, "cuda", "the model computes in float32"),
        ((SERVER, "actor.lora={rank: 8}"), QWEN_06B, "cuda", "are never published"),
        ((SERVER,), replace(QWEN_06B, intermediate_size=1000), "cuda", "has 1000 rows"),
        ((SERVER,), GPT_OSS, "cuda", "experts of this family"),
    ],
)
def test_the_sampler_can_hold_weights_in_fp8(no_gpu, keys, dims, kind, rule):
    config = config_of("rollout.weight_dtype=fp8", *keys)
    found = weight_format_problems(config, dims, kind)
    assert [problem.where for problem in found] == ["rollout.weight_dtype = fp8"] * bool(rule)
    assert not rule or rule in found[0].rule


def test_plan_rejects_fp8_weights_of_the_embedded_sampler():
    found = planned("rollout.weight_dtype=fp8")
    assert any(
        text.startswith("rollout.weight_dtype = fp8: the embedded sampler") for text in found
    )


def test_a_cache_of_latents_is_not_of_eight_bits(no_gpu):
    latent = replace(TINY, family="deepseek_v3", kv_latent=4, rotary_dim=2)
    found = cache_problems(config_of("rollout.kv_cache_dtype=int8"), latent, "cpu")
    assert "has latents" in found[0].rule


def test_a_cache_of_eight_bits_holds_more(no_gpu):
    wide = replace(TINY, head_dim=8)
    assert kv_token_bytes(wide, 4) == 2 * 2 * 8 * 4  # 2 layers, keys and values
    assert kv_token_bytes(wide, 4, "int8") == 2 * 2 * (8 + 4)  # and a scale
    size = f"rollout.kv_cache_gb={4 * 16 * kv_token_bytes(wide, 4) / GIB!r}"
    keys = (size, "gconfig.max_new_tokens=79")
    assert cache_problems(config_of(*keys), wide, "cpu") != []
    assert cache_problems(config_of(*keys, "rollout.kv_cache_dtype=int8"), wide, "cpu") == []


def test_a_run_has_room_for_the_model_it_saves(monkeypatch):
    needed = 4 * TINY.num_params
    monkeypatch.setattr(start_rules, "free_disk", lambda folder: (needed - 1, "/disk"))
    (problem,) = disk_problems(config_of("fileroot=/disk/runs"), TINY, "cpu")
    assert problem.where == "fileroot = /disk/runs" and "and /disk has" in problem.rule
    assert disk_problems(config_of(), TINY, "cuda") == []  # half the bytes
    monkeypatch.setattr(start_rules, "free_disk", lambda folder: (needed, "/disk"))
    assert disk_problems(config_of(), TINY, "cpu") == []


@pytest.mark.parametrize(
    ("command", "words", "is_refused"),
    [
        ("train", ["reward.fn=exact_match"], True),
        ("train", ["reward.fn=exact_match", "actor.lora.rank=1"], False),
        ("train", ["allocation_mode=embedded:d1", "only=rollout"], False),
        *((command, [], True) for command in ("sft", "pretrain", "dpo", "reward-model")),
        ("sft", ["actor.lora.rank=1"], False),
    ],
)
def test_every_run_that_saves_a_model_needs_room_for_it(
    monkeypatch, tmp_path, command, words, is_refused
):
    folder = write_model(tmp_path / "m")
    monkeypatch.setattr(start_rules, "free_disk", lambda folder: (1, "/disk"))
    config = config_of(f"actor.path={folder}", *words)
    found = start_rules.RULES.problems(config, start_facts("cpu", command))
    assert any("the saved model takes" in one.rule for one in found) == is_refused, found


def write_model(folder, **changes):
    hf = {
        "model_type": "qwen3",
        "vocab_size": 10,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "intermediate_size": 8,
        "max_position_embeddings": 1000,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf | changes))
    return folder


def test_families_without_a_file_are_refused_as_at_the_start(tmp_path):
    folder = write_model(tmp_path / "m", model_type="olmo9")
    problem = no_such_family("olmo9", known_families())
    for command in ("plan", "train", "sft"):
        assert check_layout(config_of(f"actor.path={folder}"), command) == [problem]
    own = config_of(f"actor.path={folder}", "model_files=[mine.py:SPEC]")
    assert problem not in check_layout(own, "train")
    fsdp = [f"actor.path={folder}", "allocation_mode=embedded:d1|fsdp:d1"]
    for command in ("train", "sft"):
        assert check_layout(config_of(*fsdp), command) == []


def test_every_model_file_is_counted():
    assert {"llama", "qwen2", "qwen3", "qwen3_moe"} <= set(known_families())
    assert not is_known("decoder") and not is_known("../core/dims")


@pytest.mark.parametrize("key", ["ref", "teacher"])
def test_other_weights_of_the_actor_are_of_its_architecture(tmp_path, key):
    actor = write_model(tmp_path / "actor")
    given = {"ref": "algorithm.kl_coef=0.1", "teacher": "algorithm.name=distill"}[key]
    overrides = [f"actor.path={actor}", given, f"{key}.path={tmp_path / 'other'}"]
    write_model(tmp_path / "other", rope_theta=5e5, max_position_embeddings=50)
    for command in ("plan", "train"):
        (problem,) = check_layout(config_of(*overrides), command)
        assert problem.where == f"{key}.path = {tmp_path / 'other'}"
        assert problem.rule == "its rope_theta is 500000.0 and the actor's 10000.0"
    (tmp_path / "other" / "config.json").write_text((actor / "config.json").read_text())
    assert check_layout(config_of(*overrides), "train") == []


def test_held_out_answers_fit_the_positions_too(tmp_path):
    folder = write_model(tmp_path / "m")
    given = [f"actor.path={folder}", "valid_dataset.path=x", "evaluator.max_new_tokens=1000"]
    (problem,) = check_layout(config_of(*given))
    assert str(problem) == (
        "evaluator.max_new_tokens = 1000: the answer does not fit the model's 1000 positions; "
        "use at most 999."
    )


def test_stop_ids_are_in_the_vocabulary(tmp_path):
    folder = write_model(tmp_path / "m")
    (problem,) = check_layout(config_of(f"actor.path={folder}", "gconfig.stop_token_ids=[3, 10]"))
    assert problem.rule == "10 is outside the model's vocabulary of 10"


def test_plan_notes_what_a_run_refuses_and_what_it_does_not_read(no_gpu, monkeypatch):
    monkeypatch.setattr(start_rules, "installed", lambda package: None)
    words = ["plan", QWEN, "scheduler.type=ray", "actor.archon.layers_per_stage=[14, 14]"]
    shown = CliRunner().invoke(app, [*words, "allocation_mode=archon:d2", "--json"])
    notes = json.loads(shown.output)["notes"]
    assert (
        "a run rejects it today: scheduler.type = ray: needs the package ray, which is not "
        "installed; pip install 'pentad[ray]'."
    ) in notes
    assert (
        "actor.archon.layers_per_stage = [14, 14]: without effect, the layout has no pipeline (p1)"
    ) in notes
    said = "allocation_mode = archon:d2 has no sampler: planned for sft"
    assert f"{said} (train needs a reward)" in notes


def test_blocks_are_counted_as_the_sampler_makes_them():
    """config imports no engine, so the number stands in both."""

    assert sampler_settings().block_size == start_rules.BLOCK_TOKENS


@pytest.mark.parametrize(
    ("layout", "device", "kind", "is_refused"),
    [
        ("archon:d2", "auto", "cuda", True),
        ("archon:d2", "cuda:1", "cuda", False),
        ("archon:d2", "auto", "cpu", False),
        ("embedded:d1|archon:d1", "auto", "cuda", False),
    ],
)
def test_a_reward_model_beside_processes_has_a_device(layout, device, kind, is_refused):
    mode = layout if "|" in layout else f"embedded:d2|{layout}"
    keys = ["reward.fn=reward_model", "reward.model.path=m", f"reward.model.device={device}"]
    config = config_of(QWEN, f"allocation_mode={mode}", *keys)
    found = list(start_rules.a_reward_model_has_a_device(config, start_facts(kind)))
    said = "reward.model.device = auto: this run has processes on its GPUs"
    assert [str(one).startswith(said) for one in found] == [True] * is_refused


@pytest.mark.parametrize(
    ("path", "rule"),
    [
        ("verifiers:reverse-text?size=100", ""),
        ("rows.jsonl", ""),
        ("ro*.jsonl", ""),
        ("rows[1].jsonl", ""),
        ("/x/datasets--a--b/snapshots/0123456789012345678901234567890123456789/r*.parquet", ""),
        ("gone-*.jsonl", "no file fits this pattern"),
        ("gone.jsonl", "there is no such file or folder"),
    ],
)
def test_a_path_of_data_is_refused_if_a_start_would_find_nothing(path, rule, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("rows.jsonl", "rows[1].jsonl"):
        (tmp_path / name).touch()
    problem = data_path_problem("train_dataset.path", path)
    assert ("" if problem is None else problem.rule) == rule


def test_a_trainer_apart_does_not_miss_the_prompts():
    """They are read where its groups are sampled."""
    words = ["train_dataset.path=gone.jsonl", "valid_dataset.path=lost.jsonl"]
    (problem,) = absence_problems(config_of(*words, "only=train", "groups_from=x"))
    assert problem.where == "valid_dataset.path = lost.jsonl"
    assert len(absence_problems(config_of(*words))) == 2
