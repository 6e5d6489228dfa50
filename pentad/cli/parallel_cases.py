"""What `verify-parallel` runs: the model it is given, made small, and the layouts to try."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from pentad.config.catalog import known_model
from pentad.config.load import load_config
from pentad.config.rules.layout import layout_problems
from pentad.config.schema import Config
from pentad.core.dims import ModelDims, dims_from_hf
from pentad.core.errors import Problem, UserError
from pentad.core.layout import Component, Layout, divisors, parse_allocation
from pentad.models.families import known_families, read_config

SMALL: dict[str, Any] = {
    "hidden_size": 48,
    "head_dim": 8,
    "vocab_size": 509,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
"""509 is prime: every tp cuts the vocabulary unevenly."""
FAMILY: dict[str, Any] = {
    **SMALL,
    "intermediate_size": 64,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
FAMILY_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_token": 3,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}


@dataclass(frozen=True, slots=True)
class ParallelSubject:
    """What is verified: a model, and the settings a recipe gives its engine."""

    name: str
    hf_config: dict[str, Any]
    dims: ModelDims
    config: Config
    folder: str | None = None
    """Where its weights are, if it has some."""


@dataclass(frozen=True, slots=True)
class LayoutCase:
    """One layout to run."""

    text: str
    layout: Layout


# What is verified


def read_subject(words: list[str]) -> ParallelSubject:
    """From a recipe, a model's folder, a public name, or the name of a family."""
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
            name, hf_config, dims_from_hf(hf_config), config, name if has_weights else None
        )
    known = known_model(name)
    if known is not None:
        return ParallelSubject(name, config_of(known), known, config)
    if name in known_families():
        hf_config = family_config(name)
        return ParallelSubject(name, hf_config, dims_from_hf(hf_config), config)
    families = ", ".join(known_families())
    remedy = (
        f"give a recipe, a folder with config.json, a public name such as Qwen3-8B, or {families}"
    )
    raise UserError(Problem(f"model = {name}", "is neither a folder nor known", remedy))


def family_config(name: str) -> dict[str, Any]:
    """A small model of a family, with one dense layer where it has experts."""
    given = {"model_type": name, **FAMILY}
    if "moe" in name:  # a config that names none has no experts, unless its family's default does
        given |= {"num_experts": FAMILY_EXPERTS["num_experts"]}
    dims = dims_from_hf(given)
    if not dims.num_experts:
        return {**given, "tie_word_embeddings": True}
    dense = 0 if dims.router_bias else 1
    layers = tuple(layer != dense for layer in range(dims.num_layers))
    shared = 2 * FAMILY_EXPERTS["moe_intermediate_size"] if dims.shared_expert_size else 0
    dims = replace(dims, **FAMILY_EXPERTS, shared_expert_size=shared, moe_layers=layers)
    return {**config_of(dims), "initializer_range": SMALL["initializer_range"]}


def config_of(dims: ModelDims) -> dict[str, Any]:
    """A HF config with the given dimensions."""
    found: dict[str, Any] = {
        "model_type": dims.family,
        "vocab_size": dims.vocab_size,
        "hidden_size": dims.hidden_size,
        "intermediate_size": dims.intermediate_size,
        "num_hidden_layers": dims.num_layers,
        "num_attention_heads": dims.num_heads,
        "num_key_value_heads": dims.num_kv_heads,
        "head_dim": dims.head_dim,
        "max_position_embeddings": dims.max_position,
        "rope_theta": dims.rope_theta,
        "tie_word_embeddings": dims.tie_embeddings,
    }
    if dims.rotary_dim:
        found["partial_rotary_factor"] = dims.rotary_dim / dims.head_dim
    if dims.num_experts:
        found |= {
            "num_experts_per_tok": dims.num_experts_per_token,
            "moe_intermediate_size": dims.moe_intermediate_size,
            "norm_topk_prob": dims.norm_topk_prob,
            **(_biased_mixture(dims) if dims.router_bias else _mixture(dims)),
        }
    return found


def _mixture(dims: ModelDims) -> dict[str, Any]:
    found: dict[str, Any] = {
        "num_experts": dims.num_experts,
        "mlp_only_layers": [i for i in range(dims.num_layers) if not dims.is_moe(i)],
    }
    if dims.shared_expert_size:
        found["shared_expert_intermediate_size"] = dims.shared_expert_size
    return found


def _biased_mixture(dims: ModelDims) -> dict[str, Any]:
    return {
        "n_routed_experts": dims.num_experts,
        "n_shared_experts": dims.shared_expert_size // dims.moe_intermediate_size,
        "first_k_dense_replace": sum(not dims.is_moe(i) for i in range(dims.num_layers)),
        "routed_scaling_factor": dims.router_scale,
        "attention_bias": dims.qkv_bias,
        "use_qk_norm": dims.qk_norm,
    }


def shrink(
    hf_config: dict[str, Any], dims: ModelDims, cases: list[LayoutCase], stages: int
) -> dict:
    """The config made small; heads, experts and switches stay, and what layouts must divide."""
    layers = min(dims.num_layers, max(4, stages))
    ways = math.lcm(*(case.layout.tp for case in cases))
    found = {**hf_config, **SMALL, "num_hidden_layers": layers, "intermediate_size": 16 * ways}
    for key in ("dtype", "torch_dtype", "pad_token_id", "bos_token_id", "eos_token_id"):
        found.pop(key, None)
    if found.get("layer_types"):
        found["layer_types"] = found["layer_types"][:layers]
    if dims.sliding_window is not None:
        found |= {"sliding_window": 7, "max_window_layers": layers // 2}
    if dims.num_experts:
        found["moe_intermediate_size"] = 8 * math.lcm(*(case.layout.etp for case in cases))
        if found.get("shared_expert_intermediate_size"):
            found["shared_expert_intermediate_size"] = 24
        if found.get("first_k_dense_replace"):  # at least one layer is a mixture
            found["first_k_dense_replace"] = min(found["first_k_dense_replace"], layers - 1)
        found["mlp_only_layers"] = [i for i in range(layers) if not dims.is_moe(i)]
        found["decoder_sparse_step"] = 1
    return found


# Which layouts


def choose_cases(subject: ParallelSubject, world: int | None, texts: list[str]) -> list[LayoutCase]:
    """The layouts asked for; else the recipe's own, or all plain ones of the world."""
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
        rule = "one rank is what the others are held against"
        raise UserError(Problem(f"layout = {alone[0].text}", rule, "give layouts of several ranks"))
    if not cases:
        rule = f"no layout of {world} ranks fits the model"
        raise UserError(Problem(f"--world {world}", rule, "try another number"))
    return cases


def actor_of(allocation: str) -> Component:
    """The component that trains."""
    found = parse_allocation(allocation)
    trained = found.find("actor") or next((c for c in found if not c.is_inference), None)
    if trained is None:
        rule = "has no component that trains"
        raise UserError(Problem(f"allocation_mode = {allocation}", rule, "add archon:..."))
    return trained


def read_cases(subject: ParallelSubject, texts: list[str]) -> list[LayoutCase]:
    """Layouts such as archon:d2t2, also without the backend; refused as a run would refuse them,
    all at once."""
    texts = [text if ":" in text.split("(")[0] else f"archon:{text}" for text in texts]
    problems = [problem for text in texts for problem in case_problems(subject, text)]
    if problems:
        raise UserError(problems)
    replicas = subject.config.actor.archon.dp_replicate
    return [LayoutCase(text, actor_of(text).layout(replicas)) for text in texts]


def case_problems(subject: ParallelSubject, text: str) -> list[Problem]:
    """All that `plan` would say against the layout."""
    config = subject.config.model_copy(update={"allocation_mode": text, "resource": None})
    problems = layout_problems(config, subject.dims)
    if problems:
        return problems
    backends = {component.backend for component in parse_allocation(text)}
    if backends != {"archon"}:
        rule = f"only archon is run here, not {', '.join(sorted(backends - {'archon'}))}"
        return [Problem(f"layout = {text}", rule, "give the training layout alone")]
    return []


def plain_cases(subject: ParallelSubject, world: int) -> Iterator[LayoutCase]:
    """Every way to deal the world over data, pipeline, tensor and context, experts as wide as can
    be, that fits the model."""
    for d, p, t in product(divisors(world), repeat=3):
        if world % (d * p * t):
            continue
        sizes = {"d": d, "p": p, "t": t, "c": world // (d * p * t)}
        dense = "archon:" + "".join(f"{letter}{n}" for letter, n in sizes.items() if n > 1)
        experts = subject.dims.num_experts
        ranks = world // p
        widths = [e for e in divisors(ranks) if e > 1 and experts and experts % e == 0]
        for text in [dense, *([f"{dense}e{widths[-1]}"] if widths else [])]:
            if not case_problems(subject, text):
                yield from read_cases(subject, [text])
