"""Checks before a run starts that need torch; all problems are reported at once."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from pentad.checkpoint.folders import find_checkpoints
from pentad.config.environments import environments
from pentad.config.rules import checkpoint as checkpoint_rules
from pentad.config.rules.algorithm import longest_sample
from pentad.config.rules.check import check
from pentad.config.rules.rule import RunCommand, RunFacts
from pentad.config.rules.start import RULES
from pentad.config.schema import Config
from pentad.core.device import pick_device
from pentad.core.dims import ModelDims
from pentad.core.errors import Problem
from pentad.core.machine import installed
from pentad.core.sizes import DeviceKind, RunSize
from pentad.data.mixture import MixedPrompts
from pentad.data.prompts import Prompts
from pentad.data.tokenizer import Tokenizer
from pentad.runtime.nodes import NODES
from pentad.runtime.rank import rank_from_environment
from pentad.runtime.restarts import is_restart
from pentad.trainer.inputs import (
    CheckedEnvironment,
    Collector,
    RowReader,
    check_environment,
    tokenizer_of,
    tokenizer_problems,
)
from pentad.trainer.rank.learners import check_sampled, check_start, trained_dims
from pentad.trainer.run_folders import checkpoint_path
from pentad.trainer.sampling.samplers import server_problems

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checked:
    """The inputs of a run or of an evaluation, read and checked."""

    dims: ModelDims
    tokenizer: Tokenizer
    stream: Prompts
    """The prompts of the run, or those of the evaluation."""
    valid: Prompts | None
    environments: tuple[CheckedEnvironment, ...]


def size_of(config: Config, checked: Checked, num_steps: int) -> RunSize:
    context = checked.dims.max_position
    longest = max(checked.stream.lengths(), default=context)
    return RunSize(num_steps, longest_sample(config, longest, context))


def check_train(config: Config, device: torch.device) -> Checked:
    """Checks everything the run reads; raises one UserError with every problem."""
    checks, dims = begin_checks(config, device, "train")
    tokenizer = checks.attempt(lambda: tokenizer_of(config))
    reader = None
    if dims is not None and tokenizer is not None:
        reader = RowReader(dims, tokenizer)
        checks.problems += tokenizer_problems(config, dims, tokenizer)
        checks.attempt(lambda: check_start(config, "actor"))
        if config.algorithm.facts.needs_critic:
            checks.attempt(lambda: check_start(config, "critic"))
        checks.attempt(lambda: check_sampled(config))
    found = [check_environment(config, keys, reader, checks) for keys in environments(config)]
    checks.raise_all()
    good = tuple(one for one in found if one is not None)
    streams = [one.stream for one in good if one.stream is not None]
    assert dims and tokenizer and len(streams) == len(found), "what failed has raised"
    weights = [keys.weight for keys in environments(config)]
    stream = MixedPrompts(streams, weights) if config.rollout.workflows else streams[0]
    return Checked(dims, tokenizer, stream, held_out(good), good)


def begin_checks(
    config: Config, device: torch.device, command: RunCommand
) -> tuple[Collector, ModelDims | None]:
    """Runs the checks that need no data; returns them with the dimensions of the trained model if
    these can be read."""
    checks = Collector()
    checks.problems += check(config, start_facts(device, command), stage="start")
    checks.attempt(lambda: config.register_models())
    return checks, checks.attempt(lambda: trained_dims(config, config.model_folder()))


def held_out(found: Sequence[CheckedEnvironment]) -> Prompts | None:
    """Returns the held-out prompts of all environments, each once per epoch."""
    streams = [one.valid for one in found if one.valid is not None]
    if len(streams) > 1:
        return MixedPrompts(streams, [len(stream) for stream in streams])
    return streams[0] if streams else None


def start_facts(device: torch.device, command: RunCommand) -> RunFacts:
    """Returns all facts that the rules need, for a run on this device."""
    return RunFacts(
        command=command,
        device=kind_of(device),
        num_gpus=torch.cuda.device_count(),
        is_torchrun=rank_from_environment() is not None,
        has_agents=NODES in os.environ,
    )


def facts_here(config: Config, command: RunCommand) -> RunFacts:
    """Returns the facts of this machine; none for a Slurm job, which runs on other machines."""
    if config.scheduler.type == "slurm":
        return RunFacts(command=command)
    return start_facts(pick_device(), command)


@RULES.add(commands=("train", "sft"), stage="start")
def the_remote_store_answers(config: Config) -> list[Problem | str]:
    """Reports a remote store that does not answer or rejects the credentials; checked after the
    keys are valid. A temporary failure is no problem if the run has a local checkpoint: `Tiers`
    logs it."""
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


@RULES.add(commands=("train",), stage="start")
def servers_can_start(config: Config, facts: RunFacts) -> list[Problem | str]:
    return server_problems(config, facts) if facts.samples(config) else []


def kind_of(device: torch.device) -> DeviceKind:
    return "cuda" if device.type == "cuda" else "cpu"
