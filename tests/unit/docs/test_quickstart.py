"""The quickstart and the three pages after it are followed: blocks run and print as shown.

Sizes are the only change: the demo and the runs are a few steps. Numbers differ then, so shown and
real output are compared with every number replaced.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from pentad.cli import demo

ROOT = Path(__file__).parents[3]
PAGES = ("quickstart.md", "quickstart-environments.md", "own-task.md", "before-a-run.md")
PAGE = "".join((ROOT / "docs" / page).read_text() for page in PAGES)
DEMO = "make demo\nsource .venv/bin/activate\n"
SMALL_DEMO = ["total_train_steps=2", "train_dataset.batch_size=4", "gconfig.n_samples=4"]
SMALL = {
    "total_train_steps: 150": "total_train_steps: 2",
    "batch_size: 16": "batch_size: 2",
    "n_samples: 16": "n_samples: 2",
    '("valid", 100)': '("valid", 4)',
}
"""What the page says -> what is run here."""
NUMBER = re.compile(r"[-+]?\d[\d.,]*(e[-+]?\d+)?[kM]?")


@dataclass
class Block:
    language: str
    code: str
    shown: str
    """What the page says it prints."""


def blocks() -> list[Block]:
    found: list[Block] = []
    for language, text in re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL):
        if language == "text":
            found[-1].shown = text
        else:
            found.append(Block(language, text, ""))
    return found


def run(block: Block, folder: Path) -> subprocess.CompletedProcess[str]:
    code = block.code
    for size, small in SMALL.items():
        code = code.replace(size, small)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "100", "LC_ALL": "C"}
    how = {"cwd": folder, "env": env, "capture_output": True, "text": True, "timeout": 540}
    if block.language == "python":
        return subprocess.run([sys.executable, "-c", code], **how)
    shell = ["bash", "-euo", "pipefail", "-c"]
    last = re.fullmatch(r"(|.*\n)pentad ([^\n]*)\n", code, re.DOTALL)
    if last is None:
        return subprocess.run([*shell, code], **how)
    # Not by the shell: it starts warm.
    given = subprocess.run([*shell, f"{last[1]}printf '%s\\0' {last[2]}"], **how)
    assert given.returncode == 0, f"{last[1]}\n{given.stderr}"
    words = given.stdout.split("\0")[:-1]
    return subprocess.run([sys.executable, "-m", "pentad.cli.main", *words], **how)


def plain(text: str) -> list[str]:
    """Lines without numbers, runs of spaces, intervals (absent at 0) and what a model said."""
    lines = text.splitlines()
    said = {i + n for i, line in enumerate(lines) for n in (1, 2) if is_heading(line)}
    lines = [line for i, line in enumerate(lines) if i not in said or is_heading(line)]
    flat = (NUMBER.sub("0", line.strip()).replace(" +- 0", "") for line in lines)
    return [" ".join(line.split()) for line in flat if line]


def is_heading(line: str) -> bool:
    return line.startswith(("best of step", "worst of step"))


def missing_line(shown: str, real: str) -> str | None:
    """The first line of the page that does not come, in its turn, in the real output."""
    lines = iter(plain(real))
    return next((line for line in plain(shown) if line != "..." and line not in lines), None)


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A folder as after `make demo` in a clone, the demo being a small one; and what it printed."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    prepare = demo.prepare
    monkeypatch.setattr(
        demo, "prepare", lambda path, given, command: prepare(path, [*given, *SMALL_DEMO], command)
    )
    for name in ("NUM_TRAIN", "NUM_SFT", "NUM_VALID"):
        monkeypatch.setattr(demo, name, 16)
    return tmp_path


@pytest.mark.slow
@pytest.mark.usefixtures("started_warm")
def test_the_page_can_be_followed_literally(clone, capsys):
    first, *rest = blocks()
    assert first.code == DEMO
    demo.run_demo(seed=1, fileroot="runs", device="cpu")
    assert missing_line(first.shown, capsys.readouterr().out) is None
    for block in rest:
        out = run(block, clone)
        refused = "nothing was started" in block.shown
        assert out.returncode == (2 if refused else 0), f"{block.code}\n{out.stderr}"
        printed = out.stderr if refused else out.stdout
        assert missing_line(block.shown, printed) is None, f"{block.code}\n{printed}"


def test_sizes_that_are_made_small_are_on_the_page():
    assert [size for size in SMALL if size not in PAGE] == []


def test_lines_that_do_not_come_are_noticed():
    real = (
        "held out: accuracy 0.000 (version 0)\n    1  0.5 -\nbest of step 2:\n    a\n    b\nend\n"
    )
    assert missing_line("held out: accuracy 0.9 +- 0.1 (version 3)\n...\nend", real) is None
    assert missing_line("end\nheld out: accuracy 0.9 (version 3)", real) is not None
    assert missing_line("held out: reward 0.9 (version 3)", real) is not None
