"""Runs over several ranks: the numbers of one process, one voice, and one end for all."""

import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from role_processes import role_processes
from run_cases import config_of, run_harmed, run_ranks, settings_of

from pentad.core.errors import RunError
from pentad.data.toy import write_model, write_task
from pentad.models.conversion import Conversion, convert
from pentad.telemetry.steps import read_lines
from pentad.trainer.sources.examples import run_sft
from pentad.trainer.sources.rollouts import run_train
from pentad.weights.hf import HfFolder
from pentad.weights.regions import full_box

pytestmark = pytest.mark.dist

CLOSE = 1e-5
"""Ranks add up in another order: float32 sums differ in the last digits, over three steps."""


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    write_model(folder / "model")
    write_task(folder, seed=5, num_train=16, num_sft=16, num_valid=2)
    return folder


@pytest.fixture(scope="module")
def alone(task, tmp_path_factory):
    """The truth: sft and PPO in one process."""
    root = tmp_path_factory.mktemp("alone")
    torch.set_num_threads(1)
    config, notes = config_of(task, root, "sft", "sft", "total_train_steps=3")
    ppo = [*PPO, "allocation_mode=embedded:d1|archon:d1"]
    other, more = config_of(task, root, "train", "ppo", *ppo)
    return {
        "sft": run_sft(config, notes, device="cpu"),
        "ppo": run_train(other, more, device="cpu"),
    }


PPO = ["algorithm.name=ppo", "total_train_steps=2"]


def values_of(records):
    return [[line["loss"], line["grad_norm"]] for line in read_lines(records / "steps.jsonl")]


def weights_of(folder):
    reader = HfFolder(Path(folder))
    return {name: reader.read(name, full_box(i.shape)) for name, i in reader.infos.items()}


def check_equal(records, model, truth):
    found, expected = values_of(records), values_of(truth.records)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=CLOSE, abs=1e-6)
    mine, theirs = weights_of(model), weights_of(truth.model)
    assert mine.keys() == theirs.keys()
    for name in mine:
        torch.testing.assert_close(mine[name], theirs[name], rtol=0, atol=2e-4)  # Adam: lr 1e-2


@pytest.mark.parametrize("layout", ["p2", "d2t2"])
def test_sft_under_a_layout_gives_the_numbers_of_one_process(task, tmp_path, alone, layout):
    summary = run_ranks(
        command="sft",
        task=task,
        root=tmp_path,
        trial=layout,
        # Every step is saved beside training, the last one too: it is not written again.
        overrides=["total_train_steps=3", f"allocation_mode=archon:{layout}", "saver.freq_steps=1"],
    )
    check_equal(summary.records, summary.model, alone["sft"])
    assert len(list(summary.model.parent.glob("epoch*"))) == 3


def test_ranks_start_from_a_megatron_folder_of_another_layout(task, tmp_path, alone):
    source, folder = alone["sft"].model, tmp_path / "megatron"
    convert(Conversion(source=str(source), target=str(folder), to="legacy", tp=2))
    once = ["total_train_steps=1", "actor.init_from_scratch=false"]
    config, notes = config_of(task, tmp_path, "sft", "hf", *once, f"actor.path={source}")
    truth = run_sft(config, notes, device="cpu")
    start = f"actor.checkpoint_load_path={folder}"
    summary = run_ranks(
        command="sft",
        task=task,
        root=tmp_path,
        trial="p2",
        overrides=[*once, start, "allocation_mode=archon:p2"],
    )
    check_equal(summary.records, summary.model, truth)


@pytest.mark.parametrize("more", [[], ["offload_train=true", "balance_data=false"]])
def test_ppo_over_two_ranks_samples_and_learns_as_one_process(task, tmp_path, alone, more):
    overrides = [*PPO, "allocation_mode=embedded:d1|archon:d2", *more]
    summary = run_ranks(
        command="train",
        task=task,
        root=tmp_path,
        trial="ppo",
        overrides=overrides,
    )
    records, truth = summary.records, alone["ppo"].records
    for name in ("ids", "reward"):
        mine, theirs = (
            [line[name] for line in read_lines(place / "samples.jsonl")]
            for place in (records, truth)
        )
        assert mine == theirs and mine
    for mine, theirs in zip(
        read_lines(records / "steps.jsonl"), read_lines(truth / "steps.jsonl"), strict=True
    ):
        assert mine["rl"]["reward_mean"] == theirs["rl"]["reward_mean"]
        assert mine["rl"]["critic_loss"] == pytest.approx(theirs["rl"]["critic_loss"], rel=CLOSE)
    check_equal(records, summary.model, alone["ppo"])


def test_a_mixture_without_a_model_file_learns_over_e_as_one_process(task, tmp_path):
    """Its experts are on two ranks; the sampler runs the published weights by transformers."""
    folder = tmp_path / "phimoe"
    write_model(folder)
    toy = json.loads((folder / "config.json").read_text())
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    experts = {"num_local_experts": 3, "num_experts_per_tok": 2}
    tokens = {name: toy[name] for name in ("vocab_size", "eos_token_id", "max_position_embeddings")}
    given = {"model_type": "phimoe", "bos_token_id": None, **sizes, **experts, **tokens}
    (folder / "config.json").write_text(json.dumps(given))
    steps = ["total_train_steps=2", f"actor.path={folder}", "algorithm.name=grpo"]
    alone = [*steps, "allocation_mode=embedded:d1|fsdp:d1"]
    config, notes = config_of(task, tmp_path, "train", "alone", *alone)
    truth = run_train(config, notes, device="cpu")
    over = [*steps, "allocation_mode=embedded:d1|fsdp:d2e2"]
    summary = run_ranks(command="train", task=task, root=tmp_path, trial="e2", overrides=over)
    mine, theirs = (
        [line["ids"] for line in read_lines(place / "samples.jsonl")]
        for place in (summary.records, truth.records)
    )
    assert mine == theirs and mine
    check_equal(summary.records, summary.model, truth)
    for line in read_lines(summary.records / "steps.jsonl"):
        # Two experts for each token of both layers; the rows of both ranks, and their padding.
        assert line["collective"]["pairs_computed"] >= 4 * line["num_tokens"]
        assert line["collective"]["dispatch_bytes"] > 0 and line["infra"]["ep_world_size"] == 2


@pytest.mark.parametrize(
    ("command", "rank", "failure", "expected"),
    [
        ("train", 1, "give_up", r"^rank 1 of 2, step 2: out of memory in backward\n"),
        ("sft", 0, "stumble", r"^rank 0 of 2, step 2: KeyError: 'x'\n"),
    ],
)
def test_a_rank_that_fails_ends_the_run_and_is_named(
    task, tmp_path, command, rank, failure, expected
):
    with pytest.raises(RunError, match=expected):
        run_harmed(command, rank, failure, task, tmp_path)


# As a user starts them.


class Program:
    """`pentad` on a terminal of its own, or under another launcher."""

    def __init__(self, words, launcher=()):
        command = [sys.executable, "-m", *launcher, "pentad.cli.main", *words]
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            command, stdout=theirs, stderr=theirs, env={**environment, "TERM": "xterm"}
        )
        os.close(theirs)
        self.parts = []
        self.reader = threading.Thread(target=self.read, args=(ours,), daemon=True)
        self.reader.start()

    def read(self, terminal):
        while True:
            try:
                part = os.read(terminal, 65536)
            except OSError:  # the last writer is gone
                break
            self.parts.append(part)
        os.close(terminal)

    def ranks(self):
        return role_processes(self.process.pid, "learner")

    def wait(self, seconds=300):
        code = self.process.wait(seconds)
        self.reader.join(60)
        return code, b"".join(self.parts).decode().replace("\r\n", "\n")

    def __enter__(self):
        return self

    def __exit__(self, *args):
        self.process.kill()  # its ranks end with it
        self.process.wait()


def wait_for_steps(program, records, count):
    deadline = time.monotonic() + 240
    while len(read_lines(records / "steps.jsonl")) < count:
        assert program.process.poll() is None, program.wait()
        assert time.monotonic() < deadline, b"".join(program.parts)
        time.sleep(0.05)


def records_of(root, trial):
    return root / "logs" / "me" / "default" / trial


def test_sft_starts_its_ranks_and_speaks_with_one_voice(task, tmp_path, alone):
    words = settings_of(task, tmp_path, "sft", "d2", "total_train_steps=3")
    with Program(["sft", *words, "allocation_mode=archon:d2"]) as program:
        code, text = program.wait()
    assert code == 0, text
    assert text.count("3 steps done. Records: ") == 1
    assert "\x1b[" in text  # the live table, as on any terminal
    records = records_of(tmp_path, "d2")
    (model,) = (tmp_path / "checkpoints/me/default/d2/default").glob("epoch*")
    check_equal(records, model, alone["sft"])
    assert "parallel dims: pp=1, dp_shard=2, tp=1" in (records / "log.txt").read_text()
    assert {path.name for path in (records / "ranks").iterdir()} == {"rank-0.log", "rank-1.log"}
    manifest = json.loads((records / "manifest.json").read_text())
    assert manifest["starts"][0]["layout"].startswith("pp=1, dp_shard=2")


def test_sigterm_ends_a_run_over_ranks_as_it_ends_one_process(task, tmp_path):
    words = settings_of(task, tmp_path, "train", "term", "total_train_epochs=100000")
    records = records_of(tmp_path, "term")
    with Program(["train", *words, "allocation_mode=embedded:d1|archon:d2"]) as program:
        wait_for_steps(program, records, 2)
        program.process.send_signal(signal.SIGTERM)
        code, text = program.wait()
    assert code == 1, text
    last = len(read_lines(records / "steps.jsonl"))
    sentence = f"stopped by SIGTERM after {last} of 400000 steps; what was trained is saved"
    assert text.count(sentence) == 1 and sentence in text.splitlines()[-1]
    (folder,) = (tmp_path / "checkpoints/me/default/term/default").glob("epoch*")
    assert folder.name.endswith(f"globalstep{last - 1}")
    assert all(torch.isfinite(tensor).all() for tensor in weights_of(folder).values())


@pytest.mark.usefixtures("started_warm")
def test_under_torchrun_every_rank_starts_alike_and_rank_0_speaks(task, tmp_path, alone):
    words = settings_of(task, tmp_path, "sft", "torchrun", "total_train_steps=3")
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    for said in ("making the model", "the run is finished: all its 3 steps are done"):
        with Program(["sft", *words, "allocation_mode=archon:d2"], launcher) as program:
            code, text = program.wait()
        assert code == 0, text
        assert text.count("3 steps done. Records: ") == 1 and said in text
        assert not list(tmp_path.glob(".meeting-*"))
    (model,) = (tmp_path / "checkpoints/me/default/torchrun/default").glob("epoch*")
    check_equal(records_of(tmp_path, "torchrun"), model, alone["sft"])
