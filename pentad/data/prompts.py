"""The prompt stream: an endless sequence of tokenised prompts, indexed by gid.

`prompt(gid)` is a pure function of the data, the settings and gid: gid // len is the epoch, and the
epoch's shuffled order gives the row. So a resumed run needs no cursor.

By default, all rows are tokenised at the start: broken rows stop the run immediately, over-long
ones are left out and counted, and `len` is the number of prompts per epoch. When streaming, a row
is read when its gid is drawn: over-long and broken rows raise RejectedPrompt, whose reason the
ledger counts, and `len` is the number of rows.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pentad.core.errors import Problem, UserError
from pentad.core.types import Prompt
from pentad.data.examples import TOO_LONG, OrderedData
from pentad.data.render import (
    BadRow,
    DataSource,
    check_source,
    encode_prompts,
    plain_note,
    prefix_warning,
    prompt_messages,
    render_prompt,
    tools_warning,
)
from pentad.data.rows import DatasetRows, raise_first
from pentad.data.stamp import digest_of_arrays
from pentad.data.tokenizer import Tokenizer

ENCODE_AT_ONCE = 1024
ROWS_TRIED = 1000
BAD_ROW = "bad_row"


class RejectedPrompt(Exception):
    """Raised if the row of a gid cannot be a prompt; it is counted under `reason`."""

    def __init__(self, gid: int, reason: str, problem: Problem | str) -> None:
        self.gid = gid
        self.reason = reason
        super().__init__(str(problem))


@dataclass(frozen=True, slots=True)
class _Tokenised:
    row: int
    text: str
    ids: np.ndarray
    """int32."""


@dataclass(frozen=True, slots=True)
class _Rejected:
    reason: str
    problem: Problem | str


class Prompts(OrderedData):
    """An endless sequence of prompts, of one dataset or of several."""

    dropped: Counter[str]
    """Rows left out at the start, by reason."""

    @abstractmethod
    def prompt(self, gid: int) -> Prompt:
        """The prompt of a gid; may raise RejectedPrompt when streaming."""

    @abstractmethod
    def row_of(self, gid: int) -> str:
        """`file:line` of the row of a gid."""

    @abstractmethod
    def lengths(self) -> list[int]:
        """Number of tokens of each prompt; empty when streaming, because they are unknown."""

    def first(self, num: int) -> list[Prompt]:
        """The first `num` prompts, or all if there are fewer; rejected rows are skipped. UserError
        if the first thousand rows have none."""
        found: list[Prompt] = []
        rejected = ""
        for gid in range(min(len(self), ROWS_TRIED)):
            try:
                found.append(self.prompt(gid))
            except RejectedPrompt as error:
                rejected = rejected or str(error)
            if len(found) == num:
                break
        if not found:
            where = f"{self.source.key}.path = {self.source.path}"
            raise UserError(Problem(where, f"no row of it can be a prompt: {rejected}"))
        return found


class PromptStream(Prompts):
    def __init__(self, rows: DatasetRows, tokenizer: Tokenizer, source: DataSource) -> None:
        super().__init__(source)
        check_source(source, tokenizer)
        self.notes += filter(None, [plain_note(source, tokenizer)])
        self.rows = rows
        self.tokenizer = tokenizer
        self.dropped = Counter()
        self.prompts: list[_Tokenised] | None = None
        if not source.streaming:
            self.prompts = self._tokenise_all()

    def __len__(self) -> int:
        return len(self.rows) if self.prompts is None else len(self.prompts)

    def prompt(self, gid: int) -> Prompt:
        epoch, index = self.place(gid)
        found = self._read(gid, index) if self.prompts is None else self.prompts[index]
        return self._prompt(gid, found, epoch)

    def of_row(self, row: int) -> Prompt:
        """The prompt of a row by its index in the files, its gid here; may raise RejectedPrompt."""
        return self._prompt(row, self._read(row, row), 0)

    def row_of(self, gid: int) -> str:
        _, index = self.place(gid)
        return self.rows.where(index if self.prompts is None else self.prompts[index].row)

    def lengths(self) -> list[int]:
        return [len(prompt.ids) for prompt in self.prompts or ()]

    def summary(self) -> str:
        text = f"{self.source.path}: {len(self.rows)} rows"
        if self.prompts is None:
            return f"{text}, read as they are needed"
        lengths = self.lengths()
        text += f", {len(lengths)} prompts of {min(lengths)} to {max(lengths)} tokens"
        text += f" (mean {sum(lengths) / len(lengths):.0f})"
        for reason, count in self.dropped.items():
            text += f", {count} left out: {reason}"
        return text

    def state(self) -> dict[str, Any]:
        source = self.source
        prompts = self.prompts
        return {
            "rows": len(self.rows),
            "prompts": len(self),
            "digest": self.rows.digest.hex(),
            "tokens": None if prompts is None else digest_of_arrays(p.ids for p in prompts),
            "shuffle": source.data.shuffle,
            "seed": source.seed if source.data.shuffle else None,
        }

    def _prompt(self, gid: int, found: _Tokenised, epoch: int) -> Prompt:
        fields = dict(self.rows.row(found.row))
        messages = tuple(prompt_messages(fields, self.source))
        ids, name = tuple(found.ids.tolist()), self.source.environment
        return Prompt(gid, ids, fields, found.text, epoch, messages, name)

    def _read(self, gid: int, index: int) -> _Tokenised:
        (found,) = self._tokenise([index])
        if isinstance(found, _Rejected):
            raise RejectedPrompt(gid, found.reason, found.problem)
        return found

    def _tokenise_all(self) -> list[_Tokenised]:
        problems: list[Problem | str] = []
        kept: list[_Tokenised] = []
        for start in range(0, len(self.rows), ENCODE_AT_ONCE):
            indices = range(start, min(start + ENCODE_AT_ONCE, len(self.rows)))
            for found in self._tokenise(indices):
                if isinstance(found, _Tokenised):
                    kept.append(found)
                elif found.reason == BAD_ROW:
                    problems.append(found.problem)
                else:
                    self.dropped[found.reason] += 1
        raise_first(problems)
        if not kept and not self.source.is_cut(len(self.rows)):
            key, limit = self.source.key, self.source.max_tokens
            rule = f"all {len(self.rows)} prompts are longer than {limit} tokens"
            remedy = (
                f"{key}.max_length or the model's context less the tokens of an answer sets it: "
                "raise the limit, or lower gconfig.max_new_tokens"
            )
            raise UserError(Problem(f"{key}.path = {self.source.path}", rule, remedy))
        return kept

    def _tokenise(self, indices: Sequence[int]) -> list[_Tokenised | _Rejected]:
        """Tokenises the rows at these indices, in order."""
        source, limit = self.source, self.source.max_tokens
        found: dict[int, _Tokenised | _Rejected] = {}
        texts: dict[int, str] = {}
        for index in indices:
            try:
                row = self.rows.row(index)
                texts[index] = render_prompt(row, source, self.tokenizer)
                if warning := tools_warning(row, source):
                    self.warnings.add(warning)
            except BadRow as error:
                found[index] = _Rejected(BAD_ROW, error.at(self.rows.where(index)))
            except UserError as error:
                found[index] = _Rejected(BAD_ROW, error.problems[0])
        all_ids = encode_prompts([*texts.values()], source, self.tokenizer)
        for (index, text), ids in zip(texts.items(), all_ids, strict=True):
            where = self.rows.where(index)
            if warning := prefix_warning(text, source, self.tokenizer):
                self.warnings.add(warning)
            if not ids:
                found[index] = _Rejected(BAD_ROW, Problem(where, "the prompt is empty"))
            elif limit is not None and len(ids) > limit:
                rule = f"the prompt has {len(ids)} tokens, more than {limit}"
                found[index] = _Rejected(TOO_LONG, Problem(where, rule))
            else:
                found[index] = _Tokenised(index, text, np.array(ids, np.int32))
        return [found[index] for index in indices]


def open_prompts(source: DataSource, tokenizer: Tokenizer) -> PromptStream:
    return PromptStream(source.open(streaming=source.streaming), tokenizer, source)
