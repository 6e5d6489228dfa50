"""`pentad new-model` drafts a model file; `pentad verify-model` prints what its checks find."""

from __future__ import annotations

import json as jsonlib
import time
from dataclasses import asdict
from pathlib import Path

import torch
import transformers
from rich.table import Table

from pentad.cli.plan import make_console
from pentad.core.errors import Problem, UserError
from pentad.models.families import read_config
from pentad.models.proof.verify import CheckResult, FamilyReport, verify
from pentad.models.skeleton import draft, full_config


def run_verify_model(name_or_path: str, as_json: bool) -> int:
    """0 when every check passed, 1 otherwise."""
    torch.set_num_threads(1)  # the tensors are tiny: threads would only wait for each other
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
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
    console = make_console()
    with console.capture() as captured:
        console.print(rules_table(report))
        console.print()
        console.print(checks_table(report))
    # Tables pad their last column.
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))
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
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("rule", "shape"):
        table.add_column(title)
    for title in ("tensors", "bytes"):
        table.add_column(title, justify="right")
    for row in report.rules:
        table.add_row(row.target, row.shape, str(row.num_tensors), str(row.size_bytes))
    return table


def checks_table(report: FamilyReport) -> Table:
    """One row per check: how many cases, the slowest's words, and the time of all."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("check", "result", "what was seen"):
        table.add_column(title, overflow="fold")
    table.add_column("seconds", justify="right")
    for check in dict.fromkeys(outcome.check for outcome in report.outcomes):
        own = [outcome for outcome in report.outcomes if outcome.check == check]
        table.add_row(check, _result(own), _seen(own), f"{sum(o.seconds for o in own):.2f}")
    return table


def _result(own: list[CheckResult]) -> str:
    failed = sum(not outcome.passed for outcome in own)
    return f"{failed} of {len(own)} FAILED" if failed else f"{len(own)} passed"


def _seen(own: list[CheckResult]) -> str:
    return next((o.detail for o in own if o.passed), "")


def run_new_model(config: str, out: str | None) -> None:
    """`config` is a folder, a config.json, or a model_type that transformers knows."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    text = draft(_read(config))
    family = _read(config)["model_type"]
    file = Path(out or f"{family}.py")
    if file.exists():
        rule = "is there already, and a draft would replace it"
        raise UserError(Problem(f"--out = {file}", rule, "name another file"))
    file.write_text(text)
    open_rules, unread = text.count("# no rule yet"), text.count("# not read: ")
    print(f"{file}: {text.count('Rule(')} rules", end="")
    print(f", {open_rules} tensors without one" if open_rules else "", end="")
    print(f", {unread} config keys that nothing reads" if unread else "")
    print(f"Next: pentad verify-model {file}")


def _read(config: str) -> dict[str, object]:
    if not Path(config).exists() and config in transformers.CONFIG_MAPPING:
        return full_config(config)
    return read_config(config)
