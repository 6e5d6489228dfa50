"""The folder of a run's records: its layout, its lock, and the checks before anything starts.

`{fileroot}/logs/{user}/{experiment_name}/{trial_name}/` belongs to one run, which may be started
several times. Rejected are: a second program on the same folder, a config that does not fit the
run, and, unless the run resumes, a folder with steps.
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pentad
from pentad.core.errors import FULL, Problem, RunError, UserError, may_pass, raise_problems
from pentad.core.files import write_atomic
from pentad.core.folders import open_file, what_else
from pentad.core.lock import NAME, FolderLock
from pentad.core.machine import user_name
from pentad.telemetry import host
from pentad.telemetry.steps import read_lines

FORMAT = 1
"""Version of manifest.json, which describes the run and each of its starts:

{"format": 1, "config_digest": "...", "seed": 1, "config": {...},
 "starts": [{"time": "2026-03-01T12:00:00+00:00", "command": "...", "from_step": 0,
             "generation": 0, "versions": {...}, "git": {...}, "hardware": {...}}, ...]}
"""


def describe_start(**more: Any) -> dict[str, Any]:
    """Facts of this start; `more`: further facts, such as results of the self-test."""
    package = Path(pentad.__file__).parent
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "cwd": working_folder(),
        "versions": host.versions(),
        "git": host.git_state(package.parent),
        "hardware": host.hardware(),
        **more,
    }


def working_folder() -> str | None:
    """The working folder, base of relative paths in the config; None if it was deleted."""
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return None


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes a JSON file atomically."""
    write_atomic(path, (json.dumps(value, indent=2) + "\n").encode())


FILES = {
    "config.yaml": "The config with every value filled in; `pentad train` on it repeats the run.",
    "manifest.json": "Config digest, seed, and for every start the time, the step it resumed from, "
    "the command, package versions, git commit and hardware.",
    "steps.jsonl": "One JSON record per step: loss, rewards, lengths, ratios, timings, memory, and "
    "the counts of prompts. Every field is explained in docs/telemetry.md.",
    "timeline.jsonl": "One JSON record per step: what each process did and which gate was closed, "
    "as time spans (docs/telemetry.md).",
    "evals.jsonl": "One JSON record per evaluation: version of the weights, accuracy with its 95% "
    "interval, mean reward and length. Version 0 is the baseline before the first step.",
    "samples.jsonl": "A few samples of each step, the best, the worst and random ones: prompt, "
    "answer, reward and its parts, token ids, and the weight versions that sampled them.",
    "batches/": "The trained groups of the last telemetry.keep_batches steps, one file per step "
    "(with only: rollout, of every step): `pentad replay` trains one of these steps again, "
    "`--only train` all of them.",
    "groups/": "Samples that ranks on other machines read, in a run over several machines.",
    "reference/": "The actor's weights that became the reference, with ref_update_interval and a "
    "reference on its own devices: HF folders named by their step, the last two.",
    "log.txt": "Messages and warnings of all starts, with times.",
    "ranks/": "Output of each rank of a run over several processes, one file per rank; that of "
    "rank 0 is also on the screen and in log.txt. `stacks.txt` has the stacks of all ranks of "
    "groups that hung.",
    "ray.log": "Output of Ray while the run joined or started a cluster.",
    "recoveries.jsonl": "One JSON record per recovery of lost learners: cause, generation, ranks "
    "and layout, and the seconds by phase.",
    "slots/": "In an elastic run: its current ranks (`now.json`), and a file for each missing one "
    "(`pentad slots`).",
    "servers/": "Output of the samplers that the run started as processes or servers, one file "
    "each.",
    "tensorboard/": "The numbers of steps.jsonl as curves and samples as text, if "
    "telemetry.tensorboard is true: "
    "`tensorboard --logdir` on this folder.",
    "wandb/": "Local files of Weights & Biases, if telemetry.wandb is set.",
    "exit.json": "How the last start ended, for programs that supervise runs: complete, stopped "
    "(by a signal) or failed, the reason, and the step it resumes after; absent while it runs "
    "and after a kill.",
    "run.lock": "Locked by the running program, so that no second one writes here; it contains "
    "that program's machine and start time, and is empty otherwise.",
    "earlier/": "Records of former runs of this name that were started over with --fresh; their "
    "exports are in earlier/ of the checkpoint folder, under the same number.",
    "README.md": "This explanation.",
}
"""Name of each file that a run may write to its folder -> description."""

EARLIER = "earlier"
ANEW = "choose another trial_name, or start over with --fresh"

README = """\
# Records of one run

{table}

Lines of the .jsonl files are written as things happen, so they can be read while the run is active
and after a crash. Lines marked `superseded` belong to steps that a resumed run repeated.
Weights are in {checkpoints}.
"""

AcceptConfig = Callable[[Mapping[str, Any]], list[str]]
"""Compares the config of the last start with the present one: returns descriptions of the allowed
differences, raises UserError for others."""


class RunFolder:
    """An open run folder. Holds the lock until it is closed or the process ends."""

    def __init__(
        self, path: Path, lock: FolderLock, manifest: dict[str, Any], current: dict[str, Any]
    ) -> None:
        self.path = path
        self.manifest = manifest
        self.changes: list[str] = []
        """Descriptions of config keys that differ from the previous start."""
        self._current = current
        self._lock = lock

    def file(self, name: str) -> Path:
        assert name in FILES, f"{name} is not a file of a run folder"
        return self.path / name

    def check_there(self) -> None:
        """Raises RunError if the opened folder was deleted, moved or replaced."""
        if not self._lock.is_there():
            raise RunError(
                f"run folder = {self.path}: was deleted or replaced while the run was active, so "
                "its records are lost"
            )

    def add_start(self, start: Mapping[str, Any]) -> None:
        """Adds this start to the manifest, with the present config as that of the run."""
        changed = {"config_changes": self.changes} if self.changes else {}
        self.manifest |= self._current
        self.manifest["starts"].append({**start, **changed})
        write_json(self.file("manifest.json"), self.manifest)

    def close(self) -> None:
        self._lock.close()


def run_path(fileroot: str, experiment_name: str, trial_name: str, user: str | None = None) -> Path:
    """The path of a run's records; by default under the login name."""
    user = user or user_name()
    return Path(fileroot).expanduser() / "logs" / user / experiment_name / trial_name


def open_run_folder(
    path: Path,
    *,
    config: Mapping[str, Any],
    config_yaml: str,
    config_digest: str,
    seed: int,
    fresh: bool = False,
    exports: Path | None = None,
    accept: AcceptConfig | None = None,
    resumes: bool = False,
    has_checkpoint: bool = False,
) -> RunFolder:
    """Creates or reopens the folder; raises UserError if that is not allowed.

    `exports`: folder of the run's models, with a folder for each role. `fresh`: existing files and
    models are first moved to earlier/. `resumes`: existing steps are continued. `has_checkpoint`:
    models without records belong to a run that can be continued.
    """
    try:
        lock = FolderLock(path, f"run folder = {path}")
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        if fresh:
            set_aside([path] if exports is None else [exports, path])
        _check_plain(path)
        manifest = _read_manifest(path)
        changes = accept(manifest["config"]) if manifest and accept else []
        if not resumes:
            _check_steps(path)
        if not (resumes and (manifest or has_checkpoint)):
            _check_exports(exports)
        (path / "config.yaml").write_text(config_yaml, encoding="utf-8")
        place = "the run's checkpoint folder" if exports is None else str(exports)
        readme = README.format(table=file_table(), checkpoints=place)
        (path / "README.md").write_text(readme, encoding="utf-8")
        current = {
            "format": FORMAT,
            "config_digest": config_digest,
            "seed": seed,
            "config": dict(config),
        }
        manifest = manifest or {**current, "starts": []}
        write_json(path / "manifest.json", manifest)
    except OSError as error:
        lock.close()
        raise _unwritable(path, error) from error
    except BaseException:
        lock.close()
        raise
    folder = RunFolder(path, lock, manifest, current)
    folder.changes = changes
    return folder


def file_table() -> str:
    rows = [f"| `{name}` | {meaning} |" for name, meaning in FILES.items()]
    return "\n".join(["| file | what it is |", "|---|---|", *rows])


def _unwritable(path: Path, error: OSError) -> UserError | RunError:
    if may_pass(error) and error.errno not in FULL:
        return RunError(f"run folder = {path}: {error}; start again later")
    remedy = "set fileroot to a folder you may write to, with free space"
    rule = f"cannot be written ({error.strerror})"
    return UserError(Problem(f"run folder = {path}", rule, remedy))


def _check_plain(path: Path) -> None:
    """Rejects pipes and devices in place of record files, which would block the run."""
    problems = []
    for name in (name for name in FILES if not name.endswith("/")):
        with suppress(OSError):  # the reader of the file reports the error
            if other := what_else(path / name):
                remedy = "remove it, or choose another trial_name"
                problems.append(Problem(str(path / name), f"{other}, not a file", remedy))
    raise_problems(problems)


def _read_manifest(path: Path) -> dict[str, Any] | None:
    file = path / "manifest.json"
    try:
        with open_file(file) as handle:
            value = json.loads(handle.read())
    except FileNotFoundError:
        return None
    except OSError as error:
        text = f"cannot be read ({error.strerror}); nothing was changed"
        raise RunError(f"{file}: {text}; start again when it can be read") from error
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict) and type(value.get("format")) is int and value["format"] > FORMAT:
        raise RunError(
            f"{file}: its format is {value['format']}, and this version reads {FORMAT}; nothing "
            "was changed; use the version of Pentad that wrote it"
        )
    kinds = {"config_digest": str, "config": dict, "starts": list}
    if not isinstance(value, dict) or not all(
        isinstance(value.get(key), kind) for key, kind in kinds.items()
    ):
        raise UserError(Problem(str(file), "not the manifest of a run", ANEW))
    return value


def _check_steps(path: Path) -> None:
    steps = [r["step"] for r in read_lines(path / "steps.jsonl")]
    if steps:
        rule = f"already holds a run of {max(steps)} steps"
        raise UserError(Problem(f"run folder = {path}", rule, ANEW))


def _check_exports(exports: Path | None) -> None:
    """Rejects a folder with models of an earlier run that has no records any more."""
    found = sorted(exports.glob("[!.]*/epoch*globalstep*")) if exports is not None else []
    if found:
        rule = f"already holds models of an earlier run, such as {found[0].name}"
        raise UserError(Problem(f"checkpoint folder = {found[0].parent}", rule, ANEW))


def set_aside(roots: Sequence[Path]) -> list[Path]:
    """Moves the content of each folder into its earlier/001, 002, ..., with the same number for
    all; returns the new folders."""
    earlier = [int(entry.name) for root in roots for entry in (root / EARLIER).glob("[0-9]*")]
    number = max(earlier, default=0) + 1
    targets = []
    for root in roots:
        entries = list(root.iterdir()) if root.exists() else []
        old = [entry for entry in entries if entry.name not in (NAME, EARLIER)]
        if old:
            target = root / EARLIER / f"{number:03d}"
            target.mkdir(parents=True)
            for entry in old:
                entry.rename(target / entry.name)
            targets.append(target)
    return targets
