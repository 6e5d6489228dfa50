"""SmolLM3: Llama, with no rotary positions on every fourth layer."""

from __future__ import annotations

from pentad.models.config_reader import ConfigReader, ConfigValues
from pentad.models.spec import ModelSpec, sizes

DEFAULTS = {
    "num_key_value_heads": 4,
    "rope_theta": 2e6,
    "pad_token_id": 128004,
    "tie_word_embeddings": True,
}


def unturned(read: ConfigValues, num_layers: int) -> tuple[bool, ...]:
    """`no_rope_layers` has a 1 for each layer with rotary; else every n-th layer has none."""
    given = read.hf.get("no_rope_layers")
    if given is None:
        interval = read.whole("no_rope_layer_interval", 4)
        return tuple((layer + 1) % interval == 0 for layer in range(num_layers))
    is_list = isinstance(given, list | tuple) and len(given) >= num_layers
    is_list = is_list and all(one in (0, 1) for one in given)
    rule = f"must be a list of 0 and 1 for at least {num_layers} layers"
    read.must(is_list, "no_rope_layers", given, rule)
    return tuple(not one for one in given[:num_layers]) if is_list else ()


SPEC = ModelSpec(
    family="smollm3",
    read_dims=ConfigReader(defaults=DEFAULTS, unturned=unturned),
    classes=("SmolLM3ForCausalLM", "SmolLM3ForSequenceClassification"),
    variants={
        "every second layer unturned": {"no_rope_layer_interval": 2},
        "layers unturned by a list": {"no_rope_layers": [0, 1, 0]},
    },
    public={
        "HuggingFaceTB/SmolLM3-3B": sizes(
            2048, 11008, 36, 16, 4, 128256, tied=True, rope_theta=5e6, max_position=65536
        )
    },
)
