"""The implementations of Sampler that the contract is asked of, all with the same tiny policy."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from http_thread import served
from sglang_stand_in import StandIn
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from pentad.core.dims import ModelDims
from pentad.core.roles import Sampler
from pentad.infer.sampler import EmbeddedSampler
from pentad.infer.settings import SamplerSettings
from pentad.models.decoder import Decoder
from pentad.models.exchange import iter_hf
from pentad.models.registry import create_model
from pentad.samplers import sglang, vllm
from pentad.samplers.settings import ServerSettings

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


def embedded(seed: int, version: int, on_update: str = "continue") -> EmbeddedSampler:
    settings = SamplerSettings(max_running=16, kv_cache_tokens=2048, on_update=on_update)
    return EmbeddedSampler(policy(seed), settings, decode=decode, version=version)


def embedded_subject(on_update: str) -> Subject:
    @asynccontextmanager
    async def start() -> AsyncIterator[Sampler]:
        sampler = embedded(1, 0, on_update)
        try:
            yield sampler
        finally:
            await sampler.close()

    return Subject(start)


def server_settings(folder: Path, **changes) -> ServerSettings:
    given = {
        "model_folder": str(folder),
        "dims": DIMS,
        "dtype": "float32",
        "max_context": DIMS.max_position,
        "max_running": 16,
        "max_batch_tokens": 256,
        "kv_cache_bytes": None,
        "on_update": "continue",
        "device": "cpu",
        "transfer_folder": folder,
    }
    return ServerSettings(**(given | changes))


@asynccontextmanager
async def attached(attach, address: str, settings: ServerSettings) -> AsyncIterator[Sampler]:
    sampler = await attach(address, settings)
    try:
        await sampler.install(0, list(iter_hf(policy(1))))
        yield sampler
    finally:
        await sampler.close()


def sglang_subject(folder: Path, **changes) -> Subject:
    @asynccontextmanager
    async def start() -> AsyncIterator[Sampler]:
        settings = server_settings(folder, **changes)
        stand_in = StandIn(lambda: embedded(9, -1, settings.on_update))
        with served(stand_in.app()) as address:
            async with attached(sglang.attach, address, settings) as sampler:
                yield sampler

    return Subject(start)


def vllm_subject(folder: Path, address: str, **changes) -> Subject:
    """A client of its own each time, over one server that outlives it."""

    def start() -> AbstractAsyncContextManager[Sampler]:
        return attached(vllm.attach, address, server_settings(folder, **changes))

    return Subject(start, long=400)


def write_folder(folder: Path) -> Path:
    """config.json and a tokenizer for DIMS."""
    write_tokenizer(folder)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": DIMS.vocab_size,
        "hidden_size": DIMS.hidden_size,
        "intermediate_size": DIMS.intermediate_size,
        "num_hidden_layers": DIMS.num_layers,
        "num_attention_heads": DIMS.num_heads,
        "num_key_value_heads": DIMS.num_kv_heads,
        "head_dim": DIMS.head_dim,
        "max_position_embeddings": DIMS.max_position,
        "rms_norm_eps": DIMS.norm_eps,
        "rope_theta": DIMS.rope_theta,
        "tie_word_embeddings": DIMS.tie_embeddings,
        "attention_bias": False,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_tokenizer(folder: Path) -> None:
    """One whose texts are those of `decode`."""
    tokenizer = Tokenizer(WordLevel({decode([i]): i for i in range(DIMS.vocab_size)}, "A"))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def start_vllm(folder: Path, python: str) -> tuple[str, Callable[[], None]]:
    """The address of a real server, and what ends it."""
    settings = server_settings(folder, python=python, start_timeout_s=240)

    async def start():
        sampler = await vllm.start(settings, "vllm-0", folder / "vllm.log")
        await sampler.dialect.close()
        return sampler

    sampler = asyncio.run(start())
    return sampler.dialect.wire.address, lambda: asyncio.run(sampler.process.stop())
