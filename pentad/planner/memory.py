"""Memory of a run by rank and by phase, estimated from dimensions and layout alone.

An estimate: allocator slack and workspaces of kernels are one constant, routing is assumed to be
balanced, and every sequence as long as possible. The rule of thumb of the Archon tutorial is
computed for comparison. Legend: P parameters of this rank before sharding over data parallelism; S
after it; p, c, r bytes of master, compute and reduce dtype; T tokens of a microbatch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from pentad.core.dims import ModelDims
from pentad.core.fit import (
    experts_each,
    peak_in_flight,
    split_layers,
    stages_of_rank,
)
from pentad.core.layout import Layout
from pentad.core.machine import GIB
from pentad.core.sizes import (
    CHUNK_BYTES,
    DIGEST_BYTES,
    DIGEST_WORDS,
    DTYPE_BYTES,
    LOGIT_COPIES,
    OPTIMIZER_STATES,
    PROCESS_BYTES,
    PUBLISH_BUCKET_BYTES,
    PublishKind,
)
from pentad.engine.section import ModelConfig
from pentad.planner.activations import (
    ends_bytes,
    flowing_bytes,
    forward_bytes,
    kept_bytes,
    rebuilt_bytes,
)
from pentad.planner.adapters import FACTOR_BYTES, num_factors

NCCL_BYTES = int(0.75 * GIB)
"""Buffers of the communicators if there is more than one rank."""
HOST_BYTES_PER_RANK = int(3.0 * GIB)
"""Host memory of a process that uses CUDA: libraries, pinned buffers, the program."""
PHASES = ("load", "rollout", "log-prob", "backward", "optimizer", "publish")


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """All values that determine the memory of a training component."""

    dims: ModelDims
    layout: Layout
    model: ModelConfig
    """The block of keys of the role, settled for the device and the layout."""
    num_microbatches: int = 1
    microbatch_tokens: int
    """Tokens of the largest microbatch of one data-parallel rank, before cp and tp split it."""
    has_whole_tables: bool = False
    """Whether tp leaves embedding and head whole, as the backend fsdp does."""
    has_buffers: bool = False
    """Whether ranks hold unsharded compute weights and gradients from the start, as with the
    backend megatron."""
    num_tags: int = 0
    """Number of further copies of the weights: reference, teacher."""
    device: str = "cuda"
    with_optimizer: bool = True
    publishes: bool = False
    """Whether its weights are published to samplers."""
    overlaps: bool = False
    """Whether training continues during a transfer, which therefore sends a copy."""
    max_staleness: int = 0
    snapshot_on_host: bool = False
    """Whether snapshots within the process are in host memory."""
    publish_kind: PublishKind = "none"
    """How weights are published by the learner (`config.topology`)."""
    keeps_newest: bool = False
    """Whether the newest weights are kept for restarted samplers."""
    converted_bytes: float = 0.0
    """Bytes of the copies in fp8 that a publish makes for servers, all at once."""
    captures: bool = False
    """Whether passes are captured as CUDA graphs, whose memory stays allocated."""

    @property
    def compute_bytes(self) -> int:
        return self.model.compute_bytes

    @property
    def param_bytes(self) -> int:
        return DTYPE_BYTES[self.model.param_dtype]

    @property
    def reduce_bytes(self) -> int:
        return DTYPE_BYTES[self.model.reduce_dtype]

    @property
    def adapter_bytes(self) -> float:
        """Bytes of one copy of all factors of an adapter; 0 without `lora`."""
        lora = self.model.lora
        return 0.0 if lora is None else FACTOR_BYTES * num_factors(self.dims, lora)

    @property
    def table_tp(self) -> int:
        """Number of ranks over which the vocabulary is split."""
        return 1 if self.has_whole_tables else self.layout.tp

    @property
    def num_stages(self) -> int:
        return self.model.archon.num_stages(self.layout.pp)


@dataclass(frozen=True, slots=True)
class HeldParams:
    """Parameters of a pipeline rank after tp, ep and etp split them, before FSDP shards them."""

    dense: int
    experts: int
    root: int
    """Part of `dense`: embedding, final norm and head."""
    head: int
    """Part of `root`: final norm and head, whose gradients are computed first, the embedding's
    last."""
    block: int
    """Parameters of the largest layer, experts included."""

    @property
    def total(self) -> int:
        return self.dense + self.experts


@dataclass(slots=True)
class Phase:
    """Contents of memory in one phase, in bytes by name."""

    name: str
    device: dict[str, float] = field(default_factory=dict)
    host: dict[str, float] = field(default_factory=dict)
    lead_bytes: float = 0.0
    """Part of both sums that only rank 0 has."""

    @property
    def device_bytes(self) -> float:
        return sum(self.device.values())

    @property
    def host_bytes(self) -> float:
        return sum(self.host.values())


def stage_layers(training: Training, pp_rank: int) -> list[range]:
    """The layers of each stage of this pipeline rank."""
    stages = split_layers(training.dims, training.num_stages)
    if training.layout.pp == 1:
        return stages
    args = (
        training.model.archon.pp_schedule,
        training.layout.pp,
        training.model.archon.stages,
        pp_rank,
    )
    return [stages[stage] for stage in stages_of_rank(*args)]


def held_params(training: Training, pp_rank: int) -> HeldParams:
    dims, layout = training.dims, training.layout
    layers = [i for stage in stage_layers(training, pp_rank) for i in stage]
    is_first, is_last = 0 in layers, dims.num_layers - 1 in layers
    table = dims.embedding_params // training.table_tp
    # Both ends of a pipeline hold a tied table.
    is_shared = dims.tie_embeddings and is_first
    root = table * (is_first + (is_last and not is_shared)) + dims.hidden_size * is_last
    root += (dims.layer_table_params // training.table_tp + dims.layer_mix_params) * is_first
    dense = [layer_dense(dims, i, layout.tp) for i in layers]
    experts = [layer_experts(dims, i, layout) for i in layers]
    block = max(a + b for a, b in zip(dense, experts, strict=True))
    head = (table + dims.hidden_size) * is_last
    return HeldParams(sum(dense) + root, sum(experts), root, head, block)


def layer_dense(dims: ModelDims, layer: int, tp: int) -> int:
    """Parameters of a layer on one tp rank, without experts; kv heads are repeated if too few."""
    part = dims.layer_parts(layer)
    kv = part.kv // min(tp, dims.of_layer(layer).num_kv_heads)
    whole = part.norms + part.router + part.shared_expert
    return (part.q_and_o + part.dense_ffn) // tp + kv + whole


def layer_experts(dims: ModelDims, layer: int, layout: Layout) -> int:
    part = dims.layer_parts(layer)
    return part.expert * experts_each(part.num_experts, layout.ep) // layout.etp


def sharded_params(training: Training, held: HeldParams) -> float:
    """Returns S: dense weights are sharded over dp_shard and cp, experts over efsdp."""
    layout = training.layout
    return held.dense / (layout.dp_shard * layout.cp) + held.experts / layout.efsdp


def trained_bytes(training: Training, pp_rank: int) -> float:
    """Number of trained parameters of a rank: its master weights, or an adapter's factors."""
    lora = training.model.lora
    if lora is None:
        return training.param_bytes * sharded_params(training, held_params(training, pp_rank))
    layers = [i for stage in stage_layers(training, pp_rank) for i in stage]
    return FACTOR_BYTES * num_factors(training.dims, lora, training.layout, layers)


def is_wrapped(training: Training) -> bool:
    """Whether weights are gathered or cast for compute, which makes copies."""
    layout = training.layout
    is_sharded = layout.dp_shard * layout.cp > 1 or layout.efsdp > 1
    return is_sharded or training.compute_bytes != training.param_bytes


def gathered_weights(training: Training, held: HeldParams) -> float:
    """Bytes of gathered weights in compute dtype. With resharding: embedding and head, the current
    and the prefetched layer. Without (the default under a pipeline): all of them."""
    if not is_wrapped(training):
        return 0.0
    some = min(held.root + 2 * held.block, held.total)
    is_resharded = training.model.archon.is_resharded and not training.has_buffers
    return training.compute_bytes * (some if is_resharded else held.total)


def logit_bytes(training: Training, *, keeps: bool = False) -> float:
    """Bytes of one chunk of logits in float32 and its gradient in compute dtype; on a CPU also a
    second array in float32. `keeps`: all chunks are kept, and one is in use."""
    dims, layout, c = training.dims, training.layout, training.compute_bytes
    vocab = dims.vocab_size / training.table_tp
    chunk = CHUNK_BYTES[training.device] / (LOGIT_COPIES * 4 * vocab)
    whole = training.microbatch_tokens / layout.cp
    tokens = min(whole, max(chunk, 1.0))
    if training.device == "cuda":
        return vocab * (4 * (whole if keeps else tokens) + c * tokens)
    return vocab * (tokens * (8 + (c if c != 4 else 0)) + (4 * whole if keeps else 0))


def backward_moments(training: Training, pp_rank: int) -> list[dict[str, float]]:
    """Memory of backward besides weights and optimizer, at each possible peak: activations shrink
    while gradients grow, so the peak may be at the start (the head) or at the end."""
    held = held_params(training, pp_rank)
    if training.layout.pp > 1:
        return [_pipeline_moment(training, pp_rank, held)]
    args = (training.dims, training.layout, training.model)
    tokens, layers = training.microbatch_tokens, range(training.dims.num_layers)
    kept = [tokens * kept_bytes(args[0], i, *args[1:]) for i in layers]
    ends = tokens * ends_bytes(*args)
    moments = [
        {
            "activations": sum(kept) + ends,
            "logits": logit_bytes(training, keeps=training.model.archon.keep_logits is True),
            **_gradients(training, pp_rank, held, done=0.0, reducing=0),
        }
    ]
    for i in layers:
        rebuilt = rebuilt_bytes(args[0], i, *args[1:]) + flowing_bytes(args[0], i, *args[1:])
        done = 1 - i / len(layers)
        moments.append(
            {
                "activations": sum(kept[: i + 1]),
                "working": tokens * rebuilt,
                **_gradients(training, pp_rank, held, done=done, reducing=held.block),
            }
        )
    moments.append(_gradients(training, pp_rank, held, done=1.0, reducing=held.root))
    return moments


def _gradients(
    training: Training, pp_rank: int, held: HeldParams, *, done: float, reducing: int
) -> dict[str, float]:
    """Bytes of gradients after the share `done` of the layers, while `reducing` parameters are
    reduced. Only the first microbatch of a step starts without gradients."""
    share = 1.0 if training.num_microbatches > 1 else done
    if training.has_buffers:  # each is added to its buffer at once
        return {"gathered gradients": float(training.compute_bytes * (held.head + reducing))}
    found = {"gradients": trained_bytes(training, pp_rank) * share}
    if training.model.lora is not None:
        return found  # frozen weights have none, those of factors are not gathered
    if is_wrapped(training):
        # The head's are reduced at the end; those of a layer are cast in the sum.
        whole = training.compute_bytes * (held.head + reducing)
        found["gathered gradients"] = whole + training.reduce_bytes * reducing
    elif share < 1:
        found["gradients"] += training.param_bytes * held.head * (1 - share)
    return found


def _pipeline_moment(training: Training, pp_rank: int, held: HeldParams) -> dict[str, float]:
    """Peak under a pipeline: microbatches in flight, unsharded gradients and the head's chunk at
    once."""
    args = (training.dims, training.layout, training.model)
    tokens = training.microbatch_tokens
    stages = stage_layers(training, pp_rank)
    per_stage = [sum(kept_bytes(args[0], i, *args[1:]) for i in layers) for layers in stages]
    layers = [i for stage in stages for i in stage]
    sets = peak_in_flight(
        training.model.archon.pp_schedule,
        training.layout.pp,
        training.model.archon.stages,
        training.num_microbatches,
        pp_rank,
    )
    # The output of a stage is kept with each set until its gradient arrives.
    per_set = tokens * (max(per_stage) + hidden_bytes(training))
    working = max(rebuilt_bytes(args[0], i, *args[1:]) for i in layers)
    working += max(flowing_bytes(args[0], i, *args[1:]) for i in layers)
    moment = {
        "activations": sets * per_set,
        "working": tokens * working,
    }
    if not training.has_buffers:
        moment["gradients"] = trained_bytes(training, pp_rank)
    if training.has_buffers:
        moment |= _gradients(training, pp_rank, held, done=1.0, reducing=held.block)
    elif training.model.lora is None:  # unsharded until the last microbatch
        moment["gathered gradients"] = training.reduce_bytes * held.total
    if training.dims.num_layers - 1 in layers:
        moment["logits"] = logit_bytes(training) + tokens * ends_bytes(*args)
    return moment


def hidden_bytes(training: Training) -> float:
    """Bytes per token of one tensor of the residual stream on this rank: c * h."""
    layout = training.layout
    return training.compute_bytes * training.dims.hidden_size / (layout.cp * layout.tp)


def forward_moment(training: Training, pp_rank: int) -> dict[str, float]:
    """Memory of a forward pass that keeps nothing: the widest layer, or a chunk of logits."""
    layers = [i for stage in stage_layers(training, pp_rank) for i in stage]
    args = (training.layout, training.model)
    working = max(forward_bytes(training.dims, i, *args) for i in layers)
    found = {"working": training.microbatch_tokens * working}
    if training.dims.num_layers - 1 in layers:
        head = logit_bytes(training) + training.microbatch_tokens * hidden_bytes(training)
        if head > found["working"]:
            return {"logits": head}
    return found


def training_phases(training: Training, pp_rank: int) -> dict[str, Phase]:
    """Memory in every phase of a rank of this pipeline rank, whose ranks are alike."""
    held = held_params(training, pp_rank)
    weights = training.param_bytes * sharded_params(training, held)
    trained = trained_bytes(training, pp_rank)
    where = "host" if training.model.archon.offload_params else "device"
    phases = {name: Phase(name) for name in PHASES}

    def put(names: tuple[str, ...], place: str, part: str, size: float) -> None:
        for name in names:
            target = phases[name].device if place == "device" else phases[name].host
            if size:
                target[part] = target.get(part, 0.0) + size

    after_load = PHASES[1:]
    many = training.layout.world > 1 and training.device == "cuda"
    put(PHASES, "device", "overhead", PROCESS_BYTES[training.device] + many * NCCL_BYTES)
    put(PHASES, where, "weights", weights)
    if training.model.lora is not None:
        put(PHASES, where, "adapter", trained)
    if training.device == "cuda":
        put(PHASES, "host", "process", HOST_BYTES_PER_RANK)
    on_host = training.device == "cuda" and training.model.gradient_checkpointing
    tags_at = "host" if on_host else "device"
    # The actor's weights are stored elsewhere while another tag is loaded. The reference of an
    # adapter is the frozen model without it.
    num_tags = training.num_tags if training.model.lora is None else 0
    put(after_load, tags_at, "tags", weights * (num_tags + bool(num_tags)))
    if training.with_optimizer:
        # Allocated from the start (engine.optim), so that a run that loads has room for it.
        put(PHASES, where, "optimizer", OPTIMIZER_STATES * trained)
        put(("optimizer",), where, "gradients", trained)
    is_held = training.has_buffers or training.captures
    gathered_in = PHASES if is_held else ("log-prob", "backward")
    put(gathered_in, "device", "gathered weights", gathered_weights(training, held))
    if training.has_buffers and training.with_optimizer:
        put(PHASES, "device", "gradients", training.reduce_bytes * held.total)
    for part, size in forward_moment(training, pp_rank).items():
        put(("log-prob",), "device", part, size)
    worst = max(backward_moments(training, pp_rank), key=lambda parts: sum(parts.values()))
    if training.captures:
        put(("rollout", "log-prob", "publish"), "device", "gradients", trained)
        size = sum(size for part, size in worst.items() if part != "gradients")
        put(after_load, "device", "captured passes", size)
        worst = worst | {"gradients": trained}
    for part, size in worst.items():
        put(("backward",), where if part == "gradients" else "device", part, size)
    largest = largest_tensor(training.dims)
    # Loading reads one tensor's region at a time, in the 2 bytes of a released checkpoint.
    put(("load",), "host", "file region", 2 * largest)
    alone = training.layout.world == 1
    if not alone:  # its part of an export is cast block by block
        share = min(PUBLISH_BUCKET_BYTES / 4, largest)
        put(("publish",), "device", "export block", training.compute_bytes * share)
    if training.publishes and training.publish_kind != "none":
        put(("publish",), "device", "publish bucket", publish_bucket(training))
        if is_staged(training):
            share = training.adapter_bytes / training.layout.world
            share = share or training.compute_bytes * publish_params(training, pp_rank)
            put(after_load, "host", "publish staging", share)
    if pp_rank == 0:
        is_outside = training.publish_kind in ("shm", "file") and training.device == "cuda"
        place = "host" if training.snapshot_on_host or is_outside else "device"
        place = where if training.publish_kind == "none" and place == "device" else place
        for name, count in num_snapshots(training).items():
            size = count * snapshot_bytes(training)
            put((name,), place, "snapshot", size)
            phases[name].lead_bytes += 0.0 if alone or place == "host" else size
        put(("publish",), place, "fp8 copies", training.converted_bytes)
        is_lead = not alone and place == "device"
        phases["publish"].lead_bytes += training.converted_bytes if is_lead else 0.0
    return phases


def is_staged(training: Training) -> bool:
    """Whether a rank copies its share to host memory before writing it."""
    return training.publish_kind == "file" or (training.publish_kind, training.device) == (
        "shm",
        "cuda",
    )


def publish_params(training: Training, pp_rank: int) -> float:
    """Number of parameters that one rank publishes: replicas share the work evenly."""
    layout, dims = training.layout, training.dims
    if layout.pp == 1:
        return dims.num_params / layout.world
    held = held_params(replace(training, layout=Layout(pp=layout.pp)), pp_rank)
    is_copy = dims.tie_embeddings and held.head > dims.hidden_size and pp_rank > 0
    return (held.total - dims.embedding_params * is_copy) * layout.pp / layout.world


def publish_bucket(training: Training) -> float:
    """Bytes of workspace for the digest, and for blocks that are cast or split by columns."""
    layout = training.layout
    space = float(DIGEST_WORDS[training.device] * DIGEST_BYTES)
    if training.device == "cuda" and is_staged(training):
        return space + 2 * PUBLISH_BUCKET_BYTES
    if layout.tp == layout.etp == 1:
        return space
    part = largest_tensor(training.dims) * training.compute_bytes / layout.world
    return space + min(PUBLISH_BUCKET_BYTES * training.compute_bytes / 4, part)


def snapshot_bytes(training: Training) -> float:
    """Bytes of a snapshot for publishing, whole in a file or a buffer. No copy is needed within a
    process if the rank waits for the transfer and has its weights in the published form."""
    if training.publish_kind == "file":
        return 0.0
    if training.adapter_bytes:
        return training.adapter_bytes
    is_own = training.publish_kind == "none" and not training.overlaps
    if is_own and training.compute_bytes == training.param_bytes:
        return 0.0
    return float(training.compute_bytes * training.dims.num_params)


def num_snapshots(training: Training) -> dict[str, int]:
    """Number of simultaneous snapshots by phase: one in transfer, the newest waiting, another being
    taken. Training waits for data of a version at most `max_staleness` behind."""
    if not training.publishes:
        return {}
    beside = min(training.max_staleness, 2) if training.overlaps else 0
    if training.publish_kind != "none" and training.keeps_newest:
        kept = max(beside, 1)
        return {"publish": kept + 1, **dict.fromkeys(PHASES[1:-1], kept)}
    if not training.overlaps:
        return {"publish": 1}
    return {"publish": beside + 1, **dict.fromkeys(("log-prob", "backward", "optimizer"), beside)}


def largest_tensor(dims: ModelDims) -> int:
    """Number of elements of the largest single weight; experts are stacked."""
    width = dims.hidden_size
    experts = dims.num_experts * 2 * dims.moe_intermediate_size * width
    return max(dims.embedding_params, 2 * dims.intermediate_size * width, experts)


# Rule of thumb of the tutorial.


def rule_of_thumb(training: Training, batch_tokens: float) -> dict[str, float]:
    """The rule of thumb of the Archon tutorial, in bytes; `batch_tokens` of one data-parallel
    rank."""
    layout, size = training.layout, training.dims.num_params
    cells = layout.tp * layout.ep
    per_microbatch = batch_tokens / training.num_microbatches
    return {
        "parameters": 2 * size / (layout.dp_shard * cells),
        "gradients": 4 * size / (cells * layout.pp),
        "optimizer": 2 * 4 * size / (layout.dp_shard * cells),
        "activations": training.num_stages * per_microbatch * training.dims.hidden_size * 2,
    }
