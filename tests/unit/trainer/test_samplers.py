"""Which servers a config asks for, and what is refused before any of them starts."""

import subprocess
import sys

import pytest
import torch
from rule_checks import start_facts

from pentad.cli.plan import as_dict
from pentad.config.resolve import with_absolute_paths
from pentad.config.rules.check import check
from pentad.config.rules.rule import RunFacts
from pentad.config.schema import Config
from pentad.core.dims import ModelDims
from pentad.core.errors import RunError, UserError
from pentad.core.layout import parse_allocation
from pentad.data.toy import write_model
from pentad.planner.figures import Device
from pentad.planner.plan import build_plan
from pentad.planner.prepare import prepare
from pentad.samplers import sglang, vllm
from pentad.samplers.process import server_environment, server_python
from pentad.trainer.processes import supervisor
from pentad.trainer.processes.ranks import run_over_ranks
from pentad.trainer.rank.service import LearnerService
from pentad.trainer.sampling.samplers import (
    server_problems,
    server_settings,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DIMS = ModelDims(
    family="qwen3",
    vocab_size=64,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=48,
    qk_norm=True,
    tie_embeddings=True,
    max_position=128,
)


@pytest.fixture
def config(tmp_path):
    write_model(tmp_path / "model")
    (tmp_path / "data.jsonl").write_text("{}\n")

    def make(*overrides):
        given = [
            f"actor.path={tmp_path / 'model'}",
            f"train_dataset.path={tmp_path / 'data.jsonl'}",
            "actor.init_from_scratch=true",
            "reward.fn=numeric",
            "gconfig.max_new_tokens=16",
            "cluster.n_gpus_per_node=8",
            "cluster.allow_idle=true",
        ]
        return prepare(None, [*given, *overrides], "train")[0]

    return make


def refusal(make, *overrides):
    with pytest.raises(UserError) as caught:
        make(*overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["rollout.server.python=x"],
            "rollout.server: allocation_mode = embedded:d8|archon:d8 samples without a server",
        ),
        (
            ["allocation_mode=vllm:d2+archon:d1", "rollout.server.addresses=[http://a:1]"],
            "has 2 replicas, each at its own address; give 2.",
        ),
        (
            ["allocation_mode=vllm:d1+archon:d1", "rollout.server.addresses=[node7]"],
            "rollout.server.addresses = ['node7']: node7 is not an address http://HOST:PORT",
        ),
        (
            [
                "allocation_mode=vllm:d2+archon:d1",
                "rollout.server.addresses=[http://a:1,http://a:1]",
            ],
            "two replicas have the same address",
        ),
        (
            ["allocation_mode=vllm:d1+archon:d1", "rollout.server.weight_transport=ipc"],
            "on the training GPU, but allocation_mode = vllm:d1+archon:d1 separates them",
        ),
    ],
)
def test_keys_that_do_not_go_together_are_refused(config, overrides, sentence):
    assert sentence in refusal(config, *overrides)


def test_a_server_that_is_not_installed_is_refused_before_the_run(config, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    (said,) = server_problems(config("allocation_mode=sglang:d1|archon:d1"), start_facts("cpu"))
    assert str(said) == (
        "rollout.server.python = null: there is no sglang command on the path, and no sglang "
        "beside Pentad; install sglang in its own environment and give its folder."
    )
    named = config("allocation_mode=vllm:d1|archon:d1", f"rollout.server.python={sys.executable}")
    (said,) = server_problems(named, start_facts("cpu"))
    assert str(said).startswith(f"rollout.server.python = {sys.executable}: has no vllm")
    gone = config("allocation_mode=vllm:d1|archon:d1", f"rollout.server.python={tmp_path}")
    (said,) = server_problems(gone, start_facts("cpu"))
    assert f"there is no interpreter {tmp_path}/bin/python" in str(said)


def test_more_gpus_than_there_are_is_refused(config):
    python = f"rollout.server.python={sys.executable}"
    asked = config("allocation_mode=vllm:d2t2+archon:d1", python)
    said = server_problems(asked, start_facts("cuda", num_gpus=3))
    assert "needs 5 GPUs on this machine, which has 3" in str(said[0])


def test_what_a_sampler_lacks_is_held_against_what_the_run_needs(config):
    asked = config("gconfig.stop=[END]", "offload_rollout=true")
    facts = RunFacts(command="train", samplers={"vllm-0": ("pause", "sleep", "stop_strings")})
    assert check(asked, facts, stage="open") == []
    facts = RunFacts(command="train", samplers={"vllm-0": ("pause",)})
    said = [str(problem) for problem in check(asked, facts, stage="open")]
    assert said == [
        "offload_rollout = true: vllm-0 cannot sleep; leave it out.",
        "gconfig.stop = ['END']: vllm-0 cannot stop strings; use stop_token_ids.",
    ]


@pytest.mark.parametrize(
    ("allocation", "devices", "share"),
    [
        ("vllm:d1|archon:d1", [(0,)], 0.4),
        ("vllm:d2+archon:d1", [(1,), (2,)], None),
        ("vllm:d2t2+archon:d1", [(1, 2), (3, 4)], None),
        ("vllm:d2t2|archon:d2", [(0, 1), (2, 3)], 0.4),
    ],
)
def test_training_has_the_first_gpus_and_servers_those_after(config, allocation, devices, share):
    asked = config(f"allocation_mode={allocation}")
    made = [server_settings(asked, DIMS, CUDA, index) for index in range(len(devices))]
    assert [settings.devices for settings in made] == devices
    assert {settings.server.gpu_memory_share for settings in made} == {share}


@pytest.mark.parametrize(
    ("allocation", "more"),
    [
        ("vllm:d2t2|archon:d2", []),
        ("vllm:d2t2|archon:d4", []),
        ("sglang:d2+archon:d1", []),
        ("vllm:d2t2+archon:d4", ["only=rollout"]),
    ],
)
def test_servers_start_on_the_gpus_that_plan_draws(config, allocation, more):
    asked = config(f"allocation_mode={allocation}", *more)
    plan = build_plan(asked, Device("cuda", 80 * 2**30, "given", False))
    drawn = {one["name"]: one["devices"] for one in as_dict(plan, [])["processes"]}
    count = parse_allocation(allocation).find("rollout").size("d")
    backend = allocation.partition(":")[0]
    made = {f"{backend}-{i}": server_settings(asked, DIMS, CUDA, i).devices for i in range(count)}
    assert made == {name: drawn[name] for name in made}


def test_ranks_may_work_in_another_folder(config, tmp_path, monkeypatch):
    """The config of the run itself keeps its words: a run that goes on compares them."""
    monkeypatch.chdir(tmp_path)
    asked = config(
        *("actor.path=model", "train_dataset.path=data.jsonl", "fileroot=runs", "user=me"),
        *("allocation_mode=embedded:d1+archon:d2", "cluster.n_gpus_per_node=null"),
    )
    started = []

    def no_group(runtime, specs, **given):
        started.extend(specs)
        raise RunError("none is started")

    monkeypatch.setattr(supervisor, "RankGroup", no_group)
    with pytest.raises(RunError, match="none is started"):
        run_over_ranks(lambda *_: None, LearnerService, asked, [], False, "cpu")
    assert [spec.log for spec in started] == [
        tmp_path / "runs/logs/me/default" / asked.trial_name / f"ranks/rank-{rank}.log"
        for rank in range(2)
    ]
    for spec in started:
        found = spec.payload["given"]["config"]
        assert found["fileroot"] == str(tmp_path / "runs")
        assert found["actor"]["path"] == str(tmp_path / "model")
        assert found["train_dataset"]["path"] == str(tmp_path / "data.jsonl")
        assert found["ref"]["path"] is None
    assert asked.fileroot == "runs" and asked.actor.path == "model"


def test_functions_in_files_are_found_from_another_folder(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = config().model_dump(mode="json")
    values["model_files"] = ["family.py:SPEC", "package.module:SPEC"]
    values["reward"]["fn"] = ["sub/mine.py:judge", "exact_match"]
    values["rollout"]["workflow"] = "flows.py:Flow"
    found = with_absolute_paths(Config.model_validate(values))
    assert found.model_files == (f"{tmp_path}/family.py:SPEC", "package.module:SPEC")
    assert found.reward.fn == (f"{tmp_path}/sub/mine.py:judge", "exact_match")
    assert found.rollout.workflow == f"{tmp_path}/flows.py:Flow"


def test_devices_are_named_as_the_machine_names_them(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    assert server_environment((1, 2))["CUDA_VISIBLE_DEVICES"] == "6,7"
    monkeypatch.setenv("PYTHONPATH", "ours")
    assert "PYTHONPATH" not in server_environment(())


def pairs(words):
    return dict(zip(words, words[1:], strict=False))


def test_the_command_line_says_what_the_config_says(config, monkeypatch):
    asked = config(
        "allocation_mode=vllm:d1t2+archon:d1",
        "rollout.max_running=32",
        "rollout.kv_cache_gb=2",
        "rollout.server.args=[--seed,5]",
    )
    settings = server_settings(asked, DIMS, CUDA, 0)
    told = pairs(vllm.flags(settings, 8000, (0, 32, 0)))
    assert told["--tensor-parallel-size"] == "2" and told["--max-num-seqs"] == "32"
    assert told["--max-model-len"] == "128" and told["--dtype"] == "bfloat16"
    assert told["--kv-cache-memory-bytes"] == str(2 * 2**30) and told["--seed"] == "5"
    assert told["--host"] == "127.0.0.1" and told["--logprobs-mode"] == "processed_logprobs"
    assert "--enable-sleep-mode" not in told and "--enforce-eager" not in told
    assert told["--max-num-batched-tokens"] == "8192"
    more = settings.rollout.model_copy(update={"max_running": 10000})
    many = pairs(vllm.flags(settings.model_copy(update={"rollout": more}), 8000, (0, 32, 0)))
    assert many["--max-num-batched-tokens"] == "10000"  # vLLM takes no fewer
    other = pairs(sglang.flags(settings.model_copy(update={"can_sleep": True}), 8000))
    assert other["--tp-size"] == "2" and other["--max-running-requests"] == "32"
    assert "--enable-memory-saver" in other
    token = 2 * DIMS.num_layers * DIMS.num_kv_heads * DIMS.head_dim * 2  # keys and values, bf16
    assert other["--max-total-tokens"] == str(2 * 2 * 2**30 // token)  # on two GPUs


def test_the_environment_of_the_command_on_the_path_is_taken(monkeypatch, tmp_path):
    (tmp_path / "env" / "bin").mkdir(parents=True)
    script = tmp_path / "env" / "bin" / "vllm"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent))
    assert server_python(None, "vllm") == str(tmp_path / "env" / "bin" / "python")


def test_a_process_that_samples_starts_without_transformers():
    """It takes as long to import as everything else together."""
    code = "import sys, pentad.samplers.remote; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
