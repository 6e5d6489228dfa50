"""What a step did, as its record says it."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from pentad.checkpoint.tiers import Tiers
from pentad.core.layout import Layout
from pentad.core.types import LayerBalance, StepResult
from pentad.models.families import dims_of
from pentad.telemetry.record import MemoryUse, PhaseTimer
from pentad.trainer.rank.update import BatchFacts
from pentad.trainer.records import StepRecorder, TrainedBatch
from pentad.trainer.saving.periodic import Frequency
from pentad.trainer.saving.recovery import RecoverHandler
from pentad.trainer.saving.saver import Saver

DIMS = dims_of(
    {
        "model_type": "qwen3",
        "vocab_size": 37,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
    }
)

RECOVER = RecoverHandler(
    learner=SimpleNamespace(straggler=None),
    roles=[],
    tiers=Tiers(Path()),
    frequency=Frequency(),
    steps_per_epoch=10,
)
SAVER = Saver(learner=None, role="actor", root=Path(), frequency=Frequency(), steps_per_epoch=10)


def record_of(*balances, world=1):
    """Of a batch that made an optimizer step for each."""
    recorder = StepRecorder(
        DIMS,
        layout=Layout(dp_shard=world),
        peak_tflops=1e-6,
        steps_per_epoch=10,
    )
    steps = [
        StepResult(1.0, 2.0, 1e-3, False, 8, 1, balance=balance) for balance in balances or [()]
    ]
    trained = TrainedBatch(0, BatchFacts(steps, [], [8]), ticking_timer())
    return recorder.record(trained, MemoryUse(), SAVER, RECOVER).as_json()


def ticking_timer():
    """Whose phases take one second each."""
    seconds = iter(range(100))
    timer = PhaseTimer(clock=lambda: float(next(seconds)))
    with timer.phase("train"):
        pass
    return timer


def test_the_balance_of_every_mixture_layer_is_recorded():
    layers = (LayerBalance(1, (3, 5, 3, 5)), LayerBalance(3, (8, 0, 0, 8)))
    kernel = record_of(layers)["kernel"]
    assert (kernel["tokens_per_expert_mean"], kernel["tokens_per_expert_std"]) == (4.0, 2.5)
    assert kernel["balance"] == {
        "1": {"mean": 4.0, "std": 1.0, "min": 3.0, "max": 5.0, "num_idle": 0},
        "3": {"mean": 4.0, "std": 4.0, "min": 0.0, "max": 8.0, "num_idle": 2},
    }
    assert record_of()["kernel"]["balance"] is None


def test_the_balance_of_a_step_is_that_of_all_its_updates():
    first, second = LayerBalance(1, (3, 5, 0, 4)), LayerBalance(1, (5, 3, 0, 4))
    kernel = record_of([first], [second])["kernel"]
    whole = record_of([LayerBalance(1, (8, 8, 0, 8))])["kernel"]
    for key in ("tokens_per_expert_mean", "tokens_per_expert_std", "balance"):
        assert kernel[key] == whole[key]
    assert kernel["balance"]["1"]["num_idle"] == 1


def test_mfu_is_the_share_of_all_devices():
    one, two = record_of(world=1), record_of(world=2)
    assert two["mfu"] == pytest.approx(one["mfu"] / 2) and one["mfu"] > 0
