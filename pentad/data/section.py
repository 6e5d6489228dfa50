"""The keys of the blocks `train_dataset` and `valid_dataset`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qsl, urlencode

from pydantic import ConfigDict, Field

from pentad.core.section import Count, Section

VERIFIERS = "verifiers"
"""A kind of names, and the column of their rows that has a task as JSON."""
MADE = ("reasoning_gym:", f"{VERIFIERS}:")


def is_made(path: str) -> bool:
    """Whether a package generates the rows, so that the path is no file."""
    return path.startswith(MADE)


def with_absolute_python(spec: str) -> str:
    """Makes the path of an environment absolute, for a process with another working folder."""
    head, _, query = spec.partition("?")
    options = dict(parse_qsl(query))
    if "python" not in options:
        return spec
    options["python"] = str(Path(options["python"]).expanduser().absolute())
    return f"{head}?{urlencode(options, safe='/')}"


class TemplateArgs(Section):
    """Arguments of a chat template by the names that the template gives them."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, bool | int | float | str] = Field(init=False)

    @property
    def given(self) -> dict[str, Any]:
        return dict(self.__pydantic_extra__)


class DatasetConfig(Section):
    path: str | None = None
    """File or folder, or rows of the Hugging Face hub: OWNER/NAME:CONFIG:SPLIT, OWNER/NAME:SPLIT or
    a pattern of files, OWNER/NAME:data/train-*.parquet; OWNER/NAME@REVISION:... names a commit. Or
    `reasoning_gym:NAME`, rows that the package reasoning-gym makes, with options as in
    `reasoning_gym:chain_sum?size=500&seed=1`; or `verifiers:ID?python=ENVIRONMENT`, the tasks of
    an environment of verifiers."""
    format: Literal["auto", "jsonl", "parquet", "hf"] = "auto"
    """auto: from the file name; a folder is a saved HF dataset."""
    prompt_key: str = "prompt"
    """Column with the prompt as text."""
    messages_key: str | None = None
    """Column with the prompt as chat messages; replaces `prompt_key`."""
    tools_key: str | None = "tools"
    """Column with the tools that the chat template shows to the policy: a list of JSON schemas in
    OpenAI's format, or the same as JSON text. null: rows have no tools."""
    answer_key: str = "answer"
    """Column that the built-in rewards compare with."""
    response_key: str = "response"
    """Column with the text to train on, for sft."""
    chosen_key: str = "chosen"
    """Column with the preferred answer, for dpo: text, or the messages that follow the prompt. If
    rows have no prompt column, both answers are whole conversations with a common beginning."""
    rejected_key: str = "rejected"
    """Column with the rejected answer, in the same form."""
    label_key: str = "label"
    """Column that says whether the answer in `response_key` is good, for dpo with preference.loss:
    kto: true or false."""
    text_key: str | None = None
    """Column with the text of a document, for pretrain. null: text."""
    chat_template: Literal["auto"] | bool = "auto"
    """Whether the tokenizer's chat template wraps the prompt. auto: for messages only."""
    batch_size: Count = 32
    """Prompts a step (for sft: examples, for pretrain: sequences)."""
    shuffle: bool = True
    """Whether each epoch has its own random order, which depends on `seed`."""
    max_length: Count | None = None
    """Maximum number of prompt tokens (for sft: of all tokens); longer rows are dropped and
    counted. For pretrain: the length of every sequence; null: the model's context; held-out
    sequences have the length of the trained ones."""
    mask_documents: bool = True
    """For pretrain: a token attends only to its own document, not to others packed beside it."""
    limit: Count | None = None
    """Reads only this many rows (for token shards: sequences)."""

    @property
    def uses_chat(self) -> bool:
        """Whether prompts go through the chat template."""
        if self.chat_template == "auto":
            return self.messages_key is not None
        return self.chat_template
