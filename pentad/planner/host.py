"""Host memory of a run by phase, staged saves, and files on disk."""

from __future__ import annotations

import math
from pathlib import Path

from pentad.config.schema import Config
from pentad.core.machine import free_disk
from pentad.core.sizes import STAGING_HEADROOM, export_bytes, state_bytes
from pentad.models.towers import other_bytes
from pentad.planner.adapters import folder_bytes
from pentad.planner.figures import Batch, Device, Files, SamplePlan, TrainPlan
from pentad.planner.memory import HOST_BYTES_PER_RANK, PHASES, Training, trained_bytes
from pentad.planner.sampling import base_bytes

NUM_CHECKPOINTS = 3
"""Number of simultaneous recovery checkpoints on disk: the kept ones, and the one being written."""


def host_phases(
    config: Config, trainers: list[TrainPlan], samplers: list[SamplePlan], device: Device
) -> dict[str, float]:
    """Host memory of the fullest node by phase; on a CPU it includes device memory. Processes that
    models on the same ranks share are counted once."""
    totals = dict.fromkeys(PHASES, 0.0)
    for start in sorted({trainer.devices.start for trainer in trainers}):
        group = [trainer for trainer in trainers if trainer.devices.start == start]
        for name in totals:
            if device.kind == "cpu":
                # Each includes the others as neighbours: the active one is the fullest.
                totals[name] += max(_process_bytes(trainer, name) for trainer in group)
            else:
                totals[name] += _host_bytes(group, name, config.cluster.n_gpus_per_node)
    totals["publish"] += transfer_bytes(config, samplers)
    if device.kind == "cpu":
        extra = sum(s.component.world * s.device_bytes for s in samplers if s.is_alone)
        totals = {name: size + extra for name, size in totals.items()}
    return totals


def saves_async(config: Config, staged: float, free_bytes: float) -> bool:
    """Whether saves are staged in host memory and written during training; never for the final
    export."""
    mode = config.saver.mode
    return mode == "async" or (mode == "auto" and STAGING_HEADROOM * staged <= free_bytes)


def _process_bytes(trainer: TrainPlan, name: str) -> float:
    """Memory of all ranks in a phase on a machine without GPUs."""
    each = trainer.component.world // len(trainer.phases)
    total = 0.0
    for row in trainer.phases:
        phase = row[name]
        total += each * (phase.host_bytes + phase.device_bytes - phase.lead_bytes)
        total += phase.lead_bytes
    return total


def _host_bytes(group: list[TrainPlan], name: str, per_node: int | None) -> float:
    """Host memory of a node with GPUs: the fullest rank, times the ranks of the node."""
    ranks = group[0].component.world
    local = min(ranks, per_node) if per_node else ranks
    worst = lead = 0.0
    for trainer in group:
        host = trainer.phases[0][name].host
        only = host.get("snapshot", 0.0) + host.get("fp8 copies", 0.0)
        own = trainer.phases[0][name].host_bytes - only
        worst += max([own, *(row[name].host_bytes for row in trainer.phases[1:])])
        lead += only
    return lead + local * (worst - (len(group) - 1) * HOST_BYTES_PER_RANK)


def transfer_bytes(config: Config, samplers: list[SamplePlan]) -> float:
    """Bytes of files in shared memory for publishing to servers, one file for each server."""
    server = config.rollout.server
    if server.weight_transport != "disk" or server.transfer_folder is not None:
        return 0.0
    return sum(
        sampler.component.size("d")
        * (sampler.sampling.adapter_bytes or base_bytes(sampler.sampling))
        for sampler in samplers
        if sampler.component.backend != "embedded"
    )


def staged_bytes(config: Config, trainers: list[TrainPlan]) -> float:
    """Host memory of the fullest node for staged saves, reserved for the whole run: each rank's
    part of exports and of recovery checkpoints."""
    total = 0.0
    for trainer in trainers:
        training = trainer.training
        if not training.with_optimizer:
            continue
        layout = training.layout
        held = max(trained_bytes(training, r) for r in range(layout.pp))
        local = min(layout.world, config.cluster.n_gpus_per_node or layout.world)
        if config.saver.is_periodic:
            total += exported_bytes(training) * local / layout.world
        total += local * state_bytes(held, saved_tags(training))
    return total


def exported_bytes(training: Training) -> float:
    """Size of an HF folder, or of a PEFT folder."""
    lora = training.model.lora
    if lora is None:
        return export_bytes(training.dims, training.compute_bytes)
    return folder_bytes(training.dims, lora)


def saved_tags(training: Training) -> int:
    return training.num_tags if training.model.lora is None else 0


def plan_files(config: Config, trainers: list[TrainPlan], batch: Batch) -> Files:
    """Files of the run: exports that are kept, from all frequencies that are known in advance and
    the final one; recovery checkpoints and the one being written."""
    saver, count = config.saver, 1
    if batch.total_steps is not None and saver.freq_steps is not None:
        count += (batch.total_steps - 1) // saver.freq_steps
    elif saver.freq_epochs is not None:
        epochs = config.total_train_epochs
        if batch.total_steps is not None and batch.steps_per_epoch is not None:
            epochs = math.ceil(batch.total_steps / batch.steps_per_epoch)
        count += (epochs - 1) // saver.freq_epochs
    if saver.keep_last is not None or saver.keep_best is not None:
        count = min(count, (saver.keep_last or 1) + (saver.keep_best or 0) + 1)
    found = [trainer.training for trainer in trainers if trainer.training.with_optimizer]
    free, folder = free_disk(config.checkpoint_root)
    is_whole = bool(found) and config.actor.lora is None
    copied = other_bytes(Path(config.actor.path or ""), found[0].dims) if is_whole else 0
    return Files(
        export_bytes=sum(map(exported_bytes, found)) + copied,
        num_exports=count,
        checkpoint_bytes=sum(
            state_bytes(one.adapter_bytes or one.param_bytes * one.dims.num_params, saved_tags(one))
            for one in found
        ),
        num_checkpoints=NUM_CHECKPOINTS,
        free_bytes=free,
        folder=folder,
    )
