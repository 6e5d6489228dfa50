"""The decoder laid out by `parallel.apply`: where models and parallelism meet."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from pentad.core.errors import UserError
from pentad.core.fit import strict_problems
from pentad.core.layout import Layout
from pentad.core.settings import EngineSettings
from pentad.engine.predictor import Predictor
from pentad.models.decoder import Block, Decoder
from pentad.models.families import spec_of
from pentad.models.moe import Moe
from pentad.ops.logprob import WHOLE_VOCAB, VocabShard
from pentad.parallel.apply import ModelParts, lay_out
from pentad.parallel.blocks import Parts
from pentad.parallel.collectives import reduce_ranks
from pentad.parallel.cuts import Cut, local
from pentad.parallel.experts import CellDispatch
from pentad.parallel.mesh import Axis, Meshes, build_meshes


def wrap_model(
    decoder: Decoder, settings: EngineSettings, device: torch.device, meshes: Meshes | None = None
) -> Predictor:
    """The decoder with everything the settings and the layout ask for around it."""
    meshes = meshes or build_meshes(Layout(), device)
    if settings.strict:
        check_strict(meshes.layout)
    predictor = Predictor(
        decoder, settings.temperature, settings.logprob_bytes, strict=settings.strict
    )
    spec = spec_of(decoder.dims.family)
    parts = ModelParts(
        root=predictor,
        model=decoder,
        blocks=decoder.blocks,
        mixtures=mixtures_of(decoder),
        set_dispatch=partial(_set_dispatch, decoder),
        weight_map=decoder.weight_map,
        plan=spec.plan,
        seams=spec.seams,
    )
    cuts = lay_out(parts, settings, meshes)
    predictor.cuts = cuts
    predictor.tp = meshes.tp
    if decoder.has_lm_head:
        name = "embed.weight" if decoder.head is None else "head.weight"
        predictor.vocab = vocab_shard(cuts[name], meshes.tp)
    if meshes.layout.world > 1:
        decoder.present = partial(present_cut, cuts)
    return predictor


def check_strict(layout: Layout) -> None:
    if problems := list(strict_problems(layout, "the layout")):
        raise UserError(problems)


def mixtures_of(decoder: Decoder) -> dict[int, Parts]:
    found = {}
    for layer, block in decoder.blocks.items():
        if isinstance(block, Block) and isinstance(block.ffn, Moe):
            inner = [block.ffn.experts, block.ffn.shared]
            modules = tuple(module for module in inner if module is not None)
            found[layer] = Parts(Block.mix, block.ffn, modules)
    return found


def _set_dispatch(decoder: Decoder, dispatch: CellDispatch) -> None:
    for module in decoder.modules():
        if isinstance(module, Moe):
            module.dispatch = dispatch


def vocab_shard(cut: Cut, tp: Axis) -> VocabShard:
    """The rows of the head that this rank holds."""
    if tp.size == 1:
        return WHOLE_VOCAB
    over = partial(reduce_ranks, axis=tp)
    return VocabShard(cut.box[0][0], partial(over, op="max"), over)


def present_cut(cuts: dict[str, Cut], name: str, tensor: Tensor) -> Tensor:
    """How a laid out parameter shows to the outside."""
    return cuts[name].present(local(tensor))
