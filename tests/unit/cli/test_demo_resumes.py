"""`pentad demo` after an interrupt continues the run, as the interrupted one promised."""

import json
from contextlib import contextmanager

import pytest
from typer.testing import CliRunner

from pentad.cli import demo
from pentad.cli.main import app
from pentad.trainer.context import RunSummary


@pytest.mark.parametrize(
    ("end", "given", "fresh", "where"),
    [
        (None, False, False, "me/demo-grpo/seed1"),
        ("stopped", False, False, "me/demo-grpo/seed1"),
        ("failed", False, False, "me/demo-grpo/seed1"),
        ("complete", False, True, "me/demo-grpo/seed1"),
        ("stopped", True, True, "me/demo-grpo/seed1"),
        ("complete", False, False, "me/demo-grpo/seed2"),
        ("complete", False, False, "another/demo-grpo/seed1"),
    ],
)
def test_what_was_interrupted_is_resumed(tmp_path, monkeypatch, end, given, fresh, where):
    monkeypatch.setenv("LOGNAME", "me")
    records = tmp_path / "logs" / where
    records.mkdir(parents=True)
    if end:
        (records / "exit.json").write_text(json.dumps({"end": end}))
    seen = []

    def run(config, notes, *, fresh, device):
        seen.append((config.experiment_name, fresh))
        evals = [{"accuracy": 0.1, "num_prompts": 1}]
        return RunSummary(records, model, 1, evals)

    model = tmp_path / "demo" / "me" / "seed1" / "model"
    model.mkdir(parents=True)
    (model / "model.safetensors").touch()  # what the first part would save
    pages = []

    @contextmanager
    def page_beside(config):
        pages.append(config.experiment_name)
        yield
        pages.append("closed")

    monkeypatch.setattr(demo, "page_beside", page_beside)
    monkeypatch.setattr(demo, "run_sft", run)
    monkeypatch.setattr(demo, "run_train", run)
    demo.run_demo(seed=1, fileroot=str(tmp_path), device="cpu", fresh=given)
    assert seen == [("demo-sft", fresh), ("demo-grpo", fresh)]
    assert pages == ["demo-grpo", "closed"]  # a live page as long as it learns


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            5,
            "--steps = 5: the demo in {} was interrupted and has 40 steps, which set its learning "
            "rate; continue it with --steps 40, or start over with --steps 5 --fresh.",
        ),
        (
            None,
            "--steps = 250 (the default): the demo in {} was interrupted and has 40 steps, which "
            "set its learning rate; continue it with --steps 40, or start over with --fresh.",
        ),
        (40, ""),
    ],
)
def test_another_number_of_steps_is_one_sentence(tmp_path, monkeypatch, given, sentence):
    monkeypatch.setenv("LOGNAME", "me")
    records = tmp_path / "logs/me/demo-grpo/seed1"
    records.mkdir(parents=True)
    (records / "exit.json").write_text(json.dumps({"end": "stopped"}))
    (records / "config.yaml").write_text("total_train_steps: 40\n")

    def run(config, notes, *, fresh, device):
        raise KeyboardInterrupt  # it would resume

    monkeypatch.setattr(demo, "run_sft", run)
    words = ["demo", "--fileroot", str(tmp_path), "--device", "cpu"]
    done = CliRunner().invoke(app, [*words, *([] if given is None else ["--steps", str(given)])])
    if given == 40:
        assert done.exit_code == 130
    else:
        assert done.exit_code == 2 and f"* {sentence.format(records)}" in done.output, done.output


def test_users_and_seeds_have_data_of_their_own(tmp_path, monkeypatch):
    """Written over, the data of a demo that was interrupted would not be those it resumes with."""
    seen = []

    def run(config, notes, *, fresh, device):
        seen.append((config.train_dataset.path, config.actor.path))
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run_sft", run)
    for user, seed in (("me", 1), ("me", 2), ("you", 1)):
        monkeypatch.setenv("LOGNAME", user)
        with pytest.raises(KeyboardInterrupt):
            demo.run_demo(seed=seed, fileroot=str(tmp_path), device="cpu")
    for paths in zip(*seen, strict=True):
        assert len(set(paths)) == 3
