"""Collects the tokens of a conversation turn by turn, and makes samples of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pentad.core.types import FinishReason, Generation, Sample
from pentad.rollout.history import History


class Transcript:
    """The tokens of one sample so far: prompt, then sampled and environment tokens in order."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.ids: list[int] = []
        self.mask: list[bool] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.routes: np.ndarray | None = None
        self.add_given(prompt_ids)

    @property
    def num_sampled(self) -> int:
        return sum(self.mask)

    def add_given(self, ids: Sequence[int]) -> None:
        """Adds tokens of the prompt or the environment, which are never trained."""
        self.ids += ids
        self.mask += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.versions += [-1] * len(ids)

    def add_sampled(self, generation: Generation) -> None:
        self.ids += generation.ids
        self.mask += [True] * len(generation.ids)
        self.logprobs += generation.logprobs
        self.versions += generation.versions
        routes = generation.routes
        if routes is not None and self.routes is not None:
            # An earlier turn's tokens keep the experts with which they were sampled. Its last
            # token is computed only now.
            known = len(self.routes) - 1
            routes = np.concatenate([self.routes[:known], routes[known:]])
        self.routes = routes

    def finished(self, finish: FinishReason, text: str) -> Sample:
        if self.routes is not None and len(self.routes) < len(self.ids):
            # Tokens after the last answer: no trained token depends on their experts.
            missing = len(self.ids) - len(self.routes)
            self.routes = np.concatenate([self.routes, np.repeat(self.routes[-1:], missing, 0)])
        return Sample(
            ids=np.array(self.ids, dtype=np.int64),
            mask=np.array(self.mask, dtype=bool),
            rollout_logprobs=np.array(self.logprobs, dtype=np.float32),
            versions=np.array(self.versions, dtype=np.int64),
            finish=finish,
            text=text,
            routes=self.routes,
        )


@dataclass(slots=True)
class Talk:
    """A conversation so far: its sequences, texts and reward parts."""

    transcript: Transcript
    """The last sequence of the conversation."""
    history: History | None = None
    """Set if the chat template renders earlier turns."""
    earlier: list[tuple[Transcript, list[tuple[str, str]]]] = field(default_factory=list)
    """Finished sequences, which no later turn continues, and the texts of each."""
    texts: list[str] = field(default_factory=list)
    """The policy's texts, by turn."""
    turns: list[tuple[str, str]] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)
    """Reward parts by name."""
    environment: dict[str, Any] | None = None
    finish: FinishReason = "stop"

    def add_answer(self, generation: Generation, text: str) -> None:
        self.transcript.add_sampled(generation)
        self.texts.append(text)
        self.turns.append(("assistant", text))
        self.finish = generation.finish

    @property
    def num_sampled(self) -> int:
        return sum(one.num_sampled for one in (self.transcript, *(t for t, _ in self.earlier)))

    def go_on(self, ids: Sequence[int]) -> None:
        """Starts a new sequence with these tokens, after which the next turn is sampled."""
        self.earlier.append((self.transcript, self.turns))
        self.transcript, self.turns = Transcript(ids), []

    def sample(self) -> Sample:
        """Returns the sample of a conversation with one sequence."""
        [sample] = self.samples()
        return sample

    @staticmethod
    def continued_by(ids: Sequence[int], talks: Sequence[Talk]) -> Talk | None:
        """Returns the talk with the longest sequence that `ids` continue."""
        ids = list(ids)
        fitting = [t for t in talks if t.transcript.ids == ids[: len(t.transcript.ids)]]
        return max(fitting, key=lambda t: len(t.transcript.ids), default=None)

    def samples(self) -> list[Sample]:
        """Returns one sample per sequence. All have the text of the whole conversation, which is
        scored."""
        text, samples = "\n".join(self.texts), []
        for transcript, turns in (*self.earlier, (self.transcript, self.turns)):
            finish = self.finish if transcript is self.transcript else "stop"
            sample = transcript.finished(finish, text)
            sample.turns, sample.environment = tuple(turns), self.environment
            if self.parts:
                sample.reward, sample.reward_parts = sum(self.parts.values()), dict(self.parts)
            samples.append(sample)
        return samples


def answered(
    prompt_ids: Sequence[int], generations: Sequence[Generation], texts: Sequence[str]
) -> list[Sample]:
    """Returns the samples of a single turn, equal to those of `Transcript`, but faster."""
    given = Transcript(prompt_ids).finished("stop", "")
    drawn = [generation.columns() for generation in generations]
    sizes = [size for ids, _, _ in drawn for size in (len(prompt_ids), len(ids))]
    mask = np.repeat(np.tile((False, True), len(drawn)), sizes)
    ids, logprobs, versions = (
        np.concatenate([part for column in columns for part in (before, column)])
        for before, columns in (
            (given.ids, [ids for ids, _, _ in drawn]),
            (given.rollout_logprobs, [logprobs for _, logprobs, _ in drawn]),
            (given.versions, [versions for _, _, versions in drawn]),
        )
    )
    samples, end = [], 0
    for generation, text in zip(generations, texts, strict=True):
        own = slice(end, end := end + len(prompt_ids) + len(generation.ids))
        columns = ids[own], mask[own], logprobs[own], versions[own]
        samples.append(Sample(*columns, generation.finish, text, routes=generation.routes))
    return samples
