"""What a started process does first: it binds its life to its parent's, and finds its target."""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

PR_SET_PDEATHSIG = 1
FAILED = 1


def die_with_parent(parent: int) -> None:
    """The kernel ends this process when the thread that started it ends, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(FAILED)


def load_target(name: str) -> Callable[..., Any]:
    """The function of "module:function"."""
    module, _, function = name.partition(":")
    target: Callable[..., Any] = vars(importlib.import_module(module))[function]
    return target
