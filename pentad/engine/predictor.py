"""The decoder and its heads as one forward pass: token ids in, numbers per token out."""

from __future__ import annotations

from torch import Tensor, nn

from pentad.core.types import Attend
from pentad.models.language_model import LanguageModel
from pentad.models.moe import Routes
from pentad.ops import invariant
from pentad.ops.logprob import WHOLE_VOCAB, VocabShard, token_logprobs
from pentad.parallel.collectives import gather_parts, gather_shared
from pentad.parallel.cuts import Cut
from pentad.parallel.mesh import ALONE, Axis

Predicted = tuple[Tensor | None, Tensor | None, Tensor | None]
"""(logprobs_T, entropy_T, values_T), None where the decoder has no such head."""


class Predictor(nn.Module):
    """One module around decoder and heads, so that whatever shards or casts weights around a
    forward pass covers the heads too, which are used outside the decoder's own forward.

    Under tensor parallelism the decoder gives this rank's share of the tokens, and the head is cut
    by vocabulary: all tp ranks return the same numbers for all tokens.
    """

    def __init__(
        self,
        decoder: LanguageModel,
        temperature: float,
        chunk_bytes: int | None,
        *,
        strict: bool = False,
    ) -> None:
        super().__init__()
        self.decoder = decoder
        self.temperature = temperature
        self.chunk_bytes = chunk_bytes
        self.strict = strict
        bend = decoder.logit_cap
        self.cap = None if bend is None else bend / decoder.logit_scale
        """Of the head's product: scale and temperature are applied to it together, after it."""
        self.tp: Axis = ALONE
        self.vocab: VocabShard = WHOLE_VOCAB
        self.cuts: dict[str, Cut] = {}
        """Who holds what of each parameter, by native name."""

    def forward(
        self,
        ids_T: Tensor,
        positions_T: Tensor,
        labels_T: Tensor,
        attend: Attend,
        routes: Routes | None = None,
    ) -> Predicted | Tensor:
        """Of a pipeline stage before the last, the hidden states for the next."""
        hidden_TD: Tensor = self.decoder(ids_T, positions_T, attend, routes)
        if not self.decoder.is_last:
            return hidden_TD
        logprobs_T = entropy_T = values_T = None
        if self.decoder.has_lm_head and self.strict:
            logprobs_T, entropy_T = invariant.token_logprobs(
                hidden_TD,
                self.decoder.head_weight,
                labels_T,
                temperature=self.temperature,
                chunk_bytes=self.chunk_bytes,
            )
        elif self.decoder.has_lm_head:
            logprobs_T, entropy_T = token_logprobs(
                gather_parts(hidden_TD, self.tp),
                self.decoder.head_weight,
                labels_T,
                temperature=self.temperature / self.decoder.logit_scale,
                cap=self.cap,
                chunk_bytes=self.chunk_bytes,
                shard=self.vocab,
            )
        if self.decoder.value_head is not None:
            values_T = gather_shared(self.decoder.values(hidden_TD), self.tp)
        return logprobs_T, entropy_T, values_T
