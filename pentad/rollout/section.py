"""The keys of the blocks `rollout` and `gconfig`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from pentad.core.quantization import WeightDtype
from pentad.core.section import Count, NonNegative, NonNegativeInt, Positive, Seconds, Section
from pentad.core.sizes import CacheDtype
from pentad.data.section import DatasetConfig
from pentad.rewards.section import RewardConfig
from pentad.samplers.section import ServerConfig

WORKFLOW_NAMES = ("single_turn", "agent")
ENVIRONMENT_KINDS = ("class", "gym", "mcp", "openenv", "verifiers")
"""Prefixes (before a colon) of workflow names for environments in separate processes."""
FEWEST_RUNNING = 256
"""Default minimum number of sequences that a sampler decodes together."""


class GenerationConfig(Section):
    n_samples: Count = 8
    """Samples per prompt: the size of a group."""
    max_new_tokens: Count = 256
    """Maximum length of an answer; with several turns, of each turn."""
    max_sampled_tokens: Count | None = None
    """Maximum number of sampled tokens of one sample, over all turns: the limit for the overlong
    penalty and `loss_norm: constant`. null: `max_new_tokens` in single_turn, else no limit."""
    temperature: NonNegative = 1.0
    """Sampling temperature; the trainer computes log-probs at the same one."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling. Training needs 1: the trainer cannot reproduce a truncated distribution."""
    top_k: NonNegativeInt = 0
    """Samples from the k most likely tokens; 0: from all. Training needs 0."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer."""
    stop_token_ids: tuple[NonNegativeInt, ...] = ()
    """Tokens that end an answer, besides those of the model."""


def as_block(value: Any) -> Any:
    """Accepts a path in place of a dataset block."""
    return {"path": value} if isinstance(value, str) else value


DataBlock = Annotated[DatasetConfig, BeforeValidator(as_block)]


class WorkflowConfig(Section):
    workflow: str
    """As `rollout.workflow`."""
    agent: str | None = None
    """As `rollout.agent`."""
    name: str | None = None
    """Name in the records. null: as `workflow`."""
    weight: Positive = 1.0
    """Share of the prompts, relative to the weights of the others."""
    data: DataBlock = DatasetConfig()
    """Its training prompts, or only their path. Unset keys, such as format and `max_length`, are
    taken from `train_dataset`."""
    valid: DataBlock | None = None
    """Its held-out prompts. null: none."""
    reward: RewardConfig | None = None
    """Reward of its answers. null: the environment's own rewards if it gives any, else the block
    `reward`."""


class RolloutConfig(Section):
    workflow: str = "single_turn"
    """single_turn; agent, which runs the program that `agent` names; an environment
    (`class:FILE:Class`, `gym:ID`, `mcp:COMMAND` or `mcp:URL`, `openenv:URL`, `reasoning_gym:NAME`,
    `verifiers:ID?python=ENVIRONMENT`); or `package.module:Class`, your own workflow."""
    agent: str | None = None
    """For `workflow: agent`: `package.module:function` or `path/to/file.py:function`, a function
    that calls the policy through an OpenAI-compatible API."""
    workflows: tuple[WorkflowConfig, ...] = ()
    """Several environments in one run, instead of `workflow`, `agent`, `train_dataset.path` and
    `valid_dataset`: each group has one of them, by weight."""
    history: Literal["sampled", "template"] = "sampled"
    """Form of earlier turns in the policy's context. sampled: the sampled tokens, including
    thinking. template: the turns as rendered by the chat template (Qwen3's removes thinking before
    the last question); if the rendering does not start with the tokens so far, the turn starts a
    new sequence, and all sequences of an episode are trained with its reward."""
    max_concurrent_groups: Count | None = None
    """Maximum number of groups in flight. null: one batch, plus one for each step of staleness."""
    oversample: Annotated[float, Field(ge=1, le=2)] = 1.0
    """Number of groups that a step starts, as a multiple of `train_dataset.batch_size`. When enough
    of them are complete, the others are aborted; they are the first groups of the next step and
    continue from the tokens they have. For single answers with `max_staleness` 0. 1: off."""
    max_carries: Count = 4
    """With `oversample`: how often a group may be interrupted before a step waits for it. Also the
    maximum number of versions by which a token may lag behind the trained weights."""
    deadline_s: Seconds = 600.0
    """A group that takes longer is aborted and counts as failed."""
    tool_timeout_s: Seconds = 30.0
    """Time limit of a call of an environment in its own process (reset, a tool, a step, the
    reward); beyond it the process is killed and the episode ends."""
    max_retries: NonNegativeInt = 2
    """Number of retries before a failing group is dropped and counted."""
    max_batch_tokens: Count | None = None
    """Maximum number of tokens in a forward pass of the sampler. null: 8192; for the embedded
    sampler on a GPU 32768, less for wide models or little free memory, of which at most 8192 in
    prompts that continue from cached tokens; at least `max_running`."""
    max_running: Annotated[int, Field(ge=1, le=1000000)] | None = None
    """Maximum number of sequences decoded together. null: as many as are requested at once, from
    256 to 1024; sequences that do not fit the key-value cache wait."""
    kv_cache_gb: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Memory of the key-value cache. null: derived from the free memory."""
    kv_cache_dtype: CacheDtype = "auto"
    """Format of the key-value cache. auto: as the model computes. int8 (embedded sampler) and fp8:
    half of the memory of bf16, and decoding reads half as much; log-probs of sampler and trainer
    then differ by more than the rounding of 16 bits (docs/embedded-engine.md has the figures)."""
    weight_dtype: WeightDtype = "auto"
    """Format of the weights of vLLM and SGLang servers. auto: as the model computes. fp8: every
    publish quantises the matrices of attention, MLPs and experts, with a scale per block of 128 x
    128: half of the memory of bf16; log-probs of sampler and trainer then differ by more than the
    rounding of 16 bits (docs/servers.md)."""
    on_update: Literal["continue", "reprefill"] = "continue"
    """Handling of answers in progress when new weights are installed: they continue with the cache
    of the old weights, or their cache is recomputed."""
    replay_routes: bool = False
    """For a mixture of experts: the sampler returns the experts of each token, and training routes
    it to the same ones, so that rounding cannot select others."""
    weight_deltas: bool = True
    """For weights published by disk: only tensors that changed since the sampler's version are
    written, and the result is verified as a whole. false: always all tensors."""
    restarts: NonNegativeInt = 3
    """Number of consecutive restarts of an embedded sampler, a scorer or a server that the run
    started, without an answer in between, after which the run ends."""
    server: ServerConfig = ServerConfig()
    """The servers of a rollout component `vllm` or `sglang`."""

    @property
    def is_single_turn(self) -> bool:
        """Whether every sample is a single answer."""
        return all(spec == "single_turn" for spec in self.specs)

    @property
    def specs(self) -> tuple[str, ...]:
        """The workflows of the run."""
        return tuple(one.workflow for one in self.workflows) or (self.workflow,)

    @property
    def max_sequences(self) -> int:
        """Returns `max_running`, or the default if the load is unknown."""
        return self.max_running or FEWEST_RUNNING

    @property
    def kv_cache_bytes(self) -> int | None:
        return None if self.kv_cache_gb is None else int(self.kv_cache_gb * 2**30)


def workflow_kind(spec: str) -> tuple[str, str]:
    """Splits `kind:rest` of an environment; the kind is empty for other workflows."""
    kind, colon, rest = spec.partition(":")
    return (kind, rest) if colon and kind in ENVIRONMENT_KINDS else ("", spec)
