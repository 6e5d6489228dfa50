"""Weights by ticket: receivers end with exactly what was handed over, or somebody raises."""

import asyncio
import errno
import gc
import json
import os
import weakref
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from sections import sampler_settings
from ticket_receivers import (
    DIMS,
    Receiver,
    file_of,
    in_header,
    in_text,
    no_threads_left,
    transpose,
    weights,
)

from pentad.core.errors import InfraFailure, RunError, UserError, WrongWeights
from pentad.core.roles import Installed
from pentad.models.hf_weights import iter_hf
from pentad.models.registry import create_model
from pentad.ops.digest import digest_of
from pentad.runtime.local_roles import LocalRuntime
from pentad.runtime.restarts import RestartPolicy
from pentad.runtime.roles import RoleSpec
from pentad.samplers import remote
from pentad.samplers.remote import HostedSettings, RoleSampler
from pentad.samplers.replica import Replica
from pentad.sync.published import WEIGHTS, open_weights
from pentad.sync.publisher import Publisher, take_snapshot
from pentad.sync.weights_dir import WeightsDir, snapshot_of

__all__ = ["no_threads_left"]
"""A fixture."""
SQUARE = "model.layers.0.self_attn.q_proj.weight"
OTHER = "model.layers.1.self_attn.q_proj.weight"


def publish(weights_dir, receivers, version, pairs):
    snapshot = take_snapshot(version, pairs, copy=False)
    return asyncio.run(Publisher(receivers).publish(snapshot))


@pytest.mark.parametrize("kind", ["shm", "file"])
def test_all_receivers_end_with_what_was_published(tmp_path, kind, monkeypatch):
    weights_dir = WeightsDir(kind, tmp_path)
    receivers = [Receiver(weights_dir) for _ in range(3)]
    written = []
    make = WeightsDir._make
    monkeypatch.setattr(WeightsDir, "_make", lambda *given: written.append(given) or make(*given))

    async def main():
        for version in (1, 2):
            sent = weights(version)
            await Publisher(receivers).publish(take_snapshot(version, sent, copy=False))
            for receiver in receivers:
                assert receiver.version == version
                assert all(torch.equal(receiver.held[name], tensor) for name, tensor in sent)

    asyncio.run(main())
    assert len(written) == 2, "once for all receivers"
    assert len(list(tmp_path.iterdir())) == 1, "the newest stays, the one before it goes"
    (folder,) = tmp_path.iterdir()
    if kind == "shm":
        assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
    modes = {path.stat().st_mode & 0o777 for path in folder.glob("*.safetensors")}
    assert folder.stat().st_mode & 0o777 == 0o700 and modes == {0o600}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int8])
def test_every_dtype_and_shape_comes_through_bit_for_bit(tmp_path, dtype):
    torch.manual_seed(0)
    shapes = [(3, 5), (), (0, 4), (7,), (2, 3, 5)]
    pairs = [(f"t{i}", (torch.randn(s) * 50).to(dtype)) for i, s in enumerate(shapes)]
    pairs.append(("turned", torch.randn(4, 6).to(dtype).T))

    async def main():
        weights_dir = WeightsDir("shm", tmp_path)
        return (await weights_dir.publish(1, pairs)).weights

    got = open_weights(json.loads(json.dumps(asdict(asyncio.run(main())))))
    assert digest_of(got).hex() == digest_of(pairs).hex()
    shapes = {name: tuple(tensor.shape) for name, tensor in pairs}
    assert {name: tuple(tensor.shape) for name, tensor in got} == shapes


def renamed(header):
    header["model.nothing"] = header.pop(SQUARE)


def moved(header):
    one, two = header[SQUARE], header[OTHER]
    one["data_offsets"], two["data_offsets"] = two["data_offsets"], one["data_offsets"]


FAULTS = {
    "dropped": (in_header(lambda h: h.pop(SQUARE)), RunError),
    "duplicated": (in_text(lambda text: text.replace(OTHER, SQUARE)), RunError),
    "renamed": (in_header(renamed), UserError),
    "misshapen": (in_header(lambda h: h[SQUARE].update(shape=[1])), RunError),
    "moved": (in_header(moved), WrongWeights),
    "beyond": (in_header(lambda h: h[SQUARE].update(data_offsets=[99999, 104095])), RunError),
    "short": (lambda t: os.truncate(file_of(t), t["num_bytes"] - 64), RunError),
    "gone": (lambda t: file_of(t).unlink(), InfraFailure),
}


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_damaged_ticket_or_file_raises(tmp_path, fault):
    damage, error = FAULTS[fault]

    def spoil(ticket):
        damage(ticket)
        return ticket

    weights_dir = WeightsDir("shm", tmp_path)
    receiver = Receiver(weights_dir, spoil)
    before = {name: tensor.clone() for name, tensor in receiver.held.items()}
    with pytest.raises(error):
        publish(weights_dir, [receiver], 1, weights(1))
    if error is not WrongWeights:  # found by the receipt, when it is there
        assert all(torch.equal(receiver.held[name], before[name]) for name in before)


def flip_bit(path):
    with path.open("r+b") as file:
        file.seek(-1000, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1000, os.SEEK_END)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("fault", ["altered", "transposed", "stale"])
def test_other_weights_than_the_tickets_raise_by_the_receipt(tmp_path, fault):
    weights_dir = WeightsDir("shm", tmp_path)
    old = asyncio.run(WeightsDir("shm", tmp_path).publish(0, weights(5))).weights.place

    def spoil(ticket):
        if fault == "altered":
            flip_bit(file_of(ticket))
        elif fault == "transposed":
            transpose(file_of(ticket), SQUARE)
        else:
            (Path(old) / WEIGHTS).replace(file_of(ticket))
        return ticket

    spoilt = Receiver(weights_dir, spoil)
    told = "holds version 1, digest .* received version 1 with digest"
    with pytest.raises(WrongWeights, match=told):
        publish(weights_dir, [spoilt], 1, weights(1))
    assert spoilt.version == -1


def test_waiting_for_weights_that_another_process_writes_ends_with_that_process(tmp_path):
    made = asyncio.run(WeightsDir("shm", tmp_path).publish(1, weights(1))).weights
    mark = Path(made.place) / "rank-0"
    mark.write_text("writing")
    told = snapshot_of(asdict(replace(made, writers=(0,))), {})

    async def main():
        weights_dir = WeightsDir("shm", tmp_path)
        weights_dir.retain(told)

        def check():
            raise RunError("the rank is gone")

        weights_dir.check = check
        with pytest.raises(RunError, match="the rank is gone"):
            await weights_dir.publish(1, told)
        mark.write_text("")
        assert (await weights_dir.publish(1, told)).is_elsewhere and not weights_dir.retained

    asyncio.run(main())


def test_a_ticket_that_is_read_outlives_a_newer_one(tmp_path):
    async def main():
        weights_dir = WeightsDir("shm", tmp_path)
        first = await weights_dir.publish(1, weights(1))
        with weights_dir.reading(first) as ticket:
            await weights_dir.publish(2, weights(2))
            assert len(open_weights(asdict(ticket))) == len(weights(1))
        with pytest.raises(InfraFailure, match="cannot be read"):
            open_weights(asdict(ticket))

    asyncio.run(main())


def test_one_object_is_written_once_and_another_anew(tmp_path):
    async def main():
        weights_dir = WeightsDir("shm", tmp_path)
        pairs = weights(1)
        published = await asyncio.gather(*(weights_dir.publish(1, pairs) for _ in range(5)))
        assert len(set(map(id, published))) == 1
        assert await weights_dir.publish(1, list(pairs)) is not published[0]

    asyncio.run(main())


def test_a_snapshot_that_was_written_is_not_kept(tmp_path):
    """A whole model, which must not wait for the next one; receivers find it by its digest."""

    async def main():
        weights_dir = WeightsDir("shm", tmp_path)
        snapshot = take_snapshot(1, weights(1), copy=True)
        again = replace(snapshot)
        published = await weights_dir.publish(1, snapshot)
        held = weakref.ref(snapshot.weights[0][1])
        assert await weights_dir.publish(1, again) is published
        assert await weights_dir.publish(2, again) is not published
        del snapshot, again, published
        for _ in range(1000):  # the thread that wrote may not have come to its end
            gc.collect()
            if held() is None:
                return
            await asyncio.sleep(0.01)
        pytest.fail("it is kept")

    asyncio.run(main())


def test_memory_that_cannot_be_had_is_an_error_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    weights_dir = WeightsDir("shm", tmp_path)
    with pytest.raises(RunError, match="cannot be written .No space left on device.; make room"):
        publish(weights_dir, [Receiver(weights_dir)], 1, weights(1))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damaged", [False, True])
def test_a_receipt_of_another_version_raises(tmp_path, damaged):
    weights_dir = WeightsDir("shm", tmp_path)
    receiver = Receiver(weights_dir)

    async def answer(method, weights):
        return asdict(Installed(weights["version"] - damaged, 1, weights["digest"]))

    receiver.call = answer
    published = asyncio.run(weights_dir.publish(3, weights(1)))
    if not damaged:
        assert asyncio.run(receiver.pull(published)).version == 3
        return
    with pytest.raises(RunError, match="rollout-0 holds version 2"):
        asyncio.run(receiver.pull(published))


# Between processes on a GPU.


def gpu_spec(folder, **changes):
    settings = HostedSettings(
        dims=replace(DIMS, head_dim=32),
        sampler=sampler_settings(max_running=4, kv_cache_tokens=256),
        device="cuda",
        dtype="float32",
        seed=9,
    )
    return RoleSpec(
        name="rollout-0",
        target=remote.TARGET,
        payload=settings.model_dump(mode="json"),
        log=folder / "rollout-0.log",
        devices=(0,),
        num_gpus=1,
        **changes,
    )


def used_bytes():
    free, total = torch.cuda.mem_get_info(0)
    return total - free


async def on_gpu(tmp_path, scenario, kind):
    runtime, weights_dir = LocalRuntime(), WeightsDir(kind, tmp_path)
    try:
        process = await runtime.start(gpu_spec(tmp_path))
        sampler = Replica(
            "rollout-0",
            lambda _: RoleSampler.open(process, weights_dir),
            weights_dir,
            RestartPolicy(0),
        )
        await sampler.open()
        try:
            return await scenario(sampler, weights_dir)
        finally:
            await sampler.close()
    finally:
        await runtime.close()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["ipc", "shm"])
def test_weights_reach_another_process_on_the_same_gpu(tmp_path, kind):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    dims = replace(DIMS, head_dim=32)

    async def scenario(sampler, weights_dir):
        for version in (1, 2, 3):
            model = create_model(dims, device="cuda", dtype=torch.float32, seed=version)
            pairs = [(name, tensor.detach()) for name, tensor in iter_hf(model)]
            expected = digest_of(pairs).hex()
            receipt = await sampler.install(version, pairs)
            assert receipt.digest == expected and receipt.version == version
            for parameter in model.parameters():  # the receiver has a copy of its own
                parameter.data.zero_()
            zeros = await sampler.install(version, list(iter_hf(model)))
            assert zeros.digest != expected

    asyncio.run(on_gpu(tmp_path, scenario, kind))


@pytest.mark.gpu
def test_two_processes_share_a_gpu_and_sleep_gives_memory_back(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch.zeros(1, device="cuda")

    async def scenario(sampler, weights_dir):
        await sampler.install(
            1, list(iter_hf(create_model(replace(DIMS, head_dim=32), device="cuda", seed=1)))
        )
        awake = used_bytes()
        await sampler.sleep()
        asleep = used_bytes()
        await sampler.wake()
        return awake, asleep, used_bytes()

    awake, asleep, again = asyncio.run(on_gpu(tmp_path, scenario, "ipc"))
    assert asleep < awake and again > asleep
