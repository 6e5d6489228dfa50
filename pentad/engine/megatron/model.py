"""Megatron's GPTModel, or a pipeline stage of it, as a `LanguageModel` over packed rows.

Its layers are built from Megatron's local spec or from that of Transformer Engine. Attention uses
Pentad's core: Megatron's ignores the boundaries of packed rows, and a run has one attention under
every backend. Rotary angles use positions within rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pentad.core.dims import ModelDims
from pentad.core.types import Attend
from pentad.engine.megatron.core import (
    GPTModel,
    PackedSeqParams,
    TransformerConfig,
    get_gpt_decoder_block_spec,
)
from pentad.models.layers import Linear, Norm, frequencies
from pentad.models.megatron_names import NamedModel
from pentad.models.moe import Routes
from pentad.parallel.mesh import Axis


@dataclass
class PackedRowsParams(PackedSeqParams):
    """A layer's input besides hidden states: the attention of the microbatch, and the experts of
    its tokens."""

    attend: Attend | None = None
    routes: Routes | None = None
    """Routes to follow, or to fill in if they are not given."""


class PackedCore(nn.Module):
    """Pentad's packed attention in place of Megatron's core attention."""

    def __init__(self, dims: ModelDims, layer_number: int, **_: Any) -> None:
        super().__init__()
        self.layer = layer_number - 1
        window = dims.window(self.layer)
        self.options = {} if window is None else {"window": window}

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: None, /, **given: Any
    ) -> Tensor:
        """Maps q, k, v [T, 1, heads, d] to [T, 1, heads * d]."""
        attend = given["packed_seq_params"].attend
        out_THd: Tensor = attend(
            self.layer, query.squeeze(1), key.squeeze(1), value.squeeze(1), **self.options
        )
        return out_THd.flatten(1)[:, None]


class RouteChoice:
    """Selects the experts of a layer's tokens, in place of Megatron's `RouterReplay`. If the layer
    is recomputed in the backward pass, the routes are already filled in, so the recomputation uses
    the same experts."""

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self.routes: Routes | None = None

    def begin(self, module: nn.Module, args: Any, given: dict[str, Any]) -> None:
        """Forward pre-hook of the layer."""
        self.routes = given["packed_seq_params"].routes

    def get_replay_topk(
        self, scores_TE: Tensor, k: int, groups: Any, group_k: Any, choose: Callable[..., Any]
    ) -> tuple[Tensor, Tensor]:
        chosen_Tk = None if self.routes is None else self.routes.get(self.layer)
        if chosen_Tk is None:
            values_Tk, chosen_Tk = choose(scores_TE, k, num_groups=groups, group_topk=group_k)
            if self.routes is not None:
                self.routes[self.layer] = chosen_Tk
            return values_Tk, chosen_Tk
        return scores_TE.gather(1, chosen_Tk), chosen_Tk


class RmsNorm(Norm):
    """Pentad's norm for Megatron's spec; torch's does not support sequence parallelism there."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__(hidden_size, eps)
        self.weight.data = self.weight.data.to(config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def build_gpt(
    dims: ModelDims,
    config: TransformerConfig,
    *,
    vocab_rows: int,
    is_first: bool,
    is_last: bool,
    chunk: int | None,
    lm_head: bool,
) -> GPTModel:
    """Builds a stage with uninitialised weights. `chunk`: its index among those of this rank."""
    has_te = config.transformer_impl == "transformer_engine"
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=has_te, normalization="RMSNorm", vp_stage=chunk
    )
    for layer in spec.layer_specs:
        parts = layer.submodules
        attention = parts.self_attention.submodules
        attention.core_attention = partial(PackedCore, dims)
        if has_te:
            continue
        parts.input_layernorm = parts.pre_mlp_layernorm = RmsNorm
        if dims.qk_norm:
            attention.q_layernorm = attention.k_layernorm = RmsNorm
    if not has_te:
        spec.layer_norm = RmsNorm
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=vocab_rows,
        max_sequence_length=dims.max_position,
        pre_process=is_first,
        post_process=is_last,
        share_embeddings_and_output_weights=dims.tie_embeddings and lm_head,
        position_embedding_type="none",
        vp_stage=chunk,
    )
    for name, parameter in gpt.named_parameters():
        if ".experts." in name:
            # Without expert parallelism Megatron would reduce their gradients over the ranks of
            # dense weights, which omits tp ranks with the same experts.
            parameter.allreduce = False
    if is_last and not lm_head:
        gpt.output_layer = None
        gpt.value_head = Linear(dims.hidden_size, 1, bias=False, dtype=config.params_dtype)
        gpt.value_head.weight.sequence_parallel = config.sequence_parallel
    return gpt


class MegatronStage(NamedModel):
    """A stage as a `LanguageModel`; tokens are split over tp between layers, as in a `Decoder`."""

    def __init__(
        self,
        dims: ModelDims,
        gpt: GPTModel,
        tensors: Mapping[str, Tensor],
        tp: Axis,
        *,
        num_rows: int,
    ) -> None:
        super().__init__(dims, tensors, lm_head=gpt.post_process and gpt.output_layer is not None)
        self.gpt = gpt
        self.is_last = gpt.post_process
        self.value_head = getattr(gpt, "value_head", None)
        self.tp = tp
        self.num_rows = num_rows
        """Number of vocabulary rows on this rank, without padding."""
        self.inverse: Tensor | None = None
        for number, layer in self.blocks.items():
            router = getattr(layer.mlp, "router", None)
            if isinstance(router, nn.Module):
                router.router_replay = choice = RouteChoice(number)  # type: ignore[assignment]
                layer.register_forward_pre_hook(choice.begin, with_kwargs=True)

    @property
    def blocks(self) -> Mapping[int, nn.Module]:
        return {layer.layer_number - 1: layer for layer in self.gpt.decoder.layers}

    def forward(
        self, ids_T: Tensor, positions_T: Tensor, attend: Attend, routes: Routes | None = None
    ) -> Tensor:
        x_T1D = self._look_up(ids_T) if self.gpt.pre_process else ids_T[:, None]
        if not self.gpt.pre_process:
            self.gpt.set_input_tensor(x_T1D)
        out_T1D: Tensor = self.gpt.decoder(
            hidden_states=x_T1D if self.gpt.pre_process else None,
            attention_mask=None,
            rotary_pos_emb=self._angles(positions_T),
            packed_seq_params=PackedRowsParams(qkv_format="sbhd", attend=attend, routes=routes),
        )
        return out_T1D.squeeze(1)

    def _look_up(self, ids_T: Tensor) -> Tensor:
        table = self.gpt.embedding.word_embeddings
        x: Tensor = table(ids_T[None])
        x_T1D = x if table.reduce_scatter_embeddings else x.transpose(0, 1)
        if self.dims.padding_id is None:
            return x_T1D
        is_padding_T = ids_T.chunk(self.tp.size)[self.tp.rank] == self.dims.padding_id
        return torch.where(is_padding_T[:, None, None], x_T1D.detach(), x_T1D)

    def _angles(self, positions_T: Tensor) -> Tensor:
        """Returns rotary angles [T, 1, 1, d]; Megatron computes cos and sin and the YaRN scale."""
        if self.inverse is None:
            with torch.device("cpu"):
                inverse, _ = frequencies(self.dims)
            self.inverse = inverse.to(positions_T.device)
        angles_Td = positions_T.float()[:, None] * self.inverse
        return torch.cat((angles_Td, angles_Td), dim=-1)[:, None, None]

    @property
    def head_weight(self) -> Tensor:
        assert self.has_lm_head, "this stage has no language-model head"
        is_tied = self.gpt.share_embeddings_and_output_weights
        layer = self.gpt.output_layer
        weight: Tensor = self.gpt.shared_embedding_or_output_weight() if is_tied else layer.weight
        return weight[: self.num_rows]
