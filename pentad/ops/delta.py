"""The gated delta rule over packed sequences, and the short convolution before it.

Each head has a state S [k, v]. Each token decays S, moves the value stored for its key towards its
own value by the factor beta, and reads S with its query:

    S = exp(decay) S;  S = S + beta key (value - key S);  out = query S / sqrt(k)

Whole sequences are processed in chunks (https://arxiv.org/abs/2412.06464): within a chunk by matrix
products and one triangular solve, all chunks at once; from chunk to chunk by a scan over states.
Each sequence starts a new chunk, so states never cross sequences. Math is in float32, as in
transformers.

Shapes: T packed tokens, P padded slots, N chunks, C slots of a chunk, S sequences, H value heads,
k and v width of a key and of a value, W width of the convolution, X channels of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pentad.core.sizes import DELTA_CHUNK as CHUNK
from pentad.core.sizes import DELTA_EPS as EPS
from pentad.core.types import Attend
from pentad.ops.attention import from_slots, to_slots

try:
    from pentad.ops.delta_kernel import invert
except ImportError:
    HAS_TRITON = False
else:
    HAS_TRITON = True


class DeltaMemory(Protocol):
    """Interface to the state that delta-net layers keep of earlier tokens of the same sequence."""

    def convolve(self, layer: int, x_TX: Tensor, weight_XW: Tensor) -> Tensor:
        """Causal depthwise convolution: the weighted sum of the last W tokens of each channel."""
        ...

    def recall(
        self, layer: int, q_THk: Tensor, k_THk: Tensor, v_THv: Tensor, g_TH: Tensor, b_TH: Tensor
    ) -> Tensor:
        """Applies the delta rule with log decays g and betas b, from raw queries and keys."""
        ...


class RememberingAttend:
    """An attention implementation together with the `DeltaMemory` that delta-net layers use."""

    def __init__(self, inner: Attend, memory: DeltaMemory) -> None:
        self.inner = inner
        self.memory = memory

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
        return self.inner(layer, q_THd, k_TKd, v_TKd, **how)


def with_memory(attend: Attend, positions_T: Tensor) -> RememberingAttend:
    """Adds a `PackedMemory` to `attend` unless it already has a memory. A sequence starts at each
    position 0."""
    if isinstance(attend, RememberingAttend):
        return attend
    starts = torch.nonzero(positions_T == 0).flatten().tolist()
    assert starts and starts[0] == 0, "packed rows begin with the first token of a sequence"
    lengths = np.diff([*starts, len(positions_T)])
    return RememberingAttend(attend, PackedMemory(lengths.tolist(), positions_T.device))


class ChunkPlan:
    """Layout of packed tokens in chunks. Chunks of one scan step are contiguous, longest sequences
    first, so the sequences that are not finished are always a leading slice."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        length_S = np.asarray(lengths, np.int64)
        chunks_S = -(-length_S // CHUNK)
        order = np.argsort(-chunks_S, kind="stable")
        rank_S = np.empty_like(order)
        rank_S[order] = np.arange(len(order))
        under_way = np.searchsorted(-chunks_S[order], -np.arange(int(chunks_S.max())), "left")
        first = np.cumsum(under_way) - under_way
        place_T = np.arange(int(length_S.sum()))
        place_T -= np.repeat(np.cumsum(length_S) - length_S, length_S)
        chunk_T = first[place_T // CHUNK] + np.repeat(rank_S, length_S)
        self.order = order
        """Sequence indices in the order of the states of the scan."""
        self.place_T = torch.from_numpy(place_T).to(device)
        self.slot_T = torch.from_numpy(chunk_T * CHUNK + place_T % CHUNK).to(device)
        self.num_slots = int(chunks_S.sum()) * CHUNK
        self.counts = torch.from_numpy(under_way)
        """Number of sequences in each step of the scan; on the CPU, where it is read."""


class PackedMemory:
    """Implements `DeltaMemory` for packed sequences (training and prefill)."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.plan = ChunkPlan(lengths, device)
        self.num = len(lengths)

    def convolve(self, layer: int, x_TX: Tensor, weight_XW: Tensor) -> Tensor:
        wide_TX, width = widened(x_TX), weight_XW.shape[1]
        weight_XW = weight_XW.to(wide_TX.dtype)
        out_TX = wide_TX * weight_XW[:, -1]
        for back in range(1, width):
            earlier_TX = F.pad(wide_TX, (0, 0, back, 0))[: len(wide_TX)]
            is_here_T1 = (self.plan.place_T >= back)[:, None]
            earlier_TX = torch.where(is_here_T1, earlier_TX, 0.0)
            out_TX = out_TX + earlier_TX * weight_XW[:, width - 1 - back]
        return out_TX.to(x_TX.dtype)

    def recall(
        self, layer: int, q_THk: Tensor, k_THk: Tensor, v_THv: Tensor, g_TH: Tensor, b_TH: Tensor
    ) -> Tensor:
        shape = (self.num, v_THv.shape[1], k_THk.shape[2], v_THv.shape[2])
        state_SHkv = torch.zeros(shape, dtype=torch.float32, device=v_THv.device)
        return recall_chunks(self.plan, q_THk, k_THk, v_THv, g_TH, b_TH, state_SHkv)[0]


def widened(x: Tensor) -> Tensor:
    """x in float32, or unchanged if its dtype is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def of_unit_length(x: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPS)


def spread(x_TKk: Tensor, num_heads: int) -> Tensor:
    """Repeats queries or keys for each value head of their group."""
    return x_TKk.repeat_interleave(num_heads // x_TKk.shape[1], dim=1)


def recall_chunks(
    plan: ChunkPlan,
    q_THk: Tensor,
    k_THk: Tensor,
    v_THv: Tensor,
    g_TH: Tensor,
    b_TH: Tensor,
    state_SHkv: Tensor,
) -> tuple[Tensor, Tensor]:
    """Chunked delta rule over whole sequences; `state_SHkv` holds initial states in the plan's
    order. Returns the outputs and the final states, in the same order."""
    num_heads, dtype = v_THv.shape[1], q_THk.dtype
    q_THk, k_THk = (spread(of_unit_length(x), num_heads) for x in (q_THk, k_THk))

    def chunked(x: Tensor) -> Tensor:
        """[T, H, w] to [N, H, C, w]; padding slots are 0 and do not change the state."""
        slots = to_slots(x, plan.slot_T, plan.num_slots)
        # Contiguous, or each matrix product would copy it for backward.
        return slots.unflatten(0, (-1, CHUNK)).transpose(1, 2).contiguous()

    q, k, v = chunked(q_THk * q_THk.shape[-1] ** -0.5), chunked(k_THk), chunked(v_THv.float())
    g, b = chunked(g_TH.float()[..., None]), chunked(b_TH.float()[..., None])
    sums = g.cumsum(-2)  # [N, H, C, 1]: the log decay since the start of the chunk
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    pairs = (sums - sums.transpose(-1, -2)).masked_fill(later, float("-inf")).exp()
    k_b = k * b
    system = (k_b @ k.transpose(-1, -2)) * pairs
    # Values and their dependence on the chunk's first state, solved as one linear system.
    sides = torch.cat((v * b, k_b * sums.exp()), dim=-1)
    solved = solve_lower(system, sides)
    values, owed = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    whole = sums[:, :, -1:]
    news, states, last = scan(
        values, owed, k * (whole - sums).exp(), whole[:, :, 0, 0].exp(), state_SHkv, plan.counts
    )
    out = (q * sums.exp()) @ states + ((q @ k.transpose(-1, -2)) * pairs) @ news
    out_THv = from_slots(out.transpose(1, 2).flatten(0, 1), plan.slot_T)
    return out_THv.to(dtype), last


def recall_token(
    q_SHk: Tensor, k_SHk: Tensor, v_SHv: Tensor, g_SH: Tensor, b_SH: Tensor, state_SHkv: Tensor
) -> tuple[Tensor, Tensor]:
    """Delta rule for one token per sequence: returns the outputs and the new states."""
    num_heads, dtype = v_SHv.shape[1], q_SHk.dtype
    q_SHk, k_SHk = (spread(of_unit_length(x), num_heads) for x in (q_SHk, k_SHk))
    state = state_SHkv * g_SH.float().exp()[..., None, None]
    known_SHv = (state * k_SHk[..., None]).sum(-2)
    change_SHv = (v_SHv.float() - known_SHv) * b_SH.float()[..., None]
    state = state + k_SHk[..., None] * change_SHv[..., None, :]
    out_SHv = (state * (q_SHk * q_SHk.shape[-1] ** -0.5)[..., None]).sum(-2)
    return out_SHv.to(dtype), state


def solve_lower(system: Tensor, sides: Tensor) -> Tensor:
    """Solves unit lower-triangular systems; the diagonal is read as ones. Uses inverses from one
    kernel: GPU solvers take many times longer for a batch of small systems."""
    if system.is_cuda and HAS_TRITON:
        return inverse_of(system) @ sides
    return torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)


@torch.library.custom_op("pentad::lower_inverse", mutates_args=())
def inverse_of(system: Tensor) -> Tensor:
    """Inverse of [..., C, C] unit lower-triangular matrices, by forward substitution."""
    return invert(system)


@inverse_of.register_fake
def _(system: Tensor) -> Tensor:
    return torch.empty_like(system, memory_format=torch.contiguous_format)


def _keep_inverse(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _differentiate_inverse(ctx: Any, grad: Tensor) -> Tensor:
    (inverse,) = ctx.saved_tensors
    turned = inverse.transpose(-1, -2)
    return -(turned @ grad @ turned).tril(-1)


inverse_of.register_autograd(_differentiate_inverse, setup_context=_keep_inverse)


# The scan over chunks. A custom op: a compiler would unroll the loop and recompile for every number
# of chunks.


@torch.library.custom_op("pentad::delta_scan", mutates_args=())
def scan(
    values: Tensor, owed: Tensor, keys: Tensor, decays: Tensor, state: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Scans chunks of values [N, H, C, v], owed and keys [N, H, C, k], decays [N, H] and state [S,
    H, k, v]. Returns corrected values, the state before each chunk and final states."""
    news, last = torch.empty_like(values, memory_format=torch.contiguous_format), state.clone()
    states = values.new_empty((values.shape[0], *state.shape[1:]))
    nums = [*counts.tolist(), 0]
    states[: nums[0]] = state[: nums[0]]
    start = 0
    for num, num_next in itertools.pairwise(nums):
        at, end = slice(start, start + num), start + num
        own, new = states[at], news[at]
        _added(values[at], owed[at], own, out=new, alpha=-1)
        # The state after this chunk is stored before the next chunk or among the final states.
        for part, target in (
            (slice(num_next), states[end : end + num_next]),
            (slice(num_next, num), last[num_next:num]),
        ):
            if len(target):
                torch.mul(own[part], decays[at][part, :, None, None], out=target)
                _added(target, keys[at][part].transpose(-1, -2), new[part], out=target)
        start = end
    return news, states, last


def _added(c: Tensor, a: Tensor, b: Tensor, *, out: Tensor, alpha: float = 1) -> None:
    """c + alpha a b, batched over two leading dimensions, as one kernel."""
    flat = (x.flatten(0, 1) for x in (c, a, b))
    torch.baddbmm(*flat, alpha=alpha, out=out.view(-1, *out.shape[2:]))


@scan.register_fake
def _(
    values: Tensor, owed: Tensor, keys: Tensor, decays: Tensor, state: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    news = torch.empty_like(values, memory_format=torch.contiguous_format)
    return news, values.new_empty((values.shape[0], *state.shape[1:])), torch.empty_like(state)


@torch.library.custom_op("pentad::delta_scan_backward", mutates_args=())
def scan_backward(
    owed: Tensor,
    keys: Tensor,
    decays: Tensor,
    counts: Tensor,
    d_news: Tensor,
    d_states: Tensor,
    d_last: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the corrected values and of the state after each chunk, including those through
    later chunks, and the gradient of the initial states."""
    d_values, d_after = torch.empty_like(d_news), torch.empty_like(d_states)
    d_state = d_last.clone()
    start = int(counts.sum())
    for num in reversed(counts.tolist()):
        start -= num
        at, own = slice(start, start + num), d_state[:num]
        d_after[at] = own
        _added(d_news[at], keys[at], own, out=d_values[at])
        own.mul_(decays[at, :, None, None]).add_(d_states[at])
        _added(own, owed[at].transpose(-1, -2), d_values[at], out=own, alpha=-1)
    return d_values, d_after, d_state


@scan_backward.register_fake
def _(
    owed: Tensor,
    keys: Tensor,
    decays: Tensor,
    counts: Tensor,
    d_news: Tensor,
    d_states: Tensor,
    d_last: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(d_news), torch.empty_like(d_states), torch.empty_like(d_last)


def _remember(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    _, owed, keys, decays, _, counts = inputs
    ctx.save_for_backward(owed, keys, decays, counts, *output[:2])


def _differentiate(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    owed, keys, decays, counts, news, states = ctx.saved_tensors
    parts = [grad.contiguous() for grad in grads]
    d_values, d_after, d_state = scan_backward(owed, keys, decays, counts, *parts)
    d_owed = -(d_values @ states.transpose(-1, -2))
    d_keys = news @ d_after.transpose(-1, -2)
    d_decays = (d_after * states).sum((-1, -2))
    return d_values, d_owed, d_keys, d_decays, d_state, None


scan.register_autograd(_differentiate, setup_context=_remember)
