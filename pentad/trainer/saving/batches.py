"""The batches of a run's last steps, one file each: input of a replay or of a train-only run.

`batches/step12.groups` is a line of JSON, then the groups of step 12 (`data.packing`). The line has
the settings of the step and a digest of the rest. A file is renamed to its final name once it is
complete on disk, before its step is recorded. If a file cannot be written, a warning is logged and
training continues. `batches/step12.trained` has advantage and log-prob of every trained token, for
`pentad view`.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pentad.core.errors import Problem, RunError, UserError
from pentad.core.files import write_atomic
from pentad.core.types import Group, Prompt
from pentad.data.packing import pack_groups, unpack_groups

log = logging.getLogger(__name__)

FORMAT = 1
NAME = re.compile(r"step(\d+)\.groups")


@dataclass(frozen=True, slots=True)
class KeptBatch:
    """The batch of one step."""

    step: int
    facts: Mapping[str, Any]
    """Settings and figures of the step, as JSON values."""
    groups: list[Group]
    """The groups; their prompts contain only the gid."""


class BatchKeeper:
    """Writes the batches of a run and removes all but the last `num_kept`."""

    def __init__(self, folder: Path, num_kept: int, facts: Mapping[str, Any]) -> None:
        self.folder = folder
        self.num_kept = num_kept
        self.facts = dict(facts)
        self.num_failed = 0

    def keep(
        self, step: int, groups: Sequence[Group], write_trained: Callable[..., str | None]
    ) -> None:
        """Writes a batch. `write_trained` writes the figures of the step's tokens to `path`;
        returns an error text, or None."""
        if not self.num_kept:
            return
        try:
            self.write(step, groups)
            self._remove(lambda kept: kept <= step - self.num_kept)
            if problem := write_trained(path=str(trained_file(self.folder, step).absolute())):
                raise RunError(problem)
        except (OSError, RunError) as error:
            self.num_failed += 1
            if self.num_failed == 1:
                text = "step %d: its batch is not kept for replay: %s; training continues"
                log.warning(text, step, error)

    def forget(self, after: int) -> None:
        """Removes the batches of steps that will be repeated, and incomplete files of a killed
        run."""
        self._remove(lambda kept: kept > after)
        for left in self.folder.glob(".*.aside*"):
            left.unlink(missing_ok=True)

    def write(
        self, step: int, groups: Sequence[Group], more: Mapping[str, Any] | None = None
    ) -> None:
        data = b"".join(pack_groups(groups))
        digest = hashlib.sha256(data).hexdigest()
        has_greedy = all(group.greedy is not None for group in groups)
        facts = {"num_groups": len(groups), "has_greedy": has_greedy, **self.facts, **(more or {})}
        head = {"format": FORMAT, "step": step, **facts, "sha256": digest}
        self.folder.mkdir(exist_ok=True)
        place = self.folder / f"step{step}.groups"
        write_atomic(place, (json.dumps(head).encode() + b"\n", data))

    def _remove(self, is_over: Any) -> None:
        for step in kept_steps(self.folder):
            if is_over(step):
                (self.folder / f"step{step}.groups").unlink(missing_ok=True)
                trained_file(self.folder, step).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class TrainedTokens:
    """Figures of one sample's tokens in training."""

    gid: int
    index: int
    """Index of the sample in its group."""
    advantages: np.ndarray
    logprobs: np.ndarray
    """The trainer's log-probs, before the update."""


def trained_file(folder: Path, step: int) -> Path:
    return folder / f"step{step}.trained"


def write_trained(place: Path, samples: Sequence[TrainedTokens]) -> None:
    data = io.BytesIO()
    np.savez(
        data,
        samples=np.array([[one.gid, one.index, len(one.logprobs)] for one in samples], np.int64),
        advantages=np.concatenate([one.advantages for one in samples]).astype(np.float32),
        logprobs=np.concatenate([one.logprobs for one in samples]).astype(np.float32),
    )
    write_atomic(place, (data.getbuffer(),))


def read_trained(folder: Path, step: int) -> dict[tuple[int, int], TrainedTokens]:
    """Reads the figures by group and index; empty if the file is missing or damaged."""
    try:
        with np.load(trained_file(folder, step), allow_pickle=False) as file:
            samples, columns = file["samples"], (file["advantages"], file["logprobs"])
        ends = np.cumsum(samples[:, 2])[:-1]
        parts = zip(samples.tolist(), *(np.split(column, ends) for column in columns), strict=True)
        return {(gid, n): TrainedTokens(gid, n, a, b) for (gid, n, _), a, b in parts}
    except (OSError, ValueError, KeyError, IndexError, EOFError, zipfile.BadZipFile):
        return {}


def kept_steps(folder: Path) -> list[int]:
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(found[1]) for name in names if (found := NAME.fullmatch(name)))


def read_head(folder: Path, step: int) -> dict[str, Any]:
    """Reads the line of JSON of a batch; UserError if the file is not a batch."""
    with _reading(place := folder / f"step{step}.groups", step):
        with place.open("rb") as file:
            head = _head_of(file.readline(), step)
        _ = head["sha256"], head["num_groups"], head["size"]["max_row_tokens"]
    return head


def read_batch(folder: Path, step: int, digest: str | None = None) -> KeptBatch:
    """Reads the groups. UserError if the file is missing or damaged; `digest`: that of the groups,
    from `read_head`."""
    with _reading(place := folder / f"step{step}.groups", step):
        line, _, data = place.read_bytes().partition(b"\n")
        head, found = _head_of(line, step), hashlib.sha256(data).hexdigest()
        if head.pop("sha256") != found:
            raise ValueError("its digest does not match")
        if digest not in (None, found):
            raise ValueError("it has other groups than when the run began")
        groups = list(unpack_groups(bytearray(data), lambda gid: Prompt(gid, (), {})))
    return KeptBatch(step, head, groups)


def _head_of(line: bytes, step: int) -> dict[str, Any]:
    head: dict[str, Any] = dict(json.loads(line))
    if head["format"] != FORMAT or head["step"] != step:
        raise ValueError(f"it has format {head['format']!r} and step {head['step']!r}")
    return head


@contextmanager
def _reading(place: Path, step: int) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RunError) as error:
        rule = f"is not the batch of step {step} as it was written ({error})"
        raise UserError(Problem(str(place), rule)) from error
