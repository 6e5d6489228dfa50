"""The decoder and its heads as one module, parallelised by `parallel.apply`."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from pentad.core.dims import ModelDims
from pentad.core.errors import raise_problems
from pentad.core.fit import strict_problems
from pentad.core.layout import Layout
from pentad.core.types import Attend
from pentad.engine.section import EngineSettings
from pentad.models.decoder import Block, Decoder
from pentad.models.families import spec_of
from pentad.models.language_model import LanguageModel
from pentad.models.moe import Moe, Routes
from pentad.ops import invariant
from pentad.ops.logprob import WHOLE_VOCAB, VocabShard, token_logprobs
from pentad.parallel.apply import ModelParts, lay_out
from pentad.parallel.blocks import Parts
from pentad.parallel.collectives import gather_parts, gather_shared, reduce_ranks
from pentad.parallel.cuts import Cut, local
from pentad.parallel.experts import ExpertDispatch
from pentad.parallel.mesh import ALONE, Axis, Meshes, build_meshes
from pentad.weights.lora_map import merged

Predicted = tuple[Tensor | None, Tensor | None, Tensor | None]
"""(logprobs_T, entropy_T, values_T); None if the decoder has no such head."""


class Predictor(nn.Module):
    """One module around decoder and heads, so that FSDP and casts also cover the heads, which are
    used outside the decoder's forward.

    Under tensor parallelism the decoder returns this rank's share of the tokens, and the head is
    split by vocabulary; all tp ranks return equal results for all tokens.
    """

    def __init__(
        self,
        decoder: LanguageModel,
        temperature: float,
        chunk_bytes: int | None,
        *,
        strict: bool = False,
        keep_logits: bool = False,
    ) -> None:
        super().__init__()
        self.decoder = decoder
        self.temperature = temperature
        self.chunk_bytes = chunk_bytes
        self.strict = strict
        self.keep_logits = keep_logits
        bend = decoder.logit_cap
        self.cap = None if bend is None else bend / decoder.logit_scale
        """Soft cap of the logits; scale and temperature are applied together, after it."""
        self.tp: Axis = ALONE
        self.vocab: VocabShard = WHOLE_VOCAB
        self.cuts: dict[str, Cut] = {}
        """The partition of each parameter over ranks, by native name."""

    def forward(
        self,
        ids_T: Tensor,
        positions_T: Tensor,
        labels_T: Tensor,
        attend: Attend,
        routes: Routes | None = None,
    ) -> Predicted | Tensor:
        """Returns predictions; hidden states on every pipeline stage but the last."""
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
                cap=self.cap,
                chunk_bytes=self.chunk_bytes,
                keep=self.keep_logits,
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
                keep=self.keep_logits,
            )
        if self.decoder.value_head is not None:
            values_T = gather_shared(self.decoder.values(hidden_TD), self.tp)
        return logprobs_T, entropy_T, values_T


def wrap_model(
    decoder: Decoder, settings: EngineSettings, device: torch.device, meshes: Meshes | None = None
) -> Predictor:
    """Wraps the decoder according to settings and layout."""
    meshes = meshes or build_meshes(Layout(), device)
    if settings.strict:
        check_strict(meshes.layout, decoder.dims)
    predictor = Predictor(
        decoder,
        settings.temperature,
        settings.logprob_bytes,
        strict=settings.strict,
        keep_logits=settings.model.archon.keep_logits is True,
    )
    spec = spec_of(decoder.dims.family)
    parts = ModelParts(
        root=predictor,
        model=decoder,
        blocks=decoder.blocks,
        mixtures=mixtures_of(decoder),
        set_dispatch=partial(_set_dispatch, decoder),
        weight_map=merged(decoder.weight_map, decoder.adapter_map),
        plan=spec.plan,
        seams=spec.seams,
    )
    cuts = lay_out(parts, settings.model, meshes)
    predictor.cuts = cuts
    predictor.tp = meshes.tp
    if decoder.has_lm_head:
        name = "embed.weight" if decoder.head is None else "head.weight"
        predictor.vocab = vocab_shard(cuts[name], meshes.tp)
    if meshes.layout.world > 1:
        decoder.present = partial(present_cut, cuts)
    return predictor


def check_strict(layout: Layout, dims: ModelDims | None = None) -> None:
    raise_problems(strict_problems(layout, "the layout", dims))


def mixtures_of(decoder: Decoder) -> dict[int, Parts]:
    found = {}
    for layer, block in decoder.blocks.items():
        if isinstance(block, Block) and isinstance(block.ffn, Moe):
            inner = [block.ffn.experts, block.ffn.shared]
            modules = tuple(module for module in inner if module is not None)
            found[layer] = Parts(type(block).mix, block.ffn, modules)
    return found


def _set_dispatch(decoder: Decoder, dispatch: ExpertDispatch) -> None:
    for module in decoder.modules():
        if isinstance(module, Moe):
            module.dispatch = dispatch


def vocab_shard(cut: Cut, tp: Axis) -> VocabShard:
    """Returns this rank's rows of the head."""
    if tp.size == 1:
        return WHOLE_VOCAB
    over = partial(reduce_ranks, axis=tp)
    return VocabShard(cut.box[0][0], partial(over, op="max"), over)


def present_cut(cuts: dict[str, Cut], name: str, tensor: Tensor) -> Tensor:
    """Returns the DTensor view of a sharded parameter."""
    return cuts[name].present(local(tensor))
