import subprocess
import sys
from pathlib import Path

import pytest

from pentad_tools.docs import PACKAGE, PAGES, ROWS, TOOLS, map_page

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("name", PAGES)
def test_the_committed_page_is_current(name):
    text = (DOCS / name).read_text(encoding="utf-8")
    assert text == PAGES[name](), f"docs/{name} is out of date: run `make docs`"


def test_the_map_names_every_module_once():
    lines = [line for line in map_page().splitlines() if line.startswith("- ")]
    named = [line.split("`")[1] for line in lines]
    files = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.glob("*/**/*.py")}
    files |= {path.relative_to(TOOLS.parent).as_posix(): path for path in TOOLS.rglob("*.py")}
    assert sorted(named) == sorted(name for name, path in files.items() if path.stat().st_size)
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert rooms <= set(" ".join(ROWS).split())


def test_make_docs_writes_the_pages(tmp_path):
    command = [sys.executable, "-m", "pentad_tools.docs", str(tmp_path / "docs")]
    subprocess.run(command, check=True, timeout=60)
    assert {path.name for path in (tmp_path / "docs").iterdir()} == set(PAGES)
