"""Interface to different kinds of servers, and parsing of their answers: ids, log-probs, finish
reasons, experts, and the weight version of each token."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
from pydantic import BaseModel, NonNegativeInt
from torch import Tensor

from pentad.core.device import DTYPES
from pentad.core.dims import ModelDims
from pentad.core.errors import InfraFailure, Problem, RunError, UserError
from pentad.core.quantization import FP8_KEY
from pentad.core.roles import Installed, TensorPairs
from pentad.core.types import FinishReason, Generation, SamplingParams
from pentad.engine.section import LoraConfig
from pentad.infer.sequence import filled
from pentad.ops.digest import digest_of
from pentad.samplers.http import Wire
from pentad.samplers.process import ROUTES_FLAG, ServerSettings
from pentad.samplers.served import converted, is_converted, is_fp8
from pentad.samplers.weight_proof import ADAPTER, check_targets, prove, prove_factors
from pentad.sync.deltas import ChangedOnly
from pentad.sync.group import PROTOCOL
from pentad.sync.transport import Broadcast, CudaIpc, DiskTransport, Pickles, Transport

MEMORIES = ("weights", "kv_cache")
CUTS = (
    "does not report which weights drew a token: with new weights, answers in progress are cut and "
    "continue with a recomputed cache"
)
LOAD_TIMEOUT_S = 600.0
"""Time limit for a server to load new weights, in seconds."""
NPY = b"\x93NUMPY"
FINISHES: dict[str | None, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class VersionSpan(BaseModel):
    """Label of the weights that sampled tokens [start, end) of an answer."""

    version: str
    start: NonNegativeInt
    end: NonNegativeInt


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One continuation, as sent to a server."""

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    max_new_tokens: int
    """Limited by the model's context."""
    seed: int
    version: int
    """Weight version at the time of the request."""


class Receipt(BaseModel):
    """A worker's report on installed weights."""

    num_tensors: int
    digest: str


class HeldTensors(BaseModel):
    held: dict[str, str]


class Dialect:
    """A kind of server. The defaults are for a server with only OpenAI's endpoints. Failures are
    raised as InfraFailure."""

    capabilities: frozenset[str]
    loses_requests_asleep = False
    """Whether it can sleep only without requests in progress; these are then sent again."""
    tells_versions = True
    """Whether answers contain the weight version of each token. For other servers no request is in
    progress while weights are replaced: calls are interrupted and continued afterwards."""

    settings: ServerSettings
    """Only set on a `LoadingDialect`."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.where = wire.where
        """The server's name in messages."""

    def check(self, params: SamplingParams) -> None:
        """Raises UserError for sampling settings with which the server would report wrong
        log-probs."""

    async def generate(self, call: Call) -> Generation:
        raise NotImplementedError

    async def abort(self, call_ids: Sequence[str]) -> bool:
        """Aborts calls; returns whether they will return their tokens; if not, close their
        connections."""
        return False

    async def end_calls(self, call_ids: Sequence[str]) -> None:
        """Ends all calls; each returns its tokens so far. The server may be paused afterwards."""
        raise self._cannot("take new weights")

    async def pause(self) -> None:
        raise self._cannot("be paused")

    async def resume(self) -> None:
        raise self._cannot("be paused")

    async def load(self, version: int, weights: TensorPairs) -> Installed:
        """Replaces the weights of the paused server, and empties its caches."""
        raise self._cannot("take weights")

    async def sleep(self) -> None:
        """Frees the memory of all `MEMORIES`."""
        raise self._cannot("sleep")

    async def wake(self, memories: Sequence[str]) -> None:
        """Allocates these memories again; after the last one the server samples again."""
        raise self._cannot("sleep")

    async def health(self) -> None:
        await self.wire.get("/health")

    async def version_label(self) -> str:
        """The server's label for its weights."""
        return "0"

    async def close(self) -> None:
        await self.wire.close()

    def _cannot(self, what: str) -> RunError:
        return RunError(f"{self.where}: an OpenAI-compatible server cannot {what}")

    def _generation(
        self,
        call: Call,
        ids: list[int],
        logprobs: list[float],
        finish: FinishReason,
        spans: Sequence[VersionSpan] | None,
        experts: str | None,
    ) -> Generation:
        """Makes a generation with the weight version and, if recorded, the experts of each
        token."""
        versions = [call.version] * len(ids)
        if self.tells_versions:
            versions = versions_of(self.where, spans, len(ids))
        made = Generation(ids, logprobs, versions, finish)
        if self.settings.rollout.replay_routes:
            num_prompt = len(call.prompt_ids)
            made.routes = routes_of(self.where, experts, made, num_prompt, self.settings.dims)
        return made

    def _check_error(self, path: str, answer: Any) -> None:
        if isinstance(answer, dict) and "error" in answer:
            raise InfraFailure(f"{self.where}: {path} failed ({answer['error']})")


class LoadingDialect(Dialect):
    """A server whose weights can be replaced.

    Partial installs are always verified; of full ones the first and every n-th.
    """

    product: ClassVar[str]
    """Name of the server; in lower case that of its package."""
    calls: ClassVar[str]
    """Path of calls to workers."""

    def __init__(
        self,
        wire: Wire,
        transport: Transport,
        settings: ServerSettings,
        dtype: str,
        *,
        is_comparable: bool,
    ) -> None:
        """`dtype`: that of the server's weights; `is_comparable`: whether they can be compared with
        the published ones."""
        super().__init__(wire)
        self.transport = transport
        self.settings = settings
        self.has_adapter = False
        """Whether its front end has registered the adapter of its workers."""
        self.dtype = dtype
        self.is_comparable = is_comparable
        self.num_loads = 0
        by_disk = settings.server.weight_transport == "disk" and settings.rollout.weight_deltas
        can_change = by_disk and is_comparable and settings.lora is None
        self.changed = ChangedOnly(can_change, self.version_label)

    @classmethod
    async def open(cls, wire: Wire, where: str, settings: ServerSettings) -> Self:
        """Returns the dialect of a running server. UserError if it lacks a feature."""
        raise NotImplementedError

    @classmethod
    def command(cls, settings: ServerSettings, port: int, version: tuple[int, ...]) -> list[str]:
        """Returns the arguments of the interpreter that start a server of this version."""
        raise NotImplementedError

    @classmethod
    def environment(cls, settings: ServerSettings) -> dict[str, str]:
        """Returns the variables of a server that the run starts, besides the run's own."""
        raise NotImplementedError

    async def load(self, version: int, weights: TensorPairs) -> Installed:
        if not is_converted(self.settings):
            return await self.load_tensors(version, weights)
        sent = await asyncio.to_thread(lambda: list(converted(self.settings, weights)))
        # Afterwards, to detect tensors that changed meanwhile.
        given = await asyncio.to_thread(lambda: digest_of(weights).hex())
        receipt = await self.load_tensors(version, sent)
        published = await asyncio.to_thread(lambda: digest_of(sent).hex())
        if (receipt.num_tensors, receipt.digest) != (len(sent), published):
            raise InfraFailure(f"{self.where}: other weights arrived than those that were sent")
        return replace(receipt, num_tensors=len(weights), digest=given)

    async def load_tensors(self, version: int, weights: TensorPairs) -> Installed:
        """Replaces the server's tensors by these."""
        raise NotImplementedError

    async def held(self) -> tuple[Mapping[str, str], Callable[[Tensor], str]]:
        """Returns checksums of the server's tensors, by its names, and the function that computes
        one."""
        raise NotImplementedError

    def as_checked(self, weights: TensorPairs) -> TensorPairs:
        """The tensors of which the server computes checksums."""
        return weights

    async def _prove_if_due(self, weights: TensorPairs, *, is_part: bool) -> None:
        """If a check is due, raises InfraFailure unless the server has the published weights."""
        every = self.settings.server.check_weights_every
        is_due = self.num_loads % every == 0 if every else self.num_loads == 0
        if self.is_comparable and (is_part or is_due):
            held, checksum = await self.held()
            dtype = DTYPES.get(self.dtype, weights[0][1].dtype)
            seen = await asyncio.to_thread(self.as_checked, weights)
            await asyncio.to_thread(prove, self.where, held, seen, dtype, checksum)
        self.num_loads += 1

    def adapter_remedy(self, lora: LoraConfig) -> str:
        """Returns how to start a server that takes the adapter."""
        raise NotImplementedError

    async def open_adapter(self, lora: LoraConfig) -> dict[str, Any]:
        """Prepares the server for factors, and returns what it reports; UserError if it does not
        support some of them."""
        spec = json.dumps({"name": ADAPTER, "rank": lora.rank, "alpha": lora.alpha})
        try:
            (answer, *_) = await self.call_workers("pentad_adapter", spec)
        except InfraFailure as failure:
            rule = f"takes no adapter ({failure})"
            raise UserError(Problem(self.where, rule, self.adapter_remedy(lora))) from None
        if "protocol" in answer:
            self.check_protocol(self.where, answer)
        dims, folder = self.settings.dims, self.settings.model_folder
        check_targets(self.where, answer["modules"], dims, lora, folder)
        return answer

    def check_protocol(self, where: str, answer: dict[str, Any]) -> None:
        if answer["protocol"] != PROTOCOL:
            rule = f"its workers run another version of Pentad (protocol {answer['protocol']})"
            raise UserError(Problem(where, rule, "restart it"))

    async def prove_factors(self, weights: TensorPairs, lora: LoraConfig, scaled: str = "") -> None:
        """Compares the factors in the server's layers with the published ones (`weight_proof`)."""
        (answer, *_) = await self.call_workers("pentad_held_factors")
        held = self.wire.read(self.calls, HeldTensors, answer).held
        args = (self.where, held, weights, lora, DTYPES[self.dtype])
        await asyncio.to_thread(prove_factors, *args, scaled=scaled)

    async def call_workers(self, method: str, *arguments: str) -> list[dict[str, Any]]:
        """Calls a method of our extension in all workers."""
        raise NotImplementedError

    async def close(self) -> None:
        await self.transport.close()
        await super().close()

    def _sound(self, method: str, replies: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the replies of all workers; InfraFailure if one failed."""
        errors = [reply["error"] for reply in replies if "error" in reply]
        if errors or not replies:
            reason = errors[0] if errors else "no worker answered"
            raise InfraFailure(f"{self.where}: {method} failed ({reason})")
        return replies


def transport_of(
    settings: ServerSettings, address: str, num_workers: int, *, has_extension: bool = True
) -> Transport:
    """`has_extension`: whether workers receive the weights by our extension (`receiver`)."""
    if settings.server.weight_transport == "broadcast":
        folder = settings.transfer_folder if settings.is_started and has_extension else None
        return Broadcast(address, num_workers, folder, uses_helper=not has_extension)
    if settings.server.weight_transport == "ipc":
        return CudaIpc() if has_extension else Pickles()
    return DiskTransport(settings.transfer_folder, is_private=settings.is_started)


def check_context(where: str, found: int, settings: ServerSettings, flag: str) -> None:
    if found < settings.max_context:
        rule = f"its context has {found} tokens, the run needs {settings.max_context}"
        raise UserError(Problem(where, rule, f"start it with {flag} {settings.max_context}"))


def check_routes(where: str, settings: ServerSettings, has_flag: bool) -> None:
    if settings.rollout.replay_routes and not has_flag:
        rule = "it does not report the experts of tokens, which rollout.replay_routes needs"
        raise UserError(Problem(where, rule, f"start it with {ROUTES_FLAG}"))


def check_quantised(where: str, settings: ServerSettings, found: str | None) -> None:
    """`found`: how the server's weights are quantised; the frozen weights of an adapter are its
    own."""
    if is_fp8(settings) and found != "fp8":
        rule = f"its weights are not quantised in fp8 ({found})"
        remedy = "start it with a folder whose config.json has this quantization_config"
        raise UserError(Problem(where, f"{rule}, which {FP8_KEY} needs", remedy))
    if not is_fp8(settings) and found is not None and settings.lora is None:
        rule = f"its weights are quantised ({found}), those that the run publishes are not"
        remedy = f"start it with 16-bit weights, or set {FP8_KEY}"
        raise UserError(Problem(where, rule, remedy))


def sampling_params(call: Call) -> dict[str, Any]:
    """Returns sampling parameters with the names of vLLM and OpenAI-compatible servers."""
    params = call.params
    return {
        "max_tokens": call.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "seed": call.seed,
        "stop": params.stop_strings,
        "stop_token_ids": params.stop_ids,
        "ignore_eos": True,
    }


def command_line(
    words: dict[str, Any], switches: Sequence[str], settings: ServerSettings
) -> list[str]:
    pairs = [str(word) for flag, value in words.items() for word in (flag, value)]
    routes = [ROUTES_FLAG] if settings.rollout.replay_routes else []
    return [*pairs, *switches, *routes, *settings.server.args]


def joined(*parts: Generation) -> Generation:
    """Joins the parts of one continuation; the finish reason is that of the last part."""
    whole = Generation([], [], [], parts[-1].finish if parts else "length")
    for part in parts:
        whole.ids += part.ids
        whole.logprobs += part.logprobs
        whole.versions += part.versions
        if part.routes is not None and whole.routes is not None:
            # A token's experts are computed when the next token is sampled.
            known = len(whole.routes) - 1
            part = replace(part, routes=np.concatenate([whole.routes[:known], part.routes[known:]]))
        whole.routes = whole.routes if part.routes is None else part.routes
    return whole


def versions_of(where: str, spans: Sequence[VersionSpan] | None, num: int) -> list[int]:
    """Returns the weight version of each of `num` tokens; the labels are version numbers."""
    if spans is None:
        raise InfraFailure(f"{where}: it does not report which weights sampled the tokens")
    versions: list[int] = []
    for span in spans:
        is_next = span.start == len(versions) and span.start <= span.end <= num
        if not is_next or not re.fullmatch(r"[0-9]{1,18}", span.version):
            found = f"weights {span.version!r} sampled tokens {span.start} to {span.end}"
            raise InfraFailure(f"{where}: {found}, which were never installed")
        versions += [int(span.version)] * (span.end - span.start)
    if len(versions) != num:
        raise InfraFailure(f"{where}: {len(versions)} versions came for {num} tokens")
    return versions


def routes_of(
    where: str, experts: str | None, answer: Generation, num_prompt: int, dims: ModelDims
) -> np.ndarray | None:
    """Reads `Generation.routes` from a server's answer: base64 of int32 (SGLang) or of an .npy file
    (vLLM), for all its layers and all tokens but the last, which is never computed. None for a
    truncated answer without routes."""
    if experts is None and answer.finish == "abort":
        return None
    num_tokens = num_prompt + len(answer.ids)
    shape = (num_tokens - 1, dims.num_layers, dims.num_experts_per_token)
    found_TLk = numbers_in(where, experts or "")
    if found_TLk.size != math.prod(shape):
        rule = f"{found_TLk.size} came where {num_tokens} tokens have {math.prod(shape)}"
        raise InfraFailure(f"{where}: it does not report the experts of each token: {rule}")
    layers = [layer for layer in range(dims.num_layers) if dims.is_moe(layer)]
    routes_TLk: np.ndarray = found_TLk.reshape(shape)[:, layers].astype(np.int16)
    ordered = np.sort(routes_TLk, -1)
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        raise InfraFailure(f"{where}: it reports the same expert twice for a token")
    if ordered.size and not 0 <= ordered.min() <= ordered.max() < dims.num_experts:
        rule = f"experts {ordered.min()} to {ordered.max()}"
        raise InfraFailure(f"{where}: it used {rule}, the model has {dims.num_experts}")
    return filled(routes_TLk, num_tokens)


def numbers_in(where: str, text: str) -> np.ndarray:
    try:
        data = base64.b64decode(text, validate=True)
        if not data.startswith(NPY):
            return np.frombuffer(data, "<i4")
        read: np.ndarray = np.load(io.BytesIO(data))
        return read
    except (ValueError, EOFError) as error:
        raise InfraFailure(f"{where}: the reported experts cannot be parsed ({error})") from error


def finish_of(where: str, reason: str | None) -> FinishReason:
    finish = FINISHES.get(reason)
    if finish is None:
        raise InfraFailure(f"{where}: a generation ended by {reason!r}")
    return finish


def release(version: str) -> tuple[int, ...]:
    """Returns the numbers of a version: (0, 5, 23) for 0.5.23.post1."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def dotted(number: Sequence[int]) -> str:
    return ".".join(map(str, number))
