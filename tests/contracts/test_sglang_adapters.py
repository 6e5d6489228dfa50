"""Adapters over SGLang: replaced in place by our plugin, and compared as its layers hold them.

The server is the stand-in; its memory has the layout of the real one (`sglang_pool`).
"""

import asyncio
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
import torch
from http_thread import served
from sections import sampler_settings
from sglang_pool import LoraPool
from sglang_stand_in import StandIn
from subjects import DIMS, decode, server_settings
from test_vllm_adapters import factors_of, merged_model
from test_vllm_families import truth

from pentad.core.errors import InfraFailure, UserError
from pentad.core.types import Request, SamplingParams
from pentad.engine.section import LoraConfig
from pentad.infer.sampler import EmbeddedSampler
from pentad.models.registry import create_model
from pentad.ops.digest import digest_of
from pentad.samplers import sglang
from pentad.samplers.process import package_path
from pentad.weights.peft import Adapter, LoraSpec

DENSE = LoraSpec(6, 9.0, ("down", "gate", "k", "o", "q", "up", "v"))
SOME = LoraSpec(6, 9.0, ("k", "o"))
EXPERTS = LoraSpec(6, 9.0, ("experts", "k", "o", "q", "v"))
MIXTURE = replace(
    DIMS,
    family="qwen3_moe",
    num_experts=4,
    num_experts_per_token=2,
    moe_intermediate_size=24,
    moe_layers=(True,) * 2,
)
REQUEST = Request(
    id="a", prompt_ids=(5, 6, 7), params=SamplingParams(max_new_tokens=12), seeds=(1, 2)
)


def serve(dims, spec, version="0.5.23", skips=(), damage=None):
    """A stand-in with a pool, and settings that reach it."""
    lora = LoraConfig(**asdict(spec))

    def make() -> EmbeddedSampler:
        keys = {"max_running": 16, "kv_cache_tokens": 2048, "lora": lora}
        return EmbeddedSampler(
            create_model(dims, seed=1), sampler_settings(**keys), decode=decode, version=-1
        )

    pool = LoraPool(dims, spec.rank, skips)
    return StandIn(make, *([damage] if damage else []), pool=pool, version=version), lora


@pytest.mark.parametrize("version", ["0.5.17", "0.5.23"])
@pytest.mark.parametrize("transport", ["disk", "broadcast"])
def test_factors_are_replaced_in_place_and_drawn_with(transport, version, tmp_path):
    check_served(DIMS, DENSE, transport, version, tmp_path)


def test_a_fused_matrix_may_have_factors_for_some_of_its_parts(tmp_path):
    check_served(DIMS, SOME, "disk", "0.5.23", tmp_path)


def test_experts_have_factors(tmp_path):
    check_served(MIXTURE, EXPERTS, "disk", "0.5.23", tmp_path)


def check_served(dims, spec, transport, version, tmp_path):
    base = create_model(dims, seed=1)
    server, lora = serve(dims, spec, version)
    settings = server_settings(tmp_path, dims=dims, lora=lora, weight_transport=transport)

    async def main():
        with served(server.app()) as address:
            sampler = await sglang.attach(address, settings)
            memory = [id(m) for layer in server.runner.lora_manager.lora_modules for m in layer]
            for number in (1, 2, 3):
                factors = factors_of(base, spec, number)
                receipt = await sampler.install(number, list(factors.items()))
                assert receipt.digest == digest_of(factors.items()).hex()
                model = merged_model(dims, Adapter(spec, factors))
                for g in await sampler.generate(replace(REQUEST, id=f"a{number}")):
                    assert set(g.versions) == {number}
                    wanted = truth(model, REQUEST.prompt_ids, g.ids)
                    torch.testing.assert_close(torch.tensor(g.logprobs), wanted, atol=1e-4, rtol=0)
                    plain = truth(base, REQUEST.prompt_ids, g.ids)
                    assert (plain - wanted).abs().max() > 0.05
            assert server.calls.count("/load_lora_adapter") == 1
            pool = server.runner.lora_manager
            assert pool.notified == [{1}] * 3
            assert memory == [id(m) for layer in pool.lora_modules for m in layer]
            await sampler.close()
            again = await sglang.attach(address, settings)  # of a run that was restarted
            await again.install(4, list(factors.items()))
            assert server.calls.count("/load_lora_adapter") == 1
            await again.close()

    asyncio.run(main())


def test_a_factor_that_is_not_as_published_is_found(tmp_path):
    server, lora = serve(DIMS, DENSE)
    factors = factors_of(create_model(DIMS, seed=1), DENSE, 1)

    async def main():
        with served(server.app()) as address:
            sampler = await sglang.attach(address, server_settings(tmp_path, lora=lora))
            await sampler.install(1, list(factors.items()))
            layer = server.runner.lora_manager.lora_modules[1]["model.layers.1.mlp.gate_up_proj"]
            spoiled, notify = 0, server.runner.lora_manager._notify_lora_slots_updated

            def spoil(slots):
                nonlocal spoiled
                notify(slots)
                layer.b[1, 50, 0] += 1e-3  # a row of up
                spoiled += 1

            server.runner.lora_manager._notify_lora_slots_updated = spoil
            found = r"layers\.1\.mlp\.up_proj\.lora_B.* its policy is not the trained one"
            with pytest.raises(InfraFailure, match=found):
                await sampler.dialect.load(2, list(factors.items()))
            assert spoiled == 1
            server.runner.lora_manager._notify_lora_slots_updated = notify
            fewer = {n: t for n, t in factors.items() if "up_proj" not in n}
            with pytest.raises(InfraFailure, match=r"its policy is not the trained one"):
                receiver = server.runner.pentad_receiver
                receiver.pentad_take(iter(fewer.items()))
                sampler.dialect.transport.send = arrived
                await sampler.dialect.load(2, list(factors.items()))
            await sampler.close()

    async def arrived(weights, _call):
        """A transfer that reports success, and did not arrive."""
        whole = digest_of(weights)
        return [{"num_tensors": len(whole.entries), "digest": whole.hex()}]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"skips": ("model.layers.1.mlp.down_proj",)},
            r"skip the factors of 1 modules, first model.layers.1.mlp.down_proj.*leave down out",
        ),
        ({"rank": 4}, r"takes no adapter .*at most rank 4.*start it with --enable-lora .*rank 6"),
        ({"plugin": False}, r"takes no adapter .*Unsupported action.*install Pentad in its"),
        ({"enabled": False}, r"takes no adapter .*adapters are not enabled"),
        ({"tp_size": 2}, "its factors are shards.*use one GPU for each SGLang, or vllm"),
        ({"dp_size": 2}, "has --dp-size 2, whose .* start a server for each replica, and give the"),
        ({"num_ranks": 2}, "takes no adapter .*pentad_adapter was answered by 2 workers, and one"),
    ],
)
def test_a_server_that_cannot_take_all_factors_is_refused_at_the_start(changes, sentence, tmp_path):
    server, lora = serve(DIMS, DENSE, skips=changes.get("skips", ()))
    server.has_plugin = changes.get("plugin", True)
    server.info |= {name: changes.get(name, 1) for name in ("tp_size", "dp_size")}
    server.num_ranks = changes.get("num_ranks", 1)
    server.runner.lora_manager.max_lora_rank = changes.get("rank", 6)
    if not changes.get("enabled", True):
        server.runner.lora_manager = None

    async def main():
        with served(server.app()) as address:
            await sglang.attach(address, server_settings(tmp_path, lora=lora))

    with pytest.raises(UserError, match=sentence):
        asyncio.run(main())


def test_an_adapter_of_another_scale_under_the_same_name_is_refused(tmp_path):
    server, lora = serve(DIMS, DENSE)
    factors = factors_of(create_model(DIMS, seed=1), DENSE, 1)

    async def main():
        with served(server.app()) as address:
            sampler = await sglang.attach(address, server_settings(tmp_path, lora=lora))
            await sampler.install(1, list(factors.items()))
            await sampler.close()
            other = lora.model_copy(update={"alpha": 6.0})
            await sglang.attach(address, server_settings(tmp_path, lora=other))

    with pytest.raises(UserError, match="same name with another rank or alpha"):
        asyncio.run(main())


def test_a_started_server_finds_the_plugin_and_starts_with_all_targets(tmp_path):
    settings = server_settings(tmp_path, lora=LoraConfig(**asdict(DENSE)), can_sleep=True)
    words = sglang.flags(settings, 1)
    at = words.index("--lora-target-modules") + 1
    names = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert words[at : at + 7] == names and words[words.index("--max-lora-rank") + 1] == "6"
    assert words[words.index("--load-format") + 1] == "auto"
    assert "--enable-weights-cpu-backup" in words, "the frozen weights are not published again"
    assert "--enable-lora" not in sglang.flags(server_settings(tmp_path), 1)
    (tmp_path / "site").mkdir()
    site = package_path(tmp_path / "site")
    code = (
        "from importlib.metadata import entry_points\n"
        "found = entry_points(group='sglang.srt.plugins')\n"
        "(one,) = [e for e in found if e.dist.name == 'pentad-server']\n"
        "print(one.name, one.load().__name__)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env={"PYTHONPATH": site}, capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert done.stdout == "pentad register\n"
