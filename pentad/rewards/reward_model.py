"""`reward.fn: reward_model`: a reward model trained on preferences gives the reward.

The model is a folder written by `pentad reward-model`, or any with one output per sequence
(`...ForSequenceClassification`). Its input is rendered as in its training: with its own chat
template if the run's prompts were rendered with one, else as plain text. The answers of a prompt
are scored together, so that a reward does not depend on other waiting requests.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pentad.core.device import auto_dtype, pick_device
from pentad.core.errors import Problem, UserError
from pentad.core.roles import Scored
from pentad.core.types import Prompt, Row, Sample
from pentad.data.preferences import with_place_for_reward
from pentad.data.render import BadRow, DataSource
from pentad.data.section import DatasetConfig
from pentad.data.sft import AnswerTokeniser
from pentad.data.tokenizer import load_tokenizer
from pentad.engine.engine import build_engine
from pentad.engine.section import EngineSettings, MicrobatchConfig, ModelConfig
from pentad.models.families import dims_of
from pentad.rewards.sandbox import JobFailed
from pentad.rewards.section import RewardModelConfig


class RewardModel:
    """Scores answers in a separate thread; belongs to one event loop."""

    names: frozenset[str] = frozenset()
    """Columns that it reads."""

    def __init__(self, keys: RewardModelConfig) -> None:
        self.keys = keys
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="reward-model")

    def start(self) -> None:
        """Loads the model. Raises UserError."""
        assert self.keys.path is not None, "a config rule requires it"
        path, device = self.keys.path, pick_device(self.keys.device)
        tokenizer = load_tokenizer(path, key="reward.model.path")
        self.room = dims_of(path).max_position - 1
        self.readers = {
            is_chat: AnswerTokeniser(
                DataSource(data=DatasetConfig(chat_template=is_chat), key="reward.model"),
                tokenizer,
                may_be_empty=True,
            )
            for is_chat in (False, True)
        }
        self.has_template = tokenizer.has_chat_template
        model = ModelConfig(
            path=path,
            param_dtype=auto_dtype(device.type),
            mb_spec=MicrobatchConfig(max_tokens_per_mb=max(self.keys.max_tokens, self.room + 1)),
        )
        self.engine = build_engine(
            path, EngineSettings(model=model), device=device, value_head=True, weights=path
        )

    async def score(
        self, prompt: Prompt, samples: Sequence[Sample], columns: Mapping[str, Any]
    ) -> list[Scored | JobFailed]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.thread, self._score, prompt, samples)

    def _score(self, prompt: Prompt, samples: Sequence[Sample]) -> list[Scored | JobFailed]:
        """Scores the samples; runs in the thread."""
        found = [self._row(prompt, sample) for sample in samples]
        rows = [row for row in found if isinstance(row, Row)]
        outputs = iter(self.engine.forward(rows)) if rows else iter(())
        return [
            row if isinstance(row, JobFailed) else self._scored(float(next(outputs)["values"][-1]))
            for row in found
        ]

    def _scored(self, value: float) -> Scored | JobFailed:
        if not math.isfinite(value):
            return JobFailed("error", f"the reward model in {self.keys.path} gives {value}")
        return Scored(value * self.keys.scale)

    def _row(self, prompt: Prompt, sample: Sample) -> Row | JobFailed:
        is_chat = is_rendered(prompt)
        if is_chat and not self.has_template:
            rule = "its tokenizer has no chat template, and the prompts are chats"
            raise UserError(Problem(f"reward.model.path = {self.keys.path}", rule))
        reader = self.readers[is_chat]
        try:
            if is_chat:
                said = {"role": "assistant", "content": sample.text}
                messages = [*map(dict, prompt.messages), said]
                text = reader.chat({}, messages, num_given=len(prompt.messages))[-1]
            else:
                text = reader.plain({"prompt": prompt.text, "answer": sample.text}, "answer")
        except BadRow as error:
            return JobFailed("error", str(error), "sample")
        if len(text.ids) > self.room:
            rule = f"prompt and answer have {len(text.ids)} tokens, the reward model's context"
            return JobFailed("error", f"{rule} has room for {self.room}")
        row = with_place_for_reward(text.ids)
        return Row(row.ids, {})

    def close(self) -> None:
        self.thread.shutdown(wait=False, cancel_futures=True)


def is_rendered(prompt: Prompt) -> bool:
    """Whether the prompt was rendered with a chat template."""
    if len(prompt.messages) != 1:
        return len(prompt.messages) > 1
    return prompt.messages[0].get("content") != prompt.text
