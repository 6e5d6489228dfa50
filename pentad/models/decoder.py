"""The decoder: embedding, layers, final norm and heads, composed from `ModelDims`.

It is independent of ranks, packing and key-value caches: tokens are flat, positions are arguments,
and the caller passes the attention core. A pipeline stage is a decoder with some of the layers,
which may lack embedding and head.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pentad.core.dims import ModelDims, RopeKind
from pentad.core.types import Attend
from pentad.models.delta_net import DeltaNet
from pentad.models.families import map_of
from pentad.models.language_model import FamilyModel
from pentad.models.latent import LatentAttention
from pentad.models.layers import (
    MLPS,
    Attention,
    Embedding,
    GatedAttention,
    Linear,
    NormedAttention,
    Rotary,
    Scale,
    Turn,
    make_norm,
)
from pentad.models.moe import Moe, Routes, make_mixture
from pentad.ops.delta import with_memory
from pentad.ops.sinks import limited
from pentad.weights.map import WeightMap


class Block(nn.Module):
    """One layer: x + attn(norm(x)), then x + ffn(norm(x)). Outputs may also be normed, or instead
    of inputs, and the result may be scaled."""

    scale: Tensor | None

    def __init__(self, dims: ModelDims, layer: int) -> None:
        super().__init__()
        self.attn_norm = _norm(dims, dims.pre_norms)
        self.attn = make_attention(dims, layer)
        self.attn_post_norm = _post_norm(dims)
        # A mixture beside a dense ffn has separate norms for the two.
        self.ffn_norm = _norm(dims, dims.pre_norms and not dims.has_dense_beside)
        own = dims.of_layer(layer)
        self.ffn = make_mixture(own) if dims.is_moe(layer) else MLPS[dims.activation](own)
        self.ffn_post_norm = _post_norm(dims)
        # A weight without a gradient.
        self.register_buffer("scale", torch.empty(1) if dims.layer_scale else None)

    def forward(
        self,
        x_TD: Tensor,
        cos_Td: Tensor,
        sin_Td: Tensor,
        attend: Attend,
        chosen_Tk: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns hidden states and, for a mixture, the chosen or given experts."""
        x_TD, h_TD = self.mix(x_TD, cos_Td, sin_Td, attend)
        x_TD, chosen_Tk = self.with_ffn(x_TD, h_TD, chosen_Tk)
        return self.scaled(x_TD), chosen_Tk

    def with_ffn(
        self, x_TD: Tensor, h_TD: Tensor, chosen_Tk: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if isinstance(self.ffn, Moe):
            y_TD, chosen_Tk = self.ffn(h_TD, chosen_Tk)
            return x_TD + self.ffn_post_norm(y_TD), chosen_Tk
        return x_TD + self.ffn_post_norm(self.ffn(h_TD)), None

    def scaled(self, x_TD: Tensor) -> Tensor:
        return x_TD if self.scale is None else x_TD * self.scale.to(x_TD.dtype)

    def mix(
        self, x_TD: Tensor, cos_Td: Tensor, sin_Td: Tensor, attend: Attend
    ) -> tuple[Tensor, ...]:
        """Computes attention; returns the hidden states and the input of the ffn."""
        y_TD = self.attn(self.attn_norm(x_TD), cos_Td, sin_Td, attend)
        x_TD = x_TD + self.attn_post_norm(y_TD)
        return x_TD, self.ffn_norm(x_TD)


def make_attention(dims: ModelDims, layer: int) -> nn.Module:
    if dims.is_linear(layer):
        return DeltaNet(dims, layer)
    if dims.kv_latent:
        return LatentAttention(dims, layer)
    if dims.value_norm:
        return NormedAttention(dims, layer)
    return (GatedAttention if dims.attn_gate else Attention)(dims, layer)


def _norm(dims: ModelDims, is_there: bool) -> nn.Module:
    return make_norm(dims.hidden_size, dims) if is_there else nn.Identity()


def _post_norm(dims: ModelDims) -> nn.Module:
    """The norm applied to a layer's output before the residual addition."""
    if dims.residual_scale == 1.0:
        return _norm(dims, dims.post_norms)
    assert not dims.post_norms, "results are normed or multiplied by a factor, not both"
    return Scale(dims.residual_scale)


def growth(dims: ModelDims, positions_T: Tensor) -> Tensor:
    """Scale of the queries per position, in float32."""
    return 1 + dims.query_growth * torch.log(1 + torch.floor(positions_T / dims.query_growth_step))


class GrownAttend:
    """An attention core that multiplies queries by a factor for each token."""

    def __init__(self, inner: Attend, scale_T: Tensor) -> None:
        self.inner = inner
        self.scale_T = scale_T

    def __call__(
        self,
        layer: int,
        q_THd: Tensor,
        k_TKd: Tensor,
        v_TKd: Tensor,
        window: int | None = None,
        sinks: Tensor | None = None,
        cap: float | None = None,
    ) -> Tensor:
        given = {"window": window, "sinks": sinks, "cap": cap}
        how: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return self.inner(layer, q_THd * self.scale_T[:, None, None], k_TKd, v_TKd, **how)


class Decoder(FamilyModel):
    """The model of a family's file, or a pipeline stage of it."""

    def __init__(
        self,
        dims: ModelDims,
        *,
        layers: Iterable[int] | None = None,
        is_first: bool = True,
        is_last: bool = True,
        lm_head: bool = True,
        value_head: bool = False,
    ) -> None:
        super().__init__(dims)
        self.logit_cap = dims.logit_cap
        sizes = dims.vocab_size, dims.hidden_size
        self.embed = Embedding(*sizes, padding_idx=dims.padding_id) if is_first else None
        held = range(dims.num_layers) if layers is None else layers
        # Keyed by the global index: a stage's weights keep the names of the whole model.
        self.layers = nn.ModuleDict({str(i): self.make_block(i) for i in held})
        self.rotary = Rotary(dims)
        self.norm = make_norm(dims.hidden_size, dims) if is_last else None
        is_own = is_last and lm_head and not (dims.tie_embeddings and is_first)
        self.head = Linear(dims.hidden_size, dims.vocab_size, bias=False) if is_own else None
        self.value_head = (
            Linear(dims.hidden_size, 1, bias=False) if is_last and value_head else None
        )
        self.has_lm_head = is_last and lm_head
        self.is_last = is_last

    def make_block(self, layer: int) -> Block:
        return Block(self.dims, layer)

    @property
    def blocks(self) -> Mapping[int, nn.Module]:
        return {int(name): block for name, block in self.layers.items()}

    @property
    def weight_map(self) -> WeightMap:
        return map_of(self.dims)

    def forward(
        self,
        ids_T: Tensor,
        positions_T: Tensor,
        attend: Attend,
        routes: Routes | None = None,
    ) -> Tensor:
        """Maps token ids (in a later stage hidden_TD of the previous stage) to hidden_TD; after the
        final norm in the last stage. Chosen experts are added to `routes`; existing entries in it
        are used instead."""
        x_TD = ids_T if self.embed is None else self.look_up(ids_T)
        turns = self.rotary(positions_T, x_TD.dtype)
        if self.dims.linear_layers:
            attend = with_memory(attend, positions_T)
        if self.dims.query_growth:
            attend = GrownAttend(attend, growth(self.dims, positions_T).to(x_TD.dtype))
        x_TD = self.run_layers(x_TD, ids_T, turns, attend, routes)
        return x_TD if self.norm is None else self.scaled(self.norm(x_TD))

    def run_layers(
        self,
        x_TD: Tensor,
        ids_T: Tensor,
        turns: Mapping[RopeKind, Turn],
        attend: Attend,
        routes: Routes | None,
    ) -> Tensor:
        for name, block in self.layers.items():
            given_Tk = None if routes is None else routes.get(int(name))
            turn = turns[self.dims.rope_kind(int(name))]
            x_TD, chosen_Tk = block(x_TD, *turn, attend, given_Tk)
            if routes is not None and chosen_Tk is not None:
                routes[int(name)] = chosen_Tk
        return x_TD

    def scaled(self, hidden_TD: Tensor) -> Tensor:
        """The input of the head, multiplied by the logit scale; unscaled for a value head."""
        is_plain = self.dims.logit_scale == 1.0 or not self.has_lm_head
        return hidden_TD if is_plain else hidden_TD * self.dims.logit_scale

    def look_up(self, ids_T: Tensor) -> Tensor:
        assert self.embed is not None, "only the first stage has the table"
        x_TD: Tensor = self.embed(ids_T)
        if self.dims.embed_scale == 1.0:
            return x_TD
        # The factor is rounded to the dtype of the table, as transformers rounds it.
        return x_TD * float(torch.tensor(self.dims.embed_scale, dtype=x_TD.dtype))

    @property
    def head_weight(self) -> Tensor:
        assert self.has_lm_head, "this decoder is built without a language-model head"
        if self.head is not None:
            return self.head.weight
        assert self.embed is not None
        return self.embed.weight


def causal_attend(
    layer: int,
    q_THd: Tensor,
    k_TKd: Tensor,
    v_TKd: Tensor,
    window: int | None = None,
    sinks: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """Attention over one sequence in plain torch: the reference for other cores."""
    num_tokens, num_heads = q_THd.shape[:2]
    k_THd = k_TKd.repeat_interleave(num_heads // k_TKd.shape[1], dim=1)
    v_THd = v_TKd.repeat_interleave(num_heads // v_TKd.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", q_THd, k_THd) * q_THd.shape[-1] ** -0.5
    distance = torch.arange(num_tokens, device=q_THd.device)
    distance = distance[:, None] - distance[None, :]
    hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
    wide = torch.promote_types(scores.dtype, torch.float32)
    scores = limited(scores.to(wide), cap).masked_fill(hidden, float("-inf"))
    if sinks is not None:
        sinks_HT1 = sinks[:, None, None].expand(-1, num_tokens, 1)
        scores = torch.cat([scores, sinks_HT1.to(wide)], dim=-1)
    probs = scores.softmax(-1)[..., :num_tokens].to(q_THd.dtype)
    return torch.einsum("hqk,khd->qhd", probs, v_THd)
