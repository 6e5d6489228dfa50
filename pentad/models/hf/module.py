"""A causal language model of transformers as a `LanguageModel`, for packed rows.

The body is transformers' code with Pentad's attention core; the head is replaced by the fused
log-probs. Parameters keep transformers' names. Instead of lists by family, the logit rule and the
layout of tensors on disk are found by running the class: its forward runs with stand-ins for body
and head, and transformers converts tensors without memory, whose views show the block of the source
tensor.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as SCALAR_CLASSES,
)

from pentad.core.dims import ModelDims
from pentad.core.errors import Problem, UserError
from pentad.core.seeds import derive_seed
from pentad.core.types import Attend
from pentad.engine.section import LoraConfig
from pentad.models.hf.attention import CORE, NAME, PROBE, WINDOW, CallNote, NoCoreError
from pentad.models.hf.config import carries_state, measure
from pentad.models.hf.experts import expert_stacks, plan_of
from pentad.models.hf.factors import factors_beside, linear_layers, words_of
from pentad.models.hf.states import CarriedStates, advance, find_states, limit_steps
from pentad.models.language_model import LanguageModel, bent
from pentad.models.moe import Routes
from pentad.weights.map import Entry, Rule, WeightMap, sources_of
from pentad.weights.regions import DimRun, Region, Shape, whole_region


def build_hf_model(
    config: PretrainedConfig, *, dtype: torch.dtype, value_head: bool = False, samples: bool = False
) -> HfModel:
    """Builds the model on the meta device. A value head replaces the lm head. A model whose layers
    carry state computes rows one by one, with transformers' attention; `samples`: it computes
    further tokens of rows from their states, with an attention core."""
    where = f"config.json: model_type = {config.model_type}"
    # In 16 bits: products of experts are written for them, and they show which weights stay wide.
    probe = _build_causal(copy.deepcopy(config), PROBE, torch.bfloat16, where)
    wide = wide_names(probe)
    is_alone = carries_state(config) or probe._is_stateful
    own = "sdpa" if probe._supports_sdpa else "eager"
    causal = _build_causal(config, own if is_alone and not samples else NAME, dtype, where)
    for model in (probe, causal):
        for name, tensor in model.state_dict(keep_vars=True).items():
            if name in wide:
                tensor.data = tensor.data.to(torch.float32)
    if not is_alone:
        carried = CarriedStates(check_packable(probe, where))
    else:
        carried = find_states(probe, dtype, where) if samples else CarriedStates(())
        if samples:
            limit_steps(causal, where)
    copy_windows(probe, causal)
    return HfModel(causal, where, carried, wide, packs_rows=not is_alone, value_head=value_head)


def _build_causal(
    config: PretrainedConfig, attention: str, dtype: torch.dtype, where: str
) -> PreTrainedModel:
    try:
        with torch.device("meta"):
            causal = AutoModelForCausalLM.from_config(
                config, attn_implementation=attention, dtype=dtype, trust_remote_code=False
            )
    except Exception as error:  # classes without the interface raise anything
        rule = f"transformers cannot build it with a custom attention core ({error!r})"
        raise UserError(Problem(where, rule)) from error
    for name, parameter in list(causal.named_parameters()):
        if not parameter.requires_grad:  # a weight that no optimizer moves, like the other buffers
            path, _, key = name.rpartition(".")
            module = causal.get_submodule(path)
            delattr(module, key)
            module.register_buffer(key, parameter.data)
    return causal.eval()  # without dropout, which would change log-probs


def wide_names(narrow: PreTrainedModel) -> set[str]:
    """Names of the weights that transformers keeps in float32 in this 16-bit model: those of its
    dtype plan, and those that its classes create in float32."""
    plan = [re.compile(key.replace("*", ".*")) for key in narrow._get_dtype_plan(torch.bfloat16)]
    return {
        name
        for name, tensor in narrow.state_dict().items()
        if tensor.dtype == torch.float32 or any(key.search(name) for key in plan)
    }


class HfModel(LanguageModel):
    """Built by `build_hf_model`."""

    def __init__(
        self,
        causal: PreTrainedModel,
        where: str,
        carried: CarriedStates,
        wide: Set[str],
        *,
        packs_rows: bool,
        value_head: bool,
    ) -> None:
        dims = measure(causal.config)
        if carried.cache_shapes:
            dims = replace(dims, head_dim=max(width for _, width in carried.cache_shapes))
        super().__init__(dims)
        self.cache_shapes, self.packs_rows = carried.cache_shapes, packs_rows
        self.state_kinds = carried.kinds
        self.batches_tokens, self.continues_runs = carried.batches, carried.continues
        self.hf_map = build_hf_map(causal, self.dims, where, wide)
        self.tp_plan: Mapping[str, str] = plan_of(causal)
        self.unshared = (causal,)  # in a tuple, so that its parameters are not registered twice
        self.body_name = causal.base_model_prefix
        self.add_module(self.body_name, causal.base_model)
        self.block_names = _block_names(causal)
        if not self.block_names:
            raise UserError(Problem(where, "transformers does not name the blocks of its model"))
        self.linears = linear_layers(causal, self.block_names)
        self.expert_stacks: Mapping[str, int] = expert_stacks(causal)
        """Name of each module with stacked experts -> number of its experts."""
        self.has_lm_head = not value_head
        self.head_name = ""
        """Name of the head's weight; empty if it is tied to the embedding."""
        if self.has_lm_head:
            rule = read_logit_rule(causal, where)
            self.logit_scale, self.logit_cap = rule.scale, rule.cap
            head = causal.get_output_embeddings()
            if head.weight is not causal.get_input_embeddings().weight:
                self.head_name = next(n for n, module in causal.named_modules() if module is head)
                self.add_module(self.head_name, head)
        else:
            if self.dims.family not in SCALAR_CLASSES:
                rule_ = "transformers has no class of it with a scalar head, so no critic"
                raise UserError(Problem(where, rule_, "use another model for the critic"))
            with torch.device("meta"):
                self.value_head = nn.Linear(self.dims.hidden_size, 1, bias=False)
            self.value_head.to(causal.dtype)

    @property
    def causal(self) -> PreTrainedModel:
        """transformers' causal model, which shares the modules."""
        return self.unshared[0]

    @property
    def body(self) -> nn.Module:
        return self.get_submodule(self.body_name)

    @property
    def blocks(self) -> Mapping[int, nn.Module]:
        return {i: self.get_submodule(name) for i, name in enumerate(self.block_names)}

    @property
    def weight_map(self) -> WeightMap:
        return self.hf_map

    def lora_words(self, lora: LoraConfig) -> Sequence[str]:
        role = "actor" if self.value_head is None else "critic"
        return words_of(self.body, self.linears, lora, self.dims.family, role)

    def lora_map(self, lora: LoraConfig) -> WeightMap:
        entries, words = self.hf_map.entries, self.lora_words(lora)
        heads = [] if self.value_head is None else [entries[VALUE_HEAD]]
        chosen = [entries[f"{name}.weight"] for name, word in self.linears.items() if word in words]
        return factors_beside(chosen, heads, self.dims, lora)

    @property
    def hf_classes(self) -> tuple[str, str]:
        return type(self.causal).__name__, SCALAR_CLASSES.get(self.dims.family, "")

    @property
    def head_weight(self) -> Tensor:
        assert self.has_lm_head, "this model is built without a language-model head"
        owner = self.causal.get_output_embeddings() if self.head_name else None
        weight: Tensor = (owner or self.causal.get_input_embeddings()).weight
        return weight

    def forward(
        self, ids_T: Tensor, positions_T: Tensor, attend: Attend, routes: Routes | None = None
    ) -> Tensor:
        """If rows are not packed, the tokens are one row and padding after it, which the causal
        layers of the row do not see."""
        assert not routes, "only models with a model file support routes"
        inputs: dict[str, Any] = {"use_cache": False}
        if self.packs_rows:
            inputs |= {CORE: attend, "position_ids": positions_T[None]}
        output = self.body(input_ids=ids_T[None], **inputs)
        hidden_TD: Tensor = output.last_hidden_state[0]
        return hidden_TD

    def advance(
        self,
        ids_ST: Tensor,
        positions_ST: Tensor,
        attend: Attend,
        states: Sequence[Tensor] | None,
    ) -> tuple[Tensor, list[Tensor]]:
        return advance(self.causal, self.state_kinds, ids_ST, positions_ST, attend, states)

    def map_for(self, names: Iterable[str]) -> WeightMap:
        patterns = self.causal._keys_to_ignore_on_load_unexpected or []
        known = {*self.hf_map.sources, *self.hf_map.tied}
        ignored = {
            name
            for name in names
            if name not in known and any(re.search(pattern, name) for pattern in patterns)
        }
        return replace(self.hf_map, ignored=frozenset(ignored))

    @torch.no_grad()
    def fill_tables(self) -> None:
        for name, module in self.named_modules():
            is_body = module is self.body  # some classes fill the tables of their layers
            if module._non_persistent_buffers_set or is_body:
                for parameter in module.parameters(recurse=is_body):
                    # Weights are set elsewhere.
                    setattr(parameter, "_is_hf_initialized", True)  # noqa: B010
                self._owner(name)._init_weights(module)

    def _owner(self, name: str) -> PreTrainedModel:
        """The innermost transformers model that contains a module, which initialises it."""
        body: PreTrainedModel = self.causal.base_model
        return body if name.startswith(self.body_name) else self.causal

    @cached_property
    def blank(self) -> PreTrainedModel:
        """A copy of the model without memory or layout."""
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                self.causal.config, dtype=torch.float32, trust_remote_code=False
            )

    @torch.no_grad()
    def draw(self, name: str, seed: int) -> Tensor | None:
        """Initialises weights as transformers does."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(seed, "init", name))
            if name == VALUE_HEAD:
                shape = self.weight_map.entries[name].shape
                return torch.empty(shape, device="cpu").normal_(0, self.dims.initializer_range)
            path, _, key = name.rpartition(".")
            module = copy.deepcopy(self.blank.get_submodule(path))
            for store in (module._parameters, module._buffers):
                for part, tensor in store.items():
                    if tensor is not None:
                        zeros = torch.zeros_like(tensor, device="cpu")
                        is_weight = isinstance(tensor, nn.Parameter)
                        store[part] = nn.Parameter(zeros) if is_weight else zeros
            self._owner(path)._init_weights(module)
        drawn: Tensor = module.state_dict()[key]
        return drawn


def _block_names(causal: PreTrainedModel) -> list[str]:
    """Names of the blocks: modules of classes that transformers marks as not splittable."""
    kinds = set(causal._no_split_modules or ())
    names = [name for name, module in causal.named_modules() if type(module).__name__ in kinds]
    # Of nested blocks, the outer ones.
    return [n for n in names if not any(n.startswith(f"{other}.") for other in names)]


def check_packable(probe: PreTrainedModel, where: str) -> tuple[tuple[int, int], ...]:
    """Checks, by a pass of `probe` without memory, that tokens interact only in the attention
    core, and finds the window of each attention. Returns heads and width of each call's keys."""
    rules = []
    convolutions = [m for m in probe.modules() if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d)]
    if convolutions:
        rule = "its layers convolve from token to token, so rows cannot be packed"
        raise UserError(Problem(where, rule, "use a plain attention decoder"))
    note = CallNote()
    vars(probe.config)["pad_token_id"] = None  # some classes search it in the ids
    ids = torch.zeros(1, 8, dtype=torch.int64, device="meta")
    # A padding mask without padding: without it positions are read, which have no memory.
    inputs: dict[str, Any] = {CORE: note, "attention_mask": torch.ones_like(ids)}
    try:
        with torch.no_grad():
            probe.base_model(input_ids=ids, position_ids=ids, use_cache=False, **inputs)
    except UserError as error:
        problems = [p for p in error.problems if isinstance(p, Problem)]
        rules += [p.rule for p in problems]
    except NoCoreError:
        rules.append("it does not pass keyword arguments to its attention, so no core can be used")
    except Exception as error:
        rules.append(f"its forward pass cannot be run on packed rows ({error})")
    else:
        num_layers = int(probe.config.num_hidden_layers)
        if not note.calls or len(note.calls) % num_layers:
            rules.append(
                f"its {num_layers} layers call the attention interface of transformers "
                f"{len(note.calls)} times, so not all of them use it"
            )
    if rules:
        remedy = "rows cannot be packed; use a plain attention decoder"
        raise UserError([Problem(where, rule, remedy) for rule in rules])
    return tuple(note.calls)


def copy_windows(probe: PreTrainedModel, causal: PreTrainedModel) -> None:
    """Gives the attention modules of `causal` the windows that a pass of `probe` found."""
    for name, module in probe.named_modules():
        if vars(module).get(WINDOW) is not None:
            setattr(causal.get_submodule(name), WINDOW, vars(module)[WINDOW])


TOLERANCE = 1e-6
"""Relative tolerance: some classes compute logits in float32."""
FAR = 1e6
"""An input for which the cap is reached exactly."""
NEAR = 0.5


@dataclass(frozen=True, slots=True)
class LogitRule:
    """logits = limit(scale * (hidden @ weight^T)), with limit(x) = cap * tanh(x / cap)."""

    scale: float = 1.0
    cap: float | None = None

    def apply(self, x: Tensor) -> Tensor:
        return bent(x, self.scale, self.cap)


class _Output(MoeModelOutputWithPast):
    """Output of a body in which everything except hidden states is None."""

    def __getattr__(self, name: str) -> None:
        return None


class _Body(nn.Module):
    """Replaces the body: returns precomputed hidden states. Factors of logits that are attributes
    of the body are those of the real one."""

    def __init__(self, hidden: Tensor, real: nn.Module) -> None:
        super().__init__()
        self.hidden = hidden
        self.factors = {name: x for name, x in vars(real).items() if isinstance(x, int | float)}

    def __getattr__(self, name: str) -> Any:
        factors = vars(self).get("factors", {})
        return factors[name] if name in factors else super().__getattr__(name)

    def forward(self, *args: object, **kwargs: object) -> MoeModelOutputWithPast:
        return _Output(last_hidden_state=self.hidden)


class _Head(nn.Module):
    """Replaces the head: returns its input."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden


def read_logit_rule(causal: PreTrainedModel, where: str) -> LogitRule:
    """Finds the logit rule of a class and its config; UserError if logits have another form."""
    head = causal.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        rule = "its head has a bias or is not a linear layer, which fused log-probs do not support"
        raise UserError(Problem(where, rule))
    given = torch.tensor([*range(-60, 61), NEAR, FAR], dtype=torch.float64, device="cpu")
    try:
        body = _Body(given.view(1, 1, -1), causal.base_model)
        with _stand_ins(causal, body, _Head()), torch.no_grad():
            ids = torch.zeros(1, 1, dtype=torch.int64, device="cpu")
            logits = causal(input_ids=ids, use_cache=False).logits.double().flatten()
    except Exception as error:  # layers between body and head raise anything
        rule = f"its forward is not a body followed by a head ({error})"
        raise UserError(Problem(where, rule)) from error
    for found in _candidates(logits):
        if torch.allclose(found.apply(given), logits, rtol=TOLERANCE, atol=TOLERANCE):
            return found
    rule = "its logits are neither scaled nor capped in a known way: log-probs would be wrong"
    raise UserError(Problem(where, rule))


def _candidates(logits: Tensor) -> Iterator[LogitRule]:
    near, far = float(logits[-2]), float(logits[-1])
    yield LogitRule(scale=round(far / FAR, 9))
    if far > near > 0:
        slope = float(torch.atanh(logits[-2] / far)) * far / NEAR
        yield LogitRule(scale=round(slope, 6), cap=far)


@contextmanager
def _stand_ins(causal: PreTrainedModel, body: nn.Module, head: nn.Module) -> Iterator[None]:
    prefix = causal.base_model_prefix
    real = causal.get_submodule(prefix), causal.get_output_embeddings()
    setattr(causal, prefix, body)
    causal.set_output_embeddings(head)
    try:
        yield
    finally:
        setattr(causal, prefix, real[0])
        causal.set_output_embeddings(real[1])


VALUE_HEAD = "value_head.weight"
VALUE_HEAD_ON_DISK = "score.weight"


def build_hf_map(
    causal: PreTrainedModel, dims: ModelDims, where: str, wide: Set[str] = frozenset()
) -> WeightMap:
    """Builds the exact and complete weight map; UserError if that is not possible. `wide`: names of
    weights in float32."""
    held = causal.state_dict()
    tied = _tied(causal, held)
    shapes = {name: tuple(x.shape) for name, x in held.items() if name not in tied}
    parts = _parts_on_disk(causal, shapes, where)
    entries: dict[str, Entry] = {}
    for name, shape in shapes.items():
        rule = Rule(name, "", name, dtype="float32" if name in wide else "")
        entries[name] = Entry(name, shape, tuple(parts[name]), rule, _layer(name))
    rule = Rule(VALUE_HEAD, "", VALUE_HEAD_ON_DISK, optional=True)
    value_shape = (1, dims.hidden_size)
    region = whole_region(VALUE_HEAD_ON_DISK, value_shape)
    entries[VALUE_HEAD] = Entry(VALUE_HEAD, value_shape, (region,), rule, None)
    twins = {
        source: entries[twin].regions[0].source
        for name, twin in tied.items()
        for source in {name, *revert_weight_conversion(causal, {name: held[name]})}
    }
    return WeightMap(dims, entries, sources_of(entries, dims), twins)


def _layer(name: str) -> int | None:
    found = re.search(r"\.(\d+)\.", name)
    return int(found.group(1)) if found else None


def _tied(causal: PreTrainedModel, held: Mapping[str, Tensor]) -> dict[str, str]:
    """Name of a tied tensor -> earlier name of the same tensor."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    parameters = dict(causal.named_parameters(remove_duplicate=False))
    for name in held:
        if name in parameters:
            known = first.setdefault(id(parameters[name]), name)
            if known != name:
                tied[name] = known
    return tied


def _parts_on_disk(
    causal: PreTrainedModel, shapes: Mapping[str, Shape], where: str
) -> dict[str, list[Region]]:
    """Name of each tensor in memory -> regions of the tensors on disk."""
    blank = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    owners = {x.untyped_storage()._cdata: name for name, x in blank.items()}
    with _ViewsOnly():
        written = revert_weight_conversion(causal, dict(blank))
    parts: dict[str, list[Region]] = {name: [] for name in shapes}
    for source, view in written.items():
        owner = owners.get(view.untyped_storage()._cdata)
        if owner is None:
            rule = f"on disk {source} is arranged differently, which is not supported"
            raise UserError(Problem(where, rule))
        parts[owner].append(_region(source, view, shapes[owner]))
    return parts


class _ViewsOnly(TorchFunctionMode):
    """Disables `contiguous`, because a copy does not show its source."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.contiguous:
            return args[0]
        return func(*args, **(kwargs or {}))


def _region(source: str, view: Tensor, shape: Shape) -> Region:
    """The region of a tensor on disk, given as a view of the contiguous tensor in memory."""
    strides = torch.empty(shape, device="meta").stride()
    if view.shape == shape and view.stride() == strides:
        return whole_region(source, shape)
    rest, start = view.storage_offset(), []
    for stride in strides:
        start.append(rest // stride)
        rest %= stride
    runs = []
    for dim, (size, stride) in enumerate(zip(view.shape, view.stride(), strict=True)):
        along = [d for d, step in enumerate(strides) if step == stride and shape[d] > 1]
        if size > 1:
            runs.append(DimRun(dim, along[0], size))
    zeros = (0,) * view.ndim
    return Region(source, tuple(view.shape), zeros, tuple(start), tuple(runs))
