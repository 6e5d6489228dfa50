"""Servers with weights in fp8: the run quantises what it publishes, and compares what they hold."""

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from http_thread import served
from server_models import config_of
from sglang_stand_in import StandIn, write_environment
from starlette.responses import JSONResponse
from subjects import DIMS, server_settings, write_tokenizer
from test_server_deltas import HoldingVllm

from pentad.core.errors import RunError, UserError
from pentad.core.scratch import OWNER
from pentad.core.types import Request, SamplingParams
from pentad.infer.sampler import EmbeddedSampler
from pentad.infer.section import SamplerSettings
from pentad.models.hf_weights import install_hf, iter_hf
from pentad.models.registry import create_model
from pentad.ops.digest import digest_of
from pentad.rollout.section import RolloutConfig
from pentad.samplers import sglang, vllm
from pentad.samplers.vllm import entry_of
from pentad.weights.block_fp8 import dequantised, quantise, quantised

DENSE = replace(DIMS, hidden_size=128, num_kv_heads=4, intermediate_size=256)
MIXTURE = replace(
    DENSE,
    family="qwen3_moe",
    num_experts=2,
    num_experts_per_token=1,
    moe_intermediate_size=128,
    moe_layers=(True, True),
)
DOWN = "model.layers.1.{}down_proj.weight"


def published(dims, seed=1):
    return list(iter_hf(create_model(dims, seed=seed)))


def blank(dims):
    settings = SamplerSettings(
        rollout=RolloutConfig(max_running=8), max_context=dims.max_position, kv_cache_tokens=2048
    )
    return EmbeddedSampler(create_model(dims, seed=9), settings, version=-1)


class FusedVllm(HoldingVllm):
    """As vLLM on a GPU: q, k, v and gate, up fused, experts stacked, each with its scales."""

    def __init__(self, damage=lambda held: held, quantization="fp8"):
        super().__init__()
        self.says["/server_info"]["vllm_config"]["model_config"]["quantization"] = quantization
        self.damage = damage

    async def handle(self, request):
        if request.url.path != "/collective_rpc":
            return await super().handle(request)
        body = await request.json()
        if body["method"] != "pentad_held":
            return await super().handle(request)
        held = self.damage(fused(self.tensors))
        found = {name: entry_of(tensor) for name, tensor in held.items()}
        return JSONResponse({"results": [{"held": found}]})


def fused(tensors):
    parts, experts = {}, {}
    first = [".q_proj.", ".k_proj.", ".gate_proj."]
    for name in sorted(tensors, key=lambda n: [part not in n for part in first]):
        to = re.sub(r"\.[qkv]_proj\.", ".qkv_proj.", name)
        if found := re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.(.*)", name):
            place = f"{found[1]}.{'w2' if found[3] == 'down' else 'w13'}_{found[4]}"
            experts.setdefault(place, {}).setdefault(int(found[2]), []).append(tensors[name])
            continue
        to = re.sub(r"\.(gate|up)_proj\.", ".gate_up_proj.", to)
        parts.setdefault(to, []).append(tensors[name])
    held = {name: joined(some) for name, some in parts.items()}
    for name, some in experts.items():
        held[name] = torch.stack([joined(some[e]) for e in sorted(some)])
    table = held["model.embed_tokens.weight"]
    rows = table.new_zeros(-len(table) % 64, table.shape[1])
    return held | {"model.embed_tokens.weight": torch.cat([table, rows])}


def joined(tensors):
    return torch.cat([one.view(torch.uint8) for one in tensors]).view(tensors[0].dtype)


def powers_of_two(held):
    """As DeepGEMM changes weights on Blackwell."""
    name = DOWN.format("mlp.")
    scale = held[name + "_scale_inv"]
    held[name + "_scale_inv"] = torch.exp2(torch.log2(scale).ceil())
    return held


def one_bit(held):
    scales = held["model.layers.0.self_attn.qkv_proj.weight_scale_inv"]
    scales.view(torch.int32)[1, 0] ^= 1
    return held


def in_16_bits(held):
    return {name: tensor.bfloat16() for name, tensor in held.items()}


def swapped(held):
    name = "model.layers.1.mlp.experts.w2_weight_scale_inv"
    return held | {name: held[name].flip(0)}


@pytest.mark.parametrize(
    ("dims", "damage"),
    [
        (DENSE, None),
        (MIXTURE, None),
        (DENSE, powers_of_two),
        (DENSE, one_bit),
        (DENSE, in_16_bits),
        (MIXTURE, swapped),
    ],
)
def test_vllm_gets_matrices_and_scales_and_holds_them(tmp_path, dims, damage):
    server = FusedVllm(damage or (lambda held: held))
    weights = published(dims)

    async def main(address):
        settings = server_settings(tmp_path, dims=dims, weight_dtype="fp8")
        sampler = await vllm.attach(address, settings)
        try:
            if damage is not None:
                with pytest.raises(RunError, match="its policy is not the trained one"):
                    await sampler.install(0, weights)
                return
            receipt = await sampler.install(0, weights)
            assert receipt.digest == digest_of(weights).hex()
            assert receipt.num_tensors == len(weights)
        finally:
            await sampler.close()

    with served(server.app()) as address:
        asyncio.run(main(address))
    expected = dict(quantised(weights))
    assert server.tensors.keys() == expected.keys()
    assert all(entry_of(server.tensors[n]) == entry_of(expected[n]) for n in expected)


@pytest.mark.parametrize(
    ("wanted", "found", "rule"),
    [
        ("fp8", None, "its weights are not quantised in fp8"),
        ("auto", "fp8", "those that the run publishes are not"),
    ],
)
def test_a_server_of_the_other_format_is_rejected(tmp_path, wanted, found, rule):
    server = FusedVllm(quantization=found)

    async def main(address):
        with pytest.raises(UserError, match=rule):
            await vllm.attach(address, server_settings(tmp_path, weight_dtype=wanted))

    with served(server.app()) as address:
        asyncio.run(main(address))


def test_a_receipt_of_other_tensors_than_the_quantised_ones_is_rejected(tmp_path, monkeypatch):
    server = FusedVllm()

    async def main(address):
        sampler = await vllm.attach(
            address, server_settings(tmp_path, dims=DENSE, weight_dtype="fp8")
        )
        sampler.dialect.is_comparable = False  # as with two GPUs
        call = sampler.dialect.call_workers

        async def other(method, *arguments):
            (reply,) = await call(method, *arguments)
            return [reply | {"digest": "0" * 32}] if "load" in method else [reply]

        monkeypatch.setattr(sampler.dialect, "call_workers", other)
        with pytest.raises(RunError, match="other weights arrived than those that were sent"):
            await sampler.install(0, published(DENSE))
        await sampler.close()

    with served(server.app()) as address:
        asyncio.run(main(address))


def shifted(pairs):
    held = dict(pairs)
    held[DOWN.format("mlp.")] = held[DOWN.format("mlp.")].flip(0)
    return list(held.items())


@pytest.mark.parametrize("transport", ["disk", "broadcast", "ipc"])
@pytest.mark.parametrize("damage", [None, shifted])
def test_sglang_samples_from_the_quantised_policy(tmp_path, transport, damage):
    stand_in = StandIn(lambda: blank(DENSE), damage or (lambda pairs: pairs), fp8=True)
    weights = published(DENSE)

    async def main(address):
        settings = server_settings(
            tmp_path, dims=DENSE, weight_dtype="fp8", weight_transport=transport
        )
        sampler = await sglang.attach(address, settings)
        try:
            if damage is not None:
                with pytest.raises(RunError, match="its policy is not the trained one"):
                    await sampler.install(0, weights)
                return
            receipt = await sampler.install(0, weights)
            assert receipt.digest == digest_of(weights).hex()
            await compare_with_dequantised(sampler, weights)
        finally:
            await sampler.close()

    with served(stand_in.app()) as address:
        asyncio.run(main(address))


async def compare_with_dequantised(sampler, weights):
    request = Request(
        id="a", prompt_ids=(5, 6, 7), params=SamplingParams(max_new_tokens=8), seeds=(1, 2)
    )
    model = create_model(DENSE, seed=9)
    install_hf(model, list(dequantised(quantised(weights), torch.float32)))
    own = blank(DENSE)
    await own.install(0, list(iter_hf(model)))
    answers = [await one.generate(request) for one in (sampler, own)]
    assert [g.ids for g in answers[0]] == [g.ids for g in answers[1]]
    for one, other in zip(*answers, strict=True):  # the answers of a server share no batch
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    await own.close()


def test_a_started_server_gets_a_folder_that_says_how_its_weights_are_quantised(tmp_path):
    folder, env = tmp_path / "model", write_environment(tmp_path / "env", "0.5.17")
    write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(config_of(DENSE, "float32")))
    (folder / "model.safetensors").write_bytes(b"16-bit weights, which the server must not read")
    settings = server_settings(
        folder, dims=DENSE, weight_dtype="fp8", python=str(env), transfer_folder=str(tmp_path)
    )
    weights = published(DENSE)

    async def main():
        server = await sglang.start(settings, "sglang-0", tmp_path / "sglang.log")
        served_folder = Path(server.dialect.settings.model_folder)
        try:
            files = {path.name for path in served_folder.iterdir()}
            assert served_folder != folder and OWNER in files, "a later start removes it"
            assert "tokenizer.json" in files and "model.safetensors" not in files
            config = json.loads((served_folder / "config.json").read_text())
            kept = config["quantization_config"]["modules_to_not_convert"]
            assert config["quantization_config"]["weight_block_size"] == [128, 128]
            assert "model.embed_tokens" in kept and not any("_proj" in name for name in kept)
            receipt = await server.install(0, weights)
            assert receipt.digest == digest_of(weights).hex()
        finally:
            await server.close()
        assert not served_folder.exists() and (folder / "tokenizer.json").exists()

    asyncio.run(main())


def test_a_model_without_whole_blocks_starts_no_server(tmp_path):
    settings = server_settings(tmp_path, weight_dtype="fp8", python="nowhere")
    with pytest.raises(UserError, match="multiples of 128"):
        asyncio.run(vllm.start(settings, "vllm-0", tmp_path / "vllm.log"))


def test_only_changed_modules_are_sent(tmp_path):
    server, name = FusedVllm(), DOWN.format("mlp.")
    first = [(n, t.detach().clone()) for n, t in published(DENSE)]
    second = [(n, t * 2 if n == name else t) for n, t in first]

    async def main(address):
        settings = server_settings(tmp_path, dims=DENSE, weight_dtype="fp8")
        sampler = await vllm.attach(address, settings)
        await sampler.install(0, first)
        await sampler.install(1, second)
        await sampler.close()

    with served(server.app()) as address:
        asyncio.run(main(address))
    small, scales = quantise(dict(second)[name])
    assert entry_of(server.tensors[name]) == entry_of(small)
    assert entry_of(server.tensors[name + "_scale_inv"]) == entry_of(scales)
