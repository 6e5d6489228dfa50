"""Checks before a run starts that need torch; all problems are reported at once."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from pentad.checkpoint.folders import find_checkpoints
from pentad.config.environments import EnvironmentKeys, as_only, environments
from pentad.config.rules import checkpoint as checkpoint_rules
from pentad.config.rules.algorithm import longest_sample
from pentad.config.rules.model import frozen_paths, stop_id_problems
from pentad.config.rules.rule import RunCommand, RunFacts, StartFacts
from pentad.config.rules.start import RULES
from pentad.config.schema import Config
from pentad.core.device import pick_device
from pentad.core.dims import ModelDims
from pentad.core.errors import Problem, UserError
from pentad.core.machine import installed
from pentad.core.sizes import DeviceKind, RunSize
from pentad.data.mixture import MixedPrompts
from pentad.data.prompts import Prompts, PromptStream, open_prompts
from pentad.data.render import DataSource
from pentad.data.section import DatasetConfig
from pentad.data.tokenizer import TOKENIZER_FILES, Tokenizer, load_tokenizer
from pentad.rewards.section import REWARD_NAMES, RewardConfig
from pentad.rl.section import AlgorithmSettings
from pentad.rollout.environments import tools_of
from pentad.rollout.executor import load_workflow
from pentad.rollout.workflows import MultiTurn, OwnPrompts, Workflow
from pentad.runtime.nodes import NODES
from pentad.runtime.rank import rank_from_environment
from pentad.runtime.restarts import is_restart
from pentad.trainer.rank.learners import check_start, tokenizer_of, trained_dims
from pentad.trainer.reward_trial import check_reward
from pentad.trainer.run_folders import checkpoint_path
from pentad.trainer.sampling.samplers import server_problems

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checked:
    """The inputs of a run, read and checked."""

    dims: ModelDims
    tokenizer: Tokenizer
    algorithm: AlgorithmSettings
    stream: Prompts
    valid: Prompts | None
    environments: tuple[CheckedEnvironment, ...]


@dataclass(frozen=True, slots=True)
class CheckedEnvironment:
    name: str
    config: Config
    """The config of the run with this environment as its only one."""
    workflow: Workflow
    stream: PromptStream | None
    """None if the environment is only evaluated."""
    valid: PromptStream | None


def size_of(config: Config, checked: Checked, num_steps: int) -> RunSize:
    context = checked.dims.max_position
    longest = max(checked.stream.lengths(), default=context)
    return RunSize(num_steps, longest_sample(config, longest, context))


class Collector:
    """Runs checks that may raise, and collects the problems of all."""

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


def check_train(config: Config, device: torch.device) -> Checked:
    """Checks everything the run reads; raises one UserError with every problem."""
    checks = Collector()
    checks.problems += start_problems(config, device, "train")
    path = config.model_folder()
    algorithm = config.algorithm.settings
    checks.attempt(lambda: config.register_models())
    dims = checks.attempt(lambda: trained_dims(config, path))
    tokenizer = checks.attempt(lambda: tokenizer_of(config))
    found = []
    if dims is not None and tokenizer is not None:
        checks.problems += vocabulary_problems(path, dims, tokenizer)
        checks.problems += token_problems(config, tokenizer)
        checks.problems += stop_id_problems(config, dims)
        checks.attempt(lambda: check_start(config, "actor"))
        if algorithm.facts.needs_critic:
            checks.attempt(lambda: check_start(config, "critic"))
    for keys in environments(config):
        found.append(check_environment(config, keys, dims, tokenizer, checks))
    checks.raise_all()
    good = tuple(one for one in found if one is not None)
    streams = [one.stream for one in good if one.stream is not None]
    assert dims and tokenizer and len(streams) == len(found), "what failed has raised"
    weights = [keys.weight for keys in environments(config)]
    stream = MixedPrompts(streams, weights) if config.rollout.workflows else streams[0]
    return Checked(dims, tokenizer, algorithm, stream, held_out(good), good)


def check_environment(
    whole: Config,
    keys: EnvironmentKeys,
    dims: ModelDims | None,
    tokenizer: Tokenizer | None,
    checks: Collector,
) -> CheckedEnvironment | None:
    """Checks and tries an environment's workflow, prompts and reward; None if it has problems."""
    config, stream, valid = as_only(whole, keys), None, None
    workflow = checks.attempt(lambda: load_workflow(config.rollout.workflow, config.rollout.agent))
    if keys.reward_key == "reward" and keys.name and rewards_itself(workflow):
        config = config.model_copy(update={"reward": RewardConfig()})
    if dims is not None and tokenizer is not None:
        stream = checks.attempt(lambda: train_stream(config, keys, dims, tokenizer, workflow))
        valid = checks.attempt(lambda: valid_stream(config, keys, dims, tokenizer, workflow))
        checks.problems += answer_problems(config, stream, config.train_dataset)
        checks.problems += answer_problems(config, valid, config.valid_dataset)
    checks.problems += reward_problems(config, workflow)
    checks.problems += history_problems(config, keys, workflow)
    scored = [(stream, config.train_dataset.answer_key)]
    if config.valid_dataset is not None:
        scored.append((valid, config.valid_dataset.answer_key))
    checks.attempt(lambda: check_reward(config, scored))
    if workflow is None:
        return None
    return CheckedEnvironment(keys.name, config, workflow, stream, valid)


def held_out(found: Sequence[CheckedEnvironment]) -> Prompts | None:
    """The held-out prompts of all environments, each once per epoch."""
    streams = [one.valid for one in found if one.valid is not None]
    if len(streams) > 1:
        return MixedPrompts(streams, [len(stream) for stream in streams])
    return streams[0] if streams else None


def rewards_itself(workflow: Workflow | None) -> bool:
    return bool(getattr(workflow, "facts", {}).get("has_method"))


def start_problems(
    config: Config, device: torch.device, command: RunCommand
) -> list[Problem | str]:
    """Settings that this version or this machine does not support; reads no data."""
    return RULES.problems(config, start_facts(device, command))


def start_facts(device: torch.device, command: RunCommand) -> RunFacts:
    """All facts that the rules need, for a run that computes on this device."""
    is_torchrun, has_agents = rank_from_environment() is not None, NODES in os.environ
    start = StartFacts(torch.cuda.device_count(), is_torchrun, has_agents)
    return RunFacts(command=command, device=kind_of(device), start=start)


def facts_here(config: Config, command: RunCommand) -> RunFacts:
    """The facts of this machine; a Slurm job runs on other machines."""
    if config.scheduler.type == "slurm":
        return RunFacts(command=command)
    return start_facts(pick_device(), command)


@RULES.add(commands=("train", "sft"))
def the_remote_store_answers(config: Config, facts: RunFacts) -> list[Problem | str]:
    return remote_problems(config) if facts.at_start else []


def remote_problems(config: Config) -> list[Problem | str]:
    """Reports a remote store that does not answer or rejects the credentials; checked once the keys
    are valid. A store that may answer later is no problem for a run with a local checkpoint:
    `Tiers` notes it."""
    uri = config.checkpoint.remote_uri
    if uri is None or checkpoint_rules.RULES.problems(config, RunFacts(command="train")):
        return []
    if installed("boto3") is None:
        where, rule = f"checkpoint.remote_uri = {uri}", "needs boto3, which is not installed"
        return [Problem(where, rule, "pip install 'pentad[s3]'")]
    remote = config.remote
    assert remote is not None, "it has an address"
    if is_restart():
        return []
    from pentad.checkpoint.s3 import Store, StoreError, is_passing

    try:
        Store(replace(remote, uri=uri, max_attempts=2)).reach()
    except StoreError as error:
        is_away = config.recover.is_on and is_passing(error.__cause__)
        if not (is_away and find_checkpoints(checkpoint_path(config), report=log.debug)):
            return [f"checkpoint.remote_uri = {error}."]
    return []


@RULES.add(commands=("train",))
def servers_can_start(config: Config, facts: RunFacts) -> list[Problem | str]:
    return server_problems(config, facts) if facts.samples(config) else []


def kind_of(device: torch.device) -> DeviceKind:
    return "cuda" if device.type == "cuda" else "cpu"


def train_stream(
    config: Config,
    keys: EnvironmentKeys,
    dims: ModelDims,
    tokenizer: Tokenizer,
    workflow: Workflow | None,
) -> PromptStream:
    source = DataSource(
        data=config.train_dataset,
        key=keys.data_key,
        environment=keys.name,
        seed=config.seed,
        streaming=config.use_streaming_dataset,
        room=room_for_prompt(dims, config.gconfig.max_new_tokens),
    )
    return open_prompts(with_tools(source, workflow), tokenizer)


def valid_stream(
    config: Config,
    keys: EnvironmentKeys,
    dims: ModelDims,
    tokenizer: Tokenizer,
    workflow: Workflow | None,
) -> PromptStream | None:
    if config.valid_dataset is None:
        return None
    key = "evaluator" if config.evaluator.max_new_tokens else "gconfig"
    new_tokens = config.evaluator.max_new_tokens or config.gconfig.max_new_tokens
    data = config.valid_dataset.model_copy(update={"shuffle": False})
    room = room_for_prompt(dims, new_tokens, key)
    source = DataSource(
        data=data, key=keys.valid_key, environment=keys.name, seed=config.seed, room=room
    )
    return open_prompts(with_tools(source, workflow), tokenizer)


def with_tools(source: DataSource, workflow: Workflow | None) -> DataSource:
    """Adds the workflow's tools to the prompts; a workflow that makes its own prompts adds its own
    tools."""
    if isinstance(workflow, OwnPrompts) and not hasattr(workflow, "tools"):
        return replace(source, data=source.data.model_copy(update={"tools_key": None}))
    return source if workflow is None else replace(source, tools=tools_of(workflow))


def room_for_prompt(dims: ModelDims, max_new_tokens: int, key: str = "gconfig") -> int:
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
    """Reference and teacher score the actor's token ids, so their tokenizers must map ids
    equally."""
    problems = []
    for key, path in frozen_paths(config).items():
        if path is None or not any((Path(path) / name).is_file() for name in TOKENIZER_FILES):
            continue
        theirs, ours = load_tokenizer(path).inner.get_vocab(), tokenizer.inner.get_vocab()
        other = next((t for t, at in ours.items() if theirs.get(t, at) != at), None)
        if other is not None:
            rule = f"{other!r} is token {theirs[other]} there, and {ours[other]} of the actor"
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
        rule = f"{config.rollout.workflow} gives rewards itself, so this one would never be asked"
        return [Problem(f"reward.fn = {functions}", rule, "leave one of the two out")]
    if functions or facts["has_reward"]:
        return []
    rule = f"is not set, and {config.rollout.workflow} has neither get_reward() nor a number reward"
    return [Problem("reward.fn", rule, "name a reward, or write get_reward")]


def history_problems(
    config: Config, keys: EnvironmentKeys, workflow: Workflow | None
) -> list[Problem]:
    """Earlier turns need a chat template if the prompt is rendered with one."""
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
    """Built-in rewards compare with a column: every row must have it, if the rows are known now."""
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
