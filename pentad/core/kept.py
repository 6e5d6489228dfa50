"""Per-user cache between runs: a folder for compiled code, and compile times."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from pentad.core.files import write_atomic


def kept_folder() -> Path | None:
    """The cache folder of this user; None for a user without a home folder."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pentad"
    except RuntimeError:
        return None


def seconds_of(what: str) -> float | None:
    """Seconds of the last compilation of `what` on this machine; None: unknown."""
    seconds = _read().get(what)
    return seconds if isinstance(seconds, float) else None


def note_seconds(what: str, seconds: float) -> None:
    """Stores a compile time for later runs. A folder that is not writable is ignored."""
    folder = kept_folder()
    if folder is None:
        return
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(_read() | {what: seconds}, indent=1)
        write_atomic(folder / "compile-seconds.json", text.encode(), is_durable=False)


def last_time(what: str) -> str:
    """The last compile time in words, for the log line of a compilation."""
    seconds = seconds_of(what)
    return "not known here yet" if seconds is None else f"{seconds:.1f} s the last time"


def _read() -> dict[str, object]:
    folder = kept_folder()
    with suppress(OSError, ValueError):
        found = json.loads((folder / "compile-seconds.json").read_text()) if folder else {}
        return found if isinstance(found, dict) else {}
    return {}
