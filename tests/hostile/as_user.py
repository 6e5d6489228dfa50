"""Runs a script as an ordinary user, from root: `python as_user.py script.py arguments...`.

Python and this repository may lie in a folder that only root may enter. In a mount namespace of
this process such folders are replaced by open ones that hold nothing but what is needed.
"""

import os
import stat
import sys
from pathlib import Path

from pentad.rewards.confine import LIBC, check
from pentad.rewards.enclosure import BIND, NEWNS, NOBODY, PRIVATE, RECURSIVE, _mount

REPOSITORY = Path(__file__).parents[2]


def closed_ancestor(path: Path) -> Path | None:
    """The topmost folder above `path` that others may not enter."""
    for ancestor in reversed(path.parents):
        if not ancestor.stat().st_mode & stat.S_IXOTH:
            return ancestor
    return None


def open_the_way(paths: set[Path]) -> None:
    check(LIBC.unshare(NEWNS))
    _mount("none", "/", RECURSIVE | PRIVATE)
    hidden = {path: closed for path in paths if (closed := closed_ancestor(path)) is not None}
    sources = {path: os.open(path, os.O_PATH) for path in hidden}
    for closed in set(hidden.values()):
        _mount("tmpfs", str(closed), 0, "mode=755")
    for path, descriptor in sources.items():
        path.mkdir(parents=True, exist_ok=True)
        _mount(f"/proc/self/fd/{descriptor}", str(path), BIND | RECURSIVE)


if __name__ == "__main__":
    interpreter = Path(sys.executable)
    needed = {REPOSITORY, Path(sys.base_prefix), Path(sys.prefix), Path(sys.prefix).resolve()}
    open_the_way({path for path in needed if path.is_dir()})
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    os.environ.update(HOME="/tmp", PYTHONDONTWRITEBYTECODE="1")
    os.execv(interpreter, [str(interpreter), *sys.argv[1:]])
