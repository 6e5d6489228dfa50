"""Which exports stay: the newest, the best by held-out evaluation, and the last in any case."""

import json
import math
import shutil
from dataclasses import replace

import pytest
from test_saving import exports_of, log_of, weights_of

from pentad.rollout import evaluation
from pentad.trainer.saving.periodic import Frequency
from pentad.trainer.saving.saver import Saver, outdated


def test_the_newest_exports_stay_and_what_goes_is_logged(lab):
    summary = lab.train(
        "saver.freq_steps=1", "saver.keep_last=2", "total_train_steps=5", trial="newest"
    )
    found = exports_of(lab, "newest")
    assert found.keys() == {3, 4} and all(map(weights_of, found.values()))
    said = log_of(lab, "newest")
    for step in range(3):
        folder = f"{summary.model.parent}/epoch0epochstep{step}globalstep{step}"
        assert f"removed {folder} (saver.keep_last = 2, keep_best = None)" in said


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_export_before_is_removed_only_when_the_next_is_whole(lab, monkeypatch, mode):
    seen, plain = [], Saver._prune

    def prune(self):
        seen.append((self.last_saved, sorted(exports_of(lab, mode))))
        plain(self)

    monkeypatch.setattr(Saver, "_prune", prune)
    more = ("saver.keep_last=1", f"saver.mode={mode}", "total_train_steps=4")
    lab.train("saver.freq_steps=1", *more, trial=mode)
    assert [steps for _, steps in seen][:4] == [[0], [0, 1], [1, 2], [2, 3]]
    assert all(steps[-1] == last for last, steps in seen) and exports_of(lab, mode).keys() == {3}


def test_the_best_by_accuracy_stay_beside_the_last(lab, task, monkeypatch):
    accuracies = iter([0.9, 0.2, 0.7, 0.1, 0.6, 0.3, 0.0])  # of versions 0 (baseline) to 6
    plain = evaluation.summarise

    def summarise(*args):
        result = plain(*args)
        assert result.accuracy is not None
        return replace(result, accuracy=next(accuracies))

    monkeypatch.setattr("pentad.trainer.sampling.evaluate.summarise", summarise)
    lab.train(
        f"valid_dataset.path={task / 'valid.jsonl'}",
        *("valid_dataset.limit=4", "evaluator.freq_steps=1", "saver.freq_steps=1"),
        *("saver.keep_best=2", "total_train_steps=6"),
        trial="best",
    )
    assert exports_of(lab, "best").keys() == {1, 3, 5}


def test_the_best_by_loss_stay_in_sft_and_steps_without_evaluation_go(lab, task):
    summary = lab.sft(
        f"valid_dataset.path={task / 'sft.jsonl'}",
        *("evaluator.freq_steps=2", "saver.freq_steps=1", "saver.keep_best=1"),
        *("total_train_steps=5", "trial_name=low", "actor.optimizer.lr=0.3"),
    )
    losses = {entry["version"] - 1: entry["loss"] for entry in summary.evals[1:]}
    assert losses.keys() == {1, 3, 4}
    assert exports_of(lab, "low").keys() == {min(losses, key=losses.get), 4}


def test_a_critic_keeps_the_steps_of_its_actor(lab):
    more = ("algorithm.name=ppo", "critic.init_from_scratch=true", "total_train_steps=3")
    lab.train("saver.freq_steps=1", "saver.keep_last=1", *more, trial="ppo")
    for role in ("default", "critic"):
        assert exports_of(lab, "ppo", role).keys() == {2}


def test_an_export_waits_for_its_evaluation_and_no_number_is_never_the_best():
    scores = {-1: 0.0, 1: 0.5, 3: 0.9}
    assert outdated(range(8), 7, None, 1, scores) == [0, 1, 2]  # 4 to 7 may still be evaluated
    assert outdated(range(8), 7, None, 1, {**scores, 5: math.nan, 7: 0.1}) == [0, 1, 2, 4, 5, 6]
    assert outdated(range(8), 7, None, 1, {1: 0.9, 3: 0.9, 7: 0.1}) == [0, 1, 2, 4, 5, 6]
    assert outdated(range(8), 7, 3, 1, {1: 0.9, 7: 0.1}) == [0, 2, 3, 4]
    # 6 and 7 are of a run that was set back to 5: neither counted nor removed.
    assert outdated(range(8), 5, 2, None, {}) == [0, 1, 2, 3]


def test_keeping_without_a_frequency_is_said(lab):
    lab.train("saver.keep_last=2", trial="once")
    why = "without effect, the model is saved at the end only"
    assert f"saver.keep_last = 2: {why}" in log_of(lab, "once")


def test_an_export_that_cannot_be_removed_is_a_warning(lab, monkeypatch, capsys):
    plain = shutil.rmtree

    def refuse(path, *args, **kwargs):
        if ".removed-" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        plain(path, *args, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", refuse)
    summary = lab.train("saver.freq_steps=1", "saver.keep_last=1", "total_train_steps=2")
    assert (
        "globalstep0 could not be removed: [Errno 13] Permission denied" in capsys.readouterr().err
    )
    assert summary.num_steps == 2 and weights_of(summary.model)


def test_the_state_of_a_saver_is_json_and_comes_back(tmp_path):
    now = [100.0]

    def made():
        frequency = Frequency(seconds=60, clock=lambda: now[0])
        rest = {"steps_per_epoch": 2, "learner": None, "role": "actor"}
        return Saver(root=tmp_path, frequency=frequency, **rest)

    one = made()
    one.frequency.is_due(1)
    one.last_saved = 4
    one.folder(4).mkdir(parents=True)
    one.scored(4, 0.25), one.scored(2, -1.5)
    now[0] += 50
    state = json.loads(json.dumps(one.state()))
    now[0] = 7.0  # another process, another clock
    two = made()
    two.restore(state)
    assert (two.last_saved, two.scores) == (4, {4: 0.25, 2: -1.5})
    now[0] += 9
    assert not two.frequency.is_due(6)
    now[0] += 1
    assert two.frequency.is_due(7)
    assert json.loads(json.dumps(made().state()))["frequency"] == {"seconds_since": None}


def test_a_score_that_came_after_the_last_checkpoint_counts_when_the_run_goes_on(
    lab, task, monkeypatch
):
    """Beside training an evaluation may end when its step is committed: its record has the score,
    the checkpoint has not."""
    accuracies = iter([0.0, 0.9, 0.1, 0.2, 0.3])  # of versions 0 to 4
    plain = evaluation.summarise
    monkeypatch.setattr(
        "pentad.trainer.sampling.evaluate.summarise",
        lambda *args: replace(plain(*args), accuracy=next(accuracies)),
    )
    settings = (
        f"valid_dataset.path={task / 'valid.jsonl'}",
        *("valid_dataset.limit=2", "evaluator.freq_steps=1", "saver.freq_steps=1"),
        "saver.keep_best=1",
    )
    state = Saver.state
    monkeypatch.setattr(Saver, "state", lambda self: {**state(self), "scores": []})
    lab.train(*settings, "total_train_steps=2", trial="late")
    lab.train(*settings, "total_train_steps=4", trial="late")
    assert exports_of(lab, "late").keys() == {0, 3}


def test_a_run_whose_critic_is_not_exported_is_not_finished(lab):
    summary = lab.train("algorithm.name=ppo", "total_train_steps=1", trial="critic")
    (critic,) = (summary.model.parents[1] / "critic").glob("epoch*")
    shutil.rmtree(critic)
    lab.train("algorithm.name=ppo", "total_train_steps=1", trial="critic")
    assert (critic / "model.safetensors").exists()
