"""The real server in a thread of this process, over a tiny model with byte tokens."""

import asyncio
import queue
import threading
from dataclasses import dataclass, replace

import pytest
import torch
from openai import OpenAI
from sections import sampler_settings

from pentad.core.types import Request, SamplingParams
from pentad.data.tokenizer import load_tokenizer
from pentad.data.toy import write_byte_model
from pentad.infer.sampler import EmbeddedSampler
from pentad.models.decoder import causal_attend
from pentad.models.families import dims_of
from pentad.models.registry import create_model
from pentad.serve.app import Endpoints, Guard
from pentad.serve.server import bind, serve
from pentad.serve.service import Service
from pentad.serve.wire import ServeLimits

CONTEXT = 4096


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def byte_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("byte") / "tiny"
    write_byte_model(folder)
    return folder


@pytest.fixture(scope="session")
def byte_tokenizer(byte_folder):
    return load_tokenizer(byte_folder)


@pytest.fixture(scope="session")
def byte_model(byte_folder):
    """Weights so wide that distributions are far from uniform."""
    dims = replace(dims_of(byte_folder), max_position=CONTEXT, initializer_range=0.3)
    return create_model(dims, seed=5)


def make_sampler(model, tokenizer):
    settings = sampler_settings(max_running=64, kv_cache_tokens=32768, keep_prefixes=True)
    decode = lambda ids: tokenizer.decode(ids, keep_special=True)  # noqa: E731
    return EmbeddedSampler(model, settings, decode=decode, version=0)


@dataclass
class Running:
    """A server at work; `loop` and `stop` are those of its thread."""

    url: str
    endpoints: Endpoints
    loop: asyncio.AbstractEventLoop
    stop: asyncio.Event
    thread: threading.Thread

    @property
    def client(self):
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=240)

    def end(self):
        self.loop.call_soon_threadsafe(self.stop.set)

    def call(self, action):
        """Runs a coroutine function in the server's loop."""
        return asyncio.run_coroutine_threadsafe(action(), self.loop).result(120)


@pytest.fixture(scope="module")
def start_server(byte_model, byte_tokenizer):
    servers = []

    def start(drain_s=120, api_key=None, tokenizer=byte_tokenizer, **limits):
        ready = queue.Queue()

        async def main():
            listener = bind("127.0.0.1", 0)
            service = Service(make_sampler(byte_model, tokenizer), tokenizer, "tiny")
            endpoints, stop = Endpoints(service, ServeLimits(**limits)), asyncio.Event()
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            told = (url, endpoints, asyncio.get_running_loop(), stop)
            try:
                await serve(
                    Guard(endpoints.app(), api_key=api_key, is_loopback=True),
                    listener,
                    endpoints.limits,
                    stop=stop,
                    drain_s=drain_s,
                    on_ready=lambda: ready.put(told),
                )
            finally:
                await service.sampler.close()

        thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
        thread.start()
        server = Running(*ready.get(timeout=120), thread)
        servers.append(server)
        return server

    yield start
    for server in servers:
        if server.thread.is_alive():
            server.end()
            server.thread.join(240)
        assert not server.thread.is_alive()


@pytest.fixture(scope="module")
def server(start_server):
    return start_server()


@pytest.fixture(scope="module")
def client(server):
    return server.client


@pytest.fixture(scope="session")
def engine_answer(byte_model, byte_tokenizer):
    """What the engine itself draws greedily, asked without a server, one prompt at a time."""

    def answer(ids, max_new_tokens):
        async def main():
            sampler = make_sampler(byte_model, byte_tokenizer)
            params = SamplingParams(
                max_new_tokens=max_new_tokens, temperature=0, stop_ids=byte_tokenizer.stop_ids
            )
            request = Request(id="x", prompt_ids=tuple(ids), params=params, seeds=(0,))
            try:
                return (await sampler.generate(request))[0]
            finally:
                await sampler.close()

        return asyncio.run(main())

    return answer


@pytest.fixture(scope="session")
def forced(byte_model):
    """Logits at given continuations by one forward over the whole sequence."""

    @torch.no_grad()
    def logits(prompt, ids, temperature=1.0):
        whole = torch.tensor([*prompt, *ids])
        hidden = byte_model(whole, torch.arange(len(whole)), causal_attend)
        return (byte_model.logits(hidden) / temperature)[len(prompt) - 1 : -1]

    return logits
