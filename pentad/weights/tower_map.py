"""Weight maps of text towers: the map of a family under the names of a multimodal folder."""

from __future__ import annotations

from dataclasses import replace

from pentad.weights.map import WeightMap, sources_of


def in_tower(own: WeightMap) -> WeightMap:
    """Renames the map of a family to the names of the text tower in a multimodal folder."""
    names = own.dims.tower_names

    def there(name: str) -> str:
        found = ((begin, new) for begin, new in names if name.startswith(begin))
        begin, new = next(found, ("", ""))
        return new + name.removeprefix(begin)

    entries = {
        name: replace(
            entry, regions=tuple(replace(r, source=there(r.source)) for r in entry.regions)
        )
        for name, entry in own.entries.items()
    }
    return replace(
        own,
        entries=entries,
        sources=sources_of(entries, own.dims),
        tied={there(name): there(twin) for name, twin in own.tied.items()},
        ignored=frozenset(map(there, own.ignored)),
        ignored_prefixes=tuple(map(there, own.ignored_prefixes)),
    )
