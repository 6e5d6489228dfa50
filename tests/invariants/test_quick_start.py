"""The quick start that users of other systems know, typed as it stands in docs/scaling.md."""

import re
import shlex
from pathlib import Path

import yaml
from typer.testing import CliRunner

from pentad.cli.main import app
from pentad.telemetry.steps import read_lines

PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"


def test_the_quick_start_trains_as_it_is_written(task, tmp_path, monkeypatch):
    (command,) = re.findall(r"^(pentad train --resource (?:.*\\\n)+.*)", PAGE.read_text(), re.M)
    words = shlex.split(command.replace("\\\n", " "))[1:]
    (tmp_path / "task").symlink_to(task)
    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(app, [*words, "user=me"])
    assert shown.exit_code == 0, shown.output
    records = tmp_path / "runs/logs/me/default/trial-0"
    assert len(read_lines(records / "steps.jsonl")) == 2
    config = yaml.safe_load((records / "config.yaml").read_text())
    assert (config["mode"], config["max_staleness"]) == ("hybrid", 2)
    assert config["num_iters_per_train_update"] == 8
    assert config["allocation_mode"] == "embedded:d1+archon:d1"
