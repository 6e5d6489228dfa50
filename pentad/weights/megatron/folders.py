"""Where a Megatron checkpoint lies in its folder, and what kind of folder a path is.

FOLDER/latest_checkpointed_iteration.txt     "release", or the iteration
FOLDER/release or FOLDER/iter_0000100        one checkpoint: mp_rank folders, or torch_dist
FOLDER/config.json and tokenizer files       beside them, where a converter put them
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pentad.core.errors import Problem, UserError
from pentad.core.trial_paths import recovery_problem
from pentad.weights.hf import INDEX as HF_INDEX
from pentad.weights.hf import SINGLE
from pentad.weights.megatron.layout import RANK_FOLDER

INDEX = ".metadata"
"""What makes a folder a torch_dist one."""
TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
Kind = Literal["hf", "torch_dist", "legacy"]


def checkpoint_name(iteration: int | None) -> str:
    """The folder of an iteration; without one, that of released weights."""
    return RELEASE if iteration is None else f"iter_{iteration:07d}"


def write_tracker(folder: Path, iteration: int | None) -> None:
    text = RELEASE if iteration is None else str(iteration)
    (folder / TRACKER).write_text(text)


def kind_of(folder: Path) -> Kind | None:
    """What one checkpoint's folder holds; None for a folder that is none."""
    if (folder / INDEX).is_file():
        return "torch_dist"
    if any(RANK_FOLDER.fullmatch(path.name) for path in folder.iterdir()):
        return "legacy"
    return None


def find_weights(folder: Path, name: str | None = None) -> tuple[Path, Kind]:
    """The folder with the weights, and its kind. `name` picks a Megatron checkpoint.

    Megatron is looked for first: such folders may carry the index of the HF model they came from.
    """
    if not folder.is_dir():
        rule = "is a file" if folder.exists() else "there is no such folder"
        raise UserError(Problem(str(folder), rule, "give a HF folder or a Megatron folder"))
    if problem := recovery_problem(str(folder), folder):
        raise UserError(problem)
    kind = kind_of(folder)
    if kind is not None:
        return folder, kind
    names = sorted(path.name for path in folder.iterdir() if _is_checkpoint(path))
    if not names and (folder / TRACKER).is_file():
        raise UserError(Problem(str(folder), f"has {TRACKER}, but no checkpoint it could name"))
    if not names:
        if any((folder / file).exists() for file in (SINGLE, HF_INDEX, "config.json")):
            return folder, "hf"
        rule = "holds neither safetensors nor a Megatron checkpoint"
        raise UserError(Problem(str(folder), rule, "give a HF folder or a Megatron folder"))
    chosen = folder / _choose(folder, names, name)
    kind = kind_of(chosen)
    if kind is None:
        rule = f"holds neither {INDEX} nor mp_rank folders"
        raise UserError(Problem(str(chosen), rule, "fetch the folder again"))
    return chosen, kind


def _is_checkpoint(path: Path) -> bool:
    return path.is_dir() and (path.name == RELEASE or path.name.startswith("iter_"))


def _choose(folder: Path, names: list[str], name: str | None) -> str:
    there = f"there {'is' if len(names) == 1 else 'are'} {', '.join(names)}"
    tracker = folder / TRACKER
    if name is None and tracker.is_file():
        name = _tracked(tracker)
    if name is None and len(names) == 1:
        name = names[0]
    if name is None:
        rule = f"{there}, and no {TRACKER} to choose by"
        raise UserError(Problem(str(folder), rule, "name one with --iteration or --release"))
    if name not in names:
        raise UserError(Problem(str(folder / name), f"there is no such checkpoint; {there}"))
    return name


def _tracked(tracker: Path) -> str:
    text = tracker.read_text().strip()
    if text == RELEASE:
        return RELEASE
    if not text.isdigit():
        raise UserError(Problem(f"{tracker} = {text}", "is neither a number nor release"))
    return checkpoint_name(int(text))


def iteration_of(folder: Path) -> int | None:
    """The iteration in the name of a checkpoint's folder."""
    digits = folder.name.removeprefix("iter_")
    return int(digits) if digits.isdigit() else None
