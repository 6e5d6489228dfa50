"""Reads model folders, where only plain files are opened, and trial folders."""

from __future__ import annotations

import json
import os
import re
import stat
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pentad.core.errors import Problem, UserError, raise_problems

MAX_JSON_BYTES = 100_000_000
"""Maximum header size of the safetensors format; config files and indexes are far smaller."""
MAX_ROW_BYTES = 32 << 20
"""Maximum size of a dataset row; real prompts, examples and documents are shorter."""
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
SUBFOLDERS = ("", "additional_chat_templates")
"""Subfolders in which transformers looks for a tokenizer's files."""
OF_FILES = (".json", ".jinja", ".txt", ".model", ".safetensors")
"""Suffixes of model files; transformers ignores folders with such a name."""
JsonPairs = list[tuple[str, Any]]


def what_else(path: Path) -> str | None:
    """Describes a path that is not a plain file (reading it may block); None for a plain file.
    OSError if it does not exist."""
    mode = path.stat().st_mode
    if stat.S_ISREG(mode):
        return None
    return "is a folder" if stat.S_ISDIR(mode) else "is a pipe, a socket or a device"


def open_file(path: Path) -> BinaryIO:
    """Opens a plain file, unbuffered; OSError if it does not exist."""
    if what_else(path) is not None:
        raise UserError(_not_plain(path))
    return path.open("rb", buffering=0)


def check_plain(folder: Path) -> None:
    """Rejects a folder with entries that are not plain files, before transformers reads them."""
    problems = []
    for place in (folder / name for name in SUBFOLDERS):
        entries = sorted(place.iterdir()) if place.is_dir() else []
        for path in entries:
            # A broken link is a missing file, which is reported where the file is needed.
            is_folder = path.is_dir() and path.suffix not in OF_FILES
            if path.exists() and not is_folder and what_else(path) is not None:
                problems.append(_not_plain(path))
    raise_problems(problems)


def _not_plain(path: Path) -> Problem:
    return Problem(
        str(path), f"{what_else(path)}, not a file", "put a file in its place, or remove it"
    )


def parse_json(text: bytes, pairs: Callable[[JsonPairs], Any] | None = None) -> Any:
    """`json.loads` that raises ValueError for every kind of invalid input."""
    try:
        return json.loads(text, object_pairs_hook=pairs)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; UserError if it has none, FileNotFoundError if it is missing."""
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
        raise UserError(Problem(str(path), "has no JSON object"))
    return value


def tensor_names(folder: Path) -> set[str]:
    """Names of the tensors in a HF folder, from its index or the header of its one file; empty if
    neither can be read, which is reported when the folder is loaded."""
    try:
        if (folder / INDEX).is_file():
            return set(read_object(folder / INDEX)["weight_map"])
        return set(_header(folder / SINGLE))
    except UNREADABLE:
        return set()


def tensor_bytes(folder: Path) -> dict[str, int]:
    """Bytes of each tensor, from the headers of the folder's files; unreadable files are
    skipped."""
    found: dict[str, int] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with suppress(*UNREADABLE):
            ends = {name: entry["data_offsets"] for name, entry in _header(path).items()}
            found |= {name: int(stop) - int(start) for name, (start, stop) in ends.items()}
    return found


UNREADABLE = (OSError, UserError, ValueError, KeyError, TypeError, AttributeError, struct.error)


def _header(path: Path) -> dict[str, Any]:
    with open_file(path) as handle:
        (length,) = struct.unpack("<Q", handle.read(8))
        header = parse_json(handle.read(min(length, MAX_JSON_BYTES)))
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


INFO, STATE = "recover_info", "recover_checkpoint"


def step_of(name: str) -> int | None:
    """The step in "globalstep12"; None for any other name."""
    found = re.fullmatch(r"globalstep(0|[1-9][0-9]{0,17})", name)
    return int(found[1]) if found else None


@dataclass(frozen=True, slots=True)
class RecoveryPath:
    """The parts of a path to a recovery checkpoint."""

    root: Path
    """The folder of the trial."""
    step: int | None = None
    role: str | None = None


def recovery_path(path: Path) -> RecoveryPath | None:
    """Parses a trial's root, `recover_info`, `ROLE/recover_checkpoint` or the folder of one step in
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
    """The problem of a path that is a recovery checkpoint where a model is expected."""
    if not path.is_dir() or recovery_path(path) is None:
        return None
    rule = "is a recovery checkpoint of a run, not a model"
    return Problem(where, rule, f"make a HF folder of it: pentad convert {path} HF_FOLDER")
