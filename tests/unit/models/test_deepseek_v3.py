"""Latent attention beyond what verify-model sees: random configs, groups of experts, the sampler's
cache of latents, counts, and refusals."""

import asyncio
import copy
import random

import pytest
import torch
import transformers
from family_toys import FAMILY_CONFIGS
from sections import sampler_settings
from transformers.core_model_loading import revert_weight_conversion

from pentad.core.errors import UserError
from pentad.core.sizes import kv_token_bytes
from pentad.core.types import Request, SamplingParams
from pentad.infer.sampler import EmbeddedSampler
from pentad.models.catalog import public_dims
from pentad.models.decoder import causal_attend
from pentad.models.families import dims_of, map_of
from pentad.models.registry import create_model, load_model
from pentad.ops.router import RouteRule, route
from pentad.weights import transfer

CONFIG = FAMILY_CONFIGS["deepseek_v3"]
IDS = torch.randint(0, 37, (40,), generator=torch.Generator().manual_seed(3))


def drawn_config(draw: random.Random) -> dict:
    """Sizes and switches at random; every config is one that transformers can run."""
    size, groups = draw.choice([2, 3]), draw.choice([1, 2, 4])
    chosen, turned, plain = draw.randint(1, groups), 2 * draw.randint(1, 4), 2 * draw.randint(1, 4)
    heads = draw.choice([2, 4])
    scaling = {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 32}
    scaling |= draw.choice([{}, {"mscale": 0.8, "mscale_all_dim": 1.2}, {"mscale_all_dim": 0.7}])
    linear = {"rope_type": "linear", "factor": 2.0, "mscale_all_dim": 0.9}
    return {
        **CONFIG,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": draw.choice([None, 7]),
        "kv_lora_rank": draw.choice([9, 12]),
        "qk_rope_head_dim": turned,
        "head_dim": turned,
        "qk_nope_head_dim": plain,
        "v_head_dim": draw.randint(1, plain + turned),
        "n_routed_experts": groups * size,
        "n_group": groups,
        "topk_group": chosen,
        "num_experts_per_tok": draw.randint(1, min(3, chosen * size)),
        "n_shared_experts": draw.randint(1, 2),
        "first_k_dense_replace": draw.randint(0, 3),
        "norm_topk_prob": draw.random() < 0.5,
        "routed_scaling_factor": draw.choice([1.0, 2.5]),
        "attention_bias": draw.random() < 0.5,
        "rope_interleave": draw.random() < 0.5,
        "rope_parameters": {"rope_theta": 99.0}
        | draw.choice([scaling, linear, {"rope_type": "default"}]),
        "rms_norm_eps": draw.choice([1e-6, 1e-2]),
        "tie_word_embeddings": draw.random() < 0.5,
    }


def compare(config: dict, folder, dtype: torch.dtype, tolerance: float) -> None:
    """Logits and the gradients of a weighted sum of them, against transformers'."""
    config = {key: value for key, value in config.items() if key != "model_type"}
    torch.manual_seed(2)
    read = transformers.AutoConfig.for_model("deepseek_v3", **copy.deepcopy(config))
    plain = {"attn_implementation": "sdpa", "experts_implementation": "eager"}
    theirs = transformers.AutoModelForCausalLM.from_config(read, dtype=dtype, **plain).eval()
    with torch.no_grad():
        for tensor in theirs.state_dict().values():  # with the bias of each router
            tensor.add_(0.2 * torch.randn_like(tensor))
    theirs.save_pretrained(folder)
    ours = load_model(folder, dtype=dtype)
    wanted = theirs(IDS[None]).logits[0]
    found = ours.logits(ours(IDS, torch.arange(len(IDS)), causal_attend))
    assert (found - wanted).abs().max() <= tolerance * wanted.abs().max()
    weight = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(4), dtype=dtype)
    (wanted * weight).sum().backward()
    (found * weight).sum().backward()
    grads = {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None}
    mine = {
        n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in ours.named_parameters()
    }
    own = dict(transfer.iter_sources(mine, map_of(ours.dims)))
    largest = max(grad.abs().max() for grad in grads.values())
    for name, grad in revert_weight_conversion(theirs, grads).items():
        if name not in map_of(ours.dims).tied:
            assert (own[name] - grad).abs().max() <= tolerance * largest, name


def numbers(all_of: int, here: int):
    """Some of the random configs here, the rest in the full suite."""
    return [pytest.param(i, marks=[pytest.mark.full] if i >= here else []) for i in range(all_of)]


@pytest.mark.parametrize("number", numbers(100, 6))
def test_random_configs_are_transformers_models(number, tmp_path):
    dtype, tolerance = [(torch.float32, 2e-5), (torch.float64, 1e-6)][number % 2]
    compare(drawn_config(random.Random(number)), tmp_path, dtype, tolerance)


def test_the_best_groups_are_chosen_first():
    """By the two best of each, whatever the sign of the bias; only among them the best experts."""
    logits = torch.tensor([[9.0, -9.0, 1.0, 1.0, -1.0, -1.0], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    bias = torch.full((6,), -3.0)
    rule = RouteRule(2, "sigmoid", num_groups=3, groups_chosen=1, group_size=2)
    weights, chosen = route(logits, rule, bias)
    assert chosen.tolist() == [[2, 3], [0, 1]]
    torch.testing.assert_close(weights, torch.full((2, 2), 0.5))
    assert route(logits, RouteRule(2, "sigmoid"), bias)[1].tolist()[0] == [0, 2]
    assert torch.equal(route(logits, rule, bias, chosen)[0], weights)


def make_model(config=CONFIG):
    model = create_model(dims_of(config), seed=3)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.ndim == 1:
                gen = torch.Generator().manual_seed(sum(map(ord, name)))
                tensor.add_(0.3 * torch.randn(tensor.shape, generator=gen))
    return model


def sample(model, requests, **settings):
    sampler = EmbeddedSampler(model, sampler_settings(**settings), version=0)

    async def run():
        found = [
            await asyncio.gather(*(sampler.generate(one) for one in turn)) for turn in requests
        ]
        stats = sampler.stats()
        await sampler.close()
        return found, stats

    return sampler, *asyncio.run(run())


def request(name, prompt, num=1, **params):
    wanted = SamplingParams(**{"max_new_tokens": 9} | params)
    return Request(id=name, prompt_ids=list(prompt), params=wanted, seeds=tuple(range(num)))


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe_lite"])
def test_tokens_after_cached_prefixes_are_transformers_tokens(family, tmp_path):
    """Greedy, token by token: prompts in chunks, groups over one prompt, and a second turn whose
    prefix is in the cache."""
    config = {key: value for key, value in FAMILY_CONFIGS[family].items() if key != "model_type"}
    torch.manual_seed(5)
    read = transformers.AutoConfig.for_model(family, **copy.deepcopy(config))
    theirs = transformers.AutoModelForCausalLM.from_config(read).eval()
    theirs.save_pretrained(tmp_path)
    prompt = IDS[:22].tolist()

    def continued(ids):
        ids = torch.tensor([ids])
        more = {"attention_mask": torch.ones_like(ids), "eos_token_id": None, "pad_token_id": 0}
        return theirs.generate(ids, do_sample=False, max_new_tokens=9, **more)[0].tolist()

    first = continued(prompt)
    turns = [
        [request("a", prompt, 3, temperature=0.0), request("b", prompt[:5], temperature=0.0)],
        [request("c", [*first, 5, 6], temperature=0.0)],
    ]
    settings = {"keep_prefixes": True, "block_size": 4, "max_batch_tokens": 7}
    _, found, stats = sample(load_model(tmp_path), turns, **settings)
    assert all([*prompt, *one.ids] == first for one in found[0][0])
    assert [*prompt[:5], *found[0][1][0].ids] == continued(prompt[:5])
    assert [*first, 5, 6, *found[1][0][0].ids] == continued([*first, 5, 6])
    assert stats["prefill_tokens_reused"] >= 2 * 22 + 28


def test_the_cache_holds_latents_and_in_strict_mode_keys_and_values():
    dims = dims_of(CONFIG)
    for strict, width in ((False, 12 + 4), (True, 2 * 8 * 10)):
        sampler, _, _ = sample(make_model(), [], strict=strict, block_size=4)
        cache = sampler.engine.runner.cache
        pages = [cache.layer(n) for n in range(3)]
        memory = [x.untyped_storage() for one in pages for x in (one.k_BbKd, one.v_BbKd)]
        held = {one.data_ptr(): one.nbytes() for one in memory}
        assert sum(held.values()) == 4 * cache.num_blocks * 4 * 3 * width
        assert kv_token_bytes(dims, 4, expanded=strict) == 4 * 3 * width


def test_released_models_have_their_published_sizes():
    known = public_dims()
    for name, billions, active, cached in (
        ("DeepSeek-V3", 671.0, 37.6, 61 * 576 * 2),
        ("Moonlight-16B-A3B", 15.96, 2.91, 27 * 576 * 2),
        ("GLM-4.7-Flash", 29.9, 3.9, 47 * 576 * 2),
    ):
        dims = known[name]
        assert dims.num_params / 1e9 == pytest.approx(billions, rel=0.005), name
        assert dims.num_active_params / 1e9 == pytest.approx(active, rel=0.005), name
        assert kv_token_bytes(dims, 2) == cached


REFUSED = {
    "fewer key heads": (
        {"num_key_value_heads": 2},
        "num_key_value_heads = 2: must be num_attention",
    ),
    "another turned width": ({"head_dim": 64}, "head_dim = 64: must be qk_rope_head_dim = 4"),
    "values wider than keys": ({"v_head_dim": 11}, "v_head_dim = 11: must be at most qk_nope_h"),
    "an odd turned part": ({"qk_rope_head_dim": 3}, "qk_rope_head_dim = 3: must be even"),
    "more groups than there are": (
        {"topk_group": 5},
        "topk_group = 5: must be at most n_group = 4",
    ),
    "more experts than chosen groups have": (
        {"num_experts_per_tok": 5},
        "num_experts_per_tok = 5: must be at most the experts of topk_group = 2 groups",
    ),
    "softmax scores": (
        {"scoring_func": "softmax"},
        "scoring_func = softmax: only sigmoid is built",
    ),
    "another choice": ({"topk_method": "greedy"}, "topk_method = greedy: only noaux_tc is built"),
    "a stride of mixtures": ({"moe_layer_freq": 2}, "moe_layer_freq = 2: only 1 is built"),
    "no latent": ({"kv_lora_rank": None}, "kv_lora_rank = 0: must be a whole number"),
    "scores scaled by nothing": (
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "mscale_all_dim": 1.0}},
        "rope_parameters.factor = None: must be given beside mscale_all_dim",
    ),
    "quantised": (
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": None}},
        "its weights are quantised in a way .*; give a folder with 16-bit weights",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_built_is_refused_by_name(case):
    changes, sentence = REFUSED[case]
    with pytest.raises(UserError, match=sentence):
        dims_of({**CONFIG, **changes})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"mlp_layer_types": ["dense"]}, "must name dense or sparse for each of 3 layers"),
        ({"first_k_dense_replace": 2}, "transformers uses mlp_layer_types"),
    ],
)
def test_dense_layers_are_those_that_transformers_reads(changes, sentence):
    with pytest.raises(UserError, match=sentence):
        dims_of({**FAMILY_CONFIGS["glm4_moe_lite"], **changes})


def test_latents_are_not_held_in_8_bits():
    with pytest.raises(
        UserError, match="dtype = fp8: the cache of deepseek_v3 has latents, for which 8 bits are"
    ):
        EmbeddedSampler(make_model(), sampler_settings(kv_cache_dtype="fp8"), version=0)
