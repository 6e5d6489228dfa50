"""Selection of a step's samples for display, and their format in samples.jsonl.

    {"step": 3, "pick": "best", "gid": 17, "index": 2, "environment": null, "epoch": 0,
     "attempt": 0, "question": "52341>", "prompt": "52341>", "expected": "12345",
     "text": "12345", "turns": [], "reward": 1.0, "reward_parts": {"correct": 1.0},
     "finish": "stop", "num_sampled": 6,
     "min_version": 2, "max_version": 2, "ids": [...], "trained_spans": [[6, 12]]}

`environment` is the name of one of `rollout.workflows`, null if the run has one environment.
`question` is the last message of the user, without a chat template. `turns` are roles and texts of
the conversation after it, with those of the environment; empty for a single answer. `expected` is
the answer of the row (`train_dataset.answer_key`), null if it has none. `prompt` is the text before
the first sampled token: that of the dataset, or the request of an agent program. `ids` are all
token ids, prompt included; `trained_spans` are the half-open ranges of them that the policy
sampled.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pentad.core.errors import one_line
from pentad.core.seeds import derive_seed

if TYPE_CHECKING:
    import numpy as np

    from pentad.core.types import Group, Prompt

MAX_EXPECTED = 2000
"""Characters of an expected answer; the tests of a program can be long."""


def pick_samples(
    groups: Sequence[Group],
    num: int,
    *,
    step: int,
    seed: int = 0,
    answer_keys: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Selects `num` samples: the best, the worst, then random ones, which depend on seed and step
    only. `answer_keys`: environment -> column with the expected answer. Samples without a reward
    are only among the random ones."""
    places = [(g, i) for g, group in enumerate(groups) for i in range(len(group.samples))]
    rewards = {place: groups[place[0]].samples[place[1]].reward for place in places}
    scored = {place: reward for place, reward in rewards.items() if reward is not None}
    picks: dict[tuple[int, int], str] = {}
    if scored and num > 0:
        picks[max(scored, key=scored.__getitem__)] = "best"
    if scored and num > 1:
        # The last one among equals, so that best and worst differ if there are two samples.
        worst = min(reversed(scored), key=scored.__getitem__)
        picks.setdefault(worst, "worst")
    others = [place for place in places if place not in picks]
    chosen = random.Random(derive_seed(seed, "samples", step))
    for place in chosen.sample(others, min(max(0, num - len(picks)), len(others))):
        picks[place] = "random"
    return [_line(groups[g], i, step, pick, answer_keys or {}) for (g, i), pick in picks.items()]


def _line(
    group: Group, index: int, step: int, pick: str, answer_keys: Mapping[str, str]
) -> dict[str, Any]:
    sample, prompt = group.samples[index], group.prompt
    versions = sample.versions[sample.mask].tolist()
    return {
        "step": step,
        "pick": pick,
        "gid": group.gid,
        "index": index,
        "environment": prompt.environment or None,
        "epoch": prompt.epoch,
        "attempt": group.attempt,
        "question": question_of(prompt),
        "prompt": prompt.text if sample.given_text is None else sample.given_text,
        "expected": _expected(prompt, answer_keys.get(prompt.environment, "answer")),
        "text": sample.text,
        "turns": [list(turn) for turn in sample.turns],
        "reward": sample.reward,
        "reward_parts": dict(sample.reward_parts),
        "finish": sample.finish,
        "num_sampled": sample.num_sampled,
        "min_version": min(versions, default=None),
        "max_version": max(versions, default=None),
        "ids": sample.ids.tolist(),
        "trained_spans": _spans(sample.mask),
    }


def _expected(prompt: Prompt, answer_key: str) -> str | None:
    """The answer of the dataset's row, if it has one."""
    answer = prompt.fields.get(answer_key)
    return None if answer is None else one_line(str(answer), MAX_EXPECTED)


def question_of(prompt: Prompt) -> str:
    """The user's question in a readable form."""
    texts = [message.get("content") for message in prompt.messages if message["role"] == "user"]
    return texts[-1] if texts and isinstance(texts[-1], str) else prompt.text


def transcript_of(line: Mapping[str, Any]) -> str:
    """Text of the conversation after the question, with the environment's messages in brackets."""
    turns = line.get("turns") or [["assistant", line["text"]]]
    return "\n".join(text if role == "assistant" else f"[{role}: {text}]" for role, text in turns)


def cells_of(line: Mapping[str, Any]) -> dict[str, Any]:
    """Table cells of a sample, by column."""
    given = line.get("reward_parts") or {}
    parts = ", ".join(f"{name} {value:.3g}" for name, value in given.items())
    return {
        "question": line["question"],
        "answer": transcript_of(line),
        "expected": line.get("expected") or "",
        "reward": line["reward"],
        "reward_parts": parts,
    }


def _spans(mask: np.ndarray) -> list[list[int]]:
    spans: list[list[int]] = []
    for position, is_trained in enumerate(mask.tolist()):
        if not is_trained:
            continue
        if spans and spans[-1][1] == position:
            spans[-1][1] = position + 1
        else:
            spans.append([position, position + 1])
    return spans
