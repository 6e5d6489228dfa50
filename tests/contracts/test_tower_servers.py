"""The text tower of a multimodal folder on a server, which gets it as a language model."""

import asyncio
import json
from pathlib import Path

import pytest
import torch
from sglang_stand_in import write_environment
from subjects import server_settings
from tower_toys import write_whole

from pentad.core.types import Request, SamplingParams
from pentad.infer.sampler import EmbeddedSampler
from pentad.infer.section import SamplerSettings
from pentad.models.families import dims_of
from pentad.models.hf_weights import iter_hf
from pentad.models.registry import load_model
from pentad.ops.digest import digest_of
from pentad.rollout.section import RolloutConfig
from pentad.samplers import sglang

REQUEST = Request(
    id="a", prompt_ids=(5, 6, 7), params=SamplingParams(max_new_tokens=6), seeds=(1, 2)
)


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    return write_environment(tmp_path_factory.mktemp("env") / "env", "0.5.17")


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "llava", "gemma3"])
def test_a_server_samples_from_the_text_tower(tmp_path, environment, kind):
    """Names of tensors begin in three ways: the server knows only those of a language model."""
    folder = tmp_path / kind
    write_whole(folder, kind)
    dims = dims_of(folder)
    assert dims.tower_names
    settings = server_settings(
        folder,
        dims=dims,
        max_context=dims.max_position,
        python=str(environment),
        transfer_folder=str(tmp_path),
    )
    model = load_model(folder)
    weights = list(iter_hf(model))
    assert all(
        name.startswith(tuple(there for _, there in dims.tower_names)) for name, _ in weights
    )

    async def main():
        server = await sglang.start(settings, "sglang-0", tmp_path / "sglang.log")
        served = Path(server.dialect.settings.model_folder)
        config = json.loads((served / "config.json").read_text())
        assert config["model_type"] == dims.family and "vision_config" not in config
        assert config["architectures"][0].endswith("ForCausalLM")
        rollout = RolloutConfig(max_running=8)
        sizes = SamplerSettings(
            rollout=rollout, max_context=dims.max_position, kv_cache_tokens=2048
        )
        own = EmbeddedSampler(model, sizes, version=0)
        try:
            receipt = await server.install(0, weights)
            assert receipt.digest == digest_of(weights).hex()
            assert receipt.num_tensors == len(weights)
            answers = [await one.generate(REQUEST) for one in (server, own)]
            assert [g.ids for g in answers[0]] == [g.ids for g in answers[1]]
            said = [torch.tensor([g.logprobs for g in some]) for some in answers]
            torch.testing.assert_close(*said, atol=1e-5, rtol=0)  # float32 on other threads
        finally:
            await server.close()
            await own.close()

    asyncio.run(main())
