"""The workflow of an environment class: each episode has its object in a separate process.

An answer of the policy contains calls of the object's tools, in the format of ToolEnvironment, or
is the text of a step. A call that hangs or kills its process ends only that episode.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any
from urllib.parse import parse_qsl

from pentad.core.errors import DataFailure, InfraFailure, Problem, UserError, one_line
from pentad.core.specs import absolute
from pentad.core.types import Prompt
from pentad.data.tokenizer import rendered
from pentad.rollout import environment_host
from pentad.rollout.environment_host import TEXT
from pentad.rollout.environments import Environment, Step, results_of
from pentad.rollout.transcript import Talk
from pentad.rollout.workflows import Context, EpisodeOver, MultiTurn, OwnPrompts
from pentad.runtime.frames import BadFrame, receive, send
from pentad.runtime.process import Child, python_command
from pentad.runtime.wire import Connection

START_TIMEOUT_S = 60.0
"""Time limit for importing the class and making its first object, in seconds."""
PART = "environment"
"""Name of the reward part if the reward is a single number."""
ADAPTERS = {
    "gym": ("pentad.rollout.gym_environment:GymEnvironment", "gym"),
    "mcp": ("pentad.rollout.mcp_environment:McpEnvironment", "mcp"),
    "openenv": ("pentad.rollout.openenv_environment:OpenEnvEnvironment", "openenv"),
}
"""Kind of workflow -> its class, and the extra that it requires."""


class EnvironmentDied(Exception):
    """The process of an environment exited unexpectedly."""


class EnvironmentProcesses:
    """Starts and connects to the processes of one class. They end with this process."""

    def __init__(self, key: str, spec: str, options: Mapping[str, Any]) -> None:
        self.key = key
        self.spec = absolute(spec)
        self.options = dict(options)
        self.child: Child | None = None
        self.control: socket.socket | None = None
        self.lock = threading.Lock()

    def connect(self) -> socket.socket:
        """Returns our end of a new episode's socket; thread-safe. UserError if the class cannot be
        imported."""
        with self.lock:
            if self.child is None or not self.child.is_running:
                self._start()
            assert self.control is not None, "it has started"
            ours, theirs = socket.socketpair()
            with theirs:
                socket.send_fds(self.control, [b"+"], [theirs.fileno()])
            return ours

    def _start(self) -> None:
        if sys.platform != "linux":
            rule = f"environments run in processes that need Linux, and this is {sys.platform}"
            raise UserError(Problem(self.key, rule, "run it on Linux"))
        self.close()
        given = {"spec": self.spec, "options": self.options}
        command = python_command(environment_host.__name__, given)
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        self.child, self.control = Child.connected(command, environment=environment)
        weakref.finalize(self, self.child.end)
        what = f"the process that imports {self.spec}"
        said = read_value(self.control, what, START_TIMEOUT_S)
        if "error" in said:
            self.close()
            raise UserError(Problem(self.key, f"it cannot be imported ({shown(said)})"))

    def describe(self) -> dict[str, Any]:
        """Makes an object, reads its description, and ends it. Raises UserError."""
        with self.connect() as ours:
            asked = {"seed": 0, "fields": "{}"}
            send(ours, {"call": 0, "method": "describe", "arguments": asked})
            said = json.loads(read_value(ours, f"an object of {self.spec}", START_TIMEOUT_S))
        if "error" in said:
            raise UserError(Problem(self.key, f"it cannot be made ({shown(said)})"))
        return dict(said["value"])

    def close(self) -> None:
        child, self.child = self.child, None
        if child is not None:
            child.end()
        if self.control is not None:
            self.control.close()
            self.control = None


def read_value(connection: socket.socket, what: str, timeout_s: float) -> Any:
    """Returns the value of the first message of a process. Raises UserError if there is none."""
    connection.settimeout(timeout_s)
    try:
        [item] = receive(connection)
        return item["value"]
    except TimeoutError as error:
        raise UserError(Problem(what, f"gave no answer within {timeout_s:g} s")) from error
    except (EOFError, OSError) as error:
        raise UserError(Problem(what, "ended before it answered", "its output is above")) from error
    except (BadFrame, LookupError, ValueError) as error:
        rule = "wrote to the descriptor of its connection, which belongs to Pentad"
        raise UserError(Problem(what, rule)) from error


def shown(said: Mapping[str, Any]) -> str:
    place = f"; {said['place']}" if said.get("place") else ""
    return one_line(f"{said['error']}{place}", 500)


class HostedEnvironment:
    """An environment object in its process, with the interface for `MultiTurn`."""

    def __init__(
        self, processes: EnvironmentProcesses, facts: Mapping[str, Any], timeout_s: float, seed: int
    ) -> None:
        self.processes = processes
        self.facts = facts
        self.timeout_s = timeout_s
        self.seed = seed
        self.names = [tool["function"]["name"] for tool in facts["tools"]]
        self.connection: Connection | None = None

    async def reset(self, fields: Mapping[str, Any]) -> str | None:
        """Starts an episode; returns the text that the environment adds to the prompt."""
        ours = await asyncio.to_thread(self.processes.connect)
        streams = await asyncio.open_unix_connection(sock=ours)
        self.connection = Connection(self.processes.key, *streams, generation=0)
        missing = sorted(set(self.facts["needs"]) - fields.keys())
        if missing:
            rule = f"reset takes {missing[0]!r}, and a row has no such column"
            remedy = f"it has {', '.join(sorted(fields))}"
            raise UserError(Problem(self.processes.key, rule, remedy))
        said: str | None = await self._ask("reset", fields=dict(fields))
        return said

    async def step(self, text: str) -> Step:
        if self.facts["kind"] == TEXT:
            said = await self._ask("step", text=text)
            return Step(said["observation"], said["is_done"], {PART: said["reward"]})
        results = await results_of(text, self.names, self._call)
        return Step(None, is_done=True) if results is None else Step(tuple(results), is_done=False)

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        answer = await self._said("tool", name=name, arguments=arguments)
        return answer["value"] if "error" not in answer else f"error: {answer['error']}"

    async def end(self) -> dict[str, Any]:
        found: dict[str, Any] = await self._ask("end")
        return found

    async def close(self) -> None:
        if self.connection is not None:
            await self.connection.close()

    async def _ask(self, call: str, **fields: Any) -> Any:
        answer = await self._said(call, **fields)
        if "error" in answer:
            raise RuntimeError(f"{call} of {self.processes.spec}: {shown(answer)}")
        return answer["value"]

    async def _said(self, call: str, **fields: Any) -> dict[str, Any]:
        assert self.connection is not None, "reset comes first"
        what = f"{fields.get('name', call)} of {self.processes.spec}"
        given = json.dumps(fields, default=str)
        try:
            async with asyncio.timeout(self.timeout_s):
                said = await self.connection.call(call, seed=self.seed, fields=given)
            return dict(json.loads(said))
        except TimeoutError as error:
            rule = f"{what} took longer than rollout.tool_timeout_s = {self.timeout_s:g}"
            raise EpisodeOver("tool_timeout", rule) from error
        except InfraFailure as error:
            raise EnvironmentDied(f"{what} ended its process") from error
        except Exception as error:  # what its process sends is not trusted to be an answer of ours
            raise EnvironmentDied(f"{what} sent no answer ({error})") from error


class EnvironmentWorkflow(MultiTurn, OwnPrompts):
    """The workflow of n conversations with objects of one class."""

    def __init__(self, key: str, spec: str, options: Mapping[str, Any] | None = None) -> None:
        self.processes = EnvironmentProcesses(key, spec, options or {})
        try:
            facts = self.facts = self.processes.describe()
        except UserError:
            self.close()
            raise
        super().__init__(self._unmade, role="user" if facts["kind"] == TEXT else "tool")
        problems = [Problem(key, problem) for problem in facts["problems"]]
        names = [tool["function"]["name"] for tool in facts["tools"]]
        for name in sorted({name for name in names if names.count(name) > 1}):
            problems.append(Problem(key, f"two of its tools have the name {name}"))
        if not names and not problems and facts["kind"] != TEXT:
            remedy = "public methods with types and docstrings are its tools"
            problems.append(Problem(key, "it has no tools", remedy))
        if problems:
            self.close()
            raise UserError(problems)

    def _unmade(self) -> Environment:
        raise AssertionError("objects are made in separate processes")

    @cached_property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        return list(self.facts["tools"])

    def make(self, context: Context, seed: int) -> HostedEnvironment:
        return HostedEnvironment(self.processes, self.facts, context.tool_timeout_s, seed)

    async def begin(self, environment: Environment, prompt: Prompt, context: Context) -> Prompt:
        assert isinstance(environment, HostedEnvironment), "make() made it"
        said = await environment.reset(prompt.fields)
        if not said:
            return prompt
        opening = with_more(prompt, said, self.tools, context)
        if context.room(len(opening.ids)) == 0:
            detail = f"prompt {prompt.gid} has {len(opening.ids)} tokens with what reset said"
            raise DataFailure("too_long", f"{detail}, a sample may have {context.max_total_tokens}")
        return opening

    async def finish(self, environment: Environment, talk: Talk, context: Context) -> None:
        assert isinstance(environment, HostedEnvironment), "make() made it"
        found = await environment.end()
        talk.environment, reward = found["state"], found["reward"]
        if context.has_scorer and not self.facts["has_method"]:
            return  # the reward function may read the attribute `reward`
        if isinstance(reward, dict):
            talk.parts |= reward
        elif reward is not None:
            talk.parts[PART] = reward

    def close(self) -> None:
        self.processes.close()


def with_more(
    prompt: Prompt, said: str, tools: Sequence[Mapping[str, Any]], context: Context
) -> Prompt:
    """Returns the prompt with the text of `reset` appended to its last message."""
    tokenizer = context.tokenizer
    messages = [dict(message) for message in prompt.messages]

    def text() -> str:
        given = list(tools) or None
        return rendered(tokenizer, messages, tools=given, add_generation_prompt=True)

    if not messages or messages[-1]["content"] == prompt.text:
        ids = (*prompt.ids, *tokenizer.encode(said, add_special_tokens=False))
        return replace(prompt, ids=ids, text=f"{prompt.text}{said}")
    if text() != prompt.text:
        rule = "what reset returns cannot be put into the prompt, which another template rendered"
        raise UserError(Problem("rollout.workflow", rule, "return None, and give it by the row"))
    messages[-1] = {**messages[-1], "content": f"{messages[-1]['content']}{said}"}
    ids = tuple(tokenizer.encode(text(), add_special_tokens=False))
    return replace(prompt, ids=ids, text=text(), messages=tuple(messages))


def load_environment(kind: str, rest: str) -> EnvironmentWorkflow:
    """Loads `class:FILE:Class`, or a kind of ADAPTERS with its argument after the colon, where
    options may follow a `?`, as in URLs."""
    key = f"rollout.workflow = {kind}:{rest}"
    if kind == "class":
        return EnvironmentWorkflow(key, rest)
    spec, extra = ADAPTERS[kind]
    target, _, query = rest.partition("?") if kind == "gym" else (rest, "", "")
    options = {name: plain(value) for name, value in parse_qsl(query)}
    try:
        return EnvironmentWorkflow(key, spec, {"target": target, **options})
    except UserError as error:
        if "No module named" in str(error):
            remedy = f"Install it with pip install 'pentad[{extra}]'."
            raise UserError([*error.problems, remedy]) from error
        raise


def plain(text: str) -> Any:
    """Returns the value of an option: JSON if it parses, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
