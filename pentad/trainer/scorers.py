"""The scorers of a run: models on devices of their own that judge what was sampled."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack

import torch

from pentad.config.derived import scorers
from pentad.config.processes import scorer_devices
from pentad.config.schema import Config
from pentad.data.store import GroupStore
from pentad.runtime.calls import RankCalls
from pentad.runtime.rank import Rank
from pentad.telemetry.log import announced
from pentad.trainer.learner_thread import LearnerThread
from pentad.trainer.scorer_service import ScorerService

log = logging.getLogger(__name__)


async def open_scorers(
    config: Config,
    store: GroupStore,
    max_row_tokens: int,
    device: torch.device,
    stack: AsyncExitStack,
) -> dict[str, LearnerThread]:
    """By role, each with its weights and the store; closed with `stack`."""
    found: dict[str, LearnerThread] = {}
    devices = scorer_devices(config) if device.type == "cuda" else {}
    for role in scorers(config):
        own = torch.device("cuda", devices[role]) if devices else device
        service = ScorerService(config, Rank(), own, role)
        thread = LearnerThread(stack.enter_context(RankCalls(service)), role)
        stack.callback(thread.close, config.stall_abort_s)
        if store.address["kind"] == "memory":
            service.store = store
        else:
            await thread.call("open_store", address=store.address)
        found[role] = thread
    with announced(log, f"making the models of {' and '.join(scorers(config))}"):
        builds = (one.call("build", max_row_tokens=max_row_tokens) for one in found.values())
        await asyncio.gather(*builds)
    return found
