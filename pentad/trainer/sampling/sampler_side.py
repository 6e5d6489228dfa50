"""Connects the samplers of an RL run with its learner: opens them, transfers groups and weights,
and assigns shared devices."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

from pentad.config.topology import facts_of, topology
from pentad.core.machine import gpu_memory_used
from pentad.core.roles import Sampler
from pentad.data.file_blobs import make_blobs
from pentad.data.store import KINDS, Blobs, BlobStore, GroupStore, MemoryStore
from pentad.infer.sampler import EmbeddedSampler
from pentad.runtime.learner_client import LearnerClient
from pentad.runtime.rank import is_one_machine
from pentad.samplers.remote import Lend
from pentad.samplers.replica import Replica
from pentad.sync.lent import remove_files
from pentad.sync.publisher import Publisher, Snapshot
from pentad.sync.weights_dir import WeightsDir, opened, snapshot_of
from pentad.trainer.preflight import Checked, kind_of
from pentad.trainer.run import Run
from pentad.trainer.sampling.placement import DeviceTurns, Placement
from pentad.trainer.sampling.samplers import SamplerOpener, ray_options, topology_on


@dataclass(eq=False)
class SamplerSide:
    samplers: dict[str, Sampler]
    publisher: Publisher
    device_turns: DeviceTurns
    learner: LearnerClient
    weights_dir: WeightsDir | None

    async def snapshot_weights(self, version: int, *, copy: bool | None = None) -> Snapshot:
        """Snapshots the learner's weights as `version`, to be published."""
        placement = self.device_turns.placement
        given: dict[str, Any] = {
            "version": version,
            "copy": placement.copies_snapshots if copy is None else copy,
            "on_host": placement.snapshots_on_host,
        }
        weights_dir, started = self.weights_dir, time.perf_counter()
        if weights_dir is None:
            compared = all(isinstance(one, EmbeddedSampler) for one in self.samplers.values())
            await self.learner.call("snapshot", hashed=not compared, **given)
            service = self.learner.service
            assert service is not None, "several ranks publish a folder of weights"
            return replace(service.fetch(version), gather_s=time.perf_counter() - started)
        place = [weights_dir.kind, str(weights_dir.folder)]
        replicas = [one for one in self.samplers.values() if isinstance(one, Replica)]
        is_pulled = any(one.weight_source is weights_dir for one in replicas)
        deltas = is_pulled and weights_dir.deltas
        taken = await self.learner.call("snapshot", place=place, deltas=deltas, **given)
        snapshot = snapshot_of(taken["weights"], taken["digest"], time.perf_counter() - started)
        if not is_pulled:  # servers receive tensors
            return await opened(snapshot, weights_dir.check)
        weights_dir.retain(snapshot)
        return snapshot


async def open_sampler_side(
    run: Run,
    checked: Checked,
    placement: Placement,
    stack: AsyncExitStack,
    build: Callable[[], None],
) -> SamplerSide:
    """Opens the samplers. Learners in other processes are built (`build`) while the samplers start,
    other learners before."""
    learner, resources = run.learner, run.supervisor.resources
    if learner.is_remote:
        samplers = await _open_beside(run, checked, placement, build)
    else:
        await learner.run(build)
        if placement.offload_train:
            await learner.call("offload")
        samplers = await _open_samplers(run, checked, stack)
    every, device = list(samplers.values()), learner.device
    used = partial(gpu_memory_used, device.index or 0)
    measure = used if device.type == "cuda" else lambda: None
    offload = partial(learner.call, "offload")
    device_turns = DeviceTurns(placement, every, offload, resources.holder, measure)
    stack.callback(lambda: resources.note_holder(device_turns.holder))
    return SamplerSide(samplers, Publisher(every), device_turns, learner, resources.weights_dir)


async def _open_beside(
    run: Run, checked: Checked, placement: Placement, build: Callable[[], None]
) -> dict[str, Sampler]:
    learner, resources = run.learner, run.supervisor.resources
    building = asyncio.create_task(learner.run(build))
    try:
        if resources.samplers is None:
            stack = resources.sampler_stack
            resources.samplers = await _open_samplers(run, checked, stack, building)
        else:  # kept from the previous learners; both restart from the newest checkpoint
            if resources.weights_dir is not None:
                resources.weights_dir.drop_all()
                _serve(resources.weights_dir, learner)
            for sampler in resources.samplers.values():
                await sampler.rewind()
        await building
        if placement.offload_train:
            await learner.call("offload")
    except BaseException:
        learner.is_given_up = True  # the ranks exit with the run
        building.cancel()
        raise
    return resources.samplers


async def _open_samplers(
    run: Run,
    checked: Checked,
    stack: AsyncExitStack,
    building: asyncio.Future[None] | None = None,
) -> dict[str, Sampler]:
    """`building`: the learners are still being built."""
    config, learner, resources = run.config, run.learner, run.supervisor.resources
    folder = run.context.folder.file("servers/")
    placed = topology_on(config, learner.device)
    base = lend = None
    if placed.shares_base and placed.is_one_process:
        base = learner.service.engines["actor"].lend_base()
    elif placed.shares_base:
        lend, resources.is_lent = lender(learner, building, stack), True
    given = config, checked.dims, checked.tokenizer, learner.device, folder, stack, base, lend
    opener = SamplerOpener(*given)
    if learner.is_remote:
        resources.weights_dir = opener.open_weights_dir(is_spread=resources.is_spread)
        _serve(resources.weights_dir, learner)
    return await opener.open(resources.weights_dir, resources.runtime)


def lender(
    learner: LearnerClient, building: asyncio.Future[None] | None, stack: AsyncExitStack
) -> Lend:
    """Returns a function that lends the frozen weights of these learners, once they are built. The
    handles are kept: a sampler that is restarted during a step does not wait for its end. `stack`:
    that of the samplers, closed after the learners have ended."""
    kept: list[dict[str, Any]] = []

    async def lend() -> dict[str, Any]:
        if building is not None:
            await asyncio.shield(building)
        if not kept:
            kept.append(await learner.call("lend_base"))
            stack.callback(remove_files, kept[0])
        return kept[0]

    return lend


def _serve(weights_dir: WeightsDir, learner: LearnerClient) -> None:
    """Sets these learners as the source of published weights."""

    def release(version: int) -> None:
        """Makes the learner free the weights of this version on the GPU."""
        ask = partial(learner.query, "release", version=version)
        asyncio.get_running_loop().run_in_executor(None, ask)

    weights_dir.release, weights_dir.check = release, learner.check


def open_group_store(run: Run, checked: Checked) -> GroupStore:
    """Opens the store of groups; in memory only if the learner is this process."""
    config, learner, service = run.config, run.learner, run.learner.service
    is_spread = run.supervisor.resources.is_spread
    placed = topology(config, facts_of(config, kind_of(learner.device), is_spread=is_spread))
    kind = placed.store if learner.is_remote or config.store != "auto" else "memory"
    if kind == "memory" and service is not None:
        store = service.store = MemoryStore()
        return store
    if kind == "files":
        parent = None if is_one_machine() else run.context.folder.file("groups/")
        blobs: Blobs = make_blobs(parent)
    else:
        from pentad.runtime.ray_roles import joined_cluster

        is_launched = run.supervisor.resources.launched is not None
        places = learner.is_remote and not is_launched
        held = () if places else placed.held_gpus
        bundles = placed.bundles(has_learners=places)
        run.context.stack.enter_context(joined_cluster(bundles, held, **ray_options(config)))
        blobs = import_module(KINDS[kind]).make_blobs(config.num_data_storage_units)
    shared = BlobStore(blobs, checked.stream.prompt)
    run.context.stack.callback(shared.close)
    return shared
