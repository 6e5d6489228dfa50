"""Weights by files of which only what changed is written: receivers end with all, or it raises."""

import asyncio
import json
import os
import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from ticket_receivers import DIMS, Receiver, no_threads_left, policy, weights

import pentad.sync.handoff as handoff_module
from pentad.core.errors import InfraFailure, RunError, UserError, WrongWeights
from pentad.models.hf_weights import hf_metadata, iter_hf, native_shards
from pentad.ops.digest import digest_of
from pentad.sync.deltas import changed_modules, module_of
from pentad.sync.handoff import Handoff, snapshot_of
from pentad.sync.publisher import Publisher, take_snapshot
from pentad.sync.shards import ShardWriter
from pentad.sync.tickets import open_ticket, wait_written

__all__ = ["no_threads_left"]
"""A fixture."""
SQUARE = "model.layers.1.self_attn.q_proj.weight"
WHOLE = sum(tensor.nbytes for _, tensor in weights(1))


def moved(pairs, part="layers.1."):
    """As after a step that trains one layer: the others are frozen."""
    return [(name, tensor + 1 if part in name else tensor) for name, tensor in pairs]


class Learner:
    """Publishes by the files of ranks, or writes whole tensors of its own process."""

    def __init__(self, way, folder, deltas=True):
        self.way, self.handoff = way, Handoff("file", folder, deltas=deltas)
        self.model = policy(1)
        shards = native_shards(self.model)
        self.writer = ShardWriter(shards, self.model.weight_map, hf_metadata(self.model), None)
        self.ticket = None

    def step(self, part="layers.1."):
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if part in name:
                    parameter.add_(1)

    @property
    def pairs(self):
        return [(name, tensor.detach().clone()) for name, tensor in iter_hf(self.model)]

    def take(self, version):
        if self.way == "own":
            return take_snapshot(version, self.pairs, copy=True)
        folder, deltas = self.handoff.folder, self.handoff.deltas
        shards = native_shards(self.model)
        made = self.writer.write(version, shards, "file", folder, deltas=deltas)
        told = json.loads(json.dumps({"ticket": asdict(made.ticket), "d": made.digest.entries}))
        snapshot = snapshot_of(told["ticket"], told["d"])
        self.handoff.expect(snapshot)
        return snapshot

    async def publish(self, receivers, version):
        publisher = Publisher(receivers)
        await publisher.publish(self.take(version))
        return publisher.times.num_bytes


def check(receiver, learner):
    assert all(torch.equal(receiver.held[name], tensor) for name, tensor in learner.pairs)


@pytest.mark.parametrize("way", ["own", "ranks"])
def test_only_what_changed_is_written_and_everybody_ends_with_all(tmp_path, way):
    async def main():
        learner = Learner(way, tmp_path)
        first, other = Receiver(learner.handoff), Receiver(learner.handoff)
        assert await learner.publish([first, other], 1) >= WHOLE
        learner.step()
        small = await learner.publish([first], 2)
        assert small < 0.6 * WHOLE
        check(first, learner)
        learner.step("norm")
        tiny = await learner.publish([first, other], 3)  # one of them missed a version
        assert 0 < tiny < 0.05 * WHOLE
        assert await learner.publish([first, other], 4) == 0
        late = Receiver(learner.handoff)
        await late.pull(learner.handoff.newest)
        for receiver in (first, other, late):
            check(receiver, learner)
            assert receiver.version == 4

    asyncio.run(main())


@pytest.mark.parametrize("way", ["own", "ranks"])
def test_who_holds_the_base_reads_the_new_file_alone(tmp_path, way):
    async def main():
        learner = Learner(way, tmp_path)
        receiver, late = Receiver(learner.handoff), Receiver(learner.handoff)
        await learner.publish([receiver], 1)
        (old,) = learner.handoff.newest.ticket.sources
        learner.step()
        snapshot = learner.take(2)
        offer = await learner.handoff.offer(2, snapshot)
        Path(old[0]).unlink()
        await receiver.pull(offer)
        check(receiver, learner)
        with pytest.raises(InfraFailure, match="cannot be read"):
            await late.pull(offer)

    asyncio.run(main())


@pytest.mark.parametrize("way", ["own", "ranks"])
def test_files_of_old_versions_are_bounded_and_go_with_the_last_ticket_that_names_them(
    tmp_path, way
):
    """Every version changes another half: what the old files hold is stale before long."""

    async def main():
        learner = Learner(way, tmp_path)
        receiver = Receiver(learner.handoff)
        most = 0
        for version in range(1, 13):
            learner.step(("layers.0.", "layers.1.", "norm")[version % 3])
            await learner.publish([receiver], version)
            found = [path for path in tmp_path.iterdir() if "mark" not in path.name]
            named = {file for file, _ in learner.handoff.newest.ticket.sources}
            assert {str(path) for path in found} == named
            most = max(most, sum(path.stat().st_size for path in found))
            check(receiver, learner)
        assert most <= 2.2 * WHOLE
        learner.handoff.forget()
        assert not list(tmp_path.iterdir())

    asyncio.run(main())


def test_experts_that_no_token_reached_stay_where_they_are(tmp_path):
    mixture = replace(
        DIMS,
        family="qwen3_moe",
        num_experts=8,
        num_experts_per_token=2,
        moe_intermediate_size=16,
        moe_layers=(True, True),
    )

    async def main():
        handoff = Handoff("file", tmp_path)
        receiver = Receiver(handoff, dims=mixture)
        pairs = weights(1, mixture)
        await receiver.install(1, pairs)
        pairs = moved(pairs, ".experts.3.")
        receipt = await receiver.install(2, pairs)
        changed = sum(t.nbytes for n, t in pairs if ".experts.3." in n)
        assert receipt.num_bytes == changed and receipt.digest == digest_of(pairs).hex()

    asyncio.run(main())


@pytest.mark.parametrize("way", ["own", "ranks"])
def test_without_deltas_all_is_written_every_time(tmp_path, way):
    async def main():
        learner = Learner(way, tmp_path, deltas=False)
        receiver = Receiver(learner.handoff)
        for version in (1, 2):
            assert await learner.publish([receiver], version) >= WHOLE

    asyncio.run(main())


def claim(ticket):
    """A tensor that changed is said to be as before."""
    ticket["same"].append(SQUARE)


def entry(ticket, name=SQUARE):
    return next(one for one in ticket["tensors"] if one[0] == name)


def transpose(ticket):
    name, _, shape, ((number, offset, _),) = entry(ticket)
    file, size = ticket["sources"][number]
    flat = torch.from_file(file, shared=True, size=size, dtype=torch.uint8)
    part = flat[offset : offset + 4 * shape[0] * shape[1]].view(torch.float32).view(shape)
    part.copy_(part.T.clone())


def from_another(ticket):
    other = entry(ticket, "model.layers.1.self_attn.o_proj.weight")
    entry(ticket)[3] = other[3]


FAULTS = {
    "dropped": (lambda t: t["tensors"].remove(entry(t)), UserError),
    "dropped of what did not change": (
        lambda t: t["tensors"].remove(entry(t, "model.embed_tokens.weight")),
        UserError,
    ),
    "duplicated": (lambda t: t["tensors"].append(entry(t)), UserError),
    "transposed": (transpose, WrongWeights),
    "another's": (from_another, WrongWeights),
    "stale": (claim, WrongWeights),
    "cut": (lambda t: os.truncate(t["sources"][0][0], t["sources"][0][1] - 64), RunError),
}


@pytest.mark.parametrize("way", ["own", "ranks"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_delta_that_is_not_the_rest_of_the_weights_raises(tmp_path, way, fault):
    damage, error = FAULTS[fault]

    async def main():
        learner = Learner(way, tmp_path)
        receiver = Receiver(learner.handoff)
        await learner.publish([receiver], 1)
        learner.step()

        def spoil(ticket):
            assert ticket["same"] and SQUARE not in ticket["same"]
            damage(ticket)
            return ticket

        receiver.damage = spoil
        with pytest.raises(error):
            await learner.publish([receiver], 2)
        receiver.damage = lambda ticket: ticket
        await receiver.pull(learner.handoff.newest) if fault not in ("transposed", "cut") else None

    asyncio.run(main())


@pytest.mark.parametrize("way", ["own", "ranks"])
@pytest.mark.parametrize("kind", ["claimed", "altered"])
def test_a_delta_against_the_wrong_base_raises(tmp_path, way, kind):
    """The receiver is told that it holds the base, or holds something else than it thinks."""

    async def main():
        learner = Learner(way, tmp_path)
        receiver = Receiver(learner.handoff)
        await learner.publish([receiver], 1)
        learner.step("layers.0.")
        if kind == "claimed":
            await learner.publish([Receiver(learner.handoff)], 2)
            learner.step()
            receiver.damage = lambda ticket: ticket | {"base": list(receiver.own.held)}
        else:
            with torch.no_grad():
                receiver.own.sampler.engine.model.get_parameter("norm.weight").add_(1)
        with pytest.raises(WrongWeights, match="holds version 3"):
            await learner.publish([receiver], 3)
        receiver.damage = lambda ticket: ticket
        await receiver.pull(learner.handoff.newest)  # all of it, which heals
        check(receiver, learner)

    asyncio.run(main())


def test_a_file_that_could_not_be_written_is_no_base(tmp_path, monkeypatch):
    learner = Learner("ranks", tmp_path)
    shards = native_shards(learner.model)

    def write(version):
        made = learner.writer.write(version, shards, "file", tmp_path, deltas=True)
        learner.writer.close()
        return made.ticket

    def full(*_):
        raise OSError(28, "No space left on device")

    write(1)
    learner.step()
    with monkeypatch.context() as patch:
        patch.setattr("os.write", full)
        failed = write(2)
        with pytest.raises(RunError, match="No space left on device"):
            asyncio.run(wait_written(failed))
    ticket = write(3)
    assert not ticket.same and ticket.num_bytes >= WHOLE
    got = open_ticket(json.loads(json.dumps(asdict(ticket))))
    assert digest_of(got).hex() == ticket.digest == digest_of(learner.pairs).hex()


def test_a_server_gets_modules_whole():
    names = [name for name, _ in weights(1)] + ["m.experts.3.up_proj.weight", "a.k_proj.bias"]
    modules = {name: module_of(name) for name in names}
    assert modules["model.layers.0.self_attn.q_proj.weight"] == "model.layers.0.self_attn.qkv_proj"
    assert modules["model.layers.1.mlp.up_proj.weight"] == "model.layers.1.mlp.gate_up_proj"
    assert modules["m.experts.3.up_proj.weight"] == "m.experts"
    assert modules["a.k_proj.bias"] == "a.qkv_proj"
    gate = [f"mlp.gate.{name}" for name in ("weight", "e_score_correction_bias")]
    assert {module_of(name) for name in gate} == {"mlp.gate"}
    assert module_of("mlp.down_proj.bias") == module_of("mlp.down_proj.weight")
    old = weights(1)
    new = moved(old, "layers.1.self_attn.k_proj")
    held, now = (digest_of(pairs).entries for pairs in (old, new))
    sent = [name.split(".")[-2] for name, _ in changed_modules(new, held, now)]
    assert sent == ["q_proj", "k_proj", "v_proj"]
    (name,) = (name for name, _ in changed_modules(new, now, now))
    assert "norm" in name, "the smallest of all, which carries the version"


@pytest.mark.parametrize("way", ["twice", "cancelled"])
def test_what_was_never_offered_whole_is_no_base(tmp_path, monkeypatch, way):
    """A publish with a name given twice, and one that is cancelled while it is written."""
    first, second = weights(1), weights(2)
    write, waits = handoff_module.make_file, threading.Event()

    def slow(path, size):
        waits.wait(30)
        return write(path, size)

    async def main():
        handoff = Handoff("file", tmp_path)
        await handoff.offer(1, first)
        if way == "twice":
            await handoff.offer(2, [*second, second[0]])
        else:
            monkeypatch.setattr(handoff_module, "make_file", slow)
            task = asyncio.create_task(handoff.offer(2, second))
            await asyncio.sleep(0.1)
            task.cancel()
            await asyncio.wait([task])
            monkeypatch.setattr(handoff_module, "make_file", write)
            await handoff.offer(3, moved(first, "layers.1.self_attn.k_proj"))
            waits.set()
            await asyncio.sleep(0.3)  # its thread ends
        offer = await handoff.offer(4, second)
        return open_ticket(json.loads(json.dumps(asdict(offer.ticket))))

    assert digest_of(asyncio.run(main())).hex() == digest_of(second).hex()
