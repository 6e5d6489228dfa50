"""The scheduler alone: order of service, token budget, and giving way."""

import numpy as np
import pytest

from pentad.core.types import Request, SamplingParams
from pentad.infer.blocks import BlockPool
from pentad.infer.scheduler import RequestScheduler
from pentad.infer.sequence import Sequence, Table

BLOCK = 4


class Harness:
    """Runs a scheduler with a model that draws 7 and stops nobody."""

    def __init__(self, num_rows=8, num_blocks=64, max_batch_tokens=64):
        self.table = Table(num_rows, BLOCK)
        self.pool = BlockPool(num_blocks + 1, BLOCK)
        self.scheduler = RequestScheduler(self.table, self.pool, max_batch_tokens)
        self.num_arrived = 0
        self.finished = []

    def submit(self, prompt_size, n=1, limit=100, first=0):
        prompt = tuple(range(first, first + prompt_size))
        request = Request(
            id=f"r{self.num_arrived}",
            prompt_ids=prompt,
            params=SamplingParams(max_new_tokens=limit),
            seeds=tuple(range(n)),
        )
        made = []
        for index in range(n):
            self.num_arrived += 1
            total = prompt_size + limit
            made.append(Sequence(request, index, self.num_arrived, total, list(prompt)))
            self.scheduler.add(made[-1])
        return made

    def step(self):
        plan = self.scheduler.plan()
        if plan is None:
            return None
        num = len(plan.drawn_rows)
        done = self.scheduler.record(plan, np.full(num, 7), np.zeros(num, np.float32), 0)
        self.finished += [sequence.arrival for sequence, _ in done]
        self.scheduler.finish(dict(done))
        self.check()
        return plan

    def check(self):
        """No block is lost, none is held twice by accident, rows point at their sequence."""
        holders = [0] * self.pool.num_blocks
        for sequence in self.scheduler.running:
            for block in sequence.blocks:
                holders[block] += 1
            assert self.table.sequences[sequence.row] is sequence
            row_blocks = self.table.blocks[sequence.row, : len(sequence.blocks)].tolist()
            assert row_blocks == sequence.blocks
        assert holders == self.pool.holders
        arrivals = [s.arrival for s in self.scheduler.running]
        assert arrivals == sorted(arrivals)
        waiting = [s.arrival for s in self.scheduler.waiting]
        assert waiting == sorted(waiting)

    def run(self, max_steps=2000):
        for _ in range(max_steps):
            if self.step() is None:
                return
        pytest.fail("the scheduler does not come to an end")


def test_a_step_never_exceeds_the_token_budget_and_decodes_come_first():
    h = Harness(max_batch_tokens=10)
    h.submit(3)
    h.step()
    h.submit(25, first=50)
    counts = [h.step().counts.tolist() for _ in range(4)]
    assert counts == [[1, 9], [1, 9], [1, 7], [1, 1]]


def test_prefills_behind_cached_tokens_have_a_smaller_budget():
    h = Harness(max_batch_tokens=32)
    h.scheduler.max_later_tokens = 6
    h.submit(20)
    h.step()
    for i in range(4):  # the first 20 tokens are there
        h.submit(24 + i, limit=9)
    h.submit(50, limit=9, first=100)  # fresh, until its second step
    behind, fresh = [], []
    while (plan := h.step()) is not None:
        behind.append(int(plan.counts[(plan.starts > 0) & (plan.counts > 1)].sum()))
        fresh.append(int(plan.counts[plan.starts == 0].sum()))
    assert max(behind) == 6 and behind.count(6) > 3
    assert max(fresh) > 20  # what is fresh takes the rest
    assert h.finished == [2, 3, 4, 5, 6, 1]


def test_service_is_in_order_of_arrival():
    h = Harness(num_rows=2)
    for i in range(6):
        h.submit(3 + i, limit=5)
    h.run()
    assert h.finished == [1, 2, 3, 4, 5, 6]


def test_rows_are_given_out_in_batches_while_others_run():
    h = Harness(num_rows=4)
    h.scheduler.admit_batch = 3
    for i in range(8):
        h.submit(3, limit=2 + 3 * i, first=10 * i)
    running = []
    while (plan := h.step()) is not None:
        running.append(len(plan.rows))
    # three rows must be free before the next three join; the last one joins as soon as it can
    assert running == [4, 4, 3, 3, 3, 2, 2, 2] + [4] * 14 + [3] * 3 + [2] * 3 + [1] * 6
    assert h.finished == list(range(1, 9))


def test_the_first_in_the_queue_is_not_overtaken_by_a_smaller_one():
    h = Harness(num_blocks=10)
    first = h.submit(24, limit=12)[0]
    large = h.submit(24, first=50)[0]
    small = h.submit(2, first=90)[0]
    h.step()
    assert first.row >= 0 and large.row < 0 and small.row < 0


def test_who_came_last_gives_way_and_all_finish():
    h = Harness(num_blocks=8)  # 32 tokens; three sequences of 6 + 20
    sequences = [h.submit(6, limit=20, first=20 * i)[0] for i in range(3)]
    h.run()
    assert h.finished == [1, 2, 3]
    assert h.scheduler.num_preemptions >= 2
    assert [len(s.ids) for s in sequences] == [26, 26, 26]
    assert h.pool.num_held == 0


def test_a_preempted_leader_takes_its_followers_along():
    h = Harness(num_blocks=7, max_batch_tokens=16)
    h.submit(7, limit=10, first=60)  # 2 blocks now, 5 at its end
    h.step()
    h.submit(19, n=3, limit=2)  # 5 blocks, prefilled in two chunks
    h.step()
    assert sorted(len(s.followers) for s in h.scheduler.running) == [0, 2]
    h.run()
    assert sorted(h.finished) == [1, 2, 3, 4]
    assert h.scheduler.num_preemptions >= 1
    assert h.pool.num_held == 0 and len(h.table.free_rows) == 8


def test_a_newcomer_leaves_the_running_some_room():
    h = Harness(num_blocks=249, max_batch_tokens=1000)  # a hundredth of the pool: 2 blocks
    h.submit(4 * 240)
    h.step()
    h.step()  # 241 blocks are held
    late = h.submit(4 * 7, first=2000)[0]
    h.step()
    assert late.row < 0
    h.scheduler.finish({late: "abort"})
    fits = h.submit(4 * 6, first=2000)[0]
    h.step()
    assert fits.row >= 0


def test_a_sequence_takes_its_tokens_from_row_to_row():
    h = Harness()
    first, second = h.submit(3, limit=9)[0], h.submit(4, limit=9, first=30)[0]
    for version in (3, 4):
        plan = h.scheduler.plan()
        drawn = np.array([10 + version, 20 + version])
        h.scheduler.record(plan, drawn, drawn / 100, version)
    rows = first.row, second.row
    h.scheduler.preempt(first)
    h.scheduler.preempt(second)
    h.scheduler.plan()
    assert (second.row, first.row) == rows  # each in the other's place
    h.scheduler.finish({first: "abort", second: "abort"})
    assert first.ids == [0, 1, 2, 13, 14] and second.ids == [30, 31, 32, 33, 23, 24]
    assert first.versions == second.versions == [3, 4]
    assert first.logprobs == pytest.approx([0.13, 0.14])
    assert second.logprobs == pytest.approx([0.23, 0.24])


def test_followers_share_full_blocks_and_copy_the_partial_one():
    h = Harness()
    leader, *followers = h.submit(10, n=3)
    plan = h.step()
    assert plan.counts.tolist() == [10] and len(plan.drawn_rows) == 3
    assert plan.drawn_from.tolist() == [0, 0, 0]
    assert [f.blocks[:2] for f in followers] == [leader.blocks[:2]] * 2
    assert plan.copies == [(leader.blocks[2], f.blocks[2]) for f in followers]


def test_a_prompt_of_whole_blocks_is_shared_without_a_copy():
    h = Harness()
    h.submit(8, n=3)
    plan = h.step()
    assert plan.copies == [] and len(plan.drawn_rows) == 3
    h.step()
    tails = [s.blocks[2] for s in h.scheduler.running]
    assert len(set(tails)) == 3


@pytest.mark.parametrize("seed", range(8))
def test_any_load_comes_to_an_end_with_nothing_held(seed):
    rng = np.random.default_rng(seed)
    h = Harness(num_rows=int(rng.integers(1, 9)), num_blocks=int(rng.integers(10, 30)),
                max_batch_tokens=int(rng.integers(9, 40)))  # fmt: skip
    everyone = []
    for _ in range(12):
        size, limit = int(rng.integers(1, 24)), int(rng.integers(1, 16))
        everyone += h.submit(size, int(rng.integers(1, 5)), limit, first=int(rng.integers(0, 3)))
        for _ in range(int(rng.integers(0, 4))):
            h.step()
        if rng.random() < 0.2:
            victim = everyone[int(rng.integers(len(everyone)))].request
            mine = h.scheduler.find(lambda s, victim=victim: s.request is victim)
            h.scheduler.finish(dict.fromkeys(mine, "abort"))
            h.check()
        if rng.random() < 0.2:
            h.scheduler.preempt_all()
            h.pool.forget_prefixes()
            h.check()
    h.run()
    assert h.pool.num_held == 0 and len(h.table.free_rows) == len(h.table.sequences)
    for sequence in everyone:
        assert sequence.finish is not None
        if sequence.finish == "length":
            assert len(sequence.ids) == sequence.limit
