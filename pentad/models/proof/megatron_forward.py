"""What Megatron-core computes from Megatron's tensors, written out without Megatron.

It reads the fused tensors as Megatron's code does (qkv rows group by group, a rank's fc1 as its
gate rows over its up rows) and so separates a wrong Megatron column from a right one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from pentad.core.dims import ModelDims
from pentad.core.types import Attend
from pentad.models.rope import Rotary, rotate


class MegatronForward:
    """The logits of one sequence from the tensors of all tp ranks and all etp ranks."""

    def __init__(
        self,
        dims: ModelDims,
        ranks: Sequence[Mapping[str, Tensor]],
        expert_ranks: Sequence[Mapping[str, Tensor]],
        attend: Attend,
    ) -> None:
        self.dims = dims
        self.ranks = ranks
        self.expert_ranks = expert_ranks
        self.attend = attend

    def logits(self, ids_T: Tensor) -> Tensor:
        turn = Rotary(self.dims)(torch.arange(len(ids_T)), torch.float32)
        x = torch.cat([rank["embedding.word_embeddings.weight"] for rank in self.ranks])[ids_T]
        for layer in range(self.dims.num_layers):
            at = f"decoder.layers.{layer}."
            x = x + self.attention(x, at + "self_attention.", layer, turn)
            x = x + (self.mixture(x, at) if self.dims.is_moe(layer) else self.mlp(x, at))
        h = self.norm(x, "decoder.final_layernorm.weight")
        return self.columns(h, "output_layer")[:, : self.dims.vocab_size]

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.dims.norm_eps)
        return x * scale * self.ranks[0][name]

    def columns(self, x: Tensor, name: str) -> Tensor:
        """A column-parallel layer whose outputs are gathered."""
        outs = [F.linear(x, r[name + ".weight"], r.get(name + ".bias")) for r in self.ranks]
        return torch.cat(outs, dim=-1)

    def rows(self, parts: Sequence[Tensor], name: str) -> Tensor:
        """A row-parallel layer: partial results are summed, the bias is added once."""
        pairs = zip(parts, self.ranks, strict=True)
        total = torch.stack([F.linear(x, rank[name + ".weight"]) for x, rank in pairs]).sum(0)
        bias = self.ranks[0].get(name + ".bias")
        return total if bias is None else total + bias

    def attention(self, x: Tensor, at: str, layer: int, turn: tuple[Tensor, Tensor]) -> Tensor:
        dims = self.dims
        h = self.norm(x, at + "linear_qkv.layer_norm_weight")
        per_group = dims.num_heads // dims.num_kv_heads
        fused = self.columns(h, at + "linear_qkv")
        fused = fused.unflatten(-1, (dims.num_kv_heads, per_group + 2, dims.head_dim))
        q, k, v = fused[:, :, :per_group].flatten(1, 2), fused[:, :, -2], fused[:, :, -1]
        if dims.qk_norm:
            q, k = self.norm(q, at + "q_layernorm.weight"), self.norm(k, at + "k_layernorm.weight")
        o = self.attend(layer, rotate(q, *turn), rotate(k, *turn), v, window=dims.window(layer))
        widths = [rank[at + "linear_proj.weight"].shape[1] for rank in self.ranks]
        return self.rows(o.flatten(1).split(widths, dim=-1), at + "linear_proj")

    def mlp(self, x: Tensor, at: str) -> Tensor:
        fc1 = at + "mlp.linear_fc1."
        h = self.norm(x, fc1 + "layer_norm_weight")
        parts = [gated(h, rank[fc1 + "weight"], rank.get(fc1 + "bias")) for rank in self.ranks]
        return self.rows(parts, at + "mlp.linear_fc2")

    def mixture(self, x: Tensor, at: str) -> Tensor:
        h = self.norm(x, at + "pre_mlp_layernorm.weight")
        weights, chosen = self.route(h, at + "mlp.router.")
        total = torch.zeros_like(h)
        for e in range(self.dims.num_experts):
            share = torch.where(chosen == e, weights, 0).sum(-1, keepdim=True)
            for rank in self.expert_ranks:
                y = gated(h, rank[f"{at}mlp.experts.linear_fc1.weight{e}"])
                total = total + share * F.linear(y, rank[f"{at}mlp.experts.linear_fc2.weight{e}"])
        return total + self.shared(h, at + "mlp.shared_experts.")

    def route(self, h: Tensor, at: str) -> tuple[Tensor, Tensor]:
        dims, logits = self.dims, F.linear(h, self.ranks[0][at + "weight"])
        scores = logits.sigmoid() if dims.router_score == "sigmoid" else logits.softmax(-1)
        keys = scores + self.ranks[0][at + "expert_bias"] if dims.router_bias else scores
        chosen = keys.topk(dims.num_experts_per_token, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if dims.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * dims.router_scale, chosen

    def shared(self, h: Tensor, at: str) -> Tensor:
        if not self.dims.shared_expert_size:
            return torch.zeros_like(h)
        parts = [gated(h, rank[at + "linear_fc1.weight"]) for rank in self.ranks]
        y = self.rows(parts, at + "linear_fc2")
        if not self.dims.shared_expert_gate:
            return y
        return F.linear(h, self.ranks[0][at + "gate_weight"]).sigmoid() * y


def gated(x: Tensor, fc1: Tensor, bias: Tensor | None = None) -> Tensor:
    gate, up = F.linear(x, fc1, bias).chunk(2, dim=-1)
    return F.silu(gate) * up
