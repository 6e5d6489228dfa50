"""Settings of the parts that train, as frozen dataclasses: the keys of a recipe stand here once.

A class of keys is both a block of the config (`config.schema` inherits it, with bounds and texts)
and what the part reads: `EngineSettings` is `EngineKeys` after resolution, with what follows from
device and layout. `into` goes from the one to the other by the names of the fields.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from pentad.core.errors import Problem, raise_problems
from pentad.core.fit import (
    SCHEDULES,
    default_stages_per_rank,
    splits_backward,
    takes_stages_per_rank,
)
from pentad.core.section import Count, DType, NonNegative, Positive, Share, ShortNames

T = TypeVar("T")
ScheduleName = Annotated[
    Literal["1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"], ShortNames
]


def into(cls: type[T], *sections: object, **derived: Any) -> T:
    """A `cls` of the derived values and, for its other fields, the values of the sections."""
    for name in [f.name for f in fields(cls) if f.name not in derived]:  # type: ignore[arg-type]
        found = [getattr(section, name) for section in sections if hasattr(section, name)]
        assert len(found) < 2, f"{cls.__name__}.{name} stands in several sections"
        for value in found:
            derived[name] = value
    return cls(**derived)


@dataclass(frozen=True, kw_only=True)
class OptimizerKeys:
    type: Literal["adamw"] = "adamw"
    """The optimizer; its state is kept in `param_dtype`."""
    lr: NonNegative = 1e-6
    """Peak learning rate. 0 trains nothing, which is a good test of everything else."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay on matrices; norms, biases and embeddings are not decayed."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the second moment."""
    eps: Positive = 1e-8
    """Added to the root of the second moment."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after warm-up."""
    warmup_steps_proportion: Share = 0.0
    """Share of all steps over which the learning rate rises from 0."""
    min_lr_ratio: Share = 0.0
    """Where linear and cosine end, as a share of `lr`."""
    gradient_clipping: Positive | None = 1.0
    """Largest global gradient norm. null: no clipping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings(OptimizerKeys):
    """AdamW and its schedule. Matrices are decayed; norms, biases and embeddings are not."""

    total_steps: int | None = None
    """Optimizer steps of the run: what warm-up and decay are shares of."""

    def __post_init__(self) -> None:
        needs_total = self.lr_scheduler_type != "constant" or self.warmup_steps_proportion > 0
        problems = []
        if needs_total and not self.total_steps:
            rule = f"{self.lr_scheduler_type} with warm-up {self.warmup_steps_proportion} needs it"
            problems.append(Problem(f"total_steps = {self.total_steps}", rule, "give it"))
        for name, value in (
            ("warmup_steps_proportion", self.warmup_steps_proportion),
            ("min_lr_ratio", self.min_lr_ratio),
        ):
            if not 0 <= value <= 1:
                problems.append(Problem(f"{name} = {value}", "must lie between 0 and 1"))
        if self.gradient_clipping is not None and not self.gradient_clipping > 0:
            rule = "must be positive, or None for no clipping"
            problems.append(Problem(f"gradient_clipping = {self.gradient_clipping}", rule))
        raise_problems(problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceSettings:
    """What keeps the experts of a mixture equally busy."""

    aux_loss_coef: float = 0.0
    """Weight of the load-balancing loss, which is 1 in each layer when all is balanced."""
    z_loss_coef: float = 0.0
    """Weight of the mean square of the routers' log-partition."""
    bias_rate: float = 0.0
    """How far the selection bias of an expert moves at each step, up if it had fewer tokens than
    the mean and down if it had more."""

    def __post_init__(self) -> None:
        values = (
            ("aux_loss_coef", self.aux_loss_coef),
            ("z_loss_coef", self.z_loss_coef),
            ("bias_rate", self.bias_rate),
        )
        problems = [
            Problem(f"{name} = {value}", "must be finite and not negative", "0 switches it off")
            for name, value in values
            if not (value >= 0 and math.isfinite(value))
        ]
        raise_problems(problems)


def is_recomputed(mode: str, selective: str | int | None, layer: int) -> bool:
    """Whether activation checkpointing keeps only the input of a layer."""
    if mode == "selective" and isinstance(selective, int):
        return layer % selective == 0
    return mode == "full"


@dataclass(frozen=True, kw_only=True)
class EngineKeys:
    """Keys of `archon` that the engine reads by the same names."""

    pp_schedule: ScheduleName = "Interleaved1F1B"
    """Pipeline schedule. Short names: I1F1B, IZB, ZBV."""
    stages_per_rank: Count | None = None
    """Pipeline stages each rank holds. null: 1 under 1F1B, else 2."""
    layers_per_stage: tuple[Count, ...] | None = None
    """How many layers each pipeline stage holds, first to last. null: balanced by cost, embedding
    and head counted."""
    ac_mode: Literal["auto", "none", "selective", "full", "memory_budget"] = "auto"
    """Activation checkpointing. auto: selective; on a CPU none, unless the layout has a pipeline
    or `ac_selective` is given. Needs `gradient_checkpointing`."""
    ac_selective: Literal["op"] | Count | None = None
    """What selective keeps: `op` (the results of expensive operations), or a stride n (every n-th
    layer is recomputed). null: op, or 2 under a zero-bubble schedule, which op would hang."""
    ac_memory_budget: Share = 0.5
    """For memory_budget: 0 recomputes most, 1 nothing. Needs compile."""
    ac_debug: bool = False
    """Logs, once a layer, which operations are kept and which are computed again. Slow, and
    without compile, which would hide them."""
    keep_logits: bool | None = None
    """Keeps the head's logits (4 bytes x tokens of a microbatch x vocabulary) for backward, which
    computes them again otherwise. null: on a GPU without a sampler, where the run's plan with the
    largest microbatch takes at most 80% of its memory. Not under a pipeline."""
    offload_params: bool = False
    """Keeps parameters, gradients and optimizer state in host memory, where the optimizer then
    runs; layers are brought to the device as they are used. On one device, too."""

    def selection(self, pp: int) -> Literal["op"] | int:
        """`ac_selective`, or what a pipeline of `pp` ranks makes of null."""
        is_split = pp > 1 and splits_backward(self.pp_schedule)
        return self.ac_selective or (2 if is_split else "op")

    def chosen(self, pp: int, device: str) -> EngineKeys:
        """These keys with a choice where they leave it to the engine."""
        selects = device == "cuda" or self.ac_selective is not None
        auto: Literal["none", "selective"] = "selective" if selects else "none"
        mode = auto if self.ac_mode == "auto" else self.ac_mode
        keep = self.keep_logits is True
        selection = self.selection(pp)
        return into(EngineKeys, self, ac_mode=mode, ac_selective=selection, keep_logits=keep)

    @property
    def keeps_products(self) -> bool:
        """Whether layers keep the results of their expensive operations."""
        return self.ac_mode == "selective" and self.ac_selective == "op"

    def is_recomputed(self, layer: int) -> bool:
        """Whether a layer keeps its input only."""
        return is_recomputed(self.ac_mode, self.ac_selective, layer)

    def compile_problems(
        self, prefix: str, *, compiles: bool | Literal["auto"], keeps: bool
    ) -> Iterator[Problem]:
        """What needs compiled blocks, or blocks that are not. `keeps`: whether activation
        checkpointing is on."""
        is_budget = self.ac_mode == "memory_budget"
        if is_budget and keeps and compiles is False:
            remedy = "use ac_mode: selective or full, or leave enable_compile out"
            rule = f"needs compile, and {prefix}enable_compile = false"
            yield Problem(f"{prefix}ac_mode = memory_budget", rule, remedy)
        if self.ac_debug and compiles is True:
            needs = ", which ac_mode = memory_budget needs," if is_budget else ""
            rule = f"{prefix}enable_compile = true{needs} hides what it would look at"
            yield Problem(f"{prefix}ac_debug = true", rule, "leave one of the two out")

    def stage_problems(
        self, prefix: str, where: str, *, pp: int, num_layers: int | None
    ) -> Iterator[Problem]:
        """Stages that the schedule or the model does not have. `where`: what says `pp`."""
        schedule, given = self.pp_schedule, self.stages_per_rank
        if given is not None and not takes_stages_per_rank(schedule, given):
            want = {"1F1B": "exactly 1", "ZBVZeroBubble": "exactly 2"}.get(schedule, "at least 2")
            others = [name for name in SCHEDULES if takes_stages_per_rank(name, given)]
            rule = f"pp_schedule = {schedule} takes {want}"
            yield Problem(f"{prefix}stages_per_rank = {given}", rule, f"or use {', '.join(others)}")
        each = given or default_stages_per_rank(schedule)
        stages, layers = pp * each, self.layers_per_stage
        if num_layers is not None and stages > num_layers:
            rule = f"p{pp} x {each} stages a rank ({schedule}) = {stages} stages"
            rule += f", and the model has {num_layers} layers"
            yield Problem(where, rule, f"p can be at most {num_layers // each}")
        if layers is None:
            return
        where = f"{prefix}layers_per_stage = {list(layers)}"
        if len(layers) != stages:
            rule = f"{len(layers)} numbers for p{pp} x {each} stages a rank = {stages}"
            yield Problem(where, rule, "give one for each stage, or leave it out")
        elif min(layers) < 1:
            yield Problem(where, "every stage needs a layer", "leave it out to have them balanced")
        elif num_layers is not None and sum(layers) != num_layers:
            rule = f"sums to {sum(layers)}, and the model has {num_layers} layers"
            yield Problem(where, rule, "leave it out to have them balanced")

    def schedule_problems(
        self, prefix: str, *, pp: int, compiles: bool, keeps: bool, reshards: bool, moe: bool
    ) -> Iterator[Problem]:
        """What `pp_schedule` does not go with. A backward in two parts keeps its graph in between:
        what frees or replays it would be wrong, or wait without end. `keeps`: whether activation
        checkpointing is on. `prefix` of the keys: that of the block in the config, or none."""
        name, key = f"pp_schedule = {self.pp_schedule}", prefix
        if self.keep_logits:
            rule = "a pipeline would hold the logits of several microbatches at once"
            yield Problem(f"{key}keep_logits = true", rule, "leave it out")
        keeps_products = keeps and self.ac_mode == "selective" and self.selection(pp) == "op"
        stride = "use ac_selective: 2 or ac_mode: full"
        if not splits_backward(self.pp_schedule):
            # Experts are gathered within their block, in backward but not in every forward.
            if keeps_products and reshards and moe:
                rule = "experts of a pipeline would be gathered anew, which ac_selective = op "
                where = f"{key}reshard_after_forward_policy = always"
                yield Problem(where, f"{rule}cannot replay", f"leave it out, or {stride}")
            return
        other = "use pp_schedule: Interleaved1F1B"
        if compiles:
            rule = f"{name} splits backward, which compiled blocks do not support"
            remedy = f"leave enable_compile out, or {other}"
            yield Problem(f"{key}enable_compile = true", rule, remedy)
        if keeps_products:
            rule = f"{name} needs the kept results twice, and they are dropped after the first use"
            yield Problem(f"{key}ac_selective = op", rule, f"{stride}, or {other}")
        if reshards:
            rule = f"{name} would give wrong gradients with parameters sharded in between"
            where = f"{key}reshard_after_forward_policy = always"
            yield Problem(where, rule, f"leave it out, or {other}")
        if keeps and self.ac_mode == "memory_budget":
            rule = f"needs compile, which {name} excludes"
            yield Problem(f"{key}ac_mode = memory_budget", rule, f"use ac_mode: full, or {other}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings(EngineKeys):
    """Everything an engine must know besides its model."""

    compute_dtype: DType = "float32"
    """In which forward and backward run."""
    strict: bool = False
    """Log-probs that equal the strict sampler's bit for bit: a token's do not depend on its batch.
    On ranks that hold whole layers, uncompiled."""
    param_dtype: DType = "float32"
    """Of the master weights and of the optimizer's state."""
    reduce_dtype: DType = "float32"
    """In which gradients are summed over ranks and microbatches."""
    publish_dtype: DType | None = None
    """Of the weights handed to samplers and saved; None: the compute dtype."""
    temperature: float = 1.0
    """Of the run: log-probs and entropies are those of softmax(logits / temperature)."""
    max_tokens_per_mb: int | None = None
    """Most tokens of one forward pass; None: all rows of a call in one."""
    max_row_tokens: int | None = None
    """The longest sequence there will be, where that is known: attention is chosen by it."""
    n_mbs: int = 1
    """Microbatches a call is cut into, at least."""
    balance_data: bool = True
    """Rows are dealt to ranks and microbatches by cost; otherwise in their order."""
    pad_to_maximum: bool = False
    """Fills every microbatch up to `max_tokens_per_mb` with tokens that are never trained, so that
    all have one shape."""
    logprob_bytes: int | None = None
    """Room for one chunk of logits; None: `ops.logprob.CHUNK_BYTES`."""
    gradient_checkpointing: bool = True
    """Switches activation checkpointing as a whole."""
    ac_mode: Literal["none", "selective", "full", "memory_budget"] = "none"
    ac_selective: Literal["op"] | int = "op"
    keep_logits: bool = False
    compile: bool = False
    """torch.compile per block; on CUDA only."""
    reshard_after_forward: bool = True
    """Whether blocks give up their gathered weights between forward and backward."""
    deterministic: bool = False
    """Bitwise repeatable, or torch refuses with the name of the operation."""
    tag_memory: Literal["host", "device"] = "host"
    """Where weights saved as tags lie."""
    balance: BalanceSettings = field(default_factory=BalanceSettings)
    """What keeps the experts of a mixture equally busy."""
    optimizer: OptimizerSettings | None = field(default_factory=OptimizerSettings)
    """None: the engine only scores."""

    def __post_init__(self) -> None:
        problems = []
        if not self.temperature > 0:
            rule = "log-probs need a positive temperature"
            remedy = "greedy decoding is scored at 1"
            problems.append(Problem(f"temperature = {self.temperature}", rule, remedy))
        for name, limit in (("max_tokens_per_mb", self.max_tokens_per_mb), ("n_mbs", self.n_mbs)):
            if limit is not None and limit < 1:
                problems.append(Problem(f"{name} = {limit}", "must be at least 1"))
        if self.strict and self.compile:
            rule = "strict = true: compiled code adds up in an order of its own"
            problems.append(Problem("compile = true", rule, "leave one of them out"))
        if self.ac_selective != "op" and self.ac_selective < 1:
            rule = "must be op or a stride of at least 1"
            problems.append(Problem(f"ac_selective = {self.ac_selective}", rule))
        problems += self.compile_problems(
            "", compiles=self.compile, keeps=self.gradient_checkpointing
        )
        if not 0 <= self.ac_memory_budget <= 1:
            where = f"ac_memory_budget = {self.ac_memory_budget}"
            problems.append(Problem(where, "must lie between 0 and 1"))
        if self.pad_to_maximum and self.max_tokens_per_mb is None:
            rule = "the maximum is max_tokens_per_mb, which is not set"
            problems.append(Problem("pad_to_maximum = True", rule, "give it"))
        if self.pad_to_maximum and (self.balance.aux_loss_coef or self.balance.z_loss_coef):
            rule = "the router's own losses would be trained on what is padded"
            problems.append(Problem("pad_to_maximum = True", rule, "set their weights to 0"))
        raise_problems(problems)

    @property
    def min_tokens_per_mb(self) -> int:
        """What every microbatch is filled up to."""
        return (self.max_tokens_per_mb or 1) if self.pad_to_maximum else 1

    @property
    def is_mixed(self) -> bool:
        """Whether master weights are cast for compute."""
        return self.compute_dtype != self.param_dtype
