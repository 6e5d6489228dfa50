"""A run that is killed at any moment and started again ends as if nothing had happened.

PENTAD_KILLS sets how many moments are tried (4).
"""

import json
import os
import random
import shutil
import signal
import time

import pytest
import torch
from kill_lab import KillLab
from role_processes import role_processes
from tables import table
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoConfig, AutoModelForCausalLM

from pentad.data.toy import write_model
from pentad.telemetry.steps import read_lines

NUM_KILLS = int(os.environ.get("PENTAD_KILLS", "4"))
KILLS_PER_RUN = max(1, min(5, NUM_KILLS // 2))
STEPS = 6
SYNC = "saver.mode=sync"
RL = (
    "train_dataset.batch_size=2",
    "gconfig.n_samples=2",
    "gconfig.max_new_tokens=4",
    "reward.fn=sort_digits",
    "telemetry.samples_per_step=4",
    f"total_train_steps={STEPS}",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("killed")


@pytest.fixture(scope="module")
def rl(task, folder):
    lab = KillLab(
        task,
        folder,
        "train",
        f"train_dataset.path={task / 'train.jsonl'}",
        f"valid_dataset.path={task / 'valid.jsonl'}",
        "valid_dataset.limit=2",
        "evaluator.freq_steps=2",
        "algorithm.kl_coef=0.01",
        "ref_update_interval=2",
        *RL,
    )
    lab.seconds = lab.run("whole", SYNC)
    return lab


def same_end(lab, trial, whole="whole"):
    """Weights, records and evaluations are those of the run that nobody killed."""
    assert lab.weights(trial, STEPS) == lab.weights(whole, STEPS)
    assert lab.steps(trial) == lab.steps(whole)
    assert lab.evals(trial) == lab.evals(whole)
    assert lab.gids(trial) == lab.gids(whole)


def test_killed_at_random_moments_a_run_ends_bitwise_as_if_nothing_had_happened(rl):
    """In turn with commits beside the steps and with one after each: these are short."""
    draw = random.Random(13)
    for part in range(NUM_KILLS // KILLS_PER_RUN):
        delays = [draw.uniform(0.05, 1.0) * rl.seconds for _ in range(KILLS_PER_RUN)]
        trial = f"killed{part}"
        rl.run_killed(trial, delays, *([SYNC] if part % 2 else []))
        same_end(rl, trial)
        every = read_lines(rl.records(trial) / "steps.jsonl", superseded=True)
        manifest = json.loads((rl.records(trial) / "manifest.json").read_text())
        starts = manifest["starts"]
        assert [start["generation"] for start in starts] == list(range(len(starts)))
        for line in every:
            began = starts[line["generation"]]["from_step"]
            assert line["step"] > began, "no start does a step again that it restored"


def test_a_killed_adapter_beside_a_model_of_transformers_ends_bitwise(task, folder):
    """cohere, which has no model file here: its checkpoints hold factors and moments alone."""
    base = folder / "cohere"
    write_model(base)
    given = json.loads((base / "config.json").read_text()) | {"model_type": "cohere"}
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**given)).save_pretrained(base)
    lab = KillLab(task, folder, "sft", f"train_dataset.path={task / 'sft.jsonl'}")
    begin = ("actor.path=", "actor.init_from_scratch=")
    lab.words = [word for word in lab.words if not word.startswith(begin)]
    lab.words += [f"actor.path={base}", "allocation_mode=fsdp:d1", "actor.lora.rank=4", SYNC]
    lab.words += ["train_dataset.batch_size=8", f"total_train_steps={STEPS}"]
    lab.run("adapter")
    process = lab.start("killed adapter", hold=3)
    lab.wait_for_steps("killed adapter", 3, process)
    lab.kill(process)
    lab.run("killed adapter")
    assert "resumed after step" in lab.log("killed adapter").read_text()
    assert lab.steps("killed adapter") == lab.steps("adapter")
    found = []
    for trial in ("adapter", "killed adapter"):
        (saved,) = (lab.checkpoints(trial) / "default").glob(f"epoch*globalstep{STEPS - 1}")
        found.append((saved / "adapter_model.safetensors").read_bytes())
        last = lab.checkpoints(trial) / f"default/recover_checkpoint/globalstep{STEPS - 1}"
        names = FileSystemReader(last).read_metadata().state_dict_metadata
        assert len(names) > 100 and all(".lora." in n or n.startswith("rng.") for n in names)
    assert found[0] == found[1]


def test_a_step_whose_checkpoint_is_committed_is_never_done_again(rl):
    """Killed between two steps, with everything committed."""
    process = rl.start("between", SYNC, hold=3)
    rl.wait_for_steps("between", 3, process)
    rl.kill(process)
    committed = [
        int(path.parent.name.removeprefix("globalstep")) + 1
        for path in rl.checkpoints("between").glob("recover_info/globalstep*/COMMIT")
    ]
    rl.run("between")
    same_end(rl, "between")
    (_, start) = json.loads((rl.records("between") / "manifest.json").read_text())["starts"]
    assert start["from_step"] == max(committed) >= 1
    said = rl.log("between").read_text()
    assert f"resumed after step {max(committed)} from {rl.checkpoints('between')}" in said


def test_sigterm_saves_the_state_and_the_next_start_goes_on(rl):
    process = rl.start("term", "recover.freq_steps=1000", hold=2)
    rl.wait_for_steps("term", 2, process)
    os.kill(process.pid, signal.SIGTERM)
    rl.release("term")
    process.join()
    assert process.exitcode == 1
    done = len(rl.steps("term"))
    assert f"stopped by SIGTERM after {done} of {STEPS} steps; " in rl.log("term").read_text()
    assert f"started again, the run resumes after step {done}" in rl.log("term").read_text()
    (saved,) = (rl.checkpoints("term") / "default").glob("epoch*")
    assert saved.name.endswith(f"globalstep{done - 1}")
    rl.run("term", "recover.freq_steps=1000")
    same_end(rl, "term")
    assert f"resumed after step {done} from" in rl.log("term").read_text()


def test_a_finished_run_says_so_and_where_its_model_is(rl):
    before = rl.log("whole").read_text()
    rl.run("whole")
    said = rl.log("whole").read_text().removeprefix(before)
    assert f"the run is finished: all its {STEPS} steps are done" in said
    assert f"Model: {rl.checkpoints('whole') / 'default'}" in said
    assert len(rl.steps("whole")) == STEPS


def copy_of_whole(lab, trial):
    shutil.copytree(lab.records("whole"), lab.records(trial))
    shutil.copytree(lab.checkpoints("whole"), lab.checkpoints(trial))


def test_a_run_that_was_killed_in_its_last_evaluation_is_not_finished(rl):
    copy_of_whole(rl, "unscored")
    evals = rl.records("unscored") / "evals.jsonl"
    evals.write_text("".join(evals.read_text().splitlines(keepends=True)[:-1]))
    rl.run("unscored")
    same_end(rl, "unscored")
    assert "the run is finished" not in rl.log("unscored").read_text()


def test_a_run_without_its_checkpoints_starts_again_and_keeps_what_was_there(rl):
    copy_of_whole(rl, "lost")
    shutil.rmtree(rl.checkpoints("lost") / "recover_info")
    rl.run("lost")
    same_end(rl, "lost")
    said = rl.log("lost").read_text()
    assert (
        f"no recovery checkpoint in {rl.checkpoints('lost')}: the run starts again at step 1"
        in said
    )
    assert list((rl.checkpoints("lost") / "earlier" / "001" / "default").glob("epoch*"))
    every = read_lines(rl.records("lost") / "steps.jsonl", superseded=True)
    assert sum(line["superseded"] for line in every) == STEPS


def newest_file(checkpoints, name):
    """Of the newest committed checkpoint, whether it is there or not."""
    committed = checkpoints.glob("recover_info/globalstep*/COMMIT")
    steps = [int(path.parent.name.removeprefix("globalstep")) for path in committed]
    return checkpoints / f"recover_info/globalstep{max(steps, default='')}" / name


def test_configs_that_differ_are_accepted_or_refused_by_key(rl):
    process = rl.start("other", hold=2)
    rl.wait_for_steps("other", 2, process)
    rl.kill(process)
    rl.run("other", "actor.optimizer.lr=1e-2", code=2)
    said = rl.log("other").read_text()
    refusal = "actor.optimizer.lr = 0.01: was 0.001 so far, and the training depends on it"
    assert refusal in said and "force it with recover.allow=[actor.optimizer.lr]" in said
    rl.run("other", "telemetry.tensorboard=true", "actor.mb_spec.n_mbs=2")
    said = rl.log("other").read_text()
    assert "differs from the previous start: telemetry.tensorboard was false, is true" in said
    assert len(rl.steps("other")) == STEPS
    rl.run("other", "recover.mode=off", code=2)
    assert "belongs to a run with another config" in rl.log("other").read_text()


@pytest.mark.parametrize("mode", table(["hybrid", "async"], ["hybrid"]))
def test_off_policy_every_group_is_trained_once_whenever_the_run_is_killed(task, folder, mode):
    lab = KillLab(
        task,
        folder,
        "train",
        f"train_dataset.path={task / 'train.jsonl'}",
        f"mode={mode}",
        "allocation_mode=embedded:d1+archon:d1",
        "max_staleness=2",
        SYNC,
        *RL,
    )
    draw = random.Random(len(mode))
    begun = time.monotonic()
    process = lab.start(mode, hold=STEPS - 1)
    first = lab.checkpoints(mode) / "recover_info/globalstep0"  # not cut: one must stay whole
    while not (waiting := newest_file(lab.checkpoints(mode), "groups.bin")).exists() or (
        waiting.parent == first
    ):
        if len(lab.steps(mode)) == STEPS - 1:  # it waits, and its newest one has none
            break
        assert process.is_alive(), lab.log(mode).read_text()
        time.sleep(0.02)
    seconds = time.monotonic() - begun
    lab.kill(process)  # its writer may just have committed another
    waiting = newest_file(lab.checkpoints(mode), "groups.bin")
    if is_cut := waiting.exists():  # unless a later one has none
        waiting.write_bytes(waiting.read_bytes()[:-1])
    lab.run_killed(mode, [draw.uniform(0.3, 1.5) * seconds for _ in range(max(1, NUM_KILLS // 10))])
    gids = lab.gids(mode)
    assert sorted(gids) == list(range(1, STEPS + 1))
    assert [sorted(gids[step]) for step in gids] == [[2 * n, 2 * n + 1] for n in range(STEPS)]
    records = lab.steps(mode)
    assert [record["funnel"]["trained"] for record in records] == [2 * n + 2 for n in range(STEPS)]
    lags = [int(lag) for record in records for lag in record["rl"]["staleness"]]
    assert max(lags) <= 2
    said, damaged = lab.log(mode).read_text(), f"{waiting.parent.name}.damaged"
    # A kill may come between the renaming and the sentence.
    is_aside = waiting.parent.with_name(damaged).exists() or f"{waiting}: has " in said
    assert is_aside == is_cut, said


def test_sft_ends_bitwise_the_same(task, folder):
    lab = KillLab(
        task,
        folder,
        "sft",
        f"train_dataset.path={task / 'sft.jsonl'}",
        f"valid_dataset.path={task / 'sft.jsonl'}",
        "valid_dataset.limit=4",
        "evaluator.freq_steps=3",
        "train_dataset.batch_size=4",
        "actor.optimizer.lr_scheduler_type=cosine",
        f"total_train_steps={STEPS}",
    )
    seconds = lab.run("sft")
    draw = random.Random(7)
    lab.run_killed("sft-killed", [draw.uniform(0.2, 1.0) * seconds for _ in range(3)])
    same_end(lab, "sft-killed", "sft")


def test_over_two_ranks_a_lost_rank_and_a_killed_run_change_nothing(task, folder):
    lab = KillLab(
        task,
        folder,
        "train",
        f"train_dataset.path={task / 'train.jsonl'}",
        "allocation_mode=embedded:d1|archon:d2",
        *RL,
    )
    lab.run("two")
    process = lab.start("two-killed", hold=2)
    while not list(lab.checkpoints("two-killed").glob("recover_info/globalstep*/COMMIT")):
        assert process.is_alive(), lab.log("two-killed").read_text()
        time.sleep(0.02)
    os.kill(role_processes(process.pid, "learner")[1], signal.SIGKILL)
    lab.release("two-killed")
    while "it is started again after step " not in lab.log("two-killed").read_text():
        assert process.is_alive(), lab.log("two-killed").read_text()
        time.sleep(0.05)
    manifest = lab.records("two-killed") / "manifest.json"
    while len(json.loads(manifest.read_text())["starts"]) < 2:
        assert process.is_alive(), lab.log("two-killed").read_text()
        time.sleep(0.05)
    lab.wait_for_steps("two-killed", 3, process)
    lab.kill(process)
    lab.run("two-killed")
    same_end(lab, "two-killed", "two")
    said = lab.log("two-killed").read_text()
    assert "rank 1 of 2, step " in said
    assert "was ended by signal 9 (SIGKILL), as the system does when memory runs out" in said
    assert "(try 1 of recover.retries = 3 without a new step)" in said
    starts = json.loads((lab.records("two-killed") / "manifest.json").read_text())["starts"]
    assert [start["generation"] for start in starts] == [0, 1, 2]
