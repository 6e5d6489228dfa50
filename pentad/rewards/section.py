"""The keys of the block `reward`, read by the scorer and its pool of processes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pentad.core.section import Count, Seconds, Section

REWARD_NAMES = ("exact_match", "numeric", "gsm8k", "sort_digits", "math", "code")


JUDGE, REWARD_MODEL = "judge", "reward_model"
MODELS = (JUDGE, REWARD_MODEL)
"""Rewards that a model gives."""


class JudgeConfig(Section):
    url: str = ""
    """OpenAI-compatible address, up to and with its /v1."""
    model: str = ""
    """The name to ask for."""
    template: str = ""
    """The question, one message of a user. {completion}, {prompt}, {answer} and columns of the row
    are put in where their names stand in braces."""
    scale: Annotated[float, Field(gt=0)] = 1.0
    """The last number that the judge says is divided by this."""
    cache: str | None = None
    """File of verdicts, read at the start and added to. null: they are kept for this run alone."""
    api_key_env: str | None = None
    """Environment variable with the key of the address."""
    max_tokens: Count = 512
    """Longest answer of the judge."""
    timeout_s: Seconds = 120.0
    """For one answer."""
    max_retries: Annotated[int, Field(ge=0, le=100)] = 3
    """Questions after the first, each after twice the time, before a sample has no reward."""
    max_concurrent: Annotated[int, Field(ge=1, le=1024)] = 16
    """Questions under way at once."""


class RewardModelConfig(Section):
    path: str | None = None
    """Folder, or name of the Hugging Face hub: a model that `pentad reward-model` trained, or
    another with one output for a sequence."""
    device: str = "auto"
    """Where it computes. auto: the first GPU, in a run of one process; on a CPU where there is
    none. Runs with processes of their own for training or sampling name it: cpu, or cuda:N."""
    scale: float = 1.0
    """What its output is multiplied by."""
    max_tokens: Count = 16384
    """Most tokens of one pass over the answers of a prompt."""


class RewardConfig(Section):
    fn: str | tuple[str, ...] | None = None
    """A built-in reward (exact_match, numeric, gsm8k, math, code, sort_digits), judge, which asks
    the model that `judge` names, reward_model, which is the model of `model`, or your own:
    `package.module:function` or `path/to/file.py:function`. Or a list of them, which add up."""
    judge: JudgeConfig = JudgeConfig()
    """The model that `fn: judge` asks for rewards."""
    model: RewardModelConfig = RewardModelConfig()
    """The model of `fn: reward_model`."""
    weights: tuple[float, ...] | None = None
    """What the value of each function of `fn` is multiplied by. null: 1 each."""
    timeout_s: Seconds = 10.0
    """After this long the process of a reward is ended and the sample counts as failed."""
    num_workers: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Processes that compute rewards. null: half the cores, at most 8."""
    memory_mb: Count = 1024
    """Memory limit of each of them."""
    on_failure: Literal["drop", "zero"] = "drop"
    """What a reward that failed twice does, where the sample is not the cause: drop, the group is
    given up and counted; zero, the sample is scored 0 and marked."""
    allow_processes: bool = False
    """Whether a reward of your own may start processes."""
    allow_weaker: bool = False
    """Continues where this machine lacks a protection that rewards are run under."""

    @property
    def functions(self) -> tuple[str, ...]:
        """The functions of `fn`."""
        return (self.fn,) if isinstance(self.fn, str) else self.fn or ()
