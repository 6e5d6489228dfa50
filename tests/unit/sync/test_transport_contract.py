"""One contract for all ways weights travel: a receiver of other weights ends with those published,
proven by its receipt; a tensor that is dropped, transposed, given twice or stale raises."""

import asyncio
import json
import threading
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from ticket_receivers import policy

from pentad.core.errors import InfraFailure, RunError, UserError
from pentad.core.roles import Installed
from pentad.models.hf_weights import hf_metadata, install_hf, iter_hf, native_shards
from pentad.ops.digest import digest_of
from pentad.sync.group import broadcast, send_all, weight_group
from pentad.sync.published import open_weights, wait_written
from pentad.sync.publisher import Publisher, take_snapshot
from pentad.sync.shards import ShardWriter
from pentad.sync.transport import DiskTransport

SQUARE = "model.layers.0.self_attn.q_proj.weight"


def by_ticket(kind, device="cpu"):
    def carry(folder, version=1, seed=1):
        model = policy(seed, device=device)
        shards = native_shards(model)
        writer = ShardWriter(shards, model.weight_map, hf_metadata(model), None)
        made = writer.write(version, shards, kind, folder)
        expected = digest_of(iter_hf(model)).hex()
        for parameter in model.parameters():  # the learner goes on
            parameter.data.zero_()
        asyncio.run(wait_written(made.weights))
        assert made.weights.digest == expected
        return open_weights(json.loads(json.dumps(asdict(made.weights))))

    return carry


def in_process(folder, seed=1):
    return list(take_snapshot(1, iter_hf(policy(seed)), copy=True))


def by_broadcast(folder, seed=1):
    sent = [(name, tensor.detach()) for name, tensor in iter_hf(policy(seed))]
    got = [(name, torch.empty_like(tensor)) for name, tensor in sent]

    def join(rank):
        store = dist.FileStore(str(folder / "store"), 2)
        return weight_group(store, rank, 2, "gloo", timedelta(seconds=120))

    def receive():
        group = join(1)
        for _, tensor in got:
            broadcast(group, tensor)

    thread = threading.Thread(target=receive)
    thread.start()
    send_all(join(0), sent)
    thread.join()
    return got


TRANSPORTS = {
    "in process": in_process,
    "shared memory": by_ticket("shm"),
    "files of ranks": by_ticket("file"),
    "gloo broadcast": by_broadcast,
}
FAULTS = {
    "dropped": (lambda pairs, old: pairs[:3] + pairs[4:], UserError, "missing"),
    "duplicated": (lambda pairs, old: [*pairs, pairs[3]], UserError, "given twice"),
    "transposed": (
        lambda pairs, old: [(n, x.T.contiguous() if n == SQUARE else x) for n, x in pairs],
        RunError,
        "holds version 1, digest",
    ),
    "stale": (
        lambda pairs, old: [(n, old[n] if n == SQUARE else x) for n, x in pairs],
        RunError,
        "holds version 1, digest",
    ),
}


class Replica:
    """Installs what arrived in a model of other weights, and answers with what it then holds."""

    def __init__(self, arrived):
        self.model, self.arrived = policy(9), arrived

    async def install(self, version, weights):
        num = install_hf(self.model, self.arrived)
        return Installed(version, num, digest_of(iter_hf(self.model)).hex())


def publish(arrived):
    replica = Replica(arrived)
    snapshot = take_snapshot(1, iter_hf(policy(1)), copy=False)
    asyncio.run(Publisher([replica]).publish(snapshot))
    return dict(iter_hf(replica.model))


@pytest.mark.parametrize("name", TRANSPORTS)
def test_the_receiver_ends_with_what_was_published(tmp_path, name):
    held = publish(TRANSPORTS[name](tmp_path))
    true = dict(iter_hf(policy(1)))
    assert held.keys() == true.keys()
    assert all(torch.equal(held[key], true[key]) for key in true)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", TRANSPORTS)
def test_what_is_not_the_weights_raises(tmp_path, name, fault):
    spoil, error, said = FAULTS[fault]
    arrived = spoil(TRANSPORTS[name](tmp_path), dict(iter_hf(policy(5))))
    with pytest.raises(error, match=said):
        publish(arrived)


@pytest.mark.gpu
def test_one_buffer_on_the_gpu_holds_all(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    model = policy(1, device="cuda")
    shards = native_shards(model)
    made = ShardWriter(shards, model.weight_map, hf_metadata(model), None).write(
        1, shards, "ipc", tmp_path
    )
    assert made.kept is not None and made.kept.numel() == made.weights.num_bytes
    assert made.weights.digest == digest_of(iter_hf(model)).hex()


def test_a_disk_that_is_full_is_said_by_the_mark(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    model = policy(1)
    shards = native_shards(model)
    writer = ShardWriter(shards, model.weight_map, hf_metadata(model), None)
    monkeypatch.setattr("os.pwrite", full)
    made = writer.write(1, shards, "file", tmp_path)
    writer.close()
    with pytest.raises(RunError, match="cannot be written .No space left on device.; make room"):
        asyncio.run(wait_written(made.weights))


def test_a_mark_that_cannot_be_written_is_taken_away_so_that_nobody_waits(tmp_path, monkeypatch):
    model = policy(1)
    shards = native_shards(model)
    writer = ShardWriter(shards, model.weight_map, hf_metadata(model), None)
    write = Path.write_text

    def full(path, *given, **options):
        if path.name.endswith(".draft"):
            raise OSError(28, "No space left on device")
        return write(path, *given, **options)

    monkeypatch.setattr(Path, "write_text", full)
    made = writer.write(1, shards, "file", tmp_path)
    writer.close()
    with pytest.raises(InfraFailure, match=r"rank-0: .*No such file"):
        asyncio.run(wait_written(made.weights))


def test_weights_on_the_host_go_through_shared_memory_where_a_gpu_was_meant(tmp_path):
    model = policy(1)
    shards = native_shards(model)
    writer = ShardWriter(shards, model.weight_map, hf_metadata(model), None)
    made = writer.write(1, shards, "ipc", tmp_path)
    assert made.kept is None and made.weights.kind == "shm"
    got = open_weights(asdict(made.weights))
    assert digest_of(got).hex() == digest_of(iter_hf(model)).hex()


@pytest.mark.parametrize("kind", ["shm", "file"])
@pytest.mark.parametrize("is_private", [True, False])
def test_a_server_of_our_own_reads_the_published_file(tmp_path, kind, is_private):
    """A server that may be another user's, or on another machine, gets a copy that it may read."""
    (tmp_path / "published").mkdir()
    pairs = by_ticket(kind)(tmp_path / "published")
    seen = []

    async def ask(method, path):
        seen.append((Path(path), load_file(path)))
        return [{}]

    transport = DiskTransport(tmp_path / "transfer", is_private=is_private)
    asyncio.run(transport.send(pairs, ask))
    ((path, read),) = seen
    assert digest_of(read.items()).hex() == digest_of(pairs).hex()
    assert path.is_relative_to(tmp_path / "published") == path.exists() == is_private
