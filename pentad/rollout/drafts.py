"""Drafts: sampled tokens of an interrupted group, which continues in a later step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pentad.core.types import Generation, Group, Prompt, Request
from pentad.rollout.transcript import answered
from pentad.samplers.answers import flaw_of


def nothing() -> None:
    """Default listener of a draft: does nothing."""


@dataclass(eq=False, slots=True)
class Draft:
    """The answers of one group, some of which may be incomplete."""

    answers: Sequence[Generation] = ()
    """One for each sample, or empty; incomplete ones have finish "abort"."""
    num_sampling: int = 0
    """Number of requests in progress."""
    num_ended: int = 0
    """Number of answered requests."""
    is_cut: bool = False
    """Whether its task was cancelled so that another step continues it; then tokens returned by
    samplers are kept."""
    carries: bool = False
    """Whether a later step may continue the group; then complete answers are kept, too."""
    changed: Callable[[], None] = nothing
    """Called when a request is sent or answered."""

    def note_sent(self) -> None:
        self.num_sampling, self.is_cut = self.num_sampling + 1, False
        self.changed()

    def note_answered(self) -> None:
        self.num_sampling -= 1
        self.num_ended += 1
        self.changed()

    @property
    def is_sampling(self) -> bool:
        """Whether a request is in progress; else none is sent yet, or its samples are scored."""
        return self.num_sampling > 0

    @property
    def missing(self) -> list[int]:
        """Returns the indices of incomplete samples."""
        return [i for i, one in enumerate(self.answers) if one.finish == "abort"]

    def rest_of(self, request: Request) -> Request:
        """Returns the request for the incomplete samples."""
        if not self.answers:
            return request
        seeds = tuple(request.seeds[i] for i in self.missing)
        drawn = tuple(self.answers[i] for i in self.missing)
        return replace(request, seeds=seeds, drawn=drawn if any(d.ids for d in drawn) else ())

    def joined(self, found: Sequence[Generation]) -> list[Generation]:
        """Returns all answers, with those to the request for incomplete samples put in place."""
        if not self.answers:
            return list(found)
        answers = list(self.answers)
        for index, answer in zip(self.missing, found, strict=True):
            answers[index] = answer
        return answers

    def keep(self, request: Request, found: Sequence[Generation], vocab_size: int) -> None:
        """Keeps the answers `found` to the request for incomplete samples. Invalid ones are sampled
        again."""
        if len(found) == len(request.seeds):
            self.answers = self.joined([sound(request, one, vocab_size) for one in found])


def sound(request: Request, answer: Generation, vocab_size: int) -> Generation:
    """Returns the answer if it is complete or can be continued; else an empty one. A server may
    interrupt it after its last token, which nothing may follow."""
    params = request.params
    whole = replace(answer, finish="length") if answer.finish == "abort" else answer
    num_tokens = len(request.prompt_ids) + len(answer.ids)
    has_routes = answer.routes is None or len(answer.routes) == num_tokens
    is_sound = has_routes and not flaw_of(whole, params.max_new_tokens, vocab_size)
    if not is_sound:
        return Generation([], [], [], "abort")
    if answer.finish != "abort":
        return answer
    if answer.ids[-1] in params.stop_ids:
        return replace(answer, finish="stop")
    return whole if len(answer.ids) == params.max_new_tokens else answer


def as_group(prompt: Prompt, attempt: int, answers: Sequence[Generation]) -> Group:
    """Returns the answers as samples, the stored form."""
    samples = answered(prompt.ids, answers, [""] * len(answers))
    return Group(prompt, samples, attempt)


def answers_of(group: Group) -> list[Generation]:
    """Inverse of `as_group`; log-probs are the same 32-bit numbers."""
    return [
        Generation(
            one.ids[one.mask].tolist(),
            one.rollout_logprobs[one.mask].tolist(),
            one.versions[one.mask].tolist(),
            one.finish,
            one.routes,
        )
        for one in group.samples
    ]
