"""The keys of the blocks `rollout` and `gconfig`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from pentad.core.section import Count, NonNegative, NonNegativeInt, Positive, Seconds, Section
from pentad.core.sizes import CacheDtype
from pentad.data.section import DatasetConfig
from pentad.rewards.section import RewardConfig
from pentad.samplers.section import ServerConfig

WORKFLOW_NAMES = ("single_turn", "agent")
ENVIRONMENT_KINDS = ("class", "gym", "mcp", "openenv", "verifiers")
"""What a name of a workflow may begin with, before a colon: environments in their own processes."""
FEWEST_RUNNING = 256
"""Sequences that a sampler decodes together at least, where no key says fewer."""


class GenerationConfig(Section):
    n_samples: Count = 8
    """Samples per prompt: the size of a group."""
    max_new_tokens: Count = 256
    """Longest answer; with several turns, of each of them."""
    max_sampled_tokens: Count | None = None
    """Most tokens sampled in one sample, all its turns together: what the overlong penalty and
    `loss_norm: constant` count against. null: `max_new_tokens` in single_turn, else no limit."""
    temperature: NonNegative = 1.0
    """Sampling temperature; the trainer computes log-probs at the same one."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling. Training needs 1: the trainer cannot reproduce a cut distribution."""
    top_k: NonNegativeInt = 0
    """Draws from the k likeliest tokens, 0 from all. Training needs 0."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer."""
    stop_token_ids: tuple[NonNegativeInt, ...] = ()
    """Tokens that end an answer, besides those of the model."""


def as_block(value: Any) -> Any:
    """Lets a block of a dataset be its path alone."""
    return {"path": value} if isinstance(value, str) else value


DataBlock = Annotated[DatasetConfig, BeforeValidator(as_block)]


class WorkflowConfig(Section):
    workflow: str
    """As `rollout.workflow`."""
    agent: str | None = None
    """As `rollout.agent`."""
    name: str | None = None
    """How records name it. null: as `workflow`."""
    weight: Positive = 1.0
    """Its share of the prompts, beside the weights of the others."""
    data: DataBlock = DatasetConfig()
    """Its training prompts, or their path alone. How rows are read, their order and `max_length`
    are as in `train_dataset` where it is not said."""
    valid: DataBlock | None = None
    """Its held-out prompts. null: none."""
    reward: RewardConfig | None = None
    """How its answers are scored. null: as it scores them itself, else by the block `reward`."""


class RolloutConfig(Section):
    workflow: str = "single_turn"
    """single_turn; agent, which runs the program that `agent` names; an environment
    (`class:FILE:Class`, `gym:ID`, `mcp:COMMAND` or `mcp:URL`, `openenv:URL`,
    `reasoning_gym:NAME`, `verifiers:ID?python=ENVIRONMENT`); or
    `package.module:Class`, a workflow of your own."""
    agent: str | None = None
    """For `workflow: agent`: `package.module:function` or `path/to/file.py:function`, a function
    that talks to the policy as to an OpenAI server."""
    workflows: tuple[WorkflowConfig, ...] = ()
    """Several environments in one run, in place of `workflow`, `agent`, `train_dataset.path` and
    `valid_dataset`: each group is of one of them, in turns by weight."""
    history: Literal["sampled", "template"] = "sampled"
    """What a policy that speaks several turns with an environment reads of its earlier ones.
    sampled: the tokens that it drew, thinking included. template: what the chat template writes,
    Qwen3's without the thinking before the last question; where that is not how the tokens so far
    begin, the turn begins a sequence of its own, and all sequences of an episode are trained with
    its reward."""
    max_concurrent_groups: Count | None = None
    """Groups in flight. null: one batch, times one more for each step of staleness."""
    deadline_s: Seconds = 600.0
    """A group that takes longer is aborted and counts as failed."""
    tool_timeout_s: Seconds = 30.0
    """A call of an environment in a process of its own (reset, a tool, a step, the reward) that
    takes longer ends that process and its episode."""
    max_retries: NonNegativeInt = 2
    """Attempts after the first before a failing group is dropped and counted."""
    max_batch_tokens: Count | None = None
    """Most tokens the sampler runs in one forward pass. null: 8192; of the embedded sampler on a
    GPU 32768, fewer of a wide model or where little memory is free, and of them 8192 in prompts
    that continue from cached tokens; `max_running` where that is more."""
    max_running: Annotated[int, Field(ge=1, le=1000000)] | None = None
    """Most sequences that a sampler decodes together. null: as many as it gets at once, at least
    256 and at most 1024; what does not fit the key-value cache waits."""
    kv_cache_gb: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Memory of the key-value cache. null: derived from what is free."""
    kv_cache_dtype: CacheDtype = "auto"
    """Format of the key-value cache. auto: as the model computes. int8 (embedded sampler) and fp8:
    half of the memory of bf16, and decoding reads half as much; log-probs of sampler and trainer
    then differ by more than the rounding of 16 bits (docs/embedded-engine.md has the figures)."""
    on_update: Literal["continue", "reprefill"] = "continue"
    """What new weights do to answers under way: they continue with the cache of the old weights, or
    their cache is computed anew."""
    replay_routes: bool = False
    """For a mixture of experts: the sampler reports where it sent each token, and training sends it
    to the same experts, so that rounding cannot choose others."""
    weight_deltas: bool = True
    """Weights that travel by disk: only tensors that changed since the version that the sampler
    holds are written; what it ends with is proven whole. false: all of them, every time."""
    restarts: NonNegativeInt = 3
    """How often an embedded sampler or a scorer in a process of its own, or a server that the run
    started, is started again in a row, without an answer gained in between, before the run ends."""
    server: ServerConfig = ServerConfig()
    """The servers of a rollout component `vllm` or `sglang`."""

    @property
    def is_single_turn(self) -> bool:
        """Whether every sample is one answer."""
        return all(spec == "single_turn" for spec in self.specs)

    @property
    def specs(self) -> tuple[str, ...]:
        """The workflows of the run."""
        return tuple(one.workflow for one in self.workflows) or (self.workflow,)

    @property
    def max_sequences(self) -> int:
        """`max_running`, or what a sampler decodes together where nothing is known of its load."""
        return self.max_running or FEWEST_RUNNING

    @property
    def kv_cache_bytes(self) -> int | None:
        return None if self.kv_cache_gb is None else int(self.kv_cache_gb * 2**30)


def workflow_kind(spec: str) -> tuple[str, str]:
    """The kind of environment and what follows its colon; no kind where it is another workflow."""
    kind, colon, rest = spec.partition(":")
    return (kind, rest) if colon and kind in ENVIRONMENT_KINDS else ("", spec)
