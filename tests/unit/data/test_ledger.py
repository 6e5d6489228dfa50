"""The ledger: legal transitions, sentences for illegal ones, and conservation under faults."""

import json
from dataclasses import asdict
from typing import get_args

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pentad.data.ledger import Ledger, LedgerError, LiveState


@pytest.fixture
def ledger():
    return Ledger(2)


def make_ready(ledger: Ledger, batch: int) -> int:
    gid = ledger.admit(batch)
    assert ledger.commit(gid, ledger.start(gid))
    return gid


def test_a_batch_is_trained_in_slot_order_and_then_forgotten(ledger):
    gids = [ledger.admit(0), ledger.admit(0)]
    assert gids == [0, 1]
    for gid in reversed(gids):
        ledger.commit(gid, ledger.start(gid))
    assert ledger.are_ready(0)
    assert ledger.lease(0) == [0, 1]
    assert ledger.gids_in("leased") == [0, 1]
    ledger.ack([0, 1])
    assert asdict(ledger.funnel()) == {
        "drawn": 2,
        "trained": 2,
        "dropped": {},
        "in_flight": 0,
    }
    assert (ledger.next_batch, ledger.num_missing(0)) == (1, 0)


def test_a_drop_gives_its_slot_to_the_next_ordinal(ledger):
    ledger.admit(0), ledger.admit(0), ledger.admit(1)
    ledger.drop(0, "too_long")
    assert (ledger.next_batch, ledger.num_missing(0), ledger.num_drawn(0)) == (0, 1, 2)
    assert ledger.admit(0) == 3
    for gid in (1, 3):
        ledger.commit(gid, ledger.start(gid))
    assert ledger.lease(0) == [3, 1], "slot order, not gid order"
    assert ledger.funnel().dropped == {"too_long": 1}


def test_slots_can_be_leased_apart(ledger):
    first, second = make_ready(ledger, 0), ledger.admit(0)
    assert ledger.are_ready(0, range(0, 1)) and not ledger.are_ready(0, range(1, 2))
    assert ledger.lease(0, range(0, 1)) == [first]
    assert ledger.lease(0, range(0, 1)) == [], "a leased group is not ready"
    ledger.commit(second, ledger.start(second))
    assert ledger.lease(0, range(1, 2)) == [second]


def test_a_second_commit_changes_nothing(ledger):
    gid = ledger.admit(0)
    attempt = ledger.start(gid)
    assert ledger.gids_in("running") == [gid]
    assert ledger.commit(gid, attempt)
    assert not ledger.commit(gid, attempt)
    assert ledger.gids_in("ready") == [gid]


def test_a_commit_after_the_end_is_ignored(ledger):
    gid = ledger.admit(0)
    attempt = ledger.start(gid)
    ledger.drop(gid, "deadline")
    assert not ledger.commit(gid, attempt)
    assert ledger.funnel().trained == 0


def test_released_groups_are_ready_again(ledger):
    gids = [make_ready(ledger, 0), make_ready(ledger, 0)]
    ledger.release(ledger.lease(0))
    assert ledger.gids_in("ready") == gids


def seen(ledger: Ledger) -> tuple[object, ...]:
    """All that can be asked of it."""
    states = [ledger.gids_in(state) for state in ("planned", "running", "ready", "leased")]
    counts = [(ledger.num_missing(batch), ledger.num_drawn(batch)) for batch in range(4)]
    return ledger.funnel(), ledger.next_gid, ledger.next_batch, states, counts


@pytest.mark.parametrize(
    ("act", "sentence"),
    [
        (lambda led: led.start(9), "group 9 cannot start: it was never admitted"),
        (lambda led: led.start(1), "group 1 of batch 0 cannot start: it is running, not planned"),
        (lambda led: led.admit(0), "batch 0 takes no more groups: all its slots are in use"),
        (lambda led: led.admit(2), "batch 2 cannot take a group while batch 1 has 2 free slots"),
        (lambda led: led.commit(0, 0), "group 0 cannot commit attempt 0: it never began"),
        (lambda led: led.commit(1, 1), "group 1 cannot commit attempt 1: it never began"),
        (lambda led: led.commit(7, 0), "group 7 cannot commit: it was never admitted"),
        (lambda led: led.commit(1, -1), "group 1 cannot commit attempt -1: it never began"),
        (lambda led: led.ack([1]), "group 1 of batch 0 cannot ack: it is running, not leased"),
        (lambda led: led.ack([1, 1]), "ack names a group twice"),
        (lambda led: led.release([0]), "group 0 of batch 0 cannot release: it is planned"),
        (lambda led: led.drop(0, ""), "group 0 cannot be dropped without a reason"),
        (lambda led: led.drop(5, "x"), "group 5 cannot drop: it was never admitted"),
    ],
)
def test_illegal_transitions_are_named_and_change_nothing(ledger, act, sentence):
    ledger.admit(0)
    ledger.start(ledger.admit(0))
    before = seen(ledger)
    with pytest.raises(LedgerError, match=sentence):
        act(ledger)
    assert seen(ledger) == before


def test_nothing_happens_to_a_group_that_has_ended(ledger):
    make_ready(ledger, 0), make_ready(ledger, 0)
    ledger.ack(ledger.lease(0))
    for act in (lambda: ledger.drop(0, "x"), lambda: ledger.start(0), lambda: ledger.ack([0])):
        with pytest.raises(LedgerError, match="group 0 cannot .*: it has ended"):
            act()


def test_a_committed_attempt_is_not_carried(ledger):
    gid = make_ready(ledger, 0)
    with pytest.raises(LedgerError, match="group 0 of batch 0 cannot carry: it is ready"):
        ledger.carry(gid, 0)


def test_ack_applies_to_all_or_none(ledger):
    make_ready(ledger, 0), ledger.admit(0)
    ledger.lease(0)
    with pytest.raises(LedgerError, match="group 1 of batch 0 cannot ack: it is planned"):
        ledger.ack([0, 1])
    assert ledger.gids_in("leased") == [0]


def test_restore_plans_again_what_was_under_way_with_the_attempt_it_had():
    ledger = Ledger(5)
    for _ in range(5):
        ledger.admit(0)
    for gid in range(1, 5):
        ledger.start(gid)
    for gid in range(2, 5):
        ledger.commit(gid, 0)
    ledger.lease(0, [2])  # now: planned, running, leased, ready, ready
    saved = json.loads(json.dumps(ledger.snapshot()))
    again = Ledger.restore(saved, available={2, 3})
    assert again.gids_in("planned") == [0, 1, 4]
    assert again.gids_in("ready") == [2, 3]
    assert [again.start(gid) for gid in (0, 1, 4)] == [0, 0, 0], "the same seeds as without a crash"
    assert again.funnel() == ledger.funnel()


LIVE = get_args(LiveState)


class LedgerUnderFaults(RuleBasedStateMachine):
    """Random samplers, trainers, crashes and zombies against a plain record of what ended how."""

    @initialize(size=st.integers(1, 3), lead=st.integers(1, 3), has_scorers=st.booleans())
    def begin(self, size, lead, has_scorers):
        self.size, self.lead = size, lead
        self.ledger = Ledger(size, has_scorers=has_scorers)
        self.ended: dict[int, str] = {}
        self.batch_of: dict[int, int] = {}
        self.attempts: list[tuple[int, int]] = []
        self.stored: set[int] = set()
        self.trained_batches = 0

    def gids(self, *states):
        return [gid for state in states for gid in self.ledger.gids_in(state)]

    def end(self, gid, how):
        assert gid not in self.ended, f"group {gid} ended twice"
        self.ended[gid] = how

    @rule()
    def admit(self):
        batch = self.ledger.next_batch
        if batch < self.trained_batches + self.lead:
            gid = self.ledger.admit(batch)
            assert gid == len(self.batch_of), "ordinals are drawn without gaps"
            self.batch_of[gid] = batch

    @precondition(lambda self: self.gids("planned"))
    @rule(data=st.data())
    def start(self, data):
        gid = data.draw(st.sampled_from(self.gids("planned")))
        self.attempts.append((gid, self.ledger.start(gid)))

    @precondition(lambda self: self.attempts)
    @rule(data=st.data())
    def commit(self, data):
        """Any attempt that ever began may report, also zombies."""
        gid, attempt = data.draw(st.sampled_from(self.attempts))
        was_current = self.ledger.is_current(gid, attempt)
        assert self.ledger.commit(gid, attempt) == was_current
        if was_current:
            self.stored.add(gid)

    @precondition(lambda self: self.attempts)
    @rule(data=st.data())
    def score(self, data):
        """A scorer may report late, and more than once."""
        gid, attempt = data.draw(st.sampled_from(self.attempts))
        is_latest = (gid, attempt) == max(a for a in self.attempts if a[0] == gid)
        was_sampled = gid in self.gids("sampled") and is_latest
        assert self.ledger.score(gid, attempt) == was_sampled
        assert gid in self.gids("ready") or not was_sampled

    @precondition(lambda self: self.gids("running"))
    @rule(data=st.data())
    def carry(self, data):
        """It continues as the attempt that it was."""
        running = [a for a in self.attempts if self.ledger.is_current(*a)]
        if running:
            gid, attempt = data.draw(st.sampled_from(running))
            before = self.ledger.num_carries(gid)
            self.ledger.carry(gid, attempt)
            assert gid in self.gids("planned")
            assert self.ledger.num_carries(gid) == before + 1
            self.attempts.remove((gid, attempt))

    @precondition(lambda self: self.gids("planned", "running"))
    @rule(data=st.data())
    def reseat(self, data):
        """In any order they take the oldest places."""
        gids = data.draw(st.permutations(self.gids("planned", "running")))
        kept = {gid: self.ledger.batch_of(gid) for gid in self.gids("sampled", "ready", "leased")}
        self.ledger.reseat(gids)
        batches = [self.ledger.batch_of(gid) for gid in gids]
        assert batches == sorted(batches)
        assert batches[-1] <= self.ledger.next_batch, "no older slot is left free"
        assert kept == {gid: self.ledger.batch_of(gid) for gid in kept}
        self.batch_of |= dict(zip(gids, batches, strict=True))

    @precondition(lambda self: self.gids(*LIVE))
    @rule(data=st.data(), reason=st.sampled_from(["too_long", "no_signal"]))
    def drop(self, data, reason):
        gid = data.draw(st.sampled_from(self.gids(*LIVE)))
        self.ledger.drop(gid, reason)
        self.end(gid, reason)

    @rule()
    def train(self):
        batch = self.trained_batches
        if not self.ledger.are_ready(batch):
            return
        gids = self.ledger.lease(batch)
        assert len(gids) == self.size, "a batch is trained whole"
        assert {self.batch_of[gid] for gid in gids} == {batch}
        self.ledger.ack(gids)
        for gid in gids:
            self.end(gid, "done")
        self.trained_batches += 1

    @rule()
    def lease_and_give_back(self):
        gids = self.ledger.lease(self.trained_batches)
        self.ledger.release(gids)

    @rule(data=st.data())
    def crash(self, data):
        """The process dies with some groups leased; some stored samples are lost with it."""
        if data.draw(st.booleans()):
            self.ledger.lease(self.trained_batches)
        lost = data.draw(st.sets(st.sampled_from(sorted(self.stored) or [0])))
        saved = json.loads(json.dumps(self.ledger.snapshot()))
        has_scorers = data.draw(st.booleans())  # the mode may change
        kept = self.stored - lost
        self.ledger = Ledger.restore(saved, available=kept, has_scorers=has_scorers)
        self.stored -= lost
        self.attempts = []
        assert not self.gids("running", "leased")
        assert set(self.gids("ready", "sampled")) <= self.stored
        assert not self.gids("ready" if has_scorers else "sampled")

    @invariant()
    def every_group_is_alive_or_ended_once(self):
        live = set(self.gids(*LIVE))
        assert self.ledger.num_sampled == len(self.gids("sampled"))
        assert live.isdisjoint(self.ended)
        assert live | set(self.ended) == set(self.batch_of)

    @invariant()
    def the_funnel_reconciles(self):
        funnel = self.ledger.funnel()
        ends = list(self.ended.values())
        assert funnel.drawn == len(self.batch_of)
        assert funnel.trained == ends.count("done") == self.trained_batches * self.size
        assert funnel.dropped == {r: ends.count(r) for r in set(ends) - {"done"}}
        assert funnel.drawn == funnel.trained + sum(funnel.dropped.values()) + funnel.in_flight

    def teardown(self):
        """When the faults stop, every batch admitted fills up and is trained whole."""
        if not hasattr(self, "ledger"):
            return
        last = max(self.batch_of.values(), default=-1)
        while self.trained_batches <= last:
            while self.ledger.next_batch <= self.trained_batches:
                self.admit()
            for gid in self.ledger.gids_in("running"):
                current = [a for a in self.attempts if a[0] == gid][-1]
                self.ledger.carry(*current)
            for gid in self.ledger.gids_in("planned"):
                assert self.ledger.commit(gid, self.ledger.start(gid))
            for gid, *_, state, num_attempts, _ in self.ledger.snapshot()["live"]:
                assert self.ledger.score(gid, num_attempts - 1) == (state == "sampled")
            before = self.trained_batches
            self.train()
            assert self.trained_batches == before + 1
        assert set(self.ended) == set(self.batch_of)


LedgerUnderFaults.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
TestLedgerUnderFaults = LedgerUnderFaults.TestCase
