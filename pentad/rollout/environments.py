"""Environments of multi-turn samples, and the conversion of their texts to tokens."""

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
    """An environment's response to one answer of the policy."""

    observation: str | tuple[str, ...] | None
    """Text, or several messages, for the policy before its next answer; None adds nothing."""
    is_done: bool
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """Reward parts, summed by name over the turns; their total is the reward of the sample."""


class Environment(Protocol):
    """The environment of a multi-turn sample. An object is used for one sample, then closed."""

    async def reset(self, fields: Mapping[str, Any]) -> object:
        """Starts an episode with the dataset row of the prompt."""
        ...

    async def step(self, text: str) -> Step: ...

    async def close(self) -> None:
        """Called once, also after a failure or at the deadline."""
        ...


ASKED, ANSWERED = "@@asked@@", "@@answered@@"
"""Placeholders for the conversation so far, used to render the messages after an answer."""


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
    """Token ids between an answer and the next: end of turn, the messages, start of turn.

    Renders and encodes only this suffix; the ids of the conversation before it stay unchanged.
    `ending_id`: the stop id at the end of the answer; the template's copy of it is removed.
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
"""An async function of keyword arguments that returns text for the policy."""
RunTool = Callable[[str, dict[str, Any]], Awaitable[str]]
"""Calls a tool by name with its arguments."""
Tools = Mapping[str, Tool] | Sequence[Tool | Mapping[str, Any]]
"""Tools by name, as named functions, or as JSON schemas."""


def tools_of(workflow: object) -> tuple[Mapping[str, Any], ...]:
    """The JSON schemas of the tools that a workflow shows to the policy (its `tools`). UserError if
    a tool has none."""
    try:
        tools = getattr(workflow, "tools", ())
        named = tools.items() if isinstance(tools, Mapping) else [(None, tool) for tool in tools]
        found = [tool if isinstance(tool, Mapping) else schema_of(tool, n) for n, tool in named]
    except Exception as failure:  # user code
        found, why = [{}], f" ({type(failure).__name__}: {failure})"
    else:
        why = ""
    if not all(map(is_tool, found)):
        where = f"rollout.workflow: tools of {type(workflow).__name__}"
        rule = f"they are neither functions nor JSON schemas of functions{why}"
        remedy = "give them as MultiTurn(tools=[...]), or tools=() where the prompt describes them"
        raise UserError(Problem(where, rule, remedy))
    return tuple(found)


async def results_of(text: str, names: Collection[str], run: RunTool) -> list[str] | None:
    """Returns the results of the tool calls in an answer, by `run`; None if it has no call. An
    invalid call gives a text for the policy."""
    found = []
    for call in TOOL_CALL.findall(text):
        try:
            wanted = json.loads(call)
            name, arguments = wanted["name"], wanted["arguments"]
        except (ValueError, KeyError, TypeError, RecursionError):
            name, arguments = None, None
        if not isinstance(name, str) or name not in names or not isinstance(arguments, dict):
            found.append(f"error: give a name of {sorted(names)} and arguments, as JSON")
        else:
            found.append(await run(name, arguments))
    return found or None


def as_text(value: object) -> str:
    """Converts to text that a tokenizer can encode: replaces unpaired surrogates, which JSON may
    contain."""
    return str(value).encode(errors="replace").decode()


class ToolEnvironment:
    """Runs the tools that an answer calls, in the format of Qwen and Hermes chat templates:

    <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>

    An answer without a call ends the conversation. An invalid call, an unknown tool or an error of
    a tool is returned to the policy as text: handling it is part of the task. A tool whose
    infrastructure failed raises InfraFailure instead, and the group is retried.
    """

    def __init__(self, tools: Mapping[str, Tool]) -> None:
        self.tools = tools

    async def reset(self, fields: Mapping[str, Any]) -> None:
        """Tools have no state per conversation."""

    async def step(self, text: str) -> Step:
        results = await results_of(text, self.tools, self._run)
        if results is None:
            return Step(None, is_done=True)
        return Step("\n".join(results), is_done=False)

    async def close(self) -> None:
        """Nothing to close."""

    async def _run(self, name: str, arguments: dict[str, Any]) -> str:
        try:
            return as_text(await self.tools[name](**arguments))
        except (InfraFailure, DataFailure):
            raise
        except Exception as failure:
            return as_text(f"error: {type(failure).__name__}: {failure}")
