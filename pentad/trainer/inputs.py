"""Inputs of a run besides its weights: tokenizer, data, workflow and reward, opened and checked.

A start reads all rows (`preflight`), a plan only the first ones (`look`). Does not import the
engine, so a plan needs no models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from pentad.config.environments import EnvironmentKeys, as_only
from pentad.config.rules.model import frozen_paths, stop_id_problems
from pentad.config.schema import Config
from pentad.core.dims import ModelDims
from pentad.core.errors import Problem, UserError
from pentad.core.section import chosen
from pentad.data.examples import Examples
from pentad.data.preferences import LabelDataset, PairDataset, RewardPairDataset, open_preferences
from pentad.data.prompts import PromptStream, open_prompts
from pentad.data.render import DataSource
from pentad.data.section import DatasetConfig
from pentad.data.sft import open_sft
from pentad.data.tokenizer import TOKENIZER_FILES, Tokenizer, load_tokenizer
from pentad.data.tokens import TokenSequences, open_tokens
from pentad.rewards.section import REWARD_NAMES, RewardConfig
from pentad.rollout.environments import tools_of
from pentad.rollout.executor import load_workflow
from pentad.rollout.workflows import MultiTurn, OwnPrompts, Workflow
from pentad.trainer.reward_trial import check_reward

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RowReader:
    """Settings for converting dataset rows to tokens."""

    dims: ModelDims | None
    """The dimensions of the actor's model; None if unknown: then rows may have any length."""
    tokenizer: Tokenizer
    first: int | None = None
    """Maximum number of rows read from each dataset; None: all."""


class Collector:
    """Runs checks that may raise UserError, and collects their problems."""

    def __init__(self) -> None:
        self.problems: list[Problem | str] = []

    def attempt(self, step: Callable[[], T]) -> T | None:
        try:
            return step()
        except UserError as error:
            self.problems += error.problems
            return None

    def raise_all(self) -> None:
        if self.problems:
            raise UserError(self.problems)


@dataclass(frozen=True, slots=True)
class CheckedEnvironment:
    name: str
    config: Config
    """The run's config reduced to this environment."""
    workflow: Workflow
    stream: PromptStream | None
    """None if the environment is only evaluated."""
    valid: PromptStream | None


def check_environment(
    whole: Config,
    keys: EnvironmentKeys,
    reader: RowReader | None,
    checks: Collector,
    *,
    asks_models: bool = True,
) -> CheckedEnvironment | None:
    """Checks and tries an environment's workflow, prompts and reward; None if it has problems.
    Without a reader the prompts are not opened. `asks_models`: whether to try rewards that call a
    model."""
    config, stream, valid = as_only(whole, keys), None, None
    workflow = checks.attempt(lambda: load_workflow(config.rollout.workflow, config.rollout.agent))
    rewards_itself = getattr(workflow, "facts", {}).get("has_method")
    if keys.reward_key == "reward" and keys.name and rewards_itself:
        config = config.model_copy(update={"reward": RewardConfig()})
    if reader is not None:
        given = config, keys, reader, workflow
        stream = checks.attempt(lambda: prompt_stream("train", *given))
        valid = checks.attempt(lambda: prompt_stream("valid", *given))
        checks.problems += answer_problems(config, stream, config.train_dataset)
        checks.problems += answer_problems(config, valid, config.valid_dataset)
    checks.problems += reward_problems(config, workflow)
    checks.problems += history_problems(config, keys, workflow)
    scored = [(stream, config.train_dataset.answer_key)]
    if config.valid_dataset is not None:
        scored.append((valid, config.valid_dataset.answer_key))
    checks.attempt(lambda: check_reward(config, scored, asks_models=asks_models))
    if workflow is None:
        return None
    return CheckedEnvironment(keys.name, config, workflow, stream, valid)


def prompt_stream(
    part: str,
    config: Config,
    keys: EnvironmentKeys,
    reader: RowReader,
    workflow: Workflow | None,
) -> PromptStream | None:
    """Opens the prompts of `train` or `valid`; None if the config has none."""
    is_valid = part == "valid"
    data = config.valid_dataset if is_valid else config.train_dataset
    if data is None or (data.path is None and not is_valid):
        return None
    key, new_tokens = "gconfig", config.gconfig.max_new_tokens
    if is_valid and config.evaluator.max_new_tokens:
        key, new_tokens = "evaluator", config.evaluator.max_new_tokens
    source = DataSource(
        data=data.model_copy(update={"shuffle": False}) if is_valid else data,
        key=keys.valid_key if is_valid else keys.data_key,
        environment=keys.name,
        seed=config.seed,
        streaming=config.use_streaming_dataset and not is_valid,
        room=room_for_prompt(reader.dims, new_tokens, key),
        first=reader.first,
    )
    return open_prompts(with_tools(source, workflow), reader.tokenizer)


def with_tools(source: DataSource, workflow: Workflow | None) -> DataSource:
    """Adds the workflow's tools to the prompts; a workflow that makes its own prompts adds its own
    tools."""
    if isinstance(workflow, OwnPrompts) and not hasattr(workflow, "tools"):
        return replace(source, data=source.data.model_copy(update={"tools_key": None}))
    return source if workflow is None else replace(source, tools=tools_of(workflow))


def room_for_prompt(dims: ModelDims | None, max_new_tokens: int, key: str) -> int | None:
    """Returns the maximum number of prompt tokens that the model's context allows."""
    if dims is None:
        return None
    room = dims.max_position - max_new_tokens
    if room < 1:
        rule = f"leaves no room for a prompt in the model's context of {dims.max_position} tokens"
        where = f"{key}.max_new_tokens = {max_new_tokens}"
        raise UserError(Problem(where, rule, f"give at most {dims.max_position - 1}"))
    return room


def vocabulary_problems(
    path: str, dims: ModelDims, tokenizer: Tokenizer, key: str = "actor.path"
) -> list[Problem]:
    if tokenizer.vocab_size <= dims.vocab_size:
        return []
    rule = (
        f"its tokenizer has {tokenizer.vocab_size} ids, its model only {dims.vocab_size} rows: "
        "they belong to different models"
    )
    return [Problem(f"{key} = {path}", rule)]


def token_problems(config: Config, tokenizer: Tokenizer) -> list[Problem]:
    """Checks that the tokenizers of reference and teacher, which score the actor's token ids, map
    tokens to the same ids."""
    problems = []
    for key, path in frozen_paths(config).items():
        if path is None or not any((Path(path) / name).is_file() for name in TOKENIZER_FILES):
            continue
        theirs, ours = load_tokenizer(path).inner.get_vocab(), tokenizer.inner.get_vocab()
        other = next((t for t, at in ours.items() if theirs.get(t, at) != at), None)
        if other is not None:
            rule = f"{other!r} has id {theirs[other]}, in the actor's tokenizer {ours[other]}"
            remedy = "give a model with the tokenizer of the actor"
            problems.append(Problem(f"{key} = {path}", rule, remedy))
    return problems


def reward_problems(config: Config, workflow: Workflow | None) -> list[Problem]:
    """Checks that a reward exists: from an environment class, or from `reward.fn`."""
    facts = getattr(workflow, "facts", None)
    if facts is None:
        return []
    functions = ", ".join(config.reward.functions)
    if functions and facts["has_method"]:
        rule = f"{config.rollout.workflow} gives rewards itself, so this one would not be used"
        return [Problem(f"reward.fn = {functions}", rule, "leave one of the two out")]
    if functions or facts["has_reward"]:
        return []
    rule = f"is not set, and {config.rollout.workflow} has neither get_reward() nor a number reward"
    return [Problem("reward.fn", rule, "name a reward, or write get_reward")]


def history_problems(
    config: Config, keys: EnvironmentKeys, workflow: Workflow | None
) -> list[Problem]:
    """Checks that prompts use a chat template if `rollout.history = template`."""
    where, spec = "rollout.history = template", config.rollout.workflow
    if config.rollout.history != "template" or spec == "single_turn" or workflow is None:
        return []
    if not isinstance(workflow, MultiTurn):
        rule = f"{spec} keeps the history of its conversations itself"
        return [Problem(where, rule, "set it to sampled")]
    return [
        Problem(
            where,
            f"prompts of {key} are not put in the chat template",
            f"set {key}.chat_template: true",
        )
        for key, data in (
            (keys.data_key, config.train_dataset),
            (keys.valid_key, config.valid_dataset),
        )
        if data is not None and not data.uses_chat
    ]


def answer_problems(
    config: Config, stream: PromptStream | None, data: DatasetConfig | None
) -> list[Problem]:
    """Checks that every row, if rows are already known, has the answer column of built-in
    rewards."""
    built_in = [fn for fn in config.reward.functions if fn in REWARD_NAMES]
    is_asked = built_in and config.rollout.workflow == "single_turn"
    if stream is None or data is None or stream.prompts is None or not is_asked:
        return []
    name, rows = data.answer_key, stream.rows
    missing = [prompt.row for prompt in stream.prompts if rows.row(prompt.row).get(name) is None]
    if not missing:
        return []
    has = ", ".join(sorted(rows.row(missing[0]))) or "nothing"
    where = f"{stream.source.key}.answer_key = {name}"
    rule = (
        f"reward.fn = {built_in[0]} compares with it, and {len(missing)} of "
        f"{len(stream)} rows have none, the first at {rows.where(missing[0])}"
    )
    return [Problem(where, rule, f"that row has {has}")]


def tokenizer_of(config: Config) -> Tokenizer:
    """The actor's tokenizer, which renders conversations as the run configures it."""
    return load_tokenizer(config.model_folder(), template_args=config.template_args.given)


def tokenizer_problems(config: Config, dims: ModelDims, tokenizer: Tokenizer) -> list[Problem]:
    """Returns conflicts with the tokenizer or the vocabulary of the actor."""
    return [
        *vocabulary_problems(config.model_folder(), dims, tokenizer),
        *token_problems(config, tokenizer),
        *stop_id_problems(config, dims),
    ]


def parts_of(config: Config) -> list[str]:
    """Returns the parts of the data that a run reads."""
    return ["train"] if config.valid_dataset is None else ["train", "valid"]


def open_examples(command: str, config: Config, part: str, reader: RowReader) -> Examples:
    """Opens a part of the data of a command that trains on examples; UserError with its
    problems."""
    if command == "pretrain":
        return _open_text(config, part, reader)
    room = None if reader.dims is None else reader.dims.max_position
    if command == "sft":
        return open_sft(_source_of(config, part, reader, room), reader.tokenizer)
    if command == "reward-model":
        source = _source_of(config, part, reader, None if room is None else room - 1)
        return open_preferences(source, reader.tokenizer, RewardPairDataset)
    is_kto = chosen(config.preference, "preference").loss == "kto"
    source = _source_of(config, part, reader, room)
    return open_preferences(source, reader.tokenizer, LabelDataset if is_kto else PairDataset)


def _open_text(config: Config, part: str, reader: RowReader) -> TokenSequences:
    dims = reader.dims
    assert dims is not None, "sequences have the length of the model's context"
    given = _source_of(config, part, reader).max_tokens or config.train_dataset.max_length
    length = given or dims.max_position
    if not 1 < length <= dims.max_position:
        rule = f"a sequence has 2 tokens or more, and the model's context {dims.max_position}"
        where = f"{part}_dataset.max_length = {length}"
        raise UserError(Problem(where, rule, f"give at most {dims.max_position}"))
    cache = Path(config.fileroot).expanduser() / "tokens"
    source = _source_of(config, part, reader, length)
    return open_tokens(source, reader.tokenizer, dims.vocab_size, cache)


def _source_of(config: Config, part: str, reader: RowReader, room: int | None = None) -> DataSource:
    """The rows of `train` or `valid`."""
    data = config.train_dataset if part == "train" else config.valid_dataset
    assert data is not None, "only called if the part exists"
    key = f"{part}_dataset"
    return DataSource(data=data, key=key, seed=config.seed, room=room, first=reader.first)
