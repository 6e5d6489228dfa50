"""A server whose weights are not those published is found by what it holds, and serves nothing."""

import asyncio
import struct

import pytest
import torch
from http_thread import served
from sglang_stand_in import StandIn
from subjects import DIMS, embedded, policy, server_settings

from pentad.core.errors import InfraFailure, RunError
from pentad.models.hf_weights import iter_hf
from pentad.samplers import sglang, weight_proof
from pentad.samplers.started_server import HeldVersion, HeldWeights, StartedServer
from pentad.samplers.vllm import entry_of
from pentad.samplers.weight_proof import prove, sglang_checksum
from pentad.sync.publisher import take_snapshot

Q = "model.layers.1.self_attn.q_proj.weight"
DOWN = "model.layers.{}.mlp.down_proj.weight"
OLD = dict(iter_hf(policy(9)))


def changed(name, make):
    return lambda pairs: [(n, make(dict(pairs)) if n == name else t) for n, t in pairs]


DAMAGE = {
    "dropped": changed(Q, lambda _: OLD[Q]),
    "transposed": changed(Q, lambda new: new[Q].T.reshape(new[Q].shape)),
    "duplicated": changed(DOWN.format(0), lambda new: new[DOWN.format(1)]),
    "stale": lambda _: list(OLD.items()),
    "one bit": changed("model.norm.weight", lambda new: flipped(new["model.norm.weight"])),
}


def flipped(tensor):
    words = tensor.clone().view(torch.int32)
    words[3] ^= 1
    return words.view(torch.float32)


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("transport", ["disk", "ipc"])
def test_damaged_weights_are_found_at_the_first_publish(model_folder, kind, transport):
    stand_in = StandIn(lambda: embedded(9, -1), DAMAGE[kind])

    async def main(address):
        sampler = await sglang.attach(
            address, server_settings(model_folder, weight_transport=transport)
        )
        try:
            with pytest.raises(RunError, match="its policy is not the trained one"):
                await sampler.install(0, list(iter_hf(policy(1))))
            with pytest.raises(RunError, match="its weights are unknown"):
                await sampler.health()
            stand_in.damage = lambda pairs: pairs
            await sampler.install(0, list(iter_hf(policy(1))))  # which heals it
            await sampler.health()
        finally:
            await sampler.close()

    with served(stand_in.app()) as address:
        asyncio.run(main(address))


@pytest.mark.parametrize(("every", "proven"), [(0, 1), (2, 3)])
def test_weights_are_proven_at_the_start_and_every_so_often(model_folder, every, proven):
    stand_in = StandIn(lambda: embedded(9, -1))

    async def main(address):
        settings = server_settings(model_folder, check_weights_every=every)
        sampler = await sglang.attach(address, settings)
        for version in range(5):
            await sampler.install(version, list(iter_hf(policy(version))))
        await sampler.close()

    with served(stand_in.app()) as address:
        asyncio.run(main(address))
    assert stand_in.calls.count("/weights_checker") == proven


class Alive:
    """A process that never ends."""

    name = "sglang-0"

    def poll(self):
        return None

    def check(self):
        pass

    async def stop(self):
        pass


@pytest.mark.parametrize("num_before", [0, 1])
def test_a_server_that_took_weights_while_they_changed_waits_for_the_next(
    model_folder, monkeypatch, num_before
):
    """Found by the proof at the first install, by the digest afterwards."""
    monkeypatch.setattr("pentad.samplers.process.END_PATIENCE_S", 0.01)
    live = list(iter_hf(policy(1)))

    def learner_steps(pairs):
        for _, tensor in live:
            tensor.detach().add_(1)
        return pairs

    stand_in = StandIn(lambda: embedded(9, -1))

    async def main(address):
        settings = server_settings(model_folder, check_weights_every=0)
        server, kept = await sglang.attach(address, settings, Alive()), HeldWeights()
        assert isinstance(server, StartedServer)
        for _ in range(num_before):
            await server.install(0, live)
        stand_in.damage = learner_steps
        changing = take_snapshot(1, live, copy=False)
        receipt = await server.pull(await kept.publish(1, changing))
        assert (receipt.version, server.version) == (-1, -1)
        with pytest.raises(RunError, match="sglang-0 took"):
            await server.health()
        stand_in.damage = lambda pairs: pairs
        again = take_snapshot(2, live, copy=False)
        receipt = await server.pull(await kept.publish(2, again))
        assert (receipt.version, receipt.digest) == (2, again.digest.hex())
        await server.health()
        await server.close()

    with served(stand_in.app()) as address:
        asyncio.run(main(address))


def test_copies_on_a_gpu_are_moved_to_host_memory_and_live_tensors_are_not():
    class OnGpu:
        is_cuda = True

        def cpu(self):
            return "moved"

    copied, live = (
        HeldVersion(1, [("a", OnGpu())], None),
        HeldVersion(1, [("a", OnGpu())], object()),
    )
    asyncio.run(copied.move_to_host())
    asyncio.run(live.move_to_host())
    assert copied.weights == [("a", "moved")] and isinstance(live.weights[0][1], OnGpu)


WEIGHTS = {name: tensor for name, tensor in iter_hf(policy(1))}
EXPERTS = {
    f"m.experts.{e}.{p}_proj.weight": torch.randn(4, 4)
    for e in (0, 1)
    for p in ("gate", "up", "down")
}


def held_of(weights: dict) -> dict:
    """As vLLM holds a mixture layer and a dense one."""
    mlp = "model.layers.0.mlp."
    fused = torch.cat([weights[f"{mlp}gate_proj.weight"], weights[f"{mlp}up_proj.weight"]])
    pairs = [
        torch.cat([weights[f"m.experts.{e}.{p}_proj.weight"] for p in ("gate", "up")])
        for e in (0, 1)
    ]
    downs = [weights[f"m.experts.{e}.down_proj.weight"] for e in (0, 1)]
    rows = -DIMS.vocab_size % 64
    table = weights["model.embed_tokens.weight"]
    held = {
        f"{mlp}gate_up_proj.weight": fused,
        "m.experts.w13_weight": torch.stack(pairs),
        "m.experts.w2_weight": torch.stack(downs),
        "model.embed_tokens.weight": torch.cat([table, table.new_zeros(rows, table.shape[1])]),
    }
    return {name: entry_of(tensor.bfloat16()) for name, tensor in held.items()}


PART = [n for n in WEIGHTS if "layers.0.mlp.gate" in n or "layers.0.mlp.up" in n or "embed" in n]
PUBLISHED = {name: WEIGHTS[name] for name in PART} | EXPERTS


def test_fused_stacked_and_filled_up_tensors_are_compared_in_the_servers_dtype():
    prove("here", held_of(PUBLISHED), list(PUBLISHED.items()), torch.bfloat16, entry_of)


def test_a_tensor_that_the_server_holds_in_float32_is_as_published():
    name = "model.layers.0.mlp.gate.weight"
    router = torch.randn(4, 8)
    for given in (router, router.bfloat16()):
        prove("here", {name: entry_of(given.float())}, [(name, given)], torch.bfloat16, entry_of)
    with pytest.raises(InfraFailure, match="has checksum"):
        prove("here", {name: entry_of(router + 1)}, [(name, router)], torch.bfloat16, entry_of)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (
            lambda held: held.pop("m.experts.w2_weight"),
            "2 published tensors are in none of its tensors",
        ),
        (
            lambda held: held.update(extra="1"),
            "it has extra, which corresponds to no published tensor",
        ),
        (
            lambda held: held.update(
                {"m.experts.w13_weight": held_of(PUBLISHED | swapped())["m.experts.w13_weight"]}
            ),
            "m.experts.w13_weight has checksum",
        ),
    ],
)
def test_what_is_not_as_published_is_named(damage, sentence):
    held = held_of(PUBLISHED)
    damage(held)
    with pytest.raises(InfraFailure, match=sentence):
        prove("here", held, list(PUBLISHED.items()), torch.bfloat16, entry_of)


def swapped() -> dict:
    first, second = (f"m.experts.{e}.up_proj.weight" for e in (0, 1))
    return {first: EXPERTS[second], second: EXPERTS[first]}


@pytest.mark.parametrize("numel", [1, 7, 8192, 20001])
def test_the_checksum_of_a_tensor_on_a_gpu_is_sglangs(numel):
    """Against its published definition, word by word."""
    tensor = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).half()
    data = tensor.numpy().tobytes()
    data += bytes(-len(data) % 4)
    words = struct.unpack(f"<{len(data) // 4}I", data)

    def fmix(x):
        x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
        x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
        return x ^ x >> 16

    seed, total = 0x243F6A88, 0
    second = (seed * 0x9E3779B1 ^ 0xDEADBEEF) % 2**32
    for start in range(0, len(words), 8192):
        sums = [0, 0]
        for at in range(start, min(start + 8192, len(words))):
            turned = [(at << r | at >> 32 - r) % 2**32 for r in (15, 13)]
            places = [at * 0x27D4EB2D + seed, at * 0x165667B1 + second]
            for i in (0, 1):
                sums[i] += fmix(words[at] ^ places[i] % 2**32 ^ turned[i])
        high, low = (fmix(value % 2**32 ^ len(words) * 4) for value in sums)
        total += high << 32 | low
    total %= 2**64
    total = (total ^ total >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    total = (total ^ total >> 27) * 0x94D049BB133111EB % 2**64
    assert sglang_checksum(tensor, on_gpu=True) == f"{total ^ total >> 31:016x}"


def test_sglangs_checksum_is_the_same_by_both_ways_of_computing_it():
    words = torch.randint(-(2**31), 2**31 - 1, (3 * 8192 + 5,), dtype=torch.int32)
    start = 512 * 8192
    pairs = zip(
        weight_proof._device_tiles(words, start),
        weight_proof._host_tiles(words, start),
        strict=True,
    )
    assert all(torch.equal(one, other) for one, other in pairs)
