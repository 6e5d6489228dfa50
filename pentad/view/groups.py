"""A prompt's group: its samples side by side, their tokens with log-prob and version.

All samples of a group, with the numbers of each token, are in `batches/` for the last steps of a
run; of earlier steps samples.jsonl has a few. The words of a token need the tokenizer's file, which
is read from the model's folder where it is here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from pentad.core.errors import UserError
from pentad.core.types import Group, Sample
from pentad.trainer.saving.batches import (
    KeptBatch,
    TrainedTokens,
    kept_steps,
    read_batch,
    read_trained,
)

MAX_TOKENS = 20_000
"""A longer sample is shown as text alone."""


class GroupReader:
    """Groups of one run."""

    def __init__(self, folder: Path, config: Mapping[str, Any], home: Path) -> None:
        self.folder = folder / "batches"
        self.config = config
        self._batch: KeptBatch | None = None
        self._words = TokenWords(config, home)

    def steps(self) -> list[int]:
        """Those whose batch is kept."""
        try:
            return kept_steps(self.folder)
        except OSError:
            return []

    def gids(self, step: int) -> list[dict[str, Any]]:
        """The groups of a kept batch, each with its rewards."""
        batch = self._read(step)
        found = [] if isinstance(batch, str) else batch.groups
        return [{"gid": g.gid, "rewards": [s.reward for s in g.samples]} for g in found]

    def group(self, step: int, gid: int, recorded: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The group of a step; `recorded` are its lines in samples.jsonl."""
        batch = self._read(step)
        words = [] if not isinstance(batch, str) else [batch]
        groups = [] if isinstance(batch, str) else batch.groups
        kept = next((group for group in groups if group.gid == gid), None)
        if kept is None and not words:
            words = [f"batches/step{step}.groups has no group {gid}"]
        head = recorded[0] if recorded else {}
        samples = (
            self._from_records(recorded) if kept is None else self._from_group(step, kept, recorded)
        )
        if self._words.problem:
            words.append(self._words.problem)
        question, prompt = head.get("question"), head.get("prompt")
        if kept is not None and prompt is None and self._words.tokenizer is not None:
            first = kept.samples[0]
            given = first.ids[: int(np.argmax(first.mask)) if first.mask.any() else len(first.ids)]
            prompt = self._words.tokenizer.decode(given.tolist(), skip_special_tokens=False)
        return {
            **{"step": step, "gid": gid, "question": question, "prompt": prompt},
            **{"expected": head.get("expected"), "is_whole": kept is not None},
            **{"samples": samples, "notes": words},
        }

    def _read(self, step: int) -> KeptBatch | str:
        """The batch, or why it is not here."""
        if self._batch is not None and self._batch.step == step:
            return self._batch
        if step not in self.steps():
            return (
                f"step {step}: its batch is not kept (telemetry.keep_batches), so only the samples "
                "that samples.jsonl has are shown, without numbers for each token"
            )
        try:
            self._batch = read_batch(self.folder, step)
        except UserError as error:
            return str(error)
        return self._batch

    def _from_records(self, recorded: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        found = []
        for line in recorded:
            ids, spans = line.get("ids") or [], line.get("trained_spans") or []
            mask = [any(begin <= n < end for begin, end in spans) for n in range(len(ids))]
            tokens = {"words": self._words.of(ids), "mask": mask} if len(ids) <= MAX_TOKENS else {}
            found.append({**{k: v for k, v in line.items() if k != "ids"}, "tokens": tokens})
        return found

    def _from_group(
        self, step: int, group: Group, recorded: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        figures = read_trained(self.folder, step)
        picks = {line.get("index"): line.get("pick") for line in recorded}
        rewards = [s.reward for s in group.samples if s.reward is not None]
        mean = sum(rewards) / len(rewards) if rewards else None
        return [
            {
                **{"index": n, "pick": picks.get(n), "text": s.text, "turns": s.turns},
                **{"reward": s.reward, "reward_parts": s.reward_parts, "finish": s.finish},
                "above_mean": None if mean is None or s.reward is None else s.reward - mean,
                "num_sampled": s.num_sampled,
                "tokens": self._tokens(s, figures.get((group.gid, n)))
                if len(s.ids) <= MAX_TOKENS
                else {},
            }
            for n, s in enumerate(group.samples)
        ]

    def _tokens(self, sample: Sample, trained: TrainedTokens | None) -> dict[str, Any]:
        figures = {"logprob": sample.rollout_logprobs, **sample.columns}
        if trained is not None and len(trained.logprobs) == len(sample.ids):
            moved = trained.logprobs - sample.rollout_logprobs
            figures |= {"advantage": trained.advantages, "ratio": np.exp(moved.clip(-20, 20))}
        columns = {
            name: [round(float(v), 5) for v in values]
            for name, values in figures.items()
            if len(values) == len(sample.ids)
        }
        return {
            "words": self._words.of(sample.ids.tolist()),
            "mask": sample.mask.tolist(),
            "columns": columns | {"version": sample.versions.tolist()},
        }


class TokenWords:
    """What tokens say, by the tokenizer of the run's model."""

    def __init__(self, config: Mapping[str, Any], home: Path) -> None:
        self._config = config
        self._home = home
        self._is_read = False
        self.tokenizer: Tokenizer | None = None
        self.problem = ""

    def of(self, ids: Sequence[int]) -> list[str]:
        """Their numbers where there is no tokenizer."""
        self._read()
        if self.tokenizer is None:
            return [str(n) for n in ids]
        many = self.tokenizer.decode_batch([[n] for n in ids], skip_special_tokens=False)
        return [word or f"<{n}>" for n, word in zip(ids, many, strict=True)]

    def _read(self) -> None:
        if self._is_read:
            return
        self._is_read = True
        actor = self._config.get("actor") or {}
        folder = self._config.get("tokenizer_path") or actor.get("path") or ""
        place = self._home / Path(str(folder)).expanduser() / "tokenizer.json"
        try:
            self.tokenizer = Tokenizer.from_file(str(place))
        except Exception as error:  # the library raises Exception itself for what it cannot read
            self.problem = f"{place}: cannot be read ({error}); tokens are shown by their numbers"
