"""Folders that several rooms read: models, of which only plain files are opened, and trials."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pentad.core.errors import Problem, UserError, raise_problems

MAX_JSON_BYTES = 100_000_000
"""What the safetensors format allows a header; config files and indexes are far smaller."""
MAX_ROW_BYTES = 32 << 20
"""Largest row of a dataset: no prompt, example or document is as long."""
SUBFOLDERS = ("", "additional_chat_templates")
"""Where transformers looks for a tokenizer's files."""
JsonPairs = list[tuple[str, Any]]


def open_file(path: Path) -> BinaryIO:
    """Opens a plain file, unbuffered; OSError where there is none."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise UserError(_not_plain(path))
    return path.open("rb", buffering=0)


def check_plain(folder: Path) -> None:
    """Refuses a folder with entries that cannot be read like files, before transformers tries."""
    problems = []
    for place in (folder / name for name in SUBFOLDERS):
        entries = sorted(place.iterdir()) if place.is_dir() else []
        for path in entries:
            # A link to nowhere is missing, which is reported where the file is wanted.
            mode = path.stat().st_mode if path.exists() else stat.S_IFREG
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                problems.append(_not_plain(path))
    raise_problems(problems)


def _not_plain(path: Path) -> Problem:
    what = "is a folder" if path.is_dir() else "is a pipe, a socket or a device"
    return Problem(str(path), f"{what}, not a file", "remove it from the model folder")


def parse_json(text: bytes, pairs: Callable[[JsonPairs], Any] | None = None) -> Any:
    """What `json.loads` gives; ValueError for anything that it cannot read."""
    try:
        return json.loads(text, object_pairs_hook=pairs)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; UserError where it is none, FileNotFoundError where it is not."""
    try:
        with open_file(path) as handle:
            size = os.fstat(handle.fileno()).st_size
            if size > MAX_JSON_BYTES:
                rule = f"has {size} bytes, and at most {MAX_JSON_BYTES} are read of a JSON file"
                raise UserError(Problem(str(path), rule))
            value = parse_json(handle.read())
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UserError(Problem(str(path), f"cannot be read ({error.strerror})")) from error
    except ValueError as error:
        raise UserError(Problem(str(path), f"is not JSON ({error})")) from error
    if not isinstance(value, dict):
        raise UserError(Problem(str(path), "holds no JSON object"))
    return value


INFO, STATE = "recover_info", "recover_checkpoint"


def step_of(name: str) -> int | None:
    """The step in "globalstep12"; None for any other name."""
    found = re.fullmatch(r"globalstep(0|[1-9][0-9]{0,17})", name)
    return int(found[1]) if found else None


@dataclass(frozen=True, slots=True)
class RecoveryPath:
    """What a path says of a recovery checkpoint."""

    root: Path
    """The folder of the trial."""
    step: int | None = None
    role: str | None = None


def recovery_path(path: Path) -> RecoveryPath | None:
    """For a trial's root, `recover_info`, `ROLE/recover_checkpoint` and the folder of one step in
    them; None for any other path."""
    path = path.absolute()
    if (path / INFO).is_dir():
        return RecoveryPath(path)
    step = step_of(path.name)
    parent = path if step is None else path.parent
    if parent.name == INFO:
        return RecoveryPath(parent.parent, step)
    if parent.name == STATE:
        return RecoveryPath(parent.parents[1], step, parent.parent.name)
    return None


def recovery_problem(where: str, path: Path) -> Problem | None:
    """The sentence for a recovery checkpoint in the place of a model."""
    if not path.is_dir() or recovery_path(path) is None:
        return None
    rule = "is a recovery checkpoint of a run, not a model"
    return Problem(where, rule, f"make a HF folder of it: pentad convert {path} HF_FOLDER")
