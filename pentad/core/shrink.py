"""Layouts for fewer ranks: data parallelism shrinks first, other axes only if necessary.

1. p, t and c are unchanged if p*t*c ranks remain; d becomes as large as possible.
2. Only where d1 is still too large do p, t and c shrink: their product stays the largest that fits,
   and among equals t stays before p, and p before c.
3. e stays if it divides the ranks of a stage, else it becomes the largest below that does and
   leaves no rank without an expert (it need not divide them); t of ffn too, and dp_replicate, which
   divides d.

The caller's rules decide whether the model supports a layout; the first supported one is used.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

from pentad.core.layout import Component, Dims

Works = Callable[[Component, int], bool]
"""(component, dp_replicate) -> whether the model supports this layout."""


def shrink(
    component: Component, world: int, works: Works, replicas: int = 1
) -> tuple[Component, int] | None:
    """The largest layout of at most `world` ranks, and its dp_replicate; None if there is none."""
    if component.world <= world:
        return component, replicas
    found = ((part, n) for part, n in candidates(component, world, replicas) if works(part, n))
    return next(found, None)


def candidates(component: Component, world: int, replicas: int) -> Iterator[tuple[Component, int]]:
    """Layouts of at most `world` ranks, the preferred ones first."""
    layout = component.layout()
    cuts = [
        (p, t, c)
        for p in down_from(layout.pp)
        for t in down_from(layout.tp)
        for c in down_from(layout.cp)
        if p * t * c <= world
    ]
    cuts.sort(key=lambda cut: (cut[0] * cut[1] * cut[2], cut[1], cut[0]), reverse=True)
    for p, t, c in cuts:
        for d in down_from(world // (p * t * c)):
            ranks = d * t * c
            cells = itertools.product(down_from(layout.ep), down_from(layout.etp))
            for e, etp in sorted(
                cells, key=lambda cell: (cell[0] * cell[1], cell[1]), reverse=True
            ):
                for n in down_from(replicas):
                    if d % n == 0 and ranks // n % (e * etp) == 0:
                        yield resized(component, {"d": d, "p": p, "t": t, "c": c}, e, etp), n


def resized(component: Component, sizes: dict[str, int], ep: int, etp: int) -> Component:
    """The component with other axis sizes."""
    dense = sizes if component.ffn is not None else sizes | {"e": ep}
    dims = _dims(component.dims, dense)
    if "d" not in dict(dims) and sizes["d"] > 1:  # ranks freed by other axes
        dims = (("d", sizes["d"]), *dims)
    if component.ffn is None:
        return replace(component, dims=dims)
    cells = sizes["d"] * sizes["t"] * sizes["c"] // (ep * etp)
    ffn = _dims(component.ffn, {"d": cells, "p": sizes["p"], "t": etp, "e": ep})
    return replace(component, dims=dims, ffn=ffn)


def _dims(written: Dims, sizes: dict[str, int]) -> Dims:
    return tuple((letter, sizes[letter]) for letter, _ in written)


def down_from(size: int) -> range:
    return range(size, 0, -1)


def describe(before: Component, after: Component, world: int) -> str:
    """Describes the change. Example: archon:d3t2 for archon:d4t2 on 7 ranks: d 4 -> 3."""
    sides = [(before.dims, after.dims, "")]
    sides += [(before.ffn, after.ffn, " of ffn")] if before.ffn and after.ffn else []
    changes = [
        f"{letter}{side} {dict(old).get(letter, 1)} -> {size}"
        for old, new, side in sides
        for letter, size in new
        if dict(old).get(letter, 1) != size
    ]
    spare = world - after.world
    idle = f"; {spare} of them idle" if spare else ""
    return f"{after} for {before} on {world} ranks: {', '.join(changes)}{idle}"
