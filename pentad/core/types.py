"""The data types of the system; all of them are plain data.

A *prompt* is one row of the dataset, tokenised. A *group* is one prompt and its n *samples*. A
*row* is one sample in the learner's form: ids and per-token columns. A *batch* is the groups of one
optimizer step; a *microbatch* is the rows of one forward pass. The *version* is the number of
trained batches.

Token alignment, everywhere outside the engine: entry t of a per-token column belongs to token
ids[t]. `logprobs[t]` is log p(ids[t] | ids[:t]), so entry 0 is always 0 and never trained.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

if TYPE_CHECKING:  # reward processes import these types without torch
    from torch import Tensor

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One dataset row, tokenised. Example: Prompt(17, (5, 9, 2), {"answer": "42"}, "6*7=")."""

    gid: int
    """Ordinal in the prompt stream: the identity of its group."""
    ids: tuple[int, ...]
    fields: Mapping[str, Any]
    """The dataset row, for rewards and workflows."""
    text: str = ""
    """The text of `ids`: rendered, if there is a chat template."""
    epoch: int = 0
    messages: tuple[Mapping[str, Any], ...] = ()
    """The prompt as messages, before any template; a plain text is one user message."""
    environment: str = ""
    """The name of its environment; empty if the run has only one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Settings of sampling. Reported log-probs are those of the distribution after temperature."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 means greedy; log-probs are then those at temperature 1."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means no limit."""
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    num_top: int = 0
    """Number of most likely tokens to report at each position; embedded engine only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to be continued n times; `seeds` has one entry per continuation."""

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seeds: tuple[int, ...]
    """Continuation i samples token t (counted from the start of the sequence) with randomness keyed
    only by (seeds[i], t), so results do not depend on other requests."""
    drawn: tuple[Generation, ...] = ()
    """Tokens that an earlier request sampled for each continuation: sampling continues after them,
    and the generation begins with them. Empty: none yet."""


TopTokens = list[tuple[int, float]]
"""The most likely ids at a position and their log-probs, most likely first."""


@dataclass(slots=True)
class Generation:
    """One continuation: the new tokens only. All lists have equal length."""

    ids: list[int]
    logprobs: list[float]
    versions: list[int]
    """Weight version that produced each token."""
    finish: FinishReason
    routes: np.ndarray | None = None
    """[prompt and new tokens, mixture layers, k]: the experts of each token, if the sampler records
    them. Those of the last token are undefined."""
    tops: list[TopTokens] = field(default_factory=list)
    """One entry per new token, if `num_top` of them were requested."""
    arrays: tuple[np.ndarray, np.ndarray, np.ndarray] | None = field(
        default=None, init=False, repr=False, compare=False
    )
    """Cached result of `columns`; a sampler that has arrays sets it. Not an argument, because
    `dataclasses.replace` would copy it to generations with other lists."""
    lists: tuple[list[int], list[float], list[int]] | None = field(
        default=None, init=False, repr=False, compare=False
    )
    """The lists from which the arrays were created."""

    def __post_init__(self) -> None:
        self.lists = self.ids, self.logprobs, self.versions

    def columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """ids, log-probs and versions as arrays, cached because there are three readers."""
        lists = self.ids, self.logprobs, self.versions
        is_same = self.lists is not None and all(map(operator.is_, self.lists, lists))
        if self.arrays is None or not is_same or len(self.arrays[0]) != len(self.ids):
            self.lists = lists
            self.arrays = (
                np.array(self.ids, dtype=np.int64),
                np.array(self.logprobs, dtype=np.float32),
                np.array(self.versions, dtype=np.int64),
            )
        return self.arrays


@dataclass(slots=True)
class Sample:
    """One finished continuation of a prompt, several turns included. Arrays have equal length.

    Example: prompt [5, 9], answer [7, 2]:
    ids [5 9 7 2], mask [0 0 1 1], rollout_logprobs [0 0 -.1 -.7], versions [-1 -1 3 3]
    """

    ids: np.ndarray
    """int64, prompt and everything after it."""
    mask: np.ndarray
    """bool: True for tokens that the policy sampled, which are trained."""
    rollout_logprobs: np.ndarray
    """float32, as reported at sampling; 0 where mask is False."""
    versions: np.ndarray
    """int64, weight version of each sampled token; -1 where mask is False."""
    finish: FinishReason
    text: str = ""
    """The decoded sampled part, for rewards and display; never re-encoded."""
    given_text: str | None = None
    """The decoded ids before the first sampled one, if they differ from the prompt."""
    turns: tuple[tuple[str, str], ...] = ()
    """(role, text) of all messages after the prompt, for display; empty for a single answer."""
    environment: dict[str, Any] | None = None
    """Final attributes of its environment, until it is scored; None without environment."""
    reward: float | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    """Further token-aligned float32 columns, such as ref_logprobs."""
    routes: np.ndarray | None = None
    """[tokens, mixture layers, k]: the experts of each token in the sampler, if recorded."""

    @property
    def num_sampled(self) -> int:
        return int(np.count_nonzero(self.mask))


@dataclass(frozen=True, slots=True)
class Greedy:
    """The greedy answer to a group's prompt, which is scored and not trained."""

    reward: float
    num_sampled: int
    """Number of its sampled tokens."""


@dataclass(slots=True)
class Group:
    """One prompt and its samples: the unit of planning, transfer, failure and recovery."""

    prompt: Prompt
    samples: list[Sample]
    attempt: int = 0
    greedy: Greedy | None = None
    """None unless the algorithm compares samples with it."""

    @property
    def gid(self) -> int:
        return self.prompt.gid

    @property
    def min_version(self) -> int:
        mask = np.concatenate([s.mask for s in self.samples])
        return int(np.concatenate([s.versions for s in self.samples])[mask].min())


@dataclass(slots=True)
class Row:
    """One sequence for the learner: token ids, token-aligned columns, and its `count`.

    Losses are sums of per-token terms; `columns["weights"]` contains every normalisation finer than
    the global one, and the gradient is divided once by the sum of `count` over all rows of a step.
    So it does not depend on how rows are split. Example (mean over tokens): weights = mask, count =
    mask.sum().
    """

    ids: Tensor
    """int64 [L]."""
    columns: dict[str, Tensor]
    """float32 [L] each; "weights" is 0 where a token is not trained."""
    count: float = 0.0
    routes: Tensor | None = None
    """int64 [L, mixture layers, k]: distinct experts of each token; None: the routers choose. Those
    of the last token have no effect."""
    group: int | None = None
    """Rows with the same group in a call share a prompt: their common prefix is computed once.
    None: the row is computed alone."""


class Segments(Protocol):
    """Assignment of tokens to sequences, independent of how tokens are sharded. The engine's
    implementation supports sequences that are spread over ranks."""

    @property
    def num(self) -> int: ...

    def sum(self, x_T: Tensor) -> Tensor:
        """Returns per-sequence sums, differentiable: [T] -> [S]."""
        ...

    def spread(self, x_S: Tensor) -> Tensor:
        """Returns for each token its sequence's value: [S] -> [T]."""
        ...


@dataclass(slots=True)
class TokenOutputs:
    """The model's outputs for every token of a microbatch, with aligned columns."""

    logprobs_T: Tensor
    """Log-probs at the temperature of the run."""
    entropy_T: Tensor | None
    values_T: Tensor | None
    segments: Segments


class Loss(Protocol):
    """A loss as a sum of per-token terms, independent of ranks, microbatches and the normaliser."""

    needs_entropy: bool
    """Whether the gradient flows through the entropy (it is always reported)."""
    columns: tuple[str, ...]
    """Names of the columns that it reads."""

    def __call__(
        self, outputs: TokenOutputs, columns: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the scalar sum and detached scalar sums for reports."""
        ...


@dataclass(slots=True)
class Accumulated:
    """Results of one `accumulate` call, summed over its rows."""

    loss_sum: float
    count: float
    stats: dict[str, float]
    """Sums that the loss reports."""
    outputs: list[dict[str, Tensor]]
    """Per row, detached, token-aligned: logprobs, entropy, and values with a critic."""


@dataclass(frozen=True, slots=True)
class LayerBalance:
    """The load of the experts of one layer in one step."""

    layer: int
    loads: tuple[int, ...]
    """Number of tokens of each expert."""

    @property
    def mean(self) -> float:
        return sum(self.loads) / len(self.loads)

    @property
    def std(self) -> float:
        """Standard deviation over the experts; 0 if all have equally many tokens."""
        mean = self.mean
        return math.sqrt(sum((load - mean) ** 2 for load in self.loads) / len(self.loads))

    @property
    def min(self) -> float:
        return float(min(self.loads))

    @property
    def max(self) -> float:
        return float(max(self.loads))

    @property
    def num_idle(self) -> int:
        """Number of experts without a token."""
        return self.loads.count(0)


@dataclass(slots=True)
class Work:
    """One kind of work in the training passes of a step, on one rank."""

    seconds: float = 0.0
    num_bytes: int = 0
    """Number of bytes moved."""
    num_calls: int = 0
    num_items: int = 0
    """Number of processed items, such as pairs that experts computed."""
    block_bytes: int | None = None
    """Shared memory per block of the Triton kernel that did the work; None: not a Triton kernel."""


@dataclass(slots=True)
class StepResult:
    """The results of one optimizer step."""

    loss: float
    grad_norm: float
    lr: float
    skipped: bool
    """True if the weights did not change: a gradient was not finite, or nothing was trained."""
    num_tokens: int
    num_microbatches: int
    reason: str = ""
    """Why it was skipped."""
    balance: tuple[LayerBalance, ...] = ()
    """One entry for every mixture layer of the model."""
    work: dict[str, Work] = field(default_factory=dict, compare=False)
    """Measurements of this rank: `route`; with expert parallelism `dispatch`, `combine`."""
    num_pairs: int | None = None
    """Number of computed (token, expert) pairs on all ranks, counted at the expert; recomputed
    passes count again. None without expert parallelism."""
    left_out: tuple[int, ...] = ()
    """Lengths of common prefixes of rows that were not computed again."""


class Attend(Protocol):
    """The attention core of a model, which defines which tokens attend to which. The learner passes
    one for packed sequences, the sampler one for its key-value cache; context parallelism wraps
    either. T is the number of tokens of all sequences, flat."""

    def __call__(
        self,
        layer: int,
        q_THd: Tensor,
        k_TKd: Tensor,
        v_TKd: Tensor,
        window: int | None = None,
        sinks: Tensor | None = None,
        cap: float | None = None,
    ) -> Tensor:
        """Causal attention within each sequence, rotary already applied; returns o_THd.

        With a `window` a token attends to itself and the window - 1 tokens before it. `sinks` has a
        logit per query head that is part of the softmax but has no value. With a `cap` a score s
        is limited to cap * tanh(s / cap). Models pass each only for layers that have it, so that a
        core without support fails instead of ignoring it.
        """
        ...
