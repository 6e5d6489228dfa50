"""Writes the generated pages of docs/: the configuration reference, the map, the step records."""

from __future__ import annotations

import ast
import dataclasses
import re
import sys
from pathlib import Path

from pydantic.fields import FieldInfo

import pentad
from pentad.config.describe import fields, section_of, show, takes
from pentad.config.schema import RecipeConfig
from pentad.core.section import Section
from pentad.telemetry.record import BLOCKS, StepRecord
from pentad.telemetry.timeline import LANES, LINE

PACKAGE = Path(pentad.__file__).parent
TOOLS = Path(__file__).parent
ROWS = (
    "core",
    "telemetry rl",
    "ops weights",
    "models parallel data runtime",
    "config engine infer sync checkpoint",
    "planner samplers rewards serve",
    "rollout",
    "trainer",
    "view",
    "cli api",
)
"""Packages in the order of their layers, each importing only from lines above its own."""

MAP = """\
# Map of the code

One line per module: the first sentence of its docstring. A package imports only from the rows above
its row, and none imports `pentad_tools`; `tests/test_house.py` checks this. Written by `make docs`.
"""


def map_page() -> str:
    """The module map: one line per module, ordered by layers of packages."""
    blocks = [MAP.strip()]
    for number, row in enumerate(ROWS):
        for package in row.split():
            lines = _lines(PACKAGE / package, PACKAGE)
            if lines:
                blocks += [f"## {package} (row {number})", lines]
    blocks += ["## pentad_tools (beside the package)", _lines(TOOLS, TOOLS.parent)]
    return "\n\n".join(blocks) + "\n"


def _lines(folder: Path, root: Path) -> str:
    return "\n".join(filter(None, (_line(path, root) for path in sorted(folder.rglob("*.py")))))


def _line(path: Path, root: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    if text is None:
        return ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    sentence = re.split(r"(?<=\.)\s", paragraph)[0]
    return f"- `{path.relative_to(root).as_posix()}`: {sentence}"


CONFIGURATION = """\
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

**Values.** Unquoted `true` and `false` are booleans, `null` is unset, and `1e-6` is a number. Every
other word is text, including `on`, `off` and `0010`. If a key takes text, a number is kept as
written: `trial_name: 1.10` is "1.10". An override for such a key is taken literally (`a #b`, `*.x`)
unless it begins with a quote or a bracket, or is `null`. A key given twice is an error.

**Paths.** A relative path starts at the current folder of the command, not at the folder of the
recipe: models, data, rewards, agents, model files and `fileroot`. `~` is the home folder.

**Unset values.** A default of null means that the run chooses. Choices that follow from other keys
are made before the run starts and printed as notes; the config with all choices is written to the
run's folder and can be used as a recipe. Explicit values are kept, and values that contradict each
other are rejected. (One exception, with a note: `mb_spec.n_mbs` is raised to the number of
pipeline stages.)

**Aliases.** `resource` and `parallelism` are other ways to write `allocation_mode`; `use_kl_loss`
and `use_tis` switch keys of `algorithm`. Each is replaced by its key, with a note; the config that
a run writes contains only the keys. An alias that contradicts its key is rejected.

**Keys that are not read.** If a key differs from its default but has no effect because of other
keys, a warning names it (in `plan` a note): for example `layers_per_stage` without a pipeline. A
setting that the algorithm does not read is rejected.

**Plan and start.** `plan` reports every error of the config and the model that a start would
report, in the same words. An unsupported combination that can still be planned is a note in `plan`
and an error at the start.

**Mistakes** are reported together, before anything starts, each with key, value, line, rule and
remedy; the exit code is 2:

```text
2 problems, nothing was started:
* actor.lr = 1e-06 (recipe.yaml:4): there is no such key; did you mean actor.optimizer.lr or \
critic.optimizer.lr?
* gconfig.temperature = 0: training needs samples that differ, and at 0 all of them are the most \
likely one; use 1.0; evaluator.temperature may be 0.
```

The tables below are generated from `pentad/config/schema.py` by `make docs`.
"""


def configuration_page() -> str:
    """The configuration reference, docs/configuration.md."""
    blocks = [CONFIGURATION, "## Top level", _keys_table(RecipeConfig)]
    pages: dict[type[Section], str] = {}
    for name, field in fields().items():
        section = section_of(field.annotation)
        if section is None:
            continue
        first = pages.setdefault(section, name)
        if name == first:
            blocks += [f"## {name}", _keys_table(section)]
        elif "." not in name:
            blocks += [f"## {name}", f"Takes the keys of `{first}`."]
    return "\n\n".join(block.strip() for block in blocks) + "\n"


def _keys_table(section: type[Section]) -> str:
    if not section.model_fields:  # a free-form mapping
        return f"{section.__doc__} Values are true, false, numbers or texts."
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


def telemetry_page() -> str:
    """The reference of step records, docs/telemetry.md."""
    lines = [TELEMETRY, *_fields_table("", StepRecord)]
    for block, cls in BLOCKS.items():
        lines += [f"\n## `{block}`\n"]
        if cls.__doc__ and not cls.__doc__.startswith(cls.__name__ + "("):
            lines += [cls.__doc__ + "\n"]
        lines += _fields_table(f"{block}.", cls)
    for head, meanings in ((TIMELINE, LINE), (LANES_HEAD, LANES)):
        lines += [head, *(f"| `{name}` | {meaning} |" for name, meaning in meanings.items())]
    return "\n".join(lines) + "\n"


TELEMETRY = """# Telemetry

`steps.jsonl` in the run folder has one JSON object per line, one line per step. Every field below
is in every record; fields that do not apply or were not measured are `null`. This page is made
from the classes in `pentad/telemetry/record.py` by `make docs`.

`pentad.telemetry.steps.read_lines(path)` reads the file. It skips a last line that a crash
left incomplete. It also skips steps that a resumed run repeated; the file keeps them, marked
`superseded`.

Two runs with the same seed give the same records, except for the fields marked *varies*, such as
times and memory.

| field | meaning | unit | varies |
|---|---|---|---|
| `schema` | version of this format, 1 | | |
| `nonfinite` | fields that are null because they were NaN or infinite, with their values | | |"""


TIMELINE = """
## timeline.jsonl

One JSON object per line, one line per step: what the processes of the run did and waited for, as
time spans, which `pentad view` draws. All values are measurements. Lines of steps that a resumed
run repeated are marked `superseded`.

| field | meaning |
|---|---|"""
LANES_HEAD = """
| lane | its spans |
|---|---|"""


def _fields_table(prefix: str, cls: type) -> list[str]:
    head = ["| field | meaning | unit | varies |", "|---|---|---|---|"] if prefix else []
    rows = []
    for entry in dataclasses.fields(cls):
        meaning, unit = entry.metadata["meaning"], entry.metadata["unit"]
        if entry.name in BLOCKS:
            meaning = "see below"
        varies = "yes" if entry.metadata["varies"] else ""
        rows.append(f"| `{prefix}{entry.name}` | {_cell(meaning)} | {unit} | {varies} |")
    return [*head, *rows]


PAGES = {"configuration.md": configuration_page, "map.md": map_page, "telemetry.md": telemetry_page}


def main() -> None:
    """Writes every generated page into the folder given as the only argument."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m pentad_tools.docs FOLDER")
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (folder / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
