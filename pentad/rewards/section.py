"""The keys of the block `reward`, read by the scorer and its pool of processes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pentad.core.section import Count, Seconds, Section

REWARD_NAMES = ("exact_match", "numeric", "gsm8k", "sort_digits", "math", "code")


JUDGE, REWARD_MODEL = "judge", "reward_model"
MODELS = (JUDGE, REWARD_MODEL)
"""Rewards that call a model."""


class JudgeConfig(Section):
    url: str = ""
    """OpenAI-compatible address, including /v1."""
    model: str = ""
    """Name of the model at that address."""
    template: str = ""
    """The question to the judge, sent as one user message. {completion}, {prompt}, {answer} and
    columns of the row in braces are replaced by their values."""
    scale: Annotated[float, Field(gt=0)] = 1.0
    """The last number in the judge's answer is divided by this."""
    cache: str | None = None
    """File of scores, read at the start and extended. null: scores are kept for this run only."""
    api_key_env: str | None = None
    """Environment variable with the API key."""
    max_tokens: Count = 512
    """Maximum length of the judge's answer."""
    timeout_s: Seconds = 120.0
    """Time limit for one answer."""
    max_retries: Annotated[int, Field(ge=0, le=100)] = 3
    """Number of retries, with doubling waits, before a sample has no reward."""
    max_concurrent: Annotated[int, Field(ge=1, le=1024)] = 16
    """Maximum number of concurrent requests."""


class RewardModelConfig(Section):
    path: str | None = None
    """Folder, or name of the Hugging Face hub: a model that `pentad reward-model` trained, or
    another with one output for a sequence."""
    device: str = "auto"
    """Device of the model. auto: the first GPU in a one-process run, or the CPU without a GPU. Runs
    with separate processes for training or sampling must set it: cpu, or cuda:N."""
    scale: float = 1.0
    """Factor of the model's output."""
    max_tokens: Count = 16384
    """Maximum number of tokens in one pass over the answers of a prompt."""


class RewardConfig(Section):
    fn: str | tuple[str, ...] | None = None
    """A built-in reward (exact_match, numeric, gsm8k, math, code, sort_digits), judge (calls the
    model in `judge`), reward_model (the model in `model`), or your own function:
    `package.module:function` or `path/to/file.py:function`. Or a list of these, which are added up.
    """
    judge: JudgeConfig = JudgeConfig()
    """The model that `fn: judge` calls."""
    model: RewardModelConfig = RewardModelConfig()
    """The model of `fn: reward_model`."""
    weights: tuple[float, ...] | None = None
    """Factor of each function of `fn`. null: 1 each."""
    timeout_s: Seconds = 10.0
    """Time limit of a reward; its process is then killed and the sample counts as failed."""
    num_workers: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Processes that compute rewards. null: half the cores, at most 8."""
    memory_mb: Count = 1024
    """Memory limit of each of them."""
    on_failure: Literal["drop", "zero"] = "drop"
    """Handling of a reward that fails twice if the sample is not the cause. drop: the group is
    dropped and counted. zero: the sample is scored 0 and marked."""
    allow_processes: bool = False
    """Whether your own reward may start processes."""
    allow_weaker: bool = False
    """Whether to continue if this machine lacks a protection of the reward processes."""

    @property
    def functions(self) -> tuple[str, ...]:
        """Returns the functions of `fn`."""
        return (self.fn,) if isinstance(self.fn, str) else self.fn or ()
