"""What docs/memory.md and docs/parallelism.md show is what the command prints."""

from pathlib import Path

from pentad.cli import plan as cli
from pentad.config.load import read_config
from pentad.config.rules.layout import layout_problems
from pentad.planner.prepare import prepare

ROOT = Path(__file__).parents[3]
PAGE = "".join((ROOT / "docs" / name).read_text() for name in ("memory.md", "parallelism.md"))


def test_the_output_on_the_page_is_current(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    config, notes = prepare(ROOT / "examples" / "archon_qwen3_moe.yaml", [], "plan")
    assert cli.run_plan(config, notes, gpu_memory=48.0) == 1
    printed = capsys.readouterr().out.splitlines()
    # The page leaves out files, which depend on the disk of the machine, and notes.
    end = printed.index("", printed.index("Notes"))
    kept = printed[: printed.index("Files")] + printed[end + 1 :]
    shown = PAGE.partition("```text\n")[2].partition("```")[0].strip("\n").splitlines()
    assert shown == kept


def test_the_error_on_the_page_is_current():
    words = ["actor.path=Qwen3-8B", "allocation_mode=sglang:d4+archon:d1p2e2"]
    (problem,) = layout_problems(read_config(None, words).config, None)
    assert f"```text\n{problem}\n```" in PAGE
