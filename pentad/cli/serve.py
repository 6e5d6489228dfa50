"""`pentad serve`: serves one model at an OpenAI-compatible address, with the embedded engine."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import transformers
import yaml

from pentad.cli.options import ServeOptions
from pentad.core.device import dtype_of, dtype_problems, pick_device
from pentad.core.errors import Problem, UserError, raise_problems
from pentad.core.quantization import flag_problems, quantization_of
from pentad.data.tokenizer import Tokenizer, load_tokenizer
from pentad.infer.sampler import EmbeddedSampler
from pentad.infer.section import SamplerSettings
from pentad.models.families import read_config, register
from pentad.models.registry import dims_to_sample
from pentad.planner.hub import local_model
from pentad.trainer.inputs import vocabulary_problems
from pentad.weights.peft import read_adapter

try:
    from pentad.rollout.section import RolloutConfig
    from pentad.serve.app import Endpoints, Guard
    from pentad.serve.server import bind, raise_file_limit, serve
    from pentad.serve.wire import ServeLimits
except ModuleNotFoundError as error:
    remedy = "pip install 'pentad[serve]'"
    raise UserError(
        Problem("pentad serve", f"needs {(error.name or '').partition('.')[0]}", remedy)
    ) from error
from pentad.serve.service import Service

SIGNALS = (signal.SIGTERM, signal.SIGINT)
CLIENT_SHARE = 0.75
"""Maximum share of the concurrent requests for one address; at loopback all clients have one
address."""


class Seldom(logging.Filter):
    """Passes only the first log records of a kind per minute: clients cannot fill a disk."""

    MOST, WINDOW_S, KINDS = 5, 60.0, 1000

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, tuple[float, int]] = {}
        """First line of the message without its arguments -> (start of the minute, records in this
        minute)."""

    def filter(self, record: logging.LogRecord) -> bool:
        kind, now = str(record.msg).partition("\n")[0], time.monotonic()
        if len(self.seen) > self.KINDS:
            self.seen.clear()
        start, count = self.seen.get(kind, (now, 0))
        if now - start > self.WINDOW_S:
            if count > self.MOST:
                record.msg = f"{record.msg} ({count - self.MOST} more like it were left out)"
            start, count = now, 0
        self.seen[kind] = start, count + 1
        return count < self.MOST


def run_serve(given: ServeOptions) -> None:
    handler = logging.StreamHandler()  # the filter applies only to it
    handler.addFilter(Seldom())
    logging.basicConfig(
        level=logging.WARNING, format="%(levelname)s: %(message)s", handlers=[handler]
    )
    check_key_given(given.api_key)
    raise_file_limit()
    transformers.utils.logging.disable_progress_bar()
    for path in given.model_files or ():
        register(path)
    name = given.name or Path(given.adapter or given.model).resolve().name.partition("@")[0]
    service = Service(*open_sampler(given), name)
    listener = bind(given.host, given.port)
    is_loopback = ipaddress.ip_address(listener.getsockname()[0]).is_loopback
    limits = ServeLimits(
        max_requests=given.max_requests,
        max_body_bytes=int(given.max_body_mb * 2**20),
        max_chars=given.max_chars,
        max_client_connections=given.max_connections,
        client_share=1.0 if is_loopback else CLIENT_SHARE,
    )
    endpoints = Endpoints(service, limits)
    hosts = [given.host, *(given.allow_host or ())]
    guard = Guard(endpoints.app(), api_key=given.api_key, is_loopback=is_loopback, hosts=hosts)
    asyncio.run(until_signal(endpoints, guard, listener, given.drain_s))
    if service.text_work.num_running:  # the interpreter's exit would wait for them
        with suppress(BrokenPipeError):
            sys.stdout.flush()
        logging.shutdown()
        os._exit(0)


def read_template_args(text: str | None) -> dict[str, Any]:
    try:
        found = yaml.safe_load(text) if text else {}
    except (yaml.YAMLError, ValueError, RecursionError):  # also for thousands of digits or brackets
        found = None
    if not isinstance(found, dict):
        rule, remedy = "is not a mapping of names to values", "give '{enable_thinking: false}'"
        raise UserError(Problem(f"--template-args = {text}", rule, remedy))
    return found


def open_sampler(given: ServeOptions) -> tuple[EmbeddedSampler, Tokenizer]:
    model = local_model(given.model, f"model = {given.model}")
    if (Path(model) / "config.json").is_file():  # its absence is reported below
        found = quantization_of(read_config(model))
        raise_problems(flag_problems(f"model = {model}", found, dequantize=given.dequantize))
    template_args = read_template_args(given.template_args)
    tokenizer = load_tokenizer(model, key="model", template_args=template_args)
    device = pick_device(given.device)
    problems = vocabulary_problems(model, dims_to_sample(model), tokenizer, key="model")
    raise_problems([*problems, *dtype_problems("--dtype", given.dtype)])
    rollout = RolloutConfig(
        max_running=given.max_running,
        max_batch_tokens=max(8192, given.max_running),
        kv_cache_gb=given.kv_cache_gb,
    )
    sampler = EmbeddedSampler.from_folder(
        model,
        SamplerSettings(rollout=rollout, max_context=given.max_context, keep_prefixes=True),
        device=device,
        dtype=dtype_of(given.dtype, device),
        decode=lambda ids: tokenizer.decode(ids, keep_special=True),
        adapter=None if given.adapter is None else read_adapter(given.adapter),
        dequantize=given.dequantize,
    )
    return sampler, tokenizer


def check_key_given(api_key: str | None) -> None:
    if api_key is not None and not (api_key.isascii() and api_key.strip() == api_key != ""):
        rule = "must be ASCII characters, without spaces around them"
        raise UserError(Problem("--api-key (or PENTAD_API_KEY)", rule, "or leave it out"))


async def until_signal(
    endpoints: Endpoints, guard: Guard, listener: socket.socket, drain_s: float
) -> None:
    """Serves until a signal: the first waits for requests in progress, the second ends at once."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def drain() -> None:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
        stop.set()
        with suppress(BrokenPipeError):  # the reader of the output may be gone
            print(f"stopping; requests in progress have {drain_s:g} s", flush=True)

    for number in SIGNALS:
        loop.add_signal_handler(number, drain)

    def ready() -> None:
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        print(f"serving {endpoints.service.name} at http://{shown}:{port}/v1", flush=True)
        if not guard.is_loopback and guard.api_key is None:
            print("note: everybody who reaches this address may use the model", flush=True)

    try:
        await serve(guard, listener, endpoints.limits, stop=stop, drain_s=drain_s, on_ready=ready)
    finally:
        await endpoints.service.sampler.close()
