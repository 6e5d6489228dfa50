"""Checks of what a model file says beside its map: config reading, plan, seams, fresh weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import fields
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from pentad.core.errors import UserError
from pentad.models.exchange import iter_hf
from pentad.models.moe import Experts
from pentad.models.proof.cases import Case, Fault
from pentad.models.registry import build_model, create_model
from pentad.weights.cuts import split_dims

CARRIED = {"max_position_embeddings": "max_position", "initializer_range": "initializer_range"}
"""Config key -> the dimension that takes it; no weight and no logit would show it."""
NOT_ABOUT_THE_MODEL = {"model_type", "architectures", "transformers_version", "dtype"}
WIDTH_RATIO = 2.0
"""How far the width of fresh weights may be from transformers'. Families differ in taste (cut off
tails, narrower deep layers); a range that is not read is off by more."""


def check_config(case: Case) -> str:
    """A key left out and the older spelling of rope mean to us what they mean to transformers."""
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
            theirs = _as_written(type(hf_config).from_dict(deepcopy(config)))
            expected = case.spec.read_dims(theirs)
        except Exception:  # transformers refuses it, each config in its own way: nothing to compare
            continue
        try:
            ours = case.spec.read_dims(config)
        except UserError:  # refused in a sentence: never silently another model
            continue
        for field in fields(expected):
            got, wanted = getattr(ours, field.name), getattr(expected, field.name)
            if got != wanted:
                said = f"{field.name} is {got}, transformers makes it {wanted}"
                raise Fault(f"config {what}: {said}")
        count += 1
    return f"{count} configs with a key left out or spelt as before"


def _as_written(config: transformers.PretrainedConfig) -> dict[str, Any]:
    """The config as config.json has it, every key of it."""
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


def check_plan(case: Case) -> str:
    """What the plan cuts lies where its ranks meet again: at a seam, or among the experts."""
    model = build_model(case.dims, device="meta", dtype=torch.float32)
    seams: dict[str, set[str]] = {"lookup": set(), "gather": set(), "scatter": set()}
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
            cut = f"{name}: the plan cuts dim {dim} by {axis}"
            count += 1
            if is_expert != (axis in ("ep", "etp")):
                raise Fault(f"{cut}; experts are cut by ep and etp, and nothing else is")
            if is_expert or (name == "head.weight" and dim == 0):
                continue
            if module in seams["lookup"]:
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
        raise Fault(f"seam {idle[0]}: the plan cuts no tensor of it by tp")
    return f"{count} cuts, {len(useful)} seams"


def check_fresh(case: Case) -> str:
    """Fresh weights: ones and zeros where transformers has them, elsewhere about as wide."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        theirs = transformers.AutoModelForCausalLM.from_config(deepcopy(case.theirs.config))
    on_disk = revert_weight_conversion(theirs, dict(theirs.state_dict()))
    ours = dict(iter_hf(create_model(case.dims)))
    for name, tensor in ours.items():
        got, wanted = _spread(tensor), _spread(on_disk[name])
        same = got == wanted if 0.0 in (got[1], wanted[1]) else _is_near(got[1], wanted[1])
        if not same:
            said = f"mean {got[0]:.2g}, deviation {got[1]:.2g}"
            theirs_said = f"mean {wanted[0]:.2g}, deviation {wanted[1]:.2g}"
            raise Fault(f"{name}: fresh weights have {said}; transformers' {theirs_said}")
    return f"{len(ours)} tensors"


def _spread(tensor: Tensor) -> tuple[float, float]:
    return float(tensor.float().mean()), float(tensor.float().std(correction=0))


def _is_near(a: float, b: float) -> bool:
    return max(a, b) <= WIDTH_RATIO * min(a, b)
