"""What a started process does first: it binds its life to its parent's, and finds its target; and
how its threads look at each other."""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
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


_looking = threading.Lock()


def frame_of(thread_id: int) -> FrameType | None:
    """What a thread does now. Without collections meanwhile: in CPython before 3.11.8 one that
    frees a mapping within `_current_frames` deadlocks with a thread that ends."""
    with _looking:
        is_on = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames().get(thread_id)
        finally:
            if is_on:
                gc.enable()
