"""`pentad doctor`: prints the findings of `pentad.planner.doctor` and of the reward pool on this
machine."""

from __future__ import annotations

import asyncio
import json as jsonlib
from dataclasses import asdict

from rich.text import Text

from pentad.cli.output import make_table, print_parts
from pentad.core.errors import UserError
from pentad.planner.doctor import Finding, examine, is_healthy
from pentad.rewards.sandbox import WorkerLost, what_is_missing

MARKS = {
    "ok": ("ok", "green"),
    "info": ("-", ""),
    "warn": ("!", "yellow"),
    "fail": ("X", "bold red"),
}


def run_doctor(json: bool) -> int:
    """Returns 0 if runs can start here, 1 if something must be fixed first."""
    findings = [*examine(), check_isolation()]
    healthy = is_healthy(findings)
    if json:
        report = {"healthy": healthy, "findings": [asdict(finding) for finding in findings]}
        print(jsonlib.dumps(report, indent=2))
    else:
        show(findings)
    return 0 if healthy else 1


def check_isolation() -> Finding:
    """Tests, by attempts to break out, whether untrusted programs are isolated on this machine."""
    try:
        missing = asyncio.run(what_is_missing())
    except (UserError, WorkerLost) as failure:
        return Finding("isolation", "warn", f"the reward pool does not start ({failure})")
    if missing:
        return Finding("isolation", "warn", missing, "see docs/security.md")
    return Finding("isolation", "ok", "programs of the code reward are fully isolated")


def show(findings: list[Finding]) -> None:
    rows = []
    for finding in findings:
        mark, style = MARKS[finding.status]
        text = Text(finding.text)
        if finding.remedy:
            text.append(f"\n-> {finding.remedy}", style="italic")
        rows.append((Text(mark, style=style), finding.name, text))
    print_parts(make_table(("", "", ""), rows, show_header=False))
    bad = [finding.name for finding in findings if finding.status == "fail"]
    warned = [finding.name for finding in findings if finding.status == "warn"]
    if bad:
        print(f"\nRuns cannot start here: fix {', '.join(bad)}.")
    elif warned:
        print(f"\nRuns can start here; look at {', '.join(warned)}.")
    else:
        print("\nRuns can start here.")
