"""`--device cpu` on a machine with GPUs is a command without GPUs."""

import os
import sys

import pytest
from typer.testing import CliRunner

from pentad.cli.main import app
from pentad.core.machine import find_gpus
from pentad.data.toy import write_model


@pytest.fixture
def gpus(tmp_path, monkeypatch):
    """Four of them, as nvidia-smi lists them."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nprint('H200, 140000, 139000, 550.1, 9.0\\n' * 4)\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    find_gpus.cache_clear()
    yield find_gpus()
    find_gpus.cache_clear()


@pytest.mark.parametrize(
    ("words", "given", "layout"),
    [
        (["--device", "cpu"], None, "embedded:d1|archon:d1"),
        (["--device", "cpu"], "0,1", "embedded:d1|archon:d1"),
        ([], "", "embedded:d1|archon:d1"),
        ([], "0,1", "embedded:d2|archon:d2"),
        ([], None, "embedded:d4|archon:d4"),
    ],
)
def test_the_default_layout_has_the_gpus_that_are_used(
    tmp_path, monkeypatch, gpus, words, given, layout
):
    assert len(gpus) == 4
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    find_gpus.cache_clear()
    write_model(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").touch()
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    seen = []
    monkeypatch.setattr(
        "pentad.cli.evaluate.run_eval_command",
        lambda config, **more: seen.append(config.allocation_mode),
    )
    data = ["--data", str(tmp_path / "rows.jsonl"), "--reward", "sort_digits"]
    said = CliRunner().invoke(app, ["eval", str(tmp_path / "model"), *data, *words])
    assert seen == [layout], said.output
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == given, "as it was before"


@pytest.mark.parametrize(
    ("command", "work"),
    [
        (["replay", "run", "--step", "1"], "pentad.cli.replay.run_replay_command"),
        (["demo"], "pentad.cli.demo.run_demo"),
        (["verify-parallel", "qwen3"], "pentad_tools.parallel.verify_parallel.run_verify_parallel"),
    ],
)
@pytest.mark.parametrize(("device", "count"), [("cpu", 0), ("auto", 4)])
def test_every_command_counts_the_gpus_that_it_uses(
    monkeypatch, gpus, command, work, device, count
):
    seen = []
    monkeypatch.setattr(work, lambda *args, **more: seen.append(len(find_gpus())))
    CliRunner().invoke(app, [*command, "--device", device])
    assert seen == [count] and len(find_gpus()) == 4
