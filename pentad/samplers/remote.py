"""A sampler in a role process: the process's side (`HostedSampler`), and a replica's connection to
it (`RoleSampler`).

The process runs the embedded engine. Weights are pulled from a published folder
(`sync.weights_dir`); the receipt must have its digest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from pentad.core.device import DTYPES
from pentad.core.dims import ModelDims
from pentad.core.errors import InfraFailure, RunError, WrongWeights
from pentad.core.roles import Installed, Sampler
from pentad.core.section import Section
from pentad.core.types import Generation, Request, SamplingParams
from pentad.infer.sampler import EmbeddedSampler
from pentad.infer.section import SamplerSettings
from pentad.models.families import register
from pentad.models.hf_weights import iter_hf
from pentad.models.language_model import LanguageModel
from pentad.models.lora import share_weights
from pentad.models.registry import (
    blank_model,
    build_model,
    build_unfiled,
    create_model,
    load_to_sample,
)
from pentad.ops.digest import digest_of
from pentad.runtime import roles
from pentad.runtime.environment import make_deterministic
from pentad.runtime.roles import RoleProcess
from pentad.runtime.wire import Connection
from pentad.sync.lent import open_lent
from pentad.sync.published import open_weights
from pentad.sync.weights_dir import PublishedVersion, WeightsDir

if TYPE_CHECKING:
    from pentad.data.tokenizer import Tokenizer

S = TypeVar("S", bound=Sampler)
T = TypeVar("T")

TARGET = f"{__name__}:make_sampler"
Lend = Callable[[], Awaitable[dict[str, Any]]]
"""Returns the `sync.lent.LentWeights` of the present learner, as a JSON value."""
PLAIN_CALLS = ("abort", "rewind", "sleep", "wake", "health")
"""Methods of the sampler that a role process forwards unchanged."""


class HostedSettings(Section):
    """Settings of one embedded sampler."""

    dims: ModelDims
    sampler: SamplerSettings
    device: str
    dtype: str
    seed: int | None = None
    """Seed of random weights until the first install; None: no random weights."""
    base: str = ""
    """Folder of the frozen weights, if an adapter is published."""
    dequantize: bool = False
    """Whether those may be quantised."""
    is_lent: bool = False
    """Whether the frozen weights are the learner's, given by `HostedEngine.borrow`."""
    unfiled: str = ""
    """Folder of a model without a model file; transformers' model is built from its config."""
    version: int = -1
    tokenizer: str = ""
    """Folder of the tokenizer; empty: stop strings are rejected."""
    model_files: tuple[str, ...] = ()
    """Files of the user's own model families."""
    deterministic: bool = False
    num_threads: int = 0
    """Threads of torch on a CPU: results depend on it. 0: torch's own choice."""


def make_sampler(payload: Mapping[str, Any], emit: Callable[[str, Any], None]) -> HostedEngine:
    """Makes the served object of a role process."""
    given = HostedSettings.model_validate(payload)
    for path in given.model_files:
        register(path)
    if given.num_threads:
        torch.set_num_threads(given.num_threads)
    if given.deterministic:
        make_deterministic()
    if given.is_lent:
        return HostedEngine(None, given)
    return HostedEngine(sampler_over(own_model(given), given))


def own_model(given: HostedSettings) -> LanguageModel:
    """Makes a model with separate memory."""
    place: dict[str, Any] = {"device": torch.device(given.device), "dtype": DTYPES[given.dtype]}
    if given.base:
        return load_to_sample(given.base, **place, dequantize=given.dequantize)
    if given.unfiled:
        return build_unfiled(given.unfiled, **place)
    make = blank_model if given.seed is None else partial(create_model, seed=given.seed)
    return make(given.dims, **place)


def shared_model(tensors: Mapping[str, Tensor], given: HostedSettings) -> LanguageModel:
    """Makes a model over existing tensors, by native name."""
    model = build_model(given.dims, device="meta", dtype=DTYPES[given.dtype])
    share_weights(model, tensors)
    return model


def model_over(lent: Mapping[str, Any], given: HostedSettings) -> tuple[LanguageModel, str]:
    """Makes a model over the learner's frozen weights (`sync.lent`); returns their digest too, as
    they are read here."""
    model = shared_model(open_lent(lent), given)
    dtype = str(lent["digest"]).partition(":")[0]
    held = digest_of(iter_hf(model, DTYPES[dtype], model.weight_map))
    return model, f"{dtype}:{held.hex()}"


def sampler_over(
    model: LanguageModel, given: HostedSettings, decode: Callable[[list[int]], str] | None = None
) -> EmbeddedSampler:
    """`decode`: None: that of a tokenizer that is loaded here."""
    if decode is None and given.tokenizer:

        @cache
        def tokenizer() -> Tokenizer:
            """Returns the tokenizer; loaded for the first stop string, because importing
            transformers takes seconds."""
            from pentad.data.tokenizer import load_tokenizer

            return load_tokenizer(given.tokenizer)

        def decode(ids: list[int]) -> str:
            return tokenizer().decode(ids, keep_special=True)

    return EmbeddedSampler(model, given.sampler, decode=decode, version=given.version)


class HostedSampler(Generic[S]):
    """Serves a sampler with arguments of JSON values and arrays."""

    def __init__(self, sampler: S | None) -> None:
        """`sampler` None: the first call makes it."""
        self.hosted: S | None = None
        if sampler is not None:
            self.host(sampler)

    def host(self, sampler: S) -> None:
        self.hosted = sampler
        for name in PLAIN_CALLS:
            setattr(self, name, getattr(sampler, name))

    @property
    def sampler(self) -> S:
        if self.hosted is None:
            raise InfraFailure("the sampler has not started")
        return self.hosted

    async def hello(self) -> dict[str, Any]:
        return {
            "capabilities": sorted(self.sampler.capabilities),
            "version": self.sampler.version,
            "stats": self.stats(),
        }

    async def generate(self, request: dict[str, Any]) -> dict[str, Any]:
        made = await self._answer(self.sampler.generate(request_of(request)))
        return {"generations": [pack_generation(one) for one in made], "stats": self.stats()}

    async def pull(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Installs the published weights; the receipt has the digest of the sampler's weights after
        the install."""
        return asdict(await self._answer(self._install(weights)))

    async def _install(self, weights: dict[str, Any]) -> Installed:
        raise NotImplementedError

    async def _answer(self, call: Awaitable[T]) -> T:
        return await call

    def stats(self) -> dict[str, float]:
        return self.hosted.stats() if self.hosted is not None else {}

    async def close(self) -> None:
        if self.hosted is not None:
            await self.hosted.close()


class HostedEngine(HostedSampler[EmbeddedSampler]):
    def __init__(
        self, sampler: EmbeddedSampler | None, given: HostedSettings | None = None
    ) -> None:
        """`sampler` None: `borrow` makes it from `given`."""
        super().__init__(sampler)
        self.given = given
        self.held = -1, ""
        """Version and digest of the last install."""

    async def borrow(self, lent: dict[str, Any]) -> str:
        """Makes the sampler over the learner's frozen weights; returns their digest as they are
        read here."""
        given = self.given
        assert given is not None and self.hosted is None, "this process makes its own sampler"

        def make() -> tuple[EmbeddedSampler, str]:
            model, digest = model_over(lent, given)
            return sampler_over(model, given), digest

        sampler, digest = await asyncio.to_thread(make)
        self.host(sampler)
        return digest

    async def _install(self, weights: dict[str, Any]) -> Installed:
        """Installs weights; tensors unchanged since the held version are not read."""
        model = self.sampler.engine.model
        held, self.held = self.held, (-1, "")
        if held[0] != self.sampler.version:
            held = -1, ""

        def own(names: set[str]) -> dict[str, Tensor]:
            held = iter_hf(model, weight_map=model.trained_map)
            return {name: tensor.detach() for name, tensor in held if name in names}

        pairs = await asyncio.to_thread(open_weights, weights, held, own)
        receipt = await self.sampler.install(weights["version"], pairs)
        self.held = receipt.version, receipt.digest
        return receipt


# Requests and answers as JSON values and arrays.


def with_tuples(value: Mapping[str, Any]) -> dict[str, Any]:
    """Restores tuple fields of a dataclass from the lists of JSON."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in value.items()}


def pack_request(request: Request) -> dict[str, Any]:
    return {
        "id": request.id,
        "prompt_ids": np.array(request.prompt_ids, np.int64),
        "params": asdict(request.params),
        "seeds": list(request.seeds),
        "drawn": [pack_generation(one) for one in request.drawn],
    }


def request_of(value: Mapping[str, Any]) -> Request:
    return Request(
        id=value["id"],
        prompt_ids=tuple(value["prompt_ids"].tolist()),
        params=SamplingParams(**with_tuples(value["params"])),
        seeds=tuple(value["seeds"]),
        drawn=tuple(generations_of(value["drawn"])),
    )


def pack_generation(generation: Generation) -> dict[str, Any]:
    return {
        "ids": np.array(generation.ids, np.int64),
        "logprobs": np.array(generation.logprobs, np.float64),
        "versions": np.array(generation.versions, np.int64),
        "finish": generation.finish,
        "routes": generation.routes,
        "tops": generation.tops,
    }


def generations_of(values: Sequence[Mapping[str, Any]]) -> list[Generation]:
    return [
        Generation(
            ids=value["ids"].tolist(),
            logprobs=value["logprobs"].tolist(),
            versions=value["versions"].tolist(),
            finish=value["finish"],
            routes=value["routes"],
            tops=[[(id_, logprob) for id_, logprob in top] for top in value["tops"]],
        )
        for value in values
    ]


class RoleSampler:
    """The sampler of one role process; not usable after the connection is lost."""

    def __init__(self, process: RoleProcess, weights_dir: WeightsDir) -> None:
        self.process = process
        self.weights_dir = weights_dir
        self.capabilities: frozenset[str] = frozenset()
        self.version = -1
        self.seen: dict[str, float] = {}
        self.is_closed = False
        self.connection: Connection | None = None

    @classmethod
    async def open(
        cls, process: RoleProcess, weights_dir: WeightsDir, lend: Lend | None = None
    ) -> Self:
        """Connects once the process has made its sampler; raises the failure of that. `lend`: the
        sampler is made over frozen weights of the learner."""
        sampler = cls(process, weights_dir)
        connect = roles.connect(process, sampler._on_beat, patience_s=roles.PATIENCE_S)
        sampler.connection = await connect
        try:
            if lend is not None:
                await sampler._borrow(await lend())
            hello = await sampler.call("hello")
        except BaseException:
            await sampler.close()
            raise
        sampler.capabilities = frozenset(hello["capabilities"])
        sampler.version, sampler.seen = hello["version"], hello["stats"]
        return sampler

    async def _borrow(self, lent: dict[str, Any]) -> None:
        """Gives the process the learner's frozen weights; raises WrongWeights if it reads other
        ones there."""
        found = await self.call("borrow", lent=lent)
        if found != lent["digest"]:
            raise WrongWeights(
                f"{self.process.name} reads frozen weights with digest {found} in the learner's "
                f"memory, and the learner has {lent['digest']}"
            )

    @property
    def lost(self) -> asyncio.Future[str]:
        """Future of the reason for the loss of the connection."""
        assert self.connection is not None, "opened by `open`"
        return self.connection.lost

    async def generate(self, request: Request) -> list[Generation]:
        answer = await self.call("generate", request=pack_request(request))
        self.seen = answer["stats"]
        return generations_of(answer["generations"])

    async def pull(self, published: PublishedVersion) -> Installed:
        """Pulls weights; raises WrongWeights if the sampler then has other weights."""
        with self.weights_dir.reading(published) as weights:
            receipt = Installed(**await self.call("pull", weights=asdict(weights)))
        if (receipt.version, receipt.digest) != (weights.version, weights.digest):
            raise WrongWeights(
                f"{self.process.name} holds version {receipt.version}, digest {receipt.digest}, "
                f"after it received version {weights.version} with digest {weights.digest}"
            )
        self.version = receipt.version
        return replace(receipt, num_bytes=weights.num_bytes)

    async def call(self, method: str, **arguments: Any) -> Any:
        if self.is_closed:
            raise RunError("the sampler is closed")
        assert self.connection is not None, "opened by `open`"
        try:
            return await self.connection.call(method, **arguments)
        except InfraFailure as failure:
            if self.is_closed:
                raise RunError("the sampler was closed") from failure
            raise

    def stats(self) -> dict[str, float]:
        return self.seen

    async def close(self) -> None:
        """Ends open requests with an error, and ends the process."""
        self.is_closed = True
        if self.connection is not None:
            await self.connection.close("the sampler was closed")
        self.process.kill()

    def _on_beat(self, event: str, value: Any) -> None:
        self.seen = value or self.seen
