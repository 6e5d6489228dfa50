"""The group of a prompt: its samples, with log-prob and version of each token.

For the last steps of a run, `batches/` has all samples of a group with numbers for each token; for
earlier steps samples.jsonl has a few. Texts of tokens need the tokenizer's file in the model's
folder, if that exists on this machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from pentad.core.errors import UserError
from pentad.core.types import Group, Sample
from pentad.trainer.saving.batches import TrainedTokens, kept_steps, read_batch, read_trained
from pentad.view.lines import newest_mtime, part

MAX_TOKENS = 20_000
"""Longer samples are shown as text only."""


class GroupReader:
    """The groups of one run."""

    def __init__(self, folder: Path, config: dict[str, Any], home: Path) -> None:
        self.folder = folder / "batches"
        self.config = config
        self.home = home
        self._batch: tuple[object, list[Group]] | None = None
        """((step, file time), groups) of the batch that was read last."""

    @cached_property
    def tokenizer(self) -> Tokenizer | str:
        """The tokenizer of the run's model, or the reason why it is missing."""
        folder = part(self.config, "tokenizer_path") or part(self.config, "actor", "path") or ""
        place = self.home / Path(str(folder)).expanduser() / "tokenizer.json"
        try:
            return Tokenizer.from_file(str(place))
        except Exception as error:  # the library raises plain Exception
            return f"{place}: cannot be read ({error}); tokens are shown as ids"

    def steps(self) -> list[int]:
        """Steps whose batch is kept."""
        try:
            return kept_steps(self.folder)
        except OSError:
            return []

    def gids(self, step: int) -> list[int]:
        """The gids of a kept batch; empty if it cannot be read."""
        batch = self._read(step)
        return [] if isinstance(batch, str) else [group.gid for group in batch]

    def group(self, step: int, gid: int, recorded: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The group of a step; `recorded` are its lines in samples.jsonl."""
        batch = self._read(step)
        head = dict(recorded[0]) if recorded else {}
        found: dict[str, Any] = {"step": step, "gid": gid}
        found |= {name: head.get(name) for name in ("question", "prompt", "expected")}
        kept = next(
            (group for group in batch if isinstance(group, Group) and group.gid == gid), None
        )
        if kept is None:
            missing = f"batches/step{step}.groups has no group {gid}"
            notes = [batch if isinstance(batch, str) else missing]
            hidden = ("ids", "trained_spans")
            lines = [{k: v for k, v in line.items() if k not in hidden} for line in recorded]
            return found | {"samples": lines, "notes": notes}
        if found["prompt"] is None and isinstance(self.tokenizer, Tokenizer):
            first = kept.samples[0]
            given = first.ids[: int(np.argmax(first.mask)) if first.mask.any() else len(first.ids)]
            found["prompt"] = self.tokenizer.decode(given.tolist(), skip_special_tokens=False)
        notes = [self.tokenizer] if isinstance(self.tokenizer, str) else []
        return found | {"samples": self._samples(step, kept, recorded), "notes": notes}

    def _read(self, step: int) -> list[Group] | str:
        """The groups of a batch, or the reason why they are missing."""
        key = step, newest_mtime(self.folder / f"step{step}.groups")
        if self._batch is not None and self._batch[0] == key:
            return self._batch[1]
        if step not in self.steps():
            return (
                f"step {step}: its batch is not kept (telemetry.keep_batches), so only the samples "
                "that samples.jsonl has are shown, without numbers for each token"
            )
        try:
            self._batch = key, read_batch(self.folder, step).groups
        except UserError as error:
            return str(error)
        return self._batch[1]

    def _samples(
        self, step: int, group: Group, recorded: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        figures = read_trained(self.folder, step)
        picks = {str(line.get("index")): line.get("pick") for line in recorded}
        rewards = [s.reward for s in group.samples if s.reward is not None]
        mean = sum(rewards) / len(rewards) if rewards else None
        return [
            {
                **{"index": n, "pick": picks.get(str(n)), "text": s.text, "turns": s.turns},
                **{"reward": s.reward, "reward_parts": s.reward_parts, "finish": s.finish},
                "above_mean": None if mean is None or s.reward is None else s.reward - mean,
                "num_sampled": s.num_sampled,
                "tokens": self._tokens(s, figures.get((group.gid, n))),
            }
            for n, s in enumerate(group.samples)
        ]

    def _tokens(self, sample: Sample, trained: TrainedTokens | None) -> dict[str, Any]:
        if len(sample.ids) > MAX_TOKENS:
            return {}
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
            "words": self._words(sample.ids.tolist()),
            "mask": sample.mask.tolist(),
            "columns": columns | {"version": sample.versions.tolist()},
        }

    def _words(self, ids: Sequence[int]) -> list[str]:
        """Texts of tokens; without a tokenizer their ids."""
        if isinstance(self.tokenizer, str):
            return [str(n) for n in ids]
        many = self.tokenizer.decode_batch([[n] for n in ids], skip_special_tokens=False)
        return [word or f"<{n}>" for n, word in zip(ids, many, strict=True)]
