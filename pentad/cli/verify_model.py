"""Prints what `verify-model` finds: the rules of a map, every check with its time, every fault."""

from __future__ import annotations

import json as jsonlib
import time
from dataclasses import asdict

import torch
import transformers
from rich.table import Table

from pentad.cli.plan import make_console
from pentad.models.proof.verify import Outcome, Report, verify


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


def show(report: Report, seconds: float) -> None:
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


def rules_table(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("rule", "shape"):
        table.add_column(title)
    for title in ("tensors", "bytes"):
        table.add_column(title, justify="right")
    for row in report.rules:
        table.add_row(row.target, row.shape, str(row.num_tensors), str(row.size_bytes))
    return table


def checks_table(report: Report) -> Table:
    """One row per check: how many cases, the slowest's words, and the time of all."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("check", "result", "what was seen"):
        table.add_column(title, overflow="fold")
    table.add_column("seconds", justify="right")
    for check in dict.fromkeys(outcome.check for outcome in report.outcomes):
        own = [outcome for outcome in report.outcomes if outcome.check == check]
        table.add_row(check, _result(own), _seen(own), f"{sum(o.seconds for o in own):.2f}")
    return table


def _result(own: list[Outcome]) -> str:
    failed = sum(not outcome.passed for outcome in own)
    return f"{failed} of {len(own)} FAILED" if failed else f"{len(own)} passed"


def _seen(own: list[Outcome]) -> str:
    return next((o.detail for o in own if o.passed), "")
