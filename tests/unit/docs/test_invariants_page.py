"""docs/invariants.md names tests and checks that exist."""

import re
from pathlib import Path

from pentad_tools.chaos import invariants

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "invariants.md").read_text()


def test_every_test_on_the_page_exists():
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE)
    assert len(named) > 12
    for file, function in named:
        text = (ROOT / file).read_text()
        assert not function or f"def {function}(" in text, f"{file} has no {function}"


def test_every_check_of_a_scenario_is_on_the_page():
    rows = dict(re.findall(r"^\| (\w+) \|.*\| `(check_\w+)` \|$", PAGE, re.MULTILINE))
    assert rows == {name: check.__name__ for name, check in invariants.CHECKS.items()}
