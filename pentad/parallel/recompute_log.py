"""Logs the tensors that activation checkpointing keeps and recomputes (`ac_debug`).

Logs the operations of each block's first recomputed pass. Blocks with equal operations are only
named.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

log = logging.getLogger(__name__)

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""Contexts around forward, and around the recomputation."""
Counts = dict[str, tuple[int, int]]
"""Operation -> (number of calls, bytes of their results)."""


class RecomputeLog:
    """Records the blocks of one model; each is logged once."""

    def __init__(self) -> None:
        self.done: set[int] = set()
        self.reported: dict[str, int] = {}
        """Text -> the layer for which it was first logged."""

    def contexts(self, layer: int, inner: Callable[[], Contexts] | None) -> Contexts:
        """Returns contexts for `checkpoint`, around those of the mode."""
        forward, again = inner() if inner is not None else (nullcontext(), nullcontext())
        if layer in self.done:
            return forward, again
        first, second = _Operations(), _Operations()
        return _Nested(first, forward), _Nested(
            second, again, lambda: self._tell(layer, first.counts, second.counts)
        )

    def log_kept(self, layer: int) -> None:
        log.info("ac_debug: layer %d keeps everything", layer)

    def _tell(self, layer: int, ran: Counts, again: Counts) -> None:
        if layer in self.done:
            return
        self.done.add(layer)
        text = "\n".join(_lines(ran, again))
        first = self.reported.setdefault(text, layer)
        if first == layer:
            log.info("ac_debug: layer %d\n%s", layer, text)
        else:
            log.info("ac_debug: layer %d as layer %d", layer, first)


def _lines(ran: Counts, again: Counts) -> list[str]:
    lines = [f"  {'operation':60}{'calls':>7}{'MiB':>10}{'again':>7}{'MiB':>10}"]
    for name in sorted(ran, key=lambda name: -ran[name][1]):
        calls, size = ran[name]
        calls_again, size_again = again.get(name, (0, 0))
        if size == 0:
            continue
        row = f"{calls:7d}{size / 2**20:10.3f}{calls_again:7d}{size_again / 2**20:10.3f}"
        lines.append(f"  {name:60}{row}")
    totals = [sum(size for _, size in counts.values()) / 2**20 for counts in (ran, again)]
    return [*lines, f"  computed {totals[0]:.3f} MiB, {totals[1]:.3f} MiB of it again"]


class _Operations(TorchDispatchMode):
    """Counts operations and their results, without views."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    @property
    def counts(self) -> Counts:
        return {name: (self.calls[name], self.bytes[name]) for name in self.calls}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        if not op.is_view:
            self.calls[str(op)] += 1
            sizes = [
                x.numel() * x.element_size() for x in tree_leaves(out) if isinstance(x, Tensor)
            ]
            self.bytes[str(op)] += sum(sizes)
        return out


class _Nested(AbstractContextManager[None]):
    """Enters outer, then inner: operations answered by the inner one do not reach the outer one."""

    def __init__(
        self,
        outer: AbstractContextManager[Any],
        inner: AbstractContextManager[Any],
        at_end: Callable[[], None] | None = None,
    ) -> None:
        self.parts = (outer, inner)
        self.at_end = at_end
        self.stack = ExitStack()

    def __enter__(self) -> None:
        for part in self.parts:
            self.stack.enter_context(part)

    def __exit__(self, *error: Any) -> None:
        # `checkpoint` leaves by an exception once it has all tensors.
        self.stack.__exit__(*error)
        if self.at_end is not None:
            self.at_end()
