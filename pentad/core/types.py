"""The nouns of the system, and how they are laid out. Everything here is plain data.

A *prompt* is one row of the dataset, tokenised. A *group* is one prompt and its n *samples*. A
*row* is one sample as the learner sees it: ids and per-token columns. A *batch* is the groups of
one optimizer step; a *microbatch* is what one forward pass takes. The *version* counts batches
trained.

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

if TYPE_CHECKING:  # rewards in processes of their own import these nouns too
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
    """The same as a conversation, before any template; a plain text is one message of a user."""
    environment: str = ""
    """The name of its environment; empty if the run has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are sampled. Reported log-probs are those of the distribution after
    temperature."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 means greedy; log-probs are then those at temperature 1."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means no limit."""
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    num_top: int = 0
    """Number of likeliest tokens reported at each position; for the embedded engine only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to be continued n times; `seeds` has one entry per continuation."""

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seeds: tuple[int, ...]
    """Continuation i draws token t (counted from the start of the sequence) with randomness
    keyed by (seeds[i], t) alone, so results do not depend on what else is in the engine."""
    drawn: tuple[Generation, ...] = ()
    """What an earlier request drew of each continuation: it continues after these tokens, and its
    generation begins with them. Empty: nothing is drawn yet."""


TopTokens = list[tuple[int, float]]
"""The likeliest ids at one place and their log-probs, the likeliest first."""


@dataclass(slots=True)
class Generation:
    """One continuation: the new tokens only. All lists have equal length."""

    ids: list[int]
    logprobs: list[float]
    versions: list[int]
    """Weight version that produced each token."""
    finish: FinishReason
    routes: np.ndarray | None = None
    """[prompt and new tokens, mixture layers, k]: the experts of each token when the next one was
    sampled, from a sampler that records them. The last token's have no meaning."""
    tops: list[TopTokens] = field(default_factory=list)
    """One entry per new token, if `num_top` of them were requested."""
    arrays: tuple[np.ndarray, np.ndarray, np.ndarray] | None = field(
        default=None, init=False, repr=False, compare=False
    )
    """The result of `columns`; a sampler with arrays sets it. Not an argument, because
    `dataclasses.replace` would copy it to answers with other lists."""
    lists: tuple[list[int], list[float], list[int]] | None = field(
        default=None, init=False, repr=False, compare=False
    )
    """The lists of which the arrays were made."""

    def __post_init__(self) -> None:
        self.lists = self.ids, self.logprobs, self.versions

    def columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """ids, log-probs and versions in the form of a sample, made once: three readers use
        them."""
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
    """bool: sampled by the policy, hence trained. Prompt and environment tokens are False."""
    rollout_logprobs: np.ndarray
    """float32, as reported at sampling; 0 where mask is False."""
    versions: np.ndarray
    """int64, weight version of each sampled token; -1 where mask is False."""
    finish: FinishReason
    text: str = ""
    """The sampled part, decoded; for rewards and for display, never re-encoded."""
    given_text: str | None = None
    """The ids before the first sampled one, decoded, if they are not those of the prompt."""
    turns: tuple[tuple[str, str], ...] = ()
    """(role, text) of all messages after the prompt, for display; empty for a single answer."""
    environment: dict[str, Any] | None = None
    """Final attributes of its environment, until it has a reward; None without one."""
    reward: float | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    """Further token-aligned float32 columns, such as ref_logprobs."""
    routes: np.ndarray | None = None
    """[tokens, mixture layers, k]: the experts of each token in the sampler, if recorded."""

    @property
    def num_sampled(self) -> int:
        return int(np.count_nonzero(self.mask))


@dataclass(slots=True)
class Group:
    """One prompt and its samples: the unit of planning, transport, failure and recovery."""

    prompt: Prompt
    samples: list[Sample]
    attempt: int = 0

    @property
    def gid(self) -> int:
        return self.prompt.gid

    @property
    def min_version(self) -> int:
        mask = np.concatenate([s.mask for s in self.samples])
        return int(np.concatenate([s.versions for s in self.samples])[mask].min())


@dataclass(slots=True)
class Row:
    """One sequence for the learner: token ids, token-aligned columns, and its share of the count.

    Losses are sums of per-token terms; `columns["weights"]` carries every normalisation that is
    finer than the global one, and the sum of `count` over all rows of a step divides the
    gradient once. So the gradient does not depend on how rows are split.
    Example (mean over tokens): weights = mask, count = mask.sum().
    """

    ids: Tensor
    """int64 [L]."""
    columns: dict[str, Tensor]
    """float32 [L] each; "weights" is 0 where a token is not trained."""
    count: float = 0.0
    routes: Tensor | None = None
    """int64 [L, mixture layers, k]: the experts for each token, distinct; None: the routers choose.
    The last token's have no effect."""
    group: int | None = None
    """Rows of one group in a call answer one prompt: their common first tokens are computed once.
    None: computed alone."""


class Segments(Protocol):
    """Interface to the assignment of tokens to sequences, independent of the sharding of tokens.
    The engine's implementation also works when a sequence is spread over ranks."""

    @property
    def num(self) -> int: ...

    def sum(self, x_T: Tensor) -> Tensor:
        """Per-sequence sums, differentiable: [T] -> [S]."""
        ...

    def spread(self, x_S: Tensor) -> Tensor:
        """Each token gets its sequence's value: [S] -> [T]."""
        ...


@dataclass(slots=True)
class TokenOutputs:
    """The model's outputs for every token of a microbatch, with aligned columns."""

    logprobs_T: Tensor
    """At the temperature of the run."""
    entropy_T: Tensor | None
    values_T: Tensor | None
    segments: Segments


class Loss(Protocol):
    """A sum of per-token terms. Independent of ranks, microbatches and the normaliser."""

    needs_entropy: bool
    """Whether the gradient flows through the entropy (it is always reported)."""
    columns: tuple[str, ...]
    """The columns it reads."""

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
    """The loss's own sums."""
    outputs: list[dict[str, Tensor]]
    """Per row, detached, token-aligned: logprobs, entropy, and values with a critic."""


@dataclass(frozen=True, slots=True)
class LayerBalance:
    """The load of the experts of one layer in one step."""

    layer: int
    loads: tuple[int, ...]
    """Tokens of each expert."""

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
        """Experts without a token."""
        return self.loads.count(0)


@dataclass(slots=True)
class Work:
    """One kind of work in the training passes of a step, on one rank."""

    seconds: float = 0.0
    num_bytes: int = 0
    """Moved by it."""
    num_calls: int = 0
    num_items: int = 0
    """Number of processed items, such as pairs that experts computed."""
    block_bytes: int | None = None
    """Shared memory of a block of the Triton kernel that did it; None: another implementation."""


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
    """The reason."""
    balance: tuple[LayerBalance, ...] = ()
    """One entry for every mixture layer of the model."""
    work: dict[str, Work] = field(default_factory=dict, compare=False)
    """Measurements of this rank: `route`; with expert parallelism `dispatch`, `combine`."""
    num_pairs: int | None = None
    """Pairs of a token and an expert computed on all ranks, counted at their expert; recomputed
    passes count again. None without expert parallelism."""
    left_out: tuple[int, ...] = ()
    """Lengths of first tokens that were shared by rows with a common prefix and not computed
    again."""


class Attend(Protocol):
    """The attention core of a model: only it knows which tokens attend to which. The learner passes
    one over packed sequences, the sampler one over its key-value cache, context parallelism wraps
    either. T counts tokens of all sequences, flat."""

    def __call__(
        self,
        layer: int,
        q_THd: Tensor,
        k_TKd: Tensor,
        v_TKd: Tensor,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Causal attention within each sequence, rotary already applied; returns o_THd.

        With a `window` a token sees itself and the window - 1 tokens before it. `sinks` are one
        logit for each query head, which takes weight from a token's keys and gives no value. Models
        pass either only for layers that have it, so a core that cannot do it fails instead of
        ignoring it.
        """
        ...
