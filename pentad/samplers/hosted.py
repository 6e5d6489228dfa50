"""The embedded engine in a process of its own: what `runtime.role_host` makes and serves there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pentad.core.device import DTYPES
from pentad.core.dims import ModelDims
from pentad.core.types import Generation, Request, SamplingParams
from pentad.infer.sampler import EmbeddedSampler
from pentad.infer.settings import SamplerSettings
from pentad.models.families import register
from pentad.models.hf_weights import iter_hf
from pentad.models.registry import create_model
from pentad.runtime.environment import make_deterministic
from pentad.sync.tickets import open_ticket

if TYPE_CHECKING:
    from pentad.data.tokenizer import Tokenizer

TARGET = f"{__name__}:make_sampler"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedSettings:
    """One embedded sampler, as a JSON value by `asdict`."""

    dims: ModelDims
    sampler: SamplerSettings
    device: str
    dtype: str
    seed: int
    """Of the weights it holds until the first install."""
    version: int = -1
    tokenizer: str = ""
    """Folder; none: stop strings are refused."""
    model_files: tuple[str, ...] = ()
    """Families of the user's own."""
    deterministic: bool = False
    num_threads: int = 0
    """Of torch on a CPU: results depend on it. 0: torch's own choice."""


def make_sampler(payload: Mapping[str, Any], emit: Callable[[str, Any], None]) -> HostedSampler:
    """The target of a role process."""
    given = dict(payload)
    for path in given["model_files"]:
        register(path)
    if given["num_threads"]:
        torch.set_num_threads(given["num_threads"])
    if given["deterministic"]:
        make_deterministic()
    device = torch.device(given["device"])
    model = create_model(
        ModelDims(**with_tuples(given["dims"])),
        device=device,
        dtype=DTYPES[given["dtype"]],
        seed=given["seed"],
    )
    decode = None
    if given["tokenizer"]:

        @cache
        def tokenizer() -> Tokenizer:
            """Read for the first stop string: transformers takes seconds to import."""
            from pentad.data.tokenizer import load_tokenizer

            return load_tokenizer(given["tokenizer"])

        def decode(ids: list[int]) -> str:
            return tokenizer().decode(ids, keep_special=True)

    settings = SamplerSettings(**given["sampler"])
    return HostedSampler(
        EmbeddedSampler(model, settings, decode=decode, version=given["version"]), emit
    )


class HostedSampler:
    """A sampler's methods with JSON values and arrays for arguments; `RemoteSampler` calls them."""

    def __init__(self, sampler: EmbeddedSampler, emit: Callable[[str, Any], None]) -> None:
        self.sampler = sampler
        self.emit = emit
        self.held = -1, ""
        """Version and digest of the last install."""

    def stats(self) -> dict[str, float]:
        return self.sampler.stats()

    async def hello(self) -> dict[str, Any]:
        return {
            "capabilities": sorted(self.sampler.capabilities),
            "version": self.sampler.version,
            "stats": self.stats(),
        }

    async def generate(self, request: dict[str, Any], is_heard: bool) -> dict[str, Any]:
        asked = request_of(request)

        def tell(index: int, id_: int, logprob: float) -> None:
            self.emit("token", [asked.id, index, id_, logprob])

        made = await self.sampler.generate(asked, tell if is_heard else None)
        return {"generations": [pack_generation(one) for one in made], "stats": self.stats()}

    async def abort(self, request_id: str) -> None:
        await self.sampler.abort(request_id)

    async def pause(self) -> None:
        await self.sampler.pause()

    async def resume(self) -> None:
        await self.sampler.resume()

    async def rewind(self) -> None:
        await self.sampler.rewind()

    async def sleep(self) -> None:
        await self.sampler.sleep()

    async def wake(self) -> None:
        await self.sampler.wake()

    async def health(self) -> None:
        await self.sampler.health()

    async def pull(self, ticket: dict[str, Any]) -> dict[str, Any]:
        """Installs what the ticket names; the receipt is of what lies in the model then. Tensors
        that it holds already since the version before are not read."""
        own: dict[str, Tensor] = {}
        if tuple(ticket["base"]) == self.held and self.held[0] == self.sampler.version:
            same = set(ticket["same"])
            own = {n: t.detach() for n, t in iter_hf(self.sampler.engine.model) if n in same}
        self.held = -1, ""
        pairs = await asyncio.to_thread(open_ticket, ticket, own)
        receipt = await self.sampler.install(ticket["version"], pairs)
        self.held = receipt.version, receipt.digest
        return asdict(receipt)

    async def close(self) -> None:
        await self.sampler.close()


# Requests and answers as they travel.


def with_tuples(value: Mapping[str, Any]) -> dict[str, Any]:
    """Fields as the dataclass had them: JSON has lists alone."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in value.items()}


def pack_request(request: Request) -> dict[str, Any]:
    return {
        "id": request.id,
        "prompt_ids": np.array(request.prompt_ids, np.int64),
        "params": asdict(request.params),
        "seeds": list(request.seeds),
    }


def request_of(value: Mapping[str, Any]) -> Request:
    return Request(
        id=value["id"],
        prompt_ids=tuple(value["prompt_ids"].tolist()),
        params=SamplingParams(**with_tuples(value["params"])),
        seeds=tuple(value["seeds"]),
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
