"""From a dataset row to the exact text a model sees: plain, or through the chat template, once.

A row that cannot be rendered raises BadRow with the rule it breaks; who knows the file and line
adds them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from jinja2 import TemplateError, TemplateSyntaxError

from pentad.core.errors import Problem, UserError
from pentad.data.rows import DatasetRows, Format, open_rows
from pentad.data.tokenizer import Messages, Tokenizer

ChatTemplate = Literal["auto"] | bool
TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
"""A call of a tool in an answer, as Hermes and Qwen templates have it."""


class BadRow(ValueError):
    """A row that breaks a rule; carries the rule and the remedy."""

    def __init__(self, rule: str, remedy: str = "") -> None:
        self.rule = rule
        self.remedy = remedy
        super().__init__(rule)

    def at(self, where: str) -> Problem:
        return Problem(where, self.rule, self.remedy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Which columns of a row are read, and how."""

    key: str = "train_dataset"
    """The block of the config to name in errors."""
    prompt_key: str = "prompt"
    messages_key: str | None = None
    """Column with chat messages; read instead of the prompt."""
    tools_key: str | None = "tools"
    """Column with the tools of a row, where it has any."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Of the workflow: shown with every row, before those of the row."""
    response_key: str = "response"
    text_key: str | None = None
    """Column with the text of a document; null: text."""
    chat_template: ChatTemplate = "auto"
    """auto: messages go through the tokenizer's chat template, plain text does not."""

    @property
    def uses_chat(self) -> bool:
        if self.chat_template == "auto":
            return self.messages_key is not None
        return self.chat_template


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """Which rows are read, in which order, and what is made of them."""

    path: str
    format: Format = "auto"
    columns: Columns = field(default_factory=Columns)
    shuffle: bool = True
    seed: int = 0
    max_tokens: int | None = None
    """Longer prompts, or examples, are left out and counted."""
    limit: int | None = None
    """Only the first so many rows are read."""
    streaming: bool = False
    """Prompts are read as they are needed."""
    mask_documents: bool = True
    """Of packed sequences: a token sees its own document alone."""

    def open(self, *, streaming: bool) -> DatasetRows:
        key = f"{self.columns.key}.path"
        return open_rows(
            self.path, format=self.format, streaming=streaming, limit=self.limit, key=key
        )


def check_columns(columns: Columns, tokenizer: Tokenizer) -> None:
    """What is wrong whatever the rows are."""
    where = f"{columns.key}.chat_template = {str(columns.chat_template).lower()}"
    if columns.messages_key is not None and not columns.uses_chat:
        rule = f"messages ({columns.key}.messages_key = {columns.messages_key}) need a template"
        raise UserError(Problem(where, rule, "set it to auto, or name a text column"))
    if columns.uses_chat and not tokenizer.has_chat_template:
        rule = f"the tokenizer in {tokenizer.folder} has no chat template"
        remedy = "add chat_template.jinja to that folder, or train on plain text"
        raise UserError(Problem(where, rule, remedy))
    if columns.uses_chat:
        check_template(tokenizer)
    if columns.tools:
        check_workflow_tools(columns, tokenizer)


def check_workflow_tools(columns: Columns, tokenizer: Tokenizer) -> None:
    names = ", ".join(map(name_of, columns.tools))
    describe = "describe them in the prompt and give the workflow no tools"
    if not columns.uses_chat:
        where = f"{columns.key}.chat_template = {str(columns.chat_template).lower()}"
        rule = f"the workflow has tools ({names}), which the chat template alone shows"
        raise UserError(Problem(where, rule, f"set it to true, or {describe}"))
    try:
        hidden = hidden_tools([{"role": "user", "content": "."}], tokenizer, columns.tools)
    except BadRow:
        return  # it has wishes that this conversation does not meet; rows may
    if hidden:
        where = f"tokenizer in {tokenizer.folder}"
        rule = f"its chat template does not show tools, and the workflow has {names}"
        raise UserError(Problem(where, rule, f"use a template that shows them, or {describe}"))


def plain_note(columns: Columns, tokenizer: Tokenizer) -> str | None:
    """A sentence for text that a chat model gets without its template, where no key says so."""
    if columns.chat_template != "auto" or columns.uses_chat or not tokenizer.has_chat_template:
        return None
    return (
        f"{columns.key}.chat_template = auto: texts of {columns.prompt_key} are used as they are, "
        f"without the tokenizer's chat template; {columns.key}.chat_template=true applies it"
    )


def check_template(tokenizer: Tokenizer) -> None:
    """Refuses a template that cannot be compiled, which is no row's fault."""
    try:
        tokenizer.render([{"role": "user", "content": "."}], for_answer=True)
    except TemplateSyntaxError as error:
        rule = f"its chat template does not compile: {error.message} (line {error.lineno})"
        remedy = "mend chat_template.jinja, or chat_template in tokenizer_config.json"
        raise UserError(Problem(f"tokenizer in {tokenizer.folder}", rule, remedy)) from error
    except (TemplateError, TypeError, ValueError, KeyError):
        return  # it has wishes that this conversation does not meet; rows may


def render_prompt(row: Mapping[str, Any], columns: Columns, tokenizer: Tokenizer) -> str:
    """The text up to where the answer begins."""
    if not columns.uses_chat:
        return text_of(row, columns.prompt_key, columns)
    messages = prompt_messages(row, columns)
    if messages[-1]["role"] == "assistant":
        rule = "the last message is the assistant's, so there is nothing to answer"
        raise BadRow(rule, "end the prompt with a user's (or tool's) message")
    tools = shown_tools(row, messages, columns, tokenizer)
    return render(messages, tokenizer, for_answer=True, tools=tools)


def encode_prompts(texts: Sequence[str], columns: Columns, tokenizer: Tokenizer) -> list[list[int]]:
    """Ids as the model expects them: a template brings its own special ids, plain text does not,
    unless it is a template's text already."""
    return [
        [*prefix_of(text, columns, tokenizer), *ids]
        for text, ids in zip(texts, tokenizer.encode_all(texts), strict=True)
    ]


def prefix_of(text: str, columns: Columns, tokenizer: Tokenizer) -> tuple[int, ...]:
    """What comes before the ids of this text."""
    is_there = columns.uses_chat or prefix_warning(text, columns, tokenizer) is not None
    return () if is_there else tokenizer.prefix_ids


def prefix_warning(text: str, columns: Columns, tokenizer: Tokenizer) -> str | None:
    """A sentence for plain text that brings what the tokenizer would put before it."""
    prefix = tokenizer.prefix_text
    if columns.uses_chat or not prefix or not text.startswith(prefix):
        return None
    key = columns.key
    return (
        f"{key}.{columns.prompt_key}: texts begin with {prefix}, which the tokenizer adds; it is "
        f"not added again. Chats are better given as messages, with {key}.messages_key"
    )


def prompt_messages(row: Mapping[str, Any], columns: Columns) -> Messages:
    if columns.messages_key is not None:
        return messages_of(row, columns.messages_key, columns)
    return [{"role": "user", "content": text_of(row, columns.prompt_key, columns)}]


def render(
    messages: Messages, tokenizer: Tokenizer, *, for_answer: bool, tools: Messages = ()
) -> str:
    try:
        return whole_text(tokenizer.render(messages, for_answer=for_answer, tools=tools))
    except (BadRow, UserError):
        raise
    except Exception as error:  # a template may divide by zero, recurse, count too far
        raise BadRow(f"the chat template refuses it: {error}") from error


def text_of(row: Mapping[str, Any], name: str, columns: Columns) -> str:
    value = column_of(row, name, columns)
    if not isinstance(value, str):
        kind = type(value).__name__
        looks_like_chat = isinstance(value, list) and value and isinstance(value[0], dict)
        remedy = f"set {columns.key}.messages_key: {name}" if looks_like_chat else ""
        raise BadRow(f'"{name}" holds a {kind}, not text', remedy)
    return whole_text(value)


def whole_text(text: str) -> str:
    """The text, unless it has half of a surrogate pair, which JSON can write and no tokenizer
    reads."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        rule = f"character {error.start + 1} is half of a surrogate pair, which is no text"
        raise BadRow(rule) from error
    return text


def messages_of(row: Mapping[str, Any], name: str, columns: Columns) -> Messages:
    value = column_of(row, name, columns)
    if not isinstance(value, list) or not value:
        raise BadRow(f'"{name}" is not a list of messages')
    messages = []
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRow(f'message {number} of "{name}" is not an object with "role"')
        if message.get("content") is None and not message.get("tool_calls"):
            raise BadRow(f'message {number} of "{name}" has no "content"')
        # Columnar files fill keys that other rows have with null; templates test for presence.
        messages.append({key: item for key, item in message.items() if item is not None})
    return messages


def column_of(row: Mapping[str, Any], name: str, columns: Columns) -> Any:
    if name not in row:
        has = ", ".join(sorted(row)) or "nothing"
        raise BadRow(f'there is no "{name}"; the row has {has}', f"set {columns.key}.*_key")
    return row[name]


# Tools.


def shown_tools(
    row: Mapping[str, Any], messages: Messages, columns: Columns, tokenizer: Tokenizer
) -> Messages:
    """The tools to render with `messages`, those before the first answer: the workflow's, then the
    row's. Raises BadRow where the template would leave one out."""
    tools = [*columns.tools, *row_tools(row, columns)]
    names = [name_of(tool) for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise BadRow(f'the tool "{twice}" is given twice', "give every tool a name of its own")
    if hidden := hidden_tools(messages, tokenizer, tools):
        shown = ", ".join(hidden)
        rule = f"the chat template in {tokenizer.folder} does not show the row's tools ({shown})"
        remedy = f"use a template that shows them, or set {columns.key}.tools_key: null"
        raise BadRow(rule, remedy)
    return tools


def row_tools(row: Mapping[str, Any], columns: Columns) -> list[dict[str, Any]]:
    value = row.get(columns.tools_key) if columns.tools_key is not None else None
    if not value:
        return []
    try:
        # Columnar files fill keys that other tools have with null.
        tools = json.loads(value) if isinstance(value, str) else without_nulls(value)
    except (ValueError, RecursionError) as error:
        raise BadRow(f'"{columns.tools_key}" is text that is no JSON ({error})') from error
    if not isinstance(tools, list) or not all(map(is_tool, tools)):
        rule = f'"{columns.tools_key}" is no list of objects with type = function and a function'
        remedy = f"set {columns.key}.tools_key: null if the column means something else"
        raise BadRow(f"{rule} that has a name", remedy)
    return tools


def tools_warning(row: Mapping[str, Any], columns: Columns) -> str | None:
    """A sentence for a row of plain text with tools, which nothing shows to the policy."""
    name = columns.tools_key
    if columns.uses_chat or name is None or not row.get(name):
        return None
    return (
        f"{columns.key}: rows have {name}, which plain text does not show to the policy; set "
        f"{columns.key}.chat_template: true, or {columns.key}.tools_key: null"
    )


def is_tool(tool: object) -> bool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    is_named = isinstance(function, Mapping) and isinstance(function.get("name"), str)
    return is_named and isinstance(tool, Mapping) and tool.get("type") == "function"


def name_of(tool: Mapping[str, Any]) -> str:
    return str(tool["function"]["name"])


def hidden_tools(messages: Messages, tokenizer: Tokenizer, tools: Messages) -> list[str]:
    """The names of tools that the template does not show: each is rendered under a name that stands
    nowhere else."""
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
