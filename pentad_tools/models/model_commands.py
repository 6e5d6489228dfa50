"""`pentad new-model` drafts a model file; `pentad verify-model` prints check results."""

from __future__ import annotations

import json as jsonlib
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
import transformers
from rich.table import Table

from pentad.cli.output import make_table, print_parts, quiet_transformers
from pentad.core.errors import Problem, UserError
from pentad.models.families import read_config
from pentad_tools.models.skeleton import draft, full_config
from pentad_tools.models.types_table import TypeReport, types_page
from pentad_tools.models.verify import FamilyReport, verify


def run_types_table(name: str | None) -> int:
    """Returns 0 if every supported type has transformers' log-probs, else 1."""
    if name is not None:
        rule = "it tests a fixed list"
        raise UserError(Problem(f"--table with {name}", rule, "leave one of the two out"))
    torch.set_num_threads(1)
    quiet_transformers()
    wrong: list[TypeReport] = []

    def note(report: TypeReport) -> None:
        print(report.model_type, file=sys.stderr, flush=True)
        wrong.extend([] if report.passed else [report])

    print(types_page(note), end="")
    for report in wrong:
        print(f"{report.model_type}: log-probs differ by {report.max_diff}", file=sys.stderr)
    return 1 if wrong else 0


def run_verify_model(name_or_path: str | None, as_json: bool) -> int:
    """Returns 0 if every check passed, else 1."""
    if name_or_path is None:
        rule = "there is no model to verify"
        raise UserError(Problem("MODEL", rule, "name a family, a model file or a folder"))
    torch.set_num_threads(1)  # faster for tiny tensors
    quiet_transformers()
    start = time.perf_counter()
    report = verify(name_or_path)
    seconds = time.perf_counter() - start
    if as_json:
        print(
            jsonlib.dumps({"passed": report.passed, "seconds": seconds, **asdict(report)}, indent=2)
        )
    else:
        show(report, seconds)
    return 0 if report.passed else 1


def show(report: FamilyReport, seconds: float) -> None:
    print_parts(rules_table(report), "", checks_table(report))
    if report.skipped:
        print(f"\nNot tried, as transformers' {report.family} has no such variant: ", end="")
        print(", ".join(sorted(report.skipped)))
    faults = [outcome for outcome in report.outcomes if not outcome.passed]
    for outcome in faults:
        print(f"\n{outcome.check}, {outcome.case}: {outcome.detail}")
    if faults:
        print(f"\n{report.family}: {len(faults)} of {len(report.outcomes)} checks failed.")
    else:
        print(f"\n{report.family}: {len(report.outcomes)} checks passed in {seconds:.1f} s.")


def rules_table(report: FamilyReport) -> Table:
    titles = ("rule", "shape", "tensors", "bytes")
    rows = [(r.target, r.shape, str(r.num_tensors), str(r.size_bytes)) for r in report.rules]
    return make_table(titles, rows, right=("tensors", "bytes"))


def checks_table(report: FamilyReport) -> Table:
    """One row per check: number of cases, summary of the first passed case, total time."""
    rows = []
    for check in dict.fromkeys(outcome.check for outcome in report.outcomes):
        own = [outcome for outcome in report.outcomes if outcome.check == check]
        failed = sum(not outcome.passed for outcome in own)
        result = f"{failed} of {len(own)} FAILED" if failed else f"{len(own)} passed"
        seen = next((outcome.detail for outcome in own if outcome.passed), "")
        rows.append((check, result, seen, f"{sum(o.seconds for o in own):.2f}"))
    return make_table(("check", "result", "what was seen", "seconds"), rows, right=("seconds",))


def run_new_model(config: str, out: str | None, *, plain: bool = False) -> None:
    """Prints or writes a draft. `config`: a folder, a config.json, or a transformers model_type."""
    quiet_transformers()
    text = draft(_read(config), plain=plain)
    family = _read(config)["model_type"]
    file = Path(out or f"{family}.py")
    if file.exists():
        rule = "exists, and a draft would replace it"
        raise UserError(Problem(f"--out = {file}", rule, "name another file"))
    file.write_text(text)
    open_rules, unread = text.count("# no rule yet"), text.count("# not read: ")
    print(f"{file}: {text.count('Rule(')} rules", end="")
    print(f", {open_rules} tensors without one" if open_rules else "", end="")
    print(f", {unread} config keys that are not read" if unread else "")
    print(f"Next: pentad verify-model {file}")


def _read(config: str) -> dict[str, object]:
    if not Path(config).exists() and config in transformers.CONFIG_MAPPING:
        return full_config(config)
    return read_config(config)
