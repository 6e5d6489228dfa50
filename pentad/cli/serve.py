"""`pentad serve`: one model behind an OpenAI-compatible address, on the embedded engine."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
import transformers

from pentad.core.device import pick_device
from pentad.core.dtypes import DTYPES
from pentad.core.errors import Problem, UserError
from pentad.data.tokenizer import Tokenizer, load_tokenizer
from pentad.infer.sampler import EmbeddedSampler
from pentad.infer.settings import SamplerSettings
from pentad.models.families import dims_of, register
from pentad.trainer.preflight import vocabulary_problems

try:
    from pentad.rollout.serving.app import Face, ServeLimits
    from pentad.rollout.serving.server import bind, serve
except ModuleNotFoundError as error:
    remedy = "pip install 'pentad[serve]'"
    raise UserError(
        Problem("pentad serve", f"needs {(error.name or '').partition('.')[0]}", remedy)
    ) from error
from pentad.rollout.serving.service import Service

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run_serve(
    model: str,
    *,
    host: str,
    port: int,
    name: str | None,
    device: str,
    dtype: str,
    settings: SamplerSettings,
    limits: ServeLimits,
    drain_s: float,
    model_files: Sequence[str] = (),
) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    transformers.utils.logging.disable_progress_bar()
    for path in model_files:
        register(path)
    tokenizer = load_tokenizer(model, key="model")
    sampler = load_sampler(model, tokenizer, pick_device(device), dtype, settings)
    listener = bind(host, port)
    service = Service(sampler, tokenizer, name or Path(model).resolve().name)
    asyncio.run(until_signal(service, listener, limits, drain_s))


def load_sampler(
    model: str,
    tokenizer: Tokenizer,
    device: torch.device,
    dtype: str,
    settings: SamplerSettings,
) -> EmbeddedSampler:
    problems = vocabulary_problems(model, dims_of(model), tokenizer, key="model")
    if dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" else "float32"
    if dtype not in DTYPES:
        problems.append(Problem(f"--dtype = {dtype}", f"is none of auto, {', '.join(DTYPES)}"))
    if problems:
        raise UserError(problems)
    return EmbeddedSampler.from_folder(
        model,
        settings,
        device=device,
        dtype=DTYPES[dtype],
        decode=lambda ids: tokenizer.decode(ids, keep_special=True),
        version=0,
    )


async def until_signal(
    service: Service, listener: socket.socket, limits: ServeLimits, drain_s: float
) -> None:
    """The first signal drains, the second ends at once."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def drain() -> None:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
        stop.set()
        with suppress(BrokenPipeError):  # whoever read the output may be gone
            print(f"stopping; requests under way have {drain_s:g} s", flush=True)

    for number in SIGNALS:
        loop.add_signal_handler(number, drain)

    def ready() -> None:
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        print(f"serving {service.name} at http://{shown}:{port}/v1", flush=True)
        if not ipaddress.ip_address(host).is_loopback:
            print("note: everybody who reaches this address may use the model", flush=True)

    try:
        app = Face(service, limits).app()
        await serve(app, listener, stop=stop, drain_s=drain_s, on_ready=ready)
    finally:
        await service.sampler.close()
