"""The walks of docs/code-walks.md, and docs/architecture.md, name functions that are there and call
each other."""

import ast
import json
import re
import runpy
import subprocess
import sys
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
    files = re.findall(r"`((?!tests/|scripts/)\w+/[\w/]+\.py)`", page)
    assert [name for name in files if not (ROOT / "pentad" / name).exists()] == []


def source_of(file: str, function: str) -> str:
    """The text of a function, which may be a method."""
    text = (ROOT / "pentad" / file).read_text()
    found = ast.parse(text).body
    for name in function.split("."):
        (node,) = [one for one in found if getattr(one, "name", "") == name]
        found = getattr(node, "body", [])
    return ast.get_source_segment(text, node) or ""


def calls(first: tuple[str, str], second: tuple[str, str]) -> bool:
    name = second[1].rpartition(".")[2]
    return re.search(rf"\b{name}\b", source_of(*first).partition("\n")[2]) is not None


def test_every_arrow_of_the_walks_is_a_call():
    page = (ROOT / "docs" / "code-walks.md").read_text()
    step = r"`([\w/]+\.py):([\w.]+)`"
    arrows = [found.groups() for found in re.finditer(rf"{step} -> (?={step})", page)]
    assert len(arrows) > 25
    wrong = [one for one in arrows if not calls(one[:2], one[2:])]
    assert wrong == []


def test_an_arrow_that_is_no_call_is_seen():
    run = "trainer/run.py"
    assert calls((run, "Run.steps"), (run, "Run._step"))
    assert not calls((run, "Run.steps"), (run, "Run._save"))


TRACED = """
import runpy, sys
from pentad.core.layout import parse_allocation
paths = runpy.run_path(sys.argv[1])
sys.setprofile(paths["Tracer"](sys.argv[2], [sys.argv[3:5]]))
parse_allocation("archon:d2")
"""


def test_a_traced_stack_has_every_function_between_two(tmp_path):
    script, notes = ROOT / "scripts" / "paths.py", tmp_path / "stacks"
    first, last = "core/layout.py:parse_allocation", "core/layout.py:_Parser.word"
    # In a process without other threads: in CPython 3.11.7 a function that is entered under a
    # profiler can be interrupted without end.
    command = [sys.executable, "-c", TRACED, str(script), str(notes), first, last]
    subprocess.run(command, check=True, timeout=120, cwd=ROOT)
    stacks = [json.loads(line) for line in notes.read_text().splitlines()]
    parser = [f"core/layout.py:_Parser.{name}" for name in ("allocation", "group", "component")]
    assert stacks == [[first, last, [first, *parser, last]]]
    path = {"what": "string", "spans": [[first, last]], "unseen": ["core/x.py"]}
    assert runpy.run_path(str(script))["files_of"](path, stacks) == {"core/layout.py", "core/x.py"}
