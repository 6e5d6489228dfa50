"""Renders a dataset row to the exact text that the model reads: plain, or by the chat template.

A row that cannot be rendered raises BadRow with the rule; callers add file and line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from jinja2 import TemplateSyntaxError

from pentad.core.errors import Problem, RunError, UserError
from pentad.data.rows import DatasetRows, open_rows
from pentad.data.section import DatasetConfig
from pentad.data.tokenizer import Messages, Tokenizer

TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
"""A tool call in an answer, in the format of Hermes and Qwen templates."""


PICTURES = ("image", "images", "video", "videos", "audio", "audios")
"""Names of columns with images, video or audio."""


class BadRow(ValueError):
    """Raised for an invalid row, with the rule and the remedy."""

    def __init__(self, rule: str, remedy: str = "") -> None:
        self.rule = rule
        self.remedy = remedy
        super().__init__(rule)

    def at(self, where: str) -> Problem:
        return Problem(where, self.rule, self.remedy)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    """A dataset of a run: its block of keys, and values that the run sets."""

    data: DatasetConfig
    key: str = "train_dataset"
    """The name of the block, for errors."""
    environment: str = ""
    """The environment of its prompts, if a run has several."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """The workflow's tools; rendered with every row, before the tools of the row."""
    seed: int = 0
    room: int | None = None
    """Number of tokens available in the model's context; None: no limit."""
    streaming: bool = False
    """Whether prompts are read only when they are needed."""
    first: int | None = None
    """Number of rows that a plan reads; None: all."""

    @property
    def path(self) -> str:
        if self.data.path is None:
            raise RunError(f"{self.key}.path is not set, and the config was not checked for it")
        return self.data.path

    @property
    def max_tokens(self) -> int | None:
        """Length limit: longer prompts or examples are left out and counted."""
        given = (self.data.max_length, self.room)
        return min((limit for limit in given if limit is not None), default=None)

    @property
    def limit(self) -> int | None:
        """Maximum number of rows to read."""
        given = (self.data.limit, self.first)
        return min((limit for limit in given if limit is not None), default=None)

    def is_cut(self, num_rows: int) -> bool:
        """Whether rows beyond the `num_rows` read ones may exist, because `first` was reached."""
        return self.first == num_rows and self.data.limit != num_rows

    def open(self, *, streaming: bool) -> DatasetRows:
        data, key = self.data, f"{self.key}.path"
        streaming = streaming or self.first is not None
        return open_rows(
            self.path, format=data.format, streaming=streaming, limit=self.limit, key=key
        )


def check_source(source: DataSource, tokenizer: Tokenizer) -> None:
    """Raises UserError for problems that do not depend on the rows."""
    where = f"{source.key}.chat_template = {str(source.data.chat_template).lower()}"
    if source.data.messages_key is not None and not source.data.uses_chat:
        rule = f"messages ({source.key}.messages_key = {source.data.messages_key}) need a template"
        raise UserError(Problem(where, rule, "set it to auto, or name a text column"))
    if source.data.uses_chat and not tokenizer.has_chat_template:
        rule = f"the tokenizer in {tokenizer.folder} has no chat template"
        remedy = "add chat_template.jinja to that folder, or train on plain text"
        raise UserError(Problem(where, rule, remedy))
    if source.data.uses_chat:
        check_template(tokenizer)
    if source.tools:
        check_workflow_tools(source, tokenizer)


def check_workflow_tools(source: DataSource, tokenizer: Tokenizer) -> None:
    names = ", ".join(map(name_of, source.tools))
    describe = "describe them in the prompt and give the workflow no tools"
    if not source.data.uses_chat:
        where = f"{source.key}.chat_template = {str(source.data.chat_template).lower()}"
        rule = f"the workflow has tools ({names}), which only the chat template can render"
        raise UserError(Problem(where, rule, f"set it to true, or {describe}"))
    try:
        hidden = hidden_tools([{"role": "user", "content": "."}], tokenizer, source.tools)
    except BadRow:
        return  # the template may still accept the rows
    if hidden:
        where = f"tokenizer in {tokenizer.folder}"
        rule = f"its chat template does not show tools, and the workflow has {names}"
        raise UserError(Problem(where, rule, f"use a template that shows them, or {describe}"))


def plain_note(source: DataSource, tokenizer: Tokenizer) -> str | None:
    """A note if prompts for a chat model are plain text and no key requests that; else None."""
    data, key = source.data, source.key
    if data.chat_template != "auto" or data.uses_chat or not tokenizer.has_chat_template:
        return None
    return (
        f"{key}.chat_template = auto: texts of {data.prompt_key} are used as they are, "
        f"without the tokenizer's chat template; {key}.chat_template=true applies it"
    )


def check_template(tokenizer: Tokenizer) -> None:
    """Raises UserError if the chat template cannot be compiled."""
    try:
        tokenizer.render([{"role": "user", "content": "."}], for_answer=True)
    except TemplateSyntaxError as error:
        rule = f"its chat template does not compile: {error.message} (line {error.lineno})"
        remedy = "fix chat_template.jinja, or chat_template in tokenizer_config.json"
        raise UserError(Problem(f"tokenizer in {tokenizer.folder}", rule, remedy)) from error
    except UserError:
        raise
    except Exception:  # a template may raise anything
        return  # the template may still accept the rows


def render_prompt(row: Mapping[str, Any], source: DataSource, tokenizer: Tokenizer) -> str:
    """Renders the text up to the start of the answer."""
    if not source.data.uses_chat:
        return text_of(row, source.data.prompt_key, source)
    messages = prompt_messages(row, source)
    if messages[-1]["role"] == "assistant":
        rule = "the last message is the assistant's, so there is nothing to answer"
        raise BadRow(rule, "end the prompt with a user's (or tool's) message")
    tools = shown_tools(row, messages, source, tokenizer)
    return render(messages, tokenizer, for_answer=True, tools=tools)


def encode_prompts(
    texts: Sequence[str], source: DataSource, tokenizer: Tokenizer
) -> list[list[int]]:
    """Tokenises rendered prompts. The tokenizer's prefix is added to plain text only, unless the
    text already starts with it; chat templates write it themselves."""
    return [
        [*prefix_of(text, source, tokenizer), *ids]
        for text, ids in zip(texts, tokenizer.encode_all(texts), strict=True)
    ]


def prefix_of(text: str, source: DataSource, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids to put before those of a text; empty if the text has them already."""
    is_there = source.data.uses_chat or prefix_warning(text, source, tokenizer) is not None
    return () if is_there else tokenizer.prefix_ids


def prefix_warning(text: str, source: DataSource, tokenizer: Tokenizer) -> str | None:
    """A warning if plain text already starts with the tokenizer's prefix; else None."""
    prefix = tokenizer.prefix_text
    if source.data.uses_chat or not prefix or not text.startswith(prefix):
        return None
    key, name = source.key, source.data.prompt_key
    return (
        f"{key}.{name}: texts begin with {prefix}, which the tokenizer adds; it is "
        f"not added again. Chats are better given as messages, with {key}.messages_key"
    )


def prompt_messages(row: Mapping[str, Any], source: DataSource) -> Messages:
    if source.data.messages_key is not None:
        return messages_of(row, source.data.messages_key, source)
    return [{"role": "user", "content": text_of(row, source.data.prompt_key, source)}]


def render(
    messages: Messages,
    tokenizer: Tokenizer,
    *,
    for_answer: bool,
    tools: Messages = (),
    template_args: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    try:
        return whole_text(
            tokenizer.render(
                messages, for_answer=for_answer, tools=tools, template_args=template_args
            )
        )
    except (BadRow, UserError):
        raise
    except Exception as error:  # a template may raise anything
        raise BadRow(f"the chat template rejects it: {error}") from error


def refuse_pictures(row: Mapping[str, Any], source: DataSource) -> None:
    """Raises BadRow for a row with images, video or audio, which a policy cannot read."""
    found = next((name for name in PICTURES if row.get(name)), None)
    if found is not None:
        rule = f'it has "{found}", and models are trained on text only'
        raise BadRow(rule, f"remove the column, or the row, from {source.key}.path")


def text_of(row: Mapping[str, Any], name: str, source: DataSource) -> str:
    refuse_pictures(row, source)
    value = column_of(row, name, source)
    if not isinstance(value, str):
        kind = type(value).__name__
        looks_like_chat = isinstance(value, list) and value and isinstance(value[0], dict)
        remedy = f"set {source.key}.messages_key: {name}" if looks_like_chat else ""
        raise BadRow(f'"{name}" holds a {kind}, not text', remedy)
    return whole_text(value)


def whole_text(text: str) -> str:
    """Returns the text; BadRow if it has an unpaired surrogate, which JSON allows and tokenizers
    reject."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        rule = f"character {error.start + 1} is half of a surrogate pair, which is not text"
        raise BadRow(rule) from error
    return text


def messages_of(row: Mapping[str, Any], name: str, source: DataSource) -> Messages:
    refuse_pictures(row, source)
    value = column_of(row, name, source)
    if not isinstance(value, list) or not value:
        raise BadRow(f'"{name}" is not a list of messages')
    messages = []
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRow(f'message {number} of "{name}" is not an object with "role"')
        if message.get("content") is None and not message.get("tool_calls"):
            raise BadRow(f'message {number} of "{name}" has no "content"')
        parts = message.get("content")
        for part in parts if isinstance(parts, list) else ():
            if not isinstance(part, dict) or part.get("type", "text") != "text":
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                rule = f'message {number} of "{name}" has a part of type {kind}'
                raise BadRow(f"{rule}, and models are trained on text only")
        # Columnar files store null for keys of other rows, but templates test for presence.
        messages.append({key: item for key, item in message.items() if item is not None})
    return messages


def column_of(row: Mapping[str, Any], name: str, source: DataSource) -> Any:
    if name not in row:
        has = ", ".join(sorted(row)) or "nothing"
        kinds = [kind for kind, column in source.data if kind.endswith("_key") and column == name]
        remedy = f"set {' or '.join(f'{source.key}.{kind}' for kind in kinds)} to a column it has"
        raise BadRow(f'there is no "{name}"; the row has {has}', remedy)
    return row[name]


# Tools.


def shown_tools(
    row: Mapping[str, Any], messages: Messages, source: DataSource, tokenizer: Tokenizer
) -> Messages:
    """The tools to render with `messages`, the messages before the first answer: the workflow's,
    then the row's. BadRow if the template would omit one."""
    tools = [*source.tools, *row_tools(row, source)]
    names = [name_of(tool) for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise BadRow(f'the tool "{twice}" is given twice', "give every tool a unique name")
    if hidden := hidden_tools(messages, tokenizer, tools):
        shown = ", ".join(hidden)
        rule = f"the chat template in {tokenizer.folder} does not show the row's tools ({shown})"
        remedy = f"use a template that shows them, or set {source.key}.tools_key: null"
        raise BadRow(rule, remedy)
    return tools


def row_tools(row: Mapping[str, Any], source: DataSource) -> list[dict[str, Any]]:
    value = row.get(source.data.tools_key) if source.data.tools_key is not None else None
    if not value:
        return []
    try:
        # Columnar files store null for keys of other tools.
        tools = json.loads(value) if isinstance(value, str) else without_nulls(value)
    except (ValueError, RecursionError) as error:
        raise BadRow(f'"{source.data.tools_key}" is text that is not JSON ({error})') from error
    if not isinstance(tools, list) or not all(map(is_tool, tools)):
        rule = f'"{source.data.tools_key}" is not a list of objects with type = function and a'
        remedy = f"set {source.key}.tools_key: null if the column means something else"
        raise BadRow(f"{rule} named function", remedy)
    return tools


def tools_warning(row: Mapping[str, Any], source: DataSource) -> str | None:
    """A warning if a plain-text row has tools, which are not shown to the policy; else None."""
    name = source.data.tools_key
    if source.data.uses_chat or name is None or not row.get(name):
        return None
    return (
        f"{source.key}: rows have {name}, which plain text does not show to the policy; set "
        f"{source.key}.chat_template: true, or {source.key}.tools_key: null"
    )


def is_tool(tool: object) -> bool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    is_named = isinstance(function, Mapping) and isinstance(function.get("name"), str)
    return is_named and isinstance(tool, Mapping) and tool.get("type") == "function"


def name_of(tool: Mapping[str, Any]) -> str:
    return str(tool["function"]["name"])


def hidden_tools(messages: Messages, tokenizer: Tokenizer, tools: Messages) -> list[str]:
    """Names of tools that the template omits, tested by rendering each under a unique name."""
    if not tools:
        return []
    marks = [f"pentad-tool-{number}-" for number in range(len(tools))]
    marked = [
        {**tool, "function": {**tool["function"], "name": mark}}
        for tool, mark in zip(tools, marks, strict=True)
    ]
    text = render(messages, tokenizer, for_answer=True, tools=marked)
    return [name_of(tool) for tool, mark in zip(tools, marks, strict=True) if mark not in text]


def without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value
