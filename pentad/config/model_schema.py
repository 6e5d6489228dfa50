"""The blocks of the schema that say what is trained: models, their engine, and the algorithm."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from pentad.core.algorithms import (
    FACTS,
    AlgorithmFacts,
    AlgorithmSettings,
    CorrectionKind,
    CorrectionLevel,
    KlEstimator,
    KlPlace,
    LossNorm,
)
from pentad.core.section import (
    Count,
    NonNegative,
    NonNegativeInt,
    Positive,
    Section,
    Share,
    ShortNames,
)
from pentad.core.settings import EngineKeys, OptimizerKeys

AlgorithmName: TypeAlias = Literal[tuple(FACTS)]  # type: ignore[valid-type]
ParamDType = Annotated[Literal["float32", "bfloat16"], ShortNames]
ComputeDType = Annotated[Literal["auto", "float32", "bfloat16"], ShortNames]


class MicrobatchConfig(Section):
    n_mbs: Annotated[int, Field(ge=1, le=1000000)] | None = None
    """Microbatches a step is cut into, at least. Raised to the number of pipeline stages. null: 1,
    or on a GPU as many as its memory asks for, where there is no pipeline (a note says so)."""
    max_tokens_per_mb: Count | None = None
    """Most tokens one forward pass takes; more microbatches are made where needed. null: derived
    from the longest sequence the run can meet."""

    @property
    def fewest(self) -> int:
        return self.n_mbs or 1


class OptimizerConfig(Section, OptimizerKeys):  # type: ignore[misc]
    """The keys of `core.settings.OptimizerKeys`. (mypy does not see that sections are frozen.)"""


class ArchonConfig(Section, EngineKeys):  # type: ignore[misc]
    """Beside the keys of `core.settings.EngineKeys`, which the engine reads as they are."""

    enable_compile: Literal["auto"] | bool = "auto"
    """torch.compile per block. auto: on for CUDA unless the schedule is a zero-bubble one."""
    reshard_after_forward_policy: Literal["default", "always", "never"] = "default"
    """Whether parameters are sharded again between forward and backward. default: yes, but not
    in a pipeline and not on one rank (unless offloaded), where that only costs time."""
    use_deterministic_algorithms: bool = False
    """Bitwise repeatable training, or a refusal that names the operation."""
    dp_replicate: Count = 1
    """Replicas among the data-parallel ranks; the rest of `d` shards."""
    moe_aux_loss_coef: NonNegative = 0.0
    """Weight of the load-balancing loss of a mixture, which is 1 in each layer when all experts
    are equally busy. A mean over each microbatch, so it depends on how a step is cut."""
    moe_z_loss_coef: NonNegative = 0.0
    """Weight of the mean square of the routers' log-partition; as `moe_aux_loss_coef`."""
    moe_bias_rate: NonNegative = 0.0
    """How far the selection bias of an expert moves at each step, towards equal load. Needs a
    family whose files have a place for it: glm4_moe has one, Qwen3-MoE has none."""

    @property
    def router_losses(self) -> dict[str, float]:
        """Those by which routers are trained beside the loss, by key."""
        return {name: getattr(self, name) for name in ("moe_aux_loss_coef", "moe_z_loss_coef")}


class ModelConfig(Section):
    path: str | None = None
    """Folder with config.json, safetensors and a tokenizer. `plan` also knows the names of the
    public Qwen2.5 and Qwen3 models. For the critic, null means the actor's."""
    init_from_scratch: bool = False
    """Starts from random weights; only config.json and the tokenizer are read."""
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
    """Switches activation checkpointing as a whole; `archon.ac_mode` says which kind."""
    pad_to_maximum: Literal["auto"] | bool = "auto"
    """Fills every microbatch up to `mb_spec.max_tokens_per_mb` with tokens that are never trained,
    so that all have one shape. auto: no, shapes may differ."""
    enable_tree_training: bool = False
    """Not supported: true is refused. Rows that share a prefix are computed one by one."""
    mb_spec: MicrobatchConfig = MicrobatchConfig()
    """How a step is cut into microbatches."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer and its schedule."""
    archon: ArchonConfig = ArchonConfig()
    """The training engine."""


class ConvertorConfig(Section):
    model: str | None = None
    """What the model is called; for the reader of the recipe."""
    model_type: str | None = None
    """Family of the model. null: the `model_type` of its config.json."""
    hf_model_path: str | None = None
    """HF folder that is converted. null: `actor.path`."""
    save_path: str | None = None
    """Folder of the converted checkpoint. A later run with the same source and sizes finds it."""
    use_gpu_num: NonNegativeInt = 0
    """Accepted and without effect: converting is copying, and done on the CPU."""
    use_gpu_index: tuple[NonNegativeInt, ...] | None = None
    """As `use_gpu_num`."""
    process_num: Annotated[int, Field(ge=1, le=1024)] = 1
    """Processes that share the files to write."""
    tensor_model_parallel_size: Count = 1
    """Ranks each matrix is cut over."""
    pipeline_model_parallel_size: Count = 1
    """Ranks the layers are dealt to."""


class MegatronConfig(Section):
    use_hf_ckpt: bool = False
    """Converts the HF model into a legacy Megatron checkpoint before the first run and starts
    from that. Not needed for training, which reads HF folders as they are."""
    ckpt_convertor: ConvertorConfig = ConvertorConfig()
    """The conversion."""


class ReferenceConfig(Section):
    path: str | None = None
    """Folder of the reference model of the KL term. null: the actor as it was at the start."""


class TeacherConfig(Section):
    path: str | None = None
    """Folder of the teacher of the algorithm `distill`; its vocabulary must be the actor's."""


class AlgorithmConfig(Section):
    name: AlgorithmName = "grpo"
    """The algorithm. It decides advantages, loss and corrections; the other keys of this block
    override single parts of it and are null as long as its own choice holds."""
    eps_clip: Positive | None = None
    """Clip range of the importance ratio below 1 (and above, unless `eps_clip_higher`)."""
    eps_clip_higher: Positive | None = None
    """Clip range above 1."""
    c_clip: Annotated[float, Field(gt=1)] | None = None
    """Dual clip: bound on the ratio where the advantage is negative. null: 3. A large number
    switches it off."""
    kl_coef: NonNegative | None = None
    """Weight of the KL term against the reference model; 0 switches it off."""
    kl_estimator: KlEstimator | None = None
    """Estimator of the KL term."""
    kl_in: KlPlace | None = None
    """Whether the KL term is part of the loss or taken from the reward of each token."""
    entropy_coef: NonNegative | None = None
    """Weight of the entropy bonus."""
    loss_norm: LossNorm | None = None
    """What the loss is a mean over."""
    gamma: Share | None = None
    """Discount of future rewards."""
    lam: Share | None = None
    """Lambda of generalised advantage estimation."""
    value_coef: NonNegative | None = None
    """Weight of the value loss."""
    eps_clip_value: Positive | None = None
    """Clip range of the value loss."""
    correction: CorrectionKind | None = None
    """Correction for data of an older or differently computed policy: truncated (tis) or masked
    (mis) importance weights, or the clipped ratio taken against the sampler's log-probs. null: one
    that fits the algorithm if `max_staleness` or `updates_per_batch` asks for it, else none."""
    allow_uncorrected: bool | None = None
    """Lets `correction: none` pass with `max_staleness` above 0 or `updates_per_batch` above 1."""
    correction_level: CorrectionLevel | None = None
    """Whether the weight is that of a token, of a sequence, or the sequence's geometric mean."""
    correction_cap: Annotated[float, Field(ge=1)] | None = None
    """Largest weight that is let through."""
    correction_floor: Share | None = None
    """Smallest weight that is let through."""
    decoupled: bool | None = None
    """Decoupled PPO: clips against the recomputed policy, corrects against the sampling one."""
    dynamic_filter: bool | None = None
    """Replaces groups whose rewards are all equal, which carry no signal, by further prompts."""
    overlong_buffer: Count | None = None
    """Tokens before the most that a sample may have (`gconfig.max_sampled_tokens`) over which the
    overlong penalty rises. null: a fifth of them."""
    overlong_penalty: NonNegative | None = None
    """Penalty at the full length."""
    reward_scale: float | None = None
    """Every reward is multiplied by it."""
    reward_clip: Positive | None = None
    """Scaled rewards are clipped to plus or minus this; in `distill` (where null is 10) a token's
    log-prob less the teacher's."""
    max_reward: Annotated[float, Field(gt=0, le=1e15)] | None = None
    """A reward of this size or more, after scaling and clipping, stops the run. null: 1e6."""

    @property
    def facts(self) -> AlgorithmFacts:
        """What the algorithm is by itself."""
        return FACTS[self.name]

    @property
    def given(self) -> dict[str, Any]:
        """The overrides that are not null."""
        return {key: value for key, value in self if key != "name" and value is not None}

    @property
    def settings(self) -> AlgorithmSettings:
        """Its own choices with the overrides; contradictions among them are not looked for."""
        return AlgorithmSettings.of(self.name, self.facts, self.given)
