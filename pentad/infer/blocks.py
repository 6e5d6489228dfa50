"""Blocks of the key-value cache: their reference counts, and reusable prefixes.

A block has `block_size` consecutive token places. Full blocks are stored in a tree whose edges are
the tokens of one block, so two sequences share a block exactly if all tokens up to its end are
equal, without reliance on hashes. The tree is emptied when the weights change, so a prefix computed
by other weights is never found. Unreferenced blocks stay usable until their memory is needed; the
least recently used is evicted first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq

SCRATCH = 0
"""The block to which padded rows of a captured graph write; never allocated."""


class BlockPool:
    """Counts the references to every block and finds prefixes."""

    def __init__(self, num_blocks: int, block_size: int, *, finds_prefixes: bool = True) -> None:
        """`finds_prefixes`: whether to reuse prefixes, which needs keys and values to be the whole
        state of tokens (not with delta nets)."""
        assert num_blocks >= 2, f"{num_blocks} blocks: one is the scratch block, none is left"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.finds_prefixes = finds_prefixes
        self.holders = [0] * num_blocks
        self.unused = list(range(num_blocks - 1, SCRATCH, -1))
        self.idle: OrderedDict[int, None] = OrderedDict()  # unheld but remembered, oldest first
        self.node_at: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}
        self.key_of: dict[int, tuple[int, tuple[int, ...]]] = {}  # block -> its key in node_at
        self.last_node = 0
        self.root = 0

    @property
    def num_free(self) -> int:
        return len(self.unused) + len(self.idle)

    @property
    def num_held(self) -> int:
        return self.num_blocks - 1 - self.num_free

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def take(self) -> int:
        """Allocates a free block; the caller has checked `num_free`."""
        if self.unused:
            block = self.unused.pop()
        else:
            block, _ = self.idle.popitem(last=False)
            del self.node_at[self.key_of.pop(block)]
        self.holders[block] = 1
        return block

    def share(self, blocks: Seq[int]) -> None:
        for block in blocks:
            if self.holders[block] == 0:
                del self.idle[block]
            self.holders[block] += 1

    def release(self, blocks: Seq[int]) -> None:
        """Releases blocks, the last of a sequence first: prefixes outlive their continuations."""
        for block in reversed(blocks):
            assert self.holders[block] > 0, f"block {block} was released twice"
            self.holders[block] -= 1
            if self.holders[block] == 0:
                if block in self.key_of:
                    self.idle[block] = None
                else:
                    self.unused.append(block)

    def num_idle_in(self, blocks: Seq[int]) -> int:
        """Returns how many of these blocks are free, and would not be if shared."""
        return sum(self.holders[block] == 0 for block in blocks)

    def find_prefix(self, ids: Seq[int], max_tokens: int) -> tuple[list[int], int]:
        """Stored full blocks at the start of `ids[:max_tokens]`, and the node of the last one."""
        node, found, size = self.root, [], self.block_size
        for start in range(0, max_tokens - size + 1, size):
            hit = self.node_at.get((node, tuple(ids[start : start + size])))
            if hit is None:
                break
            node, block = hit
            found.append(block)
        return found, node

    def remember(self, parent: int, tokens: Seq[int], block: int) -> int:
        """Stores the tokens of a full block; returns its node, the parent of the next block."""
        if not self.finds_prefixes:
            return parent
        key = (parent, tuple(tokens))
        hit = self.node_at.get(key)
        if hit is not None:  # an equal block is already stored; this one stays private
            return hit[0]
        self.last_node += 1
        self.node_at[key] = (self.last_node, block)
        self.key_of[block] = key
        return self.last_node

    def forget_prefixes(self) -> None:
        """Forgets all prefixes; nodes returned before become invalid."""
        self.unused.extend(self.idle)
        self.idle.clear()
        self.node_at.clear()
        self.key_of.clear()
        self.last_node += 1
        self.root = self.last_node
