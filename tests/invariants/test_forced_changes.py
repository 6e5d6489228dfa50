"""Keys that `recover.allow` forces on a run that goes on: they hold from there, or are refused."""

import errno
from contextlib import closing

import pytest
from run_lab import steps_of
from test_saving import exports_of

from pentad.core.errors import UserError
from pentad.core.lock import FolderLock
from pentad.telemetry import host

ONE, TWO = "total_train_steps=1", "total_train_steps=2"


def test_a_critic_that_the_checkpoint_lacks_is_refused_and_the_checkpoint_stays(lab):
    lab.train(ONE, trial="actor")
    with pytest.raises(
        UserError, match="holds no critic, which is trained; set the algorithm back"
    ):
        lab.train(TWO, "algorithm.name=ppo", "recover.allow=[algorithm,critic]", trial="actor")
    summary = lab.train(TWO, trial="actor")
    assert not list(summary.model.parents[1].rglob("*.damaged"))
    assert [record["step"] for record in steps_of(summary)] == [1, 2]
    assert exports_of(lab, "actor").keys() == {0, 1}


def test_another_teacher_teaches_from_the_checkpoint_on(lab):
    first, second = (lab.sft(f"total_train_steps={num}").model for num in (1, 5))
    distill = ("algorithm.name=distill", "actor.optimizer.lr=1e-3")
    lab.train(*distill, f"teacher.path={first}", ONE, trial="taught")
    forced = ("recover.allow=[teacher.path]", f"teacher.path={second}", TWO)
    found = steps_of(lab.train(*distill, *forced, trial="taught"))
    same = steps_of(lab.train(*distill, f"teacher.path={first}", TWO, trial="same"))
    assert found[0]["rl"]["advantage_mean"] == same[0]["rl"]["advantage_mean"]
    assert found[1]["rl"]["advantage_mean"] != same[1]["rl"]["advantage_mean"]


def test_a_reference_that_comes_late_is_the_actor_of_then_and_that_is_said(lab, capsys):
    lab.train("algorithm.kl_coef=0", ONE, trial="late")
    forced = ("algorithm.kl_coef=0.1", "recover.allow=[algorithm.kl_coef]", TWO)
    lab.train(*forced, trial="late")
    assert "the reference has the actor's weights after step 1" in capsys.readouterr().err


def test_checkpoints_that_are_not_where_they_are_looked_for_are_not_forgotten(lab, tmp_path):
    summary = lab.train(ONE, trial="moved")
    with pytest.raises(
        UserError, match=f"checkpoints are in {summary.model.parents[1]}; move that"
    ):
        lab.train(TWO, f"checkpoint.local_dir={tmp_path / 'disk'}", trial="moved")
    assert [record["step"] for record in steps_of(summary)] == [1]
    old = summary.model.parents[1]
    new = tmp_path / "disk" / old.relative_to(tmp_path / "checkpoints")
    new.parent.mkdir(parents=True, exist_ok=True)
    old.rename(new)
    more = lab.train(TWO, f"checkpoint.local_dir={tmp_path / 'disk'}", trial="moved")
    assert [record["generation"] for record in steps_of(more)] == [0, 1]


def test_a_checkpoint_folder_that_cannot_be_written_is_refused_at_the_start(lab, monkeypatch):
    def refuse(root):
        raise OSError(errno.EROFS, "Read-only file system", str(root))

    monkeypatch.setattr("pentad.trainer.run_folders.sweep_uncommitted", refuse)
    with pytest.raises(UserError, match=r"cannot be written \(Read-only file system\); make it"):
        lab.train(ONE, trial="stuck")
    monkeypatch.undo()
    lab.train(ONE, trial="stuck")


def test_checkpoints_that_another_run_writes_are_left_alone(lab, tmp_path):
    """Under the same names, with records in another place."""
    disk = f"checkpoint.local_dir={tmp_path / 'disk'}"
    root = lab.train(ONE, disk, trial="shared").model.parents[1]
    with (
        closing(FolderLock(root.parent, "", f".{root.name}.lock")),
        pytest.raises(UserError, match=f"checkpoint folder = {root}: another program runs in it"),
    ):
        lab.train(ONE, disk, f"fileroot={tmp_path / 'other'}", trial="shared")
    assert [record["step"] for record in steps_of(lab.train(TWO, disk, trial="shared"))] == [1, 2]


@pytest.mark.parametrize("key", ["train_dataset.batch_size", "train_dataset"])
def test_a_key_that_cannot_be_forced_is_refused_alike_with_and_without_it(lab, key):
    lab.sft("trial_name=size", ONE)
    said = []
    for more in ((), (f"recover.allow=[{key}]",)):
        with pytest.raises(UserError) as raised:
            lab.sft("trial_name=size", TWO, "train_dataset.batch_size=4", *more)
        said.append(str(raised.value))
    rule = "was 8 so far, and the position in the data is counted in batches"
    remedy = "set it back, or start over with --fresh"
    assert said == [f"train_dataset.batch_size = 4: {rule}; {remedy}."] * 2


def test_other_versions_than_those_of_the_checkpoint_are_said(lab, capsys, monkeypatch):
    """A newer one, and one that is no more."""
    known = host.versions()
    with monkeypatch.context() as patch:
        patch.setattr(host, "versions", lambda: {**known, "torch": "2.10.0", "gone": "1.2"})
        lab.sft("trial_name=versions", ONE)
    lab.sft("trial_name=versions", TWO)
    said = capsys.readouterr().err
    rest = "numbers may differ in their last bits"
    torch = f"torch was 2.10.0 when the checkpoint was saved, and is {known['torch']}: {rest}"
    assert torch in said
    assert f"gone was 1.2 when the checkpoint was saved, and is not installed: {rest}" in said
    lab.sft("trial_name=versions", "total_train_steps=3")
    assert "when the checkpoint was saved" not in capsys.readouterr().err
