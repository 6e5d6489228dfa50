"""States that layers of transformers carry from token to token: their shapes, and passes that start
from them.

A pass gets transformers' own cache, whose layers hold the states of a batch of rows. Keys and
values pass through it, because the attention core has its own cache. Shapes of states, and whether
several tokens of a row start from them, are found by passes without memory.

Shape suffixes: S rows, T tokens of each row, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import expm1, inf, log
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    LinearAttentionCacheLayerMixin,
)
from transformers.integrations import hub_kernels

from pentad.core.errors import Problem, UserError
from pentad.core.types import Attend
from pentad.models.hf.attention import CORE, CallNote, NoCoreError
from pentad.models.language_model import StateKind

KINDS = ("conv_states", "recurrent_states")
"""Attributes of transformers' cache layers with states: lists by their number."""
REPLACING = Lock()
"""Held while a function of transformers is replaced: threads would restore each other's."""


class PassedKeys(CacheLayerMixin):
    """A layer whose keys and values are in the cache of the attention core."""

    num_updates = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, keys: Tensor, values: Tensor, *args: Any, **how: Any) -> tuple[Tensor, Tensor]:
        self.num_updates += 1
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class HeldStates(LinearAttentionCacheLayerMixin):
    """A layer with the states of the rows of a pass."""

    def lazy_initialization(self, *args: Any, **how: Any) -> None:
        raise AssertionError("states are created by updates")

    def update_conv_state(
        self,
        conv_states: Tensor,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **how: Any,
    ) -> Tensor:
        """Returns the new inputs after those that the state has; keeps the last ones."""
        width = conv_kernel_size or conv_states.shape[-1]
        if self.has_previous_state[state_idx]:
            seen = torch.cat((self.conv_states[state_idx], conv_states), dim=-1)
        else:
            seen = F.pad(conv_states, (max(0, width - conv_states.shape[-1]), 0))
        self.conv_states[state_idx] = seen[..., -width:]
        self.has_previous_state[state_idx] = True
        return seen

    def update_recurrent_state(
        self, recurrent_states: Tensor, state_idx: int = 0, **how: Any
    ) -> Tensor:
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states


class PassedKeysAndStates(HeldStates, PassedKeys):
    """A layer with both."""

    def __init__(self, number_of_states: int = 1) -> None:
        PassedKeys.__init__(self)
        LinearAttentionCacheLayerMixin.__init__(self, number_of_states=number_of_states)


def _build_cache(config: PretrainedConfig) -> Cache:
    layers: list[CacheLayerMixin | LinearAttentionCacheLayerMixin] = []
    for theirs in DynamicCache(config=config).layers:
        if not isinstance(theirs, LinearAttentionCacheLayerMixin):
            layers.append(PassedKeys())
        else:
            has_keys = isinstance(theirs, CacheLayerMixin)
            own = PassedKeysAndStates if has_keys else HeldStates
            layers.append(own(number_of_states=theirs.number_of_states))
    return Cache(layers=layers)


def advance(
    model: PreTrainedModel,
    kinds: Sequence[StateKind],
    ids_ST: Tensor,
    positions_ST: Tensor,
    attend: Attend,
    states: Sequence[Tensor] | None,
) -> tuple[Tensor, list[Tensor]]:
    """Computes further tokens of some rows; returns hidden_STD and the states after them. `states`:
    those of the tokens before, which may be overwritten; None if the rows begin."""
    cache = _build_cache(model.config)
    for kind, state in zip(kinds, states or (), strict=states is not None):
        layer = cache.layers[kind.layer]
        getattr(layer, kind.name)[kind.number] = state
        layer.has_previous_state[kind.number] = True
    hidden_STD = _pass(model, cache, ids_ST, positions_ST, attend)
    held = [getattr(cache.layers[kind.layer], kind.name)[kind.number] for kind in kinds]
    return hidden_STD, held


def _pass(
    model: PreTrainedModel, cache: Cache, ids_ST: Tensor, positions_ST: Tensor, attend: Attend
) -> Tensor:
    inputs: dict[str, Any] = {"past_key_values": cache, "use_cache": True, CORE: attend}
    output = model.base_model(input_ids=ids_ST, position_ids=positions_ST, **inputs)
    hidden_STD: Tensor = output.last_hidden_state
    return hidden_STD


@dataclass(frozen=True, slots=True)
class CarriedStates:
    """What a sampler holds for a sequence; nothing is known of a model that only trains."""

    cache_shapes: tuple[tuple[int, int], ...]
    """(kv heads, width) of each call of the attention core, in order."""
    kinds: tuple[StateKind, ...] = ()
    batches: bool = True
    """Whether single tokens of several rows can be one pass."""
    continues: bool = True
    """Whether a run of several tokens starts from the states; else only a single token does."""


def find_states(probe: PreTrainedModel, dtype: torch.dtype, where: str) -> CarriedStates:
    """Finds the states by passes of `probe`, a model in bfloat16 without memory; `dtype`: that of
    the model. UserError if the sampler cannot hold them."""
    remedy = "sample with vllm or sglang"
    probe.requires_grad_(False)
    vars(probe.config)["pad_token_id"] = None  # some classes search it in the ids
    ids_ST = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    note, cache = CallNote(), _build_cache(probe.config)
    if not any(isinstance(layer, PassedKeys) for layer in cache.layers):
        rule = "none of its layers has attention, in whose cache the sampler counts tokens"
        raise UserError(Problem(where, rule, remedy))
    try:
        with _plain_kernels():
            _pass(probe, cache, ids_ST, ids_ST, note)
    except UserError as error:
        raise UserError(
            [Problem(where, p.rule, remedy) for p in error.problems if isinstance(p, Problem)]
        ) from error
    except NoCoreError as error:
        rule = "it does not pass keyword arguments to its attention, so no core can be used"
        raise UserError(Problem(where, rule, remedy)) from error
    except Exception as error:  # classes raise anything
        rule = f"its forward pass cannot be run with transformers' cache ({error})"
        raise UserError(Problem(where, rule, remedy)) from error
    num_updates = [x.num_updates for x in cache.layers if isinstance(x, PassedKeys)]
    if any(num != 1 for num in num_updates) or len(note.calls) != len(num_updates):
        rule = f"its {len(num_updates)} attention layers call the attention interface of "
        rule += f"transformers {len(note.calls)} times, so not all of them use it"
        raise UserError(Problem(where, rule, remedy))
    kinds = []
    for layer, held in enumerate(cache.layers):
        for name in KINDS if isinstance(held, LinearAttentionCacheLayerMixin) else ():
            for number, state in getattr(held, name).items():
                if state is not None:
                    shape = tuple(state.shape[1:])
                    kinds.append(StateKind(layer, name, number, shape, state.dtype))
    with _plain_kernels():
        continues = _continues(probe, kinds, ids_ST)
        batches = _batches(probe, kinds, ids_ST.T)
    own = [replace(x, dtype=dtype) if x.dtype == torch.bfloat16 else x for x in kinds]
    return CarriedStates(tuple(note.calls), tuple(own), batches, continues)


def _continues(probe: PreTrainedModel, kinds: Sequence[StateKind], ids_ST: Tensor) -> bool:
    """Whether the outputs of two tokens depend on the states of each name, by autograd."""
    for name in {kind.name for kind in kinds}:
        states = [torch.zeros(1, *kind.shape, dtype=kind.dtype, device="meta") for kind in kinds]
        for kind, state in zip(kinds, states, strict=True):
            state.requires_grad_(kind.name == name)
        if not advance(probe, kinds, ids_ST, ids_ST, CallNote(), states)[0].requires_grad:
            return False
    return True


def _batches(probe: PreTrainedModel, kinds: Sequence[StateKind], ids_ST: Tensor) -> bool:
    """Whether a pass keeps rows of one token apart: norms of Falcon-H1 drop the dimension of tokens
    then, and rows are added to each other."""
    states = [torch.zeros(2, *kind.shape, dtype=kind.dtype, device="meta") for kind in kinds]
    hidden_STD = advance(probe, kinds, ids_ST, ids_ST, CallNote(), states)[0]
    return hidden_STD.shape[:2] == ids_ST.shape


def limit_steps(model: PreTrainedModel, where: str) -> None:
    """Limits the time steps of Mamba-2 layers in every pass: transformers does so in passes over
    several tokens, and omits it for single ones."""
    for mixer in model.modules():
        limits = vars(mixer).get("time_step_limit")
        if limits is None or tuple(limits) == (0.0, inf):
            continue
        if "mup_vector" in dict(mixer.named_buffers()):  # its factors come after the projection
            rule = f"transformers does not keep the limits {tuple(limits)} of its time steps in "
            rule += "passes over single tokens"
            raise UserError(Problem(where, rule, "sample with vllm or sglang"))
        mixer.in_proj.register_forward_hook(partial(_limit_steps, mixer, *limits))


def _limit_steps(
    mixer: Any, least: float, most: float, linear: nn.Module, inputs: object, out_STP: Tensor
) -> Tensor:
    """Limits the last outputs of a projection, whose softplus with a bias is the time step."""
    if out_STP.shape[1] > 1:
        return out_STP
    others_STP, steps_STH = out_STP.split(
        (out_STP.shape[-1] - mixer.num_heads, mixer.num_heads), -1
    )
    low_H, high_H = (
        (_before_softplus(x) - mixer.dt_bias.float()).to(steps_STH.dtype) for x in (least, most)
    )
    return torch.cat((others_STP, steps_STH.clamp(low_H, high_H)), dim=-1)


def _before_softplus(x: float) -> float:
    if x <= 0:
        return -inf
    return x if x > 30 else log(expm1(x))  # equal in float64 from there on


@contextmanager
def _plain_kernels() -> Iterator[None]:
    """Lets transformers choose its torch functions, as in an export: kernels of mamba-ssm or fla
    need memory."""
    with REPLACING:
        chosen = hub_kernels.is_torchdynamo_exporting
        hub_kernels.is_torchdynamo_exporting = lambda: True
        try:
            yield
        finally:
            hub_kernels.is_torchdynamo_exporting = chosen
