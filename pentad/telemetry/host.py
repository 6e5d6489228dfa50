"""Hardware, versions and memory use of this machine and process, without loading torch."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from pentad.core.machine import num_cores

PACKAGES = (
    *("pentad", "torch", "transformers", "safetensors", "numpy", "tokenizers"),
    *("triton", "pyarrow", "ray", "vllm", "sglang", "megatron-core", "transformer-engine"),
)


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages of the list."""
    found = {"python": platform.python_version()}
    installed = {name: _installed(name) for name in PACKAGES}
    return found | {name: version for name, version in installed.items() if version is not None}


@cache
def _installed(name: str) -> str | None:
    """The installed version; cached, because every start of a run reads it."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def hardware() -> dict[str, Any]:
    """The machine's hardware. Values that cannot be read are null."""
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "num_cpus": num_cores(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "gpus": _gpu_names(),
    }


def rss_gb() -> float | None:
    """Resident memory of this process in GB; None if /proc has no entry."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e9


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit, and whether files differ from it; None if `folder` is not the root of a checkout. (An
    installed package may be inside another repository, whose commit is unrelated.)"""
    if not (folder / ".git").exists():
        return None
    commit = _git(folder, "rev-parse", "HEAD")
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    if commit is None:
        return None
    return {"commit": commit, "is_modified": None if changes is None else bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _cpu_name() -> str | None:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        return None
    return found[1] if found else None


def _gpu_names() -> list[str]:
    """GPU names from the files of the NVIDIA driver; empty without a driver."""
    names = []
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        found = re.search(r"^Model:\s*(.+)$", file.read_text(), re.M)
        names.append(found[1] if found else "unknown")
    return names
