"""Models and datasets by their Hugging Face Hub name: found in its cache, else downloaded.

`pin` turns each name into a folder of the cache at one commit and fetches the files that config
rules read (config.json, the index of the weights, the tokenizer, the card of a dataset); `fetch`
downloads weights and rows after the rules found no problem. Both use huggingface_hub, which follows
its own variables (HF_HOME, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE), locks its cache against other
ranks and resumes an interrupted download.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from pentad.config.describe import value_at
from pentad.config.environments import environments
from pentad.config.load import Reading
from pentad.config.resolve import replaced
from pentad.config.rules.rule import ON_EXAMPLES, Command
from pentad.config.schema import Config
from pentad.core.errors import FULL, Problem, UserError, one_line
from pentad.core.folders import INDEX, SINGLE, read_object
from pentad.core.hub import HubKind, HubName, hub_name, name_in_cache
from pentad.models.catalog import known_model
from pentad.planner.hub_rows import CARD, declared_rows, found_rows, rows_of
from pentad.rewards.section import REWARD_MODEL

SHAPE_FILES = ("config.json", INDEX)
"""Files of a model that a plan reads."""
MODEL_FILES = (
    *SHAPE_FILES,
    *("generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*"),
)
"""Files of a model, besides weights, that a run reads."""


def pin(reading: Reading, command: Command) -> Reading:
    """Replaces Hub names in a config by folders of the cache; keys with a name that was not found
    are wrong."""
    config, bad = reading.config, {*reading.bad}
    notes, problems = [*reading.notes], [*reading.problems]
    for key, kind in _keys(config, command).items():
        written = value_at(config, key)
        name = hub_name(written, kind) if isinstance(written, str) else None
        if name is None or (command == "plan" and known_model(written) is not None):
            continue
        where = f"{key} = {written}"
        try:
            path = look_up(name, where, is_plan=command == "plan")
        except UserError as error:
            problems += error.as_problems()
            bad.add(key)
            continue
        config = replaced(config, key, path)
        notes.append(f"{where}: of the hub, {name_in_cache(path) or path}")
    return replace(
        reading, config=config, notes=tuple(notes), problems=problems, bad=frozenset(bad)
    )


def fetch(config: Config, command: Command) -> None:
    """Downloads missing weights and rows into the folders that `pin` chose. A UserError names the
    missing files and the remedy."""
    problems: list[Problem | str] = []
    for key, kind in _keys(config, command).items():
        path = value_at(config, key)
        name = name_in_cache(path) if isinstance(path, str) else None
        if (
            name is None
            or command == "plan"
            or (kind == "model" and _is_left(config, key, command))
        ):
            continue
        try:
            fetch_files(name, path, f"{key} = {name}")
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(dict.fromkeys(problems))


def local_model(text: str, where: str) -> str:
    """The folder of a model given by path or Hub name; downloads missing files."""
    name = hub_name(text, "model")
    if name is None:
        return text
    path = look_up(name, where)
    fetch_files(replace(name, revision=Path(path).name), path, where)
    return path


def with_local_models(config: Config) -> Config:
    """The config of a record with its Hub names replaced by folders of the cache."""
    for key, kind in _keys(config, "train").items():
        path = value_at(config, key)
        if kind == "model" and isinstance(path, str):
            config = replaced(config, key, local_model(path, f"{key} = {path}"))
    return config


def pins_of(config: Config) -> str:
    """The commit of each key with a Hub name, as JSON."""
    paths = {key: value_at(config, key) for key in _keys(config, "train")}
    names = {key: name_in_cache(path) for key, path in paths.items() if isinstance(path, str)}
    return json.dumps({key: str(name) for key, name in names.items() if name is not None})


def look_up(name: HubName, where: str, *, is_plan: bool = False) -> str:
    """Downloads the small files of a commit; returns its folder, or the path of a dataset's
    rows."""
    if name.kind == "model":
        return _download(name, SHAPE_FILES if is_plan else MODEL_FILES, where)
    if name.is_pattern:
        return f"{_download(name, (CARD,), where)}/{name.part}"
    folder = Path(_download(name, (CARD,), where))
    at_commit = replace(name, revision=folder.name)
    choices = declared_rows(folder / CARD) or found_rows(_list_files(at_commit, folder, where))
    return f"{folder}/{rows_of(name, choices, where)}"


def fetch_files(name: HubName, path: str, where: str) -> None:
    """Downloads the files that `look_up` did not: weights, or rows."""
    if name.kind == "dataset":
        _download(name, (name.part,), where)
        root = Path(path)
        if not (root.exists() or any(root.parent.glob(root.name))):
            raise UserError(Problem(where, f"the hub has no file {name.part} in {name.repo}"))
        return
    index = Path(path) / INDEX
    files = sorted(set(read_object(index)["weight_map"].values())) if index.exists() else [SINGLE]
    _download(name, files, where)
    missing = [file for file in files if not (Path(path) / file).exists()]
    if missing:
        rule = f"{name.repo} has no {missing[0]} on the hub, and only safetensors are read"
        raise UserError(Problem(where, rule, "name a revision or a model that has it"))


def _keys(config: Config, command: Command) -> dict[str, HubKind]:
    """Keys with a model or dataset path that the command reads."""
    keys: dict[str, HubKind] = {"actor.path": "model"}
    if command in ("train", "plan") and config.algorithm.facts.needs_critic:
        keys["critic.path"] = "model"
    if command in ("train", "plan", "dpo"):
        keys |= {f"{role}.path": "model" for role in config.frozen_models}
    if command in ("train", "plan", "eval", "reward") and REWARD_MODEL in config.reward.functions:
        keys["reward.model.path"] = "model"
    if config.megatron.use_hf_ckpt:
        keys["megatron.ckpt_convertor.hf_model_path"] = "model"
    if command in ("train", "reward", *ON_EXAMPLES) and config.only != "train":
        keys["train_dataset.path"] = "dataset"
    if command in ("train", "eval", *ON_EXAMPLES) and config.valid_dataset is not None:
        keys["valid_dataset.path"] = "dataset"
    if command == "train" and config.only != "train":
        for one in environments(config):
            keys[f"{one.data_key}.path"] = "dataset"
            if one.valid is not None:
                keys[f"{one.valid_key}.path"] = "dataset"
    return keys


def _is_left(config: Config, key: str, command: Command) -> bool:
    """Whether the command does not need the weights of this model."""
    if key not in ("actor.path", "critic.path"):
        return False
    model = config.actor if key == "actor.path" else config.critic
    if command == "eval":
        return bool(config.rollout.server.addresses)
    starts_elsewhere = model.init_from_scratch or model.checkpoint_load_path is not None
    return command == "reward" or starts_elsewhere


def _download(name: HubName, patterns: Sequence[str], where: str) -> str:
    from huggingface_hub import snapshot_download

    with _in_sentences(name, where):
        return snapshot_download(
            name.repo, repo_type=name.kind, revision=name.revision, allow_patterns=list(patterns)
        )


@contextmanager
def _in_sentences(name: HubName, where: str) -> Iterator[None]:
    """Converts errors of the Hub to messages with remedies."""
    from huggingface_hub import constants, errors

    address = f"{constants.ENDPOINT}/{'' if name.kind == 'model' else 'datasets/'}{name.repo}"
    try:
        yield
    except errors.GatedRepoError as error:
        rule = "its owner grants access on request"
        remedy = f"ask at {address}, then type: hf auth login"
        raise UserError(Problem(where, rule, remedy)) from error
    except errors.RepositoryNotFoundError as error:
        rule = f"there is no such folder here, and no such {name.kind} on the hub for this login"
        remedy = "check the name, or, where it is private, type: hf auth login"
        raise UserError(Problem(where, rule, remedy)) from error
    except errors.RevisionNotFoundError as error:
        rule = f"the hub has no revision {name.revision} of {name.repo}"
        raise UserError(Problem(where, rule, f"see {address}/commits/main")) from error
    except Exception as error:  # from the client, the network or the disk
        raise UserError(_unreached(name, where, error)) from error


def _unreached(name: HubName, where: str, error: Exception) -> Problem:
    """The problem for a Hub that is offline or does not answer, an interrupted download, or a full
    disk."""
    from huggingface_hub import constants, errors

    if isinstance(error, OSError) and error.errno in FULL:
        rule = f"no room is left for it in {constants.HF_HUB_CACHE} ({error.strerror})"
        return Problem(where, rule, "make room, or set HF_HOME to a folder with more")
    if isinstance(error, PermissionError) or getattr(error, "errno", None) == errno.EROFS:
        rule = f"the cache {constants.HF_HUB_CACHE} cannot be written"
        return Problem(where, rule, "set HF_HOME to a writable folder")
    is_local = isinstance(error, errors.LocalEntryNotFoundError)
    if constants.HF_HUB_OFFLINE:
        rule = f"is incomplete in the cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set"
        return Problem(where, rule, f"type: HF_HUB_OFFLINE=0 {name.download}")
    if is_local or isinstance(error, ConnectionError) or "Connect" in type(error).__name__:
        rule = f"the hub at {constants.ENDPOINT} cannot be reached, and the cache is incomplete"
        return Problem(where, rule, f"give a local folder, or type when it can: {name.download}")
    reason = one_line(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}", 200)
    rule = f"was not downloaded to the end ({reason})"
    return Problem(where, rule, f"start again, which continues it, or type: {name.download}")


def _list_files(name: HubName, folder: Path, where: str) -> list[str]:
    """All files of the commit; offline, the cached ones (`fetch` checks whether they are
    complete)."""
    from huggingface_hub import HfApi, constants

    if not constants.HF_HUB_OFFLINE:
        with _in_sentences(name, where):
            return HfApi().list_repo_files(name.repo, repo_type=name.kind, revision=name.revision)
    return [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]
