"""manifest.json: what a run is made of, and every time it was started.

{"format": 1, "config_digest": "...", "seed": 1, "config": {...},
 "starts": [{"time": "2026-03-01T12:00:00+00:00", "command": "...", "from_step": 0,
             "generation": 0, "versions": {...}, "git": {...}, "hardware": {...}}, ...]}
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pentad
from pentad.telemetry import host

FORMAT = 1


def build_manifest(config: Mapping[str, Any], config_digest: str, seed: int) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "config_digest": config_digest,
        "seed": seed,
        "config": dict(config),
        "starts": [],
    }


def describe_start(**more: Any) -> dict[str, Any]:
    """This start; `more` holds what the caller knows besides, such as the self-test's figures."""
    package = Path(pentad.__file__).parent
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "versions": host.versions(),
        "git": host.git_state(package.parent),
        "hardware": host.hardware(),
        **more,
    }


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Whole or not at all."""
    aside = path.with_name(f".{path.name}.aside")
    aside.write_text(json.dumps(value, indent=2) + "\n")
    aside.replace(path)
