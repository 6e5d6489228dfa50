"""What an engine is told: precision, memory, optimizer. Plain data, checked when it is made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from pentad.core.errors import Problem, UserError
from pentad.models.balance import BalanceSettings

DType = Literal["float32", "bfloat16", "float64"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """AdamW and its schedule. Matrices are decayed; norms, biases and embeddings are not."""

    lr: float = 1e-6
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps_proportion: float = 0.0
    min_lr_ratio: float = 0.0
    gradient_clipping: float | None = 1.0
    """Largest norm of the whole gradient; None: no clipping."""
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
        if problems:
            raise UserError(problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
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
    n_mbs: int = 1
    """Microbatches a call is cut into, at least."""
    pad_to_maximum: bool = False
    """Fills every microbatch up to `max_tokens_per_mb` with tokens that are never trained, so that
    all have one shape."""
    logprob_bytes: int | None = None
    """Room for one chunk of logits; None: `ops.logprob.CHUNK_BYTES`."""
    gradient_checkpointing: bool = True
    """Switches activation checkpointing as a whole."""
    ac_mode: Literal["none", "selective", "full", "memory_budget"] = "none"
    """memory_budget leaves the choice to the compiler, within `ac_memory_budget`."""
    ac_selective: Literal["op"] | int = "op"
    """What selective does: `op` keeps the results of matrix products and attention; n recomputes
    every n-th block whole."""
    ac_memory_budget: float = 0.5
    """For memory_budget: the share of what could be kept that is kept."""
    ac_debug: bool = False
    """Logs, once for each block, what is kept and what is computed again."""
    compile: bool = False
    """torch.compile per block; on CUDA only."""
    reshard_after_forward: bool = True
    """Whether blocks give up their gathered weights between forward and backward."""
    offload_params: bool = False
    """Parameters, gradients and optimizer state lie in host memory, and the optimizer runs there;
    blocks are brought to the device when they are used."""
    pp_schedule: str = "Interleaved1F1B"
    """Of `core.stages.SCHEDULES`; read where the layout has several pipeline ranks."""
    stages_per_rank: int | None = None
    """Pipeline stages each rank holds; None: 1 under 1F1B, else 2."""
    layers_per_stage: tuple[int, ...] | None = None
    """How many layers each stage holds, first to last; None: balanced by cost."""
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
        problems += self._recomputation_problems()
        if self.pad_to_maximum and self.max_tokens_per_mb is None:
            rule = "the maximum is max_tokens_per_mb, which is not set"
            problems.append(Problem("pad_to_maximum = True", rule, "give it"))
        if self.pad_to_maximum and (self.balance.aux_loss_coef or self.balance.z_loss_coef):
            rule = "the router's own losses would be trained on what is padded"
            problems.append(Problem("pad_to_maximum = True", rule, "set their weights to 0"))
        if problems:
            raise UserError(problems)

    def _recomputation_problems(self) -> Iterator[Problem]:
        where = f"ac_mode = {self.ac_mode}"
        is_budget = self.ac_mode == "memory_budget" and self.gradient_checkpointing
        if is_budget and not self.compile:
            yield Problem(where, "the compiler keeps to it, and compile = False", "use full")
        if not 0 <= self.ac_memory_budget <= 1:
            where = f"ac_memory_budget = {self.ac_memory_budget}"
            yield Problem(where, "must lie between 0 and 1")
        if self.ac_debug and self.compile:
            rule = "compile = True hides the operations that it would look at"
            yield Problem("ac_debug = True", rule, "set one of the two to False")

    @property
    def min_tokens_per_mb(self) -> int:
        """What every microbatch is filled up to."""
        return (self.max_tokens_per_mb or 1) if self.pad_to_maximum else 1

    @property
    def is_mixed(self) -> bool:
        """Whether master weights are cast for compute."""
        return self.compute_dtype != self.param_dtype
