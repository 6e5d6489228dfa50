"""Plan and start agree: a recipe that `plan` accepts starts, and what a start refuses `plan` says.

A start here is everything before a process is made (the rules of the command, the preflight) and
what each rank's engine refuses by its settings, layout and model.
"""

import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pentad.config.load import read_config
from pentad.config.resolve import resolve
from pentad.config.rules.check import noted as refused_later
from pentad.core.errors import UserError
from pentad.core.fit import check_fit
from pentad.data.toy import write_byte_model
from pentad.engine.held import check_balance
from pentad.engine.predictor import check_strict
from pentad.engine.section import EngineSettings
from pentad.models.families import dims_of
from pentad.parallel.pipeline import plan_pipeline
from pentad.planner.prepare import prepare
from pentad.trainer.preflight import check_train
from pentad.trainer.rank.example_service import SftService
from pentad.trainer.sources.examples import check_examples

SIZES = st.sampled_from([1, 1, 1, 2, 2, 3, 4, 8, 64])
ONE_OF = {
    "actor.archon.pp_schedule": ["1F1B", "I1F1B", "IZB", "ZBV"],
    "actor.archon.stages_per_rank": [1, 2, 3],
    "actor.archon.layers_per_stage": [[1, 1], [2, 2], [1, 1, 1, 1], [1, 3], [4]],
    "actor.archon.enable_compile": ["auto", True, False],
    "actor.archon.ac_mode": ["auto", "none", "selective", "full", "memory_budget"],
    "actor.archon.ac_selective": ["op", 1, 2],
    "actor.archon.ac_debug": [True],
    "actor.archon.keep_logits": [True, False],
    "actor.archon.cuda_graphs": ["auto", True, False],
    "actor.archon.offload_params": [True],
    "actor.archon.reshard_after_forward_policy": ["default", "always", "never"],
    "actor.archon.dp_replicate": [1, 2, 3],
    "actor.archon.moe_aux_loss_coef": [0, 0.01],
    "actor.archon.moe_bias_rate": [0, 0.01],
    "actor.gradient_checkpointing": [True, False],
    "actor.pad_to_maximum": [True, False],
    "actor.mb_spec.n_mbs": [1, 2, 3, 4, 8],
    "critic.archon.pp_schedule": ["1F1B", "ZBV"],
    "critic.archon.ac_mode": ["full", "memory_budget"],
    "algorithm.name": ["grpo", "ppo", "reinforce"],
    "algorithm.kl_coef": [0, 0.1],
    "strict": [True],
    "rollout.replay_routes": [True],
    "rollout.kv_cache_gb": [1e-9, 1e-4, 0.5],
    "rollout.server.weight_transport": ["disk", "ipc"],
    "offload_rollout": [True],
    "offload_train": [True],
    "mode": ["colocate", "hybrid", "async"],
    "max_staleness": [0, 1],
    "scheduler.type": ["local", "ray"],
    "gconfig.max_new_tokens": [8, 10**6],
    "gconfig.stop_token_ids": [[5], [10**6]],
    "updates_per_batch": [1, 2, 3],
}


MAX_WORLD = 64 * 64
"""Each rank has a place in the run's topology; what a size does is said for any number of ranks."""


def drawn_axes(draw, letters: str, **given: int) -> dict[str, int]:
    """A size of each axis, 1 where the layout would be beyond the largest."""
    axes = dict(given)
    for letter in letters:
        size = draw(SIZES)
        axes[letter] = size if size * math.prod(axes.values()) <= MAX_WORLD else 1
    return axes


def text_of(axes: dict[str, int]) -> str:
    return "".join(f"{letter}{size}" for letter, size in axes.items())


@st.composite
def training(draw):
    letters = "".join(letter for letter in draw(st.permutations("dptce")) if draw(st.booleans()))
    sizes = text_of(drawn_axes(draw, letters))
    if draw(st.integers(0, 3)) == 0:
        axes = drawn_axes(draw, "dptc")
        ffn = drawn_axes(draw, "dte", p=axes["p"])
        sizes = f"(attn:{text_of(axes)}|ffn:{text_of(ffn)})"
    return f"{draw(st.sampled_from(['archon', 'archon', 'archon', 'fsdp']))}:{sizes or 'd1'}"


@st.composite
def recipes(draw):
    """Overrides without those that name files."""
    chosen = draw(st.lists(st.sampled_from(sorted(ONE_OF)), unique=True, max_size=6))
    overrides = [f"{key}={json.dumps(draw(st.sampled_from(ONE_OF[key])))}" for key in chosen]
    sampler = draw(st.sampled_from(["", "embedded:d1", "embedded:d2", "vllm:d1", "sglang:d1t2"]))
    join = draw(st.sampled_from("|+"))
    layout = draw(training())
    allocation = f"{sampler}{join}{layout}" if sampler else layout
    if draw(st.booleans()) or not sampler:
        overrides.append(f"allocation_mode={allocation}")
        if "d1t2" in sampler or "vllm" in sampler:
            overrides.append("rollout.server.addresses=[http://127.0.0.1:1]")
    return overrides


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_byte_model(folder / "dense")
    write_byte_model(folder / "mixture")
    for name, more in {
        "dense": {"num_hidden_layers": 4},
        "mixture": {
            "model_type": "qwen3_moe",
            "num_hidden_layers": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
    }.items():
        file = folder / name / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | more))
    row = {"prompt": "1 + 1?", "answer": "2", "response": "2"}
    (folder / "data.jsonl").write_text((json.dumps(row) + "\n") * 4)
    return folder


def said(call) -> list[str]:
    return prepared(call)[1]


def prepared(call) -> tuple:
    """What it returns, and the problems that it raises."""
    try:
        return call(), []
    except UserError as error:
        return None, [str(problem) for problem in error.problems]


def start(overrides: list[str], command: str, device: torch.device) -> list[str]:
    """What a run says on its way to its ranks, and what they would."""
    given, found = prepared(lambda: prepare(None, overrides, command))
    if found:
        return found
    config, _ = given
    check = check_train if command == "train" else partial(check_examples, SftService)
    return said(lambda: check(config, device)) or said(lambda: engines(config, command, device))


def engines(config, command: str, device: torch.device) -> None:
    """What an engine refuses, without one."""
    has_critic = command == "train" and config.algorithm.name == "ppo"
    for role in ("actor", "critic") if has_critic else ("actor",):
        model = config.critic if role == "critic" else config.actor
        layout, dims = config.layout(role), dims_of(model.path)
        strict = config.strict and command == "train" and role == "actor"
        made = EngineSettings(model=model, strict=strict).settled(device.type, layout)
        check_fit(layout, dims)
        plan_pipeline(dims, layout, made.model)
        if config.component(role).backend != "fsdp":
            check_balance(made.model.archon, dims)
        if made.strict:
            check_strict(layout, dims)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    overrides=recipes(),
    model=st.sampled_from(["dense", "mixture"]),
    kind=st.sampled_from(["cpu", "cuda"]),
)
def test_plan_and_start_say_the_same(models, monkeypatch, overrides, model, kind):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 10**6)
    files = [
        f"actor.path={models / model}",
        "actor.init_from_scratch=true",
        f"train_dataset.path={models / 'data.jsonl'}",
        "train_dataset.batch_size=4",
        "reward.fn=exact_match",
        *(["cluster.n_gpus_per_node=1000000", "cluster.allow_idle=true"] if kind == "cuda" else []),
    ]
    if not any(text.startswith("gconfig.max_new_tokens") for text in overrides):
        files.append("gconfig.max_new_tokens=8")
    config, _ = resolve(read_config(None, [*files, *overrides]).config)
    command = "train" if config.has_sampler else "sft"
    planned = said(lambda: prepare(None, [*files, *overrides], "plan"))
    noted = [str(p) for p in refused_later(config)]
    started = start([*files, *overrides], command, torch.device(kind))
    assert set(started) <= {*planned, *noted}
    if started == []:
        assert planned == []


def test_the_recipes_drawn_reach_both_ends(models):
    """The property holds for what is accepted and for what is refused: both occur."""
    base = [f"actor.path={models / 'mixture'}", f"train_dataset.path={models / 'data.jsonl'}"]
    base += ["actor.init_from_scratch=true", "train_dataset.batch_size=4"]
    accepted = [*base, "allocation_mode=archon:d2p2t2e4", "actor.archon.pp_schedule=1F1B"]
    assert start(accepted, "sft", torch.device("cpu")) == []
    refused = [*base, "allocation_mode=archon:d2p2t2e4", "actor.archon.ac_mode=memory_budget"]
    (sentence,) = start(refused, "sft", torch.device("cpu"))
    assert sentence in said(lambda: prepare(None, refused, "plan"))
    assert Path(models / "mixture" / "config.json").is_file()
