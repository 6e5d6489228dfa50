"""Writes the first draft of a model file from a HF config, by the tensor names in transformers.

Tensors with common names become rules; others are listed in comments, to be mapped by hand. Use
`verify-model` to verify the draft.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

from pentad.core.errors import Problem, UserError
from pentad.models.config_reader import dims_from_hf
from pentad.models.families import has_file
from pentad.models.spec import ATTN, DECODER, FFN, LAYER
from pentad.weights.hf import HfFolder
from pentad.weights.map import Glu, Rows, Rule, Stack
from pentad_tools.models.cases import EXPERT_SIZES, SIZES

QKV, GATE_UP = LAYER + "self_attn.qkv_proj.weight", LAYER + "mlp.gate_up_proj.weight"
FUSED = {
    rule.target: rule
    for rule in (
        Rule(ATTN + "q.weight", "Q D", Rows(QKV, "Q+K+K", 0)),
        Rule(ATTN + "k.weight", "K D", Rows(QKV, "Q+K+K", 1)),
        Rule(ATTN + "v.weight", "K D", Rows(QKV, "Q+K+K", 2)),
        Rule(
            FFN + "gate_up.weight", "2 F D", Glu(Rows(GATE_UP, "F+F", 0), Rows(GATE_UP, "F+F", 1))
        ),
    )
}
"""Rules for q, k and v, or gate and up, in one tensor, instead of `DECODER`'s."""
SWITCHES = ("attention_bias", "mlp_bias")
"""Config keys that add tensors; the draft makes their rules conditional."""
CONDITIONS = {
    "has_bias": "dims.qkv_bias",
    "has_out_bias": "dims.out_bias",
    "has_mlp_bias": "dims.mlp_bias",
    "is_moe": "dims.is_moe(layer)",
    "is_dense": "not dims.is_moe(layer)",
}
FACTS = {
    "qkv_bias": "self_attn.q_proj.bias",
    "out_bias": "self_attn.o_proj.bias",
    "mlp_bias": "mlp.down_proj.bias",
    "qk_norm": "self_attn.q_norm.weight",
}
"""Dimension -> tensor whose presence indicates it."""
READ = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps"),
    *("tie_word_embeddings", "attention_bias", "mlp_bias", "initializer_range", "hidden_act"),
    *("rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor"),
    *("original_max_position_embeddings", "use_sliding_window", "layer_types"),
    *("sliding_window", "max_window_layers"),
    *("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"),
    *("norm_topk_prob", "mlp_only_layers", "decoder_sparse_step"),
}
"""Config keys that `dims_from_hf` reads."""
WITHOUT_EFFECT = {
    *("model_type", "use_cache", "pretraining_tp", "transformers_version", "attention_dropout"),
    *("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),
    *("resid_pdrop", "embd_pdrop"),
}
"""Config keys that do not change what a model computes from its weights."""
MAX_PARAMS = 10**8
"""Maximum parameters of a model built for its names, at small sizes; the largest has half."""
UNREAD = "# Config keys that are not read; each that affects the model's output needs code."
DEFAULTS_SAID = '"""What transformers takes for these keys where a config.json leaves them out."""'


def draft(config: Mapping[str, Any], *, plain: bool = False) -> str:
    """Text of a model file for a family that transformers supports. `plain` ignores Pentad's own
    file of the family."""
    family = str(config.get("model_type"))
    if family not in transformers.CONFIG_MAPPING:
        rule = "transformers has no such model_type, so its tensors are not known"
        raise UserError(Problem(f"model_type = {family}", rule, "write the file by hand"))
    is_ours = has_file(family) and not plain  # Pentad can read its config
    defaults = {} if is_ours else _defaults(family)
    always, ever = tensors_of(family, False), tensors_of(family, True)
    rules = _rules(always, ever)
    keys = _unread_keys(family)
    unknown = [f"    # no rule yet: {name} {list(ever[name])}" for name in _unknown(ever)]
    adapter = "" if is_ours else _adapter(config, always, bool(defaults))
    reader = "OURS.read_dims" if is_ours else "read_dims" if adapter else ""
    conditions = [name for name in CONDITIONS if any(f"when={name}," in r for r in rules)]
    functions = [
        f"def {name}(dims: ModelDims, layer: int) -> bool:\n    return {CONDITIONS[name]}"
        for name in conditions
    ] + ([adapter] if adapter else [])
    body = [
        *_imports("\n".join([*functions, *rules]), family if is_ours else ""),
        "",
        *([_folded_defaults(defaults), DEFAULTS_SAID, ""] if defaults else []),
        *(f"\n{function}\n" for function in functions),
        *([""] if functions else []),
        f'LAYER = "{LAYER}"',
        "",
        "RULES = (",
        *rules,
        *unknown,
        ")",
        "",
        *_spec(family, reader, any("{e}" in name for name in ever)),
    ]
    if keys:
        body = [UNREAD, *(f"# not read: {key} = {value!r}" for key, value in keys.items()), *body]
    title = f"{family}, drafted from its transformers config; describe its special features."
    return "\n".join([f'"""{title}"""', "", "from __future__ import annotations", "", *body]) + "\n"


def tensors_of(family: str, switched_on: bool) -> dict[str, tuple[int, ...]]:
    """Patterns of the tensor names that transformers saves, with shapes at tiny sizes."""
    keys = full_config(family)
    tiny = {**SIZES, "tie_word_embeddings": False}
    tiny |= EXPERT_SIZES if "moe_intermediate_size" in keys else {}
    tiny |= {key: switched_on for key in SWITCHES if key in keys}
    model = _build_tiny(family, tiny)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        infos = HfFolder(folder).infos
    return {_pattern(name): info.shape for name, info in infos.items()}


def _build_tiny(family: str, tiny: Mapping[str, Any]) -> transformers.PreTrainedModel:
    """Builds a tiny model in memory, after a check of its size on meta."""
    where, remedy = f"model_type = {family}", "write the file by hand"
    make = transformers.AutoModelForCausalLM.from_config
    try:
        config = transformers.AutoConfig.for_model(family, **tiny)
        with torch.device("meta"):
            num_params = make(config, trust_remote_code=False).num_parameters()
        if num_params <= MAX_PARAMS:
            return make(config, trust_remote_code=False)
    except Exception as error:  # checks raise many types
        rule = f"transformers does not build it at small sizes ({' '.join(str(error).split())})"
        raise UserError(Problem(where, rule, remedy)) from error
    rule = f"it has {num_params:.0e} parameters at small sizes: it has other keys for sizes"
    raise UserError(Problem(where, rule, remedy))


def full_config(family: str) -> dict[str, Any]:
    """The config of a family with all defaults."""
    try:
        config: dict[str, Any] = transformers.AutoConfig.for_model(family).to_dict()
    except Exception as error:  # some need sub-configs
        rule = f"transformers has no config of it by default ({' '.join(str(error).split())})"
        raise UserError(
            Problem(f"model_type = {family}", rule, "write the file by hand")
        ) from error
    return config


def _pattern(name: str) -> str:
    name = re.sub(r"\.layers\.\d+\.", ".layers.{i}.", name)
    return re.sub(r"\.experts\.\d+\.", ".experts.{e}.", name)


def _sources(source: Any) -> list[str]:
    """The HF-on-disk names of a rule's source."""
    if isinstance(source, str):
        return [source]
    if isinstance(source, Rows):
        return [source.source]
    return [name for part in fields(source) for name in _sources(getattr(source, part.name))]


def _text(source: object) -> str:
    match source:
        case str() if source.startswith(LAYER):
            return f'LAYER + "{source.removeprefix(LAYER)}"'
        case str():
            return f'"{source}"'
        case Rows(name, of, part):
            return f'Rows({_text(name)}, "{of}", {part})'
        case Stack(each):
            return f"Stack({_text(each)})"
        case Glu(gate, up):
            return f"Glu({_text(gate)}, {_text(up)})"
    raise AssertionError(f"{source} is not a known source")


def _unknown(names: Mapping[str, Any]) -> list[str]:
    known = {name for rule in (*DECODER, *FUSED.values()) for name in _sources(rule.source)}
    return [name for name in names if name not in known]


def _rules(always: Mapping[str, Any], ever: Mapping[str, Any]) -> list[str]:
    """Source lines of the rules, one entry per rule."""
    has_mixture = any("{e}" in name for name in ever)
    out = []
    for customary in DECODER:
        for rule in (customary, FUSED.get(customary.target, customary)):
            first = _sources(rule.source)[0]
            if first in ever or rule.optional:
                is_always = first in always or rule.optional
                out.append(_rule(rule, _when(first.removeprefix(LAYER), is_always, has_mixture)))
                break
    return out


def _when(suffix: str, is_always: bool, has_mixture: bool) -> str:
    if not is_always:
        if suffix.startswith("mlp."):
            return "has_mlp_bias"
        return "has_out_bias" if "o_proj" in suffix else "has_bias"
    if has_mixture and suffix.startswith("mlp."):
        return "is_moe" if "experts" in suffix or suffix == "mlp.gate.weight" else "is_dense"
    return ""


def _rule(rule: Rule, when: str) -> str:
    parts = [f'"{rule.target}"', f'"{rule.shape}"', _text(rule.source)]
    parts += [f"when={when}"] if when else []
    parts += [f'init="{rule.init}"'] if rule.init != "normal" else []
    parts += [f'tied="{rule.tied}"'] if rule.tied else []
    parts += ["optional=True"] if rule.optional else []
    return _folded(f"Rule({', '.join(parts)})", 4)


def _folded(call: str, indent: int) -> str:
    """Formats a call on one line with a trailing comma, or with one argument per line."""
    pad = " " * indent
    if len(pad + call) < 100 or not call.endswith(")"):
        return f"{pad}{call},"
    name, _, rest = call.partition("(")
    arguments = [_folded(argument, indent + 4) for argument in _arguments(rest[:-1])]
    return "\n".join([f"{pad}{name}(", *arguments, f"{pad}),"])


def _arguments(text: str) -> list[str]:
    out, depth = [""], 0
    for char in text:
        depth += (char == "(") - (char == ")")
        if char == "," and depth == 0:
            out.append("")
        else:
            out[-1] += char
    return [argument.strip() for argument in out]


def _unread_keys(family: str) -> dict[str, Any]:
    """Config keys of the family, with defaults, that Pentad does not read."""
    general = transformers.PretrainedConfig().to_dict().keys() | READ | WITHOUT_EFFECT
    own = full_config(family)
    return {k: v for k, v in own.items() if k not in general and not k.endswith("_token_id")}


def _defaults(family: str) -> dict[str, Any]:
    """Defaults of transformers for missing config keys that differ from Pentad's."""
    full = full_config(family)
    dims, out = dims_from_hf(full), dict[str, Any]()
    for key, value in full.items():
        if key == "model_type":
            continue
        try:
            same = dims_from_hf({k: v for k, v in full.items() if k != key}) == dims
        except UserError:  # required keys
            same = True
        if not same:
            is_rope = key == "rope_parameters"
            out |= {"rope_theta": value["rope_theta"]} if is_rope else {key: value}
    return out


def _folded_defaults(defaults: Mapping[str, Any]) -> str:
    items = [f'"{key}": {value!r}' for key, value in defaults.items()]
    line = f"DEFAULTS = {{{', '.join(items)}}}"
    if len(line) <= 100:
        return line
    return "\n".join(["DEFAULTS = {", *(f"    {item}," for item in items), "}"])


def _adapter(config: Mapping[str, Any], always: Mapping[str, Any], has_defaults: bool) -> str:
    """Source of a config adapter, if the config needs one."""
    dims = dims_from_hf({**config, **dict.fromkeys(SWITCHES, False)})
    read = {
        "qkv_bias": dims.qkv_bias,
        "out_bias": dims.out_bias,
        "mlp_bias": dims.mlp_bias,
        "qk_norm": dims.qk_norm,
    }
    found = {fact: LAYER + suffix in always for fact, suffix in FACTS.items()}
    changes = "".join(f", {fact}={found[fact]}" for fact in FACTS if found[fact] != read[fact])
    window = config.get("sliding_window")
    remark = window and dims.sliding_window is None and not config.get("use_sliding_window")
    if not changes and not remark and not has_defaults:
        return ""
    lines = ["def read_dims(hf: Mapping[str, Any]) -> ModelDims:"]
    if remark:
        lines.append(f"    # sliding_window = {window} is not read; set it and sliding_layers if")
        lines.append("    # the model's layers have a window")
    call = "dims_from_hf({**DEFAULTS, **hf})" if has_defaults else "dims_from_hf(hf)"
    body = f"replace({call}{changes})" if changes else call
    return "\n".join([*lines, f"    return {body}"])


def _imports(text: str, ours: str) -> list[str]:
    """Import lines of the names that the text uses, and of the family's file if it exists."""
    standard = {
        "Mapping[": "from collections.abc import Mapping",
        "replace(": "from dataclasses import replace",
        "Any]": "from typing import Any",
    }
    out = [line for use, line in standard.items() if use in text]
    out += [""] if out else []
    own = {
        "ModelDims": "from pentad.core.dims import ModelDims",
        "dims_from_hf": "from pentad.models.config_reader import dims_from_hf",
    }
    out += [line for use, line in own.items() if use in text]
    out += [f"from pentad.models.families.{ours} import SPEC as OURS"] if ours else []
    words = [word for word in ("Glu", "Rows", "Rule", "Stack") if f"{word}(" in text]
    spec = "from pentad.models.spec import ModelSpec"
    return [*out, spec, f"from pentad.weights.map import {', '.join(words)}"]


def _spec(family: str, reader: str, has_mixture: bool) -> list[str]:
    axes = {"V": "tp", "Q": "tp", "K": "tp", "F": "tp"}
    axes |= {"E": "ep", "M": "etp"} if has_mixture else {}
    plan = ", ".join(f'"{symbol}": "{axis}"' for symbol, axis in axes.items())
    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(family, "")
    scalar = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(family, "")
    return [
        "SPEC = ModelSpec(",
        f'    family="{family}",',
        "    rules=RULES,",
        *([f"    read_dims={reader},"] if reader else []),
        f"    plan={{{plan}}},",
        f'    classes=("{causal}", "{scalar}"),',
        ")",
    ]
