"""Training commands as Python functions, with rows, rewards and environments of the session.

Python objects are written to files that the config names, so that the run is checked, recorded and
resumed like one started from a recipe.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, ModuleType, TracebackType
from typing import Any

from pentad.config.load import read_config
from pentad.config.recipe_file import dump_yaml, write_override
from pentad.config.rules.rule import RunCommand
from pentad.config.schema import Config
from pentad.core.errors import Problem, Stopped, UserError
from pentad.core.files import write_atomic
from pentad.core.scratch import scratch_folder
from pentad.planner.prepare import prepare
from pentad.telemetry.recorder import listening
from pentad.trainer.context import RunSummary

RecipeOrPath = str | Path | Mapping[str, Any]
RowsOrPath = str | Sequence[Mapping[str, Any]]
Reward = str | Callable[..., Any] | Sequence[str | Callable[..., Any]]
OnStep = Callable[[dict[str, Any]], object]
ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def train(
    recipe: RecipeOrPath,
    *,
    reward: Reward | None = None,
    dataset: RowsOrPath | None = None,
    valid_dataset: RowsOrPath | None = None,
    environment: str | type | None = None,
    on_step: OnStep | None = None,
    overrides: Mapping[str, Any] | None = None,
    in_process: bool = False,
    fresh: bool = False,
    device: str = "auto",
) -> RunSummary:
    """Runs reinforcement learning like `pentad train`; returns the folders of records and model.

    `recipe` is a YAML file or a dict of the same keys, `overrides` has further values by dotted
    key. `on_step` is called with the record of each step. With `in_process` the reward runs in this
    process.
    """
    given = _Given(recipe, overrides)
    given.set_rows("train_dataset", dataset)
    given.set_rows("valid_dataset", valid_dataset)
    given.set_reward(reward, in_process=in_process)
    given.set_environment(environment)
    return _run(given, "train", on_step, fresh=fresh, device=device)


class OnExamples:
    """A command that trains on examples, as a Python function."""

    def __init__(self, command: RunCommand, doc: str) -> None:
        self.command = command
        self.__doc__ = f"{doc}, as `pentad {command}`; returns the folders of records and model."

    def __call__(
        self,
        recipe: RecipeOrPath,
        *,
        dataset: RowsOrPath | None = None,
        valid_dataset: RowsOrPath | None = None,
        on_step: OnStep | None = None,
        overrides: Mapping[str, Any] | None = None,
        fresh: bool = False,
        device: str = "auto",
    ) -> RunSummary:
        given = _Given(recipe, overrides)
        given.set_rows("train_dataset", dataset)
        given.set_rows("valid_dataset", valid_dataset)
        return _run(given, self.command, on_step, fresh=fresh, device=device)


sft = OnExamples("sft", "Supervised fine-tuning")
dpo = OnExamples("dpo", "Training on preferences")
reward_model = OnExamples("reward-model", "Training of a reward model on preferences")


class _Given:
    """A recipe, and the overrides for the arguments of a call."""

    def __init__(self, recipe: RecipeOrPath, overrides: Mapping[str, Any] | None) -> None:
        if not isinstance(recipe, str | Path | Mapping):
            rule = "is neither the path of a YAML file nor a dict of keys"
            raise UserError(Problem(f"recipe = {recipe!r}", rule))
        self.recipe = recipe
        self.overrides = [write_override(key, value) for key, value in (overrides or {}).items()]

    @contextmanager
    def file(self) -> Iterator[Path]:
        """Yields the recipe as a file; the keys of a dict may be dotted."""
        if not isinstance(self.recipe, Mapping):
            yield Path(self.recipe)
            return
        with scratch_folder("recipe") as folder:
            path = folder / "recipe"
            path.write_text(dump_yaml(_nested(self.recipe)))
            yield path

    def read(self) -> Config:
        """The config, without the problems in it, which `prepare` reports."""
        with self.file() as path:
            return read_config(path, self.overrides).config

    @property
    def folder(self) -> Path:
        """Folder for the files of this run's objects."""
        config = self.read()
        return Path(config.fileroot) / "given" / config.experiment_name / config.trial_name

    def set(self, key: str, value: Any) -> None:
        self.overrides.append(write_override(key, value))

    def set_rows(self, block: str, rows: RowsOrPath | None) -> None:
        if rows is None:
            return
        if not isinstance(rows, str):
            path = self.folder / f"{block}.jsonl"
            text = "".join(f"{_line(block, n, row)}\n" for n, row in enumerate(rows))
            if not path.exists() or path.read_text() != text:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(path, text.encode())
            rows = str(path)
        self.set(f"{block}.path", rows)

    def set_reward(self, reward: Reward | None, *, in_process: bool) -> None:
        if reward is None:
            return
        if in_process:
            self._score_here(reward)
            return
        listed = [reward] if callable(reward) or isinstance(reward, str) else list(reward)
        specs = [one if isinstance(one, str) else self._written(one, "reward") for one in listed]
        self.set("reward.fn", specs[0] if len(specs) == 1 else specs)

    def _score_here(self, reward: Reward) -> None:
        from pentad.api.here import REWARDS

        name = getattr(reward, "__name__", "reward").strip("<>")
        if not callable(reward):
            rule = "takes one function, as reward="
            raise UserError(Problem("in_process = true", rule, "leave it out for names and lists"))
        if self.read().rollout.workflow not in ("single_turn", f"pentad.api.here:{name}"):
            rule = "scores single answers, and the recipe has another workflow"
            raise UserError(Problem("in_process = true", rule, "give its reward as a file"))
        REWARDS[name] = reward
        self.set("rollout.workflow", f"pentad.api.here:{name}")

    def set_environment(self, environment: str | type | None) -> None:
        if environment is None:
            return
        if not isinstance(environment, str):
            is_workflow = hasattr(environment, "run")
            environment = self._written(environment, "environment")
            environment = environment if is_workflow else f"class:{environment}"
        self.set("rollout.workflow", environment)

    def _written(self, given: Callable[..., Any], what: str) -> str:
        folder = self.folder
        folder.mkdir(parents=True, exist_ok=True)
        return spec_of(given, folder, what)


def _run(
    given: _Given,
    command: RunCommand,
    on_step: OnStep | None,
    *,
    fresh: bool,
    device: str,
) -> RunSummary:
    from pentad.trainer.sources.examples import ON_EXAMPLES
    from pentad.trainer.sources.rollouts import run_train

    with given.file() as path:
        config, notes = prepare(path, given.overrides, command)
    if config.scheduler.type == "slurm" or config.only is not None:
        where = "scheduler.type = slurm" if config.only is None else f"only = {config.only}"
        rule = "is for the command line, which submits jobs and runs one side alone"
        raise UserError(Problem(where, rule, f"use pentad {command}"))
    run = run_train if command == "train" else ON_EXAMPLES[command]
    with listening(on_step), apart_from_loop(), ended_by_sentence():
        return run(config, notes, fresh, device)


@contextmanager
def ended_by_sentence() -> Iterator[None]:
    """Makes a script that does not catch `Stopped` end with its message and without a traceback,
    because a signal is not an error of the script."""
    try:
        yield
    except Stopped:
        if sys.excepthook is not show_stop:
            OTHER_HOOKS.append(sys.excepthook)
            sys.excepthook = show_stop
        raise


OTHER_HOOKS: list[ExceptHook] = []
"""The exception hooks that `show_stop` replaced."""


def show_stop(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, Stopped):
        print(error, file=sys.stderr)
    else:
        OTHER_HOOKS[-1](kind, error, trace)


@contextmanager
def apart_from_loop() -> Iterator[None]:
    """Allows a run to use its own event loops and signal handlers in a notebook cell, whose event
    loop waits for the cell. Interrupting the cell stops the run like ctrl-C."""
    outer = asyncio._get_running_loop()
    if outer is None:
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    is_main, woken = True, -1
    try:
        woken = signal.set_wakeup_fd(-1)
    except ValueError:  # a thread gets no signals
        is_main = False
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(outer)
        if is_main:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(woken)


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nests dotted keys at any depth: {"a.b": 1} becomes {"a": {"b": 1}}."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        inner = _nested(value) if isinstance(value, Mapping) else value
        *outer, last = str(key).split(".")
        place = found
        for name in outer:
            place = place.setdefault(name, {})
        known = place.get(last)
        place[last] = {**known, **inner} if isinstance(known, dict) else inner
    return found


def _line(block: str, number: int, row: Any) -> str:
    if not isinstance(row, Mapping):
        rule = f"row {number} is a {type(row).__name__}"
        raise UserError(Problem(block, rule, "give a list of dicts"))
    try:
        return json.dumps(row, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        rule = f"row {number} cannot be written as JSON ({error})"
        raise UserError(Problem(block, rule, "give texts, numbers, lists and dicts")) from error


# Functions and classes of a session, as names that a recipe can hold.

HERE = "give in_process=True to run it in this process"


def spec_of(given: Callable[..., Any], folder: Path, what: str) -> str:
    """Returns FILE:NAME or PACKAGE.MODULE:NAME. A session's functions are written to `folder`."""
    name, module = getattr(given, "__qualname__", ""), getattr(given, "__module__", "__main__")
    if not isinstance(given, FunctionType | type) or not name.isidentifier():
        rule = "is not a function or class at the top of a file or cell"
        remedy = f"write it there with def, or {HERE}"
        raise UserError(Problem(f"{what} = {name or repr(given)}", rule, remedy))
    file = getattr(sys.modules.get(module), "__file__", None)
    if module != "__main__" and file is not None:
        return f"{module}:{name}" if "." in module else f"{Path(file).resolve()}:{name}"
    target = folder / f"{name}.py"
    text = "\n\n\n".join(Shipped(given, what).parts()) + "\n"
    if not target.exists() or target.read_text() != text:
        write_atomic(target, text.encode())
    return f"{target.resolve()}:{name}"


class Shipped:
    """The source of a function or class of a notebook or of the running script, with the functions,
    imports and plain values that it uses, so that reward processes can import it. If one of these
    cannot be written, the error names it."""

    def __init__(self, given: Any, what: str) -> None:
        self.given = given
        self.where = f"{what} = {given.__name__}"
        self.imports: dict[str, str] = {}
        self.values: dict[str, str] = {}
        self.sources: dict[str, str] = {}

    def parts(self) -> list[str]:
        self._add(self.given)
        heads = [*sorted(self.imports.values()), *self.values.values()]
        return [*(["\n".join(heads)] if heads else []), *self.sources.values()]

    def _add(self, given: Any) -> None:
        if given.__name__ in self.sources:
            return
        if free := getattr(getattr(given, "__code__", None), "co_freevars", ()):
            rule = f"uses {', '.join(free)} of the enclosing function, which cannot be written"
            raise UserError(Problem(self.where, rule, f"make it an argument, or {HERE}"))
        try:
            source = textwrap.dedent(inspect.getsource(given))
        except (OSError, TypeError) as error:
            rule = f"the source of {given.__name__} is not known"
            remedy = f"write it in a file, or {HERE}"
            raise UserError(Problem(self.where, rule, remedy)) from error
        self.sources[given.__name__] = source.rstrip()
        known = getattr(given, "__globals__", None) or vars(sys.modules[given.__module__])
        for name in names_in(source):
            if name in known and known[name] is not given:
                self._use(name, known[name])

    def _use(self, name: str, value: Any) -> None:
        module = getattr(value, "__module__", None)
        if isinstance(value, ModuleType):
            self.imports[name] = f"import {value.__name__} as {name}"
        elif isinstance(value, FunctionType | type) and module == "__main__":
            self._add(value)
        elif callable(value) and module and "." not in getattr(value, "__qualname__", "."):
            self.imports[name] = f"from {module} import {value.__qualname__} as {name}"
        elif is_plain(value):
            self.values[name] = f"{name} = {value!r}"
        else:
            rule = f"uses {name}, a {type(value).__name__} of this session, which cannot be written"
            raise UserError(Problem(self.where, rule, f"make it in the function, or {HERE}"))


def names_in(source: str) -> Iterator[str]:
    """Yields the names that the source reads, in order of appearance."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id


def is_plain(value: object) -> bool:
    """Whether the value can be written as a Python literal."""
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False
