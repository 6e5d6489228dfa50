"""A stand-in for SGLang: its request schema, checked strictly, before our embedded engine.

Bodies are those of SGLang 0.5.23 (srt/managers/io_struct.py); a field it does not know is refused,
and so is what SGLang refuses: flushing a cache that is in use, updating weights that are served,
giving back memory with requests under way. As 0.5.17 it says of an answer, not of each token, which
weights drew it, and ends no request while it is paused.
"""

import argparse
import asyncio
import base64
import hashlib
import importlib.metadata
import io
import json
import pickle
import re
import sys
import uuid
from contextlib import asynccontextmanager
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
import uvicorn
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors.torch import load_file
from sglang_pool import LoraPool
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from torch.distributed.distributed_c10d import (
    Backend,
    PrefixStore,
    _new_process_group_helper,
    rendezvous,
)

from pentad.core.errors import UserError
from pentad.core.types import Generation, Request, SamplingParams
from pentad.infer.sampler import EmbeddedSampler
from pentad.infer.section import SamplerSettings
from pentad.models.families import dims_of
from pentad.models.hf_weights import iter_hf
from pentad.models.registry import create_model
from pentad.rollout.section import RolloutConfig
from pentad.samplers import sglang_worker
from pentad.sync.group import broadcast
from pentad.weights.block_fp8 import dequantised


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class Sampling(Body):
    max_new_tokens: int = 128
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 1 << 30
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    sampling_seed: int | None = None


class Generate(Body):
    rid: str
    input_ids: list[int]
    sampling_params: Sampling
    return_logprob: bool = False
    extra_key: str | None = None
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0
    lora_path: str | None = None


class Pause(Body):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class Continue(Body):
    torch_empty_cache: bool = True


class Update(Body):
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None
    load_format: str | None = None
    torch_empty_cache: bool = False


class FromDisk(Update):
    model_path: str
    is_async: bool = False
    keep_pause: bool = False
    recapture_cuda_graph: bool = False
    token_step: int = 0


class FromTensor(Update):
    serialized_named_tensors: list[str]
    selector: Literal["target", "draft", "all"] = "all"


class FromDistributed(Update):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"
    selector: Literal["target", "draft", "all"] = "all"


class InitGroup(Body):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"


class Tags(Body):
    tags: list[str] | None = None


class Abort(Body):
    rid: str = ""
    abort_all: bool = False


class Check(Body):
    action: str = "checksum"
    allow_quant_error: bool = False


class LoadAdapter(Body):
    lora_name: str
    lora_path: str
    pinned: bool = False


class NewVersion(Body):
    new_version: str
    abort_all_requests: bool = True


class Place(BaseModel):
    """Of a rank, in the checksums of SGLang."""

    tp_rank: int = 0
    tp_size: int = 1


def refuse(*_args, **_keys):
    raise AssertionError("it was passed on to SGLang")


def as_sent(pairs):
    return pairs


class StandIn:
    def __init__(
        self,
        make_sampler,
        damage=as_sent,
        eos_ids=(),
        pool: LoraPool | None = None,
        fp8: bool = False,
        **info: Any,
    ) -> None:
        """`damage` makes other weights of those that arrive. `eos_ids` are those of its model,
        which end answers unless it is asked to ignore all ids that do. `pool`: that of a server
        with adapters and our plugin. `fp8`: it was started with quantised weights."""
        self.fp8: dict[str, torch.Tensor] | None = {} if fp8 else None
        """The tensors as they came."""
        self.eos_ids = eos_ids
        self.make_sampler = make_sampler
        self.damage = damage
        self.info = {
            "version": "0.5.23",
            "tp_size": 1,
            "pp_size": 1,
            "enable_memory_saver": True,
            "enable_deterministic_inference": True,
            "skip_tokenizer_init": False,
            "enable_return_routed_experts": False,
            "context_length": None,
            "device": "cpu",
            "dtype": "auto",
            **info,
        }
        self.tells_versions = self.info["version"] >= "0.5.23"
        self.label = "default"
        self.num_ranks = 1
        checker = SimpleNamespace(_parallelism_info=Place)
        self.runner = SimpleNamespace(lora_manager=pool, _weight_checker=checker)
        self.has_plugin = pool is not None
        self.pause_mode: str | None = None
        self.released: set[str] = set()
        self.pending: list[tuple[str, torch.Tensor]] = []
        self.arrived: list[list[str]] = []
        """The names of each update."""
        self.groups: dict[str, Any] = {}
        self.routed: set[str] = set()
        self.extra_keys: list[str | None] = []
        self.calls: list[str] = []
        self.rids: set[str] = set()

    def app(self) -> Starlette:
        routes = {
            "/generate": (Generate, self.generate),
            "/pause_generation": (Pause, self.pause),
            "/continue_generation": (Continue, self.resume),
            "/update_weights_from_disk": (FromDisk, self.from_disk),
            "/update_weights_from_tensor": (FromTensor, self.from_tensor),
            "/update_weights_from_distributed": (FromDistributed, self.from_distributed),
            "/init_weights_update_group": (InitGroup, self.init_group),
            "/release_memory_occupation": (Tags, self.release),
            "/resume_memory_occupation": (Tags, self.wake),
            "/abort_request": (Abort, self.abort),
            "/weights_checker": (Check, self.checksums),
            "/flush_cache": (None, self.flush),
            "/load_lora_adapter": (LoadAdapter, self.load_adapter),
            "/update_weight_version": (NewVersion, self.relabel),
        }
        posts = [
            Route(path, self.route(*entry), methods=["POST"]) for path, entry in routes.items()
        ]
        gets = [
            Route("/health", lambda _: Response()),
            Route("/server_info", lambda _: JSONResponse(self.info)),
            Route("/model_info", lambda _: JSONResponse({"weight_version": self.label})),
        ]

        @asynccontextmanager
        async def life(_app):
            self.sampler: EmbeddedSampler = self.make_sampler()
            yield
            await self.sampler.close()

        return Starlette(routes=[*posts, *gets], lifespan=life)

    def route(self, schema, call):
        async def answer(request: HttpRequest) -> Response:
            self.calls.append(request.url.path)
            if schema is None:
                return await call()
            try:
                body = schema.model_validate_json(await request.body())
            except ValidationError as error:
                return JSONResponse({"error": str(error)}, status_code=400)
            return await call(body)

        return answer

    async def generate(self, body: Generate) -> Response:
        wanted = body.sampling_params
        self.extra_keys.append(body.extra_key)
        if body.return_routed_experts and self.info["enable_return_routed_experts"]:
            self.routed.add(body.rid)
        if self.has_plugin:
            names = [ref.lora_name for ref in self.runner.lora_manager.lora_refs.values()]
            assert body.lora_path in names, "an adapter that is not loaded"
        params = SamplingParams(
            max_new_tokens=wanted.max_new_tokens,
            temperature=wanted.temperature,
            top_p=wanted.top_p,
            top_k=max(wanted.top_k, 0),
            stop_ids=() if wanted.ignore_eos else (*(wanted.stop_token_ids or ()), *self.eos_ids),
            stop_strings=tuple(wanted.stop or ()),
        )
        assert body.return_logprob and wanted.sampling_seed is not None
        assert body.rid not in self.rids, "an abort that comes late would end the later call"
        self.rids.add(body.rid)
        request = Request(
            id=body.rid,
            prompt_ids=tuple(body.input_ids),
            params=params,
            seeds=(wanted.sampling_seed,),
        )
        try:
            (done,) = await self.sampler.generate(request)
        except UserError as error:
            return JSONResponse({"error": {"message": str(error)}}, status_code=400)
        return JSONResponse(self.answer_of(done, request))

    def answer_of(self, part: Generation, request: Request) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": request.id,
            "prompt_tokens": len(request.prompt_ids),
            "completion_tokens": len(part.ids),
            "finish_reason": self.reason(part, request),
            "weight_version": self.label,
            "output_token_logprobs": [
                [logprob, token, None]
                for token, logprob in zip(part.ids, part.logprobs, strict=True)
            ],
        }
        if self.tells_versions:
            meta["weight_versions"] = spans(part.versions)
        if request.id in self.routed and part.routes is not None:
            meta["routed_experts"] = self.routes(part)
        return {"text": "", "output_ids": part.ids, "meta_info": meta}

    def routes(self, part: Generation) -> str:
        """int32 of all layers, dense ones too, and of all tokens but the last."""
        assert part.routes is not None
        dims, num = self.sampler.engine.model.dims, len(part.routes) - 1
        told = torch.zeros(num, dims.num_layers, dims.num_experts_per_token, dtype=torch.int32)
        layers = [layer for layer in range(dims.num_layers) if dims.is_moe(layer)]
        told[:, layers] = torch.from_numpy(part.routes[:-1]).int()
        return base64.b64encode(told.numpy().tobytes()).decode()

    def reason(self, part: Generation, request: Request) -> dict[str, Any]:
        matched = part.ids[-1] if part.finish == "stop" else None
        is_id = matched in request.params.stop_ids
        return {"type": part.finish, "matched": matched if is_id else "text"}

    async def pause(self, body: Pause) -> Response:
        assert body.mode != "abort", "requests under way must stay"
        self.pause_mode = body.mode
        await self.sampler.pause()
        if body.mode == "retract":
            self.sampler.engine.scheduler.preempt_all()
        return JSONResponse({"status": "ok"})

    async def resume(self, _body: Continue) -> Response:
        self.pause_mode = None
        await self.sampler.resume()
        return JSONResponse({"status": "ok"})

    async def from_disk(self, body: FromDisk) -> Response:
        assert body.load_format == "auto", "the server's own format may be dummy"
        pairs = [
            p for f in Path(body.model_path).glob("*.safetensors") for p in load_file(f).items()
        ]
        return await self.update(body, pairs)

    async def from_tensor(self, body: FromTensor) -> Response:
        assert len(body.serialized_named_tensors) == self.info["tp_size"]
        data = base64.b64decode(body.serialized_named_tensors[0], validate=True)
        return await self.update(body, [(n, t.clone()) for n, t in pickle.load(io.BytesIO(data))])

    async def init_group(self, body: InitGroup) -> Response:
        """As SGLang's init_custom_process_group does, by torch's own helper."""

        def make():
            timeout = timedelta(seconds=120)
            where = f"tcp://{body.master_address}:{body.master_port}"
            rank, world = body.rank_offset, body.world_size
            store, _, _ = next(rendezvous(where, rank, world, timeout=timeout))
            group, _ = _new_process_group_helper(
                world,
                rank,
                [],
                Backend(body.backend),
                PrefixStore(body.group_name, store),
                group_name=body.group_name,
                timeout=timeout,
            )
            return group

        self.groups[body.group_name] = await asyncio.to_thread(make)
        return JSONResponse({"success": True, "message": "ok"})

    async def from_distributed(self, body: FromDistributed) -> Response:
        def receive() -> list[tuple[str, torch.Tensor]]:
            pairs = []
            for name, dtype, shape in zip(body.names, body.dtypes, body.shapes, strict=True):
                tensor = torch.empty(shape, dtype=getattr(torch, dtype))
                broadcast(self.groups[body.group_name], tensor)
                pairs.append((name, tensor))
            return pairs

        return await self.update(body, await asyncio.to_thread(receive))

    async def update(self, body: Update, pairs) -> Response:
        """Takes effect with the part that names the version, as the last one does."""
        assert "weights" not in self.released, "there is no memory to load weights into"
        if self.pause_mode is None and not self.released:
            return JSONResponse({"success": False, "message": "not paused"}, status_code=400)
        if body.flush_cache and self.pause_mode == "in_place" and self.sampler.open:
            told = "Cache flush failed after updating weights"
            return JSONResponse({"success": False, "message": told}, status_code=400)
        self.pending += pairs
        if body.weight_version is not None:
            # A fresh client may begin to count anew.
            self.sampler.engine.version = min(self.sampler.engine.version, int(body.weight_version))
            self.arrived.append([name for name, _ in self.pending])
            held = {n: t.detach().clone() for n, t in iter_hf(self.sampler.engine.model)}
            held = held if self.fp8 is None else self.fp8
            merged = list((held | dict(self.pending)).items())  # what did not come stays
            pairs = self.damage(merged)
            if self.fp8 is not None:
                self.fp8 = dict(pairs)
                pairs = list(dequantised(pairs, torch.float32))
            await self.sampler.install(int(body.weight_version), pairs)
            self.label, self.pending = body.weight_version, []
        return JSONResponse({"success": True, "message": "Success."})

    async def flush(self) -> Response:
        """A sentence, as SGLang answers, and no JSON."""
        text = "Cache flushed. Please check backend logs for more details."
        return Response(text, status_code=400 if self.sampler.open else 200)

    async def release(self, body: Tags) -> Response:
        assert not self.sampler.open, "release_memory_occupation should be called when idle"
        self.released |= set(body.tags or ("weights", "kv_cache"))
        await self.sampler.sleep()
        return JSONResponse(None)

    async def wake(self, body: Tags) -> Response:
        """The engine behind is awake when all of it is; weights can be installed before."""
        tags = set(body.tags or ("weights", "kv_cache"))
        assert tags <= self.released, "waking what is awake ends SGLang"
        self.released -= tags
        if not self.released:
            await self.sampler.wake()
        return JSONResponse(None)

    async def abort(self, body: Abort) -> Response:
        if self.pause_mode is None:
            for rid in [rid for rid in self.sampler.open if rid.startswith(body.rid)]:
                await self.sampler.abort(rid)
        return Response()

    async def load_adapter(self, body: LoadAdapter) -> Response:
        ref = SimpleNamespace(lora_id=uuid.uuid4().hex, **body.model_dump())
        done = sglang_worker.registered(refuse, self.runner, ref)
        return JSONResponse({"success": done.success, "error_message": done.error_message})

    async def relabel(self, body: NewVersion) -> Response:
        """The engine behind draws with the adapter that is in the pool."""
        assert not body.abort_all_requests and self.pause_mode is not None
        (uid,) = self.runner.lora_manager.lora_refs
        held = self.runner.lora_manager.factors(uid)
        factors = self.damage([(name, factor) for name, factor in held.items() if factor.any()])
        self.sampler.engine.version = min(self.sampler.engine.version, int(body.new_version))
        await self.sampler.install(int(body.new_version), factors)
        self.label = body.new_version
        return JSONResponse({"success": True, "message": "Weight version updated"})

    async def checksums(self, body: Check) -> Response:
        if self.has_plugin:
            asked = {"action": body.action, "allow_quant_error": body.allow_quant_error}
            rank = sglang_worker.answered(refuse, self.runner, **asked)
            ranks = [rank] * self.num_ranks
            return JSONResponse({"success": True, "message": "Success.", "ranks": ranks})
        if body.action != "checksum":
            told = f"Unsupported action={body.action!r}"
            return JSONResponse({"success": False, "message": told}, status_code=400)
        return await self.weight_checksums()

    async def weight_checksums(self) -> Response:
        """Of what the engine holds, under the names that SGLang's models have for it."""
        held: dict[str, list[torch.Tensor]] = {}
        pairs = iter_hf(self.sampler.engine.model)
        if self.fp8 is not None:  # utils/weight_checker.py
            pairs = dequantised(self.fp8.items(), torch.bfloat16)
        for name, tensor in pairs:
            fused = re.sub(r"\.[qkv]_proj\.", ".qkv_proj.", name)
            fused = re.sub(r"experts\.\d+\.(gate|up)_proj\.", "experts.w13_", fused)
            fused = re.sub(r"experts\.\d+\.down_proj\.", "experts.w2_", fused)
            fused = re.sub(r"\.(gate|up)_proj\.", ".gate_up_proj.", fused)
            held.setdefault(fused, []).append(tensor)
        for name in {"model.embed_tokens.weight", "lm_head.weight"} & held.keys():
            table = held[name]
            table.append(torch.zeros(-len(table[0]) % 64, table[0].shape[1]))
        sums = {}
        for name, parts in held.items():
            whole = torch.cat(parts).contiguous().flatten()
            data = hashlib.sha256(whole.view(torch.uint8).numpy().tobytes())
            sums[name] = f"{int.from_bytes(data.digest()[:8], 'big'):016x}"
        rank = {"checksums": sums, "per_gpu_checksum": "", "parallelism_info": {}}
        return JSONResponse({"success": True, "message": "Success.", "ranks": [rank]})


def spans(versions: list[int]) -> list[dict[str, Any]]:
    out, start = [], 0
    for version, members in groupby(versions):
        end = start + len(list(members))
        out.append({"version": str(version), "start": start, "end": end})
        start = end
    return out


# The stand-in as a process that a run starts: an environment with a package `sglang`.


def write_environment(folder: Path, version: str = "0.5.23") -> Path:
    site, info = folder / "site" / "sglang", folder / "site" / f"sglang-{version}.dist-info"
    for path in (folder / "bin", site, info):
        path.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    (info / "top_level.txt").write_text("sglang\n")
    (site / "__init__.py").write_text("")
    (site / "launch_server.py").write_text("from sglang_stand_in import main\n\nmain()\n")
    here = Path(__file__).parent
    paths = f"{site.parent}:{here}:{here.parents[1]}"
    python = folder / "bin" / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={paths} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return folder


def with_key(app, key: str | None):
    """What SGLang asks of each request where it has a key (srt/utils/auth.py)."""

    async def guarded(scope, receive, send):
        is_open = scope["type"] != "http" or scope["method"] == "OPTIONS"
        is_open = is_open or scope["path"].startswith(("/health", "/metrics"))
        given = dict(scope["headers"]).get(b"authorization") if not is_open else None
        if is_open or key is None or given == f"Bearer {key}".encode():
            await app(scope, receive, send)
        else:
            await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)

    return guarded


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model-path", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--context-length", type=int, required=True)
    parser.add_argument("--max-running-requests", type=int, required=True)
    parser.add_argument("--api-key")
    parser.add_argument("--enable-memory-saver", action="store_true")
    parser.add_argument("--enable-return-routed-experts", action="store_true")
    given, _ = parser.parse_known_args()
    config = json.loads((given.model_path / "config.json").read_text())
    fp8 = config.pop("quantization_config", None)
    dims = dims_of(config)
    num, routes = given.max_running_requests, given.enable_return_routed_experts
    settings = SamplerSettings(
        rollout=RolloutConfig(max_running=num, replay_routes=routes),
        max_context=given.context_length,
        kv_cache_tokens=num * given.context_length,
    )

    def make_sampler() -> EmbeddedSampler:
        return EmbeddedSampler(create_model(dims, seed=9), settings, version=-1)

    stand_in = StandIn(
        make_sampler,
        version=importlib.metadata.version("sglang"),
        enable_memory_saver=given.enable_memory_saver,
        enable_return_routed_experts=given.enable_return_routed_experts,
        skip_tokenizer_init=True,
        fp8=fp8 is not None and fp8["quant_method"] == "fp8",
    )
    print(f"server_args={given}")  # as SGLang does, with the key in it
    app = with_key(stand_in.app(), given.api_key)
    uvicorn.run(app, host="127.0.0.1", port=given.port, log_level="warning")
