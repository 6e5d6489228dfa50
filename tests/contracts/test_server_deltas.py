"""Weights to servers by disk: only modules in which something changed, and then all is compared."""

import asyncio
from contextlib import asynccontextmanager

import pytest
import torch
from http_thread import served
from safetensors.torch import load_file
from sglang_stand_in import StandIn
from starlette.responses import JSONResponse
from subjects import embedded, policy, server_settings
from test_server_answers import ScriptedVllm
from torch.nn.functional import pad

from pentad.core.errors import RunError
from pentad.models.hf_weights import iter_hf
from pentad.ops.digest import digest_of
from pentad.samplers import sglang, vllm
from pentad.samplers.vllm import entry_of

K = "model.layers.1.self_attn.k_proj.weight"
QKV = [K.replace("k_proj", f"{part}_proj") for part in "qkv"]
FIRST = [(name, tensor.detach().clone()) for name, tensor in iter_hf(policy(1))]
SECOND = [(name, tensor + 1 if name == K else tensor) for name, tensor in FIRST]
WHOLE = [name for name, _ in FIRST]


class HoldingVllm(ScriptedVllm):
    """Loads files for real, into tensors that nothing fuses."""

    def __init__(self):
        device = {"device_config": {"device": "cuda"}, "model_config": {"dtype": "torch.float32"}}
        super().__init__(config=device)
        self.tensors: dict[str, torch.Tensor] = {}
        self.arrived: list[list[str]] = []

    async def handle(self, request):
        if request.url.path != "/collective_rpc":
            return await super().handle(request)
        body = await request.json()
        if body["method"] == "pentad_held":
            held = dict(self.tensors)
            table = held["model.embed_tokens.weight"]
            held["model.embed_tokens.weight"] = pad(table, (0, 0, 0, -len(table) % 64))
            found = {name: entry_of(tensor) for name, tensor in held.items()}
            return JSONResponse({"results": [{"held": found}]})
        if not body["method"].startswith("pentad_load"):
            return await super().handle(request)
        came = load_file(body["args"][0])
        is_part = body["method"] == "pentad_load_part"
        self.tensors = (self.tensors if is_part else {}) | came
        self.arrived.append([name for name in WHOLE if name in came])
        receipt = {"num_tensors": len(came), "digest": digest_of(came.items()).hex()}
        return JSONResponse({"results": [receipt]})

    def alter(self):
        self.tensors["model.norm.weight"] += 1


class HoldingSglang(StandIn):
    def __init__(self):
        super().__init__(lambda: embedded(9, -1))

    def alter(self):
        with torch.no_grad():
            self.sampler.engine.model.get_parameter("norm.weight").add_(1)


SERVERS = {"vllm": (HoldingVllm, vllm.attach), "sglang": (HoldingSglang, sglang.attach)}


@asynccontextmanager
async def over(kind, folder, **changes):
    make, attach = SERVERS[kind]
    server = make()
    with served(server.app()) as address:
        sampler = await attach(address, server_settings(folder, **changes))
        try:
            await sampler.install(0, FIRST)
            yield server, sampler
        finally:
            await sampler.close()


def arrived(server):
    return [[name for name in WHOLE if name in names] for names in server.arrived]


@pytest.mark.parametrize("kind", SERVERS)
def test_the_module_that_changed_travels_and_the_receipt_is_of_all(model_folder, kind):
    async def main():
        async with over(kind, model_folder) as (server, sampler):
            receipt = await sampler.install(1, SECOND)
            assert arrived(server) == [WHOLE, QKV]
            assert receipt.digest == digest_of(SECOND).hex() and receipt.num_tensors == len(WHOLE)
            assert receipt.num_bytes == sum(t.nbytes for n, t in SECOND if n in QKV)
            assert receipt.install_s >= receipt.pause_s > 0
            await sampler.install(2, SECOND)
            assert len(server.arrived[-1]) == 1, "nothing changed, and the version has a name"
            await sampler.health()

    asyncio.run(main())


def renamed(server):
    server.label = "default"


CASES = {
    "another started it anew": (renamed, {}),
    "not asked for": (lambda server: None, {"weight_deltas": False}),
}


@pytest.mark.parametrize("kind", SERVERS)
@pytest.mark.parametrize("case", CASES)
def test_who_may_hold_something_else_gets_all(model_folder, kind, case):
    change, settings = CASES[case]

    async def main():
        async with over(kind, model_folder, **settings) as (server, sampler):
            change(server)
            await sampler.install(1, SECOND)
            assert arrived(server) == [WHOLE, WHOLE]

    asyncio.run(main())


def test_sglang_gets_all_after_it_slept(model_folder):
    async def main():
        async with over("sglang", model_folder) as (server, sampler):
            await sampler.sleep()
            await sampler.install(1, SECOND)
            await sampler.wake()
            assert arrived(server) == [WHOLE, WHOLE]

    asyncio.run(main())


@pytest.mark.parametrize("kind", SERVERS)
def test_a_delta_against_another_base_is_found_and_the_next_install_heals(model_folder, kind):
    async def main():
        async with over(kind, model_folder, check_weights_every=0) as (server, sampler):
            server.alter()
            with pytest.raises(RunError, match=r"model.norm.weight .*policy is not the trained"):
                await sampler.install(1, SECOND)
            await sampler.install(1, SECOND)
            assert arrived(server) == [WHOLE, QKV, WHOLE]
            await sampler.health()

    asyncio.run(main())


def test_a_part_that_does_not_arrive_is_found(model_folder):
    async def main():
        async with over("sglang", model_folder, check_weights_every=0) as (server, sampler):
            server.damage = lambda _: FIRST
            with pytest.raises(RunError, match="qkv_proj.* policy is not the trained one"):
                await sampler.install(1, SECOND)

    asyncio.run(main())
