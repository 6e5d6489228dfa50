import subprocess
import sys
from pathlib import Path

import pytest

from pentad_tools.docs import PACKAGE, PAGES, ROWS, TOOLS

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """What `make docs` writes."""
    folder = tmp_path_factory.mktemp("made") / "docs"
    subprocess.run([sys.executable, "-m", "pentad_tools.docs", folder], check=True, timeout=60)
    return folder


@pytest.mark.parametrize("name", PAGES)
def test_the_committed_page_is_current(written, name):
    text = (DOCS / name).read_text(encoding="utf-8")
    made = (written / name).read_text(encoding="utf-8")
    assert text == made, f"docs/{name} is out of date: run `make docs`"


def test_the_map_names_every_module_once(written):
    page = (written / "map.md").read_text(encoding="utf-8")
    lines = [line for line in page.splitlines() if line.startswith("- ")]
    named = [line.split("`")[1] for line in lines]
    files = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.glob("*/**/*.py")}
    files |= {path.relative_to(TOOLS.parent).as_posix(): path for path in TOOLS.rglob("*.py")}
    assert sorted(named) == sorted(name for name, path in files.items() if path.stat().st_size)
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert rooms <= set(" ".join(ROWS).split())


def test_make_docs_writes_the_pages(written):
    assert {path.name for path in written.iterdir()} == set(PAGES)
