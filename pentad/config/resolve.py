"""Chooses values for keys that a config does not set.

Choices that follow from the config and the number of devices are made here. Those that depend on
device memory (microbatches, offloading), and compile on a GPU, are made by planner and engine.
Resolving a resolved config changes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pentad.config.describe import show, value_at
from pentad.config.environments import environments
from pentad.config.rules.algorithm import off_policy
from pentad.config.schema import SCORERS, Config, ModelConfig
from pentad.core.fit import splits_backward
from pentad.core.layout import Allocation, Component
from pentad.core.machine import user_name
from pentad.core.specs import absolute
from pentad.data.section import VERIFIERS, is_made, with_absolute_python
from pentad.rl.section import SWITCHES
from pentad.rollout.section import workflow_kind

LORA_LR_FACTOR = 10
MADE_REWARD = "pentad.data.reasoning_gym_rows:score"
DEFAULT_RECOVERY = {"recover.freq_secs": 600.0, "recover.freq_epochs": 1}
PATHS = (
    *("fileroot", "checkpoint.local_dir"),
    *("actor.path", "critic.path", "ref.path", "teacher.path"),
    *("actor.checkpoint_load_path", "critic.checkpoint_load_path", "actor.lora.init_path"),
    "reward.model.path",
    *("megatron.ckpt_convertor.hf_model_path", "megatron.ckpt_convertor.save_path"),
    *("train_dataset.path", "valid_dataset.path", "groups_from"),
    *("rollout.server.python", "rollout.server.transfer_folder"),
)
"""Keys whose values are local files or folders."""
OF_THE_TASK = (
    "format",
    "prompt_key",
    "messages_key",
    "tools_key",
    "answer_key",
    "response_key",
    "text_key",
    "mask_documents",
    "chat_template",
)
"""Keys of a dataset that define how rows are read; held-out rows are read like trained ones."""
OF_THE_RUN = ("shuffle", "max_length")
"""Further keys of `train_dataset` that apply to the data of all environments."""


def path_keys(num_workflows: int) -> tuple[str, ...]:
    """PATHS, and the path keys of this many environments."""
    blocks = [f"rollout.workflows.{i}.{part}" for i in range(num_workflows) for part in ROWS]
    return (*PATHS, *(f"{block}.path" for block in blocks))


ROWS = ("data", "valid")


def resolve(config: Config, *, samples: bool = True) -> tuple[Config, list[str]]:
    """Returns the config with a value for each unset key, and a note on each choice that has a
    reason. `samples`: whether the command samples."""
    draft = _Draft(config)
    _expand_homes(draft)
    config = draft.config
    _choose_made_rows(draft)
    _choose_workflows(draft)
    if config.user is None:
        draft.set("user", user_name())
    _choose_allocation(draft, samples)
    _choose_mode(draft)
    _choose_offloading(draft)
    _choose_correction(draft)
    _choose_start(draft)
    if config.valid_dataset is not None:  # the same task with other rows
        _follow(draft, "train_dataset", "valid_dataset", OF_THE_TASK)
    _choose_recovery(draft)
    _choose_engine(draft, "actor", config.actor)
    _choose_lora(draft)
    if config.algorithm.facts.needs_critic:
        _choose_engine(draft, "critic", config.critic)
        if config.critic.path is None and config.actor.path is not None:
            draft.set("critic.path", config.actor.path, "that of the actor")
    return draft.config, draft.notes


class _Draft:
    """A config being resolved, with the notes so far."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.notes: list[str] = []

    def set(self, key: str, value: object, why: str = "") -> None:
        """Sets a value; without a reason it is a plain default and gets no note."""
        self.config = replaced(self.config, key, value)
        if why:
            self.notes.append(f"{key} = {show(value)}: {why}")


def replaced(section: Any, key: str, value: object) -> Any:
    """A copy of a section with the value of a dotted key replaced."""
    head, _, rest = key.partition(".")
    if isinstance(section, tuple):
        at = int(head)
        return (*section[:at], replaced(section[at], rest, value), *section[at + 1 :])
    inner = replaced(getattr(section, head), rest, value) if rest else value
    return section.model_copy(update={head: inner})


def with_absolute_paths(config: Config) -> Config:
    """Makes paths absolute, for a process with another working folder."""
    for key in path_keys(len(config.rollout.workflows)):
        path = value_at(config, key)
        if path is not None and is_made(path):
            config = replaced(config, key, with_absolute_python(path))
        elif path is not None:
            config = replaced(config, key, os.path.abspath(path))  # noqa: PTH100
    config = replaced(config, "model_files", tuple(map(absolute, config.model_files)))
    fn = config.reward.fn
    if fn is not None:
        fn = absolute(fn) if isinstance(fn, str) else tuple(map(absolute, fn))
        config = replaced(config, "reward.fn", fn)
    for one in environments(config):
        if one.agent:
            config = replaced(config, f"{one.key}.agent", absolute(one.agent))
        kind, rest = workflow_kind(one.workflow)
        if kind == VERIFIERS:
            workflow = with_absolute_python(one.workflow)
            config = replaced(config, f"{one.key}.workflow", workflow)
        if kind in ("", "class"):
            workflow = absolute(rest) if not kind else f"{kind}:{absolute(rest)}"
            config = replaced(config, f"{one.key}.workflow", workflow)
        if one.key != "rollout" and one.reward_key != "reward" and one.reward.functions:
            fns = tuple(map(absolute, one.reward.functions))
            config = replaced(config, f"{one.reward_key}.fn", fns)
    return config


def _choose_made_rows(draft: _Draft) -> None:
    """If the workflow is a task of reasoning-gym, sets single_turn with the rows and reward of the
    task; for a task of verifiers, sets only the rows."""
    config, task = draft.config, draft.config.rollout.workflow
    if not is_made(task):
        return
    if config.train_dataset.path is None:
        draft.set("train_dataset.path", task, "rows that the package makes")
    if workflow_kind(task)[0]:
        return
    draft.set("rollout.workflow", "single_turn", f"an answer to a row of {task}")
    if config.reward.fn is None:
        draft.set("reward.fn", MADE_REWARD, f"the score of {task}")


def _choose_workflows(draft: _Draft) -> None:
    """With several environments, sets their names, the rows and rewards that packages provide, and
    unset keys of their datasets."""
    for index, one in enumerate(draft.config.rollout.workflows):
        key = f"rollout.workflows.{index}"
        draft.set(f"{key}.name", one.name or one.workflow)
        if is_made(one.workflow) and one.data.path is None:
            draft.set(f"{key}.data.path", one.workflow, "rows that the package makes")
        if is_made(one.workflow) and not workflow_kind(one.workflow)[0]:
            draft.set(f"{key}.workflow", "single_turn", f"an answer to a row of {one.workflow}")
            if one.reward is None:
                scored = {"fn": MADE_REWARD, "weights": None}
                draft.set(f"{key}.reward", draft.config.reward.model_copy(update=scored))
        _follow(draft, "train_dataset", f"{key}.data", OF_THE_TASK + OF_THE_RUN)
        if one.valid is not None:
            _follow(draft, f"{key}.data", f"{key}.valid", OF_THE_TASK)


def _expand_homes(draft: _Draft) -> None:
    """Expands ~, which a shell does not expand in `actor.path=~/m`, nor in a recipe."""
    for key in path_keys(len(draft.config.rollout.workflows)):
        path = value_at(draft.config, key)
        if isinstance(path, str) and path.startswith("~"):
            path = os.path.expanduser(path)  # noqa: PTH111 (Path's raises where there is no user)
            draft.set(key, os.path.abspath(path) if path.startswith("~") else path)  # noqa: PTH100


def _choose_recovery(draft: _Draft) -> None:
    recover = draft.config.recover
    if recover.is_on and not recover.is_periodic:
        for key, value in DEFAULT_RECOVERY.items():
            draft.set(key, value)


def _choose_allocation(draft: _Draft, samples: bool) -> None:
    config = draft.config
    if config.allocation_mode is not None:
        return
    join = "|" if config.mode in (None, "colocate") else "+"
    sizes, why = _shares(config, join)
    text = allocation_for_sizes(config, sizes, join, samples=samples)
    draft.set("allocation_mode", text, why)


def allocation_for_sizes(
    config: Config, sizes: Mapping[str, int], join: str, *, samples: bool
) -> str:
    """The allocation with this many devices for each role; `join`: | if both sides share them."""
    backend = config.actor.training_backend or "archon"
    if not samples:
        return str(Allocation(((Component(backend, None, (("d", sizes["actor"]),)),),)))
    sides = (
        Component("embedded", None, (("d", sizes["rollout"]),)),
        Component(backend, None, (("d", sizes["actor"]),)),
    )
    chosen = Allocation((sides,) if join == "|" else tuple((side,) for side in sides))
    own = {role: sizes[role] for role in SCORERS if role in sizes}
    if config.mode == "async" and config.only is None:
        own = {role: sizes.get(role, 1) for role in (*own, *config.frozen_models)}
    return str(chosen.with_own(own))


def _shares(config: Config, join: str) -> tuple[dict[str, int], str]:
    """Devices by role if no key sets them: all for both in turn, or half for each."""
    num = config.cluster.count_devices() or 1
    if num == 1:
        why = "there is one device" if join == "|" else f"mode = {config.mode}"
        return {"actor": 1, "rollout": 1}, why
    if join == "|":
        return {"actor": num, "rollout": num}, f"all {num} devices are used, training is sharded"
    is_async = config.mode == "async" and config.only is None
    rest = num - len(config.frozen_models) * is_async
    actor = max(1, rest // 2)
    why = f"mode = {config.mode}, and {num} devices are divided between the two"
    return {"actor": actor, "rollout": max(1, rest - actor)}, why


def _choose_mode(draft: _Draft) -> None:
    if draft.config.mode is not None:
        return
    allocation = draft.config.parsed_allocation
    apart = allocation and allocation.are_apart
    alone = [role for role in SCORERS if allocation and allocation.stands_alone(role)]
    if apart and alone:
        draft.set("mode", "async", f"{' and '.join(alone)} scores on its own devices")
    elif apart:
        draft.set("mode", "hybrid", "rollout and training have separate devices")
    elif apart is not None:
        draft.set("mode", "colocate", "rollout and training share devices")


def _choose_offloading(draft: _Draft) -> None:
    """Offloading in colocate depends on the memory of the device (`planner.remedies`)."""
    if draft.config.offload_train is None:
        draft.set("offload_train", False)
    if draft.config.offload_rollout is not None:
        return
    if draft.config.offload_train and draft.config.mode == "colocate":
        draft.set("offload_rollout", True, "offload_train = true")
    elif draft.config.mode in ("hybrid", "async"):
        draft.set("offload_rollout", False, "rollout and training do not share devices")


def _choose_correction(draft: _Draft) -> None:
    algorithm = draft.config.algorithm
    if "correction" in algorithm.given:
        return
    if algorithm.decoupled:
        draft.set("algorithm.correction", "tis", "decoupled = true")
    elif asked := off_policy(draft.config):
        kind, level = algorithm.facts.off_policy
        has_details = any(name in SWITCHES["correction"] for name in algorithm.given)
        if kind == "sampler_ratio" and has_details and "correction" not in algorithm.facts.defaults:
            kind = "tis"
        draft.set("algorithm.correction", kind, f"{asked}, and algorithm.name = {algorithm.name}")
        if level is not None and "correction_level" not in algorithm.given:
            draft.set("algorithm.correction_level", level, f"the ratio of {algorithm.name}")


def _choose_start(draft: _Draft) -> None:
    """Starts training from the converted checkpoint, if there is one."""
    convertor = draft.config.megatron.ckpt_convertor
    if not draft.config.megatron.use_hf_ckpt or draft.config.actor.checkpoint_load_path is not None:
        return
    if convertor.save_path is not None:
        why = "megatron.use_hf_ckpt = true"
        draft.set("actor.checkpoint_load_path", convertor.save_path, why)


def _follow(draft: _Draft, first: str, second: str, names: tuple[str, ...]) -> None:
    """Sets unset keys of the second dataset block to those of the first."""
    train, valid = value_at(draft.config, first), value_at(draft.config, second)
    given = set(valid.model_fields_set)
    if "prompt_key" in given:  # a text column replaces a messages column,
        given.add("messages_key")
    elif valid.messages_key is not None:  # and vice versa
        given.add("prompt_key")
    if Path(valid.path or "").suffix != Path(train.path or "").suffix:
        given.add("format")
    for name in names:
        value = getattr(train, name)
        if name not in given and value != getattr(valid, name):
            draft.set(f"{second}.{name}", value, f"as {first}.{name}")
    valid = value_at(draft.config, second)
    if "chat_template" not in given and train.uses_chat and not valid.uses_chat:
        why = f"{first}.messages_key renders trained prompts with it"
        draft.set(f"{second}.chat_template", True, why)
    elif valid.uses_chat != train.uses_chat and not second.endswith(".data"):
        words = {True: "with the chat template", False: "without the chat template"}
        draft.notes.append(
            f"{second}.chat_template = {show(valid.chat_template)}: held-out prompts are rendered "
            f"{words[valid.uses_chat]} and trained ones {words[train.uses_chat]}, so evaluation "
            "differs from the trained task"
        )


def _choose_lora(draft: _Draft) -> None:
    """Sets LoRA's default learning rate: factors need a larger one than weights, at any rank."""
    for role, model in draft.config.trained_models.items():
        if model.lora is not None and "lr" not in model.optimizer.model_fields_set:
            lr = float(f"{LORA_LR_FACTOR * model.optimizer.lr:.9g}")
            why = f"{LORA_LR_FACTOR} times the default {model.optimizer.lr:g}, for {role}.lora"
            draft.set(f"{role}.optimizer.lr", lr, why)


def _choose_engine(draft: _Draft, role: str, model: ModelConfig) -> None:
    """Chooses checkpointing, compile and microbatches that the pipeline schedule supports."""
    archon = model.archon
    key = f"{role}.archon"
    pp = draft.config.pipeline_size(role)
    is_zero_bubble = pp > 1 and splits_backward(archon.pp_schedule)
    schedule = f"pp_schedule = {archon.pp_schedule}"
    ac_mode = archon.ac_mode
    if archon.enable_compile == "auto" and is_zero_bubble:
        draft.set(f"{key}.enable_compile", False, f"{schedule} splits the backward pass")
    elif archon.enable_compile == "auto" and ac_mode == "memory_budget":
        draft.set(f"{key}.enable_compile", True, "ac_mode = memory_budget needs it")
    elif archon.enable_compile == "auto" and archon.ac_debug:
        draft.set(f"{key}.enable_compile", False, "ac_debug = true inspects every operation")
    if ac_mode == "auto" and not model.gradient_checkpointing:
        draft.set(f"{key}.ac_mode", "none", "gradient_checkpointing = false")
    elif ac_mode == "auto" and (pp > 1 or archon.ac_selective is not None):
        ac_mode = "selective"
        draft.set(f"{key}.ac_mode", ac_mode)
    is_chosen = archon.ac_selective is not None or draft.config.backend(role) == "megatron"
    if ac_mode == "selective" and not is_chosen:
        why = f"{schedule} hangs with op" if is_zero_bubble else ""
        draft.set(f"{key}.ac_selective", archon.selection(pp), why)
    if pp == 1:
        return
    stages = archon.num_stages(pp)
    if archon.stages_per_rank is None:
        draft.set(f"{key}.stages_per_rank", archon.stages, schedule)
    if model.mb_spec.fewest < stages:
        why = f"raised from {model.mb_spec.fewest} to the number of pipeline stages"
        draft.set(f"{role}.mb_spec.n_mbs", stages, why)
