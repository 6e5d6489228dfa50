"""Checks of multimodal folders: compares their text tower with transformers' whole model."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers

from pentad.models.decoder import causal_attend
from pentad.models.families import read_config
from pentad.models.registry import load_model, save_model
from pentad.models.towers import TEXT, TIED, Tower, text_config, tower_of
from pentad.weights.hf import carried_tensors
from pentad_tools.models.cases import (
    NUM_TOKENS,
    PLAIN,
    Fault,
    generator,
    logits_tolerance,
    randomise,
    read_all,
    shrunk,
)
from pentad_tools.models.checks import compare

NO_HEAD_DIM = {
    "hidden_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
"""Sizes where transformers ignores `head_dim`: it is hidden / heads."""
LAYERS = ("depth", "num_hidden_layers")


def check_whole(folder: Path) -> str:
    """Tests a tiny model of the folder's class: logits on text, and loading of its export."""
    config = read_config(folder)
    tower = tower_of(config)
    assert tower is not None, "a folder of a language model"
    config_class = transformers.CONFIG_MAPPING[str(config["model_type"])]
    build = transformers.AutoModelForImageTextToText
    theirs = build.from_config(config_class(**_tiny(config, tower)), **PLAIN).eval()
    randomise(theirs)
    with tempfile.TemporaryDirectory() as scratch:
        source, out = Path(scratch) / "source", Path(scratch) / "out"
        theirs.save_pretrained(source)
        ours = load_model(source)
        ids = torch.randint(ours.dims.vocab_size, (NUM_TOKENS,), generator=generator(1))
        with torch.no_grad():
            expected = theirs(input_ids=ids[None]).logits[0]
            logits = ours.logits(ours(ids, torch.arange(NUM_TOKENS), causal_attend))
        worst = compare(
            "logits of the whole model", logits, expected, logits_tolerance(theirs, ids)
        )
        save_model(ours, out, source_folder=source)
        before, after = read_all(source), read_all(out)
        if before.keys() != after.keys():
            names = sorted(before.keys() ^ after.keys())
            raise Fault(f"{names[0]}: in the folder or in its export, not in both")
        wrong = [name for name in before if not torch.equal(before[name], after[name])]
        if wrong:
            raise Fault(f"{wrong[0]}: the export has other values")
        num_others = len(carried_tensors(source, ours.weight_map))
    return f"logits {worst:.0e}, {num_others} tensors of other towers copied"


def _tiny(config: Mapping[str, Any], tower: Tower) -> dict[str, Any]:
    text = shrunk(text_config(config, tower))
    own = transformers.CONFIG_MAPPING[str(config["model_type"])]().get_text_config().to_dict()
    if tower.read_dims is not None and "head_dim" not in own:
        text |= NO_HEAD_DIM
    rope = text.get("rope_parameters") or text.pop("rope_scaling", None) or {}
    if "mrope_section" in str(config) and isinstance(rope, Mapping):
        turned = text["head_dim"] * (rope.get("partial_rotary_factor") or 1)
        third = int(turned) // 6
        sections = [int(turned) // 2 - 2 * third, third, third]
        text["rope_parameters"] = {**rope, "mrope_section": sections}
    if tower.family:
        del text["model_type"]
    ties = {key: text[key] for key in (TIED,) if key in text}
    out = {**deepcopy(dict(config)), TEXT: text, **ties}
    for part in out.values():
        if isinstance(part, dict) and part is not text:
            part |= {key: 1 for key in LAYERS if key in part}
    for key in ("model_type", "architectures", "dtype", "torch_dtype"):
        out.pop(key, None)
    return out
