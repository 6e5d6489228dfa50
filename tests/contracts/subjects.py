"""The implementations of Sampler that the contract is asked of, all with the same tiny policy."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from socket import create_server

from http_thread import served
from sections import sampler_settings
from server_models import config_of
from sglang_stand_in import StandIn
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from pentad.core.dims import ModelDims
from pentad.core.roles import Sampler
from pentad.infer.sampler import EmbeddedSampler
from pentad.models.decoder import Decoder
from pentad.models.hf_weights import iter_hf
from pentad.models.registry import create_model
from pentad.rollout.section import RolloutConfig
from pentad.runtime.restarts import RestartPolicy
from pentad.runtime.role_host import RoleHost, job_of
from pentad.runtime.roles import RoleSpec
from pentad.samplers import remote, sglang, vllm
from pentad.samplers.process import ServerSettings
from pentad.samplers.remote import HostedSettings, RoleSampler
from pentad.samplers.replica import Replica
from pentad.samplers.section import ServerConfig
from pentad.sync.weights_dir import WeightsDir

DIMS = ModelDims(
    family="qwen3",
    vocab_size=41,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,  # the least that vLLM's attention takes on a CPU
    intermediate_size=48,
    qk_norm=True,
    tie_embeddings=True,
    max_position=1024,
    initializer_range=0.5,  # distributions far from uniform, so that wrong weights show
)


def decode(ids: list[int]) -> str:
    return "".join(chr(ord("A") + i) for i in ids)


def policy(seed: int) -> Decoder:
    return create_model(DIMS, seed=seed)


@dataclass(frozen=True)
class Subject:
    """An implementation, started with the weights of seed 1 as version 0."""

    start: Callable[[], AbstractAsyncContextManager[Sampler]]
    long: int = 200
    """Tokens for which something is still under way when the next call arrives."""
    engines: list[EmbeddedSampler] = field(default_factory=list)
    """What draws in the end, where it is in this process; the latest last."""

    async def drawing(self) -> None:
        """Until the first tokens are drawn since the start."""
        if not self.engines:
            await asyncio.sleep(0.3)
        while self.engines and not self.engines[-1].stats()["tokens_drawn"]:
            await asyncio.sleep(0.001)


def embedded(seed: int, version: int, on_update: str = "continue") -> EmbeddedSampler:
    settings = sampler_settings(max_running=16, kv_cache_tokens=2048, on_update=on_update)
    return EmbeddedSampler(policy(seed), settings, decode=decode, version=version)


def embedded_subject(on_update: str) -> Subject:
    @asynccontextmanager
    async def start() -> AsyncIterator[Sampler]:
        sampler = embedded(1, 0, on_update)
        subject.engines.append(sampler)
        try:
            yield sampler
        finally:
            await sampler.close()

    subject = Subject(start)
    return subject


@dataclass
class ThisProcess:
    """A role host among our own tasks, in the place of a process."""

    address: tuple[str, int]
    name: str = "rollout-0"
    generation: int = 0
    token: str = "token"

    def poll(self) -> str | None:
        return None

    def kill(self) -> None:
        pass

    def stacks(self) -> None:
        pass


def remote_subject(tmp_path: Path, on_update: str) -> Subject:
    """A replica of a run, over frames and tickets; its host runs beside it."""
    folder = tmp_path / "tokenizer"
    write_tokenizer(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 40}))
    settings = HostedSettings(
        dims=DIMS,
        sampler=sampler_settings(max_running=16, kv_cache_tokens=2048, on_update=on_update),
        device="cpu",
        dtype="float32",
        seed=1,
        version=0,
        tokenizer=str(folder),
    )

    @asynccontextmanager
    async def start() -> AsyncIterator[Sampler]:
        spec = RoleSpec(
            name="rollout-0",
            target=remote.TARGET,
            payload=settings.model_dump(mode="json"),
            log=tmp_path,
        )
        sock = create_server(("127.0.0.1", 0))
        job = json.loads(json.dumps(job_of(spec, "token")))
        host = RoleHost(job, sock)
        hosting = asyncio.create_task(host.run())
        weights_dir = WeightsDir("shm", tmp_path)
        process = ThisProcess(sock.getsockname())
        replica = Replica(
            "rollout-0",
            lambda _: RoleSampler.open(process, weights_dir),
            weights_dir,
            RestartPolicy(0),
        )
        await replica.open()
        subject.engines.append(host.making.result().sampler)
        try:
            yield replica
        finally:
            await replica.close()
            await hosting

    subject = Subject(start, long=400)
    return subject


def server_settings(folder: Path, **changes) -> ServerSettings:
    """Keys of the blocks `rollout` and `rollout.server` go there; the others beside them."""
    where = {
        "model_folder": str(folder),
        "dims": DIMS,
        "dtype": "float32",
        "max_context": DIMS.max_position,
        "device": "cpu",
    }
    server = {"transfer_folder": str(folder), "check_weights_every": 0}
    keys = {"max_running": 16, "max_batch_tokens": 256}
    for name, value in changes.items():
        block = server if name in ServerConfig.model_fields else where
        (keys if name in RolloutConfig.model_fields else block)[name] = value
    return ServerSettings(rollout=RolloutConfig(**keys, server=ServerConfig(**server)), **where)


@asynccontextmanager
async def attached(attach, address: str, settings: ServerSettings) -> AsyncIterator[Sampler]:
    sampler = await attach(address, settings)
    try:
        await sampler.install(0, list(iter_hf(policy(1))))
        yield sampler
    finally:
        await sampler.close()


def sglang_subject(folder: Path, version: str, **changes) -> Subject:
    @asynccontextmanager
    async def start() -> AsyncIterator[Sampler]:
        settings = server_settings(folder, **changes)
        stand_in = StandIn(lambda: embedded(9, -1, settings.rollout.on_update), version=version)
        with served(stand_in.app()) as address:
            async with attached(sglang.attach, address, settings) as sampler:
                subject.engines.append(stand_in.sampler)
                yield sampler

    subject = Subject(start)
    return subject


def vllm_subject(folder: Path, address: str, **changes) -> Subject:
    """A client of its own each time, over one server that outlives it."""

    def start() -> AbstractAsyncContextManager[Sampler]:
        return attached(vllm.attach, address, server_settings(folder, **changes))

    return Subject(start, long=400)


def write_folder(folder: Path) -> Path:
    """config.json and a tokenizer for DIMS."""
    write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(config_of(DIMS, "float32")))
    return folder


def write_tokenizer(folder: Path) -> None:
    """One whose texts are those of `decode`."""
    tokenizer = Tokenizer(WordLevel({decode([i]): i for i in range(DIMS.vocab_size)}, "A"))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def start_vllm(folder: Path, python: str) -> tuple[str, str, Callable[[], None]]:
    """The address of a real server, its key, and what ends it."""
    settings = server_settings(folder, python=python, start_timeout_s=240)

    async def start():
        sampler = await vllm.start(settings, "vllm-0", folder / "vllm.log")
        await sampler.dialect.close()
        return sampler

    sampler = asyncio.run(start())
    dialect = sampler.dialect
    key = dialect.settings.key
    return dialect.wire.address, key, lambda: asyncio.run(sampler.process.stop())
