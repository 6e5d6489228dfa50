"""The reference on devices of its own, made the actor as it is every `ref_update_interval` steps.

Batch b is scored by the actor as it was after the last of these steps before it, the reference that
a weight tag in the trainer would be. Groups that are sampled ahead of such a step wait for it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from pentad.core.errors import Problem, UserError
from pentad.trainer.learner_thread import LearnerThread
from pentad.trainer.scorers import ScorerCalls, ScorerProcesses


class RefreshedReference:
    """Each is a HF folder named by its version, of which a scorer that was lost starts again."""

    def __init__(
        self,
        scorer: ScorerCalls,
        learner: LearnerThread,
        folder: Path,
        every: int,
        max_row_tokens: int,
        oldest: Callable[[], int],
    ) -> None:
        self.scorer = scorer
        self.learner = learner
        self.folder = folder.absolute()
        self.every = every
        self.max_row_tokens = max_row_tokens
        self.oldest = oldest
        """Steps in the oldest checkpoint that the run may go on from."""
        self.version = 0
        """Of what the scorer holds; 0: what it began with."""

    def scores(self, batch: int) -> bool:
        """Whether it is the reference of this batch."""
        return batch - batch % self.every == self.version

    async def resume(self, trained: int) -> None:
        """What it was after so many steps."""
        version = trained - trained % self.every
        if version and not (self.folder / str(version)).is_dir():
            rule = f"the reference after step {version} is not in {self.folder}"
            remedy = "go on as the run began, or start anew with --fresh"
            raise UserError(Problem(f"ref_update_interval = {self.every}", rule, remedy))
        if version:
            await self._install(version)

    async def refresh(self, version: int) -> None:
        """After the step that made this version."""
        folder = str(self.folder / str(version))
        await self.learner.call("export", role="actor", folder=folder, is_async=False)
        await self._install(version)
        needed = self.oldest() - self.oldest() % self.every
        for old in self.folder.iterdir():
            if old.name.isdigit() and int(old.name) < min(needed, version):
                shutil.rmtree(old, ignore_errors=True)

    async def _install(self, version: int) -> None:
        given = {
            "max_row_tokens": self.max_row_tokens,
            "weights": str(self.folder / str(version)),
        }
        if isinstance(self.scorer, ScorerProcesses):
            self.scorer.steps["build"] = given  # of one that is started again
        await self.scorer.call("build", **given)
        self.version = version
