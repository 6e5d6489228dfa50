"""The model of one rank: whole, or its pipeline stages, as one set of named weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from torch.distributed.tensor import DTensor

from pentad.core.device import DTYPES
from pentad.core.dims import ModelDims
from pentad.core.errors import raise_problems
from pentad.core.fit import balance_problems
from pentad.engine.passes import Passes, WholePasses
from pentad.engine.pipelined import PipelinedPasses
from pentad.engine.predictor import Predictor, wrap_model
from pentad.engine.section import ArchonConfig, EngineSettings, LoraConfig
from pentad.models.balance import apply_balance
from pentad.models.decoder import Decoder
from pentad.models.hf_weights import kept_buffers, native_shards
from pentad.models.language_model import LanguageModel
from pentad.models.lora import apply_lora, factors_of, fill_factors
from pentad.models.registry import build_model, initialise, load_weights
from pentad.models.strict import apply_strict
from pentad.parallel.cuts import Cut, local
from pentad.parallel.gradients import sum_copies
from pentad.parallel.mesh import Meshes
from pentad.parallel.pipeline import Pipeline, TiedHead, plan_pipeline
from pentad.parallel.storage import give_memory, reshard
from pentad.weights.map import WeightMap
from pentad.weights.peft import read_adapter
from pentad.weights.transfer import PairsReader, Shard

TIED = "head.weight"
"""Native name of the copy of a tied embedding on the last pipeline stage."""


@dataclass(frozen=True, slots=True)
class Maker:
    """Functions that build models of one kind, for a given layout and settings."""

    build: Callable[..., LanguageModel]
    """Builds on the meta device; keywords select the part of a pipeline stage."""
    wrap: Callable[[LanguageModel], Predictor]
    """Applies the layout, still on the meta device."""
    pipeline: Pipeline | None = None
    offloads: bool = False
    """Whether parameters are in host memory."""


def check_balance(archon: ArchonConfig, dims: ModelDims) -> None:
    """Rejects expert settings for a model without experts, and a bias that the model's files cannot
    store, because a saved model would route differently from the trained one."""
    bias = ("moe_bias_rate", archon.moe_bias_rate)
    raise_problems(balance_problems(dims, archon.router_losses, bias))


def decoder_maker(
    dims: ModelDims, settings: EngineSettings, meshes: Meshes, *, value_head: bool
) -> Maker:
    """Builds models of families with a model file."""

    def build(**stage: object) -> Decoder:
        dtype = DTYPES[settings.model.param_dtype]
        options = {"value_head": value_head, **stage}
        model = build_model(dims, device="meta", dtype=dtype, **options)  # type: ignore[arg-type]
        apply_balance(model, settings.model.archon)
        if settings.strict:
            apply_strict(model)
        if settings.model.lora is not None:
            apply_lora(model, settings.model.lora)
        return model

    def wrap(model: LanguageModel) -> Predictor:
        assert isinstance(model, Decoder)
        return wrap_model(model, settings, meshes.device, meshes)

    pipeline = plan_pipeline(dims, meshes.layout, settings.model)
    return Maker(build, wrap, pipeline, settings.model.archon.offload_params)


class HeldModel:
    """The parts of the model on this rank, in stage order, on the device (parameters on the host if
    they are offloaded).

    Names are those of the whole model. The copy of a tied embedding is no separate parameter:
    `tied` moves weights and gradients between the two.
    """

    def __init__(self, maker: Maker, meshes: Meshes) -> None:
        self.meshes = meshes
        self.pipeline = maker.pipeline
        self.whole = maker.build()
        """The whole model on the meta device: names and shapes for saving and publishing."""
        decoders = [self.whole]
        if self.pipeline is not None:
            last = self.pipeline.num_stages - 1
            decoders = [
                maker.build(layers=self.pipeline.layers[n], is_first=n == 0, is_last=n == last)
                for n in self.pipeline.stages(meshes.pp.rank)
            ]
        self.parts: list[Predictor] = [maker.wrap(decoder) for decoder in decoders]
        for part in self.parts:
            give_memory(part, meshes.device, offload=maker.offloads)
        self.decoders = [part.decoder for part in self.parts]
        for decoder in self.decoders:
            decoder.fill_tables()
        named = [
            (name, p, part.cuts[name])
            for part in self.parts
            for name, p in part.decoder.named_parameters()
        ]
        self.holders = [module._parameters for part in self.parts for module in part.modules()]
        """The parameter dicts of all modules."""
        self.factors = [one for part in self.parts for one in factors_of(part)]
        self.tied = TiedHead()
        is_tied = self.whole.dims.tie_embeddings and self.whole.has_lm_head
        is_tied &= not self.factors  # frozen copies stay equal
        if self.pipeline is not None and is_tied:
            held = {name: p for name, p, _ in named}
            ends = held.get("embed.weight"), held.get(TIED)
            last = self.pipeline.last_rank
            self.tied = TiedHead(*ends, meshes.pp, first=0, last=last, device=meshes.device)
            named = [item for item in named if item[0] != TIED]
        named = [item for item in named if item[1].requires_grad]
        self.parameters: dict[str, Tensor] = {name: p for name, p, _ in named}
        """The trained parameters."""
        self.cuts: dict[str, Cut] = {name: cut for name, _, cut in named}

    def memory(self) -> dict[str, Tensor]:
        """Returns this rank's memory of the trained weights, by native name: a tensor itself, or
        the local memory of a sharded one, which an optimizer may update."""
        buffers = [pair for decoder in self.decoders for pair in kept_buffers(decoder).items()]
        buffers = buffers if self.whole.adapter_map is None else []
        return {
            name: x.to_local().detach() if isinstance(x, DTensor) else x
            for name, x in (*self.parameters.items(), *buffers)
        }

    def passes(self, settings: EngineSettings) -> Passes:
        if self.pipeline is None:
            return WholePasses(self.parts[0], settings, self.meshes)
        from pentad.parallel.pipeline_stage import PipelineRun  # brings torch's compiler: seconds

        schedule = PipelineRun(self.pipeline, self.parts, self.meshes)
        return PipelinedPasses(schedule, self.parts, self.tied, settings, self.meshes)

    def gradients(self) -> dict[str, Tensor]:
        """Returns this rank's shards of the gradient, by name; sums copies on several ranks."""
        self.tied.give_gradient()
        gradients = {n: local(p.grad) for n, p in self.parameters.items() if p.grad is not None}
        sum_copies(gradients, self.cuts, self.meshes.device)
        return gradients

    def drop_gradients(self) -> None:
        """Drops gradients; uses `holders`, because walking the modules twice per step is slow."""
        for held in self.holders:
            for parameter in held.values():
                if parameter is not None:
                    parameter.grad = None

    def rest(self) -> None:
        """Reshards parameters that a pass left gathered."""
        for part in self.parts:
            reshard(part)

    def buffers(self) -> list[Tensor]:
        """Returns tensors of modules besides the trained weights."""
        return []

    def frozen(self) -> dict[str, Tensor]:
        """Returns this rank's memory of the frozen weights, by native name."""
        return {
            name: local(tensor)
            for decoder in self.decoders
            for name, tensor in (*decoder.named_parameters(), *decoder.named_buffers())
            if not tensor.requires_grad
        }

    def initialise(self, seed: int) -> None:
        for decoder in self.decoders:
            initialise(decoder, seed)

    def load(self, folder: str | Path, seed: int = 0, *, dequantize: bool = False) -> None:
        for decoder in self.decoders:
            load_weights(decoder, folder, seed=seed, dequantize=dequantize)

    def fill_factors(self, lora: LoraConfig | None, seed: int) -> None:
        """Initialises the factors with new values, or from a PEFT folder."""
        if lora is None:
            return
        given = None if lora.init_path is None else read_adapter(lora.init_path).factors
        for decoder in self.decoders:
            fill_factors(decoder, seed, None if given is None else PairsReader(given.items()))

    def shards(self, weight_map: WeightMap) -> dict[str, Shard]:
        """Returns this rank's memory of the weights in a map, which may be frozen."""
        return {
            name: shard
            for decoder in self.decoders
            for name, shard in native_shards(decoder, weight_map).items()
        }
