"""Cases of `verify-parallel`: the given model at a small size, and the layouts to test."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from pentad.config.load import load_config
from pentad.config.resolve import resolve
from pentad.config.rules.layout import layout_problems
from pentad.config.schema import Config
from pentad.core.dims import ModelDims
from pentad.core.errors import Problem, UserError
from pentad.core.layout import Component, Layout, divisors, parse_allocation
from pentad.models.catalog import known_config
from pentad.models.families import dims_of, known_families, read_config

SMALL: dict[str, Any] = {
    "hidden_size": 48,
    "head_dim": 8,
    "vocab_size": 509,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
"""Small sizes; 509 is prime, so every tp splits the vocabulary unevenly."""
FAMILY: dict[str, Any] = {
    **SMALL,
    "intermediate_size": 64,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
FAMILY_EXPERTS: dict[str, Any] = {
    **dict.fromkeys(("num_experts", "n_routed_experts"), 8),
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
    "first_k_dense_replace": 1,
}
SHARED_EXPERTS = {"shared_expert_intermediate_size": 32, "n_shared_experts": 2}
"""Key names of all families; each family reads its own."""


@dataclass(frozen=True, slots=True)
class ParallelSubject:
    """The model under test, and the engine settings of its recipe."""

    name: str
    hf_config: dict[str, Any]
    dims: ModelDims
    config: Config
    folder: str | None = None
    """Folder of its weights; None if it has none."""


@dataclass(frozen=True, slots=True)
class LayoutCase:
    """One layout to test."""

    text: str
    layout: Layout

    @property
    def backend(self) -> str:
        return actor_of(self.text).backend


# The model


def read_subject(words: list[str]) -> ParallelSubject:
    """Reads the subject from a recipe, a model folder, a hub name, or the name of a family."""
    if not words or "=" in words[0]:
        remedy = "name a recipe, a model's folder, a public name or a family, such as qwen3_moe"
        raise UserError(Problem("model", "is not given", remedy))
    name, *overrides = words
    if Path(name).suffix in (".yaml", ".yml"):
        config = load_config(name, overrides)
        if config.actor.path is None:
            raise UserError(Problem(f"{name}: actor.path", "is not given", "add actor.path=..."))
        name = config.actor.path
    else:
        config = load_config(None, overrides)
    if (Path(name) / "config.json").is_file():
        hf_config = read_config(name)
        has_weights = any(Path(name).glob("*.safetensors"))
        return ParallelSubject(
            name, hf_config, dims_of(hf_config), config, name if has_weights else None
        )
    known = known_config(name)
    if known is not None:
        return ParallelSubject(name, known, dims_of(known), config)
    if name in known_families():
        hf_config = family_config(name)
        return ParallelSubject(name, hf_config, dims_of(hf_config), config)
    families = ", ".join(known_families())
    remedy = (
        f"give a recipe, a folder with config.json, a public name such as Qwen3-8B, or {families}"
    )
    raise UserError(Problem(f"model = {name}", "is neither a folder nor known", remedy))


def family_config(name: str) -> dict[str, Any]:
    """A small config of a family, with one dense layer if it has experts."""
    given = {"model_type": name, **FAMILY}
    dims = dims_of(given)
    if not dims.num_experts:  # no experts in the family's defaults
        return {**given, "tie_word_embeddings": True}
    return {**given, **FAMILY_EXPERTS, **(SHARED_EXPERTS if dims.shared_expert_size else {})}


def shrink(
    hf_config: dict[str, Any], dims: ModelDims, cases: list[LayoutCase], stages: int
) -> dict:
    """Shrinks the config; keeps heads, experts, options and sizes that layouts must divide."""
    layers = min(dims.num_layers, max(4, stages))
    ways = math.lcm(*(width for case in cases for width in (case.layout.tp, case.layout.etp)))
    found = {**hf_config, **SMALL, "num_hidden_layers": layers, "intermediate_size": 16 * ways}
    tokens = ("pad_token_id", "bos_token_id", "eos_token_id")
    for key in ("dtype", "torch_dtype", "per_layer_config", *tokens):
        found.pop(key, None)
    for key, value in found.items():
        if isinstance(value, list) and len(value) == dims.num_layers:  # one for each layer
            found[key] = value[:layers]
    if dims.sliding_window is not None:
        found |= {"sliding_window": 7, "max_window_layers": layers // 2}
    if dims.num_experts:
        found["moe_intermediate_size"] = 8 * math.lcm(*(case.layout.etp for case in cases))
        if found.get("shared_expert_intermediate_size"):
            found["shared_expert_intermediate_size"] = 24
        if found.get("first_k_dense_replace"):  # at least one mixture layer
            found["first_k_dense_replace"] = min(found["first_k_dense_replace"], layers - 1)
        found["mlp_only_layers"] = [i for i in range(layers) if not dims.is_moe(i)]
        found["decoder_sparse_step"] = 1
    return found | _shrunk_attention(hf_config, dims) | _shrunk_family(found, dims, layers)


def _shrunk_attention(hf_config: dict[str, Any], dims: ModelDims) -> dict[str, Any]:
    """Shrunk widths that depend on the width of a head."""
    width = SMALL["head_dim"]
    found: dict[str, Any] = {}
    if dims.kv_latent:
        found = {"kv_lora_rank": 16, "v_head_dim": width, "qk_rope_head_dim": width}
        found |= {"qk_nope_head_dim": width, "q_lora_rank": 24 if dims.q_latent else None}
    if hf_config.get("rotary_dim"):
        found["rotary_dim"] = width // 2
    if dims.num_experts and dims.wide_qk_norm and dims.q_dim == dims.hidden_size:
        found["hidden_size"] = dims.num_heads * width
    return found


def _shrunk_family(found: dict[str, Any], dims: ModelDims, layers: int) -> dict[str, Any]:
    """Keys of Hunyuan's experts and of Gemma 4's layers."""
    out: dict[str, Any] = {}
    if "moe_topk" in found:
        out["moe_intermediate_size"] = found["intermediate_size"]
    if dims.value_norm:
        full = next(own for own in reversed(dims.kinds) if own.kv_from is None)
        out = {"global_head_dim": 2 * SMALL["head_dim"]}
        out |= {"num_global_key_value_heads": full.num_kv_heads, "vocab_size_per_layer_input": 521}
        out["hidden_size_per_layer_input"] = 8 if dims.layer_embed_dim else 0
    if dims.shares_keys:  # both kinds of layers need some with their own keys
        kinds = ["sliding_attention", "full_attention"] * layers
        out |= {"num_kv_shared_layers": layers // 2, "layer_types": kinds[:layers]}
    return out


# The layouts


def choose_cases(subject: ParallelSubject, world: int | None, texts: list[str]) -> list[LayoutCase]:
    """The requested layouts, else the recipe's own, or all plain ones of the world."""
    written = [text for item in texts for text in item.replace(",", " ").split()]
    own = subject.config.allocation_mode
    if written:
        cases = read_cases(subject, written)
        wrong = [case for case in cases if world is not None and case.layout.world != world]
        if wrong:
            found = wrong[0]
            rule = f"needs {found.layout.world} ranks, --world is {world}"
            raise UserError(Problem(f"--layouts {found.text}", rule, "leave --world out"))
    elif own is not None and world in (None, actor_of(own).world):
        cases = read_cases(subject, [str(actor_of(own))])
    elif world is None:
        raise UserError(Problem("--world", "is not given", "give --world 4, or --layouts"))
    else:
        cases = list(plain_cases(subject, world))
    alone = [case for case in cases if case.layout.world == 1]
    if alone:
        rule = "one rank is the reference of the comparison"
        raise UserError(Problem(f"layout = {alone[0].text}", rule, "give layouts of several ranks"))
    if not cases:
        rule = f"no layout of {world} ranks fits the model"
        raise UserError(Problem(f"--world {world}", rule, "try another number"))
    return cases


def actor_of(allocation: str) -> Component:
    """The training component of an allocation."""
    found = parse_allocation(allocation)
    trained = found.find("actor") or next((c for c in found if not c.is_inference), None)
    if trained is None:
        rule = "has no component that trains"
        raise UserError(Problem(f"allocation_mode = {allocation}", rule, "add archon:..."))
    return trained


def read_cases(subject: ParallelSubject, texts: list[str]) -> list[LayoutCase]:
    """Parses layouts such as archon:d2t2, with or without the backend; reports all errors
    together."""
    texts = [text if ":" in text.split("(")[0] else f"archon:{text}" for text in texts]
    problems = [problem for text in texts for problem in case_problems(subject, text)]
    if problems:
        raise UserError(problems)
    replicas = subject.config.actor.archon.dp_replicate
    cases = [LayoutCase(text, actor_of(text).layout(replicas)) for text in texts]
    if len(backends := {case.backend for case in cases}) > 1:
        rule = f"have the backends {' and '.join(sorted(backends))}, and names of weights differ"
        raise UserError(Problem(f"layouts = {', '.join(texts)}", rule, "give those of one backend"))
    return cases


def config_at(subject: ParallelSubject, text: str) -> Config:
    """The resolved config of a run of the recipe with this layout."""
    return resolve(subject.config.model_copy(update={"allocation_mode": text}))[0]


def case_problems(subject: ParallelSubject, text: str) -> list[Problem]:
    """All problems that `plan` would report for the layout."""
    config = config_at(subject, text)
    problems = layout_problems(config, subject.dims)
    if problems:
        return problems
    backends = {component.backend for component in config.allocation}
    if others := backends - {"archon", "fsdp"}:
        rule = f"only archon and fsdp are run here, not {', '.join(sorted(others))}"
        return [Problem(f"layout = {text}", rule, "give only the training layout")]
    return []


def plain_cases(subject: ParallelSubject, world: int) -> Iterator[LayoutCase]:
    """All layouts of the world over data, pipeline, tensor and context parallelism that fit the
    model, with maximal expert parallelism."""
    for d, p, t in product(divisors(world), repeat=3):
        if world % (d * p * t):
            continue
        sizes = {"d": d, "p": p, "t": t, "c": world // (d * p * t)}
        dense = "archon:" + "".join(f"{letter}{n}" for letter, n in sizes.items() if n > 1)
        experts = subject.dims.num_experts
        ranks = world // p
        widths = [e for e in divisors(ranks) if 1 < e <= experts]
        for text in [dense, *([f"{dense}e{widths[-1]}"] if widths else [])]:
            if not case_problems(subject, text):
                yield from read_cases(subject, [text])
