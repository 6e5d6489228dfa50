"""The walks of docs/code-walks.md, and docs/architecture.md, name functions that are there."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGES = ("architecture.md", "code-walks.md")


def names_of(path: Path) -> set[str]:
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            inner = [n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
            found |= {f"{node.name}.{n.name}" for n in inner}
    return found


def test_every_step_of_the_walks_exists():
    page = "".join((ROOT / "docs" / name).read_text() for name in PAGES)
    steps = re.findall(r"`([\w/]+\.py):([\w.]+)`", page)
    assert len(steps) > 30
    missing = [step for step in steps if step[1] not in names_of(ROOT / "pentad" / step[0])]
    assert missing == []
    files = re.findall(r"`((?!tests/)\w+/[\w/]+\.py)`", page)
    assert [name for name in files if not (ROOT / "pentad" / name).exists()] == []
