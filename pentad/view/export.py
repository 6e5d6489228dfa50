"""Exports a run to one HTML file with the page and its records, which needs no server."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from collections.abc import Callable
from importlib.resources import files
from typing import Any

from pentad.core.errors import UserError
from pentad.telemetry.record import BLOCKS, StepRecord, finite
from pentad.view.run import RunView
from pentad.view.samples import SampleFilter

POINTS = 1000
NUM_SAMPLES = 400
"""Number of newest samples in the file; long texts are truncated as in lists."""
NUM_GROUPS = 12
"""Number of groups of the last kept step in the file, with all tokens."""


def export_page(run: RunView, plan_of: Callable[[RunView], dict[str, Any]] | None) -> str:
    """The page of a run with its records inside."""
    static = files("pentad.view") / "static"
    script, style = ((static / name).read_text("utf-8") for name in ("app.js", "app.css"))
    # `</script>` in a text would end the element; JSON has another way to write `<`.
    data = json.dumps(finite(exported(run, plan_of))).replace("<", "\\u003c")
    script = script.replace("</script", "<\\/script")
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{allowed}'; style-src 'unsafe-inline'; "
        "img-src data: blob:"
    )
    head, _, _ = (static / "index.html").read_text("utf-8").partition("<link")
    title = run.name.replace("&", "&amp;").replace("<", "&lt;")
    return (
        head.replace("<title>pentad view</title>", f"<title>{title}</title>")
        + f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        + f"<style>{style}</style>\n</head>\n<body>\n"
        + f'<div id="app"></div>\n<script type="application/json" id="data">{data}</script>\n'
        + f"<script>{script}</script>\n</body>\n</html>\n"
    )


def exported(run: RunView, plan_of: Callable[[RunView], dict[str, Any]] | None) -> dict[str, Any]:
    run.advance(60.0)
    run.samples.advance(60.0)
    kept = run.groups.steps()[-1:]
    groups = [(step, gid) for step in kept for gid in run.groups.gids(step)[:NUM_GROUPS]]
    found = {
        "run": run.summary() | {"has_plan": plan_of is not None},
        "series": run.steps.series(list(run.steps.columns.by_path), None, None, POINTS),
        "samples": run.samples.find(SampleFilter(), 0, NUM_SAMPLES, 10.0)["samples"][::-1],
        "groups": [run.groups.group(*one, run.samples.group(*one)) for one in groups],
        "fields": field_meanings(),
    }
    if plan_of is not None:
        try:
            found["plan"] = plan_of(run)
        except UserError as error:
            found["plan"] = {"error": str(error)}
    return found


def field_meanings() -> dict[str, dict[str, str]]:
    """Path of a number of a step, such as `rl/entropy` -> meaning and unit."""
    return {
        f"{block}/{entry.name}".lstrip("/"): {k: entry.metadata[k] for k in ("meaning", "unit")}
        for block, cls in {"": StepRecord, **BLOCKS}.items()
        for entry in dataclasses.fields(cls)
    }
