"""The families whose layers differ from Llama's: packed rows, the sampler, counts and refusals.

`verify-model` (`test_verify_model.py`) holds logits, gradients and files against transformers.
"""

import asyncio
import copy

import pytest
import torch
from closeness import assert_logprobs
from family_toys import ALL_CONFIGS, FAMILY_CONFIGS
from sections import sampler_settings

from pentad.core.errors import UserError
from pentad.core.types import Request, SamplingParams
from pentad.engine.section import LoraConfig
from pentad.infer.sampler import EmbeddedSampler
from pentad.models.catalog import public_dims
from pentad.models.decoder import causal_attend
from pentad.models.families import dims_of, known_families, lora_map_of, lora_words, spec_of
from pentad.models.registry import create_model
from pentad.ops.attention import build_attend

PROMPTS = [[(3 * i + 7 * j) % 37 for j in range(length)] for i, length in enumerate((1, 6, 21))]


def bent_model(family):
    """Norms and biases are moved off the ones and zeros they begin at."""
    model = create_model(dims_of(ALL_CONFIGS[family]), seed=3)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.ndim == 1 or name.endswith("bias"):
                gen = torch.Generator().manual_seed(sum(map(ord, name)))
                tensor.add_(0.3 * torch.randn(tensor.shape, generator=gen))
    return model


def logits_of(model, ids):
    return model.logits(model(ids, torch.arange(len(ids)), causal_attend))


@pytest.mark.parametrize("family", ALL_CONFIGS)
def test_a_packed_row_is_as_it_is_alone(family):
    model = bent_model(family)
    rows = [torch.tensor([*prompt, 5]) for prompt in PROMPTS]
    lengths = [len(row) for row in rows]
    positions = torch.cat([torch.arange(num) for num in lengths])
    attend = build_attend(lengths, device=torch.device("cpu"), dtype=torch.float32, head_dim=8)
    packed = model.logits(model(torch.cat(rows), positions, attend))
    for row, found in zip(rows, packed.split(lengths), strict=True):
        alone = logits_of(model, row)
        assert (found - alone).abs().max() <= 1e-5 * alone.abs().max()


@pytest.mark.parametrize("family", ALL_CONFIGS)
def test_the_sampler_reports_the_models_logprobs(family):
    """Prompts in chunks of a few tokens, and sequences that give way to others."""
    model = bent_model(family)
    settings = {"max_running": 3, "kv_cache_tokens": 64, "block_size": 4, "max_batch_tokens": 7}
    sampler = EmbeddedSampler(copy.deepcopy(model), sampler_settings(**settings), version=0)
    params = SamplingParams(max_new_tokens=9)
    requests = [
        Request(id=f"r{i}", prompt_ids=prompt, params=params, seeds=(i, 9 + i))
        for i, prompt in enumerate(PROMPTS)
    ]

    async def run():
        found = await asyncio.gather(*(sampler.generate(request) for request in requests))
        await sampler.close()
        return found

    for prompt, generations in zip(PROMPTS, asyncio.run(run()), strict=True):
        for one in generations:
            with torch.no_grad():
                logits = logits_of(model, torch.tensor([*prompt, *one.ids]))[len(prompt) - 1 : -1]
            assert_logprobs(one.logprobs, logits, one.ids)


@pytest.mark.parametrize("family", ALL_CONFIGS)
def test_parameters_are_counted_as_they_are_built(family):
    dims = dims_of(ALL_CONFIGS[family])
    model = create_model(dims)
    assert sum(p.numel() for p in model.parameters()) == dims.num_params


def test_released_models_have_their_published_sizes():
    billions = {
        "SmolLM3-3B": 3.08,
        "gemma-2b": 2.51,
        "gemma-7b-it": 8.54,
        "glm-4-9b-chat-hf": 9.40,
        "gemma-2-2b": 2.61,
        "gemma-2-9b-it": 9.24,
        "gemma-2-27b": 27.2,
        "gemma-3-270m": 0.268,
        "gemma-3-1b-pt": 1.0,
        "phi-4": 14.7,
        "GLM-4-9B-0414": 9.4,
        "GLM-4-32B-0414": 32.6,
        "OLMo-2-1124-7B": 7.3,
        "Olmo-3-1125-32B": 32.2,
        "Qwen3-Next-80B-A3B": 80,
        "EXAONE-4.0-32B": 32.0,
        "EXAONE-4.0-1.2B": 1.28,
        "granite-3.3-2b-base": 2.53,
        "granite-3.3-8b-instruct": 8.17,
        "Seed-OSS-36B-Base": 36.15,
        "gpt-oss-20b": 20.91,
        "gpt-oss-120b": 116.83,
    }
    known = public_dims()
    for name, size in billions.items():
        assert known[name].num_params / 1e9 == pytest.approx(size, rel=0.005), name


def test_every_family_names_the_classes_of_its_folders():
    """An empty name would be the architecture of a saved reward model."""
    assert all(all(spec_of(family).classes) for family in known_families())


@pytest.mark.parametrize("family", ["phi3", "glm", "glm4"])
def test_adapters_on_tensors_that_files_share_are_refused(family):
    dims = dims_of(FAMILY_CONFIGS[family])
    with pytest.raises(UserError, match=f"{family} holds .*gate, up in shared tensors.*name some"):
        lora_words(dims, LoraConfig(rank=4))
    assert lora_map_of(dims, LoraConfig(rank=4, targets=["o", "down"])).entries


REFUSED = {
    "phi3 yarn": (
        "phi3",
        {"rope_scaling": {"type": "yarn", "factor": 2.0, "rope_theta": 1e4}},
        "rope_type = yarn: transformers has default, longrope for phi3",
    ),
    "flat settings where each kind of layer has its own": (
        "olmo3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}},
        "rope_parameters.*must be a JSON object of full_attention and sliding_attention",
    ),
    "a setting that transformers passes over": (
        "olmo3",
        {"rope_parameters": {"full_attention": {"rope_type": "yarn", "truncate": False}}},
        "rope_parameters.full_attention.truncate = False: transformers does not read it",
    ),
    "unturned layers of another number": (
        "smollm3",
        {"no_rope_layers": [1, 0]},
        "no_rope_layers = .*must be a list of 0 and 1 for at least 3 layers",
    ),
    "an mlp bias that is not there": ("olmo2", {"mlp_bias": True}, "mlp_bias"),
    "a limit on scores that transformers passes over": (
        "gemma3_text",
        {"attn_logit_softcapping": 30.0},
        "attn_logit_softcapping = 30.0: a limit on attention scores, which transformers ignores",
    ),
    "a limit on scores that is no number": (
        "gemma2",
        {"attn_logit_softcapping": "high"},
        "attn_logit_softcapping = high: must be a number above 0",
    ),
    "a switch of attention to later tokens": (
        "gemma2",
        {"use_bidirectional_attention": True},
        "use_bidirectional_attention = True: attention to later tokens is not supported",
    ),
    "a limit on logits that is no number": (
        "gemma3_text",
        {"final_logit_softcapping": -1},
        "final_logit_softcapping = -1: must be a number above 0",
    ),
    "heads that differ among layers of one kind": (
        "gemma4_text",
        {"per_layer_config": {"1": {"head_dim": 12}}},
        "per_layer_config = .*must give head_dim and num_key_value_heads of all layers without a",
    ),
    "another width of the ffn in one layer": (
        "gemma4_text",
        {"per_layer_config": {str(i): {"intermediate_size": 80} for i in (1, 3, 4)}},
        "per_layer_config = .*and nothing else",
    ),
    "key heads of layers without a window": (
        "gemma4_text",
        {"num_global_key_value_heads": 3},
        "num_global_key_value_heads = 3: must divide num_attention_heads = 8",
    ),
    "later tokens": (
        "gemma4_text",
        {"use_bidirectional_attention": "all"},
        "use_bidirectional_attention = all: text would attend to later tokens; only null",
    ),
    "a layer that has no keys to read": (
        "gemma4_text",
        {"num_kv_shared_layers": 4},
        "num_kv_shared_layers = 4: each of the last layers needs an earlier one of its kind",
    ),
    "tokens without a row": (
        "gemma4_text",
        {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 36},
        "vocab_size_per_layer_input = 36: must be at least vocab_size = 37",
    ),
    "partial rotary of another kind": (
        "gemma4_text",
        {
            "rope_parameters": {
                "full_attention": {
                    **{"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
                    "partial_rotary_factor": 0.5,
                }
            }
        },
        "rope_parameters.full_attention.partial_rotary_factor = 0.5: .*proportional only",
    ),
    "silu where gelu is built": (
        "gemma3_text",
        {"hidden_activation": "silu"},
        "hidden_activation = 'silu', only gelu_pytorch_tanh is built",
    ),
    "queries that cannot grow": (
        "ministral3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        "rope_parameters.llama_4_scaling_beta = None: missing(.|\n)*original_max_position_embed",
    ),
    "another activation": ("glm4", {"hidden_act": "gelu"}, "hidden_act = 'gelu', only silu"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_family_does_not_do_is_refused_by_name(case):
    family, changes, sentence = REFUSED[case]
    with pytest.raises(UserError, match=sentence):
        dims_of({**FAMILY_CONFIGS[family], **changes})


def test_queries_that_grow_by_nothing_are_as_they_are():
    """As in released folders: 0 is a value of the growth, and of mscale_all_dim no value."""
    rope = FAMILY_CONFIGS["ministral3"]["rope_parameters"]
    flat = {**rope, "llama_4_scaling_beta": 0.0, "mscale": 1.0, "mscale_all_dim": 0.0}
    dims = dims_of({**FAMILY_CONFIGS["ministral3"], "rope_parameters": flat})
    assert dims.query_growth == 0.0 and "mscale_all_dim" not in dims.rope_scaling
    rope = {**flat, "llama_4_scaling_beta": -0.1}
    with pytest.raises(UserError, match="llama_4_scaling_beta = -0.1: must be a number above 0"):
        dims_of({**FAMILY_CONFIGS["ministral3"], "rope_parameters": rope})
