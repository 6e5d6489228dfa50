"""Whole pretraining runs on CPU: `pentad pretrain` on token shards and texts."""

import json
import math
import os
import signal
from datetime import datetime

import numpy as np
import pytest
from kill_lab import KillLab
from role_processes import role_processes
from run_lab import steps_of, values_of
from safetensors import safe_open

from pentad.core.errors import UserError
from pentad.data.tokenizer import load_tokenizer
from pentad.data.toy import write_byte_model
from pentad.planner.prepare import prepare
from pentad.telemetry.recorder import Recorder
from pentad.telemetry.steps import read_lines
from pentad.trainer.saving.recovery import RecoverHandler
from pentad.trainer.sources.examples import run_pretrain

STEPS = 6


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A dense model and a mixture, documents as text and as a shard."""
    folder = tmp_path_factory.mktemp("corpus")
    write_byte_model(folder / "model")
    write_byte_model(folder / "mixture", num_experts=4)
    texts = [f"{n} comes after {n - 1} and before {n + 1}. " * (1 + n % 3) for n in range(60)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "docs.jsonl").write_text(lines)
    tokenizer = load_tokenizer(folder / "model")
    ids = [i for text in texts for i in [*tokenizer.encode(text), tokenizer.eos_id]]
    np.save(folder / "docs.npy", np.array(ids, np.uint16))
    return folder


@pytest.fixture
def pretrain(corpus, tmp_path):
    def run(trial, *overrides, model="mixture", data="docs.npy"):
        words = [
            *(f"fileroot={tmp_path}", "user=me", f"trial_name={trial}"),
            *(f"actor.path={corpus / model}", "actor.init_from_scratch=true"),
            *("actor.gradient_checkpointing=false", "actor.optimizer.lr=3e-3"),
            *(f"train_dataset.path={corpus / data}", "train_dataset.max_length=64"),
            *("train_dataset.batch_size=4", f"total_train_steps={STEPS}"),
            *("allocation_mode=archon:d1", *overrides),
        ]
        config, notes = prepare(None, words, "pretrain")
        return run_pretrain(config, notes, device="cpu")

    return run


def test_a_mixture_learns_and_texts_train_as_their_shard_does(pretrain, corpus):
    held_out = f"valid_dataset.path={corpus / 'docs.npy'}", "valid_dataset.limit=8"
    one, other = pretrain("shard", *held_out), pretrain("text", *held_out, data="docs.jsonl")
    assert values_of(one) == values_of(other)
    steps = steps_of(one)
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.3
    assert steps[0]["num_tokens"] <= 4 * 64 and not any(steps[0]["rl"].values())
    assert steps[0]["kernel"]["tokens_per_expert_mean"] == pytest.approx(
        steps[0]["num_tokens"] * 2 / 4
    )
    assert one.evals[-1]["loss"] < one.evals[0]["loss"] - 0.3
    # Sequences, not the pieces of documents that are rows of their own within them.
    assert {record["num_samples"] for record in steps} == {4}
    assert {record["num_prompts"] for record in one.evals} == {8}
    said = (one.records / "log.txt").read_text()
    assert f"docs.npy: {len(np.load(corpus / 'docs.npy'))} tokens, " in said


def test_the_first_held_out_loss_is_the_loss_of_step_1_on_the_same_sequences(pretrain, corpus):
    whole = f"train_dataset.batch_size={(len(np.load(corpus / 'docs.npy')) - 1) // 63}"
    valid = f"valid_dataset.path={corpus / 'docs.npy'}"
    summary = pretrain("held", whole, valid, "total_train_steps=1", model="model")
    assert summary.evals[0]["loss"] == pytest.approx(steps_of(summary)[0]["loss"], rel=1e-5)


def test_killed_and_started_again_it_ends_bitwise_as_if_nothing_had_happened(corpus, tmp_path):
    lab = KillLab(
        corpus,
        tmp_path,
        "pretrain",
        f"actor.path={corpus / 'mixture'}",
        f"train_dataset.path={corpus / 'docs.jsonl'}",
        *("train_dataset.max_length=64", "train_dataset.batch_size=4", "saver.mode=sync"),
        *(f"total_train_steps={STEPS}", "allocation_mode=archon:d1"),
    )
    lab.run("whole")
    for at in (2, 4):  # a step is committed before the next one is recorded
        process = lab.start("killed")
        lab.wait_for_steps("killed", at, process)
        process.kill(), process.join()
    lab.run("killed")
    assert lab.steps("killed") == lab.steps("whole") and len(lab.steps("whole")) == STEPS
    assert lab.weights("killed", STEPS) == lab.weights("whole", STEPS)
    assert "resumed after step" in lab.log("killed").read_text()
    check_ettr(lab.records("killed"))


def check_ettr(folder):
    """Of a run that was killed twice and continued: from its timestamps."""
    kept = read_lines(folder / "steps.jsonl")
    starts = json.loads((folder / "manifest.json").read_text())["starts"]
    assert [start["generation"] for start in starts] == [0, 1, 2]
    assert kept[-1]["generation"] == 2
    began = datetime.fromisoformat(starts[0]["time"]).timestamp()
    assert starts[0]["opened_s"] <= began + 1, "noted once the model is there"
    for n, record in enumerate(kept, 1):
        worth = sum(one["wall_clock_ms"] for one in kept[:n]) / 1e3
        passed = record["time_s"] - starts[0]["opened_s"]
        assert record["infra"]["ettr"] == pytest.approx(worth / passed, rel=1e-6)
    last = kept[-1]["infra"]["ettr"]
    alone = kept[0]["wall_clock_ms"] / 1e3 / (kept[0]["time_s"] - starts[0]["opened_s"])
    assert 0 < last < 1 and kept[0]["infra"]["ettr"] == pytest.approx(alone)


def test_the_envelope_of_a_step_is_true(pretrain, corpus):
    """Against numbers that are computed from the export, the config and the routed ids."""
    words = ("total_train_steps=2", "train_dataset.mask_documents=false", "recover.freq_steps=1")
    peak = ("telemetry.hardware_peak_tflops=0.5", "saver.mode=sync")
    summary = pretrain("envelope", *words, *peak)
    first, second = steps_of(summary)
    config = json.loads((corpus / "mixture" / "config.json").read_text())
    chosen, num_experts = config["num_experts_per_tok"], config["num_experts"]
    with safe_open(next(summary.model.glob("*.safetensors")), "np") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    head = "lm_head.weight" if "lm_head.weight" in shapes else "model.embed_tokens.weight"
    active = math.prod(shapes[head])
    for name, shape in shapes.items():
        if name not in ("lm_head.weight", "model.embed_tokens.weight") and len(shape) == 2:
            active += math.prod(shape) * (chosen / num_experts if ".experts." in name else 1)
    width = config["num_attention_heads"] * config["head_dim"]
    a_pair = 4 * 12 * width * config["num_hidden_layers"]  # in each of 4 sequences of 64 tokens
    seconds = second["phases"]["train"] / 1e3
    seen, all_pairs = 64 * 65 // 2, 64 * 64
    flops = [6 * active * 256 + a_pair * pairs for pairs in (seen, all_pairs)]
    wanted = [one / seconds / 0.5e12 for one in flops]
    assert [second["mfu"], second["mfu_full_attention"]] == pytest.approx(wanted)
    kernel, infra, memory = second["kernel"], second["infra"], second["memory"]
    assert kernel["tokens_per_expert_mean"] == 256 * chosen / num_experts
    spread = [layer["std"] for layer in kernel["balance"].values()]
    assert kernel["tokens_per_expert_std"] == pytest.approx(sum(spread) / len(spread))
    assert (kernel["used_triton"], kernel["sram_bytes_per_block"]) == (False, None)
    assert kernel["achieved_bw_gbps"] > 0
    assert set(second["collective"].values()) == {None}, "all experts are here"
    assert (infra["active_nodes"], infra["ep_world_size"], second["generation"]) == (1, 1, 0)
    passed = 1e3 * (second["time_s"] - first["time_s"]) + first["wall_clock_ms"]
    assert 0 < first["infra"]["recover_stall_ms"] <= infra["recover_commit_ms"] < passed
    grown = memory["host_rss_gb"] - first["memory"]["host_rss_gb"]
    assert (
        memory["leak_delta_gb"] == pytest.approx(grown) and first["memory"]["leak_delta_gb"] is None
    )
    assert memory["peak_allocated_gb"] is None, "there is no device"


def test_other_data_are_refused_by_a_run_that_goes_on(pretrain, corpus, tmp_path):
    path = tmp_path / "own.npy"
    ids = np.load(corpus / "docs.npy")
    np.save(path, ids)
    pretrain("on", f"train_dataset.path={path}", "total_train_steps=2")
    np.save(path, ids[::-1])
    with pytest.raises(UserError, match=r"not the data that the run began with: tokens was"):
        pretrain("on", f"train_dataset.path={path}", "total_train_steps=3")
    with pytest.raises(UserError, match=r"train_dataset.max_length = 32: was 64 so far"):
        pretrain("on", f"train_dataset.path={path}", "train_dataset.max_length=32")


def test_learners_that_are_started_again_read_the_data_the_run_began_with(
    pretrain, corpus, tmp_path, monkeypatch
):
    """The texts are edited during the run, and then the learner is lost."""
    path, plain, lost = tmp_path / "own.jsonl", Recorder.step, []
    lines = (corpus / "docs.jsonl").read_text()
    path.write_text(lines)

    def lose(self, record, *args):
        line = plain(self, record, *args)
        if record.step == 2:
            path.write_text(lines.replace("comes", "went "))
            lost.extend(role_processes(os.getpid(), "learner"))
            os.kill(lost[0], signal.SIGKILL)
        return line

    monkeypatch.setattr(Recorder, "step", lose)
    words = f"train_dataset.path={path}", "train_dataset.text_key=text"
    with pytest.raises(UserError, match=r"not the data that the run began with: tokens was"):
        pretrain("edited", *words, "scheduler.processes=separate", model="model")
    assert len(lost) == 1


def test_a_learner_that_is_lost_right_after_it_staged_a_checkpoint_is_started_again(
    pretrain, monkeypatch
):
    """Its writer ends with it, so the commit of that checkpoint must not be waited for."""
    plain, lost = RecoverHandler.stage, []

    def lose(self, step):
        plain(self, step)
        if not lost:
            lost.extend(role_processes(os.getpid(), "learner"))
            os.kill(lost[0], signal.SIGKILL)

    monkeypatch.setattr(RecoverHandler, "stage", lose)
    apart = "scheduler.processes=separate", "recover.freq_steps=3"
    summary = pretrain("staged", *apart, model="model")
    assert len(lost) == 1 and [one["step"] for one in steps_of(summary)] == [1, 2, 3, 4, 5, 6]
    (recovery,) = read_lines(summary.records / "recoveries.jsonl")
    assert recovery["num_losses"] == 1


def test_everything_wrong_comes_at_once(pretrain, tmp_path):
    np.save(tmp_path / "few.npy", np.arange(9, dtype=np.uint16))
    with pytest.raises(UserError) as caught:
        pretrain(
            "bad",
            f"train_dataset.path={tmp_path / 'few.npy'}",
            "actor.archon.enable_compile=true",
        )
    text = str(caught.value)
    assert "it holds 9 tokens, and a sequence has 64" in text and "archon.enable_compile" in text
    with pytest.raises(UserError, match=r"max_length = 4096: .* the model's context 1024; give"):
        pretrain("long", "train_dataset.max_length=4096")


def test_keys_without_effect_are_told(pretrain):
    summary = pretrain(
        "told", "train_dataset.prompt_key=q", "gconfig.n_samples=2", "total_train_steps=1"
    )
    said = (summary.records / "log.txt").read_text()
    assert (
        "train_dataset.prompt_key = q: without effect, pretrain reads train_dataset.text_key"
        in said
    )
    assert "gconfig.n_samples = 2: without effect, pretrain does not sample" in said


@pytest.mark.parametrize(("given", "made"), [((), 5), (3, 3), (5, 5), (200, 5)])
def test_a_smoke_run_makes_five_steps_or_as_few_as_the_recipe(corpus, tmp_path, given, made):
    lab = KillLab(corpus, tmp_path, "pretrain", f"train_dataset.path={corpus / 'docs.npy'}")
    words = [f"total_train_steps={given}"] if given else []
    words += ["train_dataset.max_length=32", "train_dataset.batch_size=2"]
    lab.run("smoke", "--smoke", *words)
    assert len(read_lines(lab.records("smoke") / "steps.jsonl")) == made


def test_a_loss_that_jumps_is_warned_of(pretrain, tmp_path):
    """One token over and over, then noise."""
    noise = np.random.default_rng(1).integers(3, 200, 4 * 63, np.uint16)
    np.save(tmp_path / "a.npy", np.concatenate([np.full(8 * 4 * 63 + 1, 9, np.uint16), noise]))
    words = "train_dataset.shuffle=false", "actor.optimizer.lr=3e-2", "total_train_steps=9"
    summary = pretrain("jump", f"train_dataset.path={tmp_path / 'a.npy'}", *words, model="model")
    said = (summary.records / "log.txt").read_text()
    assert "step 9: the loss jumped from" in said and said.count("the loss jumped") == 1
