"""Keys of other systems that have another name in Pentad or do not exist there: the tables of
`other_systems.json`, and the answers to unknown keys that follow from them."""

from __future__ import annotations

import difflib
import json
import re
from importlib.resources import files
from typing import Any

from pentad.core.errors import Problem

LORA = re.compile(r"(^|[._])(lora|qlora|peft)([._]|$)")
"""Matches the name of every LoRA key: `lora.r`, `use_peft`, `actor.lora_rank`, `peft_config.r`."""
TABLES: dict[str, dict[str, Any]] = json.loads(
    (files("pentad.config") / "other_systems.json").read_text(encoding="utf-8")
)
LORA_NAMES: dict[str, str] = TABLES["lora_names"]
"""Last word of a LoRA key of another system -> its name in `actor.lora`."""
NO_LORA: dict[str, str] = TABLES["no_lora"]
"""Part of a LoRA key -> why it is not supported."""
TRL, VERL, MOE_ENGINE, RLINF = (
    {key: (here, remark) for key, (here, remark) in TABLES[system].items()}
    for system in ("TRL", "verl", "moe-engine", "RLinf")
)
"""Argument of TRL's GRPOConfig, SFTConfig and their parents, and key of verl, of moe-engine and of
RLinf's Megatron recipes -> (key here, remark)."""
READ: dict[str, str] = TABLES["read"]
"""Keys of other systems -> Pentad's key that takes their value unchanged."""
NO_CHOICE: dict[str, str] = TABLES["no_choice"]
"""Key of another system -> why Pentad has no such key."""
REMARKED = {**TRL, **VERL, **MOE_ENGINE, **RLINF}
SPELLED: dict[str, str] = (
    TABLES["spelled"] | READ | {key: here for key, (here, _) in REMARKED.items()}
)
"""Key of another system -> key here, where name similarity would not find it."""
WORDS: dict[str, str] = {
    **{key.rpartition(".")[2]: here for key, (here, _) in VERL.items()},
    **{key: here for key, (here, _) in TRL.items()},
    **TABLES["words"],
}
"""Last word of another system's key, in any block -> key here."""
TOO_COMMON = ("enable", "len", "model", "n", "name", "path")
"""Words too general for WORDS: their meaning differs between blocks."""


def lora_answer(key: str, where: str) -> Problem | None:
    """The problem of a LoRA key that is not in `actor.lora`; None for any other key."""
    if not LORA.search(key) or hint(key):
        return None
    word = key.rpartition(".")[2]
    for part, reason in NO_LORA.items():
        if part in word:
            return Problem(where, reason, "leave it out")
    if name := LORA_NAMES.get(word):
        return Problem(where, "there is no such key", f"its name here is actor.lora.{name}")
    keys = ("rank", "alpha", "targets", "experts", "init_path")
    near = difflib.get_close_matches(word, keys, n=1, cutoff=0.5)
    remedy = f"did you mean actor.lora.{near[0]}?" if near else ""
    remedy = remedy or f"the keys of actor.lora are {', '.join(keys[:-1])} and {keys[-1]}"
    return Problem(where, "there is no such key", remedy)


def hint(key: str) -> str:
    """The remedy for a key of another system, such as its name here; empty if unknown."""
    if reason := NO_CHOICE.get(key):
        return f"{reason}: leave it out"
    here, remark = REMARKED.get(key, (SPELLED.get(key, ""), ""))
    return f"its name here is {here}" + (f" ({remark})" if remark else "") if here else ""


def by_last_word(key: str) -> str:
    """Pentad's key for the last word of an unknown key; in the block `critic`, the critic's key."""
    block, _, word = key.rpartition(".")
    here = "" if word in TOO_COMMON else WORDS.get(word, "")
    is_critic = block.partition(".")[0] == "critic"
    return here.replace("actor.", "critic.", 1) if is_critic else here


def is_block(key: str) -> bool:
    """Whether a block of that name has keys known from other systems."""
    names = (*SPELLED, *NO_CHOICE)
    return not LORA.search(key) and any(name.startswith(f"{key}.") for name in names)


HALF = ("fp16", "float16", "half")
"""Names of fp16, which other systems train in."""
