"""Runs with the backend `fsdp`: models without a model file train, and export what transformers
loads."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from sections import engine_settings
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from pentad.cli.main import app
from pentad.core.errors import UserError
from pentad.data.render import DataSource
from pentad.data.sft import open_sft
from pentad.data.tokenizer import load_tokenizer
from pentad.data.toy import write_model, write_task
from pentad.engine.engine import build_engine
from pentad.planner.prepare import prepare
from pentad.telemetry.steps import read_lines
from pentad.trainer.rank.learners import trained_dims
from pentad.trainer.sampling.evaluate import check_eval, run_eval
from pentad.trainer.sources.examples import run_sft
from pentad.trainer.sources.rollouts import run_train
from pentad.weights.hf import HfFolder
from pentad.weights.transfer import PairsReader

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": None,
}
FAMILIES = {
    "cohere": {"logit_scale": 0.5},
    "cohere2": {
        "logit_scale": 0.5,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma4_unified_text": {
        "final_logit_softcapping": 3.0,
        "global_head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
    },
    "gemma3_text": {"sliding_window": 8, "query_pre_attn_scalar": 9},
    "gemma4_text": {
        "final_logit_softcapping": 3.0,
        "hidden_size_per_layer_input": 8,
        "global_head_dim": 16,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 8,
    },
    "qwen3": {},
    "mamba": {},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "granitemoehybrid": {
        **{"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1},
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2},
        "layer_types": ["mamba", "attention"],
    },
    "qwen3_next": {
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6},
        **{"linear_value_head_dim": 5, "layer_types": ["linear_attention", "full_attention"]},
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        "shared_expert_intermediate_size": 16,
    },
}


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """Folders of several families with the toy's tokenizer, and its data."""
    folder = tmp_path_factory.mktemp("task")
    write_task(folder, seed=5, num_train=16, num_sft=32, num_valid=2)
    for family, more in FAMILIES.items():
        write_model(folder / family)
        toy = json.loads((folder / family / "config.json").read_text())
        given = {**SMALL, **more, "vocab_size": toy["vocab_size"]}
        given |= {"vocab_size_per_layer_input": toy["vocab_size"]}
        given |= {"eos_token_id": toy["eos_token_id"], "pad_token_id": 0}
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **given))
        model.float().save_pretrained(folder / family)
    return folder


def sft(task, root, family, *overrides):
    settings = [
        f"fileroot={root}",
        f"trial_name={family}",
        f"actor.path={task / family}",
        f"train_dataset.path={task / 'sft.jsonl'}",
        "train_dataset.batch_size=8",
        "actor.optimizer.lr=1e-2",
        "total_train_steps=3",
        *overrides,
    ]
    config, notes = prepare(None, settings, "sft")
    return config, run_sft(config, notes, device="cpu")


@pytest.mark.parametrize("family", ["cohere", "gemma3_text"])
def test_sft_trains_a_model_without_a_model_file(task, tmp_path, family):
    more = ["total_train_epochs=4", "total_train_steps=12"]
    config, summary = sft(task, tmp_path, family, "allocation_mode=fsdp:d1", *more)
    losses = [record["loss"] for record in read_lines(summary.records / "steps.jsonl")]
    assert losses[-1] < losses[0] - 0.2
    model, info = AutoModelForCausalLM.from_pretrained(
        summary.model, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    tokenizer = load_tokenizer(str(summary.model))
    data = open_sft(DataSource(data=config.train_dataset, seed=config.seed, room=64), tokenizer)
    # The export's own loss on the data went down too: it is the model that was trained.
    before = AutoModelForCausalLM.from_pretrained(task / family, dtype=torch.float32)
    rows = data.batch(0, 16)
    assert mean_loss(model, rows) < mean_loss(before, rows) - 0.1


def mean_loss(model, rows) -> float:
    total = count = 0.0
    for row in rows:
        with torch.no_grad():
            logp = torch.log_softmax(model(row.ids[None]).logits[0].float(), -1)
        taken = logp[:-1].gather(1, row.ids[1:, None])[:, 0]
        total -= float((taken * row.columns["weights"][1:]).sum())
        count += float(row.columns["weights"].sum())
    return total / count


@pytest.mark.parametrize("family", ["qwen3", "gemma4_text"])
def test_both_backends_give_the_same_run(task, tmp_path, family):
    records = []
    for backend in ("archon", "fsdp"):
        _, summary = sft(task, tmp_path / backend, family, f"allocation_mode={backend}:d1")
        records.append(read_lines(summary.records / "steps.jsonl"))
    for ours, theirs in zip(*records, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)


def rl(task, root, family, *overrides):
    settings = [
        f"fileroot={root}",
        f"trial_name={family}",
        f"actor.path={task / family}",
        f"train_dataset.path={task / 'train.jsonl'}",
        "train_dataset.batch_size=4",
        "gconfig.n_samples=2",
        "gconfig.max_new_tokens=6",
        "reward.fn=exact_match",
        "total_train_steps=1",
        *overrides,
    ]
    config, notes = prepare(None, settings, "train")
    return run_train(config, notes, device="cpu")


@pytest.mark.parametrize(
    ("family", "backend"), [("qwen3", "fsdp"), ("qwen3_next", "fsdp"), ("gemma4_text", "archon")]
)
def test_rl_samples_from_the_model_file_what_a_backend_trains(task, tmp_path, family, backend):
    """The self-test at the start compares both models' log-probs and the published weights."""
    mode = f"allocation_mode=embedded:d1|{backend}:d1"
    assert rl(task, tmp_path, family, mode).num_steps == 1


APART = "allocation_mode=embedded:d1+fsdp:d1"


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("cohere", ["allocation_mode=embedded:d1|fsdp:d1"]),
        ("cohere2", [APART, "mode=async", "max_staleness=1"]),
        ("phimoe", ["allocation_mode=embedded:d1|fsdp:d1", "offload_rollout=true"]),
        ("gemma4_unified_text", [APART, "mode=hybrid", "max_staleness=0"]),
        ("lfm2", ["allocation_mode=embedded:d1|fsdp:d1", "offload_rollout=true"]),
        ("granitemoehybrid", [APART, "mode=async", "max_staleness=1", "gconfig.n_samples=4"]),
    ],
)
def test_rl_of_a_family_that_only_transformers_has_needs_no_server(
    task, tmp_path, family, overrides
):
    """In the trainer's process and in one of its own: what was sampled, with weights that were
    published, has the log-probs that the trainer gives it."""
    more = ["total_train_steps=2", "actor.optimizer.lr=1e-2", *overrides]
    if APART in overrides:  # on a CPU one process is the default
        more.append("scheduler.processes=separate")
    (tmp_path / "reward.py").write_text("def parity(ids):\n    return sum(ids) % 3 - 1")
    summary = rl(task, tmp_path, family, *more, f"reward.fn={tmp_path}/reward.py:parity")
    records = read_lines(summary.records / "steps.jsonl")
    assert len(records) == 2 and all(record["grad_norm"] > 0.01 for record in records)
    assert (summary.records / "servers" / "rollout-0.log").exists() is (APART in overrides)
    is_exact = "max_staleness=1" not in overrides
    for record in records if is_exact else records[:1]:
        assert record["rl"]["logprob_diff_max"] < 1e-4, record["rl"]
    # Weights that were not installed would show.
    before, after = HfFolder(task / family), HfFolder(summary.model)
    assert set(after.infos) == set(before.infos)
    name = "model.layers.1.self_attn.q_proj.weight"
    box = tuple((0, size) for size in before.infos[name].shape)
    assert float((after.read(name, box) - before.read(name, box)).abs().max()) > 1e-3


FSDP_LORA = ("allocation_mode=fsdp:d1", "actor.lora.rank=8")


def test_an_adapter_of_a_model_without_a_model_file_is_one_that_peft_loads(task, tmp_path):
    peft = pytest.importorskip("peft")
    more = ["total_train_epochs=4", "total_train_steps=12"]
    _, summary = sft(task, tmp_path, "cohere", *FSDP_LORA, *more)
    losses = [record["loss"] for record in read_lines(summary.records / "steps.jsonl")]
    assert losses[-1] < losses[0] - 0.1
    base = AutoModelForCausalLM.from_pretrained(task / "cohere", dtype=torch.float32)
    ids = torch.arange(1, 12)[None]
    before = base(ids).logits
    loaded = peft.PeftModel.from_pretrained(base, summary.model)
    logits = loaded(input_ids=ids).logits
    assert (logits - before).abs().max() > 0.1
    told = ["convert", str(summary.model), str(tmp_path / "merged"), "--merge", "--dtype=float32"]
    said = CliRunner().invoke(app, told)
    assert said.exit_code == 0, said.output
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(merged(ids).logits, logits, rtol=1e-4, atol=1e-4)
    # A run that starts from it goes on where it was, and one of another rank is refused.
    start = f"actor.lora.init_path={summary.model}"
    _, warm = sft(task, tmp_path / "warm", "cohere", *FSDP_LORA, start)
    assert read_lines(warm.records / "steps.jsonl")[0]["loss"] < losses[0] - 0.1
    with pytest.raises(UserError, match="its rank: 8, that of actor.lora: 4"):
        sft(task, tmp_path, "cohere", FSDP_LORA[0], "actor.lora.rank=4", start)


def test_a_damaged_factor_to_start_from_is_refused(task, tmp_path):
    _, summary = sft(task, tmp_path, "cohere", *FSDP_LORA)
    file = summary.model / "adapter_model.safetensors"
    factors = load_file(file)
    name = next(iter(factors))
    save_file(factors | {name: torch.full_like(factors[name], float("nan"))}, file)
    with pytest.raises(UserError, match="holds NaN or infinite numbers"):
        sft(task, tmp_path, "cohere", *FSDP_LORA, f"actor.lora.init_path={summary.model}")


def test_targets_are_asked_of_the_model_before_anything_is_started(task, tmp_path):
    with pytest.raises(UserError, match="cohere of transformers has no c_fc; use all-linear"):
        sft(task, tmp_path, "cohere", *FSDP_LORA, "actor.lora.targets=[q,c_fc]")
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("family", ["qwen3", "cohere"])
def test_a_sampler_draws_with_the_adapter_that_transformers_module_trains(task, tmp_path, family):
    """In one process, and with a learner of two ranks: the same run. The self-test at the start
    moves B; the reference is the frozen weights. The sampler of cohere runs its modules too."""
    more = ["actor.lora.rank=8", "algorithm.kl_coef=0.01", "actor.optimizer.lr=1e-2"]
    more += ["reward.fn=sort_digits", "gconfig.n_samples=4", "total_train_steps=2"]
    norms = []
    for layout in ("embedded:d1|fsdp:d1", "embedded:d1|fsdp:d2"):
        root = tmp_path / layout[-1]
        summary = rl(task, root, family, f"allocation_mode={layout}", *more)
        first, last = read_lines(summary.records / "steps.jsonl")
        assert first["rl"]["adapter_effect"] == 0.0, "B is 0"
        mine, sampler = last["rl"]["adapter_effect"], last["rl"]["adapter_effect_sampler"]
        assert mine > 1e-4 and sampler == pytest.approx(mine, rel=1e-2)
        assert (summary.model / "adapter_model.safetensors").is_file()
        norms.append([first["grad_norm"], last["grad_norm"]])
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_servers_take_weights_of_models_without_a_model_file(task):
    """Their names are those of the folder, each once."""
    engine = build_engine(task / "cohere", engine_settings(total_steps=None), backend="fsdp")
    pairs = list(engine.iter_weights())
    PairsReader(pairs)
    assert {name for name, _ in pairs} == set(HfFolder(task / "cohere").infos)
    with pytest.raises(UserError, match="given twice"):
        PairsReader([*pairs, pairs[0]])


def test_refusals_come_before_anything_is_started(task, tmp_path):
    with pytest.raises(UserError, match="is not a body followed by a head"):
        sft(task, tmp_path, "mamba", "allocation_mode=fsdp:d1", "actor.init_from_scratch=true")
    assert not (tmp_path / "logs").exists()
    with pytest.raises(UserError, match=r"strict = true.*fsdp:d1 trains without one"):
        rl(task, tmp_path, "qwen3", "allocation_mode=embedded:d1|fsdp:d1", "strict=true")
    with pytest.raises(UserError, match="or train it with the backend fsdp"):
        sft(task, tmp_path, "cohere")


def test_mfu_is_not_guessed_for_an_unknown_architecture(task):
    overrides = [f"actor.path={task / 'cohere'}", f"train_dataset.path={task / 'sft.jsonl'}"]
    config, _ = prepare(None, [*overrides, "allocation_mode=fsdp:d1"], "sft")
    assert not trained_dims(config, str(task / "cohere")).is_whole
    assert trained_dims(config, str(task / "qwen3")).is_whole


def test_plan_says_where_it_cannot_count(task):
    shared = [f"train_dataset.path={task / 'sft.jsonl'}", "gconfig.max_new_tokens=8"]
    args = ["plan", f"actor.path={task / 'cohere'}", "allocation_mode=fsdp:d2t2", *shared]
    said = CliRunner().invoke(app, args)
    assert said.exit_code == 0, said.output
    assert "actor: fsdp:d2t2 on 0-3" in said.output
    assert "memory unknown for this architecture (model_type = cohere)" in said.output
    told = json.loads(CliRunner().invoke(app, [*args, "--json"]).stdout)
    assert told["memory"] is None
    args[1] = f"actor.path={task / 'qwen3'}"
    assert "memory unknown" not in CliRunner().invoke(app, args).output


@pytest.mark.parametrize("allocation", ["fsdp:d1", "embedded:d1|fsdp:d1"])
def test_plan_rejects_a_type_with_transformers_reason(task, allocation):
    shared = [f"train_dataset.path={task / 'sft.jsonl'}", "gconfig.max_new_tokens=8"]
    args = ["plan", f"actor.path={task / 'mamba'}", f"allocation_mode={allocation}", *shared]
    said = CliRunner().invoke(app, args)
    assert said.exit_code == 2, said.output
    reason = "model_type = mamba: its forward is not a body followed by a head"
    assert said.output.count(reason) == 1


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("allocation_mode=fsdp:d1", None),
        ("allocation_mode=embedded:d1|fsdp:d1", None),
        ("allocation_mode=embedded:d1|fsdp:d1 strict=true", "strict = true"),
        ("allocation_mode=fsdp:d1t2", "only d and e can be used"),
        ("actor.lora.rank=2", "actor.lora: layers of lfm2 use some of their matrices"),
    ],
)
def test_plan_rejects_what_layers_with_state_lack(task, given, reason):
    shared = [f"train_dataset.path={task / 'sft.jsonl'}", "gconfig.max_new_tokens=8"]
    args = [f"actor.path={task / 'lfm2'}", "allocation_mode=fsdp:d1", *shared, *given.split()]
    said = CliRunner().invoke(app, ["plan", *args])
    assert said.exit_code == (2 if reason else 0), said.output
    assert reason is None or reason in said.output


def test_layers_with_state_are_not_compiled_unasked(task):
    args = [f"actor.path={task / 'lfm2'}", f"train_dataset.path={task / 'sft.jsonl'}"]
    args += ["allocation_mode=fsdp:d1", "gconfig.max_new_tokens=8", "--gpu-memory=80"]
    assert CliRunner().invoke(app, ["plan", *args]).exit_code == 0
    said = CliRunner().invoke(app, ["plan", *args, "actor.archon.enable_compile=true"])
    assert said.exit_code == 2, said.output
    assert "enable_compile = true: layers of lfm2 carry state" in said.output


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("allocation_mode=vllm:t4|fsdp:d4", None),
        ("allocation_mode=vllm:t4|fsdp:d2t2", "fsdp splits them only by d"),
        ("actor.lora.rank=2", "actor.lora: layers of qwen3_next use some of their matrices"),
        ("actor.archon.enable_compile=true", "fsdp does not compile them"),
    ],
)
def test_rules_know_what_fsdp_does_with_gated_delta_nets(given, reason):
    path = "actor.path=Qwen/Qwen3-Next-80B-A3B-Instruct"
    more = [path, "allocation_mode=vllm:t4|fsdp:d4", given]
    text = ""
    try:
        prepare(None, more, "plan", gpu_memory=1000.0)
    except UserError as error:
        text = str(error)
    assert reason in text if reason else not text


def test_eval_runs_a_model_without_a_model_file(task):
    settings = [f"actor.path={task / 'cohere'}", f"valid_dataset.path={task / 'valid.jsonl'}"]
    more = ["evaluator.max_new_tokens=4", "reward.fn=exact_match"]
    config, _ = prepare(None, [*settings, *more], "eval")
    found = run_eval(config, check_eval(config), device="cpu")
    assert found.result.as_record()["num_failed"] == 0
