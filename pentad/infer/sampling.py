"""Sampling of tokens: randomness keyed by (seed, position), and log-probs of the sampled tokens.

Shape letters: N rows to sample, V vocabulary, C chunks of the vocabulary. A sample uses one uniform
number, a hash of the continuation's seed and the token's position, independent of batch slot,
neighbours and device state. It is the first token whose cumulative probability exceeds that number.
The reported log-prob is under softmax(logits / temperature), before top-k and top-p, in fp32.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK = 128
HOST_LOGITS = 1 << 18
"""Maximum number of logits processed at once in host memory: more exceed the CPU caches, and arrays
of several MiB are mapped anew each time."""
UNIFORM_BITS = 40
"""Resolution of the uniform numbers; (1 - 2**-40) * total stays below total in fp64."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (https://doi.org/10.1145/2660193.2660195): a 64-bit bijection."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One number in [0, 1) per (seed, position): entry `position` of the seed's splitmix64."""
    places = positions.astype(np.uint64) + np.uint64(1)
    bits = _mix(_mix(seeds + _GOLDEN) + places * _GOLDEN)
    return (bits >> np.uint64(64 - UNIFORM_BITS)).astype(np.float64) * 2.0**-UNIFORM_BITS


def draw(
    logits_NV: Tensor,
    uniform_N: Tensor,
    temperature_N: Tensor,
    top_k_N: Tensor | None = None,
    top_p_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Samples ids and their log-probs; temperature 0 takes the most likely id. No host
    synchronisation."""
    num_rows = max(1, HOST_LOGITS // logits_NV.shape[1])
    if logits_NV.device.type == "cpu" and len(logits_NV) > num_rows:
        given = (logits_NV, uniform_N, temperature_N, top_k_N, top_p_N)
        parts = zip(*(x.split(num_rows) for x in given if x is not None), strict=True)
        drawn = [draw(*part) for part in parts]
        return torch.cat([ids for ids, _ in drawn]), torch.cat([x for _, x in drawn])
    logits_NV = logits_NV.float()
    is_greedy_N = temperature_N <= 0
    divisor_N = torch.where(is_greedy_N, 1.0, temperature_N)
    scaled_NV = logits_NV / divisor_N[:, None]
    largest_N = scaled_NV.amax(dim=-1)
    weights_NV = (scaled_NV - largest_N[:, None]).exp_()
    total_N = largest_N + weights_NV.sum(-1).log()  # `logsumexp` would recompute all exponentials
    if top_k_N is not None and top_p_N is not None:
        weights_NV = truncate(weights_NV, top_k_N, top_p_N)
    ids_N = invert_cdf(weights_NV, uniform_N)
    if logits_NV.device.type != "cpu" or is_greedy_N.any():
        ids_N = torch.where(is_greedy_N, scaled_NV.argmax(dim=-1), ids_N)
    logprobs_N = scaled_NV.gather(1, ids_N[:, None]).squeeze(1) - total_N
    return ids_N, logprobs_N


def likeliest(logits_NV: Tensor, temperature_N: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Returns ids and log-probs (as in `draw`) of the `num` most likely tokens of each row."""
    logits_NV = logits_NV.float()
    scaled_NV = logits_NV / torch.where(temperature_N <= 0, 1.0, temperature_N)[:, None]
    values_Nk, ids_Nk = scaled_NV.topk(num, dim=-1)
    return ids_Nk, values_Nk - torch.logsumexp(scaled_NV, dim=-1)[:, None]


def invert_cdf(weights_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """Returns the first index at which the running sum of weights exceeds uniform * total.

    Sums in fp64, first over chunks and then inside the selected one, so a large vocabulary costs
    one pass. Never returns an index of weight 0.
    """
    num_draws, vocab_size = weights_NV.shape
    width = vocab_size if vocab_size <= 8 * CHUNK else CHUNK
    if vocab_size % width:
        weights_NV = F.pad(weights_NV, (0, width - vocab_size % width))
    chunks_NCV = weights_NV.view(num_draws, -1, width)
    sums_NC = chunks_NCV.sum(-1, dtype=torch.float64).cumsum(-1)
    target_N = uniform_N * sums_NC[:, -1]
    chunk_N = (sums_NC <= target_N[:, None]).sum(-1)
    before_N = F.pad(sums_NC, (1, 0)).gather(1, chunk_N[:, None]).squeeze(1)
    picked_NV = chunks_NCV[torch.arange(num_draws, device=chunk_N.device), chunk_N]
    inner_NV = picked_NV.cumsum(-1, dtype=torch.float64)
    # The two sums round differently: clamp the rest to the chunk.
    below_one = 1.0 - 2.0**-UNIFORM_BITS
    rest_N = torch.minimum(target_N - before_N, inner_NV[:, -1] * below_one)
    return chunk_N * width + (inner_NV <= rest_N[:, None]).sum(-1)


def truncate(weights_NV: Tensor, top_k_N: Tensor, top_p_N: Tensor) -> Tensor:
    """Zeroes weights outside the k largest, then outside their smallest head with mass p."""
    vocab_size = weights_NV.shape[1]
    sorted_NV, order_NV = weights_NV.sort(dim=-1, descending=True, stable=True)
    limit_N = torch.where(top_k_N > 0, top_k_N, vocab_size)
    rank_V = torch.arange(vocab_size, device=weights_NV.device)
    sorted_NV = torch.where(rank_V < limit_N[:, None], sorted_NV, 0.0)
    sums_NV = sorted_NV.cumsum(-1, dtype=torch.float64)
    before_NV = sums_NV - sorted_NV
    # The first index always stays: no mass is before it.
    is_in_head_NV = (before_NV < top_p_N[:, None] * sums_NV[:, -1:]) | (top_p_N >= 1)[:, None]
    sorted_NV = torch.where(is_in_head_NV, sorted_NV, 0.0)
    return torch.zeros_like(weights_NV).scatter_(1, order_NV, sorted_NV)
