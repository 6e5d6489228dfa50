"""The stages of a Megatron model on one rank, their weights by name, and their gradients.

A weight is a block of a whole tensor of `models.megatron_names`, or this rank's share of a block
(`masters`). Gradients accumulate in the buffers of Megatron's DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from pentad.core.device import DTYPES
from pentad.core.dims import ModelDims
from pentad.core.types import Loss
from pentad.engine.batch import PackedRows
from pentad.engine.held import HeldModel
from pentad.engine.megatron.config import transformer_config
from pentad.engine.megatron.core import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    GPTModel,
    finalize_model_grads,
    join_groups,
    virtual_stages,
)
from pentad.engine.megatron.masters import SharedWeight, follow_masters
from pentad.engine.megatron.model import MegatronStage, build_gpt
from pentad.engine.megatron.schedule import MegatronSchedule
from pentad.engine.outputs import Sums
from pentad.engine.passes import Passes, WholePasses
from pentad.engine.pipelined import PipelinedPasses
from pentad.engine.predictor import Predicted, Predictor, present_cut, vocab_shard
from pentad.engine.section import EngineSettings
from pentad.models.megatron_names import (
    HEAD,
    PLAN,
    SELECTION_BIAS,
    TABLE,
    build_named,
    learner_map,
    whole_name,
)
from pentad.models.moe import Routes
from pentad.parallel.cuts import Cut, storage_dim
from pentad.parallel.mesh import ALONE, Axis, Meshes
from pentad.parallel.pipeline import PartCompute, Pipeline, TiedHead, plan_pipeline
from pentad.weights.cuts import cut_entry, split_dims
from pentad.weights.map import Entry, WeightMap


class MegatronModel(HeldModel):
    """Implements `held.HeldModel` with Megatron's modules, groups and gradient buffers."""

    def __init__(
        self, dims: ModelDims, settings: EngineSettings, meshes: Meshes, *, value_head: bool
    ) -> None:
        layout, device = meshes.layout, meshes.device
        self.meshes = meshes
        self.pipeline = plan_pipeline(dims, layout, settings.model)
        self.factors = []
        self.holders = []
        dtype = DTYPES[settings.model.param_dtype]
        self.whole = build_named(dims, dtype, value_head=value_head)
        join_groups(layout, self.pipeline, device)
        self.config = transformer_config(dims, settings, layout, self.pipeline, device.type)
        sums = DistributedDataParallelConfig(
            grad_reduce_in_fp32=settings.model.reduce_dtype == "float32",
            overlap_grad_reduce=False,
            use_distributed_optimizer=False,
        )
        stages = [self._build_stage(n, device) for n in self._stages()]
        self.chunks = [DistributedDataParallel(self.config, sums, gpt) for gpt in stages]
        self.is_dropped = False
        """Whether the gradients in the buffers are invalid."""
        self.shared: dict[str, SharedWeight] = {}
        """The memory of each weight in the modules, by name."""
        self.cuts: dict[str, Cut] = {}
        self.parts = [self._wrap(gpt, settings, dtype) for gpt in stages]
        self.decoders = [part.decoder for part in self.parts]
        named = [pair for decoder in self.decoders for pair in decoder.named_parameters()]
        self.parameters = dict(named)
        self.tied = self._tie(stages)

    def _stages(self) -> tuple[int, ...]:
        return (0,) if self.pipeline is None else self.pipeline.stages(self.meshes.pp.rank)

    def _build_stage(self, number: int, device: torch.device) -> GPTModel:
        dims, layout = self.whole.dims, self.meshes.layout
        last = 0 if self.pipeline is None else self.pipeline.num_stages - 1
        chunk = None if virtual_stages(self.pipeline) is None else number // layout.pp
        return build_gpt(
            dims,
            self.config,
            vocab_rows=-(-dims.vocab_size // layout.tp) * layout.tp,
            is_first=number == 0,
            is_last=number == last,
            chunk=chunk,
            lm_head=self.whole.has_lm_head,
        ).to(device)

    def _wrap(self, gpt: GPTModel, settings: EngineSettings, dtype: torch.dtype) -> Predictor:
        """Wraps the stage with named weights and the output heads."""
        dims, meshes = self.whole.dims, self.meshes
        weight_map = learner_map(dims)
        first_expert = meshes.coords.ep * dims.num_experts // meshes.layout.ep
        names = names_of(gpt, weight_map, first_expert)
        if dims.tie_embeddings:
            names.pop(HEAD, None)  # a copy of the embedding on the last stage
        tensors: dict[str, Tensor] = {}
        for name, held in names.items():
            is_trained = isinstance(held, torch.nn.Parameter)
            cut = cut_of(weight_map.entries[name], meshes, is_stored=is_trained)
            used = as_block(held.data, cut.local_shape)
            self.cuts[name], tensors[name] = cut, used
            if is_trained:
                gradient = as_block(held.main_grad, cut.local_shape)  # type: ignore[attr-defined]
                axis = stored_over(cut, meshes)
                self.shared[name] = weight = SharedWeight(used, gradient, cut.stored_dim, axis)
                tensors[name] = weight.master(dtype)
        table = cut_of(weight_map.entries[TABLE], meshes)
        stage = MegatronStage(dims, gpt, tensors, meshes.tp, num_rows=table.local_shape[0])
        cuts = {name: self.cuts[name] for name in names}
        stage.present = partial(present_cut, cuts)
        predictor = Predictor(
            stage,
            settings.temperature,
            settings.logprob_bytes,
            keep_logits=settings.model.archon.keep_logits is True,
        )
        predictor.cuts, predictor.tp = cuts, meshes.tp
        if stage.has_lm_head:
            predictor.vocab = vocab_shard(table, meshes.tp)
        return predictor

    def _tie(self, stages: Sequence[GPTModel]) -> TiedHead:
        """Ties embedding and head if they are on two stages."""
        is_tied = self.whole.dims.tie_embeddings and self.whole.has_lm_head
        if self.pipeline is None or not is_tied:
            return TiedHead()
        first, last = stages[0], stages[-1]
        return TiedHead(
            first.embedding.word_embeddings.weight.data if first.pre_process else None,
            last.output_layer.weight.data if last.post_process else None,
            self.meshes.pp,
            first=0,
            last=self.pipeline.last_rank,
            device=self.meshes.device,
        )

    def memory(self) -> dict[str, Tensor]:
        stages = self.decoders
        named = [pair for one in stages for pair in (*one.named_parameters(), *one.named_buffers())]
        return dict(named)

    def passes(self, settings: EngineSettings) -> Passes:
        if self.pipeline is None:
            return MegatronPasses(self, settings)
        return MegatronPipelinedPasses(self, self.pipeline, settings)

    @torch.no_grad()
    def follow(self) -> None:
        """Copies the master weights to the modules, if these are shared between ranks or differ in
        dtype."""
        self._make_ready()
        follow_masters(self.shared, self.parameters)

    def gradients(self) -> dict[str, Tensor]:
        """Returns this rank's share of the gradient sums: over data-parallel ranks, over tp if
        tokens are split, over both copies of a tied embedding."""
        self._make_ready()
        finalize_model_grads(self.chunks)
        return {name: weight.share(weight.gradient) for name, weight in self.shared.items()}

    def drop_gradients(self) -> None:
        """Marks the gradients as invalid; the buffers may be offloaded until the next pass."""
        self.is_dropped = True

    def _make_ready(self) -> None:
        """Prepares Megatron for a pass: sets this layout's groups, which other engines may have
        replaced, and clears gradients of an ended step."""
        join_groups(self.meshes.layout, self.pipeline, self.meshes.device)
        if self.is_dropped:
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self.is_dropped = False

    def rest(self) -> None:
        """Does nothing: weights are always in place."""

    def buffers(self) -> list[Tensor]:
        """Returns the memory of modules and gradients."""
        return [
            tensor for weight in self.shared.values() for tensor in (weight.used, weight.gradient)
        ]


def names_of(gpt: GPTModel, weight_map: WeightMap, first_expert: int) -> dict[str, Tensor]:
    """Returns the weights of a stage by their names in the map, in map order."""
    biases = [pair for pair in gpt.named_buffers() if pair[0].endswith(SELECTION_BIAS)]
    tensors = (*gpt.named_parameters(), *biases)
    layers = [layer.layer_number - 1 for layer in gpt.decoder.layers]
    held = {whole_name(name, layers, first_expert): x for name, x in tensors}
    found: dict[str, Tensor] = {}
    for entry in weight_map.entries.values():
        place = {"i": entry.layer, "e": entry.expert}
        for name in (entry.name, *(alias.format(**place) for alias in entry.rule.alias)):
            if name in held:
                found[entry.name] = held.pop(name)
    assert not held, f"the map has no name for {', '.join(held)}"
    return found


def as_block(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Returns a view of a module's memory as a block of the map's tensor: gate and up on a separate
    axis, without padding rows of the vocabulary."""
    if len(shape) > tensor.ndim:
        return tensor.view(shape)
    return tensor[: shape[0]]


def cut_of(entry: Entry, meshes: Meshes, *, is_stored: bool = True) -> Cut:
    """Returns the block with which a rank computes, or, if `is_stored`, the share of it that this
    data-parallel rank updates and saves."""
    layout, at = meshes.layout, meshes.coords
    coords: Mapping[str, tuple[int, int]] = {
        "tp": (layout.tp, at.tp),
        "etp": (layout.etp, at.etp),
    }
    part = cut_entry(entry, PLAN, coords)
    ((box, _),) = part.boxes
    axes = split_dims(entry, PLAN)
    is_expert = entry.expert is not None
    axis = "etp" if is_expert else "tp"
    dim = storage_dim(part.shape, layout.efsdp if is_expert else layout.dp_shard * layout.cp)
    cut = Shard(axes[axis]) if axis in axes else Replicate()
    mesh = None
    if meshes.dense is not None and meshes.expert is not None:
        mesh = meshes.expert["etp", "efsdp"] if is_expert else meshes.dense_parts
    return Cut(
        shape=entry.shape,
        box=box,
        copies=ALONE if is_expert or axis in axes else meshes.tp,
        is_expert=is_expert,
        stored_dim=dim,
        mesh=mesh,
        placements=(cut, Shard(dim) if is_stored else Replicate()),
    )


def stored_over(cut: Cut, meshes: Meshes) -> Axis:
    """The axis of ranks that shard a weight's masters: those that use the same block."""
    return meshes.factor_axes()[True] if cut.is_expert else meshes.batch


class MegatronPasses(WholePasses):
    """The engine's passes over whole models, with the current weights."""

    def __init__(self, held: MegatronModel, settings: EngineSettings) -> None:
        super().__init__(held.parts[0], settings, held.meshes)
        self.held = held

    def forward(
        self, microbatches: Iterable[PackedRows], noted: list[Routes] | None = None
    ) -> list[Predicted]:
        self.held.follow()
        return super().forward(microbatches, noted)

    def train(
        self, microbatches: Iterable[PackedRows], loss: Loss, *, last: bool
    ) -> tuple[list[Predicted], list[Sums]]:
        self.held.follow()
        return super().train(microbatches, loss, last=last)


class MegatronPipelinedPasses(PipelinedPasses):
    """The engine's passes over a pipeline, by Megatron's schedules."""

    def __init__(self, held: MegatronModel, plan: Pipeline, settings: EngineSettings) -> None:
        schedule = MegatronSchedule(plan, held.chunks, held.config)
        super().__init__(schedule, held.parts, held.tied, settings, held.meshes)
        self.held = held

    def _start(
        self, packed: list[PackedRows], compute: PartCompute, *, backward: bool, reduces: bool
    ) -> None:
        self.held.follow()
        super()._start(packed, compute, backward=backward, reduces=reduces)
