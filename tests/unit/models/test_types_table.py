"""The table of model types in docs/ is what `verify-model --table` finds."""

from pathlib import Path

import pytest
import torch
from tables import table
from transformers.utils import logging
from typer.testing import CliRunner

from pentad.cli.main import app
from pentad.models.families import has_file, known_families
from pentad_tools.models import types_table
from pentad_tools.models.types_table import TYPES, TypeReport, try_type, types_page

logging.disable_progress_bar()
PAGE = (Path(__file__).parents[3] / "docs" / "model-types.md").read_text()
ROWS = {
    cells[0]: cells
    for cells in ([one.strip() for one in line.split("|")[1:-1]] for line in PAGE.splitlines())
    if cells and cells[0] in TYPES
}
FIRST = ["bloom", "cohere2", "gemma2", "mixtral", "phi3", "qwen3_next", "seed_oss", "starcoder2"]
"""Those that `make test` tries; the sampler's own tests have others."""


@pytest.mark.parametrize("name", table(sorted(TYPES), sorted({*TYPES} - {*FIRST})))
def test_a_type_is_what_the_page_says(name):
    torch.set_num_threads(1)
    report = try_type(name)
    assert report.passed
    said, found = [*ROWS[name]], [*report.cells()]
    assert (said.pop(3) == "") is (found.pop(3) == "")  # digits of rounding differ by machine
    assert found == said


def test_the_page_has_every_type_once_and_every_family_of_a_file():
    assert list(ROWS) == sorted(TYPES) and len(TYPES) >= 40
    assert set(known_families()) - set(TYPES) == set()
    for name, (_, trains, samples, diff, reason) in ROWS.items():
        assert (trains != "rejected") is (diff != "") and (samples == "yes") is (reason == "")
        assert samples == "no" or trains != "rejected"
        assert not has_file(name) or "archon" in trains


def test_the_command_ends_with_1_where_log_probs_differ(monkeypatch):
    found = {"llama": 1e-6, "granite": 0.1}
    monkeypatch.setattr(types_table, "TYPES", dict.fromkeys(found, {}))
    monkeypatch.setattr(
        types_table, "try_type", lambda name: TypeReport(name, ("fsdp",), found[name])
    )
    ended = CliRunner().invoke(app, ["verify-model", "--table"])
    assert ended.exit_code == 1 and "granite: log-probs differ by 0.1" in ended.stderr
    assert ended.stdout == types_page() and "| llama | fsdp | yes | 1e-06 |  |" in ended.stdout
    for words in (["verify-model"], ["verify-model", "llama", "--table"]):
        assert CliRunner().invoke(app, words).exit_code == 2
