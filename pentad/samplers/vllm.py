"""vLLM as a sampler: tokens in, tokens out, each with its log-prob and weight version.

The server runs with its development endpoints (pause, collective_rpc, ...) and the worker extension
of `vllm_worker`. Prefixes are cached under a salt with the weight version, because vLLM cannot drop
its prefix cache while requests that keep their cache are in progress.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self

from pydantic import BaseModel, NonNegativeInt
from torch import Tensor

from pentad.core.errors import InfraFailure, Problem, UserError
from pentad.core.roles import Installed, TensorPairs
from pentad.core.sizes import PASS_TOKENS
from pentad.core.types import Generation, SamplingParams
from pentad.engine.section import LoraConfig
from pentad.ops.digest import digest_of
from pentad.samplers.dialect import (
    CUTS,
    LOAD_TIMEOUT_S,
    Call,
    HeldTensors,
    LoadingDialect,
    Receipt,
    VersionSpan,
    check_context,
    check_quantised,
    check_routes,
    command_line,
    dotted,
    finish_of,
    release,
    sampling_params,
    transport_of,
)
from pentad.samplers.http import Wire
from pentad.samplers.process import ServerSettings
from pentad.samplers.served import is_fp8
from pentad.samplers.started_server import attach_server, start_server
from pentad.samplers.weight_proof import ADAPTER, NO_FOLDER, max_rank
from pentad.sync.deltas import size_of

log = logging.getLogger(__name__)

OLDEST = (0, 25)
"""The oldest version that was tested successfully."""
TELLS_VERSIONS = (0, 32)
"""The oldest version whose answers report the weight version of each token, that aborts single
requests by id, and that enables its token endpoint only with a flag."""
TRIED = (0, 32)
EXTENSION = "pentad.samplers.vllm_worker.WeightReceiver"
GATE = "pentad.samplers.server_key.KeyGate"
GENERATE = "/inference/v1/generate"
DEEP_GEMM = "VLLM_USE_DEEP_GEMM"
RUNTIME = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
MIN_TEMPERATURE = 0.01
"""vLLM raises lower temperatures to this."""
NO_LOGPROB = -9999.0
"""Value that vLLM sends in place of a missing or non-finite log-prob."""


class TokenLogprob(BaseModel):
    token_id: NonNegativeInt | None = None
    token: str = ""
    """Sent in place of `token_id` by older servers: "token_id:7"."""
    logprob: float

    @property
    def id(self) -> int:
        if self.token_id is None:
            found = re.fullmatch(r"token_id:(\d{1,18})", self.token)
            return int(found[1]) if found else -1
        return self.token_id


class VllmLogprobs(BaseModel):
    content: list[TokenLogprob]


class VllmChoice(BaseModel):
    token_ids: list[NonNegativeInt] = []
    logprobs: VllmLogprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[VersionSpan] | None = None
    routed_experts: str | None = None


class VllmAnswer(BaseModel):
    choices: list[VllmChoice]


class Results(BaseModel):
    results: list[dict[str, Any]]


def entry_of(tensor: Tensor) -> str:
    return digest_of([("", tensor)]).entries[""]


class Vllm(LoadingDialect):
    """The dialect of vLLM."""

    product = "vLLM"
    calls = "/collective_rpc"

    def __init__(self, wire: Wire, settings: ServerSettings, about: ServerAbout) -> None:
        transport = transport_of(settings, wire.address, about.parallel.world_size)
        dtype, is_comparable = about.model.dtype.removeprefix("torch."), about.is_comparable
        super().__init__(wire, transport, settings, dtype, is_comparable=is_comparable)
        self.about = about
        self.tells_versions = about.tells_versions
        self.loses_requests_asleep = not about.tells_versions
        can = {
            **dict.fromkeys(("pause", "abort", "seeds"), True),
            "sleep": about.model.enable_sleep_mode and about.device.device != "cpu",
            "stop_strings": not about.model.skip_tokenizer_init,
            "routes": settings.rollout.replay_routes,
        }
        self.capabilities = frozenset(name for name, is_there in can.items() if is_there)

    @classmethod
    async def open(cls, wire: Wire, where: str, settings: ServerSettings) -> Self:
        about = await probe(wire, where)
        check_context(where, about.model.max_model_len, settings, "--max-model-len")
        check_routes(where, settings, about.model.enable_return_routed_experts)
        check_quantised(where, settings, about.model.quantization)
        dialect = cls(wire, settings, about)
        (worker, *_) = await dialect.call_workers("pentad_about")
        dialect.check_protocol(where, worker)
        if settings.lora is not None:
            await dialect.open_adapter(settings.lora)
        return dialect

    def adapter_remedy(self, lora: LoraConfig) -> str:
        return f"start it with {' '.join(lora_flags(lora))}, --load-format auto and {RUNTIME}=1"

    @classmethod
    def command(cls, settings: ServerSettings, port: int, version: tuple[int, ...]) -> list[str]:
        return ["-m", "vllm.entrypoints.openai.api_server", *flags(settings, port, version)]

    @classmethod
    def environment(cls, settings: ServerSettings) -> dict[str, str]:
        own = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        if settings.lora is not None:
            own[RUNTIME] = "1"
        if is_fp8(settings):
            # By default DeepGEMM quantises the weights again, with powers of two as scales.
            own[DEEP_GEMM] = os.environ.get(DEEP_GEMM, "0")
        own["VLLM_API_KEY"] = ""  # a key of the user would be required in addition to ours
        if settings.device == "cpu":
            whole_gib = max(1, -(-(settings.rollout.kv_cache_bytes or 2**30) // 2**30))
            own["VLLM_CPU_KVCACHE_SPACE"] = str(whole_gib)
            own["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        return own

    def check(self, params: SamplingParams) -> None:
        if 0 < params.temperature < MIN_TEMPERATURE:
            rule = f"vLLM samples at no temperature between 0 and {MIN_TEMPERATURE}"
            raise UserError(Problem(f"temperature = {params.temperature}", rule))
        mode = self.about.model.logprobs_mode
        if mode != "processed_logprobs" and params.temperature not in (0, 1):
            rule = (
                f"{self.where} runs with --logprobs-mode {mode}, and its "
                "log-probs are those at temperature 1"
            )
            where = f"temperature = {params.temperature}"
            raise UserError(
                Problem(where, rule, "start it with --logprobs-mode processed_logprobs")
            )

    async def generate(self, call: Call) -> Generation:
        body = {
            "request_id": call.id,
            "token_ids": call.prompt_ids,
            "sampling_params": {
                **sampling_params(call),  # complete: no default of the generation config applies
                "logprobs": 0,
                "detokenize": bool(call.params.stop_strings),
                "skip_special_tokens": False,
                "spaces_between_special_tokens": False,
            },
            "cache_salt": f"pentad-{call.version}",
        }
        if self.settings.lora is not None:
            body["model"] = ADAPTER
        choice = self._read(await self.wire.post(GENERATE, body, timeout_s=None))
        finish = finish_of(self.where, choice.finish_reason)
        entries = choice.logprobs.content if choice.logprobs else []
        return self._generation(
            call,
            choice.token_ids,
            [entry.logprob for entry in entries],
            finish,
            choice.weight_versions,
            choice.routed_experts,
        )

    def _read(self, answer: Any) -> VllmChoice:
        self._check_error(GENERATE, answer)
        choices = self.wire.read(GENERATE, VllmAnswer, answer).choices
        if len(choices) != 1:
            raise InfraFailure(f"{self.where}: {len(choices)} choices came where 1 was requested")
        choice = choices[0]
        entries = choice.logprobs.content if choice.logprobs else []
        if [entry.id for entry in entries] != choice.token_ids:
            num = f"{len(entries)} log-probs came for {len(choice.token_ids)} tokens"
            raise InfraFailure(f"{self.where}: {num}, or for other tokens")
        if any(entry.logprob <= NO_LOGPROB for entry in entries):
            raise InfraFailure(f"{self.where}: a sampled token has no log-prob")
        return choice

    async def abort(self, call_ids: Sequence[str]) -> bool:
        if not self.tells_versions:
            return False
        names = [f"generate-tokens-{call_id}" for call_id in call_ids]
        await self.wire.post("/abort_requests", {"request_ids": names})
        return True

    async def end_calls(self, call_ids: Sequence[str]) -> None:
        if self.tells_versions:
            await self.abort(call_ids)
        else:
            await self.wire.post("/pause", mode="abort", clear_cache="false")

    async def pause(self) -> None:
        await self.wire.post("/pause", mode="keep", clear_cache="false")

    async def resume(self) -> None:
        await self.wire.post("/resume")

    async def load_tensors(self, version: int, weights: TensorPairs) -> Installed:
        part = await self.changed.choose(weights)
        is_part = len(part) < len(weights)
        receipts = await self.transport.send(part, self.call_workers, is_part=is_part)
        first = self.wire.read(self.calls, Receipt, receipts[0])
        if any(receipt != receipts[0] for receipt in receipts):
            raise InfraFailure(f"{self.where}: its workers received different weights ({receipts})")
        if is_part and first.digest != self.changed.digest_of_part(part):
            raise InfraFailure(f"{self.where}: other weights arrived than those that changed")
        if self.settings.lora is None:
            await self._prove_if_due(weights, is_part=is_part)
        else:
            if self.about.parallel.world_size == 1:  # of shards only the digest is known
                await self.prove_factors(weights, self.settings.lora)
            await self._register()
        drop = "true" if self.settings.rollout.on_update == "reprefill" else "false"
        await self.wire.post("/reset_prefix_cache", reset_running_requests=drop)
        if self.tells_versions:
            await self.wire.post("/update_weight_version", {"new_version": str(version)})
        else:
            await self.call_workers("pentad_label", str(version))
        self.changed.keep(version)
        sent = size_of(part)
        if is_part:
            return Installed(version, len(weights), self.changed.digest.hex(), num_bytes=sent)
        return Installed(version, first.num_tensors, first.digest, num_bytes=sent)

    async def _register(self) -> None:
        """Registers the adapter whose factors the workers have."""
        if not self.has_adapter:
            body = {"lora_name": ADAPTER, "lora_path": NO_FOLDER}
            await self.wire.post("/v1/load_lora_adapter", body, is_json=False)
            self.has_adapter = True

    async def held(self) -> tuple[Mapping[str, str], Callable[[Tensor], str]]:
        (answer, *_) = await self.call_workers("pentad_held")
        return self.wire.read(self.calls, HeldTensors, answer).held, entry_of

    async def call_workers(self, method: str, *arguments: str) -> list[dict[str, Any]]:
        body = {"method": method, "args": arguments, "timeout": LOAD_TIMEOUT_S}
        answer = await self.wire.post(self.calls, body, timeout_s=LOAD_TIMEOUT_S)
        return self._sound(method, self.wire.read(self.calls, Results, answer).results)

    async def sleep(self) -> None:
        await self.wire.post("/sleep", level="1", mode="keep")

    async def wake(self, memories: Sequence[str]) -> None:
        await self.wire.post("/wake_up", tags=memories)

    async def version_label(self) -> str:
        if not self.tells_versions:
            return str((await self.call_workers("pentad_about"))[0]["label"])
        path = "/weight_info"
        return self.wire.read(path, WeightInfo, await self.wire.get(path)).weight_version


class WeightInfo(BaseModel):
    weight_version: str


# Properties of the server.


class VersionAnswer(BaseModel):
    version: str


class ModelAbout(BaseModel):
    logprobs_mode: str
    max_model_len: int
    enable_sleep_mode: bool = False
    enable_return_routed_experts: bool = False
    skip_tokenizer_init: bool = False
    dtype: str = "auto"
    quantization: str | None = None


class ParallelAbout(BaseModel):
    worker_extension_cls: str = ""
    world_size: int = 1


class DeviceAbout(BaseModel):
    device: str


class ServerAbout(BaseModel):
    """Server info as reported by vLLM."""

    model_config = {"protected_namespaces": ()}
    model: ModelAbout
    parallel: ParallelAbout
    device: DeviceAbout
    tells_versions: bool

    @property
    def is_comparable(self) -> bool:
        """Whether its weights can be compared; for shards, and weights packed for CPU kernels, only
        the digest of the received data is known."""
        return self.device.device != "cpu" and self.parallel.world_size == 1


async def probe(wire: Wire, where: str) -> ServerAbout:
    """Reads server properties; UserError with missing features and the flags to enable them."""
    found = wire.read("/version", VersionAnswer, await wire.get("/version")).version
    number = release(found)[:2]
    if number < OLDEST:
        rule = f"is vLLM {found}, whose workers cannot take weights while it serves"
        raise UserError(Problem(where, rule, f"use {dotted(OLDEST)} or later"))
    if number < TELLS_VERSIONS:
        log.info("%s: vLLM %s %s", where, found, CUTS)
    if number > TRIED:
        log.warning("%s: vLLM %s is newer than %s, the one tried", where, found, dotted(TRIED))
    try:
        answer = await wire.get("/server_info", config_format="json")
    except InfraFailure as failure:
        remedy = "start it with VLLM_SERVER_DEV_MODE=1 in its environment"
        raise UserError(Problem(where, "its weights cannot be replaced", remedy)) from failure
    config = answer.get("vllm_config", {}) if isinstance(answer, dict) else {}
    parts = {name: config.get(f"{name}_config") for name in ("model", "parallel", "device")}
    parts["tells_versions"] = number >= TELLS_VERSIONS
    about = wire.read("/server_info", ServerAbout, parts)
    if about.parallel.worker_extension_cls != EXTENSION:
        rule = "its workers cannot receive weights"
        raise UserError(Problem(where, rule, f"start it with --worker-extension-cls {EXTENSION}"))
    await check_token_endpoint(wire, where)
    return about


async def check_token_endpoint(wire: Wire, where: str) -> None:
    """Checks by an empty request that the token endpoint is enabled."""
    status, _ = await wire.answer("POST", GENERATE, {})
    if status not in (400, 422):
        rule = f"{GENERATE} answered {status}: tokens cannot be requested"
        raise UserError(Problem(where, rule, "start it with --enable-scale-out"))


# Starting and attaching.


attach, start = partial(attach_server, Vllm), partial(start_server, Vllm)


def lora_flags(lora: LoraConfig) -> list[str]:
    return ["--enable-lora", "--max-loras", "1", "--max-lora-rank", str(max_rank(lora.rank))]


def flags(settings: ServerSettings, port: int, version: tuple[int, ...]) -> list[str]:
    words = {
        "--model": settings.model_folder,
        "--served-model-name": "policy",
        "--host": "127.0.0.1",
        "--port": port,
        "--dtype": settings.dtype,
        "--max-model-len": settings.max_context,
        "--max-num-seqs": settings.rollout.max_sequences,
        "--max-num-batched-tokens": max(
            settings.rollout.max_batch_tokens or PASS_TOKENS["cpu"],
            *(settings.max_context, settings.rollout.max_sequences),
        ),
        "--tensor-parallel-size": settings.tensor_parallel,
        "--pipeline-parallel-size": settings.pipeline_parallel,
        "--load-format": "dummy" if settings.lora is None else "auto",
        "--generation-config": "vllm",
        "--logprobs-mode": "processed_logprobs",
        "--worker-extension-cls": EXTENSION,
        "--middleware": GATE,
    }
    if settings.server.gpu_memory_share is not None and settings.device == "cuda":
        words["--gpu-memory-utilization"] = settings.server.gpu_memory_share
    if settings.rollout.kv_cache_bytes is not None and settings.device == "cuda":
        words["--kv-cache-memory-bytes"] = settings.rollout.kv_cache_bytes
    if settings.rollout.kv_cache_dtype == "fp8":
        words["--kv-cache-dtype"] = "fp8"
    switches = ["--enable-prefix-caching"]
    if version >= TELLS_VERSIONS:
        switches.append("--enable-scale-out")
    if settings.device == "cpu":
        switches.append("--enforce-eager")  # compiling takes longer than most CPU runs
        # A chunked prefill rewinds the request's random generator, which torch cannot do on a
        # CPU: vLLM 0.32 crashes.
        switches.append("--no-enable-chunked-prefill")
    if settings.can_sleep:
        switches.append("--enable-sleep-mode")
    if settings.lora is not None:
        switches += lora_flags(settings.lora)
    return command_line(words, switches, settings)
