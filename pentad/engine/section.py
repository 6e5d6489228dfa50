"""The keys of the blocks `actor` and `critic`, and the further settings of an engine.

Recipes, engine and planner use the same classes. `EngineSettings.settled` sets the defaults of
unset keys from device and layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import Field

from pentad.core.dims import ModelDims
from pentad.core.errors import Problem
from pentad.core.fit import (
    SCHEDULES,
    default_stages_per_rank,
    splits_backward,
    takes_stages_per_rank,
)
from pentad.core.layout import Backend, Layout
from pentad.core.machine import auto_dtype
from pentad.core.section import (
    Count,
    DType,
    NonNegative,
    Positive,
    Section,
    Share,
    ShortNames,
)
from pentad.core.sizes import DTYPE_BYTES, HOST_BOUND_FLOPS, default_microbatch_tokens

ParamDType = Annotated[Literal["float32", "bfloat16"], ShortNames]
ComputeDType = Annotated[Literal["auto", "float32", "bfloat16"], ShortNames]
TransformerImpl = Literal["auto", "local", "transformer_engine"]
TRANSFORMER_ENGINES = ("2.9", "2.10", "2.11")
"""The releases of Transformer Engine that megatron-core 0.16 takes."""
ScheduleName = Annotated[
    Literal["1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"], ShortNames
]


class MicrobatchConfig(Section):
    n_mbs: Annotated[int, Field(ge=1, le=1000000)] | None = None
    """Minimum number of microbatches per step. Raised to the number of pipeline stages. null: 1; on
    a GPU without a pipeline as many as its memory requires, with a note."""
    max_tokens_per_mb: Count | None = None
    """Maximum number of tokens in a forward pass; more microbatches are made if necessary. null:
    derived from the longest possible sequence of the run."""

    @property
    def fewest(self) -> int:
        return self.n_mbs or 1


class OptimizerConfig(Section):
    type: Literal["adamw"] = "adamw"
    """The optimizer; its state is kept in `param_dtype`."""
    lr: NonNegative = 1e-6
    """Peak learning rate. 0: weights do not change, for tests of all other parts."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay on matrices; norms, biases and embeddings are not decayed."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the second moment."""
    eps: Positive = 1e-8
    """Added to the square root of the second moment."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Decay of the learning rate after warm-up."""
    warmup_steps_proportion: Share = 0.0
    """Share of all steps over which the learning rate rises from 0."""
    min_lr_ratio: Share = 0.0
    """Final learning rate of linear and cosine, as a share of `lr`."""
    gradient_clipping: Positive | None = 1.0
    """Largest global gradient norm. null: no clipping."""


class ArchonConfig(Section):
    pp_schedule: ScheduleName = "Interleaved1F1B"
    """Pipeline schedule. Short names: I1F1B, IZB, ZBV."""
    stages_per_rank: Count | None = None
    """Pipeline stages per rank. null: 1 with 1F1B, else 2."""
    layers_per_stage: tuple[Count, ...] | None = None
    """Number of layers of each pipeline stage, first to last. null: balanced by cost, including
    embedding and head."""
    ac_mode: Literal["auto", "none", "selective", "full", "memory_budget"] = "auto"
    """Activation checkpointing. auto: selective; on a CPU none, unless the layout has a pipeline
    or `ac_selective` is given. Needs `gradient_checkpointing`."""
    ac_selective: Literal["op"] | Count | None = None
    """Kept activations with selective: `op` (the results of expensive operations), or a stride n
    (every n-th layer is recomputed). null: op, or 2 with zero-bubble schedules, which do not
    support op."""
    ac_memory_budget: Share = 0.5
    """For memory_budget: 0 recomputes most, 1 nothing. Needs compilation."""
    ac_debug: bool = False
    """Logs for each layer which operations are kept and which are recomputed. Slow; it disables
    compilation, which would hide the operations."""
    keep_logits: bool | None = None
    """Keeps the head's logits (4 bytes x tokens of a microbatch x vocabulary) for backward instead
    of recomputing them. null: on a GPU without a sampler, if the planned peak with the largest
    microbatch is at most 80% of its memory. Not supported with a pipeline."""
    offload_params: bool = False
    """Keeps parameters, gradients and optimizer state in host memory and runs the optimizer there;
    layers are copied to the device when they are used. Also works on one device."""
    enable_compile: Literal["auto"] | bool = "auto"
    """torch.compile per block. auto: on for CUDA unless the schedule is a zero-bubble one."""
    cuda_graphs: Literal["auto"] | bool = "auto"
    """Captures the pass of a microbatch (forward, loss, backward) as a CUDA graph when its size
    occurs again, and replays it for later microbatches, which are padded to few sizes (above 8,192
    tokens by at most about 1/16). auto: on for models so small that the host would launch their
    kernels more slowly than a GPU computes them (`core.sizes.HOST_BOUND_FLOPS`), if they are on one
    GPU with archon, compiled, in bfloat16, and have neither experts, delta nets nor an adapter, and
    `offload_train` is off."""
    reshard_after_forward_policy: Literal["default", "always", "never"] = "default"
    """Whether parameters are sharded again between forward and backward. default: yes, but not
    in a pipeline and not on one rank (unless offloaded), where that only costs time."""
    use_deterministic_algorithms: bool = False
    """Bitwise repeatable training; an operation without a deterministic version is an error that
    names it."""
    dp_replicate: Count = 1
    """Replicas among the data-parallel ranks; the rest of `d` shards."""
    moe_aux_loss_coef: NonNegative = 0.0
    """Weight of the load-balancing loss of a mixture, which is 1 in each layer if all experts get
    equally many tokens. It is a mean over each microbatch, so it depends on how a step is split."""
    moe_z_loss_coef: NonNegative = 0.0
    """Weight of the mean square of the routers' log-partition; like `moe_aux_loss_coef` a mean over
    each microbatch."""
    moe_bias_rate: NonNegative = 0.0
    """Change per step of an expert's selection bias, towards equal load. Needs a family whose files
    can store the bias: glm4_moe can, Qwen3-MoE cannot."""

    @property
    def balances(self) -> bool:
        """Whether a loss or bias balances the load of experts."""
        return any(self.router_losses.values()) or self.moe_bias_rate > 0

    @property
    def router_losses(self) -> dict[str, float]:
        """Returns the coefficients of the routers' losses, by key."""
        return {name: getattr(self, name) for name in ("moe_aux_loss_coef", "moe_z_loss_coef")}

    def selection(self, pp: int) -> Literal["op"] | int:
        """Returns `ac_selective`, or its default for a pipeline of `pp` ranks."""
        is_split = pp > 1 and splits_backward(self.pp_schedule)
        return self.ac_selective or (2 if is_split else "op")

    def reshards(self, pp: int, world: int) -> bool:
        """Whether parameters are resharded: a pipeline would gather too often; one rank gathers
        only from the host."""
        policy, gathers = self.reshard_after_forward_policy, world > 1 or self.offload_params
        return pp == 1 and gathers if policy == "default" else policy == "always"

    def chosen(self, device: str, pp: int, world: int, *, strict: bool = False) -> ArchonConfig:
        """Returns these keys with defaults for unset ones."""
        is_cuda = device == "cuda"
        selects = is_cuda or self.ac_selective is not None
        mode = "selective" if selects else "none"
        compiles = self.enable_compile == "auto" and is_cuda and not strict
        choices = {
            "ac_mode": mode if self.ac_mode == "auto" else self.ac_mode,
            "ac_selective": self.selection(pp),
            "keep_logits": self.keep_logits is True,
            "enable_compile": self.enable_compile is True or compiles,
            "reshard_after_forward_policy": "always" if self.reshards(pp, world) else "never",
        }
        return self.model_copy(update=choices)

    @property
    def is_resharded(self) -> bool:
        """Whether blocks free their gathered weights between forward and backward."""
        return self.reshard_after_forward_policy == "always"

    @property
    def keeps_products(self) -> bool:
        """Whether layers keep the results of expensive operations."""
        return self.ac_mode == "selective" and self.ac_selective == "op"

    def is_recomputed(self, layer: int) -> bool:
        """Whether a layer keeps only its input."""
        if self.ac_mode == "selective" and isinstance(self.ac_selective, int):
            return layer % self.ac_selective == 0
        return self.ac_mode == "full"

    def compile_problems(
        self, prefix: str, *, compiles: bool | Literal["auto"], keeps: bool
    ) -> Iterator[Problem]:
        """Problems of keys that need compilation, or do not support it. `keeps`: whether activation
        checkpointing is on."""
        is_budget = self.ac_mode == "memory_budget"
        if is_budget and keeps and compiles is False:
            remedy = "use ac_mode: selective or full, or leave enable_compile out"
            rule = f"needs compile, and {prefix}enable_compile = false"
            yield Problem(f"{prefix}ac_mode = memory_budget", rule, remedy)
        if self.ac_debug and compiles is True:
            needs = ", which ac_mode = memory_budget needs," if is_budget else ""
            rule = f"{prefix}enable_compile = true{needs} hides the operations that it would log"
            yield Problem(f"{prefix}ac_debug = true", rule, "leave one of the two out")

    @property
    def stages(self) -> int:
        """Returns the stages per pipeline rank: the key, or the default of the schedule."""
        return self.stages_per_rank or default_stages_per_rank(self.pp_schedule)

    def num_stages(self, pp: int) -> int:
        """Returns the number of stages of the whole pipeline."""
        return pp * self.stages if pp > 1 else 1

    def stage_problems(
        self, prefix: str, where: str, *, pp: int, num_layers: int | None
    ) -> Iterator[Problem]:
        """Stages that the schedule or the model does not support. `where`: the key that sets
        `pp`."""
        schedule, given = self.pp_schedule, self.stages_per_rank
        if given is not None and not takes_stages_per_rank(schedule, given):
            want = {"1F1B": "exactly 1", "ZBVZeroBubble": "exactly 2"}.get(schedule, "at least 2")
            others = [name for name in SCHEDULES if takes_stages_per_rank(name, given)]
            rule = f"pp_schedule = {schedule} takes {want}"
            yield Problem(f"{prefix}stages_per_rank = {given}", rule, f"or use {', '.join(others)}")
        each = self.stages
        stages, layers = pp * each, self.layers_per_stage
        if num_layers is not None and stages > num_layers:
            rule = f"p{pp} x {each} stages a rank ({schedule}) = {stages} stages"
            rule += f", and the model has {num_layers} layers"
            remedy = f"p can be at most {num_layers // each}"
            if each > 1 and pp <= num_layers:
                remedy += f", or set {prefix}pp_schedule: 1F1B, which has one stage a rank"
            yield Problem(where, rule, remedy)
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
        """Settings that `pp_schedule` does not support. A split backward pass keeps its graph in
        between: freeing or replaying it would give wrong results or hang. `keeps`: whether
        activation checkpointing is on. `prefix`: that of the keys in the config, or empty."""
        name, key = f"pp_schedule = {self.pp_schedule}", prefix
        if self.keep_logits:
            rule = "a pipeline would hold the logits of several microbatches at once"
            yield Problem(f"{key}keep_logits = true", rule, "leave it out")
        keeps_products = keeps and self.ac_mode == "selective" and self.selection(pp) == "op"
        stride = "use ac_selective: 2 or ac_mode: full"
        if not splits_backward(self.pp_schedule):
            # Experts are gathered within their block, in backward but not in every forward.
            if keeps_products and reshards and moe:
                rule = "experts of a pipeline would be gathered again, which ac_selective = op "
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


class LoraConfig(Section):
    rank: Annotated[int, Field(ge=1, le=512)] = 32
    """Size of the factors: A is [rank, in], B [out, rank]. Both are float32, and so is their
    optimizer state."""
    alpha: Positive = 32.0
    """A layer computes x W^T + alpha / rank * (x A^T) B^T, never merged."""
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Matrices that have factors: all-linear, or some of q k v o gate up down experts, of latent
    attention q_a q_b kv_a kv_b, and of embeddings for each layer per_layer_input_gate
    per_layer_projection. gate and up are named together. Router, embedding and head have none. A
    critic also trains its head, and with [] only the head. fsdp: the linear layers of transformers'
    blocks, by these words or by their last names (c_fc), and no experts."""
    experts: Literal["shared_outer", "each"] = "shared_outer"
    """Factors of the experts of a mixture. shared_outer: the experts of a layer share the factor on
    the side of the hidden size. each: every expert has its own two factors."""
    init_path: str | None = None
    """PEFT folder that the factors start from. null: A is random, B is 0."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class ModelConfig(Section):
    path: str | None = None
    """Folder with config.json, safetensors and a tokenizer, or a name on the Hugging Face Hub,
    OWNER/NAME or OWNER/NAME@REVISION, whose files are read from its cache or downloaded. For the
    critic, null means the actor's."""
    dequantize: bool = False
    """Reads quantised weights of HF folders (fp8 with a scale per block, as DeepSeek-V3; mxfp4, as
    gpt-oss) as 16-bit ones, in `path` and in the folders of `ref` and `teacher`. false: such
    folders are rejected. Exports are in `dtype`, not quantised."""
    init_from_scratch: bool = False
    """Starts from random weights; only config.json and the tokenizer are read."""
    training_backend: Backend | None = None
    """Training backend: archon, fsdp or megatron. null: that of `allocation_mode`, or archon if
    that is unset."""
    checkpoint_load_path: str | None = None
    """Megatron folder (torch_dist or legacy) that training starts from; `path` then gives only
    config.json and the tokenizer. null: the weights in `path`."""
    dtype: ComputeDType = "auto"
    """Compute type. auto: bfloat16 on a GPU, float32 on a CPU."""
    param_dtype: ParamDType = "float32"
    """Type of the master weights and of the optimizer state. bfloat16 is rounded stochastically."""
    reduce_dtype: ParamDType = "float32"
    """Type in which gradients are summed over ranks."""
    gradient_checkpointing: bool = True
    """Switches activation checkpointing on or off; `archon.ac_mode` selects the kind."""
    pad_to_maximum: Literal["auto"] | bool = "auto"
    """Pads every microbatch to `mb_spec.max_tokens_per_mb` with tokens that are never trained, so
    that all have one shape. auto: no padding, shapes may differ."""
    enable_tree_training: bool | None = None
    """Computes the common first tokens of a group's samples, such as the prompt, only once, if they
    are at least 64 and a tenth of a pass: the same gradient with less time and memory. null: with
    archon, except with c, `strict`, gated delta nets, limited attention scores, or losses and
    biases that balance experts, where true is rejected."""
    mb_spec: MicrobatchConfig = MicrobatchConfig()
    """Split of a step into microbatches."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer and its schedule."""
    archon: ArchonConfig = ArchonConfig()
    """The training engine."""
    lora: LoraConfig | None = None
    """Trains low-rank factors and freezes the weights, which are stored once, in `dtype`, without
    gradients and optimizer state. null: all weights are trained."""

    @property
    def has_other_weights(self) -> bool:
        """Whether `path` gives only config and tokenizer."""
        return self.init_from_scratch or self.checkpoint_load_path is not None

    def compute_dtype(self, device: str) -> Literal["float32", "bfloat16"]:
        """Returns the compute dtype of forward and backward on a device of this type."""
        return auto_dtype(device) if self.dtype == "auto" else self.dtype

    def bytes_on(self, device: str) -> int:
        """Returns the bytes of one number in compute, sampling and saved files."""
        return DTYPE_BYTES[self.compute_dtype(device)]

    @property
    def compute_bytes(self) -> int:
        """Like `bytes_on`, once `dtype` is settled."""
        return DTYPE_BYTES[self.dtype]

    @property
    def is_mixed(self) -> bool:
        """Whether master weights are cast for compute."""
        return self.dtype != self.param_dtype

    @property
    def min_tokens_per_mb(self) -> int:
        """Returns the minimum tokens of a microbatch, reached by padding."""
        return (self.mb_spec.max_tokens_per_mb or 1) if self.pad_to_maximum is True else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of an engine besides its weights: its block of keys, and values of the run."""

    model: ModelConfig = ModelConfig()
    total_steps: int | None = None
    """Optimizer steps of the run; warm-up and decay are shares of it. None: the engine only scores.
    """
    temperature: float = 1.0
    """Log-probs and entropies are those of softmax(logits / temperature)."""
    strict: bool = False
    """Log-probs are bitwise equal to those of the strict sampler: they do not depend on the batch
    of a token. For ranks with whole layers, uncompiled."""
    balance_data: bool = True
    """Whether rows are assigned to ranks and microbatches by cost; else in order."""
    max_row_tokens: int | None = None
    """Longest possible sequence, if known: no microbatch is smaller."""
    publish_dtype: DType | None = None
    """Dtype of published and saved weights; None: the compute dtype."""
    logprob_bytes: int | None = None
    """Memory for one chunk of logits; None: `ops.logprob.CHUNK_BYTES`."""
    transformer_impl: TransformerImpl = "auto"
    """The layers of the backend megatron."""
    offloads: bool = False
    """Whether the weights leave the GPU between steps, and return to other addresses."""

    def settled(self, device: str, layout: Layout) -> EngineSettings:
        """Returns these settings with a value for every unset key."""
        model, archon, pp = self.model, self.model.archon, layout.pp
        tokens = model.mb_spec.max_tokens_per_mb
        if tokens is None and self.max_row_tokens is not None:
            tokens = default_microbatch_tokens(self.max_row_tokens, device, archon.num_stages(pp))
        choices = {
            "dtype": model.compute_dtype(device),
            "mb_spec": model.mb_spec.model_copy(update={"max_tokens_per_mb": tokens}),
            "archon": archon.chosen(device, pp, layout.world, strict=self.strict),
        }
        if model.lora is not None:  # frozen weights need no master weights
            choices["param_dtype"] = choices["dtype"]
        return replace(self, model=model.model_copy(update=choices))


def carrying_problems(
    family: str, key: str, *, has_lora: bool = False, compiles: bool = False
) -> Iterator[Problem]:
    """Problems of settings for models of transformers whose layers carry state. `compiles`: whether
    compiled blocks were asked for."""
    if has_lora:
        rule = f"layers of {family} use some of their matrices without calling them"
        yield Problem(f"{key}.lora", rule, "leave it out")
    if compiles:
        rule = f"layers of {family} carry state from token to token: fsdp does not compile them"
        yield Problem(f"{key}.archon.enable_compile = true", rule, "leave it out")


def uncompiled_problems(
    family: str, key: str, archon: ArchonConfig, layout: Layout
) -> Iterator[Problem]:
    """Problems of keys that need compiled blocks, for models of transformers with experts: fsdp
    compiles no exchange of tokens. `archon`: keys as they were given."""
    if layout.ep * layout.tp == 1:
        return
    axes = " ".join(f"{x}{n}" for x, n in (("t", layout.tp), ("e", layout.ep)) if n > 1)
    rule = f"{axes} of fsdp sends tokens to the experts of {family}, and does not compile that"
    if archon.ac_mode == "memory_budget":  # which sets enable_compile
        yield Problem(f"{key}.archon.ac_mode = memory_budget", rule, "use selective or full")
    elif archon.enable_compile is True:
        yield Problem(f"{key}.archon.enable_compile = true", rule, "leave it out, or use archon")


def no_graphs(
    settings: EngineSettings, dims: ModelDims, layout: Layout, backend: str
) -> str | None:
    """Why training passes cannot be captured as CUDA graphs; None if they can. `settings`: settled
    ones."""
    model, archon = settings.model, settings.model.archon
    reasons = {
        f"{backend} does not capture its passes": backend != "archon",
        f"the ranks of {layout} communicate during a pass": layout.world > 1,
        f"{dims.family} reads the number of tokens of its experts on the host": any(
            dims.is_moe(layer) for layer in range(dims.num_layers)
        ),
        f"the linear_attention layers of {dims.family} are prepared on the host": bool(
            dims.linear_layers
        ),
        f"attention scores of {dims.family} are limited": dims.score_cap is not None,
        "strict mode prepares its kernels on the host": settings.strict,
        "passes with an adapter are not captured": model.lora is not None,
        "parameters are copied from the host during a pass": archon.offload_params,
        "offload_train = true moves the weights to other addresses": settings.offloads,
        "reshard_after_forward_policy = always casts weights during a pass": archon.is_resharded,
        "use_deterministic_algorithms is on": archon.use_deterministic_algorithms,
        "blocks are not compiled": archon.enable_compile is not True,
        f"{model.dtype} has no flash kernel": model.dtype != "bfloat16",
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def captures(
    settings: EngineSettings, dims: ModelDims, layout: Layout, backend: str, device: str
) -> bool:
    """Whether training passes are captured as CUDA graphs. `settings`: settled ones."""
    wanted = settings.model.archon.cuda_graphs
    tokens = settings.model.mb_spec.max_tokens_per_mb
    if device != "cuda" or wanted is False or no_graphs(settings, dims, layout, backend):
        return False
    if wanted is True:
        return True
    layers = dims.num_matmul_params - dims.embedding_params
    flops = 6.0 * layers / dims.num_layers * (tokens or math.inf)
    return dims.is_whole and flops <= HOST_BOUND_FLOPS
