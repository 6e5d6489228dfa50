"""Garbage collections of a run that visit all objects do not interrupt a step."""

import gc

import pytest

from pentad.core import device
from pentad.trainer.run import Run


@pytest.fixture
def unfrozen():
    """The heap of the tests' process is frozen."""
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


@pytest.mark.usefixtures("unfrozen")
def test_full_collections_of_a_run_fall_between_its_steps(lab, monkeypatch):
    """Each step leaves 300,000 objects: some 30 collections of the youngest in a step, and a full
    one in five."""
    inside, found, kept = [False], [], []
    step = Run._step

    async def allocating(run, source):
        inside[0] = True
        await step(run, source)
        kept.append([[] for _ in range(300_000)])
        inside[0] = False

    def note(phase, info):
        if phase == "stop" and info["generation"] == 2:
            found.append((len(kept), inside[0]))

    monkeypatch.setattr(Run, "_step", allocating)
    monkeypatch.setattr(device, "WARM_STEPS", 2)
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    gc.callbacks.append(note)
    try:
        lab.sft("total_train_steps=14", "saver.freq_steps=null")
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*before)
    warm = [is_inside for number, is_inside in found if 2 < number + is_inside < 14]
    assert warm and not any(warm), found
