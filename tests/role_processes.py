"""The processes that a run has started, by their role."""

from contextlib import suppress
from pathlib import Path


def role_processes(parent, role):
    """Their ids, by number; `parent` is the process of the command."""
    found = {}
    for folder in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            words = (folder / "stat").read_text().rpartition(") ")[2].split()
            line = (folder / "cmdline").read_text()
            name = line.rpartition("role_host\0")[2].partition("\0")[0]
            if words[1] == str(parent) and words[0] != "Z" and name.startswith(f"{role}-"):
                found[int(name.removeprefix(f"{role}-"))] = int(folder.name)
    return [found[number] for number in sorted(found)]
