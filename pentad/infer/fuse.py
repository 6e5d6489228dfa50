"""Fused layers for the sampler's own instance of a model: same weights and names, fewer kernels.

Between matrix products a decoder runs dozens of small kernels per layer, whose launches dominate
the time of decoding one token per sequence. Forward only.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from pentad.core.swap import swap_class, swap_classes
from pentad.core.types import Attend
from pentad.models.decoder import Block, Decoder
from pentad.models.joined import join_projections
from pentad.models.layers import Attention, Mlp, Norm, rotate
from pentad.models.lora import AddsFactors
from pentad.ops import fused


class FusedNorm(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return fused.norm(x.contiguous(), self.weight, self.eps)


class FusedMlp(Mlp):
    adapter: AddsFactors | None = None
    """Computes gate and up with their factors (`infer.adapters`)."""

    def forward(self, x_TD: Tensor) -> Tensor:
        if self.adapter is not None:
            return self.down(self.adapter.gated(x_TD))
        return self.down(fused.silu_mul(*self.gate_up(x_TD).chunk(2, dim=-1)))


class FusedAttention(Attention):
    """Attention with all projections in one product, after `join_all` has concatenated their
    weights."""

    joined: tuple[Tensor, Tensor | None] | None = None
    """Weight and bias of all three; the parameters are views of them."""
    adapter: AddsFactors | None = None
    """Computes that product with the factors of all three (`infer.adapters`)."""

    def project(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.joined is None and self.adapter is None:
            return super().project(x_TD)
        widths = [len(part.weight) for part in (self.q, self.k, self.v)]
        if self.adapter is not None:
            found = self.adapter.product(x_TD)
        else:
            assert self.joined is not None
            found = F.linear(x_TD, *self.joined)
        heads = (x.unflatten(-1, (-1, self.head_dim)) for x in found.split(widths, dim=-1))
        q_THd, k_TKd, v_TKd = heads
        return q_THd, k_TKd, v_TKd

    @property
    def joins(self) -> bool:
        """Whether one product can replace the three: it would omit factors."""
        return not any(hasattr(part, "lora") for part in (self.q, self.k, self.v))

    def turned(
        self, q_THd: Tensor, k_TKd: Tensor, cos_Td: Tensor, sin_Td: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Norms and rotates in one kernel if supported: norms of single heads and rotation of the
        halves of whole heads."""
        is_whole = self.rotate is rotate and cos_Td.shape[-1] == self.head_dim
        is_plain = self.q_norm is None or type(self.q_norm) is FusedNorm
        if self.wide_norm or self.norms_turned or not (is_whole and is_plain):
            return super().turned(q_THd, k_TKd, cos_Td, sin_Td)
        q_weight = k_weight = None
        eps = 0.0
        if self.q_norm is not None and self.k_norm is not None:
            q_weight, k_weight, eps = self.q_norm.weight, self.k_norm.weight, self.q_norm.eps
        return fused.norm_rotate(q_THd, k_TKd, q_weight, k_weight, cos_Td, sin_Td, eps)


class FusedBlock(Block):
    ffn_norm: FusedNorm

    def mix(
        self, x_TD: Tensor, cos_Td: Tensor, sin_Td: Tensor, attend: Attend
    ) -> tuple[Tensor, ...]:
        y_TD = self.attn_post_norm(self.attn(self.attn_norm(x_TD), cos_Td, sin_Td, attend))
        return fused.add_norm(x_TD, y_TD, self.ffn_norm.weight, self.ffn_norm.eps)


FUSED: dict[type[nn.Module], type[nn.Module]] = {
    Norm: FusedNorm,
    Mlp: FusedMlp,
    Attention: FusedAttention,
}


def apply_fused(model: Decoder) -> None:
    swap_classes(model, FUSED)
    for block in model.blocks.values():
        if type(block) is Block and type(block.ffn_norm) is FusedNorm:
            swap_class(block, FusedBlock)


def join_all(model: Decoder) -> None:
    """Joins the projections; called again whenever the weights have moved in memory."""
    for module in model.modules():
        if isinstance(module, FusedAttention) and module.joins:
            module.joined = join_projections(module)


def part_all(model: Decoder) -> None:
    """Undoes the joins before the weights are offloaded, to release their memory."""
    for module in model.modules():
        if isinstance(module, FusedAttention):
            module.joined = None
