"""Examples for supervised fine-tuning: rows for the learner from prompts with responses, or from
conversations.

Trained tokens are those that the model must generate: the response and the id that ends it, in a
conversation for every assistant turn. If a template writes no end, the id that begins the next turn
ends this one, if it is a stop id (as in GLM). The text is split where generation begins and each
piece is tokenised separately, exactly as in sampling, so that no token spans the border.

Some templates render earlier turns differently when later ones follow (Qwen3 omits thinking). Such
a conversation becomes several sequences: each turn is trained after the text that the template
renders when it is sampled, and turns share a sequence if one rendering is a prefix of the other.

All rows are tokenised at the start and use five bytes per token: four for the id, one for the mask.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from pentad.core.errors import Problem, UserError
from pentad.core.types import Row
from pentad.data.examples import TOO_LONG, Examples
from pentad.data.render import (
    BadRow,
    DataSource,
    check_source,
    messages_of,
    plain_note,
    prefix_of,
    prefix_warning,
    prompt_messages,
    render,
    shown_tools,
    text_of,
    tools_warning,
)
from pentad.data.rows import DatasetRows, raise_first
from pentad.data.stamp import digest_of_arrays
from pentad.data.tokenizer import Messages, Tokenizer


@dataclass(frozen=True, slots=True)
class TokenisedText:
    """A sequence of ids, and a mask of the trained ones."""

    ids: np.ndarray
    """int32."""
    mask: np.ndarray
    """bool: True for trained tokens."""


Pieces = list[tuple[str, bool]]
"""Texts in order, each with a flag: whether the assistant generates it."""


class AnswerTokeniser:
    """Tokenises prompts and answers as in sampling, and marks the trained tokens."""

    def __init__(
        self, source: DataSource, tokenizer: Tokenizer, *, may_be_empty: bool = False
    ) -> None:
        """`may_be_empty`: whether an answer may consist only of its end."""
        self.source = source
        self.tokenizer = tokenizer
        self.may_be_empty = may_be_empty
        self.counts: Counter[str] = Counter()
        """Counts of examples or turns, by a short name such as "dropped too_long"."""
        self.warnings: set[str] = set()

    def plain(self, row: Mapping[str, Any], response_key: str) -> TokenisedText:
        """Tokenises a prompt and its response, without a template."""
        source = self.source
        prompt = text_of(row, source.data.prompt_key, source)
        response = text_of(row, response_key, source)
        warnings = prefix_warning(prompt, source, self.tokenizer), tools_warning(row, source)
        self.warnings.update(warning for warning in warnings if warning)
        prefix = prefix_of(prompt, source, self.tokenizer)
        pieces = [(prompt, False), (response, True)]
        return self._join(pieces, prefix, lambda: self.tokenizer.eos_id)

    def chat(
        self, row: Mapping[str, Any], messages: Messages, num_given: int = 0
    ) -> list[TokenisedText]:
        """Tokenises a conversation; the assistant's turns after the first `num_given` messages are
        trained."""
        ends = [i for i, message in enumerate(messages, 1) if message["role"] == "assistant"]
        ends = [end for end in ends if end > num_given]
        if not ends:
            raise BadRow("the conversation has no assistant turn")
        tools = shown_tools(row, messages[: ends[0] - 1], self.source, self.tokenizer)
        return [
            self._join(pieces, (), partial(self._last_stop, messages[:end], tools))
            for end, pieces in self._turns(messages, ends, tools)
        ]

    def _turns(
        self, messages: Messages, ends: Sequence[int], tools: Messages
    ) -> list[tuple[int, Pieces]]:
        """Renders the conversation to sequences, each with its number of messages. `ends`: the
        number of messages up to and including each assistant turn."""
        found: list[tuple[int, Pieces]] = []
        done = ""
        for end in ends:
            before = render(messages[: end - 1], self.tokenizer, for_answer=True, tools=tools)
            after = render(messages[:end], self.tokenizer, for_answer=False, tools=tools)
            if not after.startswith(before):
                rule = "the chat template opens the assistant's turn differently than it writes it"
                remedy = "set template_args, or give the answer as the template writes it"
                raise BadRow(rule, remedy)
            pieces: Pieces = []
            if found and before.startswith(done):
                pieces = found.pop()[1]
            else:
                done = ""
            pieces += [(before[len(done) :], False), (after[len(before) :], True)]
            found.append((end, pieces))
            done = after
        return found

    def _last_stop(self, messages: Messages, tools: Messages) -> int:
        """The id that ends the last turn if the template writes none: the first id of a next user
        turn if it is a stop id, else the end-of-sequence id."""
        done = render(messages, self.tokenizer, for_answer=False, tools=tools)
        further = [*messages, {"role": "user", "content": "."}]
        try:
            more = render(further, self.tokenizer, for_answer=False, tools=tools)
        except BadRow:  # the template does not allow a user turn here
            return self.tokenizer.eos_id
        if not more.startswith(done):
            return self.tokenizer.eos_id
        following = self.tokenizer.encode(more[len(done) :])[:1]
        is_stop = bool(following) and following[0] in self.tokenizer.stop_ids
        return following[0] if is_stop else self.tokenizer.eos_id

    def _join(
        self, pieces: Pieces, prefix: tuple[int, ...], last_stop: Callable[[], int]
    ) -> TokenisedText:
        ids, mask = list(prefix), [False] * len(prefix)
        stops, needs_stop = self.tokenizer.stop_ids, False
        for number, (text, is_trained) in enumerate(pieces, 1):
            new = self.tokenizer.encode(text)
            if is_trained and not new and not self.may_be_empty:
                raise BadRow("the response is empty")
            if not ids and not new:
                raise BadRow("the prompt is empty")
            said = 0
            if is_trained:
                said = self._said(new)
                needs_stop = not new or new[said - 1] not in stops
                if number == len(pieces):  # a line break after the end is never sampled
                    new = [*new[:said], *([last_stop()] if needs_stop else [])]
                    said = len(new)
            elif needs_stop:  # an earlier turn without an end
                said = int(new[:1] != [] and new[0] in stops)
                if not said:
                    self.counts["turns without a stop id, since the template writes none"] += 1
            ids += new
            mask += [i < said for i in range(len(new))]
        return TokenisedText(np.array(ids, np.int32), np.array(mask))

    def _said(self, ids: list[int]) -> int:
        """Number of ids of a turn that the model generates: those up to the first stop id."""
        stops = self.tokenizer.stop_ids
        said = next((i + 1 for i, token in enumerate(ids) if token in stops), len(ids))
        if self.tokenizer.decode(ids[said:]).strip():
            end = self.tokenizer.decode([ids[said - 1]], keep_special=True)
            raise BadRow(f"the response continues after {end}, which ends it")
        return said


class SftDataset(Examples):
    rows_per_example = 1
    """Minimum number of rows per example."""

    def __init__(self, rows: DatasetRows, tokenizer: Tokenizer, source: DataSource) -> None:
        super().__init__(source)
        check_source(source, tokenizer)
        self.notes += filter(None, [plain_note(source, tokenizer)])
        self.texts = AnswerTokeniser(source, tokenizer)
        self.counts, self.texts.warnings = self.texts.counts, self.warnings
        self.num_rows = len(rows)
        self.examples = self._tokenise_all(rows)
        """The sequences of each example."""

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def max_row_tokens(self) -> int:
        return max(len(sequence.ids) for sequence in self._sequences())

    def example(self, index: int) -> list[Row]:
        return [
            Row(
                torch.from_numpy(one.ids.astype(np.int64)),
                {"weights": torch.from_numpy(one.mask.astype(np.float32))},
                float(one.mask.sum()),
            )
            for one in self.examples[index]
        ]

    def _sequences(self) -> Iterator[TokenisedText]:
        return (sequence for example in self.examples for sequence in example)

    def summary(self) -> str:
        lengths = [len(sequence.ids) for sequence in self._sequences()]
        trained = sum(int(sequence.mask.sum()) for sequence in self._sequences())
        text = f"{self.source.path}: {len(self)} examples of {min(lengths)} to {max(lengths)}"
        text += f" tokens, {trained} of {sum(lengths)} tokens trained"
        if len(lengths) > len(self) * self.rows_per_example:
            text += f", in {len(lengths)} sequences, since the template rewrites earlier turns"
        for what, count in self.counts.items():
            text += f", {count} {what}"
        return text

    def state(self) -> dict[str, Any]:
        source = self.source
        return {
            "examples": len(self),
            "tokens": digest_of_arrays(a for e in self._sequences() for a in (e.ids, e.mask)),
            "shuffle": source.data.shuffle,
            "seed": source.seed if source.data.shuffle else None,
        }

    def _tokenise_all(self, rows: DatasetRows) -> list[list[TokenisedText]]:
        key, limit = self.source.key, self.source.max_tokens
        problems: list[Problem | str] = []
        kept: list[list[TokenisedText]] = []
        for index in range(len(rows)):
            try:
                example = self._example(rows, index)
            except BadRow as error:
                problems.append(error.at(rows.where(index)))
            except UserError as error:
                problems += error.problems
            else:
                if limit is None or max(len(one.ids) for one in example) <= limit:
                    kept.append(example)
                else:
                    self.counts[f"dropped {TOO_LONG}"] += 1
        raise_first(problems)
        if not kept and not self.source.is_cut(len(rows)):
            rule = f"all {len(rows)} examples are longer than {limit} tokens"
            remedy = f"{key}.max_length or the model's context sets it: raise it, or shorten them"
            raise UserError(Problem(f"{key}.path = {self.source.path}", rule, remedy))
        return kept

    def _example(self, rows: DatasetRows, index: int) -> list[TokenisedText]:
        row, source = rows.row(index), self.source
        if not source.data.uses_chat:
            return [self.texts.plain(row, source.data.response_key)]
        if source.data.messages_key is not None:
            return self.texts.chat(row, messages_of(row, source.data.messages_key, source))
        answer = text_of(row, source.data.response_key, source)
        said = {"role": "assistant", "content": answer}
        return self.texts.chat(row, [*prompt_messages(row, source), said])


def open_sft(source: DataSource, tokenizer: Tokenizer) -> SftDataset:
    return SftDataset(source.open(streaming=True), tokenizer, source)
