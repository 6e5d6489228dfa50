"""`verifiers:ID?python=ENVIRONMENT`: tasks of the package verifiers as rows, and its worker.

The package needs other versions than Pentad, so it has a separate Python environment; `python` is
its folder or its interpreter. Other options: `size` (rows), `harness`, `runtime`, and fields of the
taskset's config (`split=test`).
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from pentad.core.errors import Problem, UserError, one_line

WORKER = Path(__file__).with_name("verifiers_worker.py")
LOAD_TIMEOUT_S = 600.0
OURS = ("harness", "runtime", "size")


def settings_of(spec: str, where: str) -> dict[str, Any]:
    """The worker's settings for a dataset name."""
    name, _, query = spec.partition(":")[2].partition("?")
    options = dict(parse_qsl(query))
    options.pop("python", None)
    own: dict[str, Any] = {key: options.pop(key) for key in OURS if key in options}
    if "size" in own:
        if not own["size"].isdigit() or not int(own["size"]):
            raise UserError(Problem(where, f"size = {own['size']} is not a number of rows"))
        own["size"] = int(own["size"])
    return {"id": name, **own, "options": options}


def interpreter(spec: str, where: str) -> str:
    """The interpreter of the environment with verifiers; by default that of this process."""
    wanted = dict(parse_qsl(spec.partition("?")[2])).get("python")
    if wanted is None:
        return sys.executable
    given = Path(wanted).expanduser().absolute()
    python = given / "bin" / "python" if given.is_dir() else given
    if not os.access(python, os.X_OK):
        rule = f"there is no interpreter {python}"
        remedy = "give the Python of the environment that has verifiers, or its folder"
        raise UserError(Problem(where, rule, remedy))
    return str(python)


def command_of(spec: str, where: str) -> list[str]:
    """The command line of the worker, without its last arguments."""
    python = interpreter(spec, where)
    return [python, "-P", str(WORKER), json.dumps(settings_of(spec, where))]


def environment_of(command: list[str]) -> dict[str, str]:
    """The worker's variables: without PYTHONPATH, and with its programs (uv) on PATH."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    programs = f"{Path(command[0]).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**kept, "PATH": programs, "CUDA_VISIBLE_DEVICES": ""}


def problem(where: str, said: str) -> Problem:
    """The problem of a failed load, with the remedy if the package is missing."""
    remedy = ""
    if "No module named 'verifiers" in said:
        remedy = "install it in a separate environment (pip install verifiers uv) and give its "
        remedy += "folder, as in verifiers:ID?python=FOLDER"
    return Problem(where, f"it cannot be loaded ({one_line(said, 500)})", remedy)


class MadeRows:
    """Rows that a package generates, all in memory."""

    def __init__(self, path: str, rows: list[dict[str, Any]]) -> None:
        self.path = path
        self.rows = rows
        self.digest = hashlib.blake2b(json.dumps(rows).encode(), digest_size=16).digest()

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, index: int) -> dict[str, Any]:
        return self.rows[index]

    def where(self, index: int) -> str:
        return f"{self.path}:{index + 1}"


class VerifiersRows(MadeRows):
    """Rows with `prompt` and `verifiers`, the task as JSON."""

    def __init__(self, path: str, *, limit: int | None, where: str) -> None:
        command = [*command_of(path, where), "rows"]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=LOAD_TIMEOUT_S,
                env=environment_of(command),
            )
        except subprocess.TimeoutExpired:
            rule = f"its tasks were not loaded within {LOAD_TIMEOUT_S:g} s"
            raise UserError(Problem(where, rule)) from None
        if done.returncode:
            raise UserError(problem(where, done.stderr.strip().rpartition("\n")[2]))
        said = json.loads(done.stdout)
        if "error" in said:
            raise UserError(problem(where, said["error"]))
        if not (rows := said["rows"][:limit]):
            raise UserError(Problem(where, "it has no tasks"))
        super().__init__(path, rows)
