"""`pentad verify-model` and `pentad new-model`: what they print, and how they exit."""

import json

import pytest
from typer.testing import CliRunner

from pentad.cli.main import app
from pentad.models import families

run = CliRunner().invoke


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(families, "REGISTERED", {})
    families._load.cache_clear()
    yield
    families._load.cache_clear()


def test_a_right_family_exits_with_zero_and_a_table():
    result = run(app, ["verify-model", "llama"])
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert any(line.split()[:3] == ["layers.{i}.attn.q.weight", "Q", "D"] for line in lines)
    assert any(line.startswith("logits and gradients") and " passed" in line for line in lines)
    assert lines[-1].startswith("llama: ") and "checks passed in" in lines[-1]


def test_a_wrong_file_exits_with_one_and_names_the_tensor(tmp_path):
    assert run(app, ["new-model", "llama", "--out", "mine.py"]).exit_code == 0
    text = (tmp_path / "mine.py").read_text()
    wrong = text.replace("post_attention_layernorm", "x").replace("input_", "post_attention_")
    (tmp_path / "mine.py").write_text(wrong.replace("x.weight", "input_layernorm.weight"))
    result = run(app, ["verify-model", "mine.py", "--json"])
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["passed"] is False and report["family"] == "llama"
    failed = {outcome["check"] for outcome in report["outcomes"] if not outcome["passed"]}
    assert failed == {"logits and gradients", "pipeline stages", "Megatron", "value head"}


def test_what_is_not_known_exits_with_two():
    result = run(app, ["verify-model", "nonsense"])
    assert result.exit_code == 2
    assert "model_type = nonsense: no such model family" in result.stderr
    result = run(app, ["new-model", "nonsense"])
    assert result.exit_code == 2 and "no config.json there" in result.stderr
