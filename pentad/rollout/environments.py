"""Environments of multi-turn samples, and how their texts become tokens."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pentad.core.errors import DataFailure, InfraFailure, Problem, UserError
from pentad.data.render import TOOL_CALL, is_tool
from pentad.data.tokenizer import rendered
from pentad.rollout.schemas import schema_of


class RolloutTokenizer(Protocol):
    """The part of a transformers tokenizer that rollout uses."""

    chat_template: str | None

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def apply_chat_template(
        self,
        conversation: list[dict[str, str]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
    ) -> Any: ...


@dataclass(frozen=True, slots=True)
class Step:
    """What an environment says to one answer of the policy."""

    observation: str | tuple[str, ...] | None
    """Text shown to the policy before its next answer, or several, a message each; None says
    nothing."""
    is_done: bool
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """Added up by name over the turns; their total is the reward of the sample."""


class Environment(Protocol):
    """The other side of a multi-turn sample. One object serves one sample, then is closed."""

    async def reset(self, fields: Mapping[str, Any]) -> object:
        """Starts an episode with the dataset row of the prompt."""
        ...

    async def step(self, text: str) -> Step: ...

    async def close(self) -> None:
        """Called once, also after a failure or a deadline."""
        ...


ASKED, ANSWERED = "@@asked@@", "@@answered@@"
"""Stand for the conversation so far when what comes after an answer is rendered."""


def observation_ids(
    observations: Sequence[str], role: str, ending_id: int | None, tokenizer: RolloutTokenizer
) -> list[int]:
    """Token ids between two answers: `observations`, rendered as messages of `role`."""
    if tokenizer.chat_template is None:
        return tokenizer.encode("\n".join(observations), add_special_tokens=False)
    messages = [{"role": role, "content": observation} for observation in observations]
    return following_ids(messages, ending_id, tokenizer)


def following_ids(
    messages: Sequence[dict[str, str]], ending_id: int | None, tokenizer: RolloutTokenizer
) -> list[int]:
    """What stands between an answer and the next one: turn end, the messages, turn start.

    Only this suffix is rendered and encoded; the conversation before it stays the ids it is.
    `ending_id` is the stop id the answer already ends with: the template's own copy of it is
    left out.
    """
    conversation = [
        {"role": "user", "content": ASKED},
        {"role": "assistant", "content": ANSWERED},
        *messages,
    ]
    text = rendered(tokenizer, conversation, add_generation_prompt=True)
    _, answered, suffix = text.partition(ANSWERED)
    if not answered:
        where, rule = "chat template", "it does not show the text of an assistant's turn"
        raise UserError(Problem(where, rule, "several turns need a template that does"))
    if ending_id is not None:
        suffix = suffix.removeprefix(tokenizer.decode([ending_id], skip_special_tokens=False))
    return tokenizer.encode(suffix, add_special_tokens=False)


Tool = Callable[..., Awaitable[str]]
"""An async function of keyword arguments that returns what the policy shall read."""
Tools = Mapping[str, Tool] | Sequence[Tool | Mapping[str, Any]]
"""By name, or as functions that have one, or as JSON schemas."""


def tools_of(workflow: object) -> tuple[Mapping[str, Any], ...]:
    """The JSON schemas of the tools that a workflow shows to the policy (its `tools`). Raises
    UserError where they cannot be told."""
    try:
        tools = getattr(workflow, "tools", ())
        named = tools.items() if isinstance(tools, Mapping) else [(None, tool) for tool in tools]
        found = [tool if isinstance(tool, Mapping) else schema_of(tool, n) for n, tool in named]
    except Exception as failure:  # code of the user's
        found, why = [{}], f" ({type(failure).__name__}: {failure})"
    else:
        why = ""
    if not all(map(is_tool, found)):
        where = f"rollout.workflow: tools of {type(workflow).__name__}"
        rule = f"they are neither functions nor JSON schemas of functions{why}"
        remedy = "give them as MultiTurn(tools=[...]), or tools=() where the prompt describes them"
        raise UserError(Problem(where, rule, remedy))
    return tuple(found)


def read_tool_call(call: str, names: Collection[str]) -> tuple[str, dict[str, Any]]:
    """Name and arguments; ValueError with what the policy reads where it is no call of these."""
    try:
        wanted = json.loads(call)
        name, arguments = wanted["name"], wanted["arguments"]
    except (ValueError, KeyError, TypeError, RecursionError):
        name, arguments = None, None
    if name not in names or not isinstance(arguments, dict):
        raise ValueError(f"error: give a name of {sorted(names)} and arguments, as JSON")
    return name, arguments


class ToolEnvironment:
    """Runs the tools an answer calls, in the format of Qwen and Hermes chat templates:

        <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>

    An answer without a call ends the conversation. A call that cannot be read, an unknown tool or
    a tool that raises is shown to the policy as text: dealing with it is part of the task. A tool
    whose own machinery failed raises InfraFailure instead, and the group is tried again.
    """

    def __init__(self, tools: Mapping[str, Tool]) -> None:
        self.tools = tools

    async def reset(self, fields: Mapping[str, Any]) -> None:
        """Tools keep no state of the conversation."""

    async def step(self, text: str) -> Step:
        calls = TOOL_CALL.findall(text)
        if not calls:
            return Step(None, is_done=True)
        return Step("\n".join([await self._run(call) for call in calls]), is_done=False)

    async def close(self) -> None:
        """Nothing is held open."""

    async def _run(self, call: str) -> str:
        try:
            name, arguments = read_tool_call(call, self.tools)
        except ValueError as error:
            return str(error)
        try:
            return await self.tools[name](**arguments)
        except (InfraFailure, DataFailure):
            raise
        except Exception as failure:
            return f"error: {type(failure).__name__}: {failure}"
