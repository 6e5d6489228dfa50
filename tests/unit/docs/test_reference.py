"""Commands and extras that the pages and the program's sentences name are there."""

import re
import tomllib
from pathlib import Path

import pytest

from pentad.cli.main import app

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SOURCES = sorted((ROOT / "pentad").rglob("*.py"))
COMMANDS = {command.name or command.callback.__name__ for command in app.registered_commands}
EXTRAS = set(
    tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_a_page_exist(page):
    text = page.read_text()
    named = re.findall(r"(?:^|`)(?:\$ )?pentad ([a-z][a-z-]+)", text, re.MULTILINE)
    assert {name for name in named if name not in COMMANDS} == set()


def test_extras_that_are_to_be_installed_exist_and_are_quoted_for_every_shell():
    for file in [*PAGES, *SOURCES]:
        text = file.read_text()
        named = re.findall(r"pip install (.?)pentad\[([\w,]+)\]", text)
        for quote, names in named:
            assert quote == "'" and set(names.split(",")) <= EXTRAS, f"{file}: {names}"
