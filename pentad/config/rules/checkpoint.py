"""Rules on checkpoints: the addresses of a store, and which keys may differ when a run is resumed.

One table lists the keys that do not affect training. Any other key is assumed to affect it: the
resume is rejected, and the message names the key that forces it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from pentad.config.describe import fields, nearest_keys, show, without_numbers
from pentad.config.rules.inputs import url_problem
from pentad.config.rules.rule import RUNS, Rules
from pentad.config.schema import ALIASES, Config
from pentad.core.errors import Problem
from pentad.core.hub import HUB_NAME
from pentad.core.remote import split_uri
from pentad.engine.section import ArchonConfig

RULES = Rules()


@RULES.add(commands=RUNS)
def the_store_has_an_address(config: Config) -> Problem | None:
    uri = config.checkpoint.remote_uri
    if uri is None:
        return None
    try:
        split_uri(uri)
    except ValueError as error:
        return Problem(f"checkpoint.remote_uri = {uri}", str(error), "give s3://BUCKET/PREFIX")
    return None


@RULES.add(commands=RUNS)
def the_endpoint_is_a_url(config: Config) -> Iterator[Problem]:
    url = config.checkpoint.endpoint_url
    where = f"checkpoint.endpoint_url = {url}"
    if url is None:
        return
    if rule := url_problem(url):
        yield Problem(where, rule, "give for instance http://127.0.0.1:9000, or null for Amazon's")
    elif "@" in urlsplit(url).netloc:
        remedy = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY instead"
        yield Problem("checkpoint.endpoint_url", "has credentials in it", remedy)


OF_A_MODEL = (
    *("mb_spec", "gradient_checkpointing", "pad_to_maximum", "enable_tree_training"),
    *(f"archon.{key}" for key in ArchonConfig.model_fields if not key.startswith("moe_")),
)
HARMLESS = (
    *("experiment_name", "trial_name", "fileroot", "user"),
    *("mode", "allocation_mode", "cluster", "scheduler"),
    *("num_iters_per_train_update", "balance_data", "store", "num_data_storage_units"),
    *("offload_train", "offload_rollout", "stall_warning_s", "stall_abort_s"),
    *(f"{role}.{key}" for role in ("actor", "critic") for key in OF_A_MODEL),
    *("reward.num_workers", "reward.memory_mb", "reward.allow_processes", "reward.allow_weaker"),
    *("rollout.max_concurrent_groups", "rollout.oversample", "rollout.max_carries"),
    *("rollout.deadline_s", "rollout.max_retries"),
    *("rollout.max_batch_tokens", "rollout.max_running", "rollout.kv_cache_gb", "rollout.server"),
    *(
        "rollout.workflows.valid",
        "valid_dataset",
        "evaluator",
        "saver",
        "recover",
        "checkpoint",
        "elastic",
    ),
    *("guards", "telemetry"),
)
"""Keys of placement, speed and monitoring; a block stands for all its keys."""
FIXED = {"train_dataset.batch_size": "the position in the data is counted in batches"}
"""Keys that `recover.allow` cannot force, with the reason."""
LENGTHS = ("total_train_epochs", "total_train_steps")
"""Harmless as long as the learning rate does not depend on the number of steps."""


@dataclass(frozen=True, slots=True)
class ChangedKeys:
    accepted: list[str] = field(default_factory=list)
    """Messages with each key and both values."""
    refused: list[Problem] = field(default_factory=list)


def judge_changes(
    old: Mapping[str, Any], new: Mapping[str, Any], allow: tuple[str, ...] = ()
) -> ChangedKeys:
    """Differences between the config of a run and the one with which it is resumed, as JSON."""
    changes, default = ChangedKeys(), Config().model_dump(mode="json")
    harmless = HARMLESS + (() if _follows_length(old) or _follows_length(new) else LENGTHS)
    for key, before, after in changed_keys(old, new):
        if before is None and not _has(old, key) and after == _value(default, key):
            continue  # a key that a later version added
        if key in FIXED or (key == "megatron.transformer_impl" and "auto" in (before, after)):
            continue  # auto: another backend trains, or an earlier version recorded it
        change = f"{key} was {show(before)}, is {show(after)}"
        if _is_within(key, harmless) or _is_within(key, allow):
            changes.accepted.append(change)
            continue
        rule = f"was {show(before)} so far, and the training depends on it"
        back = "set it back"
        if commit := _other_commit(before, after):
            rule = f"the run began with commit {commit} of it, and the hub now has another"
            back = f"give {key}={before}"
        remedy = f"{back}, force it with recover.allow=[{key}], or start over with --fresh"
        changes.refused.append(Problem(f"{key} = {show(after)}", rule, remedy))
    changes.refused.extend(fixed_problems(old, new))
    return changes


def _other_commit(before: object, after: object) -> str:
    """The recorded commit of a Hub name, if the name has another commit now."""
    found = [HUB_NAME.fullmatch(one) for one in (before, after) if isinstance(one, str)]
    same = [(one[1], one[3]) for one in found if one is not None and one[2]]
    return str(found[0][2]) if len(same) == 2 and same[0] == same[1] and found[0] else ""


def fixed_problems(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Problem]:
    """Changes that `recover.allow` cannot force: the run cannot be resumed."""
    for key, why in FIXED.items():
        before, after = _value(old, key), _value(new, key)
        if before != after:
            rule = f"was {show(before)} so far, and {why}"
            remedy = "set it back, or start over with --fresh"
            yield Problem(f"{key} = {show(after)}", rule, remedy)


def changed_keys(
    old: Mapping[str, Any], new: Mapping[str, Any], path: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Yields (dotted key, old value, new value) of every difference. Aliases, which records of
    older versions may contain, are ignored."""
    names = [*old, *(key for key in new if key not in old)]
    for key in [name for name in names if path or name not in ALIASES]:
        here = f"{path}.{key}" if path else str(key)
        before: Any = old.get(key)
        after: Any = new.get(key)
        if _is_blocks(before) and _is_blocks(after) and len(before) == len(after):
            before, after = (dict(enumerate(blocks)) for blocks in (before, after))
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from changed_keys(before, after, here)
        elif before != after:
            yield here, before, after


def _is_blocks(value: Any) -> bool:
    """Whether the value is a list of blocks of keys."""
    return isinstance(value, list) and all(isinstance(one, Mapping) for one in value)


@RULES.add(commands=RUNS)
def allowed_keys_are_keys(config: Config) -> Iterator[Problem]:
    for key in config.recover.allow:
        if without_numbers(key) not in fields():
            near = nearest_keys(key, 1)
            remedy = f"did you mean {near[0]}?" if near else "docs/configuration.md has all keys"
            yield Problem(
                f"recover.allow = {show(config.recover.allow)}", f"{key} is not a key", remedy
            )


def _follows_length(config: Mapping[str, Any]) -> bool:
    """Whether the learning rate depends on the number of steps."""
    optimizers = [_value(config, f"{role}.optimizer") or {} for role in ("actor", "critic")]
    return any(
        found.get("lr_scheduler_type") != "constant" or found.get("warmup_steps_proportion")
        for found in optimizers
    )


def _is_within(key: str, blocks: tuple[str, ...]) -> bool:
    names = {f"{key}.", f"{without_numbers(key)}."}
    return any(name.startswith(f"{block}.") for block in blocks for name in names)


def _value(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _has(config: Mapping[str, Any], key: str) -> bool:
    block, _, name = key.rpartition(".")
    found = _value(config, block) if block else config
    return isinstance(found, Mapping) and name in found
