"""Gemma 4: random configs against transformers in float64, what the sampler caches, layouts that
are refused, and folders that hold more than the model needs."""

import asyncio
import json
import random

import pytest
import torch
import transformers
from closeness import assert_logprobs
from family_toys import FAMILY_CONFIGS, FURTHER_CONFIGS, SHARED_KEYS, SIZES
from pydantic import TypeAdapter
from safetensors.torch import load_file, save_file
from sections import sampler_settings

from pentad.config.load import read_config
from pentad.config.resolve import resolve
from pentad.config.rules.layout import layout_problems
from pentad.core.dims import ModelDims
from pentad.core.errors import UserError
from pentad.core.fit import check_fit, strict_problems
from pentad.core.layout import Layout
from pentad.core.sizes import kv_token_bytes
from pentad.core.types import Request, SamplingParams
from pentad.engine.section import LoraConfig
from pentad.infer.sampler import EmbeddedSampler
from pentad.models.catalog import public_dims
from pentad.models.decoder import causal_attend
from pentad.models.families import dims_of, lora_words
from pentad.models.hf_weights import iter_hf
from pentad.models.registry import create_model, load_model
from pentad.ops.attention import build_attend
from pentad.planner.sampling import Sampling
from pentad.planner.sampling import kv_token_bytes as bytes_of_replica
from pentad_tools.models.cases import PLAIN

transformers.utils.logging.disable_progress_bar()
KINDS = ("sliding_attention", "full_attention")
IDS = torch.randint(0, 37, (23,), generator=torch.Generator().manual_seed(3))
MIXTURE = {
    "enable_moe_block": True,
    "num_experts": 5,
    "top_k_experts": 2,
    "moe_intermediate_size": 10,
}
SHARED = FURTHER_CONFIGS[SHARED_KEYS]


def drawn(seed):
    """A config with every part of the family, or without it."""
    draw = random.Random(seed)
    kinds = [draw.choice(KINDS) for _ in range(4)]
    rope = {
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 99.0,
            "partial_rotary_factor": draw.choice([0.25, 0.5, 1.0]),
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": draw.choice([55.0, 99.0])},
    }
    return {
        **SIZES,
        **(MIXTURE if draw.random() < 0.4 else {}),
        "layer_types": ["full_attention", "sliding_attention", *kinds, "full_attention"],
        "num_hidden_layers": 7,
        "num_kv_shared_layers": draw.choice([0, 0, 2, 3, 5]),
        "use_double_wide_mlp": draw.random() < 0.5,
        "hidden_size_per_layer_input": draw.choice([0, 6]),
        "vocab_size_per_layer_input": 40,
        "num_key_value_heads": draw.choice([1, 2, 4]),
        "global_head_dim": draw.choice([8, 12, 20]),
        "num_global_key_value_heads": draw.choice([None, 1, 8]),
        "attention_k_eq_v": draw.random() < 0.5,
        "attention_bias": draw.random() < 0.3,
        "final_logit_softcapping": draw.choice([None, 3.0]),
        "sliding_window": draw.choice([3, 7]),
        "rope_parameters": rope,
        "tie_word_embeddings": draw.random() < 0.5,
        "rms_norm_eps": 0.01,
        "use_bidirectional_attention": draw.choice([None, "vision"]),
    }


@pytest.mark.parametrize("seed", range(6))
def test_logits_and_gradients_are_those_of_transformers(seed, tmp_path):
    """In float64, alone and in a packed row; every parameter is moved off its first value."""
    read = transformers.AutoConfig.for_model("gemma4_text", **drawn(seed))
    theirs = transformers.AutoModelForCausalLM.from_config(read, **PLAIN)
    theirs = theirs.double().eval()
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in theirs.state_dict().values():
            tensor.add_(0.2 * torch.randn(tensor.shape, generator=source, dtype=torch.float64))
    theirs.save_pretrained(tmp_path)
    wanted = theirs(IDS[None]).logits[0]
    weight = torch.randn(wanted.shape, generator=source, dtype=torch.float64)
    (wanted * weight).sum().backward()

    mine = load_model(tmp_path, dtype=torch.float64)
    lengths = [5, len(IDS)]
    attend = build_attend(lengths, device=IDS.device, dtype=torch.float64, head_dim=8)
    positions = torch.cat([torch.arange(num) for num in lengths])
    packed = mine.logits(mine(torch.cat([IDS[:5], IDS]), positions, attend))
    alone = mine.logits(mine(IDS, torch.arange(len(IDS)), causal_attend))
    # transformers' norms, softmax and rotary are in float32 here, too.
    for found in (packed[5:], alone):
        assert (found - wanted).abs().max() < 5e-5 * wanted.abs().max()
    (alone * weight).sum().backward()
    grads = {name: p.grad for name, p in mine.named_parameters() if p.grad is not None}
    for name, entry in mine.weight_map.entries.items():
        if name not in grads or len(entry.regions) != 1:
            continue  # what files hold in pieces, verify-model compares
        grad = dict(theirs.named_parameters())[entry.regions[0].source].grad
        error = float((grads[name] - grad).norm() / grad.norm())
        assert error < 2e-4, f"{name}: relative error {error:.1e}"


def test_files_with_keys_that_shared_layers_do_not_need_are_read(tmp_path):
    own = {key: value for key, value in SHARED.items() if key != "model_type"}
    read = transformers.AutoConfig.for_model("gemma4_text", **own)
    theirs = transformers.AutoModelForCausalLM.from_config(read)
    theirs.save_pretrained(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    for name in ("k_proj", "v_proj"):
        like = held[f"model.layers.0.self_attn.{name}.weight"]
        held[f"model.layers.2.self_attn.{name}.weight"] = torch.ones_like(like)
    save_file(held, tmp_path / "model.safetensors", {"format": "pt"})
    names = dict(iter_hf(load_model(tmp_path)))
    assert "model.layers.0.self_attn.k_proj.weight" in names
    assert "model.layers.2.self_attn.k_proj.weight" not in names


def test_the_cache_holds_each_kind_of_layer_in_its_own_shape():
    dims = dims_of(SHARED)
    # Two layers have keys of their own: four heads of 8 numbers, and four of 12.
    assert kv_token_bytes(dims, 4) == 4 * 2 * 4 * (8 + 12)
    settings = sampler_settings(kv_cache_tokens=64, block_size=4)
    sampler = EmbeddedSampler(create_model(dims), settings, version=0)
    cache = sampler.engine.runner.cache
    held = sum(tensor.nbytes for tensor in cache.held)
    assert held == cache.num_blocks * 4 * kv_token_bytes(dims, 4)
    asyncio.run(sampler.close())
    mixed = dims_of(FAMILY_CONFIGS["gemma4_text"])
    replica = Sampling(dims=mixed, tp=4, sequence_tokens=8, num_sequences=1, max_running=1)
    # Of two sliding layers a rank has one of four heads; of three others one of two, repeated.
    assert bytes_of_replica(replica) == 2 * 2 * (2 * 8 + 3 * 12)


@pytest.mark.parametrize("dtype", ["int8", "auto"])
def test_cached_prefixes_give_the_models_logprobs(dtype):
    model = create_model(dims_of(SHARED), seed=3)
    keys = {"keep_prefixes": True, "block_size": 4, "kv_cache_tokens": 96, "kv_cache_dtype": dtype}
    sampler = EmbeddedSampler(create_model(dims_of(SHARED), seed=3), sampler_settings(**keys))
    first = tuple(int(i) for i in IDS[:14])

    async def turns():
        made = []
        for prompt in (first, (*first, 5), (*first[:9], 7)):
            params = SamplingParams(max_new_tokens=6)
            one = Request(id=str(len(prompt)), prompt_ids=prompt, params=params, seeds=(4,))
            made.append((prompt, (await sampler.generate(one))[0]))
        await sampler.close()
        return made

    for prompt, one in asyncio.run(turns()):
        ids = torch.tensor([*prompt, *one.ids])
        with torch.no_grad():
            logits = model.logits(model(ids, torch.arange(len(ids)), causal_attend))
        own = logits[len(prompt) - 1 : -1]
        if dtype == "auto":
            assert_logprobs(one.logprobs, own, one.ids)
        else:
            near = own.log_softmax(-1).gather(1, torch.tensor(one.ids)[:, None])[:, 0]
            assert (near - torch.tensor(one.logprobs)).abs().max() < 0.3


REFUSED = {
    "stages": (SHARED, Layout(pp=2), "p2 splits the layers of gemma4_text.*for each layer"),
    "stages, shared keys": (
        {**SHARED, "hidden_size_per_layer_input": 0},
        Layout(pp=2),
        "later ones need the keys and values of earlier ones .num_kv_shared_layers.",
    ),
    "key heads of one kind": (
        {**FAMILY_CONFIGS["gemma4_text"], "num_attention_heads": 12}
        | {"num_key_value_heads": 12, "num_global_key_value_heads": 4},
        Layout(tp=6),
        "t6 . c1 = 6 must divide num_kv_heads = 4 or be a multiple",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_layouts_that_would_compute_something_else_are_refused(case):
    config, layout, sentence = REFUSED[case]
    with pytest.raises(UserError, match=sentence):
        check_fit(layout, dims_of(config))


def test_strict_mode_and_adapters_of_experts_are_refused_by_name():
    dims = dims_of(FAMILY_CONFIGS["gemma4_text"])
    (problem,) = strict_problems(Layout(), "the layout", dims)
    assert "gemma4_text has norms of values" in problem.rule
    with pytest.raises(UserError, match="gemma4_text holds experts in shared tensors"):
        lora_words(dims, LoraConfig(rank=4))
    assert lora_words(dims_of(SHARED), LoraConfig(rank=4))


@pytest.mark.parametrize("num_layers", [5, 13])
def test_a_config_is_read_as_transformers_saves_it(num_layers, tmp_path):
    """`per_layer_config` instead of `global_head_dim`, and a last layer without a window."""
    config = {**FAMILY_CONFIGS["gemma4_text"], "num_hidden_layers": num_layers}
    config["layer_types"] = ["full_attention", *["sliding_attention"] * (num_layers - 1)]
    config["use_bidirectional_attention"] = "vision"
    own = {key: value for key, value in config.items() if key != "model_type"}
    read = transformers.AutoConfig.for_model("gemma4_text", **own)
    read.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "global_head_dim" not in saved
    assert ("00" in saved["per_layer_config"]) == (num_layers > 10)
    assert dims_of(saved) == dims_of(config)
    widths = [one.head_dim for one in read.per_layer_config]
    assert [dims_of(saved).of_layer(i).head_dim for i in range(num_layers)] == widths
    assert widths == [12, *[8] * (num_layers - 2), 12]


def test_layers_are_alike_where_a_config_says_so():
    """null in place of `per_layer_config`: transformers then passes over `global_head_dim`."""
    config = {**SHARED, "per_layer_config": None}
    own = {key: value for key, value in config.items() if key != "model_type"}
    read = transformers.AutoConfig.for_model("gemma4_text", **own)
    dims = dims_of(config)
    assert [one.head_dim for one in read.per_layer_config] == [8] * 4
    assert [dims.of_layer(i).head_dim for i in range(4)] == [8] * 4


def test_padding_counted_from_the_end_is_refused_where_the_tables_differ_in_length():
    """torch would freeze another token's row of the table for each layer."""
    with pytest.raises(UserError, match="pad_token_id = -1: is another row of 41 than of vocab"):
        dims_of(SHARED | {"pad_token_id": -1})
    dims = dims_of(SHARED | {"pad_token_id": -1, "vocab_size_per_layer_input": 37})
    assert dims.padding_id == 36


def test_stages_are_refused_in_a_plan():
    keys = ["allocation_mode=archon:d1p2", "actor.path=google/gemma-4-E2B"]
    config, _ = resolve(read_config(None, keys).config)
    said = [str(one) for one in layout_problems(config, public_dims()["gemma-4-E2B"])]
    assert any("later ones need embeddings of the tokens for each layer" in one for one in said)


@pytest.mark.parametrize("name", ["gemma-4-E2B", "gemma-4-26B-A4B"])
def test_dims_by_layer_reach_other_processes(name):
    """As JSON, also after they were asked for: a sampler in its own process is sent them."""
    adapter, dims = TypeAdapter(ModelDims), public_dims()[name]
    layers = [dims.of_layer(i) for i in range(dims.num_layers)]
    sent = adapter.validate_json(adapter.dump_json(dims))
    assert sent == dims and [sent.of_layer(i) for i in range(dims.num_layers)] == layers
    assert len({layer.head_dim for layer in layers}) == 2
