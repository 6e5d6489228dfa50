"""What a loss is a mean over, as per-token weights and one count per sample.

A step's gradient is sum(weights * terms) / sum(counts). With n_s sampled tokens in sample s,
n_g in group g, and L the most tokens that may be sampled in one sample:

    token      weight 1        count n_s          mean over all tokens of the batch
    sequence   weight 1/n_s    count 1            mean over samples of their token means
    group      weight 1/n_g    count n_s/n_g      mean over prompts of their token means
    constant   weight 1/L      count 1            mean over samples of token sums, over L (Dr.GRPO)

Weights and counts depend on a sample's own group at most, so any split of the rows over ranks,
microbatches or chunks gives the same gradient. Samples without sampled tokens weigh and count 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pentad.core.algorithms import LossNorm


@dataclass(frozen=True, slots=True)
class Normalisation:
    """The trained tokens' weights, 0 elsewhere, and each sample's share of the count."""

    weights_T: Tensor
    counts_S: Tensor


def normalise(
    loss_norm: LossNorm,
    mask_T: Tensor,
    samples_T: Tensor,
    groups_S: Tensor,
    *,
    max_new_tokens: int,
) -> Normalisation:
    mask = mask_T.double()
    num_S = mask.new_zeros(groups_S.numel()).index_add(0, samples_T, mask)
    is_trained_S = (num_S > 0).double()
    if loss_norm == "token":
        return Normalisation(mask, num_S)
    if loss_norm == "sequence":
        return Normalisation(mask / num_S.clamp(min=1)[samples_T], is_trained_S)
    if loss_norm == "constant":
        return Normalisation(mask / max_new_tokens, is_trained_S)
    labels, index_S = torch.unique(groups_S, return_inverse=True)
    num_G = mask.new_zeros(labels.numel()).index_add(0, index_S, num_S).clamp(min=1)
    return Normalisation(mask / num_G[index_S][samples_T], num_S / num_G[index_S])
