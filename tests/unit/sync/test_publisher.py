"""A publish succeeds only if every sampler holds exactly what was sent."""

import asyncio
import gc
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from pentad.core.errors import RunError, Transient, WrongWeights
from pentad.core.roles import Installed
from pentad.data.ledger import Ledger
from pentad.data.store import MemoryStore
from pentad.ops.digest import digest_of
from pentad.runtime import learner_client
from pentad.runtime.learner_client import LearnerClient
from pentad.sync.publisher import Publisher, take_snapshot
from pentad.telemetry.record import PhaseTimer
from pentad.trainer.pumps.state import Budget, RunState
from pentad.trainer.pumps.train_pump import PublishPump
from pentad.trainer.sampling.placement import DeviceTurns, Placement


class Receiver:
    """Keeps its own copy of the weights, which `spoil` may damage on the way in."""

    def __init__(self, spoil=lambda weights: weights):
        self.weights = {}
        self.spoil = spoil

    async def install(self, version, weights):
        arrived = {name: tensor.clone() for name, tensor in weights}
        self.weights = self.spoil(arrived)
        digest = digest_of(self.weights.items()).hex()
        return Installed(version, len(self.weights), digest)


def weights():
    return [("a", torch.randn(3, 4)), ("b", torch.randn(4))]


def test_all_samplers_end_with_the_published_weights():
    receivers = [Receiver(), Receiver()]
    sent = weights()
    publisher = Publisher(receivers)
    snapshot = take_snapshot(3, sent, copy=False)
    asyncio.run(publisher.publish(snapshot))
    assert publisher.version == 3 and snapshot.digest.hex() == digest_of(sent).hex()
    for receiver in receivers:
        assert all(torch.equal(receiver.weights[name], tensor) for name, tensor in sent)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda w: {"a": w["a"]}, "wrote 1 of 2 tensors"),
        (lambda w: {"a": w["a"].flip(0), "b": w["b"]}, "digest"),
        (lambda w: {"a": w["a"], "c": w["b"]}, "digest"),
    ],
)
def test_a_damaged_install_stops_the_run(spoil, words):
    publisher = Publisher([Receiver(), Receiver(spoil)])
    with pytest.raises(RunError, match=words) as caught:
        asyncio.run(publisher.publish(take_snapshot(1, weights(), copy=False)))
    assert "sampler 1" in str(caught.value)


def broken(_weights):
    raise RunError("its server is gone")


def test_a_sampler_that_cannot_take_weights_is_left_behind(caplog):
    alive, gone = Receiver(), Receiver(broken)
    publisher = Publisher([gone, alive])
    asyncio.run(publisher.publish(take_snapshot(1, weights(), copy=False)))
    assert publisher.version == 1 and set(alive.weights) == {"a", "b"}
    assert "sampler 0 is left out until it takes new weights: its server is gone" in caplog.text


def wrong(_weights):
    raise WrongWeights("it holds other weights")


def test_a_sampler_with_other_weights_stops_the_run_though_others_are_well():
    publisher = Publisher([Receiver(), Receiver(wrong)])
    with pytest.raises(WrongWeights, match="it holds other weights"):
        asyncio.run(publisher.publish(take_snapshot(1, weights(), copy=False)))
    assert publisher.version == -1


def test_when_no_sampler_takes_the_weights_the_run_stops():
    publisher = Publisher([Receiver(broken), Receiver(broken)])
    with pytest.raises(RunError, match="its server is gone"):
        asyncio.run(publisher.publish(take_snapshot(1, weights(), copy=False)))


def test_a_copied_snapshot_does_not_follow_the_learner():
    tensor = torch.ones(2)
    copied = take_snapshot(0, [("a", tensor)], copy=True)
    tensor.add_(1)
    assert torch.equal(copied.weights[0][1], torch.ones(2))


def test_versions_only_grow():
    publisher = Publisher([Receiver()])
    asyncio.run(publisher.publish(take_snapshot(2, weights(), copy=False)))
    with pytest.raises(RunError, match="version 1 after version 2"):
        asyncio.run(publisher.publish(take_snapshot(1, weights(), copy=False)))


def test_the_host_may_keep_what_is_published():
    tensor = torch.randn(3, 4)
    taken = take_snapshot(1, [("a", tensor)], copy=False, on_host=True)
    assert taken.weights[0][1].data_ptr() == tensor.data_ptr()  # it is there already
    copied = take_snapshot(1, [("a", tensor)], copy=True, on_host=True)
    assert copied.weights[0][1].data_ptr() != tensor.data_ptr()
    assert taken.digest.hex() == copied.digest.hex() == digest_of([("a", tensor)]).hex()


def test_what_was_published_is_let_go_of_before_the_next_comes():
    """A snapshot is a whole model: a pump that remembers its last one holds two at the next."""

    async def publish_one():
        state = RunState(Ledger(1), MemoryStore(), Budget(1, max_staleness=0, num_batches=9))
        placement = Placement(is_shared=True, max_staleness=0)
        device_turns = DeviceTurns(placement, [])
        pump = PublishPump(state, Publisher([Receiver()]), None, device_turns)
        running = asyncio.create_task(pump.run())
        sent = weights()
        alive = [weakref.ref(tensor) for _, tensor in sent]
        taken = [take_snapshot(1, sent, copy=False)]
        del sent
        await pump.submit(taken.pop(), PhaseTimer())
        await state.changed.until(lambda: state.budget.published >= 1)
        await asyncio.sleep(0)
        gc.collect()
        found = [ref() is not None for ref in alive]
        pump.close()
        await running
        return found

    assert asyncio.run(publish_one()) == [False, False]


@pytest.mark.parametrize("dies", [True, False])
def test_a_learner_that_died_is_the_cause_of_what_samplers_say(monkeypatch, dies):
    """They read its memory, and its end is known a moment later than their failure."""
    monkeypatch.setattr(learner_client, "CAUSE_S", 0.3)
    looks = []

    def check():
        looks.append(1)
        if dies and len(looks) > 2:
            raise Transient("rank 0 of 1, step 3: was ended by signal 9")

    def spoil(weights):
        raise RunError("rollout-0: CUDA error: invalid resource handle")

    async def publish_one():
        state = RunState(Ledger(1), MemoryStore(), Budget(1, max_staleness=1, num_batches=9))
        placement = Placement(is_shared=False, max_staleness=1)
        publisher, device_turns = Publisher([Receiver(spoil)]), DeviceTurns(placement, [])
        learner = SimpleNamespace(check=check, is_remote=True)
        find = partial(LearnerClient.find_cause, learner)
        pump = PublishPump(state, publisher, None, device_turns, find_cause=find)
        await pump.submit(take_snapshot(1, weights(), copy=False), PhaseTimer())
        await pump.run()

    with pytest.raises(RunError, match="ended by signal 9" if dies else "invalid resource"):
        asyncio.run(publish_one())
