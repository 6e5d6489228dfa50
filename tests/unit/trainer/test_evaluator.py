"""When held-out prompts are evaluated."""

from pentad.trainer.sampling.evaluate import Evaluator
from pentad.trainer.saving.periodic import Frequency


def test_an_evaluation_whose_version_was_overtaken_is_made_at_the_next():
    """Publishing is latest-wins, so the pump may never see the version that was due."""
    evaluator = Evaluator([], None, Frequency(steps=3), lambda result: None, last_version=100)
    seen = [1, 2, 4, 5, 6, 8, 13, 14, 100]
    assert [version for version in seen if evaluator.is_due(version)] == [4, 6, 13, 100]
