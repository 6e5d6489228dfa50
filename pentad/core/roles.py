"""Roles of a run as protocols: sampler, scorer. The learner is `engine.engine.Engine`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from pentad.core.types import Generation, Group, Request

if TYPE_CHECKING:
    import torch
    from torch import Tensor

NamedTensors: TypeAlias = "Iterable[tuple[str, Tensor]]"
"""(HF-on-disk name, full tensor), in layer order."""
TensorPairs: TypeAlias = "Sequence[tuple[str, Tensor]]"
"""Like `NamedTensors`, as a sequence."""


class NativeWeights(Sequence["tuple[str, Tensor]"]):
    """Weights of a learner in this process, also by native name; pairs are created on access. An
    adapter of a mixture has a pair for each expert, while native tensors contain all experts."""

    def __init__(
        self,
        native: Mapping[str, Tensor],
        dtypes: Mapping[str, torch.dtype],
        num_pairs: int,
        pairs: Callable[[], NamedTensors],
    ) -> None:
        """`dtypes`: of the pairs made from each native tensor, which may be the learner's masters
        in a longer one."""
        self.native = native
        self.dtypes = dtypes
        self.num_pairs = num_pairs
        self.make_pairs = pairs

    @cached_property
    def pairs(self) -> TensorPairs:
        return list(self.make_pairs())

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.make_pairs())  # one at a time: all of them are a copy of the model

    def __len__(self) -> int:
        return self.num_pairs

    def __getitem__(self, index: Any) -> Any:
        return self.pairs[index]


class SentWeights:
    """Weights of a sender in this process, unchanged until it receives the receipt: a receiver may
    compare bytes, which is faster than hashing."""

    __slots__ = ()
    weights: TensorPairs


@dataclass(frozen=True, slots=True)
class Installed:
    """The receipt of a weight update, to be compared with the sent weights."""

    version: int
    num_tensors: int
    digest: str
    """Digest of the installed weights; empty if `is_same`."""
    is_same: bool = field(default=False, kw_only=True)
    """Whether the weights were compared byte by byte with those sent; only for `SentWeights`."""
    install_s: float = field(default=0.0, compare=False)
    """Seconds from the arrival of the weights to the receipt; 0 if unknown."""
    pause_s: float = field(default=0.0, compare=False)
    """Seconds for which sampling was paused; 0 if unknown."""
    num_bytes: int = field(default=0, compare=False)
    """Number of bytes written or sent; 0 if the tensors were shared."""


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
        """Continues the prompt; returns one generation per seed."""
        ...

    async def abort(self, request_id: str) -> None:
        """Ends a request at once; its generations return with finish "abort" and the tokens sampled
        so far, if the sampler has them."""
        ...

    async def install(self, version: int, weights: NamedTensors) -> Installed:
        """Replaces all weights between two tokens, atomically; `weights` has each tensor once."""
        ...

    async def rewind(self) -> None:
        """Resets the version after the learner has resumed from an earlier one. No tokens are
        requested before the next install, which may have any version."""
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


class Scorer(Protocol):
    """Adds columns to finished groups: rewards, reference log-probs, values."""

    async def score(self, group: Group) -> Group: ...


@dataclass(frozen=True, slots=True)
class Scored:
    """A reward with its named parts. Example: Scored(1.2, {"correct": 1.0, "format": 0.2})."""

    value: float
    parts: dict[str, float] = field(default_factory=dict)
