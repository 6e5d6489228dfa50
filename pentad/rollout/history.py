"""Earlier turns of a conversation as the chat template writes them, thinking left out for one.

A turn is sampled after the ids that this gives, whatever the tokens of earlier turns were. Where
the template writes what these tokens spell, they are kept and only what follows them is encoded;
else all of the text is, and the turn begins a sequence of its own. So no trained id is ever made of
text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pentad.core.errors import Problem, UserError
from pentad.core.types import Prompt
from pentad.data.tokenizer import rendered
from pentad.rollout.environments import RolloutTokenizer


class History:
    """One conversation, as messages."""

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
        """What the last sequence began with, and its tokens."""
        if not self.messages or self._written() != opening.text:
            rule = "the prompt is not what the chat template writes of its messages and these tools"
            remedy = "put prompts in the chat template, and name tools in one place"
            raise UserError(Problem("rollout.history = template", rule, remedy))

    def following(
        self, answer: Sequence[int], said: Sequence[str], role: str, known: Sequence[int]
    ) -> list[int]:
        """The ids that the turn after `answer` and what was said to it is sampled after. `known`:
        all of the last sequence, which they begin with where the template writes the same."""
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
