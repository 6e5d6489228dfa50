"""Weights by files of which only what changed is written: receivers end with all, or it raises."""

import asyncio
import json
import os
import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from ticket_receivers import (
    DIMS,
    Receiver,
    file_of,
    in_text,
    no_threads_left,
    policy,
    transpose,
    weights,
)

import pentad.sync.deltas as deltas
from pentad.core.errors import InfraFailure, RunError, UserError, WrongWeights
from pentad.models.hf_weights import hf_metadata, iter_hf, native_shards
from pentad.ops.digest import digest_of
from pentad.sync.deltas import changed_modules, module_of
from pentad.sync.published import INDEX, open_weights, wait_written
from pentad.sync.publisher import Publisher, take_snapshot
from pentad.sync.shards import ShardWriter
from pentad.sync.weights_dir import WeightsDir, snapshot_of

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
        self.way, self.weights_dir = way, WeightsDir("file", folder, deltas=deltas)
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
        folder, deltas = self.weights_dir.folder, self.weights_dir.deltas
        shards = native_shards(self.model)
        made = self.writer.write(version, shards, "file", folder, deltas=deltas)
        told = json.loads(json.dumps({"weights": asdict(made.weights), "d": made.digest.entries}))
        snapshot = snapshot_of(told["weights"], told["d"])
        self.weights_dir.retain(snapshot)
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
        first, other = Receiver(learner.weights_dir), Receiver(learner.weights_dir)
        assert await learner.publish([first, other], 1) >= WHOLE
        learner.step()
        small = await learner.publish([first], 2)
        assert small < 0.6 * WHOLE
        check(first, learner)
        learner.step("norm")
        tiny = await learner.publish([first, other], 3)  # one of them missed a version
        assert 0 < tiny < 0.05 * WHOLE
        assert await learner.publish([first, other], 4) == 0
        late = Receiver(learner.weights_dir)
        await late.pull(learner.weights_dir.newest)
        for receiver in (first, other, late):
            check(receiver, learner)
            assert receiver.version == 4

    asyncio.run(main())


@pytest.mark.parametrize("way", ["own", "ranks"])
def test_a_file_system_without_links_gets_all_tensors(tmp_path, way, monkeypatch):
    def refused(*_):
        raise OSError(1, "Operation not permitted")

    async def main():
        learner = Learner(way, tmp_path)
        first = Receiver(learner.weights_dir)
        await learner.publish([first], 1)
        monkeypatch.setattr("os.link", refused)
        for version in (2, 3):
            learner.step()
            assert await learner.publish([first], version) >= WHOLE
            check(first, learner)
            assert first.version == version

    asyncio.run(main())


@pytest.mark.parametrize("way", ["own", "ranks"])
def test_who_holds_the_base_reads_the_new_file_alone(tmp_path, way):
    async def main():
        learner = Learner(way, tmp_path)
        receiver, late = Receiver(learner.weights_dir), Receiver(learner.weights_dir)
        await learner.publish([receiver], 1)
        learner.step()
        snapshot = learner.take(2)
        published = await learner.weights_dir.publish(2, snapshot)
        index = index_of(asdict(published.weights))
        (old,) = set(index["weight_map"].values()) - {index["newest"]}
        (Path(published.weights.place) / old).unlink()
        await receiver.pull(published)
        check(receiver, learner)
        with pytest.raises(InfraFailure, match="cannot be read"):
            await late.pull(published)

    asyncio.run(main())


@pytest.mark.parametrize("way", ["own", "ranks"])
def test_files_of_old_versions_are_bounded_and_go_with_the_last_ticket_that_names_them(
    tmp_path, way
):
    """Every version changes another half: what the old files hold is stale before long."""

    async def main():
        learner = Learner(way, tmp_path)
        receiver = Receiver(learner.weights_dir)
        most = 0
        for version in range(1, 13):
            learner.step(("layers.0.", "layers.1.", "norm")[version % 3])
            await learner.publish([receiver], version)
            (folder,) = tmp_path.iterdir()
            found = list(folder.glob("*.safetensors"))
            index = index_of(asdict(learner.weights_dir.newest.weights))
            assert {path.name for path in found} == set(index["weight_map"].values())
            most = max(most, sum(path.stat().st_size for path in found))
            check(receiver, learner)
        assert most <= 2.2 * WHOLE
        learner.weights_dir.drop_all()
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
        weights_dir = WeightsDir("file", tmp_path)
        receiver = Receiver(weights_dir, dims=mixture)
        pairs = weights(1, mixture)
        await receiver.install(1, pairs)
        pairs = moved(pairs, ".experts.3.")
        receipt = await receiver.install(2, pairs)
        changed = sum(t.nbytes for n, t in pairs if ".experts.3." in n)
        assert changed < receipt.num_bytes < changed + 2048  # of the header
        assert receipt.digest == digest_of(pairs).hex()

    asyncio.run(main())


@pytest.mark.parametrize("way", ["own", "ranks"])
def test_without_deltas_all_is_written_every_time(tmp_path, way):
    async def main():
        learner = Learner(way, tmp_path, deltas=False)
        receiver = Receiver(learner.weights_dir)
        for version in (1, 2):
            assert await learner.publish([receiver], version) >= WHOLE

    asyncio.run(main())


def index_of(published):
    return json.loads(file_of(published, INDEX).read_text())


def in_index(change):
    """Damage to the index; `change` gets it."""

    def damage(published):
        index = index_of(published)
        change(index)
        file_of(published, INDEX).write_text(json.dumps(index))

    return damage


def stale(index):
    """A tensor that changed is said to be as before."""
    index["weight_map"][SQUARE] = index["weight_map"]["model.embed_tokens.weight"]


def newest_of(published):
    return file_of(published, index_of(published)["newest"])


def exchange(published):
    """Another tensor's bytes."""

    def changed(text):
        header = json.loads(text)
        one, two = header[SQUARE], header["model.layers.1.self_attn.o_proj.weight"]
        one["data_offsets"], two["data_offsets"] = two["data_offsets"], one["data_offsets"]
        return json.dumps(header, separators=(",", ":"))

    in_text(changed, index_of(published)["newest"])(published)


FAULTS = {
    "dropped": (in_index(lambda index: index["weight_map"].pop(SQUARE)), UserError),
    "dropped of what did not change": (
        in_index(lambda index: index["weight_map"].pop("model.embed_tokens.weight")),
        UserError,
    ),
    "transposed": (lambda t: transpose(newest_of(t), SQUARE), WrongWeights),
    "another's": (exchange, WrongWeights),
    "stale": (in_index(stale), WrongWeights),
    "cut": (lambda t: os.truncate(newest_of(t), t["num_bytes"] - 64), RunError),
}


@pytest.mark.parametrize("way", ["own", "ranks"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_delta_that_is_not_the_rest_of_the_weights_raises(tmp_path, way, fault):
    damage, error = FAULTS[fault]

    async def main():
        learner = Learner(way, tmp_path)
        receiver = Receiver(learner.weights_dir)
        await learner.publish([receiver], 1)
        learner.step()

        whole = {}

        def spoil(published):
            index = index_of(published)
            assert index["base"] == list(held) and index["weight_map"][SQUARE] == index["newest"]
            for path in (file_of(published, INDEX), newest_of(published)):
                whole[path] = path.read_bytes()
            damage(published)
            return published

        held = receiver.own.held
        receiver.damage = spoil
        with pytest.raises(error):
            await learner.publish([receiver], 2)
        receiver.damage = lambda ticket: ticket
        for path, data in whole.items():
            path.write_bytes(data)
        await receiver.pull(learner.weights_dir.newest)
        check(receiver, learner)

    asyncio.run(main())


@pytest.mark.parametrize("way", ["own", "ranks"])
@pytest.mark.parametrize("kind", ["claimed", "altered"])
def test_a_delta_against_the_wrong_base_raises(tmp_path, way, kind):
    """The receiver is told that it holds the base, or holds something else than it thinks."""

    async def main():
        learner = Learner(way, tmp_path)
        receiver = Receiver(learner.weights_dir)
        await learner.publish([receiver], 1)
        learner.step("layers.0.")
        if kind == "claimed":
            await learner.publish([Receiver(learner.weights_dir)], 2)
            learner.step()
            claim = in_index(lambda index: index.update(base=list(held)))
            held = receiver.own.held
            receiver.damage = lambda published: claim(published) or published
        else:
            with torch.no_grad():
                receiver.own.sampler.engine.model.get_parameter("norm.weight").add_(1)
        with pytest.raises(WrongWeights, match="holds version 3"):
            await learner.publish([receiver], 3)
        receiver.damage = lambda ticket: ticket
        await receiver.pull(learner.weights_dir.newest)  # all of it, which heals
        check(receiver, learner)

    asyncio.run(main())


def test_a_file_that_could_not_be_written_is_no_base(tmp_path, monkeypatch):
    learner = Learner("ranks", tmp_path)
    shards = native_shards(learner.model)

    def write(version):
        made = learner.writer.write(version, shards, "file", tmp_path, deltas=True)
        learner.writer.close()
        return made.weights

    def full(*_):
        raise OSError(28, "No space left on device")

    write(1)
    learner.step()
    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "_write_blocks", full)
        failed = write(2)
        with pytest.raises(RunError, match="No space left on device"):
            asyncio.run(wait_written(failed))
    ticket = write(3)
    assert ticket.num_bytes >= WHOLE
    got = open_weights(json.loads(json.dumps(asdict(ticket))))
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
    write, waits = deltas.make_file, threading.Event()

    def slow(path, layout):
        waits.wait(30)
        return write(path, layout)

    async def main():
        weights_dir = WeightsDir("file", tmp_path)
        await weights_dir.publish(1, first)
        if way == "twice":
            with pytest.raises(UserError, match="given twice"):
                await weights_dir.publish(2, [*second, second[0]])
        else:
            monkeypatch.setattr(deltas, "make_file", slow)
            task = asyncio.create_task(weights_dir.publish(2, second))
            await asyncio.sleep(0.1)
            task.cancel()
            await asyncio.wait([task])
            monkeypatch.setattr(deltas, "make_file", write)
            await weights_dir.publish(3, moved(first, "layers.1.self_attn.k_proj"))
            waits.set()
            await asyncio.sleep(0.3)  # its thread ends
        published = await weights_dir.publish(4, second)
        return open_weights(json.loads(json.dumps(asdict(published.weights))))

    assert digest_of(asyncio.run(main())).hex() == digest_of(second).hex()
