"""The engine: the learner of one model on one rank of a layout.

It takes rows and a loss, independent of the algorithm. The loss is a sum; only `end_step` divides,
once, by the summed count, so the gradient does not depend on the split of rows into calls,
microbatches, chunks and ranks. All ranks make the same calls with the same rows, each computes its
share, and all get the same results.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pentad.core.device import DTYPES
from pentad.core.errors import Problem, RunError, raise_problems
from pentad.core.faults import hit
from pentad.core.fit import check_fit, no_tree
from pentad.core.flat_rows import FlatRows, lengths_of, select
from pentad.core.layout import Backend, Layout
from pentad.core.roles import NamedTensors, NativeWeights
from pentad.core.types import Accumulated, Loss, Row, StepResult
from pentad.engine.batch import PackedRows, check_routes, check_rows, pack_rows
from pentad.engine.explain import explain
from pentad.engine.frozen import BASE, FrozenBase, restored_tags
from pentad.engine.graphs import CudaRecorder
from pentad.engine.held import HeldModel, check_balance, decoder_maker
from pentad.engine.optim import FusedAdamW, OpenStep, WholeGradient, compute_lr, optimizer_state
from pentad.engine.outputs import add_up, check_agreement, per_row, routes_per_row
from pentad.engine.packing import (
    MicrobatchPlan,
    RowBundle,
    find_bundles,
    left_out,
    plan_call,
    sequence_cost,
)
from pentad.engine.passes import WholePasses
from pentad.engine.predictor import Predicted
from pentad.engine.section import EngineSettings, captures, no_graphs
from pentad.engine.state import (
    model_digest,
    present_all,
    read_random,
    sources_between,
    write_random,
)
from pentad.engine.tags import Offload, WeightTags
from pentad.models.balance import measure_balance, move_biases, scale_losses
from pentad.models.families import ConfigLike, dims_of, read_config
from pentad.models.hf_weights import hf_metadata
from pentad.models.joined import join_all_projections, leave_room
from pentad.models.lora import switched_off
from pentad.models.moe import Routes
from pentad.models.registry import build_whole, carried_by, plan_export
from pentad.ops.capture import free_cached_memory
from pentad.ops.meter import Meter
from pentad.parallel.blocks import compiling
from pentad.parallel.collectives import gather_shared, reduce_ranks
from pentad.parallel.gradients import global_square
from pentad.parallel.mesh import Meshes, build_meshes
from pentad.runtime.environment import make_deterministic
from pentad.runtime.rank import pulse
from pentad.telemetry.log import NOTICE
from pentad.weights.blocks import iter_whole
from pentad.weights.boxes import box_of
from pentad.weights.hf import Carried, FolderPlan
from pentad.weights.map import WeightMap
from pentad.weights.megatron.model_args import unsayable
from pentad.weights.peft import Adapter
from pentad.weights.regions import Box, Region
from pentad.weights.transfer import Shard, TensorInfo, held_sources, native_dtypes

log = logging.getLogger(__name__)


def build_engine(
    source: ConfigLike,
    settings: EngineSettings,
    *,
    device: torch.device | str = "cpu",
    layout: Layout | None = None,
    value_head: bool = False,
    init_from_scratch: bool = False,
    seed: int = 0,
    tokenizer_folder: str | None = None,
    weights: str | Path | None = None,
    backend: Backend = "archon",
) -> Engine:
    """Builds an engine for the model of an HF folder, or from a config with random weights.

    `weights`: the folder of the weights, HF or Megatron, if it is another one. The model is built
    on the meta device, parallelised, and then loaded, so each rank has and reads only its part.
    `value_head`: makes it a critic with values instead of log-probs. A layout of several ranks uses
    the process group of this process; all ranks make the same call. The backend selects the model:
    the family's model file, transformers' model, or Megatron's.
    """
    device = torch.device(device)
    layout = layout or Layout()
    settings = settings.settled(device.type, layout)
    if backend != "fsdp":
        dims = dims_of(source)
        check_fit(layout, dims)
        check_balance(settings.model.archon, dims)
        if device.type == "cuda" and settings.model.archon.cuda_graphs is True:
            why = no_graphs(settings, dims, layout, backend)
            raise_problems([Problem("archon.cuda_graphs = true", why, "use auto")] if why else [])
    meshes = build_meshes(layout, device)
    with explain("loading", settings.model):
        held = _build_held(source, settings, meshes, backend, value_head)
        if init_from_scratch:
            held.initialise(seed)
        else:
            folder = source if weights is None else weights
            assert isinstance(folder, str | Path), "weights are loaded from a folder"
            held.load(folder, seed, dequantize=settings.model.dequantize)
        held.fill_factors(settings.model.lora, seed)
        return Engine(
            held,
            settings,
            meshes=meshes,
            hf_config=read_config(source),
            source_folder=source if isinstance(source, str | Path) else None,
            tokenizer_folder=tokenizer_folder,
            backend=backend,
            seed=seed,
            weights=weights,
        )


def _build_held(
    source: ConfigLike,
    settings: EngineSettings,
    meshes: Meshes,
    backend: Backend,
    value_head: bool,
) -> HeldModel:
    """Builds this rank's part of the model for the layout, with uninitialised memory."""
    if backend == "megatron":
        # Imported here: megatron-core is optional.
        from pentad.engine.megatron.held import MegatronModel

        dims = dims_of(source)
        raise_problems(unsayable(dims))
        return MegatronModel(dims, settings, meshes, value_head=value_head)
    if backend == "fsdp":
        # Imported here: transformers takes seconds to import.
        from pentad.engine.transformers_model import transformers_maker

        return HeldModel(
            transformers_maker(source, settings, meshes, value_head=value_head), meshes
        )
    dims = dims_of(source)
    return HeldModel(decoder_maker(dims, settings, meshes, value_head=value_head), meshes)


class Engine:
    """Holds the trained weights; built by `build_engine`. All ranks make the same calls."""

    def __init__(
        self,
        held: HeldModel,
        settings: EngineSettings,
        *,
        meshes: Meshes,
        hf_config: Mapping[str, Any],
        source_folder: str | Path | None = None,
        tokenizer_folder: str | Path | None = None,
        backend: Backend = "archon",
        seed: int = 0,
        weights: str | Path | None = None,
    ) -> None:
        self.held = held
        self.backend = backend
        self.decoder = held.decoders[0]
        """The model, or the first pipeline stage on this rank."""
        self.dims = held.whole.dims
        self.settings = settings
        self.meshes = meshes
        self.device = meshes.device
        self.hf_config = hf_config
        self.source_folder = source_folder
        self.tokenizer_folder = tokenizer_folder
        if settings.model.archon.use_deterministic_algorithms:
            make_deterministic()
        self.passes = held.passes(settings)
        self.parameters, self.cuts = held.parameters, held.cuts
        layout, device = meshes.layout, self.device.type
        if settings.total_steps and captures(settings, self.dims, layout, backend, device):
            assert isinstance(self.passes, WholePasses), "one rank runs whole passes"
            is_required = settings.model.archon.cuda_graphs is True
            recorder = CudaRecorder(self.device)
            self.passes.capture(self.parameters.values(), recorder, is_required=is_required)
        self.tensors = held.memory()
        self.boxes: dict[str, Box] = {}
        """Position of this rank's shards in the whole tensors; computed at the first publish."""
        saves_memory = self.device.type == "cuda" and settings.model.gradient_checkpointing
        self.tags = WeightTags(self.tensors, "host" if saves_memory else "device")
        self.masters = {name: self.tensors[name] for name in self.parameters}
        self.base: FrozenBase | None = None
        if settings.model.lora is not None:
            self.base = FrozenBase.of(held, settings.model, weights or source_folder)
        self.optimizer: FusedAdamW | None = None
        if settings.total_steps is not None:
            decayed, keys = held.whole.decayed, settings.model.optimizer
            self.optimizer = FusedAdamW(self.masters, keys, decayed, self.cuts, seed)
        self.offloaded = Offload(self.device)
        self.cost = sequence_cost(self.dims)
        balanced = settings.model.archon.balances
        why_not = no_tree(
            *(meshes.layout, backend), strict=settings.strict, balanced=balanced, dims=self.dims
        )
        self.makes_trees = settings.model.enable_tree_training is not False and why_not is None
        self.meter = Meter()
        self.step: OpenStep | None = None
        self.is_half_moved = False
        """Whether an optimizer step or a restore began and did not end: the weights are then
        invalid."""
        self.restoring: dict[str, Tensor] | None = None
        """Random states read during a restore."""
        self.num_steps = 0
        """Number of calls of `end_step`; determines the learning rate."""
        self.num_skipped = 0
        """Number of calls of `end_step` that did not change the weights."""
        log.info("initialized the engine with parallel dims: %s", meshes.layout)

    # Scoring

    def forward(self, rows: Sequence[Row], tag: str = "actor") -> list[dict[str, Tensor]]:
        """Returns the outputs of all rows, the same on every rank."""
        predicted, plan = self._score(rows, tag)
        return per_row(predicted, plan, rows, self.meshes, self.settings.model.min_tokens_per_mb)

    def routes(self, rows: Sequence[Row], tag: str = "actor") -> list[Tensor]:
        """Returns the experts of each token under the weights named `tag`, as `Row.routes`."""
        if not any(self.dims.is_moe(layer) for layer in range(self.dims.num_layers)):
            raise RunError("the model has no mixture layer, so there are no routes")
        noted: list[Routes] = []
        _, plan = self._score(rows, tag, noted)
        recorded = []
        for chosen in noted:
            chosen_TLk = torch.stack([chosen[layer] for layer in sorted(chosen)], dim=1)
            recorded.append(gather_shared(chosen_TLk, self.meshes.tp))
        at_least = self.settings.model.min_tokens_per_mb
        return routes_per_row(recorded, plan, rows, self.meshes, at_least)

    def _score(
        self, rows: Sequence[Row], tag: str, noted: list[Routes] | None = None
    ) -> tuple[list[Predicted], MicrobatchPlan]:
        """Runs all rows forward with the weights of the tag."""
        # Recorded routes need every token of every row.
        plan, _, microbatches = self._planned(rows, shares=noted is None)
        with self.use(tag):
            predicted = self.passes.forward(microbatches, noted)
        compiling.report()
        return predicted, plan

    def _planned(
        self,
        rows: Sequence[Row],
        columns: Sequence[str] = (),
        *,
        shares: bool = True,
        buckets: bool = False,
    ) -> tuple[MicrobatchPlan, list[RowBundle] | None, Iterator[PackedRows]]:
        """Returns the rows of each data-parallel rank, without microbatches that are empty on all
        of them; the bundles of rows whose common prefix is computed once, if it `shares` any; and
        this rank's microbatches."""
        check_rows(rows, columns, self.dims.vocab_size)
        check_routes(rows, self.dims)
        check_agreement(rows, self.meshes)
        bundles = find_bundles(rows) if shares and self.makes_trees else None
        lengths = lengths_of(rows)
        pipeline, layout = self.held.pipeline, self.meshes.layout
        take = pipeline.take if pipeline is not None else None
        given = lengths, self.cost, self.settings, layout.dp, take, bundles
        plan = plan_call(*given, is_alone=not self.held.whole.packs_rows)
        at = self.meshes.coords
        mine = plan[at.dp_replicate * layout.dp_shard + at.dp_shard]
        return plan, bundles, self._packed(rows, mine, columns, bundles, buckets)

    def _packed(
        self,
        rows: Sequence[Row],
        microbatches: Sequence[Sequence[int]],
        columns: Sequence[str],
        bundles: Sequence[RowBundle] | None,
        buckets: bool,
    ) -> Iterator[PackedRows]:
        shared = {row: bundle.shared for bundle in bundles or () for row in bundle.rows}
        for indices in microbatches:
            pulse()
            yield pack_rows(
                select(rows, indices),
                columns,
                self.device,
                multiple=self.meshes.token_multiple,
                at_least=self.settings.model.min_tokens_per_mb,
                cp=self.meshes.cp,
                shared=[shared.get(i, 0) for i in indices],
                buckets=buckets,
            )

    # Training

    def begin_step(self) -> None:
        """Starts a step; discards an unfinished one with its gradient."""
        if self.optimizer is None:
            raise RunError("this engine only scores: its settings have no optimizer")
        self.tags.require_actor("a step")
        self._drop_gradients()
        self.passes.loads.reset()
        self.meter.reset()
        self.step = OpenStep(self.optimizer)

    def _drop_gradients(self) -> None:
        self.passes.give_up()
        self.held.drop_gradients()
        for tensor in self.masters.values():
            tensor.grad = None

    def accumulate(self, rows: Sequence[Row], loss: Loss, *, last: bool = True) -> Accumulated:
        """Adds the gradient of the loss over the rows; any number of calls per step."""
        step = self._open_step("accumulate")
        self._require_actor("a gradient")
        if step.whole is not None:
            raise RunError("accumulate was called after the call with last=True; begin a new step")
        graphs = self.passes.graphs
        is_captured = graphs is not None and graphs.is_on
        plan, bundles, microbatches = self._planned(rows, loss.columns, buckets=is_captured)
        counts = rows.counts if isinstance(rows, FlatRows) else [row.count for row in rows]
        count, num_tokens = math.fsum(counts), sum(lengths_of(rows))
        for decoder in self.held.decoders:
            scale_losses(decoder, count / max(num_tokens, 1))
        with self.meter.counting():
            predicted, sums = self.passes.train(microbatches, loss, last=last)
        whole = self._whole_gradient() if last else None  # before the device is synchronised
        loss_total, stats_total = add_up(sums, self.meshes)
        num_microbatches = sum(bool(indices) for turn in plan for indices in turn)
        step.add(loss_total, count, num_tokens, num_microbatches)
        step.left_out += left_out(bundles, plan)
        step.whole = whole
        at_least = self.settings.model.min_tokens_per_mb
        outputs_per_row = per_row(predicted, plan, rows, self.meshes, at_least)
        return Accumulated(loss_total, count, stats_total, outputs_per_row)

    def end_step(self) -> StepResult:
        """Divides by the summed count, clips, steps the optimizer and the schedule."""
        step = self._open_step("end_step")
        if step.whole is None:
            raise RunError("end_step was called before accumulate(..., last=True)")
        self.onload()
        lr = compute_lr(step.optimizer.keys, self.num_steps, self.settings.total_steps or 0)
        norm = float(step.whole.square.sqrt()) / step.count if step.count else 0.0
        reason = step.why_skipped(norm)
        counted = self.passes.loads
        num_here = self.meter.num_items("combine")
        loads = counted.take(lambda table: reduce_ranks(table, self.meshes.world), num_here)
        # Here, right after a synchronisation: after the optimizer step another one would be needed,
        # and the device would be idle while the next step is prepared.
        balance, work = measure_balance(loads), self.meter.take()
        layout = self.meshes.layout
        arrived = counted.arrived
        if not counted.layers and "combine" in work:  # routers of transformers count nothing
            arrived = reduce_ranks(torch.tensor(num_here, device=self.device), self.meshes.world)
        num_pairs = int(arrived) // layout.etp if "combine" in work else None
        if not reason:
            self.is_half_moved = True
            with explain("the optimizer step", self.settings.model):
                self._move(step, step.whole.shards, norm, lr)
                hit("optimizer")
            for decoder in self.held.decoders:
                move_biases(decoder, loads, self.settings.model.archon.moe_bias_rate)
            self.is_half_moved = False
        self._drop_gradients()
        compiling.report()
        self.step = None
        self.num_steps += 1
        self.num_skipped += bool(reason)
        return StepResult(
            loss=step.loss_sum / step.count if step.count else 0.0,
            grad_norm=norm,
            lr=lr,
            skipped=bool(reason),
            num_tokens=step.num_tokens,
            num_microbatches=step.num_microbatches,
            reason=reason,
            balance=balance,
            work=work,
            num_pairs=num_pairs,
            left_out=tuple(step.left_out),
        )

    def _whole_gradient(self) -> WholeGradient:
        shards = self.held.gradients()
        hit("all-reduce", tensors=shards.values())
        return WholeGradient(shards, global_square(shards, self.cuts, self.meshes))

    def _move(self, step: OpenStep, gradients: dict[str, Tensor], norm: float, lr: float) -> None:
        for name, gradient in gradients.items():
            self.masters[name].grad = gradient
        step.optimizer.lr = lr
        step.optimizer.step(step.scale(norm), self.num_steps)

    def _open_step(self, call: str) -> OpenStep:
        if self.step is None:
            raise RunError(f"{call} was called outside a step; call begin_step first")
        return self.step

    def offload(self) -> None:
        """Moves weights, optimizer and tags to the host; methods that need them move them back."""
        if self.is_offloaded:
            return
        self.held.rest()
        graphs = self.passes.graphs
        if graphs is not None and graphs.is_on:  # weights would return to other addresses
            text = "training passes are no longer captured as CUDA graphs: weights are offloaded"
            log.info(text, extra=NOTICE)
            graphs.release()
        states = self.optimizer.state.values() if self.optimizer else ()
        moments = [tensor for state in states for tensor in state.values()]
        frozen = self.base.to_offload() if self.base is not None else []
        held = [*self.tensors.values(), *self.held.buffers()]
        self.offloaded.leave([*held, *moments, *self.tags.memory(), *frozen])

    def onload(self) -> None:
        if self.is_offloaded:
            self.offloaded.come_back()

    @property
    def is_offloaded(self) -> bool:
        return bool(self.offloaded.away)

    def _require_actor(self, purpose: str) -> None:
        self.onload()
        self.tags.require_actor(purpose)

    # Weights

    def use(self, tag: str) -> AbstractContextManager[None]:
        self.onload()
        if self.base is not None and tag in (BASE, *self.base.tags):
            self.tags.require_actor(f"using the tag {tag}")
            return switched_off(self.held.factors)
        return self.tags.use(tag)

    def save_tag(self, tag: str) -> None:
        """Stores the present weights as `tag` (ref, old_actor, teacher)."""
        self.onload()
        if self.base is not None and self.base.takes(tag, self.num_steps):
            self.tags.copies.pop(tag, None)
        else:
            self.tags.save(tag)

    def load_tag(self, tag: str, weights: str | Path) -> None:
        """Stores the weights of a folder, of the same shapes, as `tag`."""
        self.onload()
        if self.base is not None:
            self.base.load_tag(tag, weights)
            return

        def write() -> None:
            self.held.rest()
            self.held.load(weights, dequantize=self.settings.model.dequantize)

        self.tags.load(tag, write)

    def iter_weights(self) -> NamedTensors:
        """Returns `weight_shards` as whole tensors, on every rank; several ranks join them one at a
        time, and must iterate to the end. If one rank of archon has all weights, its shards are the
        native weights of a sampler, without copies."""
        if not self._is_lendable:
            return self._whole_weights()
        return NativeWeights(self._memory(), *self._native_kinds, self._whole_weights)

    @cached_property
    def _native_kinds(self) -> tuple[dict[str, torch.dtype], int]:
        """The dtype of each weight when published, by native name, and the number of tensors."""
        sources = held_sources(self.tensors, self.held.whole.trained_map)
        dtypes = {name: tensor.dtype for name, tensor in self.tensors.items()}
        if self.base is None:  # factors are published as they are
            dtypes |= native_dtypes(sources, self._publish_dtype)
        return dtypes, len(sources)

    def _whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        shards, meshes = self.weight_shards(), self.meshes
        for pair in iter_whole(shards, *self.published(), meshes.world.group, meshes.device):
            pulse()
            # Checked each time: the weights may be exchanged while a generator is consumed.
            self.tags.require_actor("handing out weights")
            yield pair

    def weight_shards(self) -> dict[str, Shard]:
        """Returns this rank's memory of the weights, by native name; not copies."""
        memory = self._memory()
        self.held.rest()
        if not self.boxes:
            self.boxes = {
                name: box_of(self.cuts[name].present(tensor) if name in self.cuts else tensor)
                for name, tensor in self.tensors.items()
            }
        return {name: Shard(tensor, self.boxes[name]) for name, tensor in memory.items()}

    def _memory(self) -> dict[str, Tensor]:
        self._require_actor("handing out weights")
        return {name: tensor.detach() for name, tensor in self.tensors.items()}

    def published(self) -> tuple[WeightMap, dict[str, TensorInfo]]:
        """Returns the map of published weights, and name, shape and dtype of each tensor."""
        whole = self.held.whole
        return whole.trained_map, hf_metadata(whole, self._publish_dtype, whole.trained_map)

    def adapter(self) -> tuple[Adapter, list[str]]:
        """Returns the adapter's whole factors, on every rank, and the names of the frozen weights:
        none for a text tower, as other towers have layers with the same last names."""
        assert self.base is not None, "all weights are trained"
        self._require_actor("saving")
        self._require_whole()
        factors = {name: tensor.cpu() for name, tensor in self._whole_weights()}
        adapter = Adapter(self.base.spec, factors, self.base.path)
        whole = self.held.whole
        return adapter, [] if whole.dims.tower_names else list(hf_metadata(whole))

    def shake_adapter(self, strength: float) -> None:
        """Perturbs B of the adapter to test that components use it; strength 0 restores it
        bitwise."""
        assert self.base is not None, "all weights are trained"
        self._require_actor("a test of the adapter")
        self.base.shake(self.tensors, self.cuts, strength)

    @property
    def _is_lendable(self) -> bool:
        """Whether one rank has all weights, under the names of a sampler's model."""
        return self.meshes.layout.world == 1 and self.backend == "archon"

    def lend_base(self) -> dict[str, Tensor] | None:
        """Frozen weights of an adapter, by native name; from now on they stay in place. None if
        there are none, other ranks have a part of them, or transformers uses other names."""
        if self.base is None or not self._is_lendable:
            return None
        self.onload()  # it may have left its device before samplers open
        self.base.is_shared = True
        lora = self.settings.model.lora
        for decoder in self.held.decoders:
            if lora is not None and self.device.type == "cuda" and not self.settings.strict:
                leave_room(decoder, lora.rank)
            join_all_projections(decoder)
        if self.device.type == "cuda":
            free_cached_memory()  # the former memory, before a cache is sized by what is free
        return self.held.frozen()

    def weights_to_save(self) -> dict[str, Shard]:
        """Returns `weight_shards`, after checking that the weights are those of a step."""
        self._require_actor("saving")
        self._require_whole()
        return self.weight_shards()

    def _require_whole(self) -> None:
        if self.is_half_moved:
            what = "an optimizer step or a restore failed half-way"
            raise RunError(f"{what}, so the weights are invalid")

    def plan_export(self) -> FolderPlan:
        """Plans the HF folder of an export."""
        return plan_export(
            self.held.whole,
            dtype=self._publish_dtype,
            source_folder=self.source_folder,
            hf_config=self.hf_config,
            tokenizer_folder=self.tokenizer_folder,
        )

    def carried(self) -> dict[str, Carried]:
        """Returns the tensors of other towers, which an export copies."""
        return carried_by(self.held.whole, self.source_folder)

    @property
    def _publish_dtype(self) -> torch.dtype:
        return DTYPES[self.settings.publish_dtype or self.settings.model.dtype]

    # State

    def state_tensors(self) -> dict[str, Tensor]:
        """Returns all tensors that a resume needs, by the names of `engine.state`: live memory, not
        copies, except random states, which are copies."""
        self._require_actor("the state")
        if self.restoring is None:
            self._require_whole()
        parts = {"model": self.tensors}
        if self.optimizer is not None:
            held = optimizer_state(self.masters, self.optimizer)
            parts |= {f"optimizer.{key}": part for key, part in held.items()}
        parts |= {f"tags.{tag}": self.tags.views(tag) for tag in self.tags.copies}
        state = {
            f"{key}.{name}": tensor
            for key, part in parts.items()
            for name, tensor in present_all(part, self.cuts).items()
        }
        return state | (self.restoring or read_random(self.meshes.rank, self.device))

    def state_counters(self) -> dict[str, Any]:
        """Returns the state besides tensors as JSON values, the same on every rank."""
        return {
            "num_steps": self.num_steps,
            "num_skipped": self.num_skipped,
            "tags": [*self.tags.copies, *(self.base.tags if self.base else ())],
            "lora": self.base.counters() if self.base else None,
            "backend": self.backend,
            "value_head": self.held.whole.value_head is not None,
            "layout": str(self.meshes.layout),
            "model": model_digest(self.held.whole),
            "dtype": str(self._publish_dtype).removeprefix("torch."),
            "hf_config": dict(self.hf_config),
            "companions": [
                str(Path(folder).absolute())
                for folder in (self.tokenizer_folder, self.source_folder)
                if folder is not None
            ],
        }

    def begin_restore(self, counters: Mapping[str, Any]) -> None:
        """Checks that the checkpoint is of this model, and allocates its tags. Until `end_restore`
        the weights are invalid: the caller must write all of `state_tensors` in between."""
        self._require_actor("restoring")
        if counters["model"] != model_digest(self.held.whole):
            raise RunError(
                "the checkpoint is of another model: its tensors have other names or shapes"
            )
        off = restored_tags(self.base, counters.get("lora"))
        self._drop_gradients()
        self.step = None
        self.held.rest()
        self.is_half_moved = True
        self.tags.prepare([tag for tag in counters["tags"] if tag not in off])
        self.restoring = read_random(self.meshes.rank, self.device)

    def state_sources(self, counters: Mapping[str, Any]) -> dict[str, tuple[Region, ...]] | None:
        """Maps parts of this backend's state to those of the checkpoint's backend; None: the names
        are equal."""
        if counters["backend"] == self.backend:
            return None
        head = self.held.whole.value_head is not None
        source = self.source_folder or self.hf_config
        saved = build_whole(source, counters["backend"], value_head=head)
        saved.adapter_map = None if self.base is None else saved.lora_map(self.base.lora)
        names = list(self.state_tensors())
        return sources_between(names, self.held.whole.trained_map, saved.trained_map)

    def end_restore(self, counters: Mapping[str, Any]) -> None:
        assert self.restoring is not None, "begin_restore comes first"
        write_random(self.restoring, self.device)
        self.num_steps = int(counters["num_steps"])
        self.num_skipped = int(counters["num_skipped"])
        self.restoring, self.is_half_moved = None, False
