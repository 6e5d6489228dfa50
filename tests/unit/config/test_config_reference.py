import re

import pytest

from pentad.config.describe import fields
from pentad.config.load import load_config
from pentad.config.resolve import resolve
from pentad.config.rules.check import check
from pentad.config.rules.rule import RunFacts
from pentad.core.errors import UserError
from pentad.planner.prepare import prepare
from pentad_tools.docs import configuration_page


def test_every_key_has_a_row_with_its_default():
    page = configuration_page()
    for key in fields():
        assert f"| `{key.rpartition('.')[2]}` |" in page, key
    assert "| `lr` | a number of at least 0 | `1e-06` |" in page
    assert page.count("## actor.optimizer") == 1
    assert "## critic\n\nTakes the keys of `actor`." in page
    assert "## valid_dataset\n\nTakes the keys of `train_dataset`." in page


def test_no_row_breaks_its_table():
    for line in configuration_page().splitlines():
        if line.startswith("| `"):
            assert len(re.findall(r"(?<!\\)\|", line)) == 5, line


def example() -> str:
    found = re.search(r"```yaml\n(.*?)```", configuration_page(), re.DOTALL)
    assert found
    return found[1]


def test_the_example_on_the_page_is_a_sound_recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(example())
    config = load_config(path, ["gconfig.n_samples=16", 'gconfig.stop=["\\n"]'])
    assert config.gconfig.stop == ("\n",)
    problems = check(resolve(load_config(path))[0], RunFacts(command="train"))
    assert {problem.where for problem in problems} == {
        "actor.path = models/qwen3-0.6b",
        "train_dataset.path = data/sums.jsonl",
    }, "only its files are not there"


def test_the_errors_shown_on_the_page_are_the_errors(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("experiment_name: sums\nactor:\n  path: Qwen/Qwen3-0.6B\n  lr: 1e-6\n")
    with pytest.raises(UserError) as caught:
        prepare(path, ["gconfig.temperature=0"], "plan")
    shown = "\n".join(f"* {problem}" for problem in caught.value.problems)
    assert f"```text\n2 problems, nothing was started:\n{shown}\n```" in configuration_page()
