"""Writes docs/configuration.md from the schema: every key with what it takes, default, meaning."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic.fields import FieldInfo

from pentad.config.describe import section_of, show, takes
from pentad.config.schema import Config, Section

INTRODUCTION = """\
# Configuration

A run is described by one YAML file, the recipe. A small one:

```yaml
experiment_name: sums
actor:
  path: models/qwen3-0.6b
  optimizer: {lr: 2e-6}
gconfig:
  n_samples: 8
  stop: ["${train_dataset.answer_key}:"]
train_dataset:
  path: data/sums.jsonl
  answer_key: answer
reward:
  fn: exact_match
```

**Overrides.** Every key can be set on the command line by its dotted path; the value is YAML, and
a leading `+` is accepted: `pentad train recipe.yaml gconfig.n_samples=16 gconfig.stop='["\\n"]'`.
An override wins over the file. The switches of `pentad train --help`, such as `--max-staleness 2`,
are another way to write overrides; setting one key both ways is an error.

**References.** `${other.key}` stands for the value of another key, also one left at its default;
`${oc.env:HOME}` for an environment variable, `${oc.env:NAME,fallback}` with a fallback. Write
`\\${` for the two characters themselves.

**Values.** Unquoted `true` and `false` are booleans, `null` is unset, `1e-6` is a number, and every
other word, `on`, `off` and `0010` among them, is text. Where a key takes text, a number is the text
that was written: `trial_name: 1.10` is "1.10". An override for text is that text (`a #b`, `*.x`)
unless it begins with a quote or a bracket, or is `null`. A key given twice is an error.

**Paths.** A relative path starts at the folder in which the command is typed, wherever the recipe
lies: models, data, rewards, agents, model files and `fileroot`. `~` is the home folder.

**Unset values.** A default of null means that the run chooses. Choices that follow from other keys
are made before the run starts and printed as notes; the config with all choices made is written
to the run's folder and can be used as a recipe. What is given explicitly is kept: values that
contradict each other are refused. (One is raised, with a note: `mb_spec.n_mbs` below the number of
pipeline stages.)

**Keys that are not read.** A key that differs from its default and that the run does not read given
its other keys, is told by a warning (`plan`: a note): `layers_per_stage` without a pipeline, for
instance. A detail of the algorithm that nobody reads is refused.

**Plan and start.** Whatever a start refuses for its config and its model's, `plan` says in the same
words. What is planned and not built yet is a note of the plan and a refusal of the start.

**Mistakes** are reported together, before anything starts, each with its key, its value, the line
it stands on, the rule and a remedy, and the command ends with exit code 2:

```
2 problems, nothing was started:
* actor.lr = 1e-06 (recipe.yaml:4): there is no such key; did you mean actor.optimizer.lr or \
critic.optimizer.lr?
* gconfig.temperature = 0: training needs samples that differ, and at 0 they are all the likeliest \
one; use 1.0; evaluator.temperature may be 0.
```

The tables below are generated from `pentad/config/schema.py` by `make docs`.
"""


def configuration_page() -> str:
    """The whole page."""
    pages = {section: name for name, section in reversed(list(_sections(Config, "")))}
    blocks = [INTRODUCTION, "## Top level", _table(Config)]
    for name, section in _sections(Config, ""):
        first = pages[section]
        if name == first:
            blocks += [f"## {name}", _table(section)]
        elif "." not in name:
            blocks += [f"## {name}", f"Takes the keys of `{first}`."]
    return "\n\n".join(block.strip() for block in blocks) + "\n"


def _sections(section: type[Section], prefix: str) -> Iterator[tuple[str, type[Section]]]:
    for name, field in section.model_fields.items():
        inner = section_of(field.annotation)
        if inner is not None:
            yield prefix + name, inner
            yield from _sections(inner, f"{prefix}{name}.")


def _table(section: type[Section]) -> str:
    rows = ["| key | takes | default | meaning |", "|---|---|---|---|"]
    for name, field in section.model_fields.items():
        cells = [f"`{name}`", takes(field), _default(field), field.description or ""]
        rows.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
    return "\n".join(rows)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "needed"
    return "see below" if isinstance(field.default, Section) else f"`{show(field.default)}`"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
