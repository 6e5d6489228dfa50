"""The figures of a plan: device, batch, components, files, placement, and whether it fits."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from pentad.config.schema import Config
from pentad.core.dims import ModelDims
from pentad.core.fit import expert_range, stages_of_rank
from pentad.core.layout import Allocation, Component, Coords, Layout
from pentad.core.machine import GIB, host_memory
from pentad.core.sizes import PROCESS_BYTES, DeviceKind, PublishKind
from pentad.planner.memory import (
    Phase,
    Training,
    held_params,
    sharded_params,
    stage_layers,
)
from pentad.planner.sampling import Sampling, kv_token_bytes

TIGHT = 0.9
"""Above this share of the device's memory a plan is called tight: the estimate is not more
accurate."""


@dataclass(frozen=True, slots=True)
class Device:
    """The device of each rank."""

    kind: DeviceKind
    memory_bytes: int
    source: str
    """How the device was determined, as text for the user."""
    is_here: bool = True
    """Whether it is a device of this machine, so that the run uses this machine's disk."""

    @property
    def word(self) -> str:
        return "GPU" if self.kind == "cuda" else "CPU"

    @property
    def host_bytes(self) -> float:
        """Free host memory; infinite for another machine."""
        if self.kind == "cpu":
            return self.memory_bytes
        return host_memory()[1] if self.is_here else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Numbers of prompts, samples, tokens and steps, per step and in total."""

    prompts: int
    samples: int
    prompt_tokens: int
    prompt_is_assumed: bool
    longest_read: int | None
    """Number of tokens of the longest row, if the data was read."""
    answer_tokens: int
    num_rows: int | None
    """Number of prompts in the dataset, if it could be read."""
    steps_per_epoch: int | None
    total_steps: int | None
    flops: float
    """FLOPs of training one step at full lengths; causal attention counts only unmasked pairs."""

    @property
    def sequence_tokens(self) -> int:
        return self.prompt_tokens + self.answer_tokens

    @property
    def tokens(self) -> int:
        """Maximum number of tokens per step."""
        return self.samples * self.sequence_tokens


@dataclass(slots=True)
class TrainPlan:
    """A training component: its settings, and the memory of each pipeline rank by phase."""

    role: str
    component: Component
    devices: range
    training: Training
    batch_tokens: float
    """Tokens per data-parallel rank and step."""
    phases: list[dict[str, Phase]]

    @property
    def peak(self) -> tuple[int, Phase]:
        """(pipeline rank, phase) with the highest device memory."""
        found = [(rank, phase) for rank, row in enumerate(self.phases) for phase in row.values()]
        return max(found, key=lambda item: item[1].device_bytes)

    @property
    def peak_bytes(self) -> float:
        return self.peak[1].device_bytes


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """A sampling component: memory on the device of one replica."""

    component: Component
    devices: range
    sampling: Sampling
    weights_bytes: float
    kv_bytes: float
    pass_tokens: int
    """Maximum tokens of a forward pass of an embedded sampler; for servers it is part of their
    memory share."""
    is_alone: bool
    """Whether no model trains on its devices."""

    @property
    def num_running(self) -> int:
        """Number of full-length sequences that fit the cache."""
        each = kv_token_bytes(self.sampling) * self.sampling.sequence_tokens
        return int(self.kv_bytes / each)

    @property
    def pass_bytes(self) -> int:
        """Bytes of activations of that forward pass."""
        return self.pass_tokens * self.sampling.largest.token_bytes

    @property
    def slots_bytes(self) -> int:
        """Bytes of delta-net states for the sequences of an embedded sampler."""
        return self.sampling.largest.slots_bytes if self.pass_tokens else 0

    @property
    def device_bytes(self) -> float:
        held = self.weights_bytes + self.kv_bytes + self.pass_bytes + self.slots_bytes
        return PROCESS_BYTES[self.sampling.device] + held

    @property
    def needed_bytes(self) -> float:
        """Minimum memory, with a cache for only one sequence."""
        least = kv_token_bytes(self.sampling) * self.sampling.sequence_tokens
        return self.device_bytes - self.kv_bytes + least


@dataclass(frozen=True, slots=True)
class Files:
    """Sizes of the files of a run, and the free space for them."""

    export_bytes: float
    num_exports: int
    checkpoint_bytes: float
    num_checkpoints: int
    free_bytes: int
    folder: str

    @property
    def needed_bytes(self) -> float:
        exports = self.export_bytes * self.num_exports
        return exports + self.checkpoint_bytes * self.num_checkpoints


@dataclass(slots=True)
class RunPlan:
    """All figures of `pentad plan`."""

    config: Config
    allocation: Allocation
    dims: ModelDims
    device: Device
    batch: Batch
    trainers: list[TrainPlan]
    samplers: list[SamplePlan]
    files: Files
    host_bytes: dict[str, float]
    """Host memory of a node by phase."""
    is_async: bool
    """Whether saves are written in the background, from copies that `host_bytes` include."""
    publish_kind: PublishKind
    """How weights are published by the learner."""
    notes: list[str] = field(default_factory=list)

    @property
    def peak(self) -> tuple[float, str]:
        """Highest memory of any device (on a CPU: of this machine), and its component and phase."""
        if self.device.kind == "cpu":
            name = max(self.host_bytes, key=lambda phase: self.host_bytes[phase])
            return self.host_bytes[name], name
        found = [(s.needed_bytes, s.component.role) for s in self.samplers if s.is_alone]
        for trainer in self.trainers:
            rank, phase = trainer.peak
            at = f", pipeline rank {rank}" if trainer.training.layout.pp > 1 else ""
            found.append((phase.device_bytes, f"{trainer.role}, {phase.name}{at}"))
        return max(found)

    @property
    def peak_bytes(self) -> float:
        return self.peak[0]

    @property
    def used(self) -> str:
        return f"{self.peak_bytes / GIB:.1f} of {self.device.memory_bytes / GIB:.1f} GiB"

    @property
    def lacks(self) -> list[str]:
        """Reasons why the plan does not fit; empty if it fits."""
        found = []
        need, where = self.peak
        if need > self.device.memory_bytes:
            have = self.device.memory_bytes / GIB
            word = self.device.word
            found.append(
                f"{need / GIB:.1f} GiB of {word} memory needed ({where}), {have:.1f} there"
            )
        for sampler in self.samplers:
            if sampler.num_running < 1:
                length = sampler.sampling.sequence_tokens
                role = f"rollout ({sampler.component})"
                found.append(f"{role}: the cache has no room for one sequence of {length:,} tokens")
        return found

    @property
    def sampler_fits(self) -> bool:
        return all(sampler.num_running >= 1 for sampler in self.samplers)

    @property
    def fits(self) -> bool:
        return not self.lacks

    @property
    def is_tight(self) -> bool:
        return self.fits and self.peak_bytes > TIGHT * self.device.memory_bytes


MAX_ROWS = 16


class InnerRow(NamedTuple):
    """A range of ranks inside a pipeline rank that differ only in their tp (and etp) coordinate."""

    offsets: str
    dp: str
    cp: str
    tp: str
    heads: str
    efsdp: str
    ep: str
    etp: str
    experts: str


def span(numbers: list[int]) -> str:
    """Sorted numbers as ranges: 0-3, 8."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def stage_rows(trainer: TrainPlan) -> list[tuple[str, str, str, str, int, float, float]]:
    """For each pipeline rank: number, devices, stages, layers, parameters per rank before and after
    sharding over data parallelism, and memory peak."""
    training, layout = trainer.training, trainer.training.layout
    rows = []
    size = layout.world // layout.pp
    for pp in range(layout.pp):
        stages: tuple[int, ...] = (0,)
        if layout.pp > 1:
            stages = stages_of_rank(
                training.model.archon.pp_schedule, layout.pp, training.model.archon.stages, pp
            )
        first = trainer.devices.start + pp * size
        layers = [i for stage in stage_layers(training, pp) for i in stage]
        names = [span(layers)]
        if 0 in layers:
            names.insert(0, "embedding")
        if training.dims.num_layers - 1 in layers:
            names.append("head")
        peak = max(phase.device_bytes for phase in trainer.phases[pp].values())
        held = held_params(training, pp)
        devices = span(list(range(first, first + size)))
        words = (str(pp), devices, span(list(stages)), ", ".join(names))
        rows.append((*words, held.total, sharded_params(training, held), peak))
    return rows


def inner_rows(layout: Layout, num_heads: int, num_experts: int) -> tuple[list[InnerRow], int]:
    """Rows of one pipeline rank, and the number of rows left out in the middle."""
    size = layout.world // layout.pp
    coords = [(rank, layout.coords(rank)) for rank in range(size)]
    outer = attrgetter("dp_replicate", "dp_shard", "cp", "efsdp", "ep")
    by_inner = [list(run) for _, run in groupby(coords, lambda item: outer(item[1]))]
    if len(coords) <= MAX_ROWS:
        by_inner = [[item] for item in coords]
    elif len(by_inner) > MAX_ROWS:
        by_shard = groupby(coords, lambda item: (item[1].dp_replicate, item[1].dp_shard))
        by_inner = [list(run) for _, run in by_shard]
    rows = [_row(run, layout, num_heads, num_experts) for run in by_inner]
    if len(rows) <= MAX_ROWS:
        return rows, 0
    return [*rows[: MAX_ROWS - 2], *rows[-1:]], len(rows) - MAX_ROWS + 1


def _row(
    run: list[tuple[int, Coords]], layout: Layout, num_heads: int, num_experts: int
) -> InnerRow:
    heads = num_heads // layout.tp
    places = [place for _, place in run]
    held = [i for p in places for i in range(p.tp * heads, (p.tp + 1) * heads)]
    routed = [i for p in places for i in range(*expert_range(num_experts, layout.ep, p.ep))]
    dp = [p.dp_replicate * layout.dp_shard + p.dp_shard for p in places]
    dense = (dp, [p.cp for p in places], [p.tp for p in places], held)
    sparse = ([p.efsdp for p in places], [p.ep for p in places], [p.etp for p in places], routed)
    return InnerRow("+" + span([rank for rank, _ in run]), *map(span, (*dense, *sparse)))
