"""The card of a trained model: its base model, data and settings, and how it was trained, from the
records of its run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pentad.core.hub import HubKind, HubName, hub_name
from pentad.telemetry.steps import read_lines

NUM_POINTS = 9
"""Number of points of the reward curve in a card."""
ADAPTER = "adapter_config.json"


def model_card(
    name: str,
    run: Path,
    manifest: Mapping[str, Any],
    model: Path,
    *,
    task: str,
    defaults: Mapping[str, Any],
) -> str:
    """Returns Markdown with the Hub's front matter. `task`: the training command; `defaults`: the
    default config."""
    config = manifest["config"]
    steps = [one for one in read_lines(run / "steps.jsonl") if not one.get("superseded")]
    kind = _kind(task, config)
    is_adapter = (model / ADAPTER).exists()
    parts = [
        f"---\n{yaml.safe_dump(_front(config, kind, is_adapter), sort_keys=False)}---",
        f"# {name.rpartition('/')[2]}",
        f"{'A LoRA adapter' if is_adapter else 'All weights'} of {config['actor']['path']} after "
        f"{kind.text} with Pentad.",
        _table(_facts(config, kind, steps)),
        "## Curve\n\n" + _table(_curve(steps, kind)),
    ]
    if evaluated := read_lines(run / "evals.jsonl"):
        parts.append("## Held-out evaluation\n\n" + _table(_evals(evaluated)))
    changed = yaml.safe_dump(_changed(config, defaults), sort_keys=False)
    parts.append(f"## Config\n\nDifferences from the defaults:\n\n```yaml\n{changed}```")
    start = manifest["starts"][-1] if manifest["starts"] else {}
    versions = ", ".join(f"{key} {value}" for key, value in start.get("versions", {}).items())
    parts.append(f"## Versions\n\n{versions or 'not recorded'}")
    return "\n\n".join(parts) + "\n"


@dataclass(frozen=True, slots=True)
class _Kind:
    """Kind of a run, for its card."""

    text: str
    tags: tuple[str, ...]
    curve: Mapping[str, str]
    """Column of the curve -> field of a record."""
    label: str = "text-generation"
    has_rewards: bool = False


def _kind(task: str, config: Mapping[str, Any]) -> _Kind:
    if task == "train":
        algorithm = config["algorithm"]["name"]
        tags = ("reinforcement-learning", algorithm)
        curve = {"reward": "rl.reward_mean", "loss": "loss"}
        return _Kind(f"reinforcement learning ({algorithm})", tags, curve, has_rewards=True)
    if task in ("dpo", "reward-model"):
        loss = config["preference"]["loss"]
        curve = {"accuracy": "preference.accuracy", "margin": "preference.margin", "loss": "loss"}
        if task == "dpo":
            return _Kind(f"training on preferences ({loss})", ("preferences", loss), curve)
        text = "training as a reward model on preferences"
        return _Kind(text, ("reward-model",), curve, label="text-classification")
    text = "pretraining" if task == "pretrain" else "supervised fine-tuning"
    return _Kind(text, (task,), {"loss": "loss"})


def _front(config: Mapping[str, Any], kind: _Kind, is_adapter: bool) -> dict[str, Any]:
    base = _named(config["actor"]["path"], "model")
    rows = [found.repo for path in _data(config) if (found := _named(path, "dataset"))]
    return {
        "library_name": "peft" if is_adapter else "transformers",
        "pipeline_tag": kind.label,
        "tags": ["pentad", *kind.tags],
        **({"base_model": base.repo} if base else {}),
        **({"datasets": rows} if rows else {}),
    }


def _data(config: Mapping[str, Any]) -> list[str]:
    """The paths of the training data."""
    several = config["rollout"].get("workflows") or ()
    return [one["data"]["path"] for one in several] or [config["train_dataset"]["path"]]


def _named(path: object, kind: HubKind) -> HubName | None:
    """The Hub name with its commit; None for a path."""
    found = hub_name(path, kind) if isinstance(path, str) else None
    return found if found is not None and found.revision else None


def _rewards(config: Mapping[str, Any]) -> str:
    """The reward of each environment."""
    found = []
    for one in config["rollout"].get("workflows") or (config["rollout"],):
        fn = (one.get("reward") or config["reward"])["fn"]
        reward = ", ".join(fn) if isinstance(fn, list) else fn
        found.append(reward or f"of the workflow {one['workflow']}")
    return "; ".join(dict.fromkeys(found))


def _facts(
    config: Mapping[str, Any], kind: _Kind, steps: Sequence[Mapping[str, Any]]
) -> list[Sequence[object]]:
    rewards = [("Reward", _rewards(config))]
    return [
        ("", ""),
        ("Base", config["actor"]["path"]),
        ("Data", ", ".join(map(str, _data(config)))),
        *(rewards if kind.has_rewards else ()),
        ("Steps", len(steps)),
        ("Batch", config["train_dataset"]["batch_size"]),
        ("Learning rate", config["actor"]["optimizer"]["lr"]),
        ("Seed", config["seed"]),
    ]


def _curve(steps: Sequence[Mapping[str, Any]], kind: _Kind) -> list[Sequence[object]]:
    """Evenly spaced steps, including the first and the last."""
    last = len(steps) - 1
    chosen = sorted({round(last * n / (NUM_POINTS - 1)) for n in range(NUM_POINTS) if steps})
    rows: list[Sequence[object]] = [("step", *kind.curve)]
    for one in (steps[index] for index in chosen):
        rows.append([one["step"], *(_field(one, place) for place in kind.curve.values())])
    return rows


def _field(record: Mapping[str, Any], place: str) -> object:
    block, _, name = place.rpartition(".")
    return ((record.get(block) or {}) if block else record).get(name)


def _evals(lines: Sequence[Mapping[str, Any]]) -> list[Sequence[object]]:
    columns = ("version", "accuracy", "mean_reward", "num_prompts")
    has = [column for column in columns if any(line.get(column) is not None for line in lines)]
    return [has, *([line.get(column) for column in has] for line in lines)]


def _changed(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        default = defaults.get(key)
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            if inner := _changed(value, default):
                found[key] = inner
        elif value != default:
            found[key] = value
    return found


def _table(rows: Sequence[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(map(_cell, row)) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def _cell(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
