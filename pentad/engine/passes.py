"""Forward and backward passes of microbatches through the model of one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from pentad.core.device import DTYPES
from pentad.core.errors import RunError
from pentad.core.faults import hit, is_armed
from pentad.core.types import Attend, Loss, TokenOutputs
from pentad.engine.batch import PackedRows
from pentad.engine.explain import explain
from pentad.engine.graphs import GraphRecorder, Trained, TrainGraphs
from pentad.engine.outputs import Sums
from pentad.engine.predictor import Predicted, Predictor
from pentad.engine.section import EngineSettings
from pentad.models.balance import ExpertLoads
from pentad.models.moe import Routes
from pentad.ops.attention import attend_captured, build_attend, by_width
from pentad.ops.delta import PackedMemory, RememberingAttend
from pentad.ops.invariant import PackedAttend
from pentad.ops.tree import build_tree_attend
from pentad.parallel.context import UlyssesAttend
from pentad.parallel.mesh import Meshes
from pentad.parallel.storage import reshard


class Passes(Protocol):
    """Interface to an engine's forward and backward passes over microbatches. Every rank gets the
    same results, even if it has only a part of the model."""

    loads: ExpertLoads
    """Counts the tokens that `train` sends to the experts on this rank."""
    graphs: TrainGraphs | None
    """Captured passes; None if none are captured."""

    def forward(
        self, microbatches: Iterable[PackedRows], noted: list[Routes] | None = None
    ) -> list[Predicted]:
        """Returns log-probs and values, without gradients. `noted`: receives the experts of each
        microbatch's tokens."""
        ...

    def train(
        self, microbatches: Iterable[PackedRows], loss: Loss, *, last: bool
    ) -> tuple[list[Predicted], list[Sums]]:
        """Accumulates gradients; they are complete after the call with `last`."""
        ...

    def give_up(self) -> None:
        """Called before incomplete gradients are dropped."""
        ...


class WholePasses:
    """Passes of a rank with the whole model, one microbatch at a time."""

    def __init__(self, predictor: Predictor, settings: EngineSettings, meshes: Meshes) -> None:
        self.predictor = predictor
        self.settings = settings
        self.meshes = meshes
        self.loads = ExpertLoads(predictor.decoder.dims, meshes.device)
        self.graphs: TrainGraphs | None = None

    def capture(
        self, parameters: Iterable[Tensor], recorder: GraphRecorder, *, is_required: bool = False
    ) -> TrainGraphs:
        """From now on captures microbatches that are padded to buckets. `parameters`: the trained
        ones."""
        self.graphs = TrainGraphs(
            self.predictor, parameters, self._train_bucket, recorder, is_required=is_required
        )
        return self.graphs

    @torch.no_grad()
    def forward(
        self, microbatches: Iterable[PackedRows], noted: list[Routes] | None = None
    ) -> list[Predicted]:
        predicted: list[Predicted] = []
        try:
            for packed in microbatches:
                routes: Routes | None = None if noted is None else {}
                with explain("scoring", self.settings.model, packed.num_tokens):
                    logprobs_T, _, values_T = self._predict(packed, routes)
                predicted.append((logprobs_T, None, values_T))
                if noted is not None and routes is not None:
                    noted.append(routes)
        finally:
            reshard(self.predictor)
        return predicted

    def train(
        self, microbatches: Iterable[PackedRows], loss: Loss, *, last: bool
    ) -> tuple[list[Predicted], list[Sums]]:
        predicted: list[Predicted] = []
        sums: list[Sums] = []
        graphs = self.graphs
        with nullcontext() if graphs is None else graphs.running():
            try:
                for packed in microbatches:
                    with explain("forward and backward", self.settings.model, packed.num_tokens):
                        hit("forward")
                        if graphs is None or packed.bucket is None or is_armed():
                            loss_sum, stats, named = self._train(packed, loss)
                        else:
                            loss_sum, stats, named = graphs.train(packed, loss)
                    sums.append((loss_sum, stats))
                    predicted.append(cut_all(named, packed.num_given))
            finally:
                reshard(self.predictor)
        return predicted, sums

    def _train(self, packed: PackedRows, loss: Loss) -> Trained:
        routes: Routes = {}
        loss_sum, stats, named = apply_loss(packed, loss, self._predict(packed, routes))
        self.loads.add(without_filling(routes, packed, self.meshes))
        if is_armed():
            loss_sum.register_hook(lambda _: hit("backward"))
        loss_sum.backward()
        return loss_sum.detach(), stats, detach_all(named)

    def _train_bucket(self, packed: PackedRows, loss: Loss) -> Trained:
        """`_train` without copies from the host, which a captured pass cannot make."""
        assert packed.bucket is not None
        attend = by_width(
            partial(
                attend_captured,
                packed.segments.lengths_S,
                packed.bucket.longest,
                dtype=DTYPES[self.settings.model.dtype],
                longest=self.settings.max_row_tokens,
            ),
            self.predictor.decoder.dims.head_dims,
        )
        predicted = self.predictor(packed.ids_U, packed.positions_U, packed.labels_U, attend)
        loss_sum, stats, named = apply_loss(packed, loss, predicted)
        loss_sum.backward()
        own = {name: x.detach() for name, x in stats.items()}
        return loss_sum.detach(), own, detach_all(named)

    def give_up(self) -> None:
        pass

    def _predict(self, packed: PackedRows, routes: Routes | None = None) -> Predicted:
        result = run_part(self.predictor, packed, None, routes, self.settings, self.meshes)
        assert not isinstance(result, Tensor), "the whole model ends in its heads"
        return result


def run_part(
    part: Predictor,
    packed: PackedRows,
    hidden_TD: Tensor | None,
    routes: Routes | None,
    settings: EngineSettings,
    meshes: Meshes,
) -> Predicted | Tensor:
    """Runs a model part on one microbatch, from its ids or from the output of the previous part.
    `routes` are filled in, or used if the rows have them."""
    dims, tree = part.decoder.dims, packed.tree
    build: Callable[..., Attend] = partial(build_attend, capped=dims.score_cap is not None)
    if tree is not None:
        build = partial(build_tree_attend, tree.plan, tree.rows)
    build_here = partial(
        build,
        packed.lengths,
        device=meshes.device,
        dtype=DTYPES[settings.model.dtype],
        longest=settings.max_row_tokens,
    )
    attend = by_width(build_here, dims.head_dims)
    if settings.strict:
        attend = PackedAttend(packed.lengths, attend, meshes.device)
    if dims.linear_layers:
        attend = RememberingAttend(attend, PackedMemory(packed.lengths, meshes.device))
    if meshes.cp.size > 1:
        attend = UlyssesAttend(attend, meshes.cp)
    if packed.routes_TLk is not None:
        mine_TLk = packed.routes_TLk.chunk(meshes.tp.size)[meshes.tp.rank]
        layers = [n for n in range(dims.num_layers) if dims.is_moe(n)]
        given_Tk = dict(zip(layers, mine_TLk.unbind(1), strict=True))
        routes = {} if routes is None else routes
        routes.update({n: given_Tk[n] for n in given_Tk if n in part.decoder.blocks})
    given = packed.ids_U if hidden_TD is None else hidden_TD
    result: Predicted | Tensor = part(given, packed.positions_U, packed.labels_U, attend, routes)
    if tree is None or isinstance(result, Tensor):
        return result
    logprobs_T, entropy_T, values_T = map(tree.spread, result)
    return logprobs_T, entropy_T, values_T


def without_filling(routes: Routes, packed: PackedRows, meshes: Meshes) -> Routes:
    """Returns the routes of this rank's tokens, without padding."""
    num_here = len(packed.ids_U) // meshes.tp.size
    num_real = min(max(packed.num_real - meshes.tp.rank * num_here, 0), num_here)
    return {layer: chosen_Tk[:num_real] for layer, chosen_Tk in routes.items()}


def apply_loss(
    packed: PackedRows, loss: Loss, predicted: Predicted
) -> tuple[Tensor, dict[str, Tensor], Predicted]:
    """Returns the loss, its statistics, and the per-token results."""
    logprobs_T, entropy_T, values_T = predicted
    shown_T = entropy_T
    if entropy_T is not None and not loss.needs_entropy:
        shown_T = entropy_T.detach()
    if logprobs_T is None:  # a critic: the loss reads values only
        assert values_T is not None, "the model has neither a language head nor a value head"
        logprobs_T = torch.zeros_like(values_T, requires_grad=False)
        named: Predicted = (None, None, values_T)
    else:
        named = (logprobs_T, entropy_T, values_T)
    stats: dict[str, Tensor] = {}
    if packed.num_rows == 0:  # only padding: a zero that depends on all outputs
        heads = [x_T for x_T in named if x_T is not None]
        loss_sum = torch.stack([x_T.sum() * 0 for x_T in heads]).sum()
    else:
        outputs = TokenOutputs(logprobs_T, shown_T, values_T, packed.segments)
        loss_sum, stats = loss(outputs, packed.columns)
    if not loss_sum.requires_grad:
        raise RunError(f"{type(loss).__name__} does not depend on what the model computed")
    return loss_sum, stats, named


def cut_all(predicted: Predicted, num: int) -> Predicted:
    """Drops the padding of a bucket."""
    logprobs_T, entropy_T, values_T = (None if x is None else x[:num] for x in predicted)
    return logprobs_T, entropy_T, values_T


def detach_all(predicted: Predicted) -> Predicted:
    logprobs_T, entropy_T, values_T = (None if x is None else x.detach() for x in predicted)
    return logprobs_T, entropy_T, values_T
