"""Starts the process that reads data, rewards and workflows for `pentad plan` (`trainer.look`)."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from pentad.config.rules.rule import reads_any
from pentad.config.schema import Config
from pentad.core.errors import Problem
from pentad.core.machine import installed
from pentad.planner.plan import is_for_here
from pentad.planner.present import absence_problems, has_inputs, with_data_here

BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from pentad.trainer.look import main; main()"
)
TIMEOUT_S = 120.0
READ = (
    *("train_dataset", "valid_dataset", "actor.path", "template_args", "reward", "rollout"),
    *("gconfig.max_new_tokens", "gconfig.stop_token_ids", "evaluator.max_new_tokens"),
    *("model_files", "preference", "allocation_mode", "only", "use_streaming_dataset"),
)
"""Keys that the check reads; it is skipped if one of them is wrong."""


@dataclass(frozen=True, slots=True)
class Looked:
    """Result of reading the inputs of a run for a plan."""

    problems: list[Problem | str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    read: list[str] = field(default_factory=list)
    not_read: list[str] = field(default_factory=list)
    longest: int | None = None
    """Number of tokens of the longest training row that was read."""

    @property
    def lines(self) -> list[str]:
        return [*self.read, *(f"not looked at: {one}" for one in self.not_read)]

    def as_json(self) -> dict[str, list[str]]:
        return {"read": self.read, "not_read": self.not_read}


class Looking:
    """The check of a config's inputs, in a separate process."""

    def __init__(self, config: Config, gpu_memory: float | None) -> None:
        here, self.missing = with_data_here(config)
        self.absent = absence_problems(config) if is_for_here(config, gpu_memory) else []
        self.process: subprocess.Popen[bytes] | None = None
        if config.only == "train" or not has_inputs(here):
            return
        if any(installed(name) is None for name in ("torch", "transformers")):
            self.missing.append("data and rewards: reading them needs torch and transformers")
            return
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", BOOT, json.dumps(sys.path)]
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe)
        given, self.process.stdin = self.process.stdin, None
        assert given is not None, "it was started with a pipe"
        with suppress(BrokenPipeError), given:  # `result` reports why it ended
            given.write(pickle.dumps(config))

    def result(self) -> Looked:
        """Waits for the process; its failure is returned as a problem."""
        if self.process is None:
            return Looked(self.absent, not_read=self.missing)
        where = "data and rewards"
        try:
            out, said = self.process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            rule = f"reading them took more than {TIMEOUT_S:g} s"
            return Looked([*self.absent, Problem(where, rule, "find the code that waits")])
        if self.process.returncode != 0:
            last = said.decode(errors="replace").strip().splitlines() or [""]
            rule = f"the process that reads them ended with {self.process.returncode}: {last[-1]}"
            return Looked([*self.absent, Problem(where, rule)])
        found: dict[str, Any] = json.loads(out)
        problems = [
            Problem(*one) if isinstance(one, list) else one for one in found.pop("problems")
        ]
        return Looked([*self.absent, *problems], **found)

    def end(self) -> None:
        """Ends the process if its result was not needed."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


@contextmanager
def looking_at(config: Config, gpu_memory: float | None = None) -> Iterator[Looking]:
    """Starts reading the inputs of a run; missing ones are problems if it is for this machine."""
    looking = Looking(config, gpu_memory)
    try:
        yield looking
    finally:
        looking.end()


def input_problems(
    config: Config, bad: Collection[str], gpu_memory: float | None = None
) -> list[Problem | str]:
    """The problems of the inputs, to be reported with those of the rules; none if a key that they
    depend on is wrong."""
    if reads_any(READ, bad):
        return []
    with looking_at(config, gpu_memory) as looking:
        return looking.result().problems
