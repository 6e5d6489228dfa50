"""OpenAI-compatible answers, complete or as chunks of a stream, as plain JSON data."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from pentad import __version__
from pentad.core.types import FinishReason, Generation, TopTokens
from pentad.data.tokenizer import Tokenizer
from pentad.serve.jobs import CALL_START, Job, read_calls

BROKEN = "\ufffd"
"""The replacement character, which decoding gives for bytes of an incomplete character."""
MAX_WINDOW = 256
"""Maximum number of tokens that are decoded again at each step while no character is complete."""


class TextStream:
    """Decodes tokens to text in pieces; the concatenated pieces are the answer's text.

    A piece never ends within a character, and text that may become a stop string is held back. The
    text excludes the token or the stop string that ends the answer.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stop_strings: Sequence[str] = (),
        stop_ids: Sequence[int] = (),
        held: Sequence[str] = (),
    ) -> None:
        """`held`: text from this mark on is held back until the end."""
        self.decode = decode
        self.stop_strings = tuple(stop_strings)
        self.stop_ids = frozenset(stop_ids)
        self.marks = (*stop_strings, *held)
        self.ids: list[int] = []
        self.text = ""
        """The decoded text, including text that is held back."""
        self.num_sent = 0
        self.offsets: list[int] = []
        """The start of each token in the text."""
        self._settled = ""
        self._window = 0
        self._read = 0

    def push(self, token: int) -> str:
        """Adds one token; returns the text that can be sent now."""
        self.offsets.append(len(self.text))
        self.ids.append(token)
        if token in self.stop_ids:
            return ""
        # Decoding begins some tokens back: the text of a token may depend on the previous one.
        before = self.decode(self.ids[self._window : self._read])
        piece = self.decode(self.ids[self._window :])[len(before) :]
        is_whole = bool(piece) and not piece.endswith(BROKEN)
        self.text = self._settled + piece.rstrip(BROKEN)
        if is_whole or len(self.ids) - self._window > MAX_WINDOW:
            self._settled = self.text = self._settled + piece
            self._window, self._read = self._read, len(self.ids)
        return self._send(self._safe_end())

    def end(self, finish: FinishReason) -> str:
        """Returns the rest of the text, given the finish reason."""
        ended_by_id = bool(self.ids) and self.ids[-1] in self.stop_ids
        until = len(self.ids) - ended_by_id
        before = self.decode(self.ids[self._window : self._read])
        self.text = self._settled + self.decode(self.ids[self._window : until])[len(before) :]
        cut = self._first(self.stop_strings) if finish == "stop" and not ended_by_id else None
        return self._send(len(self.text) if cut is None else cut)

    @property
    def sent(self) -> str:
        return self.text[: self.num_sent]

    def _send(self, end: int) -> str:
        piece = self.text[self.num_sent : end]
        self.num_sent = max(self.num_sent, end)
        return piece

    def _first(self, marks: Sequence[str]) -> int | None:
        found = [self.text.find(mark, self.num_sent) for mark in marks]
        return min((place for place in found if place >= 0), default=None)

    def _safe_end(self) -> int:
        """Returns the end of the text before any mark or possible beginning of one."""
        first = self._first(self.marks)
        if first is not None:
            return first
        end = len(self.text)
        for stop in self.marks:
            for size in range(min(len(stop) - 1, len(self.text) - self.num_sent), 0, -1):
                if self.text.endswith(stop[:size]):
                    end = min(end, len(self.text) - size)
                    break
        return end


@dataclass(frozen=True, slots=True)
class Token:
    """A sampled token in an answer."""

    id: int
    logprob: float
    offset: int
    top: TopTokens


class Answer:
    """Builds all messages for one job."""

    def __init__(self, job: Job, model: str, tokenizer: Tokenizer) -> None:
        self.job, self.body = job, job.body
        self.model = model
        self.tokenizer = tokenizer
        self.created = int(time.time())
        self.texts = [
            TextStream(
                tokenizer.decode,
                job.params.stop_strings,
                job.params.stop_ids,
                held=[CALL_START] if job.reads_calls else [],
            )
            for _ in range(len(job.requests) * job.body.n)
        ]

    # Whole answers.

    def whole(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """The answer to a request without streaming; one generation per choice, in order."""
        choices = [self._choice(index, g) for index, g in enumerate(generations)]
        num_new = sum(len(g.ids) for g in generations)
        body = {**self._head("chat.completion"), "choices": choices, "usage": self.usage(num_new)}
        if self.job.is_chat and self.body.return_token_ids:
            body["prompt_token_ids"] = list(self.job.requests[0].prompt_ids)
        return body

    def _choice(self, index: int, generation: Generation) -> dict[str, Any]:
        stream = self.texts[index]
        text = "".join(map(stream.push, generation.ids)) + stream.end(generation.finish)
        tokens = [
            Token(*one)
            for one in zip(
                generation.ids,
                generation.logprobs,
                stream.offsets,
                generation.tops or repeat([], len(generation.ids)),
                strict=True,
            )
        ]
        choice: dict[str, Any] = {
            "index": index,
            "finish_reason": generation.finish,
            "logprobs": self._logprobs(tokens),
        }
        if self.job.is_chat:
            text, calls = self._calls(index, text)
            content = None if calls and not text else text
            choice["message"] = {"role": "assistant", "content": content, "refusal": None}
            if calls:
                choice["message"]["tool_calls"] = calls
                choice["finish_reason"] = finish_of(generation)
        else:
            choice["text"] = text
        return choice | self._ids(index, generation.ids, is_first=True)

    # Streamed answers.

    def opening(self, index: int) -> dict[str, Any] | None:
        """Returns the first chunk of a chat answer, with the role."""
        if not self.job.is_chat:
            return None
        chunk = self._chunk(index, "", [], None)
        chunk["choices"][0]["delta"] = {"role": "assistant", "content": ""}
        if self.body.return_token_ids:
            chunk["prompt_token_ids"] = list(self.job.requests[0].prompt_ids)
        return chunk

    def progress(
        self, index: int, token: int, logprob: float, top: TopTokens
    ) -> dict[str, Any] | None:
        """Returns the chunk of one token; None if no text can be sent yet."""
        stream = self.texts[index]
        text = stream.push(token)
        if not (text or self.body.wants_logprobs or self.body.return_token_ids):
            return None
        return self._chunk(index, text, [Token(token, logprob, stream.offsets[-1], top)], None)

    def closing(self, index: int, generation: Generation) -> dict[str, Any]:
        """Returns the last chunk, with the text held back and the finish reason."""
        stream = self.texts[index]
        assert stream.ids == generation.ids, "streamed and generated tokens are equal"
        before, rest = len(stream.sent), stream.end(generation.finish)
        text, calls = self._calls(index, stream.sent)
        chunk = self._chunk(index, text[before:] if calls else rest, [], generation.finish)
        if calls:
            [choice] = chunk["choices"]
            numbered = [{"index": number, **call} for number, call in enumerate(calls)]
            choice["delta"]["tool_calls"] = numbered
            choice["finish_reason"] = finish_of(generation)
        return chunk

    def final_usage(self, num_new: int) -> dict[str, Any]:
        head = self._head("chat.completion.chunk")
        return {**head, "choices": [], "usage": self.usage(num_new)}

    def usage(self, num_new: int) -> dict[str, int]:
        num_prompt = self.job.num_prompt_tokens
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
        }

    def _chunk(
        self, index: int, text: str, tokens: Sequence[Token], finish: str | None
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": finish}
        choice["logprobs"] = self._logprobs(tokens) if tokens else None
        if self.job.is_chat:
            choice["delta"] = {"content": text} if text else {}
        else:
            choice["text"] = text
        is_first = len(self.texts[index].ids) == 1
        choice |= self._ids(index, [token.id for token in tokens], is_first=is_first)
        chunk = {**self._head("chat.completion.chunk"), "choices": [choice]}
        return chunk | ({"usage": None} if self.body.stream_options.include_usage else {})

    # Parts of both.

    def _calls(self, index: int, text: str) -> tuple[str, list[dict[str, Any]]]:
        return read_calls(text, self.texts[index].ids) if self.job.reads_calls else (text, [])

    def _head(self, chat_object: str) -> dict[str, Any]:
        return {
            "id": self.job.id,
            "object": chat_object if self.job.is_chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"pentad-{__version__}",
        }

    def _ids(self, index: int, ids: Sequence[int], *, is_first: bool) -> dict[str, Any]:
        if not self.body.return_token_ids:
            return {}
        found: dict[str, Any] = {"token_ids": list(ids)}
        if not self.job.is_chat and is_first:
            found["prompt_token_ids"] = list(self.job.requests[index // self.body.n].prompt_ids)
        return found

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if not self.body.wants_logprobs:
            return None
        if self.job.is_chat:
            entries = [
                {
                    **self._entry(token.id, token.logprob),
                    "top_logprobs": [self._entry(*pair) for pair in token.top],
                }
                for token in tokens
            ]
            return {"content": entries, "refusal": None}
        return {
            "tokens": [self._spelt(token.id) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [self._named(t) for t in tokens] if self.job.params.num_top else None,
            "text_offset": [token.offset for token in tokens],
        }

    def _spelt(self, token: int) -> str:
        return self.tokenizer.decode([token], keep_special=True)

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._spelt(token)
        return {"token": text, "logprob": logprob, "bytes": bytes_of(text)}

    def _named(self, token: Token) -> dict[str, float]:
        """Returns log-probs of the most likely tokens and of the sampled one, by their text. Tokens
        with equal text, such as parts of characters, are distinguished by id."""
        named: dict[str, float] = {}
        for id_, logprob in dict([*token.top, (token.id, token.logprob)]).items():
            text = self._spelt(id_)
            named[f"token_id:{id_}" if text in named else text] = logprob
        return named


def finish_of(generation: Generation) -> str:
    """Returns the finish reason of an answer that may have tool calls."""
    return "tool_calls" if generation.finish == "stop" else generation.finish


def bytes_of(text: str) -> list[int] | None:
    """Bytes of a token; None if it is part of a character, whose bytes are not in the text."""
    return None if BROKEN in text else list(text.encode())
