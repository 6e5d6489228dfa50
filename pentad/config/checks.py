"""The rules between keys. Each is a small function that returns the problem it finds, or None.

They look at a resolved config. A rule names the keys it reads, so that it is left out when one of
them is already known to be wrong: a second complaint about the same mistake helps nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pentad.config.describe import show
from pentad.config.resolve import are_apart, parsed_allocation, pipeline_size
from pentad.config.rules import check_layout
from pentad.config.schema import (
    ALGORITHM_NAMES,
    GROUP_RELATIVE,
    WITH_CRITIC,
    AlgorithmConfig,
    Config,
    ModelConfig,
)
from pentad.core.errors import Problem
from pentad.core.stages import splits_backward

Command = Literal["train", "sft", "plan"]
Check = Callable[[Config], Problem | None]


@dataclass(frozen=True, slots=True)
class Rule:
    check: Check
    keys: tuple[str, ...]
    commands: tuple[Command, ...]


RULES: list[Rule] = []


def rule(*keys: str, commands: tuple[Command, ...] = ("train", "plan")) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        RULES.append(Rule(check, keys, commands))
        return check

    return register


def check(
    config: Config, command: Command = "plan", skip: frozenset[str] = frozenset()
) -> list[Problem]:
    """Every broken rule that matters to a command, except those that read a key in `skip`.

    The rules of the layout, in `pentad.config.rules`, are asked too.
    """
    found = [
        one.check(config)
        for one in RULES
        if command in one.commands and not any(_touches(key, skip) for key in one.keys)
    ]
    problems = [problem for problem in found if problem is not None]
    return problems + check_layout(config, command, skip)


def _touches(key: str, bad: frozenset[str]) -> bool:
    """Whether a key, a block it is in, or a key in it is among the bad ones."""
    return any(
        key == other or key.startswith(f"{other}.") or other.startswith(f"{key}.") for other in bad
    )


# What a command cannot do without.


@rule("actor.path", commands=("train", "sft", "plan"))
def a_model_is_named(config: Config) -> Problem | None:
    if config.actor.path is not None:
        return None
    return Problem("actor.path", "is not set", "give the folder of the model to train")


@rule("actor", commands=("train", "sft"))
def the_actor_is_a_model_folder(config: Config) -> Problem | None:
    return _model_folder("actor.path", config.actor.path, config.actor.init_from_scratch)


@rule("critic", "algorithm.name", commands=("train",))
def the_critic_is_a_model_folder(config: Config) -> Problem | None:
    if config.algorithm.name not in WITH_CRITIC or config.critic.path == config.actor.path:
        return None
    return _model_folder("critic.path", config.critic.path, config.critic.init_from_scratch)


@rule("ref.path", "algorithm.kl_coef", commands=("train",))
def the_reference_is_a_model_folder(config: Config) -> Problem | None:
    if config.algorithm.kl_coef == 0:
        return None
    return _model_folder("ref.path", config.ref.path)


@rule("teacher.path", "algorithm.name")
def distillation_has_a_teacher(config: Config) -> Problem | None:
    if config.algorithm.name != "distill" or config.teacher.path is not None:
        return None
    return Problem(
        "teacher.path", "algorithm.name = distill needs a teacher", "give the folder of its model"
    )


@rule("teacher.path", "algorithm.name", commands=("train",))
def the_teacher_is_a_model_folder(config: Config) -> Problem | None:
    if config.algorithm.name != "distill":
        return None
    return _model_folder("teacher.path", config.teacher.path)


def _model_folder(key: str, path: str | None, from_scratch: bool = False) -> Problem | None:
    if path is None:
        return None
    folder = Path(path).expanduser()
    where = f"{key} = {path}"
    if not folder.is_dir():
        return Problem(where, "there is no such folder", "download the model and give its folder")
    if not (folder / "config.json").is_file():
        return Problem(where, "the folder has no config.json", "give the folder of a HF model")
    if not from_scratch and not any(folder.glob("*.safetensors")):
        remedy = f"save the model as safetensors, or set {key.split('.')[0]}.init_from_scratch"
        remedy = remedy if key in ("actor.path", "critic.path") else "save it as safetensors"
        return Problem(where, "the folder has no *.safetensors", remedy)
    return None


@rule("train_dataset.path", commands=("train", "sft"))
def there_is_training_data(config: Config) -> Problem | None:
    if config.train_dataset.path is None:
        return Problem("train_dataset.path", "is not set", "give a JSONL or Parquet file")
    return _data_path("train_dataset.path", config.train_dataset.path)


@rule("valid_dataset", commands=("train", "sft"))
def held_out_data_exists(config: Config) -> Problem | None:
    if config.valid_dataset is None:
        return None
    if config.valid_dataset.path is None:
        remedy = "give a JSONL or Parquet file, or leave valid_dataset out"
        return Problem("valid_dataset.path", "is not set", remedy)
    return _data_path("valid_dataset.path", config.valid_dataset.path)


def _data_path(key: str, path: str) -> Problem | None:
    if Path(path).expanduser().exists():
        return None
    return Problem(f"{key} = {path}", "there is no such file or folder", "check the path")


@rule("reward.fn", "algorithm.name", commands=("train",))
def answers_are_scored(config: Config) -> Problem | None:
    if config.reward.fn is not None or config.algorithm.name == "distill":
        return None
    remedy = "name a built-in reward or give package.module:function"
    return Problem("reward.fn", f"is not set, and {config.algorithm.name} needs rewards", remedy)


@rule("evaluator", "valid_dataset", commands=("train", "plan", "sft"))
def evaluation_has_prompts(config: Config) -> Problem | None:
    evaluator = config.evaluator
    given = [
        f"evaluator.{name} = {show(value)}"
        for name, value in (
            ("freq_epochs", evaluator.freq_epochs),
            ("freq_steps", evaluator.freq_steps),
            ("freq_secs", evaluator.freq_secs),
        )
        if value is not None
    ]
    if not given or config.valid_dataset is not None:
        return None
    return Problem(given[0], "there is no valid_dataset", "give valid_dataset.path")


# Modes and devices.


@rule("mode", "allocation_mode", "resource")
def the_mode_fits_the_devices(config: Config) -> Problem | None:
    apart = are_apart(config)
    if apart is None or config.mode is None or apart == (config.mode != "colocate"):
        return None
    allocation = f"allocation_mode = {config.allocation_mode}"
    where = f"mode = {config.mode}"
    if apart:
        rule = f"rollout and training must share devices, but {allocation} separates them"
        return Problem(where, rule, "join them with | instead of +, or set mode: hybrid")
    rule = f"rollout and training need devices of their own, but {allocation} has them share"
    return Problem(where, rule, "join them with + instead of |, or set mode: colocate")


@rule("max_staleness", "mode", "allocation_mode")
def colocation_is_on_policy(config: Config) -> Problem | None:
    if config.mode != "colocate" or config.max_staleness == 0:
        return None
    where = f"max_staleness = {config.max_staleness}"
    rule = "must be 0 in mode = colocate, where rollout waits for training"
    return Problem(where, rule, "set mode: hybrid and join the allocation with +")


@rule("resource", "allocation_mode")
def resource_agrees_with_the_allocation(config: Config) -> Problem | None:
    allocation = parsed_allocation(config)
    if config.resource is None or allocation is None:
        return None
    for role, (nodes, devices) in (
        ("actor", config.resource.actor),
        ("rollout", config.resource.rollout),
    ):
        component = allocation.find(role)
        if component is None or component.world == nodes * devices:
            continue
        where = f"resource.{role} = [{nodes}, {devices}]"
        rule = f"is {nodes * devices} devices, but {component} has {component.world}"
        return Problem(where, rule, "leave resource out, or make the two agree")
    return None


@rule("strict", "allocation_mode")
def strict_needs_the_embedded_sampler(config: Config) -> Problem | None:
    allocation = parsed_allocation(config)
    rollout = allocation and allocation.find("rollout")
    if not config.strict or not rollout or rollout.backend == "embedded":
        return None
    rule = f"{rollout.backend} computes with other kernels than the trainer"
    return Problem("strict = true", rule, "use embedded in allocation_mode")


# Sampling and batches.


@rule("gconfig.temperature")
def training_samples_at_random(config: Config) -> Problem | None:
    if config.gconfig.temperature > 0:
        return None
    rule = "training needs samples that differ, and at 0 they are all the likeliest one"
    return Problem("gconfig.temperature = 0", rule, "use 1.0; evaluator.temperature may be 0")


@rule("gconfig.top_p")
def training_draws_from_the_whole_distribution(config: Config) -> Problem | None:
    if config.gconfig.top_p == 1:
        return None
    rule = "must be 1 for training: the trainer's log-probs are those of the whole distribution"
    return Problem(f"gconfig.top_p = {config.gconfig.top_p}", rule, "leave it out")


@rule("gconfig.top_k")
def training_draws_from_all_tokens(config: Config) -> Problem | None:
    if config.gconfig.top_k == 0:
        return None
    rule = "must be 0 for training: the trainer's log-probs are those of the whole distribution"
    return Problem(f"gconfig.top_k = {config.gconfig.top_k}", rule, "leave it out")


@rule("gconfig.n_samples", "algorithm.name")
def groups_have_something_to_compare(config: Config) -> Problem | None:
    name = config.algorithm.name
    if config.gconfig.n_samples > 1 or name not in GROUP_RELATIVE:
        return None
    rule = f"{name} compares the samples of a prompt, so every advantage would be 0"
    remedy = "use at least 2, or an algorithm such as reinforce_plus_plus"
    return Problem("gconfig.n_samples = 1", rule, remedy)


@rule("num_iters_per_train_update", "train_dataset.batch_size")
def chunks_are_not_empty(config: Config) -> Problem | None:
    chunks, prompts = config.num_iters_per_train_update, config.train_dataset.batch_size
    if chunks <= prompts:
        return None
    rule = f"a batch of train_dataset.batch_size = {prompts} prompts has no {chunks} chunks"
    return Problem(f"num_iters_per_train_update = {chunks}", rule, f"use at most {prompts}")


@rule("updates_per_batch", "train_dataset.batch_size", "gconfig.n_samples")
def updates_are_of_equal_size(config: Config) -> Problem | None:
    updates = config.updates_per_batch
    samples = config.train_dataset.batch_size * config.gconfig.n_samples
    if samples % updates == 0:
        return None
    rule = f"must divide train_dataset.batch_size * gconfig.n_samples = {samples}"
    below = max(n for n in range(1, min(updates, samples) + 1) if samples % n == 0)
    return Problem(f"updates_per_batch = {updates}", rule, f"use for instance {below}")


@rule("compute_advantages_and_returns", "rollout.workflow")
def someone_computes_advantages(config: Config) -> Problem | None:
    if config.compute_advantages_and_returns or config.rollout.workflow != "single_turn":
        return None
    where = "compute_advantages_and_returns = false"
    rule = "rollout.workflow = single_turn delivers no advantages"
    return Problem(where, rule, "set it to true, or give a workflow of your own")


@rule("rollout.max_batch_tokens", "rollout.max_running")
def every_running_sequence_gets_its_token(config: Config) -> Problem | None:
    tokens, running = config.rollout.max_batch_tokens, config.rollout.max_running
    if tokens >= running:
        return None
    rule = f"each of rollout.max_running = {running} sequences needs one token a step"
    remedy = f"give at least {running}, or lower max_running"
    return Problem(f"rollout.max_batch_tokens = {tokens}", rule, remedy)


# Parts of the algorithm.


@rule("use_kl_loss", "algorithm.kl_coef", "algorithm.kl_in", "algorithm.name")
def the_kl_switch_agrees(config: Config) -> Problem | None:
    coef, place = config.algorithm.kl_coef, config.algorithm.kl_in
    where = f"use_kl_loss = {show(config.use_kl_loss)}"
    if config.use_kl_loss and coef == 0:
        return Problem(where, "algorithm.kl_coef = 0 switches it off", "leave one of the two out")
    if config.use_kl_loss and place == "reward":
        rule = "algorithm.kl_in = reward takes the KL term out of the loss"
        return Problem(where, rule, "leave one of the two out")
    if config.use_kl_loss is False and coef and place != "reward":
        rule = f"algorithm.kl_coef = {coef:g} asks for a KL term"
        return Problem(where, rule, "set algorithm.kl_coef=0, or algorithm.kl_in=reward")
    return None


@rule("ref_update_interval", "algorithm.kl_coef", "use_kl_loss")
def a_refreshed_reference_is_used(config: Config) -> Problem | None:
    if config.ref_update_interval is None or config.algorithm.kl_coef != 0:
        return None
    where = f"ref_update_interval = {config.ref_update_interval}"
    rule = "algorithm.kl_coef = 0: nothing reads the reference model"
    return Problem(where, rule, "leave it out, or give algorithm.kl_coef")


@rule("use_tis", "algorithm.correction")
def the_tis_switch_agrees(config: Config) -> Problem | None:
    correction = config.algorithm.correction
    if config.use_tis is None or correction is None or config.use_tis == (correction == "tis"):
        return None
    where = f"use_tis = {show(config.use_tis)}"
    rule = f"algorithm.correction = {correction} says otherwise"
    return Problem(where, rule, "leave one of the two out")


@rule("algorithm", "use_kl_loss", "use_tis")
def details_belong_to_something(config: Config) -> Problem | None:
    """Details of a part that nobody turned on. An explicit "off" is a decision and passes."""
    given = dict(config.algorithm)
    for switch, details, implied, remedy in DETAILS:
        if given[switch] is not None or implied(config.algorithm):
            continue
        for name in details:
            if given[name] is not None:
                rule = f"has no effect while algorithm.{switch} is not set"
                return Problem(f"algorithm.{name} = {show(given[name])}", rule, remedy)
    return None


DETAILS: tuple[tuple[str, tuple[str, ...], Callable[[AlgorithmConfig], bool | None], str], ...] = (
    ("kl_coef", ("kl_estimator", "kl_in"), lambda _: False, "give it, for instance 0.001"),
    (
        "correction",
        ("correction_level", "correction_cap", "correction_floor"),
        lambda algorithm: algorithm.decoupled,
        "set it to tis or mis",
    ),
    (
        "overlong_penalty",
        ("overlong_buffer",),
        lambda algorithm: algorithm.name == "dapo",
        "give it, for instance 1.0",
    ),
)
"""(switch, what it governs, whether it is on by itself, how to turn it on)."""


@rule("algorithm.decoupled", "algorithm.correction", "use_tis")
def decoupled_ppo_has_a_correction(config: Config) -> Problem | None:
    if not config.algorithm.decoupled or config.algorithm.correction != "none":
        return None
    rule = "needs the weight that algorithm.correction = none drops"
    return Problem("algorithm.decoupled = true", rule, "set it to tis or mis, or leave it out")


@rule("algorithm")
def every_override_is_read(config: Config) -> Problem | None:
    given = dict(config.algorithm)
    for name, (readers, why) in READERS.items():
        if config.algorithm.name not in readers and given[name] not in (None, NEUTRAL.get(name)):
            where = f"algorithm.{name} = {show(given[name])}"
            rule = f"has no effect with algorithm.name = {config.algorithm.name}: {why}"
            return Problem(where, rule, "leave it out")
    return None


def _but(*names: str) -> tuple[str, ...]:
    return tuple(name for name in ALGORITHM_NAMES if name not in names)


READERS = {
    "eps_clip": (_but("reinforce"), "its loss has no ratio"),
    "eps_clip_higher": (_but("reinforce"), "its loss has no ratio"),
    "decoupled": (_but("reinforce"), "its loss has no ratio"),
    "c_clip": (_but("reinforce", "cispo"), "its loss has no ratio to bound this way"),
    "lam": (WITH_CRITIC, "it has no critic"),
    "value_coef": (WITH_CRITIC, "it has no critic"),
    "eps_clip_value": (WITH_CRITIC, "it has no critic"),
    "gamma": (("ppo", "reinforce_plus_plus", "distill"), "it does not discount"),
    "dynamic_filter": (GROUP_RELATIVE, "a group of equal rewards still carries signal"),
    "reward_scale": (_but("distill"), "it learns from a teacher, not from rewards"),
    "reward_clip": (_but("distill"), "it learns from a teacher, not from rewards"),
    "overlong_penalty": (_but("distill"), "it learns from a teacher, not from rewards"),
    "overlong_buffer": (_but("distill"), "it learns from a teacher, not from rewards"),
}
"""Overrides that some algorithms do not read: who does, and why not the others."""
NEUTRAL: dict[str, object] = {
    "gamma": 1.0,
    "reward_scale": 1.0,
    "overlong_penalty": 0.0,
    "decoupled": False,
    "dynamic_filter": False,
}
"""Values that ask for nothing."""


@rule("algorithm.reward_scale")
def rewards_are_not_wiped_out(config: Config) -> Problem | None:
    if config.algorithm.reward_scale != 0:
        return None
    return Problem("algorithm.reward_scale = 0", "would make all rewards equal", "use 1")


@rule("algorithm.overlong_buffer", "gconfig.max_new_tokens")
def the_overlong_buffer_fits(config: Config) -> Problem | None:
    buffer, longest = config.algorithm.overlong_buffer, config.gconfig.max_new_tokens
    if buffer is None or buffer <= longest:
        return None
    where = f"algorithm.overlong_buffer = {buffer}"
    rule = f"must be at most gconfig.max_new_tokens = {longest}"
    return Problem(where, rule, "a fifth of it is usual")


# The engine, for the actor and the critic alike.


@rule("actor", commands=("train", "sft", "plan"))
def the_actor_engine_agrees(config: Config) -> Problem | None:
    return _engine_problem(config, "actor", config.actor)


@rule("critic", "algorithm.name", commands=("train", "plan"))
def the_critic_engine_agrees(config: Config) -> Problem | None:
    if config.algorithm.name not in WITH_CRITIC:
        return None
    return _engine_problem(config, "critic", config.critic)


def _engine_problem(config: Config, role: str, model: ModelConfig) -> Problem | None:
    archon = model.archon
    where = f"{role}.archon.ac_mode = {archon.ac_mode}"
    is_zero_bubble = pipeline_size(config, role) > 1 and splits_backward(archon.pp_schedule)
    if archon.ac_mode not in ("auto", "none") and not model.gradient_checkpointing:
        rule = f"{role}.gradient_checkpointing = false switches checkpointing off"
        return Problem(where, rule, "leave one of the two out")
    if archon.ac_mode == "memory_budget" and archon.enable_compile is False and not is_zero_bubble:
        rule = f"needs compile, and {role}.archon.enable_compile = false"
        return Problem(where, rule, "use ac_mode: selective or full, or leave enable_compile out")
    return None
