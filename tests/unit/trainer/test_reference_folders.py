"""Which references of a run are kept: those that a checkpoint may go on with."""

import asyncio
from pathlib import Path

import pytest

from pentad.core.errors import UserError
from pentad.trainer.pumps.scorers import RefreshedReference


class FolderMaker:
    """Stands for the learner, which writes, and for the scorer, which reads."""

    def __init__(self):
        self.read = []

    async def call(self, method, **given):
        if method == "export":
            Path(given["folder"]).mkdir(parents=True)
        else:
            assert Path(given["weights"]).is_dir()
            self.read.append(Path(given["weights"]).name)


def test_every_reference_that_a_checkpoint_needs_is_kept(tmp_path):
    both, saved = FolderMaker(), 0
    reference = RefreshedReference(both, both, tmp_path, 5, 64, lambda: saved)

    def refresh_up_to(steps):
        for version in steps:
            asyncio.run(reference.refresh(version))
        return sorted(int(one.name) for one in tmp_path.iterdir())

    assert refresh_up_to((5, 10, 15, 20)) == [5, 10, 15, 20], "no checkpoint yet"
    saved = 22
    assert refresh_up_to((25, 30, 35)) == [20, 25, 30, 35]
    asyncio.run(reference.resume(22))
    assert both.read[-1] == "20" and reference.scores(24) and not reference.scores(25)
    with pytest.raises(UserError, match="the reference after step 15 is not in"):
        asyncio.run(reference.resume(17))
