"""The processes of environments: one that imports the class, and a fork of it per episode.

The first process (`main`) receives one end of a socket pair for each episode over its control
socket, and forks; the fork makes the object and answers the calls of a `runtime.wire.Connection` in
its main thread, outside of an event loop, which classes may need. The first process watches the
same socket: when the run closes its end, it kills the fork with all processes that the environment
started.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import math
import os
import resource
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from numbers import Real
from typing import Any, NoReturn

from pentad.core.seeds import seed_globals
from pentad.core.specs import accepted, load, why_not_loaded
from pentad.rollout.schemas import schema_of
from pentad.runtime.frames import receive, send
from pentad.runtime.process import die_with_parent

MAX_TEXT = 32_768
"""Maximum characters of an observation or a tool's result; a note tells the policy how many are
omitted."""
MAX_STATE_BYTES = 65_536
"""Maximum JSON size of an attribute passed to a reward; larger ones are omitted."""
NOT_TOOLS = ("reset", "get_reward", "close")
TOOLS, TEXT = "tools", "text"
"""How the environment receives an answer: as calls of its tools, or as the text of a step."""


class EnvironmentObject:
    """Adapter of an environment object to the calls of the run.

    A class has `reset(**row)`, and its public methods are tools (TRL's contract). Adapters of other
    packages have `step_text(text)` instead, or `tool_schemas()` and `call_tool(name, arguments)`.
    """

    def __init__(self, make: Callable[..., Any], options: dict[str, Any]) -> None:
        self.loop = asyncio.new_event_loop()
        self.environment = make(**options)
        self.own_call = getattr(self.environment, "call_tool", None)

    def settled(self, value: Any) -> Any:
        return self.loop.run_until_complete(value) if inspect.isawaitable(value) else value

    def describe(self) -> dict[str, Any]:
        """Describes a class before a run starts; `problems`: errors of its methods."""
        if not callable(getattr(self.environment, "reset", None)):
            raise TypeError("it has no method reset(**row)")
        kind = TEXT if hasattr(self.environment, "step_text") else TOOLS
        tools, problems = ([], []) if kind == TEXT else self._tools()
        parameters = inspect.signature(self.environment.reset).parameters.values()
        has_method = kind == TEXT or callable(getattr(self.environment, "get_reward", None))
        return {
            "kind": kind,
            "tools": tools,
            "problems": problems,
            "needs": [
                p.name
                for p in parameters
                if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
            ],
            "has_method": has_method,
            "has_reward": has_method or self._names_reward(),
        }

    def _tools(self) -> tuple[list[dict[str, Any]], list[str]]:
        if self.own_call is not None:
            return self.settled(self.environment.tool_schemas()), []
        schemas, problems = [], []
        for name in self._methods():
            try:
                schemas.append(schema_of(getattr(self.environment, name), strict=True))
            except ValueError as error:
                problems.append(f"method {name}: {error}")
        return schemas, problems

    def _names_reward(self) -> bool:
        """Whether there is an attribute `reward`, or a method that may set it."""
        if isinstance(getattr(self.environment, "reward", None), Real):
            return True
        found = inspect.getmembers(type(self.environment), predicate=inspect.isfunction)
        return any("reward" in function.__code__.co_names for _, function in found)

    def _methods(self) -> list[str]:
        found = inspect.getmembers(type(self.environment), predicate=inspect.isfunction)
        return [n for n, _ in found if n not in NOT_TOOLS and not n.startswith("_")]

    def reset(self, fields: dict[str, Any]) -> str | None:
        reset = self.environment.reset
        said = self.settled(reset(**accepted(reset, fields)))
        if said is not None and not isinstance(said, str):
            raise TypeError(f"reset returned {type(said).__name__}, not text or None")
        return None if said is None else bounded(said)

    def tool(self, name: str, arguments: dict[str, Any]) -> str:
        if self.own_call is not None:
            return bounded(str(self.settled(self.own_call(name, arguments))))
        return bounded(str(self.settled(getattr(self.environment, name)(**arguments))))

    def step(self, text: str) -> dict[str, Any]:
        said, reward, is_done = self.settled(self.environment.step_text(text))
        said = None if said is None else bounded(said)
        return {"observation": said, "reward": number(reward), "is_done": bool(is_done)}

    def end(self) -> dict[str, Any]:
        """Ends the episode after the last answer; returns the reward (a number or named parts) and
        the attributes."""
        environment = self.environment
        if callable(get_reward := getattr(environment, "get_reward", None)):
            reward = self.settled(get_reward())
        else:
            reward = getattr(environment, "reward", None)
        if isinstance(reward, dict):
            reward = {str(name): number(value) for name, value in reward.items()}
        elif reward is not None:
            reward = number(reward)
        return {"reward": reward, "state": state_of(environment)}

    def close(self) -> None:
        if callable(close := getattr(self.environment, "close", None)):
            self.settled(close())


def number(value: Any) -> float:
    if not isinstance(value, Real) or not math.isfinite(value):
        raise TypeError(f"the reward is {value!r:.80}, not a finite number")
    return float(value)


def bounded(text: str) -> str:
    text = text.encode(errors="replace").decode()
    if len(text) <= MAX_TEXT:
        return text
    return f"{text[:MAX_TEXT]}\n[{len(text)} characters, the first {MAX_TEXT} are shown]"


def state_of(environment: Any) -> dict[str, Any]:
    """Returns public attributes that are plain data, for rewards that use the environment."""
    found: dict[str, Any] = {}
    num_left = MAX_STATE_BYTES
    for name, value in getattr(environment, "__dict__", {}).items():
        with contextlib.suppress(TypeError, ValueError, RecursionError):  # not plain data
            size = len(json.dumps(value, allow_nan=False))
            if not name.startswith("_") and size <= num_left:
                found[name] = value
                num_left -= size
    return found


def serve(connection: socket.socket, spec: str, options: dict[str, Any]) -> None:
    """Serves the calls of one episode; the first call makes the object. Values of the policy and of
    the class are JSON texts, so that no name in them has a meaning in a frame."""
    hosted: EnvironmentObject | None = None
    with contextlib.suppress(EOFError):
        while True:
            for asked in receive(connection):
                if "call" not in asked:  # a cancelled call ends with this process
                    continue
                given = asked["arguments"]
                try:
                    if hosted is None:
                        seed_globals(given["seed"])
                        hosted = EnvironmentObject(load(spec), options)
                    fields = json.loads(given["fields"])
                    answer = {"value": getattr(hosted, asked["method"])(**fields)}
                except BaseException as error:  # exit() in a tool counts as an error of the tool
                    answer = {"error": f"{type(error).__name__}: {error}"[:MAX_TEXT]}
                    answer["place"] = place_of(error)
                send(connection, {"answer": asked["call"], "value": json.dumps(answer)})


def place_of(error: BaseException) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    return f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else ""


class Nursery:
    """Forks a process for each episode's connection, and kills it when the connection closes."""

    def __init__(self, control: socket.socket, spec: str, options: dict[str, Any]) -> None:
        self.control, self.spec, self.options = control, spec, options
        self.epoll = select.epoll()
        self.epoll.register(control.fileno(), select.EPOLLIN)
        self.episodes: dict[int, tuple[int, int, socket.socket]] = {}
        """Descriptor of a process or of a connection -> pid, the process's descriptor, and the
        connection."""

    def run(self) -> None:
        """Runs until the run closes its connection."""
        control = self.control.fileno()
        while True:
            ready = [descriptor for descriptor, _ in self.epoll.poll()]
            for descriptor in ready:  # first: a new episode may reuse a descriptor closed here
                if descriptor != control:
                    self._end(descriptor)
            if control in ready and not self._begin():
                for one in list(self.episodes):
                    self._end(one)
                return

    def _begin(self) -> bool:
        _, descriptors, _, _ = socket.recv_fds(self.control, 1, 1)
        if not descriptors:
            return False
        connection = socket.socket(fileno=descriptors[0])
        pid = os.fork()
        if pid == 0:
            self._work(connection)
        watched = os.pidfd_open(pid)
        self.epoll.register(watched, select.EPOLLIN)
        self.epoll.register(connection.fileno(), select.EPOLLRDHUP)
        episode = (pid, watched, connection)
        self.episodes |= {watched: episode, connection.fileno(): episode}
        return True

    def _work(self, connection: socket.socket) -> NoReturn:
        """Runs in the fork, in a new session, so that all processes it starts are killed with
        it."""
        os.setsid()
        die_with_parent(os.getppid())
        self.epoll.close()
        self.control.close()
        for _, descriptor, other in {id(one): one for one in self.episodes.values()}.values():
            os.close(descriptor)
            other.close()
        code = 1
        try:
            serve(connection, self.spec, self.options)
            code = 0
        finally:
            os._exit(code)

    def _end(self, descriptor: int) -> None:
        """Called when the fork has ended, or its connection is closed."""
        if descriptor not in self.episodes:
            return
        pid, watched, connection = self.episodes[descriptor]
        for one in (watched, connection.fileno()):
            self.epoll.unregister(one)
            del self.episodes[one]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # its session may not exist yet
        os.waitpid(pid, 0)
        os.close(watched)
        connection.close()


def main() -> None:
    """Entry point of the first process: imports the class once."""
    given, (fd, parent) = json.loads(sys.argv[1]), sys.argv[-2:]
    die_with_parent(int(parent))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    control = socket.socket(fileno=int(fd))
    os.set_inheritable(control.fileno(), False)
    os.dup2(2, 1)
    said = {}
    try:
        load(given["spec"])
    except BaseException as error:  # exit() in a module counts as an error of the module
        said = {"error": why_not_loaded(error)}
    send(control, {"event": "ready", "value": said})
    if not said:
        Nursery(control, given["spec"], given["options"]).run()
