"""Turns exceptions into error messages on stderr and an exit code.

2: bad input, nothing was started. 1: the run could not continue; its first cause is printed last.
130: interrupted. With PENTAD_TRACEBACK=1 the traceback comes first.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer

from pentad.core.errors import Interrupted, Problem, RunError, UserError, visible
from pentad.core.machine import flush_output, gpus_hidden

BAD_INPUT, FAILED, INTERRUPTED = 2, 1, 130


def reporting(command: Callable[..., None]) -> Callable[..., None]:
    """Wraps a command so that it ends with an exit code and a message, never with a traceback. With
    `--device cpu` GPUs are not counted."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            with gpus_hidden(kwargs.get("device") == "cpu"):
                command(*args, **kwargs)
        except UserError as error:
            _show_traceback()
            problems = [str(problem) for problem in error.problems]
            count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
            _show(problems, f"{count}, nothing was started:")
            raise typer.Exit(BAD_INPUT) from None
        except RunError as error:
            _show_traceback()
            _show([str(error)])
            code = INTERRUPTED if isinstance(error, Interrupted) else FAILED
            raise typer.Exit(code) from None
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package in ("", "pentad", "pentad_tools"):
                raise
            _show_traceback()
            _show([str(_not_installed(package))], "1 problem, nothing was started:")
            raise typer.Exit(BAD_INPUT) from None
        except OSError as error:
            if isinstance(error, BrokenPipeError):  # the reader closed the pipe, as `head` does
                raise
            _show_traceback()
            _show([f"the operating system refused: {error}."])
            raise typer.Exit(FAILED) from None
        except KeyboardInterrupt:
            _show_traceback()
            _show(["interrupted."])
            raise typer.Exit(INTERRUPTED) from None

    return wrapped


def _not_installed(package: str) -> Problem:
    """The command that installs a missing package at the required version, if Pentad depends on
    it."""
    lines = importlib.metadata.requires("pentad") or []
    wanted = [line.partition(";")[0].strip() for line in lines if "extra ==" not in line]
    names = {line: re.match(r"[\w.-]+", line) for line in wanted}
    fitting = [line for line, name in names.items() if name and name[0].lower() == package.lower()]
    remedy = f"pip install '{fitting[0] if fitting else package}'"
    return Problem(package, "this command needs it and it is not installed", remedy)


@contextmanager
def leaving() -> Iterator[None]:
    """Wraps the whole program: ctrl-C outside a command ends with a message, too; ctrl-C while
    libraries clean up keeps the exit code and shows no traceback."""
    code = 0
    try:
        yield
    except KeyboardInterrupt:
        code = INTERRUPTED
        _show(["interrupted."])
        raise SystemExit(code) from None
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
        if any(thread.name == "learner" for thread in threading.enumerate()):
            flush_output()  # a step hangs: the interpreter would wait for its thread
            os._exit(code)
        raise
    finally:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(code))


def _show(sentences: list[str], heading: str = "") -> None:
    from rich.console import Console
    from rich.text import Text

    if sys.stderr is None:  # closed by the parent process: the log has the cause
        return
    if sys.stdout is not None:
        sys.stdout.flush()  # buffered output must not follow the cause
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if heading:
        console.print(Text(heading, style="bold"))
    for sentence in sentences:
        text = Text("* ", style="bold red")
        text.append(visible(sentence, "\n").replace("\n", "\n  "), style="not bold default")
        console.print(text)
    sys.stderr.flush()


def _show_traceback() -> None:
    if os.environ.get("PENTAD_TRACEBACK", "") not in ("", "0"):
        traceback.print_exc()
