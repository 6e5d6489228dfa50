"""Rules on required inputs of a command: models, data, names for folders, and the Megatron
checkpoint it starts from or converts to."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from pentad.config.describe import join_or, show, value_at
from pentad.config.environments import environments, is_evaluated
from pentad.config.resolve import path_keys
from pentad.config.rules.rule import RUNS, Rules, RunFacts
from pentad.config.schema import Config, ModelConfig
from pentad.core.errors import Problem, UserError
from pentad.core.folders import recovery_problem, what_else
from pentad.core.hub import name_in_cache
from pentad.data.section import is_made
from pentad.models.catalog import full_name
from pentad.models.families import register

RULES = Rules()
HUB_REMEDY = "give a model's folder, or its name on the hub, OWNER/NAME or OWNER/NAME@REVISION"
MAX_NAME_BYTES = 255
"""Maximum length of a folder's name, valid on all usual file systems."""


@RULES.add(commands=("train", "sft", "plan", "eval", "reward"))
def a_model_is_named(config: Config) -> Problem | None:
    if config.actor.path is not None:
        return None
    return Problem(
        "actor.path", "is not set", "give a model's folder, or its name on the hub, OWNER/NAME"
    )


@RULES.add(commands=("eval",))
def the_evaluated_model_has_weights(config: Config) -> Problem | None:
    """Requires weights in the folder: `eval` uses them, whatever the recipe starts from."""
    found = model_folder_problem("actor.path", config.actor.path, must_be_trained=True)
    if found is None or not config.actor.init_from_scratch:
        return found
    rule = "the recipe starts from random weights, and there are none to evaluate"
    remedy = "give a trained model: actor.path=runs/checkpoints/..."
    return Problem(f"actor.path = {config.actor.path}", rule, remedy)


@RULES.add(commands=("train", "sft"))
def the_actor_is_a_model_folder(config: Config) -> Problem | None:
    return model_folder_problem("actor.path", config.actor.path, config.actor.has_other_weights)


@RULES.add(commands=("train",))
def the_critic_is_a_model_folder(config: Config) -> Problem | None:
    critic = config.critic
    if not config.algorithm.facts.needs_critic or critic.path == config.actor.path:
        return None
    return model_folder_problem("critic.path", critic.path, critic.has_other_weights)


@RULES.add(commands=("train", "sft"))
def the_reference_is_a_model_folder(config: Config, facts: RunFacts) -> Problem | None:
    is_read = facts.command in ("train", "dpo") and "ref" in config.frozen_models
    return model_folder_problem("ref.path", config.ref.path) if is_read else None


@RULES.add()
def distillation_has_a_teacher(config: Config) -> Problem | None:
    if config.algorithm.name != "distill" or config.teacher.path is not None:
        return None
    return Problem(
        "teacher.path", "algorithm.name = distill needs a teacher", "give the folder of its model"
    )


@RULES.add(commands=("train",))
def the_teacher_is_a_model_folder(config: Config) -> Problem | None:
    if config.algorithm.name != "distill":
        return None
    return model_folder_problem("teacher.path", config.teacher.path)


def model_folder_problem(
    key: str, path: str | None, from_scratch: bool = False, must_be_trained: bool = False
) -> Problem | None:
    if path is None:
        return None
    folder = Path(path).expanduser()
    where = f"{key} = {path}"
    if not folder.is_dir():
        known = full_name(path)
        remedy = f"give its name on the hub, {known}" if known else HUB_REMEDY
        return Problem(where, "there is no such folder", remedy)
    if problem := recovery_problem(where, folder):
        return problem
    if not (folder / "config.json").is_file():
        return Problem(where, "the folder has no config.json", "give the folder of a HF model")
    is_fetched_later = name_in_cache(str(folder)) is not None
    if not (from_scratch or is_fetched_later or any(folder.glob("*.safetensors"))):
        remedy = f"save the model as safetensors, or set {key.split('.')[0]}.init_from_scratch"
        if must_be_trained or key not in ("actor.path", "critic.path"):
            remedy = "save it as safetensors"
        return Problem(where, "the folder has no *.safetensors", remedy)
    return None


@RULES.add(commands=("train",))
def there_are_prompts(config: Config) -> list[Problem]:
    if config.only == "train":
        return []
    found = [_rows(one.data_key, one.data.path) for one in environments(config)]
    return [problem for problem in found if problem is not None]


@RULES.add(commands=("sft", "reward"))
def there_is_training_data(config: Config) -> Problem | None:
    return _rows("train_dataset", config.train_dataset.path)


@RULES.add(commands=("train", "sft"))
def held_out_data_exists(config: Config, facts: RunFacts) -> list[Problem]:
    blocks = [("valid_dataset", config.valid_dataset)]
    if facts.command == "train":
        blocks = [(one.valid_key, one.valid) for one in environments(config)]
    found = [_rows(key, valid.path, is_open=True) for key, valid in blocks if valid is not None]
    return [problem for problem in found if problem is not None]


def _rows(key: str, path: str | None, *, is_open: bool = False) -> Problem | None:
    """Checks the path of a dataset; `is_open`: whether the block is optional."""
    if path is not None:
        return data_path_problem(f"{key}.path", path)
    remedy = "give a JSONL or Parquet file" + (f", or leave {key} out" if is_open else "")
    return Problem(f"{key}.path", "is not set", remedy)


@RULES.add(commands=("eval",))
def there_is_data_to_evaluate_on(config: Config) -> Problem | None:
    if config.valid_dataset is None or config.valid_dataset.path is None:
        return Problem("valid_dataset.path", "is not set", "give --data, or a recipe that has it")
    return data_path_problem("valid_dataset.path", config.valid_dataset.path)


def data_path_problem(key: str, path: str) -> Problem | None:
    place, where = Path(path).expanduser(), f"{key} = {path}"
    if place.exists():
        other = None if place.is_dir() else what_else(place)
        rule, remedy = f"{other}, not a file or a folder", "copy its content to a file"
        return Problem(where, rule, remedy) if other else None
    if is_made(path) or name_in_cache(path) is not None:
        return None
    if set(path) & set("*?["):
        fits = any(place.parent.glob(place.name))
        return None if fits else Problem(where, "no file fits this pattern", "check the pattern")
    remedy = "check the path, or give a name of the hub, OWNER/NAME:CONFIG:SPLIT"
    return Problem(where, "there is no such file or folder", remedy)


@RULES.add(commands=("eval",))
def servers_to_evaluate_have_addresses(config: Config) -> Iterator[Problem]:
    for address in config.rollout.server.addresses:
        if rule := url_problem(address):
            yield Problem(f"rollout.server.addresses = {address}", rule, "give http://HOST:PORT")


@RULES.add(commands=("eval",))
def several_answers_differ(config: Config) -> Problem | None:
    evaluator = config.evaluator
    if evaluator.n_samples == 1 or evaluator.temperature > 0:
        return None
    rule = "at evaluator.temperature = 0 all answers to a prompt are the same"
    remedy = "give --temperature (1.0 samples from the model as it is)"
    return Problem(f"evaluator.n_samples = {evaluator.n_samples}", rule, remedy)


@RULES.add(commands=("train", "sft", "plan", "eval"))
def model_files_can_be_found(config: Config) -> Iterator[Problem]:
    remedy = "give package.module:SPEC or path/to/file.py:SPEC"
    for path in config.model_files:
        problem = part_problem("model_files", path, (), remedy)
        if problem is not None:
            yield problem
            continue
        try:
            register(path)
        except UserError as error:
            yield from error.as_problems()


def url_problem(url: str) -> str:
    """Why a server address is invalid; empty if it is valid. Without this check, a port out of
    range would be taken modulo 65,536."""
    try:
        parts = urlsplit(url)
        is_whole = parts.scheme in ("http", "https") and bool(parts.hostname)
        port = parts.port
    except ValueError as error:
        return f"is not an address ({error})"
    if not is_whole:
        return "is not an address http://HOST:PORT or https://..."
    return "0 is not a port (1 to 65535)" if port == 0 else ""


def part_problem(key: str, name: str | None, known: tuple[str, ...], remedy: str) -> Problem | None:
    """The problem of a reward or workflow that is neither built-in nor MODULE:NAME or FILE:NAME.
    The content of a module is checked later."""
    if name is None or name in known:
        return None
    where = f"{key} = {name}"
    place, colon, part = name.rpartition(":")
    if not (place and part):
        names = f"neither {join_or(list(known))} nor" if known else "not"
        return Problem(where, f"is {names} of the form PLACE:NAME", remedy)
    if place.endswith(".py") and not Path(place).expanduser().is_file():
        return Problem(where, f"there is no file {place}", "check the path")
    return None


@RULES.add(commands=RUNS)
def names_can_be_folders(config: Config) -> list[Problem]:
    names = {
        "experiment_name": config.experiment_name,
        "trial_name": config.trial_name,
        "user": config.user or "user",
    }
    found = [(f"{key} = {show(name)}", _no_folder_name(name)) for key, name in names.items()]
    remedy = "it names a folder of the run: use letters, digits, - and _"
    return [Problem(where, rule, remedy) for where, rule in found if rule]


def _no_folder_name(name: str) -> str:
    """Why a folder cannot or should not have this name."""
    if not name.strip():
        return "is empty"
    if name in (".", "..") or set(name) & set("/\\"):
        return "leads to another folder"
    if name.startswith(("-", "~")):
        return f"begins with {name[0]}, which a command takes for something else"
    if name != name.strip():
        return "begins or ends with a space"
    if len(name.encode()) > MAX_NAME_BYTES:
        return f"is longer than the {MAX_NAME_BYTES} bytes of a folder's name"
    return _hidden_character(name)


@RULES.add(commands=("train", "sft", "plan", "eval"))
def paths_can_be_read(config: Config) -> list[Problem]:
    found = []
    for key in (*path_keys(len(config.rollout.workflows)), "reward.fn", "rollout.agent"):
        path = value_at(config, key)
        rule = _hidden_character(path) if isinstance(path, str) else ""
        if rule:
            found.append(Problem(f"{key} = {show(path)}", rule, "rename it"))
    return found


def _hidden_character(text: str) -> str:
    """Names a character that a terminal interprets instead of displaying. Two joiners are allowed:
    they are letters of some scripts."""
    for char in text:
        if unicodedata.category(char) in ("Cc", "Cf", "Zl", "Zp") and char not in "\u200c\u200d":
            name = unicodedata.name(char, "control character").lower()
            return f"holds U+{ord(char):04X} ({name}), which is invisible"
    return ""


@RULES.add(commands=RUNS)
def evaluation_has_prompts(config: Config) -> Problem | None:
    given = [
        f"evaluator.{name} = {show(value)}"
        for name, value in config.evaluator
        if name.startswith("freq_") and value is not None
    ]
    if not given or is_evaluated(config):
        return None
    return Problem(given[0], "there is no valid_dataset", "give valid_dataset.path")


@RULES.add(commands=RUNS)
def the_best_is_known(config: Config) -> Problem | None:
    if config.saver.keep_best is None or is_evaluated(config):
        return None
    where = f"saver.keep_best = {config.saver.keep_best}"
    rule = "the best export is found by held-out evaluation, and there is no valid_dataset"
    return Problem(where, rule, "give valid_dataset.path, or use saver.keep_last")


@RULES.add(commands=RUNS)
def a_conversion_knows_where_to(config: Config) -> list[Problem]:
    convertor = config.megatron.ckpt_convertor
    if not config.megatron.use_hf_ckpt:
        return []
    if convertor.save_path is None:
        rule = "is not set, and megatron.use_hf_ckpt = true converts into it"
        return [Problem("megatron.ckpt_convertor.save_path", rule, "give a folder")]
    found = []
    start = config.actor.checkpoint_load_path
    if start is not None and Path(start).expanduser() != Path(convertor.save_path).expanduser():
        where = f"actor.checkpoint_load_path = {start}"
        rule = f"megatron.use_hf_ckpt = true starts from save_path = {convertor.save_path}"
        found.append(Problem(where, rule, "leave one of the two out"))
    source = convertor.hf_model_path or config.actor.path
    if source is not None and Path(source).expanduser() == Path(convertor.save_path).expanduser():
        where = f"megatron.ckpt_convertor.save_path = {convertor.save_path}"
        found.append(Problem(where, "is the folder that is converted", "give another folder"))
    return found


@RULES.add(commands=("train", "sft"))
def what_is_converted_is_there(config: Config) -> Problem | None:
    source = config.megatron.ckpt_convertor.hf_model_path
    if not config.megatron.use_hf_ckpt:
        return None
    key = "megatron.ckpt_convertor.hf_model_path" if source else "actor.path"
    source = source or config.actor.path
    if source is None or any(Path(source).expanduser().glob("*.safetensors")):
        return None
    if name_in_cache(source) is not None:
        return None
    rule = "the folder has no *.safetensors, and megatron.use_hf_ckpt = true converts them"
    return Problem(f"{key} = {source}", rule, "give the folder of a HF model")


@RULES.add(commands=RUNS)
def checkpoints_to_start_from_are_there(config: Config) -> list[Problem]:
    found = _start_problems("critic", config.critic)
    if not config.megatron.use_hf_ckpt:
        found = _start_problems("actor", config.actor) + found
    return found


def _start_problems(role: str, model: ModelConfig) -> list[Problem]:
    path = model.checkpoint_load_path
    if path is None:
        return []
    where, folder = f"{role}.checkpoint_load_path = {path}", Path(path).expanduser()
    if problem := recovery_problem(where, folder):
        return [problem]
    if folder.is_dir():
        return []
    return [Problem(where, "there is no such folder", "give a Megatron checkpoint's folder")]


@RULES.add(commands=RUNS)
def weights_have_one_origin(config: Config) -> list[Problem]:
    return [
        Problem(
            f"{role}.init_from_scratch = true",
            f"{role}.checkpoint_load_path = {model.checkpoint_load_path} gives the weights",
            "leave one of the two out",
        )
        for role, model in (("actor", config.actor), ("critic", config.critic))
        if model.init_from_scratch and model.checkpoint_load_path is not None
    ]


@RULES.add(commands=("eval",))
def what_is_evaluated_has_one_origin(config: Config) -> Problem | None:
    """Rejects a start checkpoint in `eval`, which evaluates only actor.path."""
    start = config.actor.checkpoint_load_path
    if start is None or config.megatron.use_hf_ckpt:
        return None
    rule = f"eval judges the weights in actor.path = {config.actor.path}, not those of the start"
    remedy = "add actor.checkpoint_load_path=null; pentad convert makes HF folders of Megatron's"
    return Problem(f"actor.checkpoint_load_path = {start}", rule, remedy)
