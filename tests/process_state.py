"""What tests set for a whole process, and how it becomes again what it was before them."""

import logging
import os
import signal
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import torch

HANDLED = [
    getattr(signal, f"SIG{name}")
    for name in ("HUP", "INT", "QUIT", "USR1", "USR2", "PIPE", "ALRM", "TERM", "CHLD", "XFSZ")
]


@contextmanager
def process_restored():
    """Pytest itself restores the filters of warnings."""
    with ExitStack() as stack:
        for part in (environment, folder, signals, loggers, torch_settings):
            stack.enter_context(part())
        yield


@contextmanager
def environment():
    before = dict(os.environ)
    try:
        yield
    finally:
        after = dict(os.environ)
        for name in (before.keys() | after.keys()) - {"PYTEST_CURRENT_TEST"}:
            if name not in before:
                del os.environ[name]
            elif before[name] != after.get(name):
                os.environ[name] = before[name]


@contextmanager
def folder():
    before = Path.cwd()
    try:
        yield
    finally:
        os.chdir(before)


@contextmanager
def signals():
    before = {number: signal.getsignal(number) for number in HANDLED}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) != handler:
                signal.signal(number, handler)


@contextmanager
def loggers():
    """The root and ours; one that a test made first becomes a new one."""
    before = {logger.name: logger_state(logger) for logger in our_loggers()}
    new = (logging.NOTSET, True, False, [], [])
    try:
        yield
    finally:
        for logger in our_loggers():
            state = before.get(logger.name, new)
            if logger_state(logger) != state:
                level, logger.propagate, logger.disabled, filters, handlers = state
                logger.setLevel(level)
                logger.filters[:] = filters
                logger.handlers[:] = [*handlers, *filter(is_of_pytest, logger.handlers)]


def our_loggers():
    known = logging.root.manager.loggerDict
    ours = [known[name] for name in known if name.startswith("pentad")]
    return [logging.root, *(one for one in ours if isinstance(one, logging.Logger))]


def logger_state(logger):
    handlers = [one for one in logger.handlers if not is_of_pytest(one)]
    return logger.level, logger.propagate, logger.disabled, logger.filters[:], handlers


def is_of_pytest(handler):
    return type(handler).__module__.startswith("_pytest")


@contextmanager
def torch_settings():
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    has_gradients = torch.is_grad_enabled()
    mode = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(has_gradients)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if torch.are_deterministic_algorithms_enabled() != mode:
            torch.use_deterministic_algorithms(mode, warn_only=warns)


SHARED = ("warm_start.py", "multiprocessing.", "ray/", "pytest")
"""In the command lines of processes that all tests of a process share."""
OF_PROCESS = ("awake", "starter", "tqdm_monitor", "(_serve)")
"""Ends of the names of threads that are started once for a process: the package's, tqdm's, and the
one by which multiprocessing passes file descriptors."""
ENDS_WITHIN_S = 2.0


def running():
    """Threads, and processes that this one has started, by what they are."""
    found = {
        thread: f"thread {thread.name}"
        for thread in threading.enumerate()
        if not thread.name.endswith(OF_PROCESS)
    }
    for process in psutil.Process().children():
        try:
            words = " ".join(process.cmdline())
        except psutil.Error:  # it has just ended
            continue
        if words and not any(name in words for name in SHARED):
            found[process] = f"process {process.pid} ({words[:80]})"
    return found


def left_behind(before):
    """What runs now and did not run before, of that which does not end by itself soon."""
    until = time.monotonic() + ENDS_WITHIN_S
    while left := {what: name for what, name in running().items() if what not in before}:
        if time.monotonic() > until:
            break
        time.sleep(0.05)
    return sorted(left.values())
