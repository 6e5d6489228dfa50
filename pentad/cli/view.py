"""`pentad view`: serves a page over the files of runs, alone or beside a training run."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pentad.cli.recipe import OVERRIDE
from pentad.config.rules.model import uncounted
from pentad.config.schema import Config
from pentad.core.errors import Problem, UserError, raise_problems
from pentad.planner.prepare import prepare
from pentad.planner.remedies import propose
from pentad.runtime.process import NICENESS, Child, bound
from pentad.view.run import find_runs, is_recipe

try:
    from pentad.serve.server import bind, serve
    from pentad.serve.wire import ServeLimits
    from pentad.view.app import RunPages, ViewGuard
except ModuleNotFoundError as error:
    remedy = "pip install 'pentad[serve]'"
    raise UserError(
        Problem("pentad view", f"needs {(error.name or '').partition('.')[0]}", remedy)
    ) from error

PORT = 8700
"""The first port to try if none is given."""
LOOPBACK = "127.0.0.1"
DRAIN_S = 1.0


def run_view(words: list[str], host: str, port: int | None, listener_fd: int | None) -> None:
    """Serves until a signal arrives. `listener_fd`: a listening socket of the parent process."""
    overrides = [word for word in words if OVERRIDE.match(word)]
    given = [Path(word).expanduser().absolute() for word in words if word not in overrides]
    places = given or [Path("runs").absolute()]
    if listener_fd is None:
        check_places(places, overrides)
        listener = listen(host, port)
    else:
        os.nice(NICENESS)
        listener = socket.socket(fileno=listener_fd)
    is_loopback = ipaddress.ip_address(listener.getsockname()[0]).is_loopback
    token = None if is_loopback else secrets.token_urlsafe(16)
    pages = RunPages(places, plan_of, overrides)
    pages.look()
    if listener_fd is None:
        count = "1 run" if len(pages.runs) == 1 else f"{len(pages.runs)} runs"
        print(f"{count} found at {', '.join(map(str, places))}")
        print(describe_address(listener, token), flush=True)
    asyncio.run(until_signal(ViewGuard(pages.app(), token=token, hosts=[host]), listener))


def check_places(places: list[Path], overrides: Sequence[str] = ()) -> None:
    """Checks that every path contains a run, or is a recipe that can be planned; reports all
    problems at once."""
    problems = []
    for place in places:
        if is_recipe(place):
            try:
                plan_of(place, overrides)
            except UserError as error:
                problems += error.problems
        elif not find_runs([place]):
            what = "is a file" if place.is_file() else "there is no such folder"
            what = "has no run in it" if place.is_dir() else what
            remedy = "give a run's folder, one with runs in it, or start one: pentad demo"
            problems.append(Problem(f"run = {place}", what, remedy))
    if overrides and not any(map(is_recipe, places)):
        where, remedy = " ".join(overrides), "name it: pentad view recipe.yaml key=value"
        problems.append(Problem(where, "overrides need a recipe, and none is given", remedy))
    raise_problems(problems)


def listen(host: str, port: int | None) -> socket.socket:
    """Listens at the given port; without one, at PORT, or at any free port if PORT is in use."""
    if port is not None:
        return bind(host, port)
    try:
        return bind(host, PORT)
    except UserError:
        return bind(host, 0)


def describe_address(listener: socket.socket, token: str | None) -> str:
    """The address of the page; over SSH also the command that forwards it."""
    host, port = listener.getsockname()[:2]
    is_any = host in ("0.0.0.0", "::")
    shown = os.uname().nodename if is_any else f"[{host}]" if ":" in host else host
    text = f"page: http://{shown}:{port}/" + (f"?token={token}" if token else "")
    if token is None and "SSH_CONNECTION" in os.environ:
        text += f"\nfrom your own machine: ssh -L {port}:{host}:{port} {os.uname().nodename}"
    return text


async def until_signal(app: ViewGuard, listener: socket.socket) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await serve(app, listener, ServeLimits(), stop=stop, drain_s=DRAIN_S, on_ready=lambda: None)


def plan_of(recipe: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The plan of a recipe or of a run's config: for this machine if no GPUs are needed, else for
    GPUs with the memory found here or set by the recipe."""
    from pentad.cli.plan import as_dict, make_plan

    config, notes = prepare(recipe, list(overrides), "plan")
    if reason := uncounted(config):
        raise UserError(reason)
    plan = make_plan(config, notes, None)
    return as_dict(plan, propose(plan))


def view_beside(config: Config) -> Child:
    """Serves the page of a run in a child process, before the run starts, and prints its
    address."""
    folder = config.run_path
    listener = listen(LOOPBACK, None)
    print(describe_address(listener, None), flush=True)
    number = listener.fileno()
    program = [sys.executable, "-m", "pentad.cli.main", "view", str(folder)]
    child = Child.start(
        bound([*program, "--listener-fd", str(number)]),
        pass_fds=(number,),
        stdout=subprocess.DEVNULL,
    )
    listener.close()
    return child
