"""The three roles of a run as protocols: sampler, learner, scorer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from pentad.core.types import Accumulated, Generation, Group, Loss, Request, Row, StepResult

if TYPE_CHECKING:
    from torch import Tensor

NamedTensors: TypeAlias = "Iterable[tuple[str, Tensor]]"
"""(HF-on-disk name, full tensor), in layer order."""
TensorPairs: TypeAlias = "Sequence[tuple[str, Tensor]]"
"""The same as a sequence."""


class NativeWeights(Sequence["tuple[str, Tensor]"]):
    """Weights of a learner of this process, also by native name; the pairs are made when they are
    read. An adapter of a mixture has a pair for each expert, while native tensors hold all."""

    def __init__(
        self, native: Mapping[str, Tensor], num_pairs: int, pairs: Callable[[], NamedTensors]
    ) -> None:
        self.native = native
        self.num_pairs = num_pairs
        self.make_pairs = pairs

    @cached_property
    def pairs(self) -> TensorPairs:
        return list(self.make_pairs())

    def __len__(self) -> int:
        return self.num_pairs

    def __getitem__(self, index: Any) -> Any:
        return self.pairs[index]


class SentWeights:
    """Weights of a sender in this process that are unchanged until it has the receipt: a receiver
    may compare bytes, which is faster than hashing both sides."""

    __slots__ = ()
    weights: TensorPairs


@dataclass(frozen=True, slots=True)
class Installed:
    """The receipt of a weight update, for comparison with what was sent."""

    version: int
    num_tensors: int
    digest: str
    """Empty if `is_same`."""
    is_same: bool = field(default=False, kw_only=True)
    """Byte for byte equal to what was sent, by comparison: only for `SentWeights`."""
    install_s: float = field(default=0.0, compare=False)
    """From the received weights to the receipt; 0 if unknown."""
    pause_s: float = field(default=0.0, compare=False)
    """How long sampling was paused for it; 0 if unknown."""
    num_bytes: int = field(default=0, compare=False)
    """Number of bytes written or sent for it; 0 if the tensors themselves were shared."""


class Sampler(Protocol):
    """Continues prompts with the current policy. All methods may be called concurrently."""

    capabilities: frozenset[str]
    """Any of: pause (while weights are replaced), sleep, abort, stop_strings, seeds (sampling
    follows them), routes, strict."""

    @property
    def version(self) -> int:
        """The weight version of new tokens."""
        ...

    async def generate(self, request: Request) -> list[Generation]:
        """One generation per seed."""
        ...

    async def abort(self, request_id: str) -> None:
        """Ends one request at once; its generations return with finish "abort" and what was drawn
        of them, as far as the sampler knows it."""
        ...

    async def install(self, version: int, weights: NamedTensors) -> Installed:
        """Replaces all weights between two tokens; all or nothing, every tensor exactly once."""
        ...

    async def rewind(self) -> None:
        """Versions restart: the learner was lost and resumes from an earlier one. No tokens are
        requested before the next install, which may be of any version."""
        ...

    async def sleep(self) -> None:
        """Frees device memory; requests wait for `wake`."""
        ...

    async def wake(self) -> None: ...

    async def health(self) -> None:
        """Returns if the sampler can serve; raises RunError with the reason if not."""
        ...

    def stats(self) -> dict[str, float]: ...

    async def close(self) -> None: ...


class Learner(Protocol):
    """Holds the trained weights. Synchronous: all ranks make the same calls."""

    def forward(self, rows: Sequence[Row], tag: str = "actor") -> list[dict[str, Tensor]]:
        """Per row the token-aligned logprobs (and values) under the weights named `tag`."""
        ...

    def routes(self, rows: Sequence[Row], tag: str = "actor") -> list[Tensor]:
        """The experts of each token under the weights named `tag`, as `Row.routes`."""
        ...

    def begin_step(self) -> None: ...

    def accumulate(self, rows: Sequence[Row], loss: Loss, *, last: bool = True) -> Accumulated:
        """Adds the gradient of the loss over the rows; any number of calls per step."""
        ...

    def end_step(self) -> StepResult:
        """Divides by the summed count, clips, steps the optimizer and the schedule."""
        ...

    def save_tag(self, tag: str) -> None:
        """Stores the present weights as `tag` (ref, old_actor, teacher)."""
        ...

    def load_tag(self, tag: str, weights: str | Path) -> None:
        """Stores the weights of a folder, of the same shapes, as `tag`."""
        ...

    def iter_weights(self) -> NamedTensors:
        """Every weight, whole, under its HF-on-disk name, in layer order, in the publish dtype."""
        ...


class Scorer(Protocol):
    """Adds columns to finished groups: rewards, reference log-probs, values."""

    async def score(self, group: Group) -> Group: ...


@dataclass(frozen=True, slots=True)
class Scored:
    """A reward with its named parts. Example: Scored(1.2, {"correct": 1.0, "format": 0.2})."""

    value: float
    parts: dict[str, float] = field(default_factory=dict)
