"""Resharding plans: which rank sends which block to whom when weights move between two layouts.

A layout is given by who holds which boxes. The plan depends on that alone, so every rank computes
the same one without a message. `verify-model` executes plans on one process, between all layouts of
a family; checkpoints and weight publishing go through HF-on-disk names instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from pentad.core.errors import Problem, UserError
from pentad.weights.regions import Box, Shape, box_shape, coverage_fault, intersect

Holding = tuple[int, str, Box]
"""(rank, tensor name, box of the global tensor): one shard. Replicas hold equal boxes."""


@dataclass(frozen=True, slots=True)
class Move:
    """Copy a block of one rank's shard into another's. Boxes are relative to the shards."""

    name: str
    source_rank: int
    source_box: Box
    target_rank: int
    target_box: Box

    @property
    def is_local(self) -> bool:
        return self.source_rank == self.target_rank

    @property
    def numel(self) -> int:
        return math.prod(box_shape(self.source_box))


def plan_moves(
    shapes: Mapping[str, Shape], sources: Iterable[Holding], targets: Iterable[Holding]
) -> tuple[Move, ...]:
    """Every element of every target shard exactly once, from a rank that has it.

    A rank that holds a block itself copies locally; among other replicas the one with the least
    to send so far is taken, so replicas share the work. Plans are cached.
    """
    return _plan(tuple(sorted(shapes.items())), frozenset(sources), frozenset(targets))


@lru_cache(maxsize=16)
def _plan(
    shapes: tuple[tuple[str, Shape], ...], sources: frozenset[Holding], targets: frozenset[Holding]
) -> tuple[Move, ...]:
    sources_of, targets_of = _by_name(sources), _by_name(targets)
    unknown = sorted({*sources_of, *targets_of} - {name for name, _ in shapes})
    if unknown:
        raise UserError(Problem(f"resharding: {unknown[0]}", "its global shape is not given"))
    moves: list[Move] = []
    sent: dict[int, int] = {}
    for name, shape in shapes:
        holders = sources_of.get(name, {})
        _check_holders(name, shape, holders, targets_of.get(name, {}))
        for target_box, ranks in sorted(targets_of.get(name, {}).items()):
            for rank in ranks:
                moves += _moves_to(name, rank, target_box, holders, sent)
    return tuple(moves)


def _by_name(holdings: Iterable[Holding]) -> dict[str, dict[Box, list[int]]]:
    """Name -> box -> the ranks that hold it: replicas share a key."""
    out: dict[str, dict[Box, list[int]]] = {}
    seen: set[tuple[int, str]] = set()
    for rank, name, box in sorted(holdings):
        if (rank, name) in seen:
            raise UserError(Problem(f"resharding: {name}", f"rank {rank} holds two blocks of it"))
        seen.add((rank, name))
        out.setdefault(name, {}).setdefault(box, []).append(rank)
    return out


def _check_holders(
    name: str, shape: Shape, holders: Mapping[Box, list[int]], wanted: Mapping[Box, list[int]]
) -> None:
    if not wanted:
        return
    inside = [box for box in holders if all(stop > start for start, stop in box)]
    fault = coverage_fault(inside, shape)
    if fault:
        raise UserError(Problem(f"resharding: {name}", f"the source ranks do not hold it: {fault}"))


def _moves_to(
    name: str,
    rank: int,
    target_box: Box,
    holders: Mapping[Box, list[int]],
    sent: dict[int, int],
) -> list[Move]:
    out = []
    for source_box, ranks in sorted(holders.items()):
        common = intersect(source_box, target_box)
        if common is None:
            continue
        sender = rank if rank in ranks else min(ranks, key=lambda r: (sent.get(r, 0), r))
        move = Move(
            name, sender, _relative(common, source_box), rank, _relative(common, target_box)
        )
        if not move.is_local:
            sent[sender] = sent.get(sender, 0) + move.numel
        out.append(move)
    return out


def _relative(box: Box, origin: Box) -> Box:
    return tuple((a - o, b - o) for (a, b), (o, _) in zip(box, origin, strict=True))
