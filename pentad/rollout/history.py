"""Renders earlier turns of a conversation by the chat template, for example without thinking.

The returned ids are the context of the next turn. If the rendered text starts with the text of the
tokens so far, these are kept and only the rest is encoded; else all of the text is encoded, and the
turn starts a new sequence. So no trained id is ever re-encoded from text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pentad.core.errors import Problem, UserError
from pentad.core.types import Prompt
from pentad.data.tokenizer import rendered
from pentad.rollout.environments import RolloutTokenizer


class History:
    """A conversation, as messages."""

    def __init__(
        self,
        opening: Prompt,
        tools: Sequence[Mapping[str, Any]],
        tokenizer: RolloutTokenizer,
    ) -> None:
        self.messages = [dict(message) for message in opening.messages]
        self.tools = list(tools) or None
        self.tokenizer = tokenizer
        self.text, self.length = opening.text, len(opening.ids)
        """The rendered text of the last sequence, and its number of tokens."""
        if not self.messages or self._written() != opening.text:
            rule = "the prompt is not what the chat template writes of its messages and these tools"
            remedy = "put prompts in the chat template, and name tools in one place"
            raise UserError(Problem("rollout.history = template", rule, remedy))

    def following(
        self, answer: Sequence[int], said: Sequence[str], role: str, known: Sequence[int]
    ) -> list[int]:
        """Returns the context ids of the next turn, given `answer` and the messages after it. They
        begin with `known`, all ids of the last sequence, if the rendering agrees."""
        words = self.tokenizer.decode(answer, skip_special_tokens=False)
        self.messages.append({"role": "assistant", "content": words})
        self.messages += [{"role": role, "content": text} for text in said]
        text, known = self._written(), list(known)
        spelt = self.text + self.tokenizer.decode(known[self.length :], skip_special_tokens=False)
        if text.startswith(spelt):
            return known + self.tokenizer.encode(text[len(spelt) :], add_special_tokens=False)
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        self.text, self.length = text, len(ids)
        return ids

    def _written(self) -> str:
        return rendered(self.tokenizer, self.messages, tools=self.tools, add_generation_prompt=True)
