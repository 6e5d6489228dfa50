"""Which model families have a file in this package, told without importing any of them."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from pentad.core.errors import Problem

FOLDER = Path(__file__).parents[1] / "models"


def own_families() -> list[str]:
    """The `model_type` of each model file: a module of the package `models` that holds a SPEC."""
    return sorted(file.stem for file in FOLDER.glob("*.py") if has_model_file(file.stem))


@cache
def has_model_file(family: str) -> bool:
    file = FOLDER / f"{family}.py"
    if not family.isidentifier() or not file.is_file():
        return False
    body = ast.parse(file.read_text(encoding="utf-8")).body
    targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    return any(isinstance(target, ast.Name) and target.id == "SPEC" for target in targets)


def no_sampler_for(family: str, allocation: str | None) -> Problem:
    rule = f"the embedded sampler has no model file for model_type = {family}"
    remedy = "sample with vllm or sglang, which run any HF model"
    return Problem(f"allocation_mode = {allocation}", rule, remedy)


def no_such_family(family: str, known: Iterable[str]) -> Problem:
    remedy = (
        f"use one of {', '.join(sorted(known))}, give a model file of your own, or train it "
        "with the backend fsdp"
    )
    return Problem(f"model_type = {family}", "no such model family", remedy)
