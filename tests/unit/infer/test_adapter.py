"""An adapter beside a folder's weights: the draws of `serve` and `eval` are those of the merge."""

import asyncio
from dataclasses import asdict

import pytest
import torch
from family_toys import FAMILY_CONFIGS
from sections import sampler_settings

from pentad.cli.recipe import read_subject
from pentad.core.errors import UserError
from pentad.core.types import Request, SamplingParams
from pentad.engine.section import LoraConfig
from pentad.infer.sampler import EmbeddedSampler
from pentad.models.families import dims_of, lora_map_of
from pentad.models.registry import create_model, save_model
from pentad.weights.hf import HfFolder
from pentad.weights.merge import merge_folder
from pentad.weights.peft import Adapter, LoraSpec, read_adapter, write_adapter

SIZES = {
    "vocab_size": 41,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
CASES = {
    "dense": ({"model_type": "qwen3"}, ("down", "gate", "k", "o", "q", "up", "v"), "each"),
    "each": ({"model_type": "qwen3_moe", **EXPERTS}, ("experts", "q"), "each"),
    "shared": ({"model_type": "qwen3_moe", **EXPERTS}, ("experts", "q"), "shared_outer"),
    "latent": (
        {**FAMILY_CONFIGS["deepseek_v3"], "vocab_size": 41},
        ("experts", "kv_a", "kv_b", "o", "q_a", "q_b"),
        "each",
    ),
}


def folders(tmp_path, case):
    """A base, an adapter for it, and both merged."""
    config, targets, experts = CASES[case]
    config = {**SIZES, **config}
    dims = dims_of(config)
    save_model(create_model(dims, seed=1), tmp_path / "base", hf_config=config)
    spec = LoraSpec(3, 6.0, targets, experts)
    generator = torch.Generator().manual_seed(3)
    factors = {
        name: torch.randn(source.shape, generator=generator) * 0.3
        for name, source in lora_map_of(dims, LoraConfig(**asdict(spec))).sources.items()
    }
    adapter = Adapter(spec, factors, str(tmp_path / "base"))
    write_adapter(tmp_path / "adapter", adapter, HfFolder(tmp_path / "base").infos)
    found = read_adapter(tmp_path / "adapter")
    assert found.spec == spec and found.factors.keys() == factors.keys()
    names = {name: name for name in HfFolder(tmp_path / "base").infos}
    merge_folder(tmp_path / "base", found, tmp_path / "merged", "float32", "adapter", names)
    return tmp_path / "base", tmp_path / "adapter", tmp_path / "merged"


def drawn(folder, adapter=None):
    async def main():
        settings = sampler_settings(max_running=4, kv_cache_tokens=512)
        found = None if adapter is None else read_adapter(adapter)
        sampler = EmbeddedSampler.from_folder(folder, settings, adapter=found)
        params = SamplingParams(max_new_tokens=12, temperature=0.0)
        request = Request(id="a", prompt_ids=(5, 6, 7), params=params, seeds=(1,))
        try:
            return (await sampler.generate(request))[0]
        finally:
            await sampler.close()

    return asyncio.run(main())


@pytest.mark.parametrize("case", CASES)
def test_draws_beside_the_base_are_those_of_the_merged_folder(tmp_path, case):
    base, adapter, merged = folders(tmp_path, case)
    found, wanted, plain = drawn(base, adapter), drawn(merged), drawn(base)
    assert found.ids == wanted.ids != plain.ids
    torch.testing.assert_close(
        torch.tensor(found.logprobs), torch.tensor(wanted.logprobs), atol=1e-4, rtol=0
    )  # float32, summed in another order


def test_eval_takes_the_keys_of_an_adapter_from_its_folder(tmp_path):
    base, adapter, _ = folders(tmp_path, "dense")
    recipe = read_subject([str(base)], adapter=str(adapter))
    (override,) = [word for word in recipe.overrides if word.startswith("actor.lora=")]
    assert '"rank": 3' in override and f'"init_path": "{adapter}"' in override


def test_an_adapter_of_another_base_is_refused(tmp_path):
    _, adapter, _ = folders(tmp_path / "a", "dense")
    other, _, _ = folders(tmp_path / "b", "each")
    with pytest.raises(UserError, match="has no such module"):
        drawn(other, adapter)
