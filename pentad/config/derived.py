"""What follows from a config, asked by its rules, by a plan and by a run alike: no torch."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import Any, Literal, TypeVar

from pentad.config.schema import Config
from pentad.core.dims import ModelDims
from pentad.core.errors import Problem, RunError, UserError
from pentad.core.folders import read_object
from pentad.core.layout import Allocation, Component, Layout, parse_allocation
from pentad.core.machine import GpuQueryError, find_gpus
from pentad.core.remote import Remote
from pentad.core.sizes import DTYPE_BYTES, DeviceKind
from pentad.data.rows import STREAMS, SUFFIXES
from pentad.engine.section import ModelConfig
from pentad.models.families import planned_dims, public_configs, public_models, register
from pentad.rollout.section import FEWEST_RUNNING

T = TypeVar("T")
VARIANT = re.compile(r"(-(Base|Instruct|Thinking|Chat))?(-2507)?$")


def chosen(value: T | None, key: str) -> T:
    """A value of a key that may be null in a recipe, and is not in a config that was prepared:
    `resolve` chose it, or a rule of the command asked for it."""
    if value is None:
        raise RunError(f"{key} is not set, and the config was not checked for it")
    return value


def model_folder(config: Config, role: str = "actor") -> str:
    """Where config.json and the tokenizer of a role lie; who names none has the actor's model."""
    own: str | None = getattr(config, role).path
    return chosen(own or config.actor.path, "actor.path")


def register_models(config: Config) -> None:
    """Makes the families of `model_files` known in this process; every rank calls it."""
    for path in config.model_files:
        register(path)


def public_dims() -> dict[str, ModelDims]:
    """Public models by their names without the owner."""
    return {name.rpartition("/")[2]: dims for name, dims in public_models().items()}


def known_config(name: str) -> dict[str, Any] | None:
    """The config behind a public name, as far as it counts."""
    full = full_name(name)
    return public_configs()[full] if full else None


def known_model(name: str) -> ModelDims | None:
    """The dimensions behind a public name."""
    full = full_name(name)
    return public_models()[full] if full else None


def full_name(name: str) -> str | None:
    """With its owner, and without -Instruct or -Base."""
    bare = VARIANT.sub("", name)
    return next((n for n in public_configs() if bare in (n, n.rpartition("/")[2])), None)


def dims_of(path: str, where: str = "actor.path") -> ModelDims:
    """Dimensions of a local folder with config.json, or of a public name of the catalog."""
    config = Path(path) / "config.json"
    if config.is_file():
        return planned_dims(read_object(config))
    known = known_model(path)
    if known is not None:
        return known
    near = difflib.get_close_matches(path.rsplit("/", 1)[-1], public_dims(), 2, 0.7)
    guess = f"did you mean {' or '.join(near)}? " if near else ""
    rule = "there is no config.json in it" if Path(path).is_dir() else "no such folder"
    remedy = f"{guess}give a model folder, or a public name such as Qwen/Qwen3-8B to plan with"
    raise UserError(Problem(f"{where} = {path}", rule, remedy))


def model_type(path: str) -> str | None:
    """What config.json of a folder says; None if there is none that can be read."""
    try:
        return str(read_object(Path(path) / "config.json").get("model_type"))
    except (OSError, UserError):
        return None


def read_allocation(config: Config) -> tuple[Allocation | None, list[Problem]]:
    """The allocation, or None while it is unset or wrong, and what is wrong with it."""
    if config.allocation_mode is None:
        return None, []
    try:
        return parse_allocation(config.allocation_mode), []
    except UserError as error:
        return None, problems_of(error)


def problems_of(error: UserError) -> list[Problem]:
    return [problem for problem in error.problems if isinstance(problem, Problem)]


def parsed_allocation(config: Config) -> Allocation | None:
    """As far as it can be read: the layout rules report what is wrong."""
    return read_allocation(config)[0]


def part_of(config: Config, role: str) -> Component | None:
    """The component of a role, as far as the allocation can be read."""
    allocation = parsed_allocation(config)
    return allocation.find(role) if allocation else None


def allocation_of(config: Config) -> Allocation:
    """Of a config that passed its rules."""
    return chosen(parsed_allocation(config), "allocation_mode")


def component_of(config: Config, role: str) -> Component:
    """Where a role stands; a critic without a component of its own is where the actor is."""
    allocation = allocation_of(config)
    found = allocation.find(role)
    if role == "critic":
        found = found or allocation.find("actor")
    return chosen(found, f"{role} of allocation_mode")


def checkpoint_root(config: Config) -> str:
    """Folder of the checkpoints and exports of all runs."""
    return config.checkpoint.local_dir or os.path.join(config.fileroot, "checkpoints")  # noqa: PTH118


def remote_of(config: Config) -> Remote | None:
    """The place of this run's checkpoints in a store, where one is configured."""
    user = chosen(config.user, "user")
    return config.checkpoint.remote(f"{user}/{config.experiment_name}/{config.trial_name}")


SCORERS = ("ref", "teacher")
"""Roles of models that judge what was sampled and are not trained."""


def frozen_models(config: Config) -> tuple[str, ...]:
    """Those of `SCORERS` that the algorithm needs."""
    needed = {"ref": config.algorithm.kl_coef, "teacher": config.algorithm.facts.needs_teacher}
    return tuple(role for role in SCORERS if needed[role])


def count_devices(config: Config) -> int | None:
    """Devices of the cluster; None on a machine without GPUs, where processes share the cores."""
    per_node = config.cluster.n_gpus_per_node
    if per_node is None:
        try:
            per_node = len(find_gpus())
        except GpuQueryError:  # `doctor` says so; a run finds out when it asks for the device
            return None
    return config.cluster.n_nodes * per_node or None


def layout_of(config: Config, role: str) -> Layout:
    model = config.critic if role == "critic" else config.actor
    return component_of(config, role).layout(model.archon.dp_replicate)


def num_running(config: Config) -> int:
    """Sequences that one sampler decodes together: what it is given at once, within bounds.

    Fewer would wait for a place and be prefilled beside others' decoding, which runs without
    captured graphs; more make room for logits (rows x vocabulary) that no load here needs.
    """
    if config.rollout.max_running is not None:
        return config.rollout.max_running
    rollout = part_of(config, "rollout")
    groups = config.rollout.max_concurrent_groups
    groups = groups or config.train_dataset.batch_size * (config.max_staleness + 1)
    replicas = rollout.size("d") if rollout else 1
    wanted = max(FEWEST_RUNNING, min(1024, -(-groups * config.gconfig.n_samples // replicas)))
    return min(wanted, config.rollout.max_batch_tokens or wanted)


def pipeline_size(config: Config, role: str) -> int:
    """Pipeline ranks of a role; a critic without devices of its own stands on the actor's."""
    component = part_of(config, role) or part_of(config, "actor")
    return component.size("p") if component else 1


def rows_per_step(config: Config) -> int:
    """Sequences a batch trains on; without groups, the rows of the dataset themselves."""
    has_groups = samples(config) or config.only == "train"
    return config.train_dataset.batch_size * (config.gconfig.n_samples if has_groups else 1)


def samples(config: Config) -> bool:
    """Whether the layout has a sampler, as far as it can be read."""
    allocation = parsed_allocation(config)
    return allocation is None or allocation.find("rollout") is not None


def task_of(config: Config) -> Literal["train", "sft", "pretrain"]:
    """What the recipe is for: without a sampler, sft, unless its data can only be pretrained on."""
    if samples(config) or config.only == "train":
        return "train"
    data = config.train_dataset
    path = None if data.path is None else Path(data.path)
    files = [] if path is None else [path, *(path.iterdir() if path.is_dir() else ())]
    endings = {file.suffix for file in files}
    is_stream = not endings.isdisjoint(STREAMS) and endings.isdisjoint(SUFFIXES)
    return "pretrain" if is_stream or data.text_key is not None else "sft"


def known_dims(path: str | None) -> ModelDims | None:
    """None also of a model that the rules on models refuse."""
    try:
        return dims_of(path) if path else None
    except UserError:
        return None


def compute_bytes(model: ModelConfig, kind: DeviceKind) -> int:
    """Of one number as it is computed with, sampled from and saved."""
    return DTYPE_BYTES[model.compute_dtype(kind)]


def snapshot_on_host(config: Config, kind: DeviceKind) -> bool:
    """Whether weights that are published within the process lie in host memory: those that leave
    the GPU before samplers wake."""
    return kind == "cuda" and bool(config.offload_train)


def is_saved_within(config: Config) -> bool:
    """Whether models are saved before the end, too."""
    saver = config.saver
    return any((saver.freq_epochs, saver.freq_steps, saver.freq_secs))
