"""Writes the draft of a model file and says what to do with it."""

from __future__ import annotations

from pathlib import Path

import transformers

from pentad.core.errors import Problem, UserError
from pentad.models.families import read_config
from pentad.models.skeleton import draft, full_config


def run_new_model(config: str, out: str | None) -> None:
    """`config` is a folder, a config.json, or a model_type that transformers knows."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    text = draft(_read(config))
    family = _read(config)["model_type"]
    file = Path(out or f"{family}.py")
    if file.exists():
        rule = "is there already, and a draft would replace it"
        raise UserError(Problem(f"--out = {file}", rule, "name another file"))
    file.write_text(text)
    open_rules, unread = text.count("# no rule yet"), text.count("# not read: ")
    print(f"{file}: {text.count('Rule(')} rules", end="")
    print(f", {open_rules} tensors without one" if open_rules else "", end="")
    print(f", {unread} config keys that nothing reads" if unread else "")
    print(f"Next: pentad verify-model {file}")


def _read(config: str) -> dict[str, object]:
    if not Path(config).exists() and config in transformers.CONFIG_MAPPING:
        return full_config(config)
    return read_config(config)
