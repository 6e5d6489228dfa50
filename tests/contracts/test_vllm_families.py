"""Models of other families over a real vLLM: every weight arrives, and so at the next install."""

import asyncio
import json
import os

import pytest
import torch
from subjects import server_settings, write_tokenizer

from pentad.core.types import Request, SamplingParams
from pentad.models.decoder import causal_attend
from pentad.models.families import dims_of
from pentad.models.hf_weights import install_hf, iter_hf
from pentad.models.registry import create_model
from pentad.ops.digest import digest_of
from pentad.samplers import vllm
from pentad.weights.block_fp8 import dequantised, quantised

VLLM = os.environ.get("PENTAD_TEST_VLLM", "")
pytestmark = [
    pytest.mark.optional,
    pytest.mark.skipif(not VLLM or VLLM.startswith("http"), reason="make test-vllm runs it"),
]

COMMON = {
    "vocab_size": 41,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
    "dtype": "float32",
}
MIXTURE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
FAMILIES = {
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    "qwen3_moe": {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], **MIXTURE},
}


@torch.no_grad()
def truth(model, prompt, ids) -> torch.Tensor:
    whole = torch.tensor([*prompt, *ids])
    hidden = model(whole, torch.arange(len(whole)), causal_attend)
    logprobs = model.logits(hidden).log_softmax(-1)
    return logprobs[:-1].gather(1, whole[1:, None]).squeeze(1)[len(prompt) - 1 :]


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_arrive_whole_again_and_again(family, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**COMMON, **FAMILIES[family]}))
    write_tokenizer(tmp_path)
    dims = dims_of(tmp_path)
    settings = server_settings(
        tmp_path, dims=dims, max_context=64, python=VLLM, start_timeout_s=240
    )
    params = SamplingParams(max_new_tokens=16)
    request = Request(id="a", prompt_ids=(5, 6, 7), params=params, seeds=(1, 2, 3))

    async def main():
        sampler = await vllm.start(settings, "vllm-0", tmp_path / "vllm.log")
        try:
            for version in (1, 2, 3):
                model = create_model(dims, seed=version)
                receipt = await sampler.install(version, list(iter_hf(model)))
                assert receipt.digest == digest_of(iter_hf(model)).hex()
                for g in await sampler.generate(request):
                    wanted = truth(model, request.prompt_ids, g.ids)
                    # fp32 by other kernels, over two layers
                    torch.testing.assert_close(torch.tensor(g.logprobs), wanted, atol=1e-4, rtol=0)
        finally:
            await sampler.close()

    asyncio.run(main())


FP8 = {
    **{**COMMON, "hidden_size": 256, "intermediate_size": 128, "num_key_value_heads": 4},
    **{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    **{"initializer_range": 0.1, "dtype": "bfloat16"},
}


@pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(), reason="vLLM's kernel for fp8 weights needs AMX"
)
def test_weights_in_fp8_are_computed_with_again_and_again(tmp_path):
    """The server is closer to the weights as rounded than to those that were published."""
    (tmp_path / "config.json").write_text(json.dumps(FP8))
    write_tokenizer(tmp_path)
    dims = dims_of(tmp_path)
    settings = server_settings(
        tmp_path,
        dims=dims,
        dtype="bfloat16",
        max_context=64,
        python=VLLM,
        start_timeout_s=240,
        weight_dtype="fp8",
    )
    params = SamplingParams(max_new_tokens=16)
    request = Request(id="a", prompt_ids=(5, 6, 7), params=params, seeds=(1, 2, 3))

    async def main():
        sampler = await vllm.start(settings, "vllm-0", tmp_path / "vllm.log")
        try:
            for version in (1, 2, 3):
                model, rounded = (create_model(dims, seed=version) for _ in range(2))
                weights = [(name, tensor.bfloat16()) for name, tensor in iter_hf(model)]
                small = dequantised(quantised(weights), torch.float32)
                install_hf(rounded, [(name, tensor.float()) for name, tensor in small])
                receipt = await sampler.install(version, weights)
                assert receipt.digest == digest_of(weights).hex()
                for g in await sampler.generate(request):
                    gaps = [
                        (truth(one, request.prompt_ids, g.ids) - torch.tensor(g.logprobs)).abs()
                        for one in (rounded, model)
                    ]
                    # Over three versions 0.018 and 0.07; other weights differ by more than 1.
                    assert gaps[0].mean() < 0.03 < 0.05 < gaps[1].mean()
        finally:
            await sampler.close()

    asyncio.run(main())
