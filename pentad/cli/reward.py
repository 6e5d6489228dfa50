"""`pentad reward`: scores a row of a recipe's data in a reward process, as a run does."""

from __future__ import annotations

import asyncio

from pentad.config.schema import Config
from pentad.core.errors import Problem, RunError, UserError
from pentad.core.roles import Scored
from pentad.core.section import chosen
from pentad.data.prompts import RejectedPrompt, open_prompts
from pentad.data.render import DataSource
from pentad.rollout.executor import load_workflow
from pentad.trainer.inputs import tokenizer_of, with_tools
from pentad.trainer.reward_trial import (
    Trial,
    open_scorer,
    own_completions,
    reason_of,
    try_completions,
)

SHOWN = 300
"""Maximum characters of a printed value."""


def run_reward_command(config: Config, row: int, completion: str | None) -> None:
    """Prints the row and its reward; RunError if the reward fails."""
    trials = asyncio.run(_try(config, row, completion))
    first = trials[0]
    print(f"row {first.row} ({first.where})")
    for name, value in first.prompt.fields.items():
        print(f"  {name}: {_short(value)}")
    for trial in trials:
        print(f"{trial.what}: {_short(trial.completion)}")
        print(f"  {_verdict(trial)}, {1e3 * trial.seconds:.1f} ms")
    failed = [trial for trial in trials if not isinstance(trial.result, Scored)]
    if failed:
        raise RunError(f"the reward failed on {len(failed)} of {len(trials)} completions")


async def _try(config: Config, row: int, completion: str | None) -> list[Trial]:
    data = config.train_dataset
    chosen(config.reward.fn, "reward.fn")
    limit = 2**31  # no limit: nothing is sampled
    source = DataSource(data=data, seed=config.seed, room=limit, streaming=True)
    workflow = load_workflow(config.rollout.workflow, config.rollout.agent)
    stream = open_prompts(with_tools(source, workflow), tokenizer_of(config))
    if row >= len(stream.rows):
        rule = f"there are {len(stream.rows)} rows, counted from 0"
        raise UserError(Problem(f"--row = {row}", rule))
    try:
        prompt = stream.of_row(row)
    except RejectedPrompt as error:
        raise UserError(str(error)) from error
    given = own_completions(prompt, data.answer_key)
    if completion is not None:
        given = {"the completion": completion}
    scorer = await open_scorer(config, data.answer_key)
    try:
        scorer.check_columns(prompt.fields)
        return await try_completions(scorer, stream, row, given)
    finally:
        await scorer.close()


def _verdict(trial: Trial) -> str:
    if not isinstance(trial.result, Scored):
        return f"failed: {reason_of(trial.result)}"
    parts = ", ".join(f"{name} {value:g}" for name, value in trial.result.parts.items())
    return f"reward {trial.result.value:g}" + (f" ({parts})" if parts else "")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)"
