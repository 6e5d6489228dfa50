"""Preferences as examples: pairs of a preferred and a rejected answer, or labelled answers.

Prompts and answers are rendered and tokenised as for supervised fine-tuning (`data.sft`). Only
tokens of the answer are trained, not earlier answers in the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import takewhile
from typing import Any

import numpy as np
import torch

from pentad.core.types import Row
from pentad.data.render import (
    BadRow,
    DataSource,
    column_of,
    messages_of,
    prompt_messages,
    text_of,
)
from pentad.data.rows import DatasetRows
from pentad.data.sft import SftDataset, TokenisedText
from pentad.data.tokenizer import Messages, Tokenizer


class PairDataset(SftDataset):
    """Pairs: each example has the rows [chosen, rejected]."""

    rows_per_example = 2

    def _example(self, rows: DatasetRows, index: int) -> list[TokenisedText]:
        row, data = rows.row(index), self.source.data
        keys = data.chosen_key, data.rejected_key
        if not data.uses_chat:
            found = [self.texts.plain(row, key) for key in keys]
        else:
            found = [self._answer(row, key) for key in keys]
        if np.array_equal(found[0].ids, found[1].ids):
            raise BadRow(f'"{keys[0]}" and "{keys[1]}" are the same answer', "leave the row out")
        return found

    def _answer(self, row: Mapping[str, Any], key: str) -> TokenisedText:
        prompt, answer = self._split(row, key)
        found = self.texts.chat(row, [*prompt, *answer], num_given=len(prompt))
        if len(found) > 1:
            rule = f'"{key}" has several turns, and the chat template rewrites earlier ones'
            raise BadRow(rule, "give one answer, or a template that keeps earlier turns")
        return found[0]

    def _split(self, row: Mapping[str, Any], key: str) -> tuple[Messages, Messages]:
        """Returns the messages of the prompt and those of the answer in column `key`."""
        source, data = self.source, self.source.data
        if data.messages_key is not None or data.prompt_key in row:
            prompt = prompt_of(row, source)
            value = column_of(row, key, source)
            if isinstance(value, list):
                return prompt, messages_of(row, key, source)
            return prompt, [{"role": "assistant", "content": text_of(row, key, source)}]
        sides = [messages_of(row, name, source) for name in (data.chosen_key, data.rejected_key)]
        shared = takewhile(lambda pair: pair[0] == pair[1], zip(*sides, strict=False))
        num = len(list(shared))
        if not num:
            raise BadRow(
                f'"{data.chosen_key}" and "{data.rejected_key}" have no first message in common',
                f"give the prompt in a separate column, {source.key}.prompt_key",
            )
        whole = messages_of(row, key, source)
        return whole[:num], whole[num:]


class RewardPairDataset(PairDataset):
    """Pairs for a reward model.

    Predictions are aligned with the token they predict, so the reward of an answer, which depends
    on all its tokens, is at one additional last token.
    """

    @property
    def max_row_tokens(self) -> int:
        return super().max_row_tokens + 1

    def example(self, index: int) -> list[Row]:
        return [with_place_for_reward(one.ids) for one in self.examples[index]]


class LabelDataset(PairDataset):
    """Labelled answers: one row per example, and whether the answer is good."""

    rows_per_example = 1

    def __init__(self, rows: DatasetRows, tokenizer: Tokenizer, source: DataSource) -> None:
        self.labels: dict[int, bool] = {}
        """id() of an example's sequence -> label."""
        super().__init__(rows, tokenizer, source)
        self.is_desired = np.array([self.labels[id(one[0])] for one in self.examples])
        self.labels.clear()

    def _example(self, rows: DatasetRows, index: int) -> list[TokenisedText]:
        row, data = rows.row(index), self.source.data
        label = column_of(row, data.label_key, self.source)
        if not isinstance(label, bool | np.bool_):
            rule = f'"{data.label_key}" holds {label!r}'
            raise BadRow(rule, "give true for a good answer, false for a bad one")
        key = data.response_key
        found = self._answer(row, key) if data.uses_chat else self.texts.plain(row, key)
        self.labels[id(found)] = bool(label)
        return [found]

    def summary(self) -> str:
        good = int(self.is_desired.sum())
        return f"{super().summary()}, {good} good and {len(self) - good} bad answers"

    def state(self) -> dict[str, Any]:
        return {**super().state(), "good": int(self.is_desired.sum())}


def prompt_of(row: Mapping[str, Any], source: DataSource) -> Messages:
    """The messages of the prompt; the text column may also contain messages."""
    data = source.data
    if data.messages_key is None and isinstance(row.get(data.prompt_key), list):
        return messages_of(row, data.prompt_key, source)
    return prompt_messages(row, source)


def with_place_for_reward(ids: np.ndarray) -> Row:
    """Converts the ids of a conversation to a row with an additional token for the reward."""
    longer = torch.from_numpy(np.append(ids, ids[-1]).astype(np.int64))
    weights = torch.zeros(len(longer))
    weights[-1] = 1.0
    return Row(longer, {"weights": weights}, 1.0)


def open_preferences(
    source: DataSource, tokenizer: Tokenizer, kind: type[PairDataset]
) -> PairDataset:
    """Opens a dataset of preferences. Answers given as messages use the chat template, unless the
    recipe sets `chat_template`."""
    rows, data = source.open(streaming=True), source.data
    key = data.response_key if kind is LabelDataset else data.chosen_key
    if data.chat_template == "auto" and len(rows) and isinstance(rows.row(0).get(key), list):
        source = replace(source, data=data.model_copy(update={"chat_template": True}))
    return kind(rows, tokenizer, source)
