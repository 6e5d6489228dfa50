"""A model file of a family that the package does not have: CWM is Llama with windows on all layers
but every fourth."""

from pentad.models.config_reader import ConfigReader
from pentad.models.spec import ModelSpec, sizes

DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "sliding_window": 8192,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 1e6,
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


def slides(layer: int, first: int) -> bool:
    return layer % 4 != 0


SPEC = ModelSpec(
    family="cwm",
    read_dims=ConfigReader(
        defaults=DEFAULTS, qkv_bias=False, out_bias=False, slides=slides, window_switch=True
    ),
    classes=("CwmForCausalLM", "CwmForSequenceClassification"),
    variants={"windows by their pattern": {"sliding_window": 5}},
    public={"facebook/cwm": sizes(6144, 21504, 64, 48, 8, 128256, head_dim=128)},
)
