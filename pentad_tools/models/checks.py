"""Checks of `verify-model`: each takes a case and returns a summary, or raises a `Fault`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from pentad.core.device import DTYPES
from pentad.core.dims import ModelDims
from pentad.core.errors import UserError
from pentad.core.fit import beside_hidden_states
from pentad.models.decoder import Decoder, causal_attend
from pentad.models.families import dims_of, map_of, path_of, read_config
from pentad.models.hf_weights import iter_hf, native_tensors
from pentad.models.layers import Norm
from pentad.models.moe import Experts
from pentad.models.registry import build_model, create_model, load_model, load_weights, save_model
from pentad.models.spec import MEGATRON_PLAN, padded_vocab
from pentad.weights import transfer
from pentad.weights.cuts import split_dims
from pentad.weights.hf import HfFolder
from pentad.weights.megatron.model_args import unsayable
from pentad.weights.transfer import whole_shards
from pentad_tools.models.cases import (
    EXPERT_GRID,
    NUM_TOKENS,
    PLAIN,
    TP_GRID,
    FamilyCase,
    Fault,
    randomise,
    read_all,
)
from pentad_tools.models.ranks import (
    MegatronForward,
    SimulatedLayout,
    local_tensor,
    ranks_of,
    round_trip_fault,
)

CARRIED = {"max_position_embeddings": "max_position", "initializer_range": "initializer_range"}
"""Config key -> dimension, for keys without an effect on weights and logits."""
NOT_ABOUT_THE_MODEL = {"model_type", "architectures", "transformers_version", "dtype"}
WIDTH_RATIO = 2.0
"""Maximum ratio of the spread of initial weights to transformers'. Families differ (truncated
tails, narrower deep layers), but an ignored range differs by more."""
FEW_DRAWS = 30
"""With fewer numbers the spread is random: only ones and zeros are compared."""


def check_config(case: FamilyCase) -> str:
    """Missing config keys and the old rope format have the same meaning as in transformers."""
    hf_config = case.theirs.config
    assert isinstance(hf_config, transformers.PretrainedConfig)
    full = _as_written(hf_config)
    dims = case.spec.read_dims(full)
    for key, name in CARRIED.items():
        given, taken = full.get(key), {f.name: getattr(dims, f.name) for f in fields(dims)}[name]
        if given is not None and given != taken:
            raise Fault(f"config {key} = {given}: read_dims makes {name} = {taken} of it")
    count = 0
    for what, config in _variations(full):
        try:
            # `from_dict` does the same, but serialises the whole config for a disabled log.
            theirs = _as_written(type(hf_config)(**deepcopy(config)))
            expected = case.spec.read_dims(theirs)
        except Exception:  # transformers rejects it with various types: nothing to compare
            continue
        try:
            ours = case.spec.read_dims(config)
        except UserError:  # rejected with a message, which is correct
            continue
        for field in fields(expected):
            got, wanted = getattr(ours, field.name), getattr(expected, field.name)
            if got != wanted:
                said = f"{field.name} is {got}, transformers makes it {wanted}"
                raise Fault(f"config {what}: {said}")
        count += 1
    return f"{count} configs with a key left out or spelt as before"


def _as_written(config: transformers.PretrainedConfig) -> dict[str, Any]:
    """The complete config as written to config.json."""
    out: dict[str, Any] = json.loads(json.dumps(config.to_dict()))
    return {**out, "model_type": config.model_type}


def _variations(full: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for key in [key for key in full if key not in NOT_ABOUT_THE_MODEL]:
        yield f"without {key}", {k: v for k, v in full.items() if k != key}
    rope = full.get("rope_parameters")
    if rope and "rope_theta" in rope:
        rest = {k: v for k, v in full.items() if k != "rope_parameters"}
        scaling = {k: v for k, v in rope.items() if k not in ("rope_theta", "rope_type")}
        for name in ("rope_type", "type"):
            old = None if rope["rope_type"] == "default" else {name: rope["rope_type"], **scaling}
            said = f"with rope_theta and rope_scaling ({name})"
            yield said, {**rest, "rope_theta": rope["rope_theta"], "rope_scaling": old}


def check_plan(case: FamilyCase) -> str:
    """Sharded tensors are at places where ranks communicate: at a seam, or in the experts."""
    model = build_model(case.dims, device="meta", dtype=torch.float32)
    seams: dict[str, set[str]] = {"lookup": set(), "gather": set(), "norm": set(), "scatter": set()}
    for seam in case.spec.seams:
        layers = range(case.dims.num_layers if "{i}" in seam.module else 1)
        seams[seam.kind] |= {seam.module.format(i=i) for i in layers if seam.when(case.dims, i)}
    useful: set[str] = set()
    count = 0
    for name, entry in case.weight_map.entries.items():
        if entry.rule.optional or entry.is_copy:
            continue
        module, _, leaf = name.rpartition(".")
        is_expert = isinstance(model.get_submodule(module), Experts)
        for axis, dim in split_dims(entry, case.spec.plan).items():
            cut = f"{name}: the plan splits dim {dim} by {axis}"
            count += 1
            if is_expert != (axis in ("ep", "etp")):
                raise Fault(f"{cut}; experts, and only experts, are split by ep and etp")
            if is_expert or (name == "head.weight" and dim == 0):
                continue
            if isinstance(model.get_submodule(module), Norm):
                meets, wanted = {module} & seams["norm"], "a norm seam there"
            elif module in seams["lookup"]:
                meets, wanted = {module} if dim == 0 else set(), "its rows cut"
            elif dim == len(entry.shape) - 1 and dim > 0 and leaf != "bias":
                meets, wanted = {module} & seams["scatter"], "a scatter seam there"
            else:
                above = {g for g in seams["gather"] if f"{module}.".startswith(f"{g}.")}
                meets, wanted = above, "a gather seam there or above it"
            if not meets:
                raise Fault(f"{cut}, which needs {wanted}")
            useful |= meets
    idle = sorted(set().union(*seams.values()) - useful)
    if idle:
        raise Fault(f"seam {idle[0]}: the plan splits no tensor of it by tp")
    return f"{count} cuts, {len(useful)} seams"


def check_fresh(case: FamilyCase) -> str:
    """Initialised weights: ones and zeros as in transformers, others with a similar spread. Routers
    that transformers leaves at zero, so that all tokens choose the same experts, are drawn."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        theirs = transformers.AutoModelForCausalLM.from_config(deepcopy(case.theirs.config))
    on_disk = revert_weight_conversion(theirs, dict(theirs.state_dict()))
    ours = dict(iter_hf(create_model(case.dims)))
    for name, tensor in ours.items():
        got, wanted = _spread(tensor), _spread(on_disk[name])
        native = case.weight_map.sources[name].regions[0].source
        if wanted[1] == 0.0 and native.endswith("router.weight"):
            wanted = 0.0, case.dims.initializer_range
        low, high = sorted((got[1], wanted[1]))
        is_wide = high > WIDTH_RATIO * low and tensor.numel() >= FEW_DRAWS
        is_other = got != wanted if low == 0.0 else is_wide
        if is_other:
            said = f"mean {got[0]:.2g}, deviation {got[1]:.2g}"
            theirs_said = f"mean {wanted[0]:.2g}, deviation {wanted[1]:.2g}"
            raise Fault(f"{name}: fresh weights have {said}; transformers' {theirs_said}")
    return f"{len(ours)} tensors"


def _spread(tensor: Tensor) -> tuple[float, float]:
    return float(tensor.float().mean()), float(tensor.float().std(correction=0))


GRADIENT_TOLERANCE = 1e-4
"""Tolerance relative to the tensor's largest gradient: sums cancel, so rounding is larger."""


def check_headers(folder: Path) -> str:
    """Checks names and shapes of a real folder from its headers only."""
    if not any(folder.glob("*.safetensors*")):
        return "no safetensors there, so only its config was used"
    reader, dims = HfFolder(folder), dims_of(folder)
    has_value = any(
        map_of(dims).sources[n].optional for n in reader.infos if n in map_of(dims).sources
    )
    model = build_model(dims, device="meta", dtype=torch.float32, value_head=has_value)
    transfer.check(whole_shards(native_tensors(model)), map_of(dims), reader)
    return f"{len(reader.infos)} tensors, all known, all shapes right"


def check_coverage(case: FamilyCase) -> str:
    """Names and shapes are equal in the map, in the built model and in transformers' files."""
    model = build_model(case.dims, device="meta", dtype=torch.float32)
    built = {name: tuple(tensor.shape) for name, tensor in native_tensors(model).items()}
    entries = case.weight_map.entries
    ours = {n: e.shape for n, e in entries.items() if not (e.is_copy or e.rule.optional)}
    _same("native tensor", built, ours, "the model", "the map")
    required = {n: s.shape for n, s in case.weight_map.sources.items() if not s.optional}
    infos = HfFolder(case.folder).infos
    theirs = {n: info.shape for n, info in infos.items() if n not in case.weight_map.tied}
    _same("HF tensor", theirs, required, "transformers", "the map")
    return f"{len(ours)} native, {len(required)} HF tensors"


def _same(what: str, a: Mapping[str, Any], b: Mapping[str, Any], of_a: str, of_b: str) -> None:
    for name in sorted({*a, *b}):
        if name not in a or name not in b or a[name] != b[name]:
            said = f"{of_a} has {a.get(name, 'none')}, {of_b} has {b.get(name, 'none')}"
            raise Fault(f"{what} {name}: {said}")


def check_round_trip(case: FamilyCase) -> str:
    """HF -> Pentad -> HF is bitwise equal in both dtypes, and transformers can load the result."""
    disk = case.disk()
    for dtype in (torch.float32, torch.bfloat16):
        out = case.folder.parent / "out"
        save_model(case.load(dtype), out, source_folder=case.folder)
        kept = {n: t.to(_dtype_of(case, n) or dtype) for n, t in disk.items()}
        _same_bytes(f"saved as {dtype}", read_all(out), kept)
        _same_class(case.theirs, out)
        again = transformers.AutoModelForCausalLM.from_pretrained(
            out, dtype=dtype, trust_remote_code=False
        )
        found = again.state_dict()
        # With transformers' dtypes: tensors that it keeps in fp32 must be saved in fp32.
        expected = {
            n: t.to(found[n].dtype) for n, t in case.theirs.state_dict().items() if n in found
        }
        _same_bytes(f"read by transformers as {dtype}", found, expected)
    return f"{len(disk)} tensors, float32 and bfloat16"


def _dtype_of(case: FamilyCase, source: str) -> torch.dtype | None:
    """The dtype of the source's rule if it fixes one."""
    known = case.weight_map.sources.get(source)
    return DTYPES[known.dtype] if known is not None and known.dtype else None


def _same_class(theirs: nn.Module, folder: Path) -> None:
    """The saved config names transformers' class, which serving engines use."""
    named, expected = read_config(folder)["architectures"], [type(theirs).__name__]
    if named != expected:
        raise Fault(f"architectures = {named} in the saved config.json, transformers' {expected}")


def _same_bytes(what: str, got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    for name in sorted({*got, *wanted}):
        if name not in got or name not in wanted:
            raise Fault(f"{name}, {what}: {'missing' if name in wanted else 'unexpected'}")
        if got[name].dtype != wanted[name].dtype or not torch.equal(got[name], wanted[name]):
            raise Fault(f"{name}, {what}: not the values that were loaded")


def compare(what: str, ours: Tensor, theirs: Tensor, tolerance: float) -> float:
    if ours.shape != theirs.shape:
        raise Fault(f"{what}: shape {list(ours.shape)}, transformers has {list(theirs.shape)}")
    ours, theirs = ours.detach(), theirs.detach()
    error = float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30))
    if not error <= tolerance:
        raise Fault(f"{what}: differs from transformers by {error:.1e} of its largest value")
    return error


def layouts_of(dims: ModelDims) -> list[dict[str, int]]:
    """All layouts: every tp, and for mixtures all ep and etp with it."""
    if not dims.num_experts:
        return [{"tp": tp} for tp in TP_GRID]
    pairs = zip(TP_GRID, EXPERT_GRID, strict=True)
    return [{"tp": tp, "ep": ep, "etp": etp} for tp, (ep, etp) in pairs]


def _said(layout: Mapping[str, int]) -> str:
    return " ".join(f"{axis} {num}" for axis, num in layout.items())


def check_parity(case: FamilyCase) -> str:
    """Logits and all gradients of every layout's ranks agree with transformers."""
    expected, weight, grads = case.expected()
    model = case.load()
    trained = dict(model.named_parameters())
    natives = {
        name: tensor.detach().requires_grad_(name in trained)
        for name, tensor in native_tensors(model).items()
    }
    worst = 0.0
    for layout in layouts_of(case.dims):
        model = build_model(case.dims, device="meta", dtype=torch.float32)
        ranks = SimulatedLayout(case.weight_map, case.spec.plan, natives, **layout)
        logits = ranks.logits(model, case.ids, causal_attend)
        what = f"logits at {_said(layout)}"
        worst = max(worst, compare(what, logits, expected, case.tolerance))
        ours = torch.autograd.grad((logits * weight).sum(), [natives[name] for name in trained])
        by_name = dict(
            transfer.iter_sources(dict(zip(trained, ours, strict=True)), case.weight_map)
        )
        for name, grad in grads.items():
            what = f"gradient of {name} at {_said(layout)}"
            worst = max(worst, compare(what, by_name[name], grad, GRADIENT_TOLERANCE))
    return f"{len(layouts_of(case.dims))} layouts, worst {worst:.0e}"


def check_stages(case: FamilyCase) -> str:
    """Pipeline stages load their own parts, and together compute and export the whole model."""
    if needed := beside_hidden_states(case.dims):
        return f"rejected: later stages need {needed}"
    expected, disk = case.expected()[0], case.disk()
    for num_stages in (2, case.dims.num_layers):
        stages = _stages(case, num_stages)
        x = case.ids
        for stage in stages:
            x = stage(x, torch.arange(NUM_TOKENS), causal_attend)
        compare(f"logits at pp {num_stages}", stages[-1].logits(x), expected, case.tolerance)
        written: dict[str, Tensor] = {}
        for name, tensor in itertools.chain(*map(iter_hf, stages)):
            if name in written:
                raise Fault(f"{name}: two of {num_stages} stages give it")
            written[name] = tensor
        _same_bytes(f"from {num_stages} stages", written, disk)
    return f"pp 2 and {case.dims.num_layers}"


def _stages(case: FamilyCase, num_stages: int) -> list[Decoder]:
    model_class = type(build_model(case.dims, device="meta", dtype=torch.float32))
    cuts = [case.dims.num_layers * n // num_stages for n in range(num_stages + 1)]
    out = []
    for n, (start, stop) in enumerate(itertools.pairwise(cuts)):
        is_first, is_last = n == 0, n == num_stages - 1
        stage = model_class(
            case.dims, layers=range(start, stop), is_first=is_first, is_last=is_last
        )
        load_weights(stage, case.folder)
        out.append(stage)
    return out


def check_layouts(case: FamilyCase) -> str:
    """HF -> shards of every layout -> HF is bitwise equal."""
    disk, layouts = case.disk(), layouts_of(case.dims)
    for layout in layouts:
        name = round_trip_fault(case.weight_map, case.spec.plan, ranks_of(layout), disk)
        if name:
            raise Fault(f"{name}: HF -> {_said(layout)} -> HF gives other values")
    return f"{len(layouts)} layouts"


def check_megatron(case: FamilyCase) -> str:
    """Megatron's tensors at every tp and etp convert back bitwise and compute the same logits."""
    if refused := unsayable(case.dims):
        return f"rejected: {refused[0].rule}"
    disk, expected = case.disk(), case.expected()[0]
    layouts = [{"tp": at["tp"], "etp": at.get("etp", 1)} for at in layouts_of(case.dims)]
    for layout in layouts:
        rows = padded_vocab(case.dims.vocab_size, layout["tp"], divisor=8)
        column = case.spec.megatron_map(case.dims, rows)
        name = round_trip_fault(column, MEGATRON_PLAN, ranks_of(layout), disk)
        if name:
            raise Fault(f"{name}: HF -> Megatron at {_said(layout)} -> HF gives other values")
        ranks = {
            axis: [
                {
                    n: local_tensor(e, column, MEGATRON_PLAN, at, disk)
                    for n, e in column.entries.items()
                }
                for at in ranks_of({axis: num})
            ]
            for axis, num in layout.items()
        }
        forward = MegatronForward(case.dims, ranks["tp"], ranks["etp"], causal_attend)
        what = f"Megatron logits at {_said(layout)}"
        compare(what, forward.logits(case.ids), expected, case.tolerance)
    return f"{len(layouts)} layouts"


def check_value_head(case: FamilyCase) -> str:
    """Value head: scores of a transformers folder agree, and it exports unchanged."""
    config = transformers.AutoConfig.from_pretrained(
        case.folder, num_labels=1, trust_remote_code=False
    )
    if type(config) not in transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        return _own_value_head(case)
    theirs = transformers.AutoModelForSequenceClassification.from_config(config, **PLAIN)
    randomise(theirs)
    folder, out = case.folder.parent / "scalar", case.folder.parent / "scalar-out"
    theirs.save_pretrained(folder)
    ours = load_model(folder, value_head=True, model=path_of(case.spec.family))
    hidden = ours(case.ids, torch.arange(NUM_TOKENS), causal_attend)[-1:]
    score = theirs.eval()(case.ids[None]).logits[0]
    # The score is a sum: its rounding error scales with the terms, not with the sum.
    terms = (hidden.detach() * read_all(folder)["score.weight"]).abs().sum()
    size = max(1.0, float(terms / score.detach().abs().clamp_min(1e-30)))
    compare("score", ours.values(hidden), score, case.tolerance * size)
    save_model(ours, out, source_folder=folder)
    _same_class(theirs, out)
    again = transformers.AutoModelForSequenceClassification.from_pretrained(
        out, trust_remote_code=False
    )
    _same_bytes("with a scalar head", again.state_dict(), theirs.state_dict())
    return "loads, scores, saves"


def _own_value_head(case: FamilyCase) -> str:
    """Without a transformers class: a new head survives export and import."""
    out = case.folder.parent / "scalar-out"
    family = path_of(case.spec.family)
    ours = load_model(case.folder, value_head=True, lm_head=True, model=family, seed=1)
    save_model(ours, out, source_folder=case.folder)
    again = load_model(out, value_head=True, lm_head=True, model=family)
    _same_bytes("with a scalar head", dict(iter_hf(again)), dict(iter_hf(ours)))
    return "saves, loads; transformers has no such model to compare with"


CHECKS: dict[str, Callable[[FamilyCase], str]] = {
    "config": check_config,
    "coverage": check_coverage,
    "logits and gradients": check_parity,
}
"""Checks of every case."""
WEIGHT_CHECKS: dict[str, Callable[[FamilyCase], str]] = {
    "plan and seams": check_plan,
    "fresh weights": check_fresh,
    "round trip": check_round_trip,
    "pipeline stages": check_stages,
    "layouts": check_layouts,
    "Megatron": check_megatron,
    "value head": check_value_head,
}
"""Checks of the first case of each set of weights: rope variants have the same weights."""
