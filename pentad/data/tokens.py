"""Pretraining data: one stream of tokens, split into sequences of one length.

A sequence begins with the last token of the previous one, as context, so that all tokens are
predicted; tokens that do not fill the last sequence are left out. With masked documents, each piece
of a document within a sequence is a separate row, attends only to itself, and its first token is
not predicted; a document ends with the tokenizer's end-of-sequence id.
"""

from __future__ import annotations

import hashlib
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pentad.core.errors import Problem, UserError
from pentad.core.types import Row
from pentad.data.examples import Examples
from pentad.data.render import DataSource
from pentad.data.shards import TokenShard, check_ids, find_data, open_shard, open_texts, survey
from pentad.data.tokenizer import Tokenizer


class TokenSequences(Examples):
    def __init__(
        self,
        shards: list[TokenShard],
        tokenizer: Tokenizer,
        source: DataSource,
        vocab_size: int,
        limit: int | None = None,
    ) -> None:
        super().__init__(source)
        assert source.max_tokens is not None and source.max_tokens > 1, "checked before"
        self.shards = shards
        self.length = source.max_tokens
        self.eos_id = tokenizer.eos_id
        self.vocab_size = vocab_size
        self.ends = list(accumulate(len(shard.ids) for shard in shards))
        self.num = max(self.ends[-1] - 1, 0) // (self.length - 1)
        self.num = min(self.num, limit or self.num)
        where = f"{source.key}.path = {source.path}"
        if not self.num and source.first is None:
            key = source.key
            rule = f"it holds {self.ends[-1]} tokens, and a sequence has {self.length}"
            raise UserError(Problem(where, rule, f"give more, or a smaller {key}.max_length"))
        found = [survey(shard, self.eos_id, vocab_size) for shard in shards]
        self.digest = hashlib.blake2b(b"".join(one.digest for one in found), digest_size=16)
        if source.data.mask_documents and not any(one.ends for one in found):
            self.warnings.add(
                f"{where}: the id {self.eos_id} that ends a document was not found in it, so "
                "documents attend to each other"
            )

    def __len__(self) -> int:
        return self.num

    @property
    def max_row_tokens(self) -> int:
        return self.length

    def example(self, index: int) -> list[Row]:
        start = index * (self.length - 1)
        ids = self.span(start, start + self.length)
        pieces = [ids]
        if self.source.data.mask_documents:
            pieces = np.split(ids, np.flatnonzero(ids[:-1] == self.eos_id) + 1)
        # A piece of one token predicts nothing, but an example needs at least one row.
        return [_row(piece) for piece in pieces if len(piece) > 1] or [_row(ids[:1])]

    def span(self, start: int, stop: int) -> np.ndarray:
        """The tokens start to stop - 1 of the stream, int64."""
        parts, begin = [], 0
        for shard, end in zip(self.shards, self.ends, strict=True):
            if start < end and stop > begin:
                shard.stamp.check()
                first = max(start - begin, 0)
                ids = shard.ids[first : stop - begin].astype(np.int64)
                check_ids(shard, ids, first, self.vocab_size)
                parts.append(ids)
            begin = end
        return np.concatenate(parts)

    def summary(self) -> str:
        left = self.ends[-1] - 1 - self.num * (self.length - 1)
        text = f"{self.source.path}: {self.ends[-1]} tokens, {self.num} sequences of "
        text += f"{self.length}, {left} tokens left over"
        return text if len(self.shards) == 1 else f"{text}, {len(self.shards)} shards"

    def state(self) -> dict[str, Any]:
        source = self.source
        return {
            "sequences": self.num,
            "length": self.length,
            "tokens": self.digest.hexdigest(),
            "mask_documents": source.data.mask_documents,
            "eos_id": self.eos_id if source.data.mask_documents else None,
            "shuffle": source.data.shuffle,
            "seed": source.seed if source.data.shuffle else None,
        }


def _row(ids: np.ndarray) -> Row:
    weights = torch.ones(len(ids))
    weights[0] = 0  # context
    return Row(torch.from_numpy(ids), {"weights": weights}, float(len(ids) - 1))


def open_tokens(
    source: DataSource, tokenizer: Tokenizer, vocab_size: int, cache: Path
) -> TokenSequences:
    """Opens the token stream; raises UserError if the data are invalid."""
    kind, files = find_data(source)
    if kind == "tokens":
        shards, limit = [open_shard(file) for file in files], source.data.limit
    else:
        shards, limit = [open_texts(source, kind, files, tokenizer, cache)], None
    return TokenSequences(shards, tokenizer, source, vocab_size, limit)
