"""Whatever a command reads may be a pipe, a folder or a device: one sentence, and no read without
an end."""

import json
import os
import shutil
import signal
from contextlib import contextmanager

import pytest
from typer.testing import CliRunner

from pentad.cli.main import app
from pentad.data.toy import write_byte_model
from pentad.models.registry import create_model, dims_of, save_model

LIMIT_S = 20
"""All take less than a second here."""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model with weights, and rows."""
    root = tmp_path_factory.mktemp("odd")
    write_byte_model(root / "plain")
    model = create_model(dims_of(root / "plain"), seed=1)
    save_model(model, root / "m", source_folder=root / "plain", tokenizer_folder=root / "plain")
    row = {"prompt": "a", "answer": "b", "response": "c"}
    (root / "d.jsonl").write_text(json.dumps(row) + "\n")
    (root / "saved").mkdir()
    (root / "saved" / "state.json").write_text('{"_data_files": [{"filename": "a.arrow"}]}')
    (root / "s").mkdir()
    (root / "s" / "a.bin").write_bytes(bytes(64))
    return root


TRAIN = "train actor.path=m train_dataset.batch_size=1 gconfig.n_samples=2 total_train_steps=1 "
DATA, REWARD = "train_dataset.path=d.jsonl ", "reward.fn=exact_match "
JUDGE = "reward.fn=judge reward.judge.url=http://127.0.0.1:9 reward.judge.model=x "
JUDGE += "reward.judge.template=Grade:{completion} "
PRETRAIN = "pretrain actor.path=m train_dataset.batch_size=1 total_train_steps=1 "
INPUTS = {
    "recipe of plan": ("plan r.yaml", "r.yaml"),
    "recipe of train": ("train r.yaml", "r.yaml"),
    "rows": (f"{TRAIN}{REWARD} train_dataset.path=x.jsonl", "x.jsonl"),
    "Parquet": (f"{TRAIN}{REWARD} train_dataset.path=x.parquet", "x.parquet"),
    "held-out rows": (f"{TRAIN}{REWARD}{DATA} valid_dataset.path=x.jsonl", "x.jsonl"),
    "a pattern": (f"{TRAIN}{REWARD} train_dataset.path=f/*.jsonl", "f/x.jsonl"),
    "a saved dataset": (f"{TRAIN}{REWARD} train_dataset.path=saved", "saved/a.arrow"),
    "its state": (f"{TRAIN}{REWARD} train_dataset.path=saved", "saved/state.json"),
    "its splits": (f"{TRAIN}{REWARD} train_dataset.path=saved", "saved/dataset_dict.json"),
    "rows to evaluate": ("eval m --data x.jsonl --reward exact_match", "x.jsonl"),
    "text": (f"{PRETRAIN} train_dataset.path=x.txt", "x.txt"),
    "tokens": (f"{PRETRAIN} train_dataset.path=x.npy", "x.npy"),
    "an index of tokens": (f"{PRETRAIN} train_dataset.path=s/a.bin", "s/a.idx"),
    "a reward": (f"{TRAIN}{DATA} reward.fn=x.py:f", "x.py"),
    "a workflow": (f"{TRAIN}{DATA}{REWARD} rollout.workflow=x.py:C", "x.py"),
    "a model file": (f"{TRAIN}{DATA}{REWARD} model_files=[x.py:SPEC]", "x.py"),
    "verdicts": (f"{TRAIN}{DATA}{JUDGE} reward.judge.cache=x.cache", "x.cache"),
    "a model": (f"{TRAIN}{DATA}{REWARD} ref.path=x algorithm.kl_coef=0.1", "x"),
    "its config": ("plan actor.path=m", "m/config.json"),
    "its tokenizer": (f"{TRAIN}{DATA}{REWARD}", "m/tokenizer.json"),
    "its chat template": (f"{TRAIN}{DATA}{REWARD}", "m/chat_template.jinja"),
    "its weights": (f"{TRAIN}{DATA}{REWARD}", "m/model.safetensors"),
    "a start": (f"{TRAIN}{DATA}{REWARD} actor.checkpoint_load_path=x", "x"),
    "a trial": ("verify-checkpoint x", "x"),
    "its manifest": ("verify-checkpoint c", "c/recover_info/globalstep3/manifest.json"),
    "its marker": ("verify-checkpoint c", "c/recover_info/globalstep3/COMMIT"),
    "a run": ("export run", "run/manifest.json"),
}
"""Command, and the path that is none of what it wants."""
KINDS = {
    "a pipe": os.mkfifo,
    "a folder": os.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
}
OF_FOLDERS = {"recipe of plan": "is a folder, not a file", "a model": "has no config.json"}


@contextmanager
def ending_in(seconds):
    """TimeoutError in what takes longer, also in a call that waits."""

    def end(*_):
        raise TimeoutError(f"no end after {seconds} s")

    before = signal.signal(signal.SIGALRM, end)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", INPUTS)
def test_what_is_no_file_is_a_sentence(made, tmp_path, monkeypatch, name, kind):
    shutil.copytree(made, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("COLUMNS", "200")
    words, place = INPUTS[name]
    path = tmp_path / "here" / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    KINDS[kind](path)
    with ending_in(LIMIT_S):
        shown = CliRunner().invoke(app, words.split())
    assert isinstance(shown.exception, SystemExit), shown.exception
    assert shown.exit_code in (1, 2) and "Traceback" not in shown.output
    said = [line for line in shown.output.splitlines() if line.startswith(("*", str(tmp_path)))]
    names = {path.name} | ({path.parent.name} & {"globalstep3", "run"})
    assert any(name in line for line in said for name in names), shown.output
    if kind == "a folder" and name in OF_FOLDERS:
        assert OF_FOLDERS[name] in shown.output
