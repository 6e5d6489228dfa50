"""Reads and writes low-rank adapters (LoRA) as PEFT folders with Hugging Face module names.

An adapter adds `alpha / rank * B A` to the weight of a linear module. Its factors are named
`<module>.lora_A.weight` [rank, in] and `<module>.lora_B.weight` [out, rank], where `<module>` is
the name in the base's safetensors files, such as `model.layers.3.self_attn.q_proj`. A factor shared
by the experts of a layer has no expert number; PEFT's files repeat it for each expert.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from pentad.core.errors import Problem, UserError, raise_problems
from pentad.core.files import atomic_folder
from pentad.core.folders import ADAPTER_CONFIG, read_object
from pentad.weights.files import SafeFile
from pentad.weights.hf import write_file, write_json
from pentad.weights.regions import full_box
from pentad.weights.transfer import TensorInfo, is_finite

A, B = ".lora_A.weight", ".lora_B.weight"
CONFIG, FACTORS = ADAPTER_CONFIG, "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Prefix of module names in PEFT's files."""
SUFFIXES = {
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "o": "o_proj",
    "q_a": "q_a_proj",
    "q_b": "q_b_proj",
    "kv_a": "kv_a_proj_with_mqa",
    "kv_b": "kv_b_proj",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
    "head": "lm_head",
}
"""Target word of a recipe -> last name of its modules; `experts` has gate, up and down."""
WORDS = {suffix: word for word, suffix in SUFFIXES.items()} | {"out_proj": "o"}
"""The output of a delta net is an `o`, too."""
NO_FACTORS = re.compile(r"norm|embed|router|^gate$|^shared_expert_gate$")
"""Matches last names of modules without factors: norms, tables, routers."""
ROUTER = re.compile(r"\.(router|gate)\.")
"""Matches layers of routers that are separate modules (`mlp.gate.wg`)."""
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)")
OUTER = {"gate_proj": A, "up_proj": A, "down_proj": B}
"""The factor of an expert's matrix on the side of the hidden dimension."""
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Matrices that servers store as one."""
HARMLESS = {
    *("auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_version"),
    *("peft_type", "task_type", "r", "lora_alpha", "target_modules", "exclude_modules"),
    *("layers_to_transform", "layers_pattern", "megatron_core", "qalora_group_size"),
    *("lora_dropout", "init_lora_weights", "runtime_config", "loftq_config", "eva_config"),
    *("corda_config", "lora_ga_config", "bias"),
}
"""Keys of PEFT's config that are redundant with the factors, or checked elsewhere. Dropout has an
effect only in training."""
SAME_BASE = (True, False, "gaussian", "orthogonal", "eva")
"""Initialisations that do not change the base's weights, unlike pissa, olora, loftq and corda."""


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """The adapted modules, rank and alpha of an adapter."""

    rank: int
    alpha: float
    """The product B A is scaled by alpha / rank."""
    targets: tuple[str, ...]
    """Sorted words of the recipe: q k v o gate up down experts head."""
    experts: Literal["shared_outer", "each"] = "each"
    """Whether the experts of a layer share the factor on the side of the hidden dimension."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True, slots=True)
class Adapter:
    """The factors of every adapted module, and the name of the base model."""

    spec: LoraSpec
    factors: Mapping[str, Tensor]
    base: str = ""
    """Folder or Hub name of the base, as in the files."""

    @property
    def modules(self) -> list[str]:
        """Names of all adapted modules, with each expert separately."""
        return [name.removesuffix(A) for name in expanded(self.factors) if name.endswith(A)]

    def pair(self, module: str) -> tuple[Tensor, Tensor]:
        """The factors A and B of a module."""
        return self._factor(module, A), self._factor(module, B)

    def _factor(self, module: str, kind: str) -> Tensor:
        found = self.factors.get(module + kind)
        return self.factors[without_number(module) + kind] if found is None else found


def without_number(module: str) -> str:
    """Removes the expert number: `...experts.7.gate_proj` becomes `...experts.gate_proj`."""
    found = EXPERT.fullmatch(module)
    return f"{found[1]}.{found[3]}" if found else module


def word_of(module: str) -> str | None:
    """The target name of a module in recipes, or its last name if there is none (`c_fc`); None for
    a module that cannot be adapted."""
    last = module.rpartition(".")[2]
    if EXPERT.fullmatch(module):
        return "experts"
    takes_none = NO_FACTORS.search(last) or ROUTER.search(module)
    return None if takes_none else WORDS.get(last, last)


def expanded(factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The factors as in PEFT's files: shared ones repeated for each expert, sorted."""
    numbers: dict[str, set[str]] = {}
    for name in factors:
        if found := EXPERT.fullmatch(name.removesuffix(A).removesuffix(B)):
            numbers.setdefault(found[1], set()).add(found[2])
    out: dict[str, Tensor] = {}
    for name, tensor in factors.items():
        place, _, rest = name.partition(".experts.")
        is_shared = bool(rest) and not rest[0].isdigit()
        holders = sorted(numbers.get(f"{place}.experts", ())) if is_shared else []
        out |= {f"{place}.experts.{e}.{rest}": tensor for e in holders} or {name: tensor}
    return dict(sorted(out.items()))


# Writing


def write_adapter(folder: str | Path, adapter: Adapter, base_names: Iterable[str]) -> None:
    """Writes a PEFT folder, reads it back, compares it and then renames it to `folder`.
    `base_names`: the tensors of the base, used to shorten target_modules; without them these are
    full names, which also exclude the layers of other towers."""
    factors = {PREFIX + name: tensor for name, tensor in expanded(adapter.factors).items()}
    infos = {name: TensorInfo(tuple(t.shape), t.dtype) for name, t in factors.items()}
    with atomic_folder(Path(folder)) as aside:
        write_file(aside / FACTORS, iter(factors.items()), infos)
        write_json(aside / CONFIG, peft_config(adapter, base_names))


def peft_config(adapter: Adapter, base_names: Iterable[str]) -> dict[str, Any]:
    spec = adapter.spec
    alpha = int(spec.alpha) if spec.alpha == int(spec.alpha) else spec.alpha
    return {
        "base_model_name_or_path": adapter.base,
        "bias": "none",
        "inference_mode": True,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": spec.rank,
        "target_modules": _target_modules(adapter, base_names),
        "task_type": "CAUSAL_LM",
    }


def _target_modules(adapter: Adapter, base_names: Iterable[str]) -> list[str]:
    """The last names of modules if they match exactly the adapted modules, else all full names."""
    modules = set(adapter.modules)
    last = {module.rpartition(".")[2] for module in modules}
    named = {name.removesuffix(".weight") for name in base_names if name.endswith(".weight")}
    if named and all(module in modules for module in named if module.rpartition(".")[2] in last):
        return sorted(last)
    return sorted(modules)


# Reading


def is_adapter(folder: str | Path) -> bool:
    return (Path(folder) / CONFIG).is_file()


def read_adapter(folder: str | Path) -> Adapter:
    """Reads the adapter of a PEFT folder; rejects every feature that is not supported."""
    path = Path(folder)
    try:
        config = read_object(path / CONFIG)
    except FileNotFoundError:
        rule = f"no {CONFIG} there"
        remedy = "give a folder that peft, or a run with actor.lora, has saved"
        raise UserError(Problem(f"adapter folder = {folder}", rule, remedy)) from None
    raise_problems(config_problems(path / CONFIG, config))
    factors = _read_factors(path / FACTORS, config["r"])
    modules = sorted({name.removesuffix(A).removesuffix(B) for name in factors})
    words = {module: word_of(module) for module in modules}
    unknown = [module for module, word in words.items() if word is None]
    if unknown:
        rule = f"has factors for {unknown[0]}, which cannot have factors here"
        remedy = f"targets are {', '.join([*SUFFIXES, 'experts'])}"
        raise UserError(Problem(str(path / FACTORS), rule, remedy))
    targets = tuple(sorted({word for word in words.values() if word}))
    shared = _shared(factors)
    kind: Literal["shared_outer", "each"] = "each" if shared is None else "shared_outer"
    spec = LoraSpec(config["r"], float(config["lora_alpha"]), targets, kind)
    base = config.get("base_model_name_or_path")
    return Adapter(spec, factors if shared is None else shared, str(base or ""))


def config_problems(path: Path, config: Mapping[str, Any]) -> Iterator[Problem]:
    kind, rank, alpha = (config.get(key) for key in ("peft_type", "r", "lora_alpha"))
    if kind != "LORA":
        yield Problem(f"{path}: peft_type = {kind}", "only LORA is supported")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        yield Problem(f"{path}: r = {rank}", "must be a whole number of at least 1")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < 1e9:
        yield Problem(f"{path}: lora_alpha = {alpha}", "must be a number above 0")
    if config.get("bias", "none") != "none":
        rule = "the files have trained biases, and only factors are supported"
        yield Problem(f"{path}: bias = {config['bias']}", rule, "train it with bias none")
    if (init := config.get("init_lora_weights", True)) not in SAME_BASE:
        rule = "its initialisation changed the base's weights, to which the factors belong"
        remedy = "save it as plain LoRA (peft: path_initial_model_for_weight_conversion)"
        yield Problem(f"{path}: init_lora_weights = {init}", rule, remedy)
    for key, value in config.items():
        if key not in HARMLESS and value:
            rule = "changes the meaning of factors or adds weights, and is not supported"
            yield Problem(f"{path}: {key} = {str(value)[:80]}", rule, "train it without that")


def _read_factors(path: Path, rank: int) -> dict[str, Tensor]:
    if not path.is_file():
        raise UserError(Problem(str(path), "missing", "only safetensors are read, not .bin files"))
    file = SafeFile(path)
    names = {_plain(path, name): name for name in sorted(file.infos)}
    problems = [*_pair_problems(path, {n: file.infos[own] for n, own in names.items()}, rank)]
    raise_problems(problems)
    factors = {n: file.read(own, full_box(file.infos[own].shape)) for n, own in names.items()}
    wrong = [name for name, tensor in factors.items() if not is_finite(tensor)]
    raise_problems(Problem(f"{path}: {name}", "holds NaN or infinite numbers") for name in wrong)
    return factors


def _plain(path: Path, name: str) -> str:
    module = name.removeprefix(PREFIX).removesuffix(A).removesuffix(B)
    if not name.startswith(PREFIX) or name.removeprefix(PREFIX) == module:
        rule = f"no factor is named so: {PREFIX}<module>{A} and {B.removeprefix('.')} are"
        raise UserError(Problem(f"{path}: {name}", rule))
    return name.removeprefix(PREFIX)


def _pair_problems(path: Path, infos: Mapping[str, TensorInfo], rank: int) -> Iterator[Problem]:
    if not infos:
        yield Problem(str(path), "holds no factor")
    for name, info in infos.items():
        module, kind, other = name.removesuffix(A).removesuffix(B), A, B
        if name.endswith(B):
            kind, other = B, A
        if module + other not in infos:
            yield Problem(f"{path}: {name}", f"there is no {module}{other} beside it")
        if len(info.shape) != 2 or info.shape[0 if kind == A else 1] != rank:
            rule = f"its shape {list(info.shape)} is not of rank {rank}, which {CONFIG} names"
            yield Problem(f"{path}: {name}", rule)
        if not info.dtype.is_floating_point or info.dtype.itemsize < 2:
            yield Problem(f"{path}: {name}", f"{info.dtype} is not a dtype of factors")


def _shared(factors: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """The factors with one entry for those that are equal in all experts of a layer; None without
    experts or if the outer factors differ."""
    out: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    for name, tensor in factors.items():
        kind = A if name.endswith(A) else B
        found = EXPERT.fullmatch(name.removesuffix(kind))
        if found is None or OUTER[found[3]] != kind:
            out[name] = tensor
            continue
        key = f"{found[1]}.{found[3]}{kind}"
        counts[key] = counts.get(key, 0) + 1
        if not out.setdefault(key, tensor).equal(tensor):
            return None
    return out if any(count > 1 for count in counts.values()) else None


# Compatibility checks


def fit_problems(
    adapter: Adapter, infos: Mapping[str, TensorInfo], where: str, base: str
) -> Iterator[Problem]:
    """Lists why an adapter does not match a base: missing modules, other shapes, or target modules
    without factors. `infos`: the tensors of the base's files
    under the adapter's names."""
    remedy = f"its own base is {adapter.base or 'not named in its config'}"
    modules = adapter.modules
    for module in modules:
        info = infos.get(f"{module}.weight")
        if info is None:
            yield Problem(f"{where}: {module}", f"{base} has no such module", remedy)
            return
        a, b = adapter.pair(module)
        if info.shape != (len(b), a.shape[1]):
            rule = f"its factors are those of a weight {[len(b), a.shape[1]]}"
            yield Problem(f"{where}: {module}", f"{rule}, in {base} it is {list(info.shape)}")
            return
    held, words = set(modules), set(adapter.spec.targets)
    named = [name.removesuffix(".weight") for name in infos if name.endswith(".weight")]
    missing = [module for module in named if word_of(module) in words and module not in held]
    if missing:
        rule = f"has no factors for {len(missing)} modules of its targets, first {missing[0]}"
        yield Problem(where, rule, "train all layers alike")


def spec_problems(adapter: Adapter, wanted: LoraSpec, where: str) -> Iterator[Problem]:
    """Problems for each difference between an adapter and the recipe's `actor.lora`."""
    for key in ("rank", "alpha", "targets", "experts"):
        found, own = getattr(adapter.spec, key), getattr(wanted, key)
        if key == "experts" and "experts" not in adapter.spec.targets:
            continue
        if found != own:
            shown, said = (" ".join(v) if isinstance(v, tuple) else v for v in (found, own))
            rule = f"its {key}: {shown}, that of actor.lora: {said}"
            yield Problem(where, rule, f"set actor.lora.{key} to {shown}")
