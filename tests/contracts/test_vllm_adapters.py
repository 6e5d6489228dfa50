"""Adapters over a real vLLM: served unmerged, replaced in place, and proven at every install."""

import asyncio
import json
import os
from dataclasses import asdict

import pytest
import torch
from subjects import server_settings, write_tokenizer
from test_vllm_families import COMMON, FAMILIES, truth

from pentad.core.errors import InfraFailure, UserError
from pentad.core.types import Request, SamplingParams
from pentad.engine.section import LoraConfig
from pentad.models.families import dims_of
from pentad.models.hf_weights import install_hf, iter_hf
from pentad.models.registry import create_model, save_model
from pentad.ops.digest import digest_of
from pentad.samplers import vllm
from pentad.samplers.weight_proof import check_targets
from pentad.weights.merge import MergeLoss, merge_weight
from pentad.weights.peft import Adapter, LoraSpec, word_of

VLLM = os.environ.get("PENTAD_TEST_VLLM", "")
pytestmark = [
    pytest.mark.optional,
    pytest.mark.skipif(not VLLM or VLLM.startswith("http"), reason="make test-vllm runs it"),
]


def factors_of(model, spec: LoraSpec, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, weight in iter_hf(model):
        module = name.removesuffix(".weight")
        if word_of(module) in spec.targets:
            rows, columns = weight.shape
            for kind, shape in (("A", (spec.rank, columns)), ("B", (rows, spec.rank))):
                drawn = torch.randn(shape, generator=generator) * 0.2
                out[f"{module}.lora_{kind}.weight"] = drawn
    return out


def merged_model(dims, adapter: Adapter):
    model = create_model(dims, seed=1)
    modules, loss, pairs = set(adapter.modules), MergeLoss("float32"), []
    for name, weight in iter_hf(model):
        module = name.removesuffix(".weight")
        if module in modules:
            pair = adapter.pair(module)
            weight = merge_weight(weight, pair, adapter.spec.scale, torch.float32, loss)
        pairs.append((name, weight.clone()))
    install_hf(model, pairs)
    return model


@pytest.mark.parametrize("transport", ["disk", "broadcast"])
def test_factors_are_served_unmerged_and_replaced_in_place(transport, tmp_path):
    config = {**COMMON, **FAMILIES["qwen2"]}
    base = create_model(dims_of(config), seed=1)
    save_model(base, tmp_path / "model", hf_config=config)
    write_tokenizer(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    dims = dims_of(tmp_path / "model")
    spec = LoraSpec(6, 9.0, ("down", "gate", "k", "o", "q", "up", "v"))
    settings = server_settings(
        tmp_path / "model",
        dims=dims,
        max_context=64,
        python=VLLM,
        start_timeout_s=240,
        weight_transport=transport,
        lora=LoraConfig(**asdict(spec)),
    )
    params = SamplingParams(max_new_tokens=16)
    request = Request(id="a", prompt_ids=(5, 6, 7), params=params, seeds=(1, 2, 3))

    async def main():
        sampler = await vllm.start(settings, "vllm-0", tmp_path / "vllm.log")
        try:
            for version in (1, 2, 3):
                factors = factors_of(base, spec, version)
                receipt = await sampler.install(version, list(factors.items()))
                assert receipt.digest == digest_of(factors.items()).hex()
                model = merged_model(dims, Adapter(spec, factors))
                for g in await sampler.generate(request):
                    assert set(g.versions) == {version}
                    wanted = truth(model, request.prompt_ids, g.ids)
                    # fp32 by other kernels, over two layers
                    torch.testing.assert_close(torch.tensor(g.logprobs), wanted, atol=1e-4, rtol=0)
                    plain = truth(base, request.prompt_ids, g.ids)
                    assert (plain - wanted).abs().max() > 0.1
            dialect, lora = sampler.dialect, settings.lora
            other = factors_of(base, spec, 4)
            with pytest.raises(InfraFailure, match="its policy is not the trained one"):
                await dialect._prove_factors(list(other.items()), lora)
            fewer = {n: t for n, t in factors.items() if ".layers.0." in n}
            with pytest.raises(InfraFailure, match="factors that were not published"):
                await dialect._prove_factors(list(fewer.items()), lora)
            (about, *_) = await dialect.call_workers("pentad_adapter", '{"rank": 6, "alpha": 9.0}')
            some = [name for name in about["modules"] if not name.endswith("layers.1.mlp.up_proj")]
            with pytest.raises(UserError, match=r"skip the factors of 1 modules, .*1.mlp.up_proj"):
                check_targets("vLLM", some, dims, lora)
        finally:
            await sampler.close()

    asyncio.run(main())
