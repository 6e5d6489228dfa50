"""Reference and teacher on devices of their own: the numbers of weight tags in the trainer."""

import json
import os
import shutil
import signal
import threading
from contextlib import contextmanager

import pytest
import torch
from run_lab import Lab, steps_of, values_of
from test_rl_runs import assert_same_weights

from pentad.core.errors import UserError
from pentad.core.sizes import RunSize
from pentad.planner.prepare import prepare
from pentad.runtime.local_roles import LocalRuntime
from pentad.trainer.rank.learners import build_learner, build_scorer


@contextmanager
def killing(fileroot, trial, after, monkeypatch):
    """Kills the process of the reference once the run has so many steps."""
    done, started, killed = threading.Event(), {}, []
    start = LocalRuntime.start

    async def noted(runtime, spec):
        started[spec.name] = await start(runtime, spec)
        return started[spec.name]

    def watch():
        while not done.wait(0.05):
            path = next(fileroot.glob(f"logs/*/*/{trial}/steps.jsonl"), None)
            if path is not None and path.read_text().count("\n") >= after:
                killed.append(started["ref-0"].process.pid)
                os.kill(killed[0], signal.SIGKILL)
                return

    monkeypatch.setattr(LocalRuntime, "start", noted)
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield killed
    finally:
        done.set()
        thread.join()


KL = ("algorithm.kl_coef=0.1", "gconfig.n_samples=2")
COSINE = (
    "actor.optimizer.lr_scheduler_type=cosine",
    "actor.optimizer.warmup_steps_proportion=0.34",
)


@pytest.fixture(scope="module")
def teacher(task, tmp_path_factory):
    return Lab(task, tmp_path_factory.mktemp("teacher")).sft("total_train_steps=2").model


@pytest.mark.parametrize(
    "words",
    [
        KL,
        (*KL, "num_iters_per_train_update=2", "algorithm.dynamic_filter=true"),
        (*KL, "ref.path={teacher}", "algorithm.kl_in=reward"),
        (*KL, "ref_update_interval=2", "total_train_steps=6"),
        ("algorithm.name=distill", "teacher.path={teacher}", "reward.fn=null", *KL),
        (*KL, *COSINE),
    ],
    ids=["first weights", "chunks", "folder", "refreshed", "teacher and reference", "schedule"],
)
def test_scorers_apart_give_the_weights_of_tags_in_the_trainer(lab, teacher, words):
    words = [word.format(teacher=teacher) for word in words]
    hybrid, apart = lab.train("mode=hybrid", *words), lab.train("mode=async", *words)
    assert_same_weights(hybrid, apart)
    assert values_of(hybrid) == values_of(apart)
    assert "making the models of" in (apart.records / "log.txt").read_text()
    kl = [record["rl"]["kl_ref"] for record in steps_of(apart)]
    assert kl[-1] > 0, "the policy never left its reference: nothing was compared"


@pytest.mark.parametrize("warmup", [0, 0.5])
@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("role", ["actor", "critic", "ref", "teacher"])
def test_every_role_is_built_under_every_schedule(lab, teacher, role, schedule, warmup):
    keys = [f"lr_scheduler_type={schedule}", f"warmup_steps_proportion={warmup}"]
    words = [f"{model}.optimizer.{key}" for model in ("actor", "critic") for key in keys]
    kind = {"critic": ["algorithm.name=ppo"], "teacher": ["algorithm.name=distill"]}
    words += ["mode=async", *kind.get(role, []), f"teacher.path={teacher}", *KL]
    if role == "teacher":
        words.append("reward.fn=null")
    config, _ = prepare(None, lab.words_for("roles", *words), "train")
    device = torch.device("cpu")
    if role in ("actor", "critic"):
        engine = build_learner(config, role, RunSize(10, 32), device=device)
        assert engine.settings.total_steps == 10 * config.updates_per_batch
    else:
        engine = build_scorer(config, role, 32, device=device)
        assert engine.optimizer is None


@pytest.mark.slow
def test_a_scorer_in_a_process_gives_the_same_and_is_started_again_alone(lab, monkeypatch):
    words = ("mode=async", *KL, "total_train_steps=6")
    one = lab.train(*words)
    with killing(lab.fileroot, "killed", 2, monkeypatch) as killed:
        apart = lab.train(*words, "scheduler.processes=separate", trial="killed")
    assert killed
    assert_same_weights(one, apart)
    log = (apart.records / "log.txt").read_text()
    assert "the ref is lost and restarted" in log and "the ref scores again" in log
    assert (apart.records / "ranks" / "ref-0.log").exists()


@pytest.mark.slow
def test_a_scorer_over_two_ranks(lab):
    layout = "allocation_mode=embedded[rollout]:d1+archon[actor]:d1+archon[ref]:d2"
    one, two = lab.train("mode=async", *KL), lab.train("mode=async", *KL, layout)
    for first, second in zip(steps_of(one), steps_of(two), strict=True):
        assert second["rl"]["kl_ref"] == pytest.approx(first["rl"]["kl_ref"], rel=1e-3, abs=1e-6)


def test_groups_are_scored_ahead_of_training_within_the_bound(lab):
    summary = lab.train("mode=async", *KL, "max_staleness=2", "total_train_steps=8")
    lags = {int(lag) for record in steps_of(summary) for lag in record["rl"]["staleness"]}
    assert lags <= {0, 1, 2} and max(lags) > 0


@pytest.mark.parametrize("then", ["async", "hybrid"])
def test_a_run_goes_on_with_the_reference_it_had(lab, teacher, then):
    """The reference is no part of the checkpoint: it is the actor before the first step."""
    words = (*KL, f"actor.path={teacher}", "actor.init_from_scratch=false", "recover.freq_steps=1")
    whole = lab.train("mode=async", *words, "total_train_steps=4")
    lab.train("mode=async", *words, "total_train_steps=2", trial="halted")
    resumed = lab.train(f"mode={then}", *words, "total_train_steps=4", trial="halted")
    assert_same_weights(whole, resumed)


def test_a_refreshed_reference_comes_back_with_the_run(lab):
    words = ("mode=async", *KL, "ref_update_interval=2", "recover.freq_steps=1")
    whole = lab.train(*words, "total_train_steps=5")
    lab.train(*words, "total_train_steps=3", trial="halted")
    resumed = lab.train(*words, "total_train_steps=5", trial="halted")
    assert_same_weights(whole, resumed)
    assert sorted(one.name for one in (resumed.records / "reference").iterdir()) == ["2", "4"]
    with pytest.raises(UserError, match="the reference was refreshed on its own devices"):
        lab.train(*words, "mode=hybrid", "total_train_steps=6", trial="halted")


@pytest.mark.slow
def test_groups_ahead_of_a_refresh_wait_for_it(lab):
    words = ("mode=async", *KL, "ref_update_interval=2", "max_staleness=2", "total_train_steps=8")
    summary = lab.train(*words)
    lags = {int(lag) for record in steps_of(summary) for lag in record["rl"]["staleness"]}
    assert lags <= {0, 1, 2} and len(steps_of(summary)) == 8


def test_random_first_weights_are_no_reference_to_go_on_with_elsewhere(lab):
    words = (*KL, "recover.freq_steps=1", "total_train_steps=1")
    lab.train("mode=async", *words, trial="halted")
    with pytest.raises(UserError, match="initial weights, which are random"):
        lab.train("mode=hybrid", *words, "total_train_steps=2", trial="halted")


def test_a_teacher_apart_may_be_another_model(lab, task, tmp_path):
    deep = shutil.copytree(task / "model", tmp_path / "deep")
    dims = json.loads((deep / "config.json").read_text())
    dims |= {"num_hidden_layers": 3}
    dims.pop("layer_types", None)
    (deep / "config.json").write_text(json.dumps(dims))
    big = Lab(task, tmp_path / "sft").sft("total_train_steps=1", f"actor.path={deep}")
    words = ("algorithm.name=distill", f"teacher.path={big.model}", "reward.fn=null")
    steps = steps_of(lab.train("mode=async", *words))
    assert all(record["grad_norm"] > 0 for record in steps)
    with pytest.raises(UserError, match="give weights of the same architecture"):
        lab.train("mode=hybrid", *words)


def test_a_teacher_with_other_tokens_is_refused(lab, task, teacher, tmp_path):
    other = shutil.copytree(teacher, tmp_path / "other")
    text = json.loads((other / "tokenizer.json").read_text())
    vocab = text["model"]["vocab"]
    vocab["1"], vocab["2"] = vocab["2"], vocab["1"]
    (other / "tokenizer.json").write_text(json.dumps(text))
    words = ("algorithm.name=distill", f"teacher.path={other}", "reward.fn=null", "mode=async")
    with pytest.raises(UserError, match="has id .*, in the actor's tokenizer"):
        lab.train(*words)
