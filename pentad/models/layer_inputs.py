"""Layers with additional inputs: per-layer embeddings of the token, and keys and values of an
earlier layer.

Shape suffixes: T tokens, D hidden, L layers, E width of a layer's embedding, H query heads, K
key-value heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pentad.core.dims import ModelDims, RopeKind
from pentad.core.types import Attend
from pentad.models.decoder import Block, Decoder
from pentad.models.layers import Embedding, Linear, NormedAttention, Turn, make_norm
from pentad.models.moe import Routes

KeysValues = tuple[Tensor, Tensor]
"""k_TKd with norm and rotary, and v_TKd."""


class SharingAttention(NormedAttention):
    """Attention that returns its keys and values, or uses those of another layer, with its
    cache."""

    def __init__(self, dims: ModelDims, layer: int) -> None:
        super().__init__(dims, layer)
        source = dims.of_layer(layer).kv_from
        self.is_given = source is not None
        if source is not None:
            self.layer = source
            for name in ("k", "v", "k_norm"):
                if hasattr(self, name):
                    delattr(self, name)

    @property
    def projections(self) -> tuple[nn.Linear, ...]:
        return (self.q,) if self.is_given else super().projections

    def forward(  # type: ignore[override]
        self,
        x_TD: Tensor,
        cos_Td: Tensor,
        sin_Td: Tensor,
        attend: Attend,
        given: KeysValues | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if given is None:
            q_THd, k_TKd, v_TKd = self.project(x_TD)
            q_THd, k_TKd = self.turned(q_THd, k_TKd, cos_Td, sin_Td)
        else:
            q_THd = self.normed(self.q(x_TD).unflatten(-1, (-1, self.head_dim)), self.q_norm)
            q_THd, (k_TKd, v_TKd) = self.rotate(q_THd, cos_Td, sin_Td), given
        return self.core(q_THd, k_TKd, v_TKd, attend), k_TKd, v_TKd


class LayerInput(nn.Module):
    """Adds a projection of the per-layer embedding to the output of a layer."""

    def __init__(self, dims: ModelDims) -> None:
        super().__init__()
        self.gate = Linear(dims.hidden_size, dims.layer_embed_dim, bias=False)
        self.out = Linear(dims.layer_embed_dim, dims.hidden_size, bias=False)
        self.norm = make_norm(dims.hidden_size, dims)

    def forward(self, x_TD: Tensor, embedding_TE: Tensor) -> Tensor:
        gate_TE = F.gelu(self.gate(x_TD), approximate="tanh")
        added: Tensor = self.norm(self.out(gate_TE * embedding_TE))
        return added


class SharingBlock(Block):
    """A layer that also returns its keys and values."""

    def __init__(self, dims: ModelDims, layer: int) -> None:
        super().__init__(dims, layer)
        self.attn = SharingAttention(dims, layer)
        self.input = LayerInput(dims) if dims.layer_embed_dim else None

    def forward(  # type: ignore[override]
        self,
        x_TD: Tensor,
        cos_Td: Tensor,
        sin_Td: Tensor,
        attend: Attend,
        chosen_Tk: Tensor | None = None,
        embedding_TE: Tensor | None = None,
        given: KeysValues | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        x_TD, h_TD, k_TKd, v_TKd = self.mix(x_TD, cos_Td, sin_Td, attend, given)
        x_TD, chosen_Tk = self.with_ffn(x_TD, h_TD, chosen_Tk)
        if self.input is not None and embedding_TE is not None:
            x_TD = x_TD + self.input(x_TD, embedding_TE)
        return self.scaled(x_TD), chosen_Tk, k_TKd, v_TKd

    def mix(
        self,
        x_TD: Tensor,
        cos_Td: Tensor,
        sin_Td: Tensor,
        attend: Attend,
        given: KeysValues | None = None,
    ) -> tuple[Tensor, ...]:
        y_TD, k_TKd, v_TKd = self.attn(self.attn_norm(x_TD), cos_Td, sin_Td, attend, given)
        x_TD = x_TD + self.attn_post_norm(y_TD)
        return x_TD, self.ffn_norm(x_TD), k_TKd, v_TKd


class LayerEmbedding(nn.Module):
    """The per-layer embeddings of a token for all layers: a table row plus a projection of the
    token's embedding."""

    def __init__(self, dims: ModelDims) -> None:
        super().__init__()
        self.width = dims.layer_embed_dim
        size = dims.num_layers * self.width
        self.table = Embedding(dims.layer_embed_rows, size, padding_idx=dims.padding_id)
        self.project = Linear(dims.hidden_size, size, bias=False)
        self.norm = make_norm(self.width, dims)
        self.root = dims.hidden_size**-0.5

    def forward(self, ids_T: Tensor, x_TD: Tensor) -> Tensor:
        """Returns the embeddings [T, L, E]."""
        rows = self.table(ids_T)
        # The factor is rounded to the dtype of the table, as transformers rounds it.
        rows = rows * float(torch.tensor(self.width**0.5, dtype=rows.dtype))
        own_TLE = self.norm((self.project(x_TD) * self.root).unflatten(-1, (-1, self.width)))
        both_TLE: Tensor = (own_TLE + rows.unflatten(-1, (-1, self.width))) * 2.0**-0.5
        return both_TLE


class SharingDecoder(Decoder):
    """A decoder whose layers have additional inputs if the dimensions have them."""

    def __init__(self, dims: ModelDims, *, is_first: bool = True, **how: Any) -> None:
        super().__init__(dims, is_first=is_first, **how)
        has_inputs = is_first and dims.layer_embed_dim
        self.layer_embed = LayerEmbedding(dims) if has_inputs else None
        self.source = [dims.of_layer(layer).kv_from for layer in range(dims.num_layers)]

    def make_block(self, layer: int) -> Block:
        is_plain = not (self.dims.layer_embed_dim or self.dims.shares_keys)
        return (Block if is_plain else SharingBlock)(self.dims, layer)

    def run_layers(
        self,
        x_TD: Tensor,
        ids_T: Tensor,
        turns: Mapping[RopeKind, Turn],
        attend: Attend,
        routes: Routes | None,
    ) -> Tensor:
        if not (self.dims.layer_embed_dim or self.dims.shares_keys):
            return super().run_layers(x_TD, ids_T, turns, attend, routes)
        inputs_TLE = None if self.layer_embed is None else self.layer_embed(ids_T, x_TD)
        kept: dict[int, KeysValues] = {}
        for layer, block in self.blocks.items():
            given_Tk = None if routes is None else routes.get(layer)
            embedding_TE = None if inputs_TLE is None else inputs_TLE[:, layer]
            source, turn = self.source[layer], turns[self.dims.rope_kind(layer)]
            given = None if source is None else kept[source]
            x_TD, chosen_Tk, *own = block(x_TD, *turn, attend, given_Tk, embedding_TE, given)
            if layer in self.source:
                kept[layer] = own[0], own[1]
            if routes is not None and chosen_Tk is not None:
                routes[layer] = chosen_Tk
        return x_TD
