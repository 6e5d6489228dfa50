"""Paged cache of keys and values of one layer, in the model's dtype or in 8 bits with scales.

Shape letters: B blocks of b places, N places of all blocks, T tokens, S selected blocks, K
key-value heads, d head width.

In 8 bits every token and head has its own scale, so there is no calibration and no saturation: the
largest number of a head maps to the largest of the format. int8 has equal steps up to the largest
number, fp8 (e4m3) steps of an eighth to a sixteenth of each number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

EIGHT_BITS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


@dataclass(frozen=True, slots=True)
class Pages:
    """Views of the cache memory of one layer. Values narrower than keys are those of latent
    attention: the first numbers of the keys, without extra memory."""

    k_BbKd: Tensor
    v_BbKd: Tensor
    k_scale_BbK: Tensor | None = None
    v_scale_BbK: Tensor | None = None
    """Scales of values. Both scales are set with 8 bits, else neither."""

    @property
    def largest(self) -> float | None:
        """Largest number of the 8-bit format; None if the cache is not quantised."""
        return None if self.k_scale_BbK is None else LARGEST[self.k_BbKd.dtype]

    @property
    def is_latent(self) -> bool:
        return self.v_BbKd.shape[-1] < self.k_BbKd.shape[-1]

    def write(self, places_T: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> None:
        """Writes keys and values to the cache; a place is block * b + offset."""
        if self.is_latent:
            self.k_BbKd.flatten(0, 1).index_copy_(0, places_T, k_TKd)
            return
        for pages, scales, new_TKd in (
            (self.k_BbKd, self.k_scale_BbK, k_TKd),
            (self.v_BbKd, self.v_scale_BbK, v_TKd),
        ):
            if scales is None:
                pages.flatten(0, 1).index_copy_(0, places_T, new_TKd)
                continue
            stored_TKd, scale_TK = quantise(new_TKd, pages.dtype)
            bits_NKd = pages.view(torch.uint8).flatten(0, 1)
            bits_NKd.index_copy_(0, places_T, stored_TKd.view(torch.uint8))
            scales.flatten(0, 1).index_copy_(0, places_T, scale_TK)

    def read(self, blocks_S: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Reads keys and values of these blocks, [S, b, K, d] each."""
        found = []
        if self.is_latent:
            k_SbKd = self.k_BbKd.index_select(0, blocks_S)
            return k_SbKd, k_SbKd[..., : self.v_BbKd.shape[-1]]
        for pages, scales in ((self.k_BbKd, self.k_scale_BbK), (self.v_BbKd, self.v_scale_BbK)):
            if scales is None:
                found.append(pages.index_select(0, blocks_S))
                continue
            bits = pages.view(torch.uint8).index_select(0, blocks_S).view(pages.dtype)
            scale = scales.index_select(0, blocks_S).unsqueeze(-1)
            found.append((bits.float() * scale).to(dtype))
        return found[0], found[1]


def quantise(x_TKd: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantises to 8 bits with one scale per token and head. A head of zeros has scale 1. A head
    with a non-finite number has scale nan, so it reads as non-finite."""
    largest_TK = x_TKd.float().abs().amax(-1)
    scale_TK = torch.where(largest_TK == 0, 1.0, largest_TK * (1.0 / LARGEST[dtype]))
    scale_TK += 0.0 * largest_TK  # infinity times 0 is nan
    scaled_TKd = x_TKd.float() / scale_TK.unsqueeze(-1)
    return (scaled_TKd.round() if dtype == torch.int8 else scaled_TKd).to(dtype), scale_TK
