"""Multi-head latent attention (DeepSeek-V3, https://arxiv.org/abs/2412.19437): keys and values of
all heads are projected from one latent per token, beside one rotated key that all heads share.

In training, and in strict mode, keys and values are expanded for ordinary attention. A sampler
caches only the latent and the rotated key. It multiplies queries by the heads' key matrices, scores
them with the latents, and multiplies the weighted sums of latents by the heads' value matrices
(`AbsorbedAttention`): the same products in another order.

Shapes: T tokens, D hidden, H heads, d head width (plain and rotated part), C latent, v value width,
r rank of an adapter.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pentad.core.dims import ModelDims
from pentad.core.swap import swap_class
from pentad.core.types import Attend
from pentad.models.layers import ROTATIONS, Linear, Norm

LATENT_EPS = 1e-6
"""Epsilon of the norms of latents: transformers does not give them `rms_norm_eps`."""


class LatentAttention(nn.Module):
    """Like `layers.Attention`, around a given core. Values are padded with zeros to the width of
    keys, so that every core supports them."""

    def __init__(self, dims: ModelDims, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim, self.v_dim = dims.head_dim, dims.v_dim
        self.widths = dims.plain_dim, dims.turned_dim
        width, latent = dims.hidden_size, dims.kv_latent
        if dims.q_latent:
            self.q_a = Linear(width, dims.q_latent, bias=dims.qkv_bias)
            self.q_norm = Norm(dims.q_latent, LATENT_EPS)
            self.q_b = Linear(dims.q_latent, dims.q_dim, bias=False)
        else:
            self.q = Linear(width, dims.q_dim, bias=False)
        self.kv_a = Linear(width, latent + dims.turned_dim, bias=dims.qkv_bias)
        self.kv_norm = Norm(latent, LATENT_EPS)
        self.kv_b = Linear(latent, dims.latent_kv_dim, bias=False)
        self.o = Linear(dims.o_dim, width, bias=dims.out_bias)
        self.has_q_latent = bool(dims.q_latent)
        self.query_scale = dims.query_scale
        self.rotate = ROTATIONS[dims.rotary_pairs]

    def forward(self, x_TD: Tensor, cos_Td: Tensor, sin_Td: Tensor, attend: Attend) -> Tensor:
        q_THd, latent_TC, turned_T1d = self.project(x_TD, cos_Td, sin_Td)
        made_THd = self.kv_b(latent_TC).unflatten(-1, (-1, self.widths[0] + self.v_dim))
        plain_THd, v_THd = made_THd.split((self.widths[0], self.v_dim), dim=-1)
        k_THd = torch.cat((plain_THd, turned_T1d.expand(-1, plain_THd.shape[1], -1)), dim=-1)
        v_THd = F.pad(v_THd, (0, self.head_dim - self.v_dim))
        o_THd = attend(self.layer, q_THd, k_THd, v_THd)[..., : self.v_dim]
        return self.o(o_THd.flatten(-2))

    def project(
        self, x_TD: Tensor, cos_Td: Tensor, sin_Td: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries by heads, normed latents, and rotated keys."""
        q_TQ = self.q_b(self.q_norm(self.q_a(x_TD))) if self.has_q_latent else self.q(x_TD)
        plain_THd, q_rot_THd = q_TQ.unflatten(-1, (-1, self.head_dim)).split(self.widths, dim=-1)
        q_THd = torch.cat((plain_THd, self.rotate(q_rot_THd, cos_Td, sin_Td)), dim=-1)
        q_THd = q_THd if self.query_scale == 1.0 else q_THd * self.query_scale
        found_TC = self.kv_a(x_TD)
        latent_TC, key_Td = found_TC[:, : -self.widths[1]], found_TC[:, -self.widths[1] :]
        return q_THd, self.kv_norm(latent_TC), self.rotate(key_Td[:, None], cos_Td, sin_Td)


class AbsorbedAttention(LatentAttention):
    """Latent attention of the sampler, with one key head (latent and rotated key) and latents as
    values."""

    def forward(self, x_TD: Tensor, cos_Td: Tensor, sin_Td: Tensor, attend: Attend) -> Tensor:
        q_THd, latent_TC, turned_T1d = self.project(x_TD, cos_Td, sin_Td)
        plain_THd, q_rot_THd = q_THd.split(self.widths, dim=-1)
        factors = getattr(self.kv_b, "lora", None)
        if factors is not None and not factors.is_on:
            factors = None
        # Rows of each head: first those of the key, then those of the value.
        keys_HdC, values_HvC = self.by_heads(self.kv_b.weight)
        q_THC = torch.einsum("thd,hdc->thc", plain_THd, keys_HdC)
        if factors is not None:
            a_rC, b_Ur = factors.a.to(x_TD.dtype), factors.b.to(x_TD.dtype)
            keys_Hdr, values_Hvr = self.by_heads(b_Ur)
            q_THr = torch.einsum("thd,hdr->thr", plain_THd, keys_Hdr)
            q_THC = q_THC + q_THr @ a_rC * factors.scale
        q_THC = torch.cat((q_THC, q_rot_THd), dim=-1)
        # The core divides by the root of the width of its input.
        q_THC = q_THC * (q_THC.shape[-1] / self.head_dim) ** 0.5
        key_T1C = torch.cat((latent_TC[:, None], turned_T1d), dim=-1)
        o_THC = attend(self.layer, q_THC, key_T1C, latent_TC[:, None])
        o_THv = torch.einsum("thc,hvc->thv", o_THC, values_HvC)
        if factors is not None:
            o_THr = o_THC @ a_rC.t()
            o_THv = o_THv + torch.einsum("thr,hvr->thv", o_THr, values_Hvr) * factors.scale
        return self.o(o_THv.flatten(-2))

    def by_heads(self, x_UC: Tensor) -> tuple[Tensor, ...]:
        parts = self.widths[0], self.v_dim
        return x_UC.unflatten(0, (-1, sum(parts))).split(parts, dim=1)


def apply_absorbed(model: nn.Module) -> None:
    for module in list(model.modules()):
        if type(module) is LatentAttention:
            swap_class(module, AbsorbedAttention)
