"""Storage that answers with an error of the operating system where a path is read."""

import builtins
import errno
import hashlib
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

ERRORS = ("EIO", "ESTALE", "EACCES", "EPERM", "ETIMEDOUT", "ENOMEM", "EMFILE", "EAGAIN", "ENXIO")
"""Which say nothing about bytes."""


@contextmanager
def failing(name: str, *targets: Path) -> Iterator[list[str]]:
    """Opening, looking at and listing these paths fails; which were tried."""
    wanted, tried = {str(target) for target in targets}, []

    def guarded(plain: Any) -> Any:
        def call(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            if isinstance(path, str | os.PathLike) and os.fspath(path) in wanted:
                tried.append(os.fspath(path))
                number = getattr(errno, name)
                raise OSError(number, os.strerror(number), os.fspath(path))
            return plain(path, *args, **kwargs)

        return call

    with (
        patch.object(os, "open", guarded(os.open)),
        patch.object(os, "stat", guarded(os.stat)),
        patch.object(os, "scandir", guarded(os.scandir)),
        patch.object(io, "open", guarded(io.open)),
        patch.object(builtins, "open", guarded(builtins.open)),
    ):
        yield tried


def tree(root: Path, *without: str) -> dict[str, str]:
    """The digest of every file below a folder, but those of these names."""
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name not in without
    }
