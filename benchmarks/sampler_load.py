"""What benchmarks of samplers and servers share: models, requests, and the truth about a draw."""

from __future__ import annotations

from dataclasses import replace

import torch

from pentad.core.dims import ModelDims
from pentad.core.types import Generation, Request, SamplingParams
from pentad.models.decoder import Decoder, causal_attend
from pentad.models.registry import build_model

QWEN3_06B = ModelDims(
    family="qwen3",
    vocab_size=151936,
    hidden_size=1024,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=3072,
    tie_embeddings=True,
    qk_norm=True,
    rope_theta=1e6,
    max_position=40960,
)
MOE_SLICE = replace(
    QWEN3_06B,
    family="qwen3_moe",
    hidden_size=2048,
    num_layers=8,
    num_heads=32,
    num_kv_heads=4,
    intermediate_size=6144,
    tie_embeddings=False,
    num_experts=128,
    num_experts_per_token=8,
    moe_intermediate_size=768,
    moe_layers=(True,) * 8,
)
PROMPT, NEW = 128, 256


def requests(num: int, *, n: int = 1, prompt: int = PROMPT, new: int = NEW) -> list[Request]:
    generator = torch.Generator().manual_seed(1)
    params = SamplingParams(max_new_tokens=new)
    return [
        Request(
            id=f"r{i}",
            prompt_ids=tuple(torch.randint(151936, (prompt,), generator=generator).tolist()),
            params=params,
            seeds=tuple(range(n * i, n * i + n)),
        )
        for i in range(num)
    ]


def random_model(dims: ModelDims, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    """Random weights drawn on the device: seconds sooner than `create_model`."""
    model = build_model(dims, device="cuda", dtype=dtype)
    generator = torch.Generator("cuda").manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, dims.initializer_range, generator=generator)
    return model


@torch.inference_mode()
def forced(model: Decoder, request: Request, generation: Generation) -> torch.Tensor:
    """Log-probs of what was drawn, by one plain forward over the whole sequence."""
    ids = torch.tensor([*request.prompt_ids, *generation.ids], device="cuda")
    hidden = model(ids, torch.arange(len(ids), device="cuda"), causal_attend)
    logprobs = model.logits(hidden).float().log_softmax(-1)[:-1].gather(1, ids[1:, None])
    return logprobs.squeeze(1)[len(request.prompt_ids) - 1 :].cpu()
