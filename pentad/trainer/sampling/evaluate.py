"""Evaluation: standalone (a model folder or its server, a dataset, a reward), or within a run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from pentad.config.environments import environments
from pentad.config.rules.model import stop_id_problems
from pentad.config.schema import Config
from pentad.core.device import DTYPES, pick_device
from pentad.core.errors import Problem
from pentad.core.roles import Sampler
from pentad.core.section import chosen
from pentad.core.seeds import derive_seed, seed_globals
from pentad.core.types import Prompt, SamplingParams
from pentad.data.section import DatasetConfig
from pentad.data.tokenizer import Tokenizer
from pentad.infer.sampler import EmbeddedSampler
from pentad.models.registry import dims_to_sample
from pentad.rewards.scorer import RewardScorer
from pentad.rewards.section import RewardConfig
from pentad.rollout.evaluation import Answered, EvalResult, answer_prompts, summarise
from pentad.rollout.executor import Executor, Executors, load_workflow
from pentad.rollout.replicas import Fleet
from pentad.rollout.workflows import Context
from pentad.samplers import completions
from pentad.trainer.inputs import (
    CheckedEnvironment,
    Collector,
    RowReader,
    answer_problems,
    prompt_stream,
    tokenizer_of,
    vocabulary_problems,
)
from pentad.trainer.preflight import Checked
from pentad.trainer.reward_trial import check_reward
from pentad.trainer.sampling.samplers import sampler_settings
from pentad.trainer.saving.periodic import Frequency
from pentad.weights.peft import read_adapter


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The results of an evaluation with their caveats."""

    result: EvalResult
    num_left_out: dict[str, int]
    """Number of rows that are not usable as prompts, by reason."""
    no_majority: str
    """Reason for a missing majority vote; empty if there is one."""
    failures: dict[str, int] = field(default_factory=dict)
    """Number of failed prompts, by message."""

    def as_record(self) -> dict[str, Any]:
        record = self.result.as_record()
        del record["version"]
        return {**record, "num_left_out": self.num_left_out, "no_majority": self.no_majority}


def check_eval(config: Config) -> Checked:
    """Reads and checks the inputs; raises one UserError with every problem."""
    checks = Collector()
    path = config.model_folder()
    checks.attempt(lambda: config.register_models())
    dims = checks.attempt(lambda: dims_to_sample(path))
    adapter, addresses = adapter_of(config), config.rollout.server.addresses
    if adapter is not None and addresses:
        rule, remedy = (
            f"the server at {addresses[0]} uses its own weights",
            "load the adapter on the server",
        )
        checks.problems.append(Problem(f"actor.lora.init_path = {adapter}", rule, remedy))
    tokenizer = checks.attempt(lambda: tokenizer_of(config))
    [keys], stream = environments(config), None
    workflow = checks.attempt(lambda: load_workflow(keys.workflow, keys.agent))
    if dims is not None and tokenizer is not None:
        checks.problems += vocabulary_problems(path, dims, tokenizer)
        checks.problems += stop_id_problems(config, dims)
        reader = RowReader(dims, tokenizer)
        stream = checks.attempt(lambda: prompt_stream("valid", config, keys, reader, workflow))
        checks.problems += answer_problems(config, stream, config.valid_dataset)
    if config.valid_dataset is not None and not checks.problems:
        answer_key = config.valid_dataset.answer_key
        checks.attempt(lambda: check_reward(config, [(stream, answer_key)]))
    checks.raise_all()
    assert dims and tokenizer and workflow and stream, "what failed has raised"
    only = CheckedEnvironment(keys.name, config, workflow, None, stream)
    return Checked(dims, tokenizer, stream, None, (only,))


def run_eval(
    config: Config,
    subject: Checked,
    *,
    device: str = "auto",
    on_answered: Callable[[Answered], None] | None = None,
) -> Evaluation:
    return asyncio.run(_evaluate(config, subject, pick_device(device), on_answered))


async def _evaluate(
    config: Config,
    subject: Checked,
    device: torch.device,
    on_answered: Callable[[Answered], None] | None,
) -> Evaluation:
    seed_globals(config.seed, "eval")
    async with AsyncExitStack() as stack:
        data = chosen(config.valid_dataset, "valid_dataset")
        scorers = Scorers(stack)
        reward = await scorers.open(config, data)
        samplers = await _samplers(config, subject, device)
        for sampler in samplers.values():
            stack.push_async_callback(sampler.close)
        executor = await open_executors(subject, samplers, scorers, stack, purpose="eval")
        why = no_majority(config, reward)
        started = time.monotonic()
        answered = await answer_prompts(
            [subject.stream.prompt(gid) for gid in range(len(subject.stream))],
            executor,
            count_votes=reward.results if reward is not None and not why else None,
            on_answered=on_answered,
        )
        result = summarise(0, answered, time.monotonic() - started)
    failures: dict[str, int] = {}
    for found in answered:
        if found.group is None:
            failures[found.failure] = failures.get(found.failure, 0) + 1
    return Evaluation(result, dict(subject.stream.dropped), why, failures)


class Scorers:
    """The reward processes of a run, one pool for each config block; `stack` closes them."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.stack = stack
        self.opened: dict[tuple[RewardConfig, str], RewardScorer] = {}

    async def open(self, config: Config, data: DatasetConfig) -> RewardScorer | None:
        """Opens the scorer for samples of this dataset; None if no reward is configured."""
        key = config.reward, data.answer_key
        if not config.reward.functions:
            return None
        if key not in self.opened:
            scorer = RewardScorer(config.reward, answer_field=data.answer_key, seed=config.seed)
            await scorer.start()
            self.stack.push_async_callback(scorer.close)
            self.opened[key] = scorer
        return self.opened[key]


async def open_executors(
    checked: Checked,
    samplers: Mapping[str, Sampler],
    scorers: Scorers,
    stack: AsyncExitStack,
    *,
    purpose: Literal["train", "eval"],
) -> Executors:
    """Opens executors, which sample groups for training or evaluation with separate random numbers;
    `stack` closes them."""
    trains, found = purpose == "train", {}
    fleet = Fleet(samplers)
    for one in checked.environments:
        data = one.config.train_dataset if trains else one.config.valid_dataset
        if data is not None:
            reward = await scorers.open(one.config, data)
            found[one.name] = _executor(one, checked, fleet, reward, trains)
    executors = Executors(found)
    stack.callback(executors.close)
    return executors


def _executor(
    environment: CheckedEnvironment,
    checked: Checked,
    fleet: Fleet,
    reward: RewardScorer | None,
    trains: bool,
) -> Executor:
    config, tokenizer = environment.config, checked.tokenizer
    context = Context(
        tokenizer=tokenizer.inner,
        params=(sampling_params if trains else eval_params)(config, tokenizer),
        num_samples=config.gconfig.n_samples if trains else config.evaluator.n_samples,
        run_seed=derive_seed(config.seed, "train" if trains else "eval"),
        max_total_tokens=checked.dims.max_position,
        max_sampled_tokens=config.gconfig.max_sampled_tokens if trains else None,
    )
    return Executor(
        fleet,
        environment.workflow,
        reward,
        context,
        config.rollout,
        vocab_size=checked.dims.vocab_size,
        needs_reward=not (trains and config.algorithm.facts.needs_teacher),
        needs_greedy=trains and config.samples_greedily,
    )


def sampling_params(config: Config, tokenizer: Tokenizer) -> SamplingParams:
    """Sampling parameters for training."""
    gconfig = config.gconfig
    return SamplingParams(
        max_new_tokens=gconfig.max_new_tokens,
        temperature=gconfig.temperature,
        top_p=gconfig.top_p,
        top_k=gconfig.top_k,
        stop_ids=tuple(dict.fromkeys((*tokenizer.stop_ids, *gconfig.stop_token_ids))),
        stop_strings=gconfig.stop,
    )


def eval_params(config: Config, tokenizer: Tokenizer) -> SamplingParams:
    """Sampling parameters for evaluation: those of training, overridden by the evaluator's keys,
    without top-k or top-p."""
    keys, train = config.evaluator, sampling_params(config, tokenizer)
    length = keys.max_new_tokens or train.max_new_tokens
    temperature = keys.temperature
    return replace(train, max_new_tokens=length, temperature=temperature, top_p=1.0, top_k=0)


def adapter_of(config: Config) -> str | None:
    """Returns the PEFT folder of the adapter, if one is configured."""
    return None if config.actor.lora is None else config.actor.lora.init_path


async def _samplers(config: Config, subject: Checked, device: torch.device) -> dict[str, Sampler]:
    """Opens the model in this process, or connects to the servers at the given addresses."""
    addresses = config.rollout.server.addresses
    if addresses:
        return {address: await completions.attach(address, subject.dims) for address in addresses}
    tokenizer, adapter = subject.tokenizer, adapter_of(config)
    embedded = EmbeddedSampler.from_folder(
        config.model_folder(),
        sampler_settings(config, subject.dims),
        device=device,
        dtype=DTYPES[config.actor.compute_dtype(device.type)],
        decode=lambda ids: tokenizer.decode(ids, keep_special=True),
        adapter=None if adapter is None else read_adapter(adapter),
        dequantize=config.actor.dequantize,
    )
    return {"embedded": embedded}


def no_majority(config: Config, reward: RewardScorer | None) -> str:
    """Returns why the most frequent answer cannot be determined; empty if it can."""
    if config.evaluator.n_samples == 1:
        return "one answer per prompt"
    if reward is None:
        return "the workflow scores its samples itself"
    if not reward.has_results:
        names = ", ".join(config.reward.functions)
        return f"the reward {names} compares no answers that could be counted"
    return ""


@dataclass(eq=False)
class Evaluator:
    """Held-out evaluation within a run, with a separate executor, separate sampling parameters and
    one fixed weight version."""

    prompts: Sequence[Prompt]
    executor: Executors
    frequency: Frequency
    on_result: Callable[[EvalResult], None]
    last_version: int
    seen: int = 0
    """The version of the last call of `is_due`."""

    def is_due(self, version: int) -> bool:
        """Whether an evaluation is due: before step 1 (baseline), at the end of the run, and at the
        configured frequency."""
        # A version that a newer one replaced before it was published has no call.
        due = [self.frequency.is_due(passed) for passed in range(self.seen + 1, version + 1)]
        self.seen = version
        return any(due) or version in (0, self.last_version)

    def state(self) -> dict[str, Any]:
        return {"frequency": self.frequency.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self.frequency.restore(state["frequency"])

    async def evaluate(self, version: int) -> EvalResult:
        started = time.monotonic()
        answered = await answer_prompts(self.prompts, self.executor)
        result = summarise(version, answered, time.monotonic() - started)
        self.on_result(result)
        return result
