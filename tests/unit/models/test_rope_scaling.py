"""Frequencies of every scaling equal transformers' bit for bit; unsupported ones are refused."""

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pentad.core.errors import UserError
from pentad.models.families import dims_of
from pentad.models.layers import Rotary, frequencies

YARN = {"rope_type": "yarn", "factor": 4.0}
CASES = {
    "plain": ({}, 4096),
    "linear": ({"rope_type": "linear", "factor": 2.5}, 4096),
    "llama 3.1": (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        131072,
    ),
    "qwen 2.5 long": ({**YARN, "original_max_position_embeddings": 32768}, 32768),
    "qwen 3 long": ({**YARN, "original_max_position_embeddings": 32768}, 131072),
    "yarn, all settings": (
        {
            **YARN,
            "original_max_position_embeddings": 256,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "mscale": 0.7,
            "mscale_all_dim": 1.3,
            "truncate": False,
        },
        1024,
    ),
    "yarn, settings of 0, which are as left out": (
        {
            **YARN,
            "original_max_position_embeddings": 256,
            "mscale": 1.0,
            "mscale_all_dim": 0.0,
            "beta_slow": 0,
        },
        1024,
    ),
    "yarn, given factor": (
        {**YARN, "original_max_position_embeddings": 256, "attention_factor": 1.7},
        1024,
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("theta", [10000.0, 1e6])
def test_frequencies_are_those_of_transformers(case, theta):
    scaling, max_position = CASES[case]
    config = LlamaConfig(
        head_dim=96,
        max_position_embeddings=max_position,
        rope_parameters={"rope_type": "default", **scaling, "rope_theta": theta},
    )
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        expected, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    ours, our_factor = frequencies(dims_of(config))
    assert torch.equal(ours, expected)
    assert our_factor == factor


def test_angles_at_large_positions_are_those_of_transformers():
    config = LlamaConfig(head_dim=128, rope_theta=1e6)
    positions = torch.tensor([0, 1, 5, 4097, 131071])
    theirs = LlamaRotaryEmbedding(config)(torch.zeros(1, 1, dtype=torch.float32), positions[None])
    ours = Rotary(dims_of(config))(positions, torch.float32)["full"]
    assert torch.equal(ours[0], theirs[0][0]) and torch.equal(ours[1], theirs[1][0])


def test_the_old_key_names_give_the_same():
    old = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    base = {**Qwen2Config().to_dict(), "rope_parameters": None}
    config = {**base, "rope_theta": 1e6, "rope_scaling": old}
    new = Qwen2Config(rope_parameters={**old, "rope_type": "yarn", "rope_theta": 1e6})
    assert torch.equal(frequencies(dims_of(config))[0], frequencies(dims_of(new))[0])


@pytest.mark.parametrize(
    ("scaling", "sentence"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_type = dynamic: its angles change with"),
        (
            {"rope_type": "spiral"},
            "rope_type = spiral: no such scaling; use one of default, linear",
        ),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor, high_freq_factor missing"),
    ],
)
def test_what_cannot_be_honoured_is_refused(scaling, sentence):
    config = {**LlamaConfig().to_dict(), "rope_parameters": {**scaling, "rope_theta": 1e4}}
    with pytest.raises(UserError, match=sentence):
        Rotary(dims_of(config))
