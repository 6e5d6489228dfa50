"""Tries the reward on dataset rows before anything is sampled, in a scoring process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from pentad.config.schema import Config
from pentad.core.errors import Problem, UserError
from pentad.core.roles import Scored
from pentad.core.types import Prompt, Sample
from pentad.data.prompts import PromptStream, RejectedPrompt
from pentad.data.tokenizer import Tokenizer
from pentad.rewards.sandbox import JobFailed
from pentad.rewards.scorer import RewardScorer
from pentad.rewards.section import MODELS, REWARD_NAMES, RewardConfig

ROWS_TRIED = 4
"""Number of rows on which built-in rewards are tried. They fail only because of a row, so the start
is rejected only if all rows fail."""
ROWS_READ = 1000
"""Number of rows searched for usable prompts."""
OWN_ANSWER, EMPTY = "the row's own answer", "an empty completion"


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of the reward for one completion."""

    prompt: Prompt
    row: int
    where: str
    """`file:line` of the row."""
    what: str
    """Describes the completion, in words."""
    completion: str
    result: Scored | JobFailed
    seconds: float


async def try_completions(
    scorer: RewardScorer, stream: PromptStream, row: int, completions: dict[str, str]
) -> list[Trial]:
    """Scores each completion (description -> text) of a row, one after the other."""
    prompt = stream.of_row(row)
    trials = []
    for what, text in completions.items():
        sample = sample_of(prompt, text, stream.tokenizer)
        started = time.perf_counter()
        [result] = await scorer.judge(prompt, [sample], repeats=False)
        taken_s = time.perf_counter() - started
        where = stream.rows.where(row)
        trials.append(Trial(prompt, row, where, what, text, result, taken_s))
    return trials


def own_completions(prompt: Prompt, answer_key: str) -> dict[str, str]:
    """Returns the completions that every reward is tried with."""
    answer = prompt.fields.get(answer_key)
    own = {} if answer is None else {OWN_ANSWER: str(answer)}
    return {**own, EMPTY: ""}


def sample_of(prompt: Prompt, text: str, tokenizer: Tokenizer) -> Sample:
    """Makes a sample as if the policy had answered `text`."""
    answer = [*tokenizer.encode(text), tokenizer.eos_id]
    ids = np.array([*prompt.ids, *answer], dtype=np.int64)
    mask = np.arange(len(ids)) >= len(prompt.ids)
    versions = np.where(mask, 0, -1)
    return Sample(ids, mask, np.zeros(len(ids), np.float32), versions, "stop", text)


def first_rows(stream: PromptStream, num: int) -> list[int]:
    """Returns the first usable rows near the start of the data."""
    found: list[int] = []
    for row in range(min(len(stream.rows), ROWS_READ)):
        if len(found) == num:
            break
        try:
            stream.of_row(row)
        except RejectedPrompt:
            continue
        found.append(row)
    return found


async def open_scorer(config: Config, answer_key: str) -> RewardScorer:
    """Starts a scorer with one worker. `answer_key`: that of the scored dataset."""
    alone = config.reward.model_copy(update={"num_workers": 1})
    scorer = RewardScorer(alone, answer_field=answer_key, seed=config.seed)
    await scorer.start()
    return scorer


def check_reward(
    config: Config,
    streams: Sequence[tuple[PromptStream | None, str]],
    *,
    asks_models: bool = True,
) -> None:
    """Raises UserError if the reward cannot be imported, lacks a column, or fails on a row.
    `streams` are the scored datasets, each with its answer key. Without `asks_models`, rewards of
    models are left out."""
    if not asks_models:
        config = config.model_copy(update={"reward": without_models(config.reward)})
    seen: set[tuple[str, ...]] = set()
    for stream, answer_key in streams:
        rows = first_rows(stream, 1) if stream is not None else []
        columns = stream.of_row(rows[0]).fields if stream is not None and rows else ()
        kind = (answer_key, *sorted(columns))
        if config.reward.functions and kind not in seen:
            asyncio.run(_check(config, answer_key, stream, columns))
        seen.add(kind)


def without_models(reward: RewardConfig) -> RewardConfig:
    """Returns the reward without the functions that call a model."""
    kept = [number for number, fn in enumerate(reward.functions) if fn not in MODELS]
    weights = reward.weights
    return reward.model_copy(
        update={
            "fn": tuple(reward.functions[number] for number in kept) or None,
            "weights": weights and tuple(weights[number] for number in kept),
        }
    )


async def _check(
    config: Config, answer_key: str, stream: PromptStream | None, columns: Collection[str]
) -> None:
    scorer = await open_scorer(config, answer_key)
    try:
        if stream is not None and columns:
            scorer.check_columns(columns)
            _check_rows(config, scorer, stream)
            if not any(function.takes.needs_environment for function in scorer.functions):
                await _try_rows(scorer, stream)
    finally:
        await scorer.close()


def _check_rows(config: Config, scorer: RewardScorer, stream: PromptStream) -> None:
    """Checks that every row has the columns that a user's function needs, if rows are known."""
    if stream.prompts is None or config.rollout.workflow != "single_turn":
        return
    for function in scorer.functions:
        if function.fn in REWARD_NAMES:
            continue
        names = function.takes.required - function.takes.known.keys()
        for prompt in stream.prompts if names else ():
            missing = sorted(names - stream.rows.row(prompt.row).keys())
            if missing:
                where = stream.rows.where(prompt.row)
                rule = f"it requires {missing[0]!r}, and {where} has no such column"
                raise UserError(Problem(f"reward.fn = {function.fn}", rule))


async def _try_rows(scorer: RewardScorer, stream: PromptStream) -> None:
    is_own = any(fn not in REWARD_NAMES for fn in scorer.reward.functions)
    failed: list[Trial] = []
    num_tried = 0
    for row in first_rows(stream, 1 if is_own else ROWS_TRIED):
        completions = own_completions(stream.of_row(row), scorer.answer_field)
        trials = await try_completions(scorer, stream, row, completions)
        num_tried += len(trials)
        failed += [trial for trial in trials if isinstance(trial.result, JobFailed)]
    accepts_some = not is_own or scorer.reward.on_failure == "zero"
    if failed and (len(failed) == num_tried or not accepts_some):
        raise UserError(failure_of(scorer, failed[0]))


def failure_of(scorer: RewardScorer, trial: Trial) -> Problem:
    where = f"reward.fn = {', '.join(scorer.reward.functions)}"
    rule = (
        f"it fails on row {trial.row} ({trial.where}) with {trial.what}: {reason_of(trial.result)}"
    )
    return Problem(where, rule, "fix it, and test it with pentad reward")


def reason_of(result: Scored | JobFailed) -> str:
    """Describes the failure; for an exception its message only."""
    if isinstance(result, JobFailed) and result.kind == "error":
        return result.detail
    return str(result)
