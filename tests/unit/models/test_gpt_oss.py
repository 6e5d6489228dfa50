"""gpt-oss against transformers: logits and gradients in both widths, generation token by token.

Packed rows, layouts, stages, files and counts: `test_families.py`, `test_parity.py`,
`test_verify_model.py`; the kernels: `test_sinks.py`.
"""

import asyncio
import importlib.util
import os

import pytest
import torch
import transformers
from closeness import assert_logprobs
from family_toys import FAMILY_CONFIGS
from sections import sampler_settings

from pentad.core.errors import UserError
from pentad.core.types import Request, SamplingParams
from pentad.engine.section import LoraConfig
from pentad.infer.sampler import EmbeddedSampler
from pentad.models.decoder import causal_attend
from pentad.models.families import dims_of, lora_words
from pentad.models.registry import load_model
from pentad.weights.megatron.arguments import unsayable

CONFIG = FAMILY_CONFIGS["gpt_oss"]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """A model of transformers whose every weight has an effect, and its folder."""
    torch.manual_seed(4)
    config = transformers.AutoConfig.for_model(**CONFIG)
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_config(config, **plain).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    folder = tmp_path_factory.mktemp("gpt_oss")
    model.save_pretrained(folder)
    return model, folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logits_and_gradients_are_transformers(theirs, dtype):
    whole, folder = theirs
    model, mine = whole.to(dtype), load_model(folder, dtype=dtype)
    ids = torch.randint(0, 37, (40,), generator=torch.Generator().manual_seed(1))
    wanted = model(ids[None]).logits[0]
    found = mine.logits(mine(ids, torch.arange(40), causal_attend))
    relative = 1e-5 if dtype == torch.float32 else 1e-12  # rounding over three layers
    assert (found - wanted).abs().max() <= relative * wanted.abs().max()
    upstream = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    names = {"self_attn.sinks": "attn.sinks", "mlp.router.bias": "ffn.router.offset"}
    names |= {"mlp.experts.gate_up_proj_bias": "ffn.experts.gate_up_bias"}
    names |= {"mlp.experts.down_proj_bias": "ffn.down_bias"}
    held, own = dict(model.named_parameters()), dict(mine.named_parameters())
    pairs = [
        (held[f"model.layers.{i}.{a}"], own[f"layers.{i}.{b}"])
        for i in range(3)
        for a, b in names.items()
    ]
    true = torch.autograd.grad(wanted, [a for a, _ in pairs], upstream)
    for a, b in zip(true, torch.autograd.grad(found, [b for _, b in pairs], upstream), strict=True):
        assert (b - a).abs().max() <= 10 * relative * a.abs().max()
    whole.float()


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_generation_is_transformers_over_cached_and_fresh_prefixes(theirs, kernels, monkeypatch):
    """Windows of 7 tokens are left behind by prompts and answers; a second turn reuses blocks."""
    can_run = torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
    if kernels == "triton" and not (importlib.util.find_spec("triton") and can_run):
        pytest.skip("the kernels need Triton")
    num_tokens, lengths = 12, (1, 10, 19)
    if kernels == "triton":  # an interpreted program takes milliseconds
        num_tokens, lengths = 2, (10,)
        monkeypatch.setattr("pentad.ops.paged_decode.MIN_PROGRAMS", 1)
    greedy = SamplingParams(max_new_tokens=num_tokens, temperature=0.0)
    model, folder = theirs
    sizes = {"max_running": 4, "kv_cache_tokens": 256, "block_size": 4, "max_batch_tokens": 9}
    settings = sampler_settings(kernels=kernels, keep_prefixes=True, **sizes)
    prompts = [[(5 * i + 3 * j) % 37 for j in range(n)] for i, n in enumerate(lengths)]

    def wanted(prompt):
        ids = torch.tensor([prompt])
        seen = torch.ones_like(ids)  # else prompts that hold the id of padding are masked
        how = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        out = model.generate(ids, attention_mask=seen, max_new_tokens=num_tokens, **how)
        return out[0, len(prompt) :].tolist()

    async def run():
        sampler = EmbeddedSampler(load_model(folder), settings)

        async def answer(i, prompt):
            found = await sampler.generate(
                Request(id=f"r{i}", prompt_ids=prompt, params=greedy, seeds=(i,))
            )
            return prompt, found[0]

        first = await asyncio.gather(*(answer(i, prompt) for i, prompt in enumerate(prompts)))
        longer = [[*prompt, *one.ids, 7, 3] for prompt, one in first]
        second = await asyncio.gather(*(answer(9 + i, x) for i, x in enumerate(longer)))
        await sampler.close()
        return [*first, *second], sampler.stats()

    found, stats = asyncio.run(run())
    assert stats["prefill_tokens_reused"] > 0
    for prompt, one in found:
        assert list(one.ids) == wanted(prompt)
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *one.ids]])).logits[0, len(prompt) - 1 : -1]
        assert_logprobs(one.logprobs, logits, one.ids)


def test_null_rotary_settings_are_those_that_are_left_out():
    left_out = {key: value for key, value in CONFIG.items() if key != "rope_parameters"}
    assert dims_of({**left_out, "rope_parameters": None}) == dims_of(left_out)
    assert dims_of(left_out).rope_scaling["rope_type"] == "yarn"


def test_adapters_are_for_projections_of_attention():
    dims = dims_of(CONFIG)
    with pytest.raises(UserError, match="gpt_oss holds experts in shared tensors.*q, k, v, o"):
        lora_words(dims, LoraConfig(rank=4))
    assert lora_words(dims, LoraConfig(rank=4, targets=["q", "v"]))


def test_megatron_names_what_it_lacks():
    said = " ".join(map(str, unsayable(dims_of(CONFIG))))
    assert "attention sinks, which Megatron's layers do not" in said
    assert "biases of experts, or a limited activation" in said and "gelu" not in said


REFUSED = {
    "quantised": (
        {"quantization_config": {"quant_method": "awq"}},
        "weights are quantised in a way .*; give a folder with 16-bit weights: .*dequantize=True",
    ),
    "another limit": ({"swiglu_limit": 5.0}, "swiglu_limit = 5.0: transformers has 7.0"),
    "an mlp bias": ({"mlp_bias": True}, "mlp_bias"),
    "another activation": ({"hidden_act": "gelu"}, "hidden_act = 'gelu', only silu"),
    "too many experts a token": ({"num_experts_per_tok": 5}, "num_experts_per_tok = 5"),
    "no window": ({"sliding_window": None}, "layer_types = .*set no window"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_built_is_refused_by_name(case):
    changes, sentence = REFUSED[case]
    with pytest.raises(UserError, match=sentence):
        dims_of({**CONFIG, **changes})
