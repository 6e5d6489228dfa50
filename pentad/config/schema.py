"""The one schema of a run: every key with its type, its default and what it means.

YAML recipes, `dotted.key=value` overrides and docs/configuration.md are all read off these
classes. A block that one room reads stands in that room's `section.py`. A value of null means
"unset": `pentad.config.resolve` or the part that reads the key chooses, and says so. Rules between
keys are in `pentad.config.rules`.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from pentad.checkpoint.section import CheckpointConfig
from pentad.core.section import Count, NonNegative, NonNegativeInt, Positive, Seconds, Section
from pentad.data.section import DatasetConfig, TemplateArgs
from pentad.engine.section import ModelConfig
from pentad.rewards.section import RewardConfig
from pentad.rl.section import AlgorithmConfig, GuardsConfig
from pentad.rollout.section import GenerationConfig, RolloutConfig
from pentad.telemetry.section import TelemetryConfig

AxisSize = Annotated[int, Field(ge=1, le=65536)]
"""Ranks along one axis of a layout."""
Mode = Literal["colocate", "hybrid", "async"]
SWITCH = {"true": "on", "false": "off"}
"""What YAML makes of the words on and off, as text."""


def switch_name(value: object) -> object:
    return SWITCH.get(str(value).lower(), value)


SwitchName = Annotated[Literal["on", "auto", "off", "disabled"], BeforeValidator(switch_name)]


class ClusterConfig(Section):
    n_nodes: Count = 1
    """Machines the run may use."""
    n_gpus_per_node: Count | None = None
    """Devices on each machine. null: as many as are found (one on a machine without a GPU)."""
    n_cpus_per_node: Count | None = None
    """CPU cores that a Slurm job asks for on each machine. null: all of them, and no other job
    beside it (--exclusive)."""
    memory_gb_per_node: Positive | None = None
    """Host memory in GiB that a Slurm job asks for on each machine. null: all of it."""
    share_gpus: bool = False
    """Lets rollout and training that + gives devices of their own share them, each in its own
    process, where there are not enough for both: hybrid and async on one GPU."""
    allow_idle: bool = False
    """Lets a layout leave half of the devices of a cluster of a given size idle, or more."""


class SchedulerConfig(Section):
    type: Literal["local", "ray", "slurm"] = "local"
    """Who starts the processes: this machine, a Ray cluster, or Slurm."""
    processes: Literal["auto", "one", "separate"] = "auto"
    """Whether scheduler, trainer and sampler are one process or several. auto: one where one rank
    trains, one embedded sampler samples, both on this machine, and they share a device or there
    are not two; else several."""


class ResourceConfig(Section):
    actor: tuple[Count, Count]
    """[nodes, devices per node] that train."""
    rollout: tuple[Count, Count]
    """[nodes, devices per node] that sample. In mode colocate these are the same devices."""
    reference: tuple[Count, Count] | None = None
    """[nodes, devices per node] of the reference model in mode async. null: one device where the
    algorithm has a KL term."""
    teacher: tuple[Count, Count] | None = None
    """[nodes, devices per node] of the teacher of algorithm.name=distill in mode async. null: one
    device."""

    def sizes(self) -> dict[str, int]:
        """Devices by the name that a role has in `allocation_mode`, of the roles that are given."""
        names = {"reference": "ref"}
        return {names.get(role, role): math.prod(given) for role, given in self if given}


class ParallelismConfig(Section):
    """Axes that training is cut along; their product is its number of devices."""

    data_parallel: AxisSize = 1
    """Ranks with a full set of experts between them, each on samples of its own."""
    tensor_parallel: AxisSize = 1
    """Ranks each matrix is cut over, those of experts too."""
    pipeline_parallel: AxisSize = 1
    """Ranks the layers are dealt to."""
    expert_parallel: AxisSize = 1
    """Ranks that the experts are dealt to. Outside the experts they are data parallel."""


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
    """Folder or name of the reference model of the KL term. null: the actor as it was at the
    start."""


class TeacherConfig(Section):
    path: str | None = None
    """Folder or name of the teacher of the algorithm `distill`; its vocabulary must be the
    actor's."""


class FrequencyConfig(Section):
    freq_epochs: Count | None = None
    """Every n epochs."""
    freq_steps: Count | None = None
    """Every n steps."""
    freq_secs: Seconds | None = None
    """Every n seconds. Any of the three triggers."""


class EvaluatorConfig(FrequencyConfig):
    n_samples: Count = 1
    """Answers per held-out prompt."""
    temperature: NonNegative = 0.0
    """0 is greedy."""
    max_new_tokens: Count | None = None
    """null: as in `gconfig`."""


class SaverConfig(FrequencyConfig):
    mode: Literal["auto", "sync", "async"] = "auto"
    """Whether training waits while a save is written (sync) or goes on, with a copy of it in host
    memory (async); of exports and recovery checkpoints. auto: async, unless the host cannot hold
    the copies, which is said."""
    keep_last: Count | None = None
    """HF folders that stay, the newest; older ones are removed once a newer one is whole. null:
    all, or where keep_best is set, the last one."""
    keep_best: Count | None = None
    """HF folders that stay for their held-out evaluation besides: accuracy (mean reward where
    nothing is right or wrong), in SFT the loss. Steps without one are never the best."""


class RecoverConfig(FrequencyConfig):
    mode: SwitchName = "auto"
    """Whether the state of the run is saved, and a run that stopped goes on where it was when it is
    started again. auto and on do; off and disabled do not."""
    retries: NonNegativeInt = 3
    """How often a run that lost a process, or failed for a reason that may pass, is started again
    from its last checkpoint without a step gained in between. A step that fails three times in a
    row over ranks ends the run before."""
    keep_last: Count = 2
    """Recovery checkpoints that are kept, the newest ones."""
    allow: tuple[str, ...] = ()
    """Keys that may differ from those the run began with although they change what it trains."""

    @property
    def is_on(self) -> bool:
        return self.mode in ("on", "auto")


class ElasticConfig(Section):
    enabled: bool = False
    """Whether a run that lost ranks for good goes on with those that are left, in the largest
    layout that they allow, and takes them in again when they return. `plan --world N` shows it."""
    min_ranks: Count = 1
    """With fewer ranks that train the run waits."""
    wait_timeout_s: Seconds = 3600.0
    """A run that waits for ranks for longer ends."""
    drop_grace_s: NonNegative = 0.0
    """How long a rank that is away may take to return before the others go on without it."""
    slot_failures: Count = 2
    """A rank whose process died, hung or raised so often, without a checkpoint gained in between,
    counts as away. One that merely failed once is started again."""
    heartbeat_interval_s: Annotated[float, Field(ge=0.05, le=60)] = 0.5
    """How often each rank shows that it runs; `stall_abort_s` without a sign is a hang."""
    standbys: bool = True
    """Whether processes that have imported everything wait to take the place of lost ones."""


class Config(Section):
    experiment_name: str = "default"
    """Names the run's folders, with `trial_name`."""
    trial_name: str = "trial-0"
    """Names one attempt at the experiment."""
    fileroot: str = "runs"
    """Folder under which records (logs/) and checkpoints (checkpoints/) are kept."""
    user: str | None = None
    """Part of the folders' names. null: the login name."""
    seed: NonNegativeInt = 1
    """Every random choice of the run follows from it. The generators that Python, NumPy and torch
    keep for a process are seeded by it too, for code of yours."""
    mode: Mode | None = None
    """Who shares devices. null: colocate, or hybrid where `allocation_mode` puts rollout and
    training on different devices."""
    allocation_mode: str | None = None
    """Layout of sampling and training, such as `sglang:d4t2+archon:d4p2t2`. null: from `resource`,
    else `embedded:dN|archon:dN` over all N devices (N is 1 without GPUs); in mode hybrid and async
    half of them sample."""
    cluster: ClusterConfig = ClusterConfig()
    """The machines."""
    scheduler: SchedulerConfig = SchedulerConfig()
    """How processes are started."""
    max_staleness: NonNegativeInt = 0
    """Most versions a sample may lag behind the weights it trains. 0 is strictly on-policy."""
    num_iters_per_train_update: Count = 1
    """Chunks of prompts a batch is streamed in. The gradient does not depend on it."""
    updates_per_batch: Count = 1
    """Optimizer steps per batch, each on an equal part of its samples."""
    balance_data: bool = True
    """Spreads rows over ranks and microbatches by cost. false: in their order, as many rows to each
    rank. The gradient does not depend on it."""
    store: Literal["auto", "memory", "files", "ray", "transfer_queue"] = "auto"
    """Where groups lie between rollout and training: this process, files (in memory on one
    machine, in the run's folder on several), or storage units on a Ray cluster, our own or
    TransferQueue's. auto: ray where `num_data_storage_units` asks for it, else memory where one
    process trains, else files."""
    num_data_storage_units: Count = 1
    """Storage processes of store=ray and store=transfer_queue. With scheduler.type=ray more than
    one chooses the former, where one that dies is started again and its groups are put
    again."""
    use_streaming_dataset: bool = False
    """Reads prompts from disk as they are needed instead of at the start."""
    only: Literal["rollout", "train"] | None = None
    """One side of a run alone. rollout: samples and scores with the weights it begins with, and
    writes the groups of every step to `batches/` of its folder; nothing is trained. train: trains
    the groups of `groups_from`, without a sampler. null: both sides."""
    groups_from: str | None = None
    """Folder of the run whose groups `only: train` trains, one epoch once each: of `only: rollout`,
    or any other that kept them (`telemetry.keep_batches`)."""
    ref_update_interval: Count | None = None
    """Makes the reference model the present actor every n steps. null: never."""
    offload_train: bool | None = None
    """Moves weights, optimizer and tags to the host while the sampler has the shared devices; it
    goes with `offload_rollout`. null: no."""
    offload_rollout: bool | None = None
    """Gives the sampler's device memory back during training. null: no in hybrid and async; in
    colocate on a GPU, where the plan says that both do not fit together (a note says so)."""
    compute_advantages_and_returns: bool = True
    """Whether the trainer computes advantages; false takes those the rollout delivers."""
    strict: bool = False
    """Trainer and embedded sampler agree bit for bit on the log-prob of every token, by kernels
    that do not depend on the batch; slower. What cannot is refused. Gradients are not covered."""
    stall_warning_s: Seconds = 60.0
    """Without progress for this long while nothing works, a warning names what is stuck and why."""
    stall_abort_s: Seconds = 1800.0
    """Without progress for this long (no token drawn, no microbatch trained, a rank that does not
    run), the run ends with the same sentence; what was trained is saved if the learner answers."""
    total_train_epochs: Count = 1
    """Passes over the training prompts, where `total_train_steps` is not given."""
    total_train_steps: Count | None = None
    """Steps of the run, over as many epochs as they take. null: those of `total_train_epochs`."""
    model_files: tuple[str, ...] = ()
    """Model files of your own, `package.module:SPEC` or `path/to/file.py:SPEC`: each makes the
    `model_type` that it is for known to the run."""
    template_args: TemplateArgs = TemplateArgs()
    """Arguments of the tokenizer's chat template, such as {enable_thinking: false}, wherever it is
    rendered: prompts, conversations to learn, what an environment says, evaluation."""
    actor: ModelConfig = ModelConfig()
    """The model that is trained."""
    critic: ModelConfig = ModelConfig()
    """The value model of algorithms that have one."""
    megatron: MegatronConfig = MegatronConfig()
    """Conversion to a Megatron checkpoint at the start; `pentad convert` does it by hand."""
    ref: ReferenceConfig = ReferenceConfig()
    """The reference model of the KL term."""
    teacher: TeacherConfig = TeacherConfig()
    """The teacher of on-policy distillation."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """What is optimised."""
    gconfig: GenerationConfig = GenerationConfig()
    """How answers are sampled for training."""
    train_dataset: DatasetConfig = DatasetConfig()
    """The training prompts."""
    valid_dataset: DatasetConfig | None = None
    """Held-out prompts for the evaluator. null: no evaluation. How rows are read (`format`, the
    `*_key`s, `chat_template`) is as in `train_dataset` where it is not said."""
    reward: RewardConfig = RewardConfig()
    """How answers are scored."""
    rollout: RolloutConfig = RolloutConfig()
    """How groups are produced."""
    evaluator: EvaluatorConfig = EvaluatorConfig()
    """When and how held-out prompts are answered; always once before the first step."""
    saver: SaverConfig = SaverConfig()
    """When the model is exported as a HF folder; always once at the end."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Where checkpoints are kept: a local folder, and a store that they are copied to."""
    recover: RecoverConfig = RecoverConfig()
    """When the state of the run is saved, so that it can go on after a crash. Without a frequency:
    every 600 seconds and at the end of every epoch."""
    elastic: ElasticConfig = ElasticConfig()
    """What a run does that has fewer ranks to train with than its layout."""
    guards: GuardsConfig = GuardsConfig()
    """When a run that trains something else than it should is stopped."""
    telemetry: TelemetryConfig = TelemetryConfig()
    """What is recorded, and where."""


class RecipeConfig(Config):
    """What a recipe may say: the keys of a config, and aliases, which are read as such keys."""

    parallelism: ParallelismConfig | None = None
    """The layout of training as sizes of its axes, instead of or in agreement with
    `allocation_mode`, which it is read as: a run that does not sample."""
    resource: ResourceConfig | None = None
    """Devices by role, instead of or in agreement with `allocation_mode`, which it is read as."""
    use_kl_loss: bool | None = None
    """Switch for the KL term in the loss; read as `algorithm.kl_coef` and `algorithm.kl_in`. null:
    as `algorithm` says."""
    use_tis: bool | None = None
    """Switch for truncated importance sampling; read as `algorithm.correction`. null: as
    `algorithm` says."""


ALIASES = frozenset(RecipeConfig.model_fields) - frozenset(Config.model_fields)
"""Keys of a recipe that a config does not have (`pentad.config.aliases`)."""
