"""The request scheduler: selects the sequences and tokens of the next step.

First come, first served. Every step gives each running sequence that is past its prefill one token,
then spends the rest of `max_batch_tokens` on prefills, in chunks if needed, and on admitting
waiting requests. A request is prefilled once: its other continuations follow the first and start
from its last logits, sharing full blocks and copying the last partial one. When blocks run out, the
sequence that came last frees its cache and waits to be recomputed; nothing is ever allocated beyond
the pool.

A prefix becomes findable in the step that computes it: within a step every layer writes all new
keys and values before any token attends.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from pentad.core.types import FinishReason
from pentad.infer.blocks import BlockPool
from pentad.infer.sequence import Sequence, Table


@dataclass(slots=True)
class Plan:
    """A step: `counts[i]` tokens of row `rows[i]`, from place `starts[i]` on."""

    rows: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    drawn_rows: np.ndarray
    """Rows that get a new token."""
    drawn_from: np.ndarray
    """For each new token, the index in `rows` whose last token it follows."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """Blocks (from, to) to copy after the step."""
    forks: list[tuple[int, int]] = field(default_factory=list)
    """Rows (from, to): `to` continues after the step with the state of `from`."""

    @property
    def is_decode(self) -> bool:
        return len(self.drawn_rows) == len(self.rows) == int(self.counts.sum())


EndedSequences = list[tuple[Sequence, FinishReason]]


def arrival_of(sequence: Sequence) -> int:
    return sequence.arrival


class RequestScheduler:
    """Plans steps. BlockPool counts memory, Table stores tokens, and the runner runs the model."""

    def __init__(
        self,
        table: Table,
        pool: BlockPool,
        max_batch_tokens: int,
        admit_batch: int = 1,
        before_release: Callable[[Sequence], None] = lambda sequence: None,
        max_later_tokens: int | None = None,
    ) -> None:
        self.table = table
        self.pool = pool
        self.max_batch_tokens = max_batch_tokens
        self.max_later_tokens = max_later_tokens or max_batch_tokens
        """Maximum tokens per step in prefills that continue an earlier one: their attention gathers
        keys and values and masks all pairs."""
        self.admit_batch = admit_batch
        """While sequences run, waiting ones are admitted at least this many at a time."""
        self.before_release = before_release
        """Called with a sequence before its row and blocks are freed."""
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.rows = np.zeros(0, np.int64)
        self.num_preemptions = 0
        self.num_prefilled = 0
        """Number of prompt tokens computed, including those recomputed after a preemption."""
        self.num_reused = 0
        """Number of prompt tokens whose keys and values were cached."""

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def may_admit(self) -> bool:
        wanted = min(self.admit_batch, len(self.waiting))
        return bool(self.waiting) and (not self.running or len(self.table.free_rows) >= wanted)

    def add(self, sequence: Sequence) -> None:
        if self.waiting and self.waiting[-1].arrival > sequence.arrival:
            insort(self.waiting, sequence, key=arrival_of)
        else:
            self.waiting.append(sequence)

    # One step: plan, then record.

    def plan(self) -> Plan | None:
        """Plans the next step; None if there is no work."""
        self.grow_running()
        table = self.table
        planned, budget, later = self.plan_running()
        admitted = self.admit(budget, later) if self.may_admit else []
        if admitted:
            self.seat_changed()
        rows = np.concatenate([planned[0], np.array([s.row for s, _ in admitted], np.int64)])
        counts = np.concatenate([planned[1], np.array([c for _, c in admitted], np.int64)])
        if not len(rows):
            return None
        starts = table.num_computed[rows]
        is_drawn = starts + counts == table.num_tokens[rows]
        drawn_from = np.flatnonzero(is_drawn)
        plan = Plan(rows, starts, counts, rows[drawn_from], drawn_from)
        self.fork_followers(plan)
        return plan

    def record(
        self, plan: Plan, ids: np.ndarray, logprobs: np.ndarray, version: int
    ) -> EndedSequences:
        """Records the computed and sampled tokens of a step; returns sequences that ended by id or
        by length."""
        self.table.num_computed[plan.rows] += plan.counts
        return self.extend(plan.drawn_rows, ids[None], logprobs[None], version)[1]

    def record_steps(
        self,
        rows: np.ndarray,
        ids_KN: np.ndarray,
        logprobs_KN: np.ndarray,
        version: int,
        *,
        is_planned: bool,
    ) -> tuple[np.ndarray, EndedSequences]:
        """Records K decode steps of these rows, each up to its end; returns their numbers of
        tokens, and sequences that ended. `is_planned`: the first step was made by `plan`."""
        start = self.table.num_computed[rows]
        counts, ended = self.extend(rows, ids_KN, logprobs_KN, version)
        self.table.num_computed[rows] = start + counts
        self.remember_filled(rows, start + is_planned, counts - is_planned)
        return counts, ended

    def extend(
        self, rows: np.ndarray, ids_KN: np.ndarray, logprobs_KN: np.ndarray, version: int
    ) -> tuple[np.ndarray, EndedSequences]:
        """Adds up to K tokens to each row; returns their numbers, and sequences that ended."""
        table, num_steps = self.table, len(ids_KN)
        if not len(rows):
            return np.zeros(0, np.int64), []
        room = table.limit[rows] - table.num_tokens[rows]
        is_stop_KN = table.stops.stops(rows, ids_KN)
        has_stop = is_stop_KN.any(axis=0)
        first_stop = np.where(has_stop, is_stop_KN.argmax(axis=0) + 1, num_steps)
        counts = np.minimum(first_stop, room)
        table.append(rows, counts, ids_KN, logprobs_KN, version)
        is_stopped = has_stop & (counts == first_stop)
        ended: EndedSequences = []
        which = np.flatnonzero(is_stopped | (counts == room))
        for row, by_id in zip(rows[which].tolist(), is_stopped[which].tolist(), strict=True):
            sequence = table.sequences[row]
            assert sequence is not None
            ended.append((sequence, "stop" if by_id else "length"))
        return counts, ended

    def finish(self, ended: Mapping[Sequence, FinishReason]) -> None:
        """Ends these sequences, in any state, and frees their memory. Followers end with their
        leader, because only a whole request can be ended before its first token."""
        if any(sequence.row < 0 for sequence in ended):
            self.waiting = [s for s in self.waiting if s not in ended]
        self.vacate(list(ended))
        for sequence, reason in ended.items():
            sequence.finish = reason
        self.running = [s for s in self.running if s.row >= 0]
        self.rows = self.rows[self.table.is_seated[self.rows]]

    # Parts of plan().

    def plan_running(self) -> tuple[tuple[np.ndarray, np.ndarray], int, int]:
        """Returns rows and counts of the running sequences, and the remaining budgets."""
        table, rows = self.table, self.rows
        counts = table.num_tokens[rows] - table.num_computed[rows]
        is_prefill = counts > 1
        budget = self.max_batch_tokens - int(len(rows) - is_prefill.sum())
        later = self.max_later_tokens
        for i in np.flatnonzero(is_prefill):
            counts[i] = min(int(counts[i]), budget, later)
            budget -= int(counts[i])
            later -= int(counts[i])
            self.num_prefilled += int(counts[i])
        if budget == 0 or later == 0:
            rows, counts = rows[counts > 0], counts[counts > 0]
        self.remember_filled(rows, table.num_computed[rows], counts)
        return (rows, counts), budget, later

    def remember_filled(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> None:
        """Stores the blocks filled by `counts` tokens of each row, from `starts` on."""
        size = self.pool.block_size
        num_filled = (starts + counts) // size - starts // size
        for i in np.flatnonzero(num_filled > 1):
            sequence = self.table.sequences[rows[i]]
            assert sequence is not None
            self.remember_blocks(sequence, int(starts[i]), int(counts[i]))
        # One block each, the usual case: reads all of them at once.
        which = np.flatnonzero(num_filled == 1)
        index_N = starts[which] // size
        places = (index_N * size)[:, None] + np.arange(size)
        tokens = self.table.tokens[rows[which][:, None], places].tolist()
        for row, index, filled in zip(rows[which].tolist(), index_N.tolist(), tokens, strict=True):
            sequence = self.table.sequences[row]
            assert sequence is not None
            sequence.node = self.pool.remember(sequence.node, filled, sequence.blocks[index])

    # Decode steps launched together, or before the previous ones are recorded.

    def rows_ahead(self, rows: np.ndarray, seats: np.ndarray, num_made: int) -> np.ndarray:
        """Returns the rows of `num_made` steps in progress that get a further token unless a stop
        id ends them; none if the next step should wait for these."""
        if self.may_admit:
            return rows[:0]
        table = self.table
        is_short = table.num_tokens[rows] + num_made < table.limit[rows]
        return rows[(table.num_seated[rows] == seats) & is_short]

    def reserve(self, rows: np.ndarray, num_made: int, wanted: int) -> int:
        """Takes blocks for up to `wanted` decode steps of these rows, at most one block for each
        row, after `num_made` in progress; returns the number of steps that have room. Rows that
        reach their limit before the last step wait for it."""
        table, pool = self.table, self.pool
        wanted = min(wanted, pool.block_size, self.most_left(rows) - num_made)
        for num_steps in sorted({wanted, 1}, reverse=True):
            computed = table.num_tokens[rows] + num_made + num_steps - 1
            computed = np.minimum(computed, table.limit[rows] - 1)
            full = rows[computed > table.num_blocks[rows] * pool.block_size]
            if pool.num_free >= len(full):
                self.grow(full)
                return num_steps
        return 0

    def most_left(self, rows: np.ndarray) -> int:
        """Returns the largest number of tokens that one of these rows may still get."""
        return int((self.table.limit[rows] - self.table.num_tokens[rows]).max())

    def admit(self, budget: int, later: int) -> list[tuple[Sequence, int]]:
        """Admits waiting sequences in order until one does not fit."""
        admitted: list[tuple[Sequence, int]] = []
        num_taken = 0
        while num_taken < len(self.waiting) and budget > 0 and self.table.free_rows:
            leader = self.waiting[num_taken]
            computed = self.take_blocks(leader, may_follow=later > 0)
            if computed is None:
                break
            count = min(len(leader.ids) - computed, budget)
            if computed:
                count = min(count, later)
                later -= count
            budget -= count
            self.num_prefilled += count
            self.num_reused += computed
            self.remember_blocks(leader, computed, count)
            admitted.append((leader, count))
            self.running.append(leader)
            num_taken += 1
            first = num_taken
            while (
                num_taken < len(self.waiting)
                and num_taken - first < len(self.table.free_rows)
                and self.waiting[num_taken].request is leader.request
                and not self.waiting[num_taken].logprobs
                and not leader.logprobs
            ):
                num_taken += 1
            if num_taken > first:
                leader.followers = self.waiting[first:num_taken]
                self.table.seat_beside(leader, leader.followers)
        del self.waiting[:num_taken]
        return admitted

    def take_blocks(self, sequence: Sequence, *, may_follow: bool) -> int | None:
        """Gives a sequence a row and blocks for all its tokens; returns the number of cached
        tokens. None if there is no space, or if some are cached and it may not use them. While
        others run, a hundredth of the pool stays reserved for them, so that the new sequence is not
        preempted at once."""
        pool, size = self.pool, len(sequence.ids)
        found, node = pool.find_prefix(sequence.ids, size - 1)
        if found and not may_follow:
            return None
        num_new = pool.blocks_for(size) - len(found)
        reserve = pool.num_blocks // 100 if self.running else 0
        if num_new + pool.num_idle_in(found) + reserve > pool.num_free:
            return None
        pool.share(found)
        sequence.blocks = found + [pool.take() for _ in range(num_new)]
        sequence.node = node
        self.table.seat(sequence)
        self.table.set_blocks(sequence.row, 0, sequence.blocks)
        computed = len(found) * pool.block_size
        self.table.num_computed[sequence.row] = computed
        return computed

    def grow_running(self) -> None:
        """Takes a block for each sequence whose next token needs one; the latest sequences are
        preempted if needed."""
        table, pool = self.table, self.pool
        full = table.num_tokens[self.rows] > table.num_blocks[self.rows] * pool.block_size
        if pool.num_free >= full.sum():
            self.grow(self.rows[full])
            return
        for row in self.rows[full]:
            sequence = table.sequences[row]
            while sequence is not None and sequence.row == row and pool.num_free == 0:
                self.preempt(self.running[-1])
            if sequence is not None and sequence.row == row:
                self.grow(np.array([row]))

    def grow(self, rows: np.ndarray) -> None:
        """Allocates one more block for each row; the caller has checked that there are enough."""
        blocks = [self.pool.take() for _ in rows]
        for row, block in zip(rows.tolist(), blocks, strict=True):
            sequence = self.table.sequences[row]
            assert sequence is not None
            sequence.blocks.append(block)
        self.table.add_blocks(rows, blocks)

    def fork_followers(self, plan: Plan) -> None:
        """Starts the followers of finished prefills from the same logits."""
        pool, table = self.pool, self.table
        rows: list[int] = []
        origins: list[int] = []
        for j in np.flatnonzero(table.has_followers[plan.drawn_rows]):
            leader, i = table.sequences[plan.drawn_rows[j]], int(plan.drawn_from[j])
            assert leader is not None
            size = leader.num_prompt
            num_full = size // pool.block_size
            forked: list[Sequence] = []
            for follower in leader.followers:
                if num_full < len(leader.blocks) and pool.num_free == 0:
                    self.vacate([follower])
                    self.add(follower)
                    continue
                follower.blocks = leader.blocks[:num_full]
                pool.share(follower.blocks)
                if num_full < len(leader.blocks):
                    follower.blocks = [*follower.blocks, pool.take()]
                    plan.copies.append((leader.blocks[num_full], follower.blocks[num_full]))
                follower.node = leader.node
                forked.append(follower)
            if forked:
                table.set_blocks_of([f.row for f in forked], [f.blocks for f in forked], size)
            self.num_reused += size * len(forked)
            self.running += forked
            plan.forks += [(leader.row, follower.row) for follower in forked]
            rows += [follower.row for follower in forked]
            origins += [i] * len(forked)
            leader.followers = []
            table.has_followers[leader.row] = False
        if rows:
            plan.drawn_rows = np.concatenate([plan.drawn_rows, np.array(rows, np.int64)])
            plan.drawn_from = np.concatenate([plan.drawn_from, np.array(origins, np.int64)])
            self.seat_changed()

    def remember_blocks(self, sequence: Sequence, start: int, count: int) -> None:
        """Stores blocks filled by these tokens as prefixes for other sequences."""
        size = self.pool.block_size
        for index in range(start // size, (start + count) // size):
            tokens = self.table.tokens[sequence.row, index * size : (index + 1) * size].tolist()
            sequence.node = self.pool.remember(sequence.node, tokens, sequence.blocks[index])

    # Preemption.

    def preempt(self, sequence: Sequence) -> None:
        """Frees the blocks of a running sequence, which waits to be recomputed."""
        self.running.remove(sequence)
        self.num_preemptions += 1
        freed = [sequence, *sequence.followers]
        self.vacate(freed)
        for other in freed:
            self.add(other)
        sequence.followers = []
        self.seat_changed()

    def preempt_all(self) -> None:
        while self.running:
            self.preempt(self.running[-1])

    def vacate(self, sequences: list[Sequence]) -> None:
        seated = [sequence for sequence in sequences if sequence.row >= 0]
        for sequence in seated:
            self.before_release(sequence)
        self.table.unseat(seated)
        for sequence in sequences:
            self.pool.release(sequence.blocks)
            sequence.blocks = []

    def seat_changed(self) -> None:
        self.running.sort(key=arrival_of)
        self.rows = np.array([s.row for s in self.running], np.int64)

    def find(self, wanted: Callable[[Sequence], bool]) -> list[Sequence]:
        """Returns all unfinished sequences for which `wanted` is true, including followers."""
        everyone = self.waiting + self.running
        everyone += [follower for leader in self.running for follower in leader.followers]
        return [sequence for sequence in everyone if wanted(sequence)]
