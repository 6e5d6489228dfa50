"""Common options of commands that take a recipe: the recipe, overrides, and switches.

A switch such as `--max-staleness 2` is another way to write the override `max_staleness=2`.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import json
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pentad.cli.options import ADAPTER_HELP
from pentad.core.errors import Problem, UserError

if TYPE_CHECKING:
    from pentad.config.rules.rule import Command, RunFacts
    from pentad.config.schema import Config

OVERRIDE = re.compile(r"\+*[A-Za-z_][\w.]*=", re.ASCII)
KEEPS_OPTIONS = {"ignore_unknown_options": True}
"""Settings of commands with a recipe: an unknown option is a word, for which `refuse_options` names
the key that was meant."""
MODES = {"colocate": "colocate", "hybrid": "hybrid", "fully_async": "async"}
"""Switch -> value of the key `mode`."""


@dataclass(frozen=True, slots=True)
class Switch:
    """One option that sets one key."""

    key: str
    type: type
    help: str
    given_name: str = ""

    @property
    def name(self) -> str:
        """The name of the option: that of the key, unless another is given."""
        return self.given_name or self.key


SWITCHES = (
    Switch("max_staleness", int, "Versions a sample may lag behind."),
    Switch("num_iters_per_train_update", int, "Number of chunks of a batch."),
    Switch("resource", str, 'Devices by role: {"actor": [1, 4], "rollout": [1, 4]}.'),
    Switch("balance_data", bool, "Balance rows over ranks by cost."),
    Switch("use_kl_loss", bool, "KL term in the loss."),
    Switch("use_tis", bool, "Truncated importance sampling."),
    Switch("ref_update_interval", int, "Steps between refreshes of the reference model."),
    Switch("use_streaming_dataset", bool, "Read prompts as they are needed."),
    Switch("num_data_storage_units", int, "Storage processes."),
    Switch("only", str, "Run only one component: rollout or train."),
    Switch("groups_from", str, "Run folder whose groups --only train trains."),
    Switch("offload_train", bool, "Move training state to the host during rollout."),
    Switch("offload_rollout", bool, "Free the sampler's memory during training."),
)

EVAL_SWITCHES = (
    Switch("valid_dataset.path", str, "JSONL, Parquet or a saved HF dataset.", "data"),
    Switch("reward.fn", str, "gsm8k, math, ..., or your own.", "reward"),
    Switch("evaluator.n_samples", int, "Answers per prompt; default: 1.", "samples"),
    Switch(
        "evaluator.temperature", float, "Sampling temperature; default: 0, greedy.", "temperature"
    ),
    Switch(
        "evaluator.max_new_tokens", int, "Most tokens of an answer; default: 256.", "max_new_tokens"
    ),
    Switch("valid_dataset.limit", int, "Use only this many rows, from the start.", "limit"),
    Switch("valid_dataset.format", str, "auto, jsonl, parquet or hf.", "format"),
    Switch("valid_dataset.prompt_key", str, "Column with the prompt.", "prompt_key"),
    Switch("valid_dataset.messages_key", str, "Column with chat messages.", "messages_key"),
    Switch("valid_dataset.answer_key", str, "Column with the right answer.", "answer_key"),
    Switch("valid_dataset.chat_template", bool, "Apply the chat template to prompts.", "chat"),
    Switch(
        "rollout.server.addresses",
        str,
        "OpenAI-compatible server of the model, instead of this process.",
        "address",
    ),
    Switch("actor.lora", str, ADAPTER_HELP, "adapter"),
)
"""Options of `eval`, which evaluates a model or a recipe."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The config as given on the command line."""

    path: Path | None
    overrides: list[str]
    problems: list[Problem]

    def prepare(
        self,
        command: Command,
        gpu_memory: float | None = None,
        facts_here: Callable[[Config], RunFacts] | None = None,
        look: Callable[[Config, Collection[str]], list[Problem | str]] | None = None,
    ) -> tuple[Config, list[str]]:
        """The resolved and checked config, with notes; raises UserError with every problem."""
        from pentad.planner.prepare import prepare

        try:
            config, notes = prepare(
                self.path, self.overrides, command, gpu_memory, facts_here, look
            )
        except UserError as error:
            raise UserError([*self.problems, *error.problems]) from error
        if self.problems:
            raise UserError(self.problems)
        return config, notes


def takes_recipe(command: Callable[..., None], *, switches: bool = True) -> Callable[..., None]:
    """Adds the options of a recipe to a command whose first argument is a `Recipe`."""
    more = _switch_parameters() if switches else []
    return _reads(read_recipe, [_WORDS, _CONFIG, *more], command)


def takes_subject(command: Callable[..., None]) -> Callable[..., None]:
    """Adds a model or a recipe, and the options of `eval`, to a command with a `Recipe`."""
    return _reads(read_subject, [_SUBJECT, *map(_parameter_of, EVAL_SWITCHES)], command)


def _reads(
    read: Callable[..., Recipe], given: list[inspect.Parameter], command: Callable[..., None]
) -> Callable[..., None]:
    """The command with the parameters of `read` in place of its first one."""

    @functools.wraps(command)
    def wrapped(words: list[str] | None, **options: Any) -> None:
        rest = {name: options.pop(name) for name in own_names}
        kept, problems = refuse_options(words or [], [*own_names, *options])
        command(read(kept, problems=problems, **options), **rest)

    _, *own = inspect.signature(command, eval_str=True).parameters.values()
    own_names = [parameter.name for parameter in own]
    by_name = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in (*given, *own)]
    vars(wrapped)["__signature__"] = inspect.Signature(by_name)
    return wrapped


def refuse_options(words: list[str], known: Collection[str]) -> tuple[list[str], list[Problem]]:
    """Separates words into those that are read and problems of unknown options, which the parser
    passes on (`KEEPS_OPTIONS`). `known`: names of the command's options."""
    kept: list[str] = []
    problems: list[Problem] = []
    left = deque(words)
    while left:
        word = left.popleft()
        if not word.startswith("-") or word == "-":
            kept.append(word)
            continue
        name, _, value = word.partition("=")
        is_value = left and not left[0].startswith("--") and not OVERRIDE.match(left[0])
        if not value and is_value and Path(left[0]).suffix not in (".yaml", ".yml"):
            value = left.popleft()
        problems.append(_unknown_option(name, value, known))
    return kept, problems


def _unknown_option(name: str, value: str, known: Collection[str]) -> Problem:
    from pentad.config.describe import fields, join_or
    from pentad.config.load import meant_keys

    where, rule = f"{name} {value}".strip(), "there is no such option"
    key = name.lstrip("-").replace("-", "_")
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
    if near:
        return Problem(where, rule, f"did you mean {_option(near[0])}?")
    keys = [key] if key in fields() else meant_keys(key)
    if not keys:
        remedy = "keys of the recipe are written as KEY=VALUE (docs/configuration.md has all)"
        return Problem(where, rule, remedy)
    written = join_or([f"{one}={value or 'VALUE'}" for one in keys])
    return Problem(where, rule, f"keys of the recipe are written without dashes: {written}")


def read_recipe(
    words: list[str],
    config: Path | None = None,
    *,
    problems: Sequence[Problem] = (),
    **options: object,
) -> Recipe:
    """Separates words into recipe and overrides, and converts switches to overrides. `problems`:
    those found before."""
    problems = list(problems)
    overrides = list(words)
    if config is None and overrides and not OVERRIDE.match(overrides[0]):
        config = Path(overrides.pop(0))
    if config is None and not overrides:
        rule, remedy = "is not given", "name a YAML file, for example: pentad train recipe.yaml"
        raise UserError([*problems, *([] if problems else [Problem("recipe", rule, remedy)])])
    _append(_given(options, problems), overrides, problems)
    return Recipe(config, overrides, problems)


def read_subject(words: list[str], *, problems: Sequence[Problem] = (), **options: Any) -> Recipe:
    """The recipe of `eval`, from a recipe file or a model folder; named options set keys.
    `problems`: those found before."""
    if not words or OVERRIDE.match(words[0]):
        remedy = "name a model's folder or a YAML file, for example: pentad eval models/m --data d"
        raise UserError([*problems, Problem("model", "is not given", remedy)])
    subject, *overrides = words
    problems = list(problems)
    found: list[tuple[str, str, object]] = []
    for switch in EVAL_SWITCHES:
        value = options.get(switch.name)
        if value is not None:
            made = {"address": lambda value: [value], "adapter": adapter_keys}.get(switch.name)
            text = json.dumps(value if made is None else made(value))
            found.append((_option(switch.name), switch.key, text))
    if Path(subject).suffix in (".yaml", ".yml"):
        _append(found, overrides, problems)
        return Recipe(Path(subject), overrides, problems)
    if "://" in subject:
        rule = "the first word is a folder of this machine; the tokenizer is read from it"
        remedy = f"give it, and --address {subject}"
        raise UserError([*problems, Problem(f"model = {subject}", rule, remedy)])
    _append([("the first word", "actor.path", json.dumps(subject)), *found], overrides, problems)
    return Recipe(None, overrides, problems)


def adapter_keys(folder: str) -> dict[str, object]:
    """The block `actor.lora` of a PEFT folder."""
    from dataclasses import asdict

    from pentad.weights.peft import read_adapter  # here, since it imports torch

    return {**asdict(read_adapter(folder).spec), "init_path": folder}


def _append(
    found: Iterable[tuple[str, str, object]], overrides: list[str], problems: list[Problem]
) -> None:
    """Adds overrides; reports a problem if the user also gave one for the same key."""
    written = {word.partition("=")[0].lstrip("+"): word for word in overrides}
    for option, key, value in found:
        if key in written:
            where = f"{option} and {written[key]}"
            problems.append(Problem(where, f"both set {key}", "keep one of the two"))
        overrides.append(f"{key}={value}")


def _given(options: Mapping[str, object], problems: list[Problem]) -> list[tuple[str, str, object]]:
    """Lists (switch, key, value in YAML) of the given switches."""
    found: list[tuple[str, str, object]] = []
    modes = [name for name in MODES if options.get(name)]
    if len(modes) > 1:
        rule = "each sets the mode, and a run has one"
        remedy = "keep one of them"
        if {"colocate", "fully_async"} <= set(modes):
            rule, remedy = "do not go together", "the mode between the two is --hybrid"
        problems.append(Problem(" ".join(map(_option, modes)), rule, remedy))
    elif modes:
        found.append((_option(modes[0]), "mode", MODES[modes[0]]))
    for switch in SWITCHES:
        value = options.get(switch.key)
        if value is not None:
            text = str(value).lower() if isinstance(value, bool) else value
            found.append((_option(switch.key), switch.key, text))
    return found


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _parameter(name: str, annotation: object, default: object) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def _switch_parameters() -> list[inspect.Parameter]:
    found = [
        _parameter(name, Annotated[bool, typer.Option(_option(name), help=f"mode={mode}")], False)
        for name, mode in MODES.items()
    ]
    return [*found, *map(_parameter_of, SWITCHES)]


def _parameter_of(switch: Switch) -> inspect.Parameter:
    option = _option(switch.name)
    if switch.type is bool:
        option = f"{option}/--no-{option.removeprefix('--')}"
    shown = typer.Option(option, help=switch.help, show_default=False)
    return _parameter(switch.name, Annotated[switch.type | None, shown], None)


_WORDS, _SUBJECT = (
    _parameter("words", Annotated[list[str] | None, typer.Argument(metavar=name, help=text)], None)
    for name, text in (
        ("RECIPE KEY=VALUE", "A YAML file, then overrides."),
        ("MODEL|RECIPE KEY=VALUE", "A model's folder or Hub name, or a YAML file; then overrides."),
    )
)
_CONFIG = _parameter(
    "config",
    Annotated[
        Path | None, typer.Option("--config", help="The YAML file, instead of the first argument.")
    ],
    None,
)
