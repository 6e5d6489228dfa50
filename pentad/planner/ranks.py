"""Which rank holds what: rows of a table, folded so that a page is enough for any world size."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from pentad.core.fit import experts_each, stages_of_rank
from pentad.core.layout import Coords, Layout
from pentad.planner.figures import TrainPlan
from pentad.planner.memory import held_params, sharded_params, stage_layers

MAX_ROWS = 16


@dataclass(frozen=True, slots=True)
class InnerRow:
    """A run of ranks inside a pipeline rank that differ only in their tp (and etp) coordinate."""

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
    """Of each pipeline rank: its number, devices, stages and layers, the parameters of one of its
    ranks before and after data parallelism shards them, and the peak of its memory."""
    training, layout = trainer.training, trainer.training.layout
    rows = []
    size = layout.world // layout.pp
    for pp in range(layout.pp):
        stages: tuple[int, ...] = (0,)
        if layout.pp > 1:
            stages = stages_of_rank(training.schedule, layout.pp, training.stages_per_rank, pp)
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
    """Rows of one pipeline rank, and how many were left out in the middle."""
    size = layout.world // layout.pp
    coords = [(rank, layout.coords(rank)) for rank in range(size)]
    by_inner = [list(run) for _, run in groupby(coords, lambda item: _outer(item[1]))]
    if len(coords) <= MAX_ROWS:
        by_inner = [[item] for item in coords]
    elif len(by_inner) > MAX_ROWS:
        by_shard = groupby(coords, lambda item: (item[1].dp_replicate, item[1].dp_shard))
        by_inner = [list(run) for _, run in by_shard]
    rows = [_row(run, layout, num_heads, num_experts) for run in by_inner]
    if len(rows) <= MAX_ROWS:
        return rows, 0
    return [*rows[: MAX_ROWS - 2], *rows[-1:]], len(rows) - MAX_ROWS + 1


def _outer(place: Coords) -> tuple[int, ...]:
    return (place.dp_replicate, place.dp_shard, place.cp, place.efsdp, place.ep)


def _row(
    run: list[tuple[int, Coords]], layout: Layout, num_heads: int, num_experts: int
) -> InnerRow:
    heads = num_heads // layout.tp
    experts = experts_each(num_experts, layout.ep)
    places = [place for _, place in run]
    held = [i for p in places for i in range(p.tp * heads, (p.tp + 1) * heads)]
    routed = [i for p in places for i in range(p.ep * experts, (p.ep + 1) * experts)]
    routed = [i for i in routed if i < num_experts]
    return InnerRow(
        offsets="+" + span([rank for rank, _ in run]),
        dp=span([p.dp_replicate * layout.dp_shard + p.dp_shard for p in places]),
        cp=span([p.cp for p in places]),
        tp=span([p.tp for p in places]),
        heads=span(held),
        efsdp=span([p.efsdp for p in places]),
        ep=span([p.ep for p in places]),
        etp=span([p.etp for p in places]),
        experts=span(routed) if num_experts else "",
    )
