"""Sequences, one per continuation, and the table of the running ones as arrays.

A running sequence has a row in the table, where one numpy operation advances all of them; otherwise
(waiting, preempted, finished) its tokens are in its own lists.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pentad.core.types import FinishReason, Generation, Request, TopTokens


@dataclass(slots=True, eq=False)
class Sequence:
    """One continuation of a request."""

    request: Request
    index: int
    """Index of its seed in the request."""
    arrival: int
    """Position in the order of service."""
    limit: int
    """Maximum number of tokens, prompt included."""
    ids: list[int]
    """Prompt and sampled tokens; stale while the sequence has a row."""
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    row: int = -1
    blocks: list[int] = field(default_factory=list)
    node: int = 0
    """Prefix node of its last full block; invalid after new weights, so a cache of mixed versions
    is never found."""
    followers: list[Sequence] = field(default_factory=list)
    """Other continuations of the request, which start at the end of this one's prefill."""
    finish: FinishReason | None = None
    routes: np.ndarray | None = None
    """Routes of its first tokens, kept when it last freed its blocks."""
    tops: list[TopTokens] = field(default_factory=list)
    """One entry for every new token, if requested."""
    arrays: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
    """New ids, `logprobs` and `versions`, copied from its row."""

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_ids)

    def continue_from(self, drawn: Generation) -> None:
        """Restores sampled tokens, as after a preemption: they are prefilled again. The experts of
        the last token are unknown."""
        self.ids += drawn.ids
        self.logprobs, self.versions = list(drawn.logprobs), list(drawn.versions)
        self.tops = list(drawn.tops)
        if drawn.ids and drawn.routes is not None:
            self.routes = drawn.routes[: len(self.ids) - 1]

    def generation(self) -> Generation:
        assert self.row < 0 and self.finish is not None, "the sequence is still running"
        new_ids = self.ids[self.num_prompt :]
        routes = None if self.routes is None else filled(self.routes, len(self.ids))
        columns = new_ids, self.logprobs, self.versions
        made = Generation(*columns, self.finish, routes, self.tops)
        made.arrays = self.arrays
        return made


class Table:
    """The running sequences as arrays, one row each."""

    def __init__(self, num_rows: int, block_size: int) -> None:
        self.block_size = block_size
        self.sequences: list[Sequence | None] = [None] * num_rows
        self.free_rows = list(range(num_rows - 1, -1, -1))
        self.num_tokens = np.zeros(num_rows, np.int64)
        """Number of known tokens; keys and values of all but the last few are in the cache."""
        self.num_computed = np.zeros(num_rows, np.int64)
        self.num_blocks = np.zeros(num_rows, np.int64)
        self.limit = np.zeros(num_rows, np.int64)
        self.seed = np.zeros(num_rows, np.uint64)
        self.temperature = np.ones(num_rows, np.float64)
        self.top_p = np.ones(num_rows, np.float32)
        self.top_k = np.zeros(num_rows, np.int64)
        self.is_truncated = np.zeros(num_rows, bool)
        self.num_top = np.zeros(num_rows, np.int64)
        self.num_seated = np.zeros(num_rows, np.int64)
        """Number of sequences that have left each row; tells sequences of a row apart."""
        self.is_seated = np.zeros(num_rows, bool)
        self.has_stop_strings = np.zeros(num_rows, bool)
        self.has_followers = np.zeros(num_rows, bool)
        self.stops = StopSets(num_rows)
        self.tokens = np.zeros((num_rows, 64), np.int64)
        self.logprobs = np.zeros((num_rows, 64), np.float32)
        self.versions = np.zeros((num_rows, 64), np.int64)
        self.blocks = np.zeros((num_rows, 64 // block_size + 1), np.int32)

    def seat(self, sequence: Sequence) -> None:
        """Gives the sequence a row; none of its tokens is computed yet."""
        row = sequence.row = self.free_rows.pop()
        self.sequences[row] = sequence
        self.is_seated[row] = True
        params = sequence.request.params
        size = len(sequence.ids)
        self.reserve_columns(size + 1)
        self.tokens[row, :size] = sequence.ids
        self.logprobs[row, sequence.num_prompt : size] = sequence.logprobs
        self.versions[row, sequence.num_prompt : size] = sequence.versions
        self.num_tokens[row] = size
        self.num_computed[row] = 0
        self.num_blocks[row] = 0
        self.limit[row] = sequence.limit
        self.seed[row] = sequence.request.seeds[sequence.index] & 0xFFFFFFFFFFFFFFFF
        self.temperature[row] = params.temperature
        self.top_p[row] = params.top_p
        self.top_k[row] = params.top_k
        self.is_truncated[row] = params.top_p < 1 or params.top_k > 0
        self.num_top[row] = params.num_top
        self.has_stop_strings[row] = bool(params.stop_strings)
        self.has_followers[row] = False
        self.stops.put(row, params.stop_ids)

    def seat_beside(self, leader: Sequence, followers: list[Sequence]) -> None:
        """Gives rows to further sequences of a request whose leader has a row and has sampled
        nothing; they differ only in their seeds."""
        rows = [self.free_rows.pop() for _ in followers]
        for row, follower in zip(rows, followers, strict=True):
            follower.row = row
            self.sequences[row] = follower
        size, first = len(leader.ids), leader.row
        self.tokens[rows, :size] = self.tokens[first, :size]
        seeds = leader.request.seeds
        self.seed[rows] = [seeds[follower.index] & 0xFFFFFFFFFFFFFFFF for follower in followers]
        self.num_computed[rows] = 0
        self.num_blocks[rows] = 0
        self.has_followers[rows] = False
        for column in (
            *(self.is_seated, self.num_tokens, self.limit, self.temperature, self.top_p),
            *(self.top_k, self.is_truncated, self.num_top, self.has_stop_strings),
        ):
            column[rows] = column[first]
        self.stops.put_beside(first, rows)
        self.has_followers[first] = True

    def unseat(self, sequences: list[Sequence]) -> None:
        """Frees the rows; copies their tokens to the sequences."""
        rows = [sequence.row for sequence in sequences]
        sizes = self.num_tokens[rows]
        width = int(sizes.max(initial=0))
        ids_SL, logprobs_SL, versions_SL = (
            column[rows, :width] for column in (self.tokens, self.logprobs, self.versions)
        )
        for i, (sequence, size) in enumerate(zip(sequences, sizes.tolist(), strict=True)):
            new = slice(sequence.num_prompt, size)
            sequence.ids = ids_SL[i, :size].tolist()
            own = ids_SL[i, new].copy(), logprobs_SL[i, new].copy(), versions_SL[i, new].copy()
            sequence.arrays = own
            sequence.logprobs, sequence.versions = own[1].tolist(), own[2].tolist()
            self.sequences[sequence.row] = None
            sequence.row = -1
        self.is_seated[rows] = False
        self.num_seated[rows] += 1
        self.stops.drop(rows)
        self.free_rows += rows

    def set_blocks(self, row: int, first: int, blocks: list[int]) -> None:
        """Writes the block ids from place `first` on; the row ends after them."""
        last = first + len(blocks)
        if last > self.blocks.shape[1]:
            self.blocks = widen(self.blocks, last)
        self.blocks[row, first:last] = blocks
        self.num_blocks[row] = last

    def set_blocks_of(self, rows: list[int], blocks: list[list[int]], num_computed: int) -> None:
        """Sets all blocks of several rows with the same number of blocks and of computed tokens."""
        num = len(blocks[0])
        if num > self.blocks.shape[1]:
            self.blocks = widen(self.blocks, num)
        self.blocks[rows, :num] = blocks
        self.num_blocks[rows] = num
        self.num_computed[rows] = num_computed

    def add_blocks(self, rows: np.ndarray, blocks: list[int]) -> None:
        """Adds one block to each of these rows."""
        places = self.num_blocks[rows]
        if len(rows) and places.max() >= self.blocks.shape[1]:
            self.blocks = widen(self.blocks, int(places.max()) + 1)
        self.blocks[rows, places] = blocks
        self.num_blocks[rows] = places + 1

    def reserve_columns(self, num_columns: int) -> None:
        if num_columns > self.tokens.shape[1]:
            self.tokens = widen(self.tokens, num_columns)
            self.logprobs = widen(self.logprobs, num_columns)
            self.versions = widen(self.versions, num_columns)

    def append(
        self,
        rows: np.ndarray,
        counts: np.ndarray,
        ids_KN: np.ndarray,
        logprobs_KN: np.ndarray,
        version: int,
    ) -> None:
        """Adds to each of these rows the first `counts` of its K tokens."""
        ends = self.num_tokens[rows] + counts
        self.reserve_columns(int(ends.max()))
        is_new_KN = np.arange(len(ids_KN))[:, None] < counts
        step_M, which_M = np.nonzero(is_new_KN)
        rows_M = rows[which_M]
        places_M = self.num_tokens[rows_M] + step_M
        self.tokens[rows_M, places_M] = ids_KN[is_new_KN]
        self.logprobs[rows_M, places_M] = logprobs_KN[is_new_KN]
        self.versions[rows_M, places_M] = version
        self.num_tokens[rows] = ends


class StopSets:
    """Stop ids of each row, as one table per distinct set: a step looks up one number per row for
    any size of set."""

    def __init__(self, num_rows: int) -> None:
        self.set_of_row = np.zeros(num_rows, np.int64)
        self.keys: list[tuple[int, ...]] = [()]
        self.num_users = [0]
        self.is_stop = np.zeros((1, 1), bool)
        """[sets, ids]; ids beyond the width are in no set."""

    def put(self, row: int, stop_ids: tuple[int, ...]) -> None:
        if stop_ids in self.keys:
            index = self.keys.index(stop_ids)
        else:
            index = self._add(stop_ids)
        self.num_users[index] += 1
        self.set_of_row[row] = index

    def put_beside(self, row: int, others: list[int]) -> None:
        """Gives the set of `row` also to other rows."""
        index = self.set_of_row[row]
        self.num_users[index] += len(others)
        self.set_of_row[others] = index

    def drop(self, rows: list[int]) -> None:
        for index in self.set_of_row[rows].tolist():
            self.num_users[index] -= 1

    def stops(self, rows: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Whether each id ends its row."""
        width = self.is_stop.shape[1]
        found = self.is_stop[self.set_of_row[rows], np.minimum(ids, width - 1)]
        return found & (ids < width)

    def _add(self, stop_ids: tuple[int, ...]) -> int:
        free = [i for i, num in enumerate(self.num_users) if num == 0 and i]
        index = free[0] if free else len(self.keys)
        if not free:
            self.keys.append(stop_ids)
            self.num_users.append(0)
        num_sets, width = len(self.keys), max(stop_ids, default=0) + 1
        if num_sets > self.is_stop.shape[0] or width > self.is_stop.shape[1]:
            wider = np.zeros((num_sets, max(width, self.is_stop.shape[1])), bool)
            wider[: self.is_stop.shape[0], : self.is_stop.shape[1]] = self.is_stop
            self.is_stop = wider
        self.keys[index] = stop_ids
        self.is_stop[index] = False
        self.is_stop[index, list(stop_ids)] = True
        return index


def filled(routes_TLk: np.ndarray, num_tokens: int) -> np.ndarray:
    """Returns the routes, padded to the sequence's length: tokens that were never computed get the
    first experts."""
    num_layers, num_chosen = routes_TLk.shape[1:]
    missing = num_tokens - len(routes_TLk)
    any_k = np.arange(num_chosen, dtype=routes_TLk.dtype)
    return np.concatenate([routes_TLk, np.broadcast_to(any_k, (missing, num_layers, num_chosen))])


def widen(array: np.ndarray, num_columns: int) -> np.ndarray:
    """Extends the table to at least `num_columns` columns, and to at least twice its size."""
    wider = np.zeros((array.shape[0], max(num_columns, 2 * array.shape[1])), array.dtype)
    wider[:, : array.shape[1]] = array
    return wider
