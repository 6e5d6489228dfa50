"""The decoder and its heads as one forward pass: token ids in, numbers per token out."""

from __future__ import annotations

from torch import Tensor, nn

from pentad.core.types import Attend
from pentad.models.decoder import Decoder
from pentad.ops.logprob import token_logprobs

Predicted = tuple[Tensor | None, Tensor | None, Tensor | None]
"""(logprobs_T, entropy_T, values_T), None where the decoder has no such head."""


class Predictor(nn.Module):
    """One module around decoder and heads, so that whatever shards or casts weights around a
    forward pass covers the heads too, which are used outside the decoder's own forward."""

    def __init__(self, decoder: Decoder, temperature: float, chunk_bytes: int | None) -> None:
        super().__init__()
        self.decoder = decoder
        self.temperature = temperature
        self.chunk_bytes = chunk_bytes

    def forward(
        self, ids_T: Tensor, positions_T: Tensor, labels_T: Tensor, attend: Attend
    ) -> Predicted:
        hidden_TD = self.decoder(ids_T, positions_T, attend)
        logprobs_T = entropy_T = values_T = None
        if self.decoder.has_lm_head:
            logprobs_T, entropy_T = token_logprobs(
                hidden_TD,
                self.decoder.head_weight,
                labels_T,
                temperature=self.temperature,
                chunk_bytes=self.chunk_bytes,
            )
        if self.decoder.value_head is not None:
            values_T = self.decoder.values(hidden_TD)
        return logprobs_T, entropy_T, values_T
