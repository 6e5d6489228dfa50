"""The stages of a Megatron model on one rank, their weights by name, and their gradients.

A weight is a view of the memory that Megatron's module computes with, or, where that has another
dtype, a master of its own: a block of a whole tensor of `models.megatron_names`. Gradients add up
in the buffers of Megatron's DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial

import torch
import torch.distributed as dist
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
)
from pentad.engine.megatron.model import MegatronStage, build_gpt
from pentad.engine.outputs import Sums
from pentad.engine.passes import Passes, WholePasses
from pentad.engine.predictor import Predicted, Predictor, present_cut, vocab_shard
from pentad.engine.section import EngineSettings
from pentad.models.hf_weights import hf_metadata
from pentad.models.megatron_names import HEAD, PLAN, SELECTION_BIAS, TABLE, build_named, learner_map
from pentad.models.moe import Routes
from pentad.parallel.cuts import Cut
from pentad.parallel.mesh import ALONE, Meshes
from pentad.parallel.pipeline import TiedHead
from pentad.weights.blocks import plan_blocks
from pentad.weights.cuts import cut_entry, split_dims
from pentad.weights.map import Entry, WeightMap
from pentad.weights.regions import slices
from pentad.weights.transfer import Shard as WeightShard


class MegatronModel(HeldModel):
    """Implements `held.HeldModel` with Megatron's modules, groups and gradient buffers."""

    def __init__(
        self, dims: ModelDims, settings: EngineSettings, meshes: Meshes, *, value_head: bool
    ) -> None:
        layout, device = meshes.layout, meshes.device
        self.meshes = meshes
        self.pipeline = None
        self.factors = []
        self.holders = []
        self.tied = TiedHead()
        dtype = DTYPES[settings.model.param_dtype]
        self.whole = build_named(dims, dtype, value_head=value_head)
        join_groups(layout, 1, device)
        config = transformer_config(dims, settings, layout, 1, device.type)
        vocab_rows = -(-dims.vocab_size // layout.tp) * layout.tp
        gpt = build_gpt(
            dims,
            config,
            vocab_rows=vocab_rows,
            is_first=True,
            is_last=True,
            chunk=None,
            lm_head=not value_head,
        ).to(device)
        sums = DistributedDataParallelConfig(
            grad_reduce_in_fp32=settings.model.reduce_dtype == "float32",
            overlap_grad_reduce=False,
            use_distributed_optimizer=False,
        )
        self.chunks = [DistributedDataParallel(config, sums, gpt)]
        self.gradient_views: dict[str, Tensor] = {}
        self.computed: dict[str, Tensor] = {}
        """What modules compute with, where that is no weight itself but a copy in another dtype."""
        self.cuts: dict[str, Cut] = {}
        self.parts = [self._wrap(gpt, settings, dtype)]
        self.decoders = [part.decoder for part in self.parts]
        self.parameters = dict(self.decoders[0].named_parameters())

    def _wrap(self, gpt: GPTModel, settings: EngineSettings, dtype: torch.dtype) -> Predictor:
        """Weights by name, and the heads around the stage."""
        dims, meshes = self.whole.dims, self.meshes
        weight_map = learner_map(dims)
        first_expert = meshes.coords.ep * dims.num_experts // meshes.layout.ep
        names = names_of(gpt, weight_map, first_expert)
        cuts = {name: cut_of(weight_map.entries[name], weight_map, meshes) for name in names}
        tensors: dict[str, Tensor] = {}
        for name, held in names.items():
            shape = cuts[name].local_shape
            tensors[name] = used = as_block(held.data, shape)
            if not isinstance(held, torch.nn.Parameter):
                continue
            self.gradient_views[name] = as_block(held.main_grad, shape)  # type: ignore[attr-defined]
            if used.dtype != dtype:
                self.computed[name], tensors[name] = used, torch.empty_like(used, dtype=dtype)
        num_rows = cuts[TABLE if TABLE in cuts else HEAD].local_shape[0] if cuts else 0
        stage = MegatronStage(dims, gpt, tensors, meshes.tp, num_rows=num_rows)
        stage.present = partial(present_cut, cuts)
        predictor = Predictor(
            stage,
            settings.temperature,
            settings.logprob_bytes,
            keep_logits=settings.model.archon.keep_logits is True,
        )
        predictor.cuts, predictor.tp = cuts, meshes.tp
        if stage.has_lm_head:
            head = HEAD if HEAD in cuts else TABLE
            predictor.vocab = vocab_shard(cuts[head], meshes.tp)
        self.cuts |= cuts
        return predictor

    def memory(self) -> dict[str, Tensor]:
        stages = self.decoders
        named = [pair for one in stages for pair in (*one.named_parameters(), *one.named_buffers())]
        return dict(named)

    def passes(self, settings: EngineSettings) -> Passes:
        return MegatronPasses(self, settings)

    @torch.no_grad()
    def follow(self) -> None:
        """Copies of weights in another dtype take over what the weights are now."""
        if self.computed:
            held = self.memory()
            torch._foreach_copy_(list(self.computed.values()), [held[n] for n in self.computed])

    def gradients(self) -> dict[str, Tensor]:
        """Megatron's sums: over data-parallel ranks, over tp where tokens are dealt, over the two
        ends of a tied embedding."""
        finalize_model_grads(self.chunks)
        return dict(self.gradient_views)

    def drop_gradients(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()

    def rest(self) -> None:
        """Weights are always in place."""

    def iter_hf(
        self, dtype: torch.dtype, *, is_frozen: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """Each tensor put together from the blocks that ranks write."""
        weight_map, device = self.whole.weight_map, self.meshes.device
        infos = hf_metadata(self.whole, dtype)
        shards = {
            name: WeightShard(x.detach(), self.cuts[name].stored)
            for name, x in self.memory().items()
        }
        group = self.meshes.world.group
        blocks: dict[str, list[int]] = {}
        planned = plan_blocks(shards, weight_map, infos, group)
        for number, block in enumerate(planned):
            blocks.setdefault(block.name, []).append(number)
        for name, info in infos.items():
            whole = torch.zeros(info.shape, dtype=info.dtype, device=device)
            for number in blocks.get(name, []):
                planned[number].copy_to(whole[slices(planned[number].box)], shards)
            if group is not None:
                dist.all_reduce(whole.view(-1).view(torch.uint8), group=group)  # others have 0
            yield name, whole


def names_of(gpt: GPTModel, weight_map: WeightMap, first_expert: int) -> dict[str, Tensor]:
    """The weights of a stage by their names in the map, in its order."""
    biases = [pair for pair in gpt.named_buffers() if pair[0].endswith(SELECTION_BIAS)]
    tensors = (*gpt.named_parameters(), *biases)
    held = {_global_name(name, gpt, first_expert): x for name, x in tensors}
    found: dict[str, Tensor] = {}
    for entry in weight_map.entries.values():
        names = (entry.name, *(_filled(alias, entry) for alias in entry.rule.alias))
        for name in names:
            if name in held:
                found[entry.name] = held.pop(name)
    assert not held, f"the map has no name for {', '.join(held)}"
    return found


def _global_name(name: str, gpt: GPTModel, first_expert: int) -> str:
    """Megatron counts the layers of a stage and the experts of a rank from 0."""
    words = name.split(".")
    if "layers" in words:
        at = words.index("layers") + 1
        words[at] = str(gpt.decoder.layers[int(words[at])].layer_number - 1)
    if "local_experts" in words:
        at = words.index("local_experts") + 1
        words[at] = str(int(words[at]) + first_expert)
    return ".".join(words)


def _filled(name: str, entry: Entry) -> str:
    return name.format(i=entry.layer, e=entry.expert)


def as_block(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Memory of a module as a block of the map's tensor: gate and up on their own axis, without
    rows that fill up the vocabulary."""
    if len(shape) > tensor.ndim:
        return tensor.view(shape)
    return tensor[: shape[0]]


def cut_of(entry: Entry, weight_map: WeightMap, meshes: Meshes) -> Cut:
    """Every rank holds whole what it computes with; data-parallel ranks hold the same."""
    layout, at = meshes.layout, meshes.coords
    coords: Mapping[str, tuple[int, int]] = {
        "tp": (layout.tp, at.tp),
        "etp": (layout.etp, at.etp),
    }
    part = cut_entry(entry, PLAN, coords, weight_map.sizes)
    ((box, _),) = part.boxes
    axes = split_dims(entry, PLAN)
    is_expert = entry.expert is not None
    axis = "etp" if is_expert else "tp"
    placements = (Shard(axes[axis]) if axis in axes else Replicate(), Replicate())
    mesh = None
    if meshes.dense is not None and meshes.expert is not None:
        mesh = meshes.expert["etp", "efsdp"] if is_expert else meshes.dense_parts
    return Cut(
        shape=entry.shape,
        box=box,
        copies=ALONE if is_expert or axis in axes else meshes.tp,
        is_expert=is_expert,
        stored_dim=0,
        mesh=mesh,
        placements=placements,
        data=meshes.factor_axes()[True] if is_expert else meshes.batch,
    )


class MegatronPasses(WholePasses):
    """Whole models: the engine's passes, over weights as they are now."""

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
