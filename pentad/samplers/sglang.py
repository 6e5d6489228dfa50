"""SGLang as a sampler, over its native endpoints.

Written for the request schema of SGLang 0.5.23, tested with a stand-in that validates it, and run
on 0.5.17. SGLang acknowledges an update without a digest, so a receipt has the digest of the sent
weights; its tensors are compared at the start, at every n-th update and after each delta. Factors
of an adapter are installed by the plugin `sglang_worker`, and compared each time.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import BaseModel, NonNegativeInt
from torch import Tensor

from pentad.core.errors import InfraFailure, Problem, UserError
from pentad.core.roles import Installed, TensorPairs
from pentad.core.seeds import derive_seed
from pentad.core.sizes import DTYPE_BYTES, kv_token_bytes
from pentad.core.types import Generation
from pentad.engine.section import LoraConfig
from pentad.ops.digest import digest_of
from pentad.samplers import server_key
from pentad.samplers.dialect import (
    CUTS,
    LOAD_TIMEOUT_S,
    MEMORIES,
    Call,
    LoadingDialect,
    Receipt,
    VersionSpan,
    check_context,
    check_routes,
    command_line,
    dotted,
    finish_of,
    joined,
    release,
    transport_of,
)
from pentad.samplers.http import Wire
from pentad.samplers.process import ServerSettings
from pentad.samplers.served import is_fp8
from pentad.samplers.started_server import attach_server, start_server
from pentad.samplers.weight_proof import (
    ADAPTER,
    NO_FOLDER,
    adapted_modules,
    sglang_checksum,
)
from pentad.sync.deltas import size_of
from pentad.weights.block_fp8 import dequantised

log = logging.getLogger(__name__)

OLDEST = (0, 5, 17)
"""The oldest version that was tested successfully."""
TELLS_VERSIONS = (0, 5, 23)
"""The oldest version whose answers report the weight version of each token."""
DEEP_GEMM = "SGLANG_ENABLE_JIT_DEEPGEMM"


class Reason(BaseModel):
    type: str
    matched: int | str | None = None
    """The id or the text that ended the answer."""


class Meta(BaseModel):
    completion_tokens: NonNegativeInt
    output_token_logprobs: list[tuple[float, NonNegativeInt, str | None]] = []
    finish_reason: Reason | None = None
    weight_versions: list[VersionSpan] | None = None
    routed_experts: str | None = None


class SglangAnswer(BaseModel):
    output_ids: list[NonNegativeInt]
    meta_info: Meta


class Done(BaseModel):
    success: bool
    message: str = ""


class ModelInfo(BaseModel):
    model_config = {"protected_namespaces": ()}
    weight_version: str


class ServerInfo(BaseModel):
    """Server info as reported by SGLang."""

    version: str
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    context_length: int | None = None
    enable_memory_saver: bool = False
    enable_deterministic_inference: bool = False
    skip_tokenizer_init: bool = False
    enable_return_routed_experts: bool = False
    device: str | None = None
    dtype: str = "auto"


class RankChecksums(BaseModel):
    checksums: dict[str, str]


class Checksums(Done):
    ranks: list[RankChecksums] = []


class AdapterLoaded(BaseModel):
    success: bool
    error_message: str | None = None


class Sglang(LoadingDialect):
    """The dialect of SGLang. Its log-probs are after temperature and before top-k and top-p, like
    ours."""

    loses_requests_asleep = True

    product = "SGLang"
    calls = "/weights_checker"

    def __init__(self, wire: Wire, settings: ServerSettings, about: ServerInfo) -> None:
        num_workers, is_lora = about.tp_size * about.pp_size, settings.lora is not None
        transport = transport_of(settings, wire.address, num_workers, has_extension=is_lora)
        # Shards have no checksums to compare.
        super().__init__(wire, transport, settings, about.dtype, is_comparable=num_workers == 1)
        self.about = about
        self.reprefill = settings.rollout.on_update == "reprefill"
        self.tells_versions = release(about.version) >= TELLS_VERSIONS
        self.group_name = ""
        self.num_sent = 0
        self.rids: dict[str, str] = {}
        """Server-side ids of calls in progress. An id is never reused: a late abort must not end a
        later call."""
        can = {
            "pause": True,
            "abort": True,
            "sleep": about.enable_memory_saver,
            "seeds": about.enable_deterministic_inference,
            "stop_strings": not about.skip_tokenizer_init,
            "routes": settings.rollout.replay_routes,
        }
        self.capabilities = frozenset(name for name, is_there in can.items() if is_there)

    @classmethod
    async def open(cls, wire: Wire, where: str, settings: ServerSettings) -> Self:
        about = wire.read("/server_info", ServerInfo, await wire.get("/server_info"))
        check_server(where, about, settings)
        dialect = cls(wire, settings, about)
        if settings.lora is not None:
            await dialect.open_adapter(settings.lora)
        if "seeds" not in dialect.capabilities:
            text = "%s: without --enable-deterministic-inference samples do not follow seeds"
            log.info(text, where)
        return dialect

    def adapter_remedy(self, lora: LoraConfig) -> str:
        needs = f"{' '.join(lora_flags(self.settings))} --load-format auto"
        return f"install Pentad in its environment and start it with {needs}"

    async def open_adapter(self, lora: LoraConfig) -> dict[str, Any]:
        if not self.is_comparable:
            rule = "its factors are shards, which cannot be compared with the published ones"
            raise UserError(Problem(self.where, rule, "use one GPU for each SGLang, or vllm"))
        answer = await super().open_adapter(lora)
        self.has_adapter = answer["is_registered"]
        self.dtype = answer["dtype"] or self.dtype  # the server may report its setting, "auto"
        return answer

    @classmethod
    def command(cls, settings: ServerSettings, port: int, version: tuple[int, ...]) -> list[str]:
        return ["-m", server_key.__name__, "sglang.launch_server", *flags(settings, port)]

    @classmethod
    def environment(cls, settings: ServerSettings) -> dict[str, str]:
        # On Blackwell DeepGEMM quantises the weights again, with powers of two as scales.
        return {DEEP_GEMM: os.environ.get(DEEP_GEMM, "0")} if is_fp8(settings) else {}

    async def generate(self, call: Call) -> Generation:
        """Samples an answer. With stop ids, SGLang also stops at the model's end-of-text id; then
        requests the rest."""
        drawn, rest = Generation([], [], [], "length"), call
        while True:
            part, is_ours = await self._draw(rest)
            drawn = joined(drawn, part)
            if part.finish != "stop" or is_ours:
                return drawn
            if (left := call.max_new_tokens - len(drawn.ids)) == 0:
                drawn.finish = "length"
                return drawn
            seed = derive_seed(call.seed, "after", len(drawn.ids))
            prompt = (*call.prompt_ids, *drawn.ids)
            rest = replace(call, prompt_ids=prompt, max_new_tokens=left, seed=seed)

    async def _draw(self, call: Call) -> tuple[Generation, bool]:
        """Returns also whether a stop id or text of the request, if any, ended the answer."""
        self.num_sent += 1
        rid = self.rids[call.id] = f"{call.id}{self.num_sent}."
        body = {
            "rid": rid,
            "input_ids": call.prompt_ids,
            "sampling_params": sampling_params(call),
            "return_logprob": True,
            "extra_key": f"pentad-{call.version}",  # cached prefixes belong to one weight version
            "return_routed_experts": self.settings.rollout.replay_routes,
        }
        if self.settings.lora is not None:
            body["lora_path"] = ADAPTER
        try:
            meta = self._read(await self.wire.post("/generate", body, timeout_s=None))
        finally:
            del self.rids[call.id]
        ids = [token for _, token, _ in meta.output_token_logprobs]
        logprobs = [logprob for logprob, _, _ in meta.output_token_logprobs]
        reason = meta.finish_reason
        finish = finish_of(self.where, reason.type if reason else None)
        matched = reason.matched if reason else None
        is_ours = not isinstance(matched, int) or matched in call.params.stop_ids
        if finish == "abort" and not ids:
            return Generation([], [], [], finish), is_ours
        versions, experts = meta.weight_versions, meta.routed_experts
        return self._generation(call, ids, logprobs, finish, versions, experts), is_ours

    def _read(self, answer: Any) -> Meta:
        self._check_error("/generate", answer)
        read = self.wire.read("/generate", SglangAnswer, answer)
        meta, found = read.meta_info, read.meta_info.output_token_logprobs
        total, got = meta.completion_tokens, [token for _, token, _ in found]
        if meta.finish_reason is not None and meta.finish_reason.type == "abort":
            read.output_ids = got  # SGLang sends fewer of them there
        if not len(found) == len(read.output_ids) == total:
            num = f"{len(found)} log-probs and {len(read.output_ids)} ids came for {total} tokens"
            raise InfraFailure(f"{self.where}: {num}")
        if got != read.output_ids:
            raise InfraFailure(f"{self.where}: the log-probs belong to other tokens")
        return meta

    async def abort(self, call_ids: Sequence[str]) -> bool:
        for rid in [self.rids[call_id] for call_id in call_ids if call_id in self.rids]:
            await self.wire.post("/abort_request", {"rid": rid})
        return True

    async def end_calls(self, call_ids: Sequence[str]) -> None:
        await self.abort(call_ids)

    async def pause(self) -> None:
        mode = "retract" if self.reprefill else "in_place"
        await self.wire.post("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self.wire.post("/continue_generation", {})

    async def load_tensors(self, version: int, weights: TensorPairs) -> Installed:
        # The cache cannot be flushed while requests are running.
        is_idle = self.reprefill or not self.tells_versions
        if self.settings.lora is not None:
            return await self._load_factors(version, weights, self.settings.lora, flush=is_idle)
        last = {"weight_version": str(version), "flush_cache": is_idle}
        part = await self.changed.choose(weights)
        await self.transport.send(part, partial(self._ask, last))
        # Afterwards, to detect tensors that changed during the transfer.
        digest = await asyncio.to_thread(lambda: digest_of(weights).hex())
        await self._prove_if_due(weights, is_part=len(part) < len(weights))
        self.changed.keep(version)
        return Installed(version, len(weights), digest, num_bytes=size_of(part))

    async def _load_factors(
        self, version: int, weights: TensorPairs, lora: LoraConfig, *, flush: bool
    ) -> Installed:
        """Replaces the factors in place; all are verified as the layers read them."""
        if not self.has_adapter:
            path, body = "/load_lora_adapter", {"lora_name": ADAPTER, "lora_path": NO_FOLDER}
            answer = await self.wire.post(path, {**body, "pinned": True}, timeout_s=LOAD_TIMEOUT_S)
            done = self.wire.read(path, AdapterLoaded, answer)
            if not done.success:
                raise InfraFailure(f"{self.where}: {path} failed ({done.error_message})")
            self.has_adapter = True
        (reply,) = await self.transport.send(weights, self.call_workers)
        receipt = self.wire.read(self.calls, Receipt, reply)
        await self.prove_factors(weights, lora, scaled=".experts.")
        label = {"new_version": str(version), "abort_all_requests": False}
        await self._done("/update_weight_version", label)
        if flush:
            await self.wire.post("/flush_cache", is_json=False)
        return Installed(version, receipt.num_tensors, receipt.digest, num_bytes=size_of(weights))

    async def call_workers(self, method: str, *arguments: str) -> list[dict[str, Any]]:
        """Calls a method of `sglang_worker.FactorReceiver`."""
        action = json.dumps({"method": method, "args": arguments})
        answer = await self.wire.post(self.calls, {"action": action}, timeout_s=LOAD_TIMEOUT_S)
        ranks = self.wire.read(self.calls, Checksums, answer).ranks
        if len(ranks) > 1:
            found = f"{method} was answered by {len(ranks)} workers, and one has the whole adapter"
            raise InfraFailure(f"{self.where}: {found}")
        return self._sound(method, [json.loads(one.checksums["reply"]) for one in ranks])

    async def held(self) -> tuple[Mapping[str, str], Callable[[Tensor], str]]:
        answer = await self.wire.post(self.calls, {"action": "checksum"}, timeout_s=LOAD_TIMEOUT_S)
        found = self.wire.read(self.calls, Checksums, answer)
        if not found.success or len(found.ranks) != 1:
            raise InfraFailure(f"{self.where}: {self.calls} failed ({found.message})")
        on_gpu = self.about.device != "cpu"
        return found.ranks[0].checksums, partial(sglang_checksum, on_gpu=on_gpu)

    def as_checked(self, weights: TensorPairs) -> TensorPairs:
        """SGLang computes checksums of quantised matrices as dequantised in bf16."""
        return list(dequantised(weights, torch.bfloat16)) if is_fp8(self.settings) else weights

    async def _ask(
        self, last: dict[str, Any], method: str, argument: str, is_end: bool = True
    ) -> list[dict[str, Any]]:
        """Calls the endpoint with the effect of a method of `receiver.Receiver`. `last`: the fields
        of the call that ends the update."""
        if method == "pentad_join":
            given = json.loads(argument)
            self.group_name = given["name"]
            body = {
                "master_address": given["host"],
                "master_port": given["port"],
                "rank_offset": 1,
                "world_size": given["world"],
                "group_name": given["name"],
                "backend": given["backend"],
            }
            await self._done("/init_weights_update_group", body)
        elif method == "pentad_receive":
            names, shapes, dtypes = zip(*json.loads(argument), strict=True)
            body = {"names": names, "dtypes": dtypes, "shapes": shapes}
            body |= {"group_name": self.group_name, **last}
            await self._done("/update_weights_from_distributed", body)
        elif method == "pentad_unpickle":
            body = {"serialized_named_tensors": [argument] * self.about.tp_size}
            body |= last if is_end else {"flush_cache": False}
            await self._done("/update_weights_from_tensor", body)
        else:  # a file, of all tensors or a part; the server's own load format may be dummy
            body = {"model_path": str(Path(argument).parent), "load_format": "auto"}
            await self._done("/update_weights_from_disk", {**body, "keep_pause": True, **last})
        return []

    async def _done(self, path: str, body: dict[str, Any]) -> None:
        answer = await self.wire.post(path, body, timeout_s=LOAD_TIMEOUT_S)
        done = self.wire.read(path, Done, answer)
        if not done.success:
            raise InfraFailure(f"{self.where}: {path} failed ({done.message})")

    async def sleep(self) -> None:
        await self.wire.post("/flush_cache", is_json=False)
        await self.wire.post("/release_memory_occupation", {"tags": MEMORIES})
        self.changed.held = {}  # its weights are freed

    async def wake(self, memories: Sequence[str]) -> None:
        await self.wire.post("/resume_memory_occupation", {"tags": memories})

    async def version_label(self) -> str:
        path = "/model_info"
        return self.wire.read(path, ModelInfo, await self.wire.get(path)).weight_version


def sampling_params(call: Call) -> dict[str, Any]:
    params = call.params
    return {
        "max_new_tokens": call.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        "sampling_seed": call.seed % 2**31,
        "ignore_eos": not params.stop_ids,  # the server would ignore these too
        "stop_token_ids": params.stop_ids,
        "stop": params.stop_strings,
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }


# Starting and attaching.

attach, start = partial(attach_server, Sglang), partial(start_server, Sglang)


def lora_flags(settings: ServerSettings) -> list[str]:
    """The memory pool has one slot for the adapter and one for requests without it."""
    assert settings.lora is not None
    names, _ = adapted_modules(settings.dims, settings.lora, settings.model_folder)
    modules = sorted({name.rpartition(".")[2] for name in names})
    sizes = ["--max-loras-per-batch", "2", "--max-lora-rank", str(settings.lora.rank)]
    return ["--enable-lora", *sizes, "--lora-target-modules", *modules]


def check_server(where: str, about: ServerInfo, settings: ServerSettings) -> None:
    if release(about.version) < OLDEST:
        rule = f"is SGLang {about.version}, which was never tried"
        raise UserError(Problem(where, rule, f"use {dotted(OLDEST)} or later"))
    if release(about.version) < TELLS_VERSIONS:
        log.info("%s: SGLang %s %s", where, about.version, CUTS)
    if about.dp_size > 1 and about.tp_size * about.pp_size == 1:
        rule = f"has --dp-size {about.dp_size}, whose replicas cannot be compared one by one with"
        remedy = "start a server for each replica, and give the addresses of all"
        raise UserError(Problem(where, f"{rule} the published weights or adapter", remedy))
    if about.context_length is not None:
        check_context(where, about.context_length, settings, "--context-length")
    check_routes(where, settings, about.enable_return_routed_experts)


def flags(settings: ServerSettings, port: int) -> list[str]:
    words: dict[str, Any] = {
        "--model-path": settings.model_folder,
        "--host": "127.0.0.1",
        "--port": port,
        "--dtype": settings.dtype,
        "--context-length": settings.max_context,
        "--max-running-requests": settings.rollout.max_sequences,
        "--tp-size": settings.tensor_parallel,
        "--pp-size": settings.pipeline_parallel,
        "--load-format": "dummy" if settings.lora is None else "auto",
    }
    if settings.device == "cpu":
        words["--device"] = "cpu"
    keys = settings.rollout
    if keys.kv_cache_bytes is not None:
        ways = 1 if settings.dims.kv_latent else settings.tensor_parallel  # each has all latents
        held = keys.kv_cache_bytes * ways * settings.pipeline_parallel
        words["--max-total-tokens"] = held // kv_token_bytes(
            settings.dims, DTYPE_BYTES[settings.dtype], keys.kv_cache_dtype
        )
    if keys.kv_cache_dtype == "fp8":
        words["--kv-cache-dtype"] = "fp8_e4m3"
    if settings.server.gpu_memory_share is not None:
        words["--mem-fraction-static"] = settings.server.gpu_memory_share
    # Its warm-up requests a text, which tests no later weights, and ends a server whose
    # tokenizer maps it to no tokens.
    switches = ["--skip-server-warmup"]
    if settings.can_sleep:
        switches.append("--enable-memory-saver")
        if settings.lora is not None:  # the frozen weights are not published again
            switches.append("--enable-weights-cpu-backup")
    if settings.lora is not None:
        switches += lora_flags(settings)
    return command_line(words, switches, settings)
