"""Replicas that pull weights by ticket, without processes of their own."""

import json
import struct
from pathlib import Path

import pytest
import torch
from sections import sampler_settings
from torch import nn

from pentad.core.dims import ModelDims
from pentad.infer.sampler import EmbeddedSampler
from pentad.models.hf_weights import iter_hf
from pentad.models.registry import create_model
from pentad.runtime.roles import RoleSpec
from pentad.samplers.remote import HostedEngine, RoleSampler
from pentad.sync.published import WEIGHTS
from pentad.weights.files import SafeFile

DIMS = ModelDims(
    family="qwen3",
    vocab_size=41,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    qk_norm=True,
    max_position=256,
)


def policy(seed, dims=DIMS, device="cpu"):
    """Every tensor random, norms too."""
    model = create_model(dims, seed=seed, device=torch.device(device))
    torch.manual_seed(seed)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


def weights(seed, dims=DIMS):
    return [(name, tensor.clone()) for name, tensor in iter_hf(policy(seed, dims))]


def file_of(published, name=WEIGHTS):
    return Path(published["place"]) / name


def in_text(change, name=WEIGHTS):
    """Damage to the header of the file of published weights, which stays as long as it is."""

    def damage(published):
        path = file_of(published, name)
        with path.open("r+b") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            text = change(file.read(length).decode()).encode()
            assert len(text) <= length
            file.seek(8)
            file.write(text.ljust(length))

    return damage


def in_header(change):
    def changed(text):
        header = json.loads(text)
        header.pop("__metadata__")  # room for what is longer
        change(header)
        return json.dumps(header, separators=(",", ":"))

    return in_text(changed)


def transpose(path, name):
    file = SafeFile(path)
    start, info = file.offsets[name], file.infos[name]
    mapped = torch.from_file(str(path), True, path.stat().st_size, dtype=torch.uint8)
    part = mapped[start : start + info.size_bytes].view(info.dtype).view(info.shape)
    part.copy_(part.T.clone())


workers = []


@pytest.fixture(autouse=True)
def no_threads_left():
    yield
    while workers:
        workers.pop().shutdown()


class Receiver(RoleSampler):
    """A sampler of a role process, hosted here and called by JSON; `damage` may change a ticket."""

    def __init__(self, weights_dir, damage=lambda ticket: ticket, dims=DIMS):
        settings = sampler_settings(max_running=4, kv_cache_tokens=256)
        self.own = HostedEngine(EmbeddedSampler(policy(9, dims), settings))
        workers.append(self.own.sampler.worker)
        self.weights_dir, self.damage = weights_dir, damage
        self.is_closed, self.version = False, -1
        self.process = RoleSpec(name="rollout-0", target="", payload={}, log=Path())

    async def install(self, version, weights):
        return await self.pull(await self.weights_dir.publish(version, weights))

    async def call(self, method, **arguments):
        sent = json.loads(json.dumps(arguments))
        sent["weights"] = self.damage(sent["weights"])
        return json.loads(json.dumps(await getattr(self.own, method)(**sent)))

    @property
    def held(self):
        return dict(iter_hf(self.own.sampler.engine.model))
