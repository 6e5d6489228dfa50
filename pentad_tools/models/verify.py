"""`verify-model`: compares a model file with transformers; needs neither GPU nor network."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from pentad.core.errors import Problem, UserError
from pentad.models.families import family_of, read_config, spec_of
from pentad.models.spec import ModelSpec
from pentad.models.towers import text_config, tower_of
from pentad_tools.models.cases import FamilyCase, Fault, build_case, shrunk, variants_of
from pentad_tools.models.checks import CHECKS, WEIGHT_CHECKS, check_headers
from pentad_tools.models.wholes import check_whole


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of one check on one case."""

    check: str
    case: str
    passed: bool
    detail: str
    seconds: float


@dataclass(frozen=True, slots=True)
class RuleRow:
    """One rule expanded at the sizes of the first case."""

    target: str
    shape: str
    num_tensors: int
    size_bytes: int


@dataclass
class FamilyReport:
    """All results of `verify`."""

    family: str
    rules: list[RuleRow] = field(default_factory=list)
    outcomes: list[CheckResult] = field(default_factory=list)
    skipped: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return bool(self.outcomes) and all(outcome.passed for outcome in self.outcomes)


@dataclass(frozen=True, slots=True)
class FamilySubject:
    """The subject of a verification: a spec, tiny configs, and optionally a real folder."""

    spec: ModelSpec
    configs: Mapping[str, Mapping[str, Any]]
    folder: Path | None = None
    skipped: tuple[str, ...] = ()
    """Variants that transformers' config of the family rejects."""
    whole: bool = False
    """Whether the folder is multimodal; the family is then that of its text tower."""


def verify(name_or_path: str) -> FamilyReport:
    """Verifies a family by name or dotted path, or the family of a folder with its options."""
    return verify_subject(subject_of(name_or_path))


def verify_subject(subject: FamilySubject) -> FamilyReport:
    report = FamilyReport(subject.spec.family, skipped=subject.skipped)
    report.outcomes.extend(iter_outcomes(subject, report.rules))
    return report


def iter_outcomes(subject: FamilySubject, rules: list[RuleRow]) -> Iterator[CheckResult]:
    """Runs the checks one by one as they are consumed; fills `rules` from the first case."""
    if (folder := subject.folder) is not None:
        yield _run("real headers", folder.name, partial(check_headers, folder))
        if subject.whole:
            yield _run("whole model", folder.name, partial(check_whole, folder))
    seen: set[tuple[tuple[str, object], ...]] = set()
    for name, config in subject.configs.items():
        with tempfile.TemporaryDirectory() as scratch:
            cases: list[FamilyCase] = []
            prepare = partial(_prepare, cases, name, subject.spec, config, scratch)
            yield _run("transformers model", name, prepare)
            for case in cases:
                mapped = _run("map", name, partial(_build_map, case))
                yield mapped
                if not mapped.passed:
                    continue
                weights = tuple((n, e.shape) for n, e in case.weight_map.entries.items())
                for title, check in (CHECKS | ({} if weights in seen else WEIGHT_CHECKS)).items():
                    yield _run(title, name, partial(check, case))
                seen.add(weights)
                rules.extend([] if rules else rule_rows(case))


def _build_map(case: FamilyCase) -> str:
    return f"{len(case.weight_map.entries)} native, {len(case.weight_map.sources)} HF tensors"


def subject_of(name_or_path: str) -> FamilySubject:
    path = Path(name_or_path)
    if path.suffix == ".py" and path.exists():
        name_or_path = f"{path}:SPEC"
    elif path.exists():
        config = read_config(path)
        spec, tower = spec_of(family_of(config)), tower_of(config)
        text = config if tower is None else text_config(config, tower)
        folder = path if path.is_dir() else None
        return FamilySubject(spec, {"as configured": shrunk(text)}, folder, whole=tower is not None)
    spec = spec_of(name_or_path)
    if spec.family not in transformers.CONFIG_MAPPING:
        rule = "transformers has no such model_type, so there is nothing to compare with"
        raise UserError(Problem(f"family = {spec.family}", rule))
    variants = variants_of(transformers.AutoConfig.for_model(spec.family).to_dict())
    variants |= {name: {**variants["untied"], **own} for name, own in spec.variants.items()}
    offered = {name: config for name, config in variants.items() if _is_offered(spec, config)}
    return FamilySubject(spec, offered, skipped=tuple(variants.keys() - offered.keys()))


def _is_offered(spec: ModelSpec, config: Mapping[str, Any]) -> bool:
    """Whether transformers' config accepts the variant (Phi-3, for one, has no linear rope)."""
    try:
        transformers.AutoConfig.for_model(spec.family, **deepcopy(dict(config)))
    except Exception:  # each config class has its own types
        return False
    return True


def _prepare(
    cases: list[FamilyCase], name: str, spec: ModelSpec, config: Mapping[str, Any], scratch: str
) -> str:
    cases.append(build_case(name, spec, config, Path(scratch)))
    return f"{sum(p.numel() for p in cases[0].theirs.parameters())} parameters"


def _run(check: str, case: str, body: Callable[[], str]) -> CheckResult:
    start = time.perf_counter()
    try:
        detail, passed = body(), True
    except Exception as error:  # any error of a wrong model file is a finding
        kind = "" if isinstance(error, Fault | UserError) else f"{type(error).__name__}: "
        detail, passed = f"{kind}{error}", False
    return CheckResult(check, case, passed, detail, time.perf_counter() - start)


def rule_rows(case: FamilyCase) -> list[RuleRow]:
    rows: dict[str, RuleRow] = {}
    for entry in case.weight_map.entries.values():
        old = rows.get(entry.rule.target, RuleRow(entry.rule.target, entry.rule.shape, 0, 0))
        size = torch.Size(entry.shape).numel() * torch.float32.itemsize
        row = RuleRow(old.target, old.shape, old.num_tensors + 1, old.size_bytes + size)
        rows[row.target] = row
    return list(rows.values())
