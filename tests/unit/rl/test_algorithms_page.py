"""docs/algorithms.md: the table is the code's, and the worked example runs and is right."""

import re
from pathlib import Path

import numpy as np
import plain_rl
import pytest
import torch
from plain_rl import Plain
from ragged_batches import make_groups

from pentad.rl.algorithms import FUNCTIONS, build_policy_loss, make_rows
from pentad.rl.facts import FACTS
from pentad.rl.section import AlgorithmConfig

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "algorithms.md").read_text() + (DOCS / "adding-an-algorithm.md").read_text()


def line_of(name):
    entry = FACTS[name]
    needs = {"critic": entry.needs_critic, "teacher": entry.needs_teacher}
    models = ", ".join(model for model in needs if needs[model]) or "-"
    defaults = ", ".join(f"{key}={value}" for key, value in entry.defaults.items())
    defaults = defaults.replace("True", "true")
    cells = (name, entry.text, entry.scope, models, defaults, f"[link]({entry.paper})")
    return f"| {' | '.join(cells)} |"


@pytest.mark.parametrize("name", FACTS)
def test_the_page_has_the_line_of_every_entry(name):
    assert line_of(name) in PAGE


def test_the_page_has_no_other_entries():
    table = PAGE[: PAGE.index("## What the settings do")]
    assert re.findall(r"^\| (\w+) \| [A-Z]", table, re.MULTILINE) == list(FACTS)


def test_the_worked_example_runs_and_equals_its_formula():
    code = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert code is not None
    known, functions = dict(FACTS), dict(FUNCTIONS)
    try:
        exec(compile(code[1], "docs/algorithms.md", "exec"), {})
        (name,) = set(FACTS) - set(known)
        groups = make_groups(np.random.default_rng(2), [3, 2, 4])
        settings = AlgorithmConfig.model_construct(name=name, **FACTS[name].defaults)
        rows = make_rows(groups, settings, max_new_tokens=8)
        assert build_policy_loss(settings).columns == ("weights", "advantages")
    finally:
        for table, before in ((FACTS, known), (FUNCTIONS, functions)):
            table.clear()
            table.update(before)
    samples = [
        Plain(g.gid, s.reward, s.mask.tolist(), [0.0] * s.ids.size)
        for g in groups
        for s in g.samples
    ]
    expected = plain_rl.whiten(plain_rl.dr_grpo(samples), samples)
    for row, values in zip(rows, expected, strict=True):
        # Rounded once to fp32.
        torch.testing.assert_close(row.columns["advantages"], torch.tensor(values))
    assert any(row.columns["advantages"].abs().max() > 0.1 for row in rows)
