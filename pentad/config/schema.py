"""The schema of a config: every key with its type, default and meaning.

These classes define recipes, `dotted.key=value` overrides and docs/configuration.md. A block that
one package reads is in the `section.py` of that package. null means "unset": then
`pentad.config.resolve` or the component that reads the key chooses a value and logs a note. Rules
between keys are in `pentad.config.rules`.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from pentad.checkpoint.section import CheckpointConfig
from pentad.core.errors import Problem, UserError
from pentad.core.layout import Allocation, Component, Layout, parse_allocation
from pentad.core.remote import Remote
from pentad.core.section import Count, NonNegativeInt, Seconds, Section, chosen
from pentad.core.sizes import DeviceKind
from pentad.data.rows import STREAMS, SUFFIXES
from pentad.data.section import DatasetConfig, TemplateArgs
from pentad.engine.section import ModelConfig, TransformerImpl
from pentad.models.families import register
from pentad.rewards.section import RewardConfig
from pentad.rl.section import AlgorithmConfig, GuardsConfig, PreferenceConfig
from pentad.rollout.section import FEWEST_RUNNING, GenerationConfig, RolloutConfig
from pentad.runtime.section import ClusterConfig, SchedulerConfig
from pentad.telemetry.runfolder import run_path
from pentad.telemetry.section import TelemetryConfig
from pentad.trainer.section import (
    ElasticConfig,
    EvaluatorConfig,
    RecoverConfig,
    ReferenceConfig,
    SaverConfig,
    TeacherConfig,
)

AxisSize = Annotated[int, Field(ge=1, le=65536)]
"""Ranks along one axis of a layout."""
Mode = Literal["colocate", "hybrid", "async"]
SCORERS = ("ref", "teacher")
"""Roles of frozen models that compute log-probs of samples."""


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
        """Number of devices of each role that is set, by its name in `allocation_mode`."""
        names = {"reference": "ref"}
        return {names.get(role, role): math.prod(given) for role, given in self if given}


class ParallelismConfig(Section):
    """Sizes of the parallel axes of training; their product is the number of devices."""

    data_parallel: AxisSize = 1
    """Data-parallel groups, each with all experts and different samples."""
    tensor_parallel: AxisSize = 1
    """Ranks over which each matrix is split, those of experts too."""
    pipeline_parallel: AxisSize = 1
    """Ranks over which the layers are divided."""
    expert_parallel: AxisSize = 1
    """Ranks over which the experts are divided; all other layers are data parallel over them."""


class ConvertorConfig(Section):
    model: str | None = None
    """Name of the model, for readers of the recipe only."""
    model_type: str | None = None
    """Family of the model. null: the `model_type` of its config.json."""
    hf_model_path: str | None = None
    """HF folder that is converted. null: `actor.path`."""
    save_path: str | None = None
    """Folder of the converted checkpoint. A later run with the same source and sizes reuses it."""
    use_gpu_num: NonNegativeInt = 0
    """Accepted, without effect: the conversion runs on the CPU."""
    use_gpu_index: tuple[NonNegativeInt, ...] | None = None
    """Without effect, as `use_gpu_num`."""
    process_num: Annotated[int, Field(ge=1, le=1024)] = 1
    """Number of processes that write the files."""
    tensor_model_parallel_size: Count = 1
    """Ranks over which each matrix is split."""
    pipeline_model_parallel_size: Count = 1
    """Ranks over which the layers are divided."""


class MegatronConfig(Section):
    transformer_impl: TransformerImpl = "auto"
    """Layers of `megatron:`. transformer_engine: those of Transformer Engine, with grouped kernels
    for experts; local: Megatron's own; auto: Transformer Engine's if it is installed. A run records
    its choice, and a later start that would choose other layers is refused."""
    use_hf_ckpt: bool = False
    """Converts the HF model into a legacy Megatron checkpoint before the first run and starts from
    it. Not needed for training, which reads HF folders directly."""
    ckpt_convertor: ConvertorConfig = ConvertorConfig()
    """Settings of the conversion."""


class Config(Section):
    experiment_name: str = "default"
    """Name of the run's folders, together with `trial_name`."""
    trial_name: str = "trial-0"
    """Name of one attempt at the experiment."""
    fileroot: str = "runs"
    """Folder under which records (logs/) and checkpoints (checkpoints/) are kept."""
    user: str | None = None
    """User name in the folders' paths. null: the login name."""
    seed: NonNegativeInt = 1
    """Seed of all random numbers of the run. The global generators of Python, NumPy and torch are
    also seeded with it in every process, for your own code."""
    mode: Mode | None = None
    """Placement of components. null: colocate, or hybrid if `allocation_mode` puts rollout and
    training on different devices."""
    allocation_mode: str | None = None
    """Layout of sampling and training, such as `sglang:d4t2+archon:d4p2t2`. null: from `resource`,
    else `embedded:dN|archon:dN` over all N devices (N is 1 without GPUs); in mode hybrid and async
    half of them sample."""
    cluster: ClusterConfig = ClusterConfig()
    """The machines."""
    scheduler: SchedulerConfig = SchedulerConfig()
    """Where and how processes are started."""
    max_staleness: NonNegativeInt = 0
    """Maximum number of versions by which a sample may lag behind the weights it trains. 0:
    strictly on-policy."""
    num_iters_per_train_update: Count = 1
    """Number of chunks in which a batch is processed. The gradient does not depend on it."""
    updates_per_batch: Count = 1
    """Optimizer steps per batch, each on an equal part of its samples."""
    balance_data: bool = True
    """Assigns rows to ranks and microbatches by cost. false: in order, equally many rows per rank.
    The gradient does not depend on it."""
    store: Literal["auto", "memory", "files", "ray", "transfer_queue"] = "auto"
    """Where groups are stored between rollout and training: this process, files (in memory on one
    machine, in the run's folder on several), or storage units on a Ray cluster, our own or
    TransferQueue's. auto: ray if `num_data_storage_units` selects it, else memory if one process
    trains, else files."""
    num_data_storage_units: Count = 1
    """Number of storage processes of store=ray and store=transfer_queue. With scheduler.type=ray,
    more than one selects store=ray; a unit that dies is restarted and its groups are written again.
    """
    use_streaming_dataset: bool = False
    """Reads prompts from disk when they are needed instead of at the start."""
    only: Literal["rollout", "train"] | None = None
    """Runs one component alone. rollout: samples and scores with the initial weights and writes the
    groups of every step to `batches/` of its folder; nothing is trained. train: trains on the
    groups of `groups_from`, without a sampler. null: both."""
    groups_from: str | None = None
    """Run folder whose groups `only: train` trains on, each once per epoch: of a run with `only:
    rollout`, or of any run that kept its groups (`telemetry.keep_batches`)."""
    ref_update_interval: Count | None = None
    """Interval in steps at which the current actor becomes the reference model. null: never."""
    offload_train: bool | None = None
    """Moves weights (also of ref and teacher) and optimizer state to host memory while the sampler
    uses the shared devices; needs `offload_rollout`. null: no."""
    offload_rollout: bool | None = None
    """Frees the sampler's device memory during training. null: no in hybrid and async; in colocate
    on a GPU yes, with a note, if the two do not fit together by the memory plan."""
    compute_advantages_and_returns: bool = True
    """Whether the trainer computes advantages; false uses those that the rollout delivers."""
    strict: bool = False
    """Log-probs of trainer and embedded sampler are bitwise equal, by batch-invariant kernels;
    slower. Unsupported combinations are rejected. Gradients are not covered."""
    stall_warning_s: Seconds = 60.0
    """After this long without progress, a warning names the waiting component and the reason."""
    stall_abort_s: Seconds = 1800.0
    """After this long without progress (no token sampled, no microbatch trained, a rank that does
    not run), the run ends with the same message; the trained state is saved if the learner
    responds."""
    total_train_epochs: Count = 1
    """Passes over the training prompts, if `total_train_steps` is unset."""
    total_train_steps: Count | None = None
    """Number of steps, over as many epochs as needed. null: from `total_train_epochs`."""
    model_files: tuple[str, ...] = ()
    """Your own model files, `package.module:SPEC` or `path/to/file.py:SPEC`: each registers its
    `model_type` for the run."""
    template_args: TemplateArgs = TemplateArgs()
    """Arguments of the tokenizer's chat template, such as {enable_thinking: false}, wherever it is
    rendered: prompts, SFT conversations, messages of environments, evaluation."""
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
    """The RL algorithm and its settings."""
    preference: PreferenceConfig | None = None
    """Loss of `pentad dpo` and `pentad reward-model`; null: the defaults of the block. Other
    commands do not use it."""
    gconfig: GenerationConfig = GenerationConfig()
    """How answers are sampled for training."""
    train_dataset: DatasetConfig = DatasetConfig()
    """The training prompts."""
    valid_dataset: DatasetConfig | None = None
    """Held-out prompts for the evaluator. null: no evaluation. `format`, the `*_key`s and
    `chat_template` are taken from `train_dataset` unless set."""
    reward: RewardConfig = RewardConfig()
    """How answers are scored."""
    rollout: RolloutConfig = RolloutConfig()
    """How groups are produced."""
    evaluator: EvaluatorConfig = EvaluatorConfig()
    """When and how held-out prompts are answered; always once before the first step."""
    saver: SaverConfig = SaverConfig()
    """When the model is exported as a HF folder; always once at the end."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Where checkpoints are kept: a local folder, and a store to which they are copied."""
    recover: RecoverConfig = RecoverConfig()
    """When the state of the run is saved, so that it can resume after a crash. Without a frequency:
    every 600 seconds and at the end of every epoch."""
    elastic: ElasticConfig = ElasticConfig()
    """Behaviour of a run that has fewer ranks than its layout."""
    guards: GuardsConfig = GuardsConfig()
    """Checks that stop a run whose training goes wrong."""
    telemetry: TelemetryConfig = TelemetryConfig()
    """What is recorded, and where."""

    def model_folder(self, role: str = "actor") -> str:
        """Folder of config.json and the tokenizer of a role; the actor's if the role has none."""
        own: str | None = getattr(self, role).path
        return chosen(own or self.actor.path, "actor.path")

    def register_models(self) -> None:
        """Registers the families of `model_files` in this process; every rank calls it."""
        for path in self.model_files:
            register(path)

    def read_allocation(self) -> tuple[Allocation | None, list[Problem]]:
        """The parsed allocation and its problems; None if it is unset or invalid."""
        if self.allocation_mode is None:
            return None, []
        try:
            return parse_allocation(self.allocation_mode), []
        except UserError as error:
            return None, error.as_problems()

    @property
    def parsed_allocation(self) -> Allocation | None:
        """The parsed allocation; None if it is invalid, which the layout rules report."""
        return self.read_allocation()[0]

    @property
    def allocation(self) -> Allocation:
        """The allocation of a config that passed its rules."""
        return chosen(self.parsed_allocation, "allocation_mode")

    def part(self, role: str) -> Component | None:
        """The component of a role; None if it has none, or if the allocation cannot be parsed."""
        allocation = self.parsed_allocation
        return allocation.find(role) if allocation else None

    def component(self, role: str) -> Component:
        """Component of a role, in a config that passed its rules; a critic without its own
        component shares the actor's."""
        found = self.allocation.find(role)
        if role == "critic":
            found = found or self.allocation.find("actor")
        return chosen(found, f"{role} of allocation_mode")

    def layout(self, role: str) -> Layout:
        model = self.critic if role == "critic" else self.actor
        return self.component(role).layout(model.archon.dp_replicate)

    def pipeline_size(self, role: str) -> int:
        """Pipeline ranks of a role; a critic without its own devices uses the actor's."""
        component = self.part(role) or self.part("actor")
        return component.size("p") if component else 1

    def backend(self, role: str) -> str | None:
        """Backend of a role; a critic without its own devices uses the actor's."""
        component = self.part(role) or self.part("actor")
        return component.backend if component else None

    @property
    def has_sampler(self) -> bool:
        """Whether the layout has a sampler; true if it cannot be parsed."""
        allocation = self.parsed_allocation
        return allocation is None or allocation.find("rollout") is not None

    @property
    def trains_reward(self) -> bool:
        """Whether the actor is a reward model: a value head in place of the language head."""
        return self.preference is not None and self.preference.loss == "reward"

    @property
    def task(self) -> Literal["train", "sft", "pretrain", "dpo", "reward-model"]:
        """The task of the recipe: without a sampler SFT, unless it has a block `preference`, or its
        data suits pretraining only."""
        if self.has_sampler or self.only == "train":
            return "train"
        if self.preference is not None:
            return "reward-model" if self.trains_reward else "dpo"
        return "pretrain" if self._has_text else "sft"

    @property
    def has_examples(self) -> bool:
        """Whether the recipe has examples for SFT or preferences and no reward: then `plan` chooses
        a layout without a sampler."""
        if self.preference is not None or self._has_text:
            return True
        is_scored = self.reward.functions or self.algorithm.facts.needs_teacher
        is_plain = self.rollout.is_single_turn and not self.rollout.workflows and self.mode is None
        return self.train_dataset.path is not None and is_plain and not is_scored

    @property
    def _has_text(self) -> bool:
        data = self.train_dataset
        path = None if data.path is None else Path(data.path)
        files = [] if path is None else [path, *(path.iterdir() if path.is_dir() else ())]
        endings = {file.suffix for file in files}
        is_stream = not endings.isdisjoint(STREAMS) and endings.isdisjoint(SUFFIXES)
        return is_stream or data.text_key is not None

    @property
    def rows_per_step(self) -> int:
        """Sequences in a batch; without groups, the rows of the dataset themselves, or two for each
        pair of preferences."""
        each = 1
        if self.preference is not None:
            each = 1 if self.preference.loss == "kto" else 2
        elif self.has_sampler or self.only == "train":
            each = self.gconfig.n_samples
        return self.train_dataset.batch_size * each

    @property
    def oversamples(self) -> bool:
        """Whether a step starts more groups than it trains."""
        return self.rollout.oversample > 1 and self.only is None

    @property
    def groups_started(self) -> int:
        """Number of groups started per step."""
        size = self.train_dataset.batch_size
        return math.ceil(size * self.rollout.oversample) if self.oversamples else size

    @property
    def samples_greedily(self) -> bool:
        """Whether each group also needs the reward of a greedy answer."""
        return self.algorithm.facts.needs_greedy and self.compute_advantages_and_returns

    @property
    def answers_per_group(self) -> int:
        """Number of answers to a prompt that are sampled, trained or not."""
        return self.gconfig.n_samples + self.samples_greedily

    @property
    def num_running(self) -> int:
        """Sequences that one sampler decodes together: those it receives at once, within bounds.

        With a lower limit, sequences wait and are prefilled while others decode, then without
        captured graphs; a higher one reserves memory for unused logits (rows x vocabulary).
        """
        if self.rollout.max_running is not None:
            return self.rollout.max_running
        rollout = self.part("rollout")
        groups = self.rollout.max_concurrent_groups
        groups = groups or self.groups_started * (self.max_staleness + 1)
        replicas = rollout.size("d") if rollout else 1
        wanted = max(FEWEST_RUNNING, min(1024, -(-groups * self.answers_per_group // replicas)))
        return min(wanted, self.rollout.max_batch_tokens or wanted)

    @property
    def frozen_models(self) -> tuple[str, ...]:
        """The frozen models of `SCORERS` that the algorithm, or the loss of preferences, needs."""
        needed = self.algorithm.needs_tags
        if self.preference is not None:
            needed = needed - {"ref"} if self.trains_reward else needed | {"ref"}
        return tuple(role for role in SCORERS if role in needed)

    @property
    def trained_models(self) -> dict[str, ModelConfig]:
        """The models that RL trains, by role: the actor, and a critic if the algorithm has one."""
        has_critic = self.algorithm.facts.needs_critic
        return {"actor": self.actor} | ({"critic": self.critic} if has_critic else {})

    @property
    def checkpoint_root(self) -> str:
        """Folder of the checkpoints and exports of all runs."""
        return self.checkpoint.local_dir or os.path.join(self.fileroot, "checkpoints")  # noqa: PTH118

    @property
    def run_path(self) -> Path:
        """Folder of the run's records."""
        return run_path(self.fileroot, self.experiment_name, self.trial_name, self.user)

    @property
    def remote(self) -> Remote | None:
        """Location of this run's checkpoints in the store; None if no store is configured."""
        user = chosen(self.user, "user")
        return self.checkpoint.remote(f"{user}/{self.experiment_name}/{self.trial_name}")

    def snapshot_on_host(self, kind: DeviceKind) -> bool:
        """Whether weights published within the process are in host memory: the trainer leaves the
        GPU before the sampler resumes."""
        return kind == "cuda" and bool(self.offload_train)


class RecipeConfig(Config):
    """All keys of a recipe: those of a config, and aliases, which are replaced by config keys."""

    parallelism: ParallelismConfig | None = None
    """The layout of training as sizes of its axes, an alias of `allocation_mode` for runs that do
    not sample."""
    resource: ResourceConfig | None = None
    """Devices by role, an alias of `allocation_mode`."""
    use_kl_loss: bool | None = None
    """Switch for the KL term in the loss; sets `algorithm.kl_coef` and `algorithm.kl_in`. null: as
    in `algorithm`."""
    use_tis: bool | None = None
    """Switch for truncated importance sampling; sets `algorithm.correction`. null: as in
    `algorithm`."""


ALIASES = frozenset(RecipeConfig.model_fields) - frozenset(Config.model_fields)
"""Keys of a recipe that a config does not have (`pentad.config.aliases`)."""
