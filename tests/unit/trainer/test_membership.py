"""Who belongs to a group: slots that fail, go away and return."""

from types import SimpleNamespace

import pytest
from rule_checks import start_facts

from pentad.config.load import read_config
from pentad.config.resolve import resolve
from pentad.config.rules.start import rank_problems
from pentad.config.topology import Facts, topology
from pentad.core.errors import RunError
from pentad.runtime.report import Failure
from pentad.runtime.restarts import RestartPolicy
from pentad.runtime.slots import Slots
from pentad.trainer.processes import membership
from pentad.trainer.processes.membership import Membership


@pytest.fixture
def held():
    return SimpleNamespace(lacks={})


@pytest.fixture
def members(tmp_path, held):
    def make(*words):
        given = ["allocation_mode=archon:d4t2", "actor.path=Qwen/Qwen3-0.6B", *words]
        config = resolve(read_config(None, ["elastic.enabled=true", *given]).config)[0]
        slots = Slots(tmp_path / "slots")
        return Membership(config, slots, lambda slot: held.lacks.get(slot))

    return make


@pytest.fixture
def policy():
    return RestartPolicy(retries=3, slot_failures=2)


def lose(group, policy, rank, kind="died", message="was ended by signal 9"):
    """What follows, carried out."""
    lost = group.lost(Failure(rank, 5, kind, message, 0.0), step=5, newest=-1)
    decision = policy.decide(lost)
    group.carry_out(decision, lost)
    return decision.action


def loss_of(group, rank, kind, message):
    lost = group.lost(Failure(rank, 5, kind, message, 0.0), step=5, newest=-1)
    return lost.kind, lost.slot, lost.can_shrink


def test_a_slot_that_fails_in_a_row_is_retired_and_its_device_too(members, policy):
    group = members()
    assert group.form(0).used == tuple(range(8))
    assert lose(group, policy, 3) == "restart", "once is an accident"
    assert lose(group, policy, 3) == "retire"
    formed = group.form(1)
    assert formed.used == (0, 1, 2, 4, 5, 6), "and one of the others stays idle"
    assert formed.config.allocation_mode == "archon:d3t2"
    assert group.slots.now().layout == "archon:d3t2" and group.slots.now().generation == 1
    # Ranks are counted anew: rank 3 has slot 4.
    assert [lose(group, policy, 3) for _ in range(2)] == ["restart", "retire"]
    assert sorted(group.slots.away()) == [3, 4], "two slots that fail at one step are two slots"
    group.form(2)
    assert [lose(group, policy, 0) for _ in range(2)] == ["restart", "stop"]
    assert not group.slots.away(), "a step was the cause, not they"


def test_a_slot_that_raises_is_retired_and_the_code_is_blamed_if_it_recurs_elsewhere(
    members, policy
):
    group, error = members(), ("bug", "RuntimeError: CUDA error: device-side assert")
    group.form(0)
    assert [lose(group, policy, 5, *error) for _ in range(2)] == ["restart", "retire"]
    assert "CUDA error" in group.slots.away()[5]
    assert group.form(1).used == (0, 1, 2, 3, 4, 6)
    assert lose(group, policy, 5, *error) == "stop", "rank 5 is slot 6 now"
    assert not group.slots.away()


def test_what_follows_from_another_loss_is_no_slots_own(members, policy):
    group = members()
    group.form(0)
    error = ("bug", "RuntimeError: [gloo] connection closed by peer")
    assert loss_of(group, 2, *error) == ("died", None, False)
    assert [lose(group, policy, rank, *error) for rank in (2, 2, 2)] == ["restart"] * 2 + ["stop"]
    assert not group.slots.away()


def test_slots_return(members, policy):
    group = members()
    group.form(0)
    group.slots.drop(6, "gone")
    assert group.why_away(6) == "gone" and group.why_away(5) is None
    assert lose(group, policy, 6, "away", "gone") == "regroup", "no try of the same group"
    assert group.form(1).used == (0, 1, 2, 3, 4, 5)
    assert not group.has_returned(), "seven slots are of no more use than six"
    group.slots.join(6)
    assert group.has_returned()
    group.slots.drop(0, "gone")
    assert not group.has_returned(), "the loss of one that is used comes first"
    group.slots.join(0)
    assert group.form(2).used == tuple(range(8)) and not group.has_returned()


def test_what_the_runtime_lacks_is_away(members, held, policy):
    group = members()
    group.form(0)
    assert lose(group, policy, 0) == "restart", "that its node is gone is not known yet"
    held.lacks[0] = "the cluster has no node for it"
    assert lose(group, policy, 0) == "regroup", "it cannot be started again"
    assert group.form(1).used == (1, 2, 3, 4, 5, 6) and not group.slots.away()
    held.lacks.clear()
    assert group.has_returned()


def test_too_few_are_waited_for_until_a_deadline(members, monkeypatch, caplog):
    now = SimpleNamespace(s=0.0)
    group = members("elastic.min_ranks=6", "elastic.wait_timeout_s=100")
    for slot in (0, 1, 2):
        group.slots.drop(slot, "gone")

    def sleep(seconds):
        now.s += 10

    clock = SimpleNamespace(monotonic=lambda: now.s, sleep=sleep)
    monkeypatch.setattr(membership, "time", clock)
    with pytest.raises(
        RunError, match="5 of 8 slots are available, elastic.min_ranks = 6 .slot 0: go"
    ):
        group.form(0)
    assert len(caplog.messages) == 4, "every 30 s of 110"
    group.slots.join(0)
    assert group.form(0).used == (0, 3, 4, 5, 6, 7)


def test_grace_is_given_to_slots_that_may_return(members, monkeypatch):
    now = SimpleNamespace(s=0.0)
    group = members("elastic.drop_grace_s=20")
    group.slots.drop(7, "gone")
    wait = SimpleNamespace(monotonic=lambda: now.s, sleep=lambda s: setattr(now, "s", now.s + 5))
    monkeypatch.setattr(membership, "time", wait)
    assert group.form(0).used == tuple(range(6)) and now.s == 20
    assert group.form(1).used == tuple(range(6)) and now.s == 20, "it is known to be away"


def test_without_elastic_nothing_is_looked_at(members):
    group = members("elastic.enabled=false")
    group.slots.drop(0, "gone")
    assert group.form(0).used == tuple(range(8))
    assert loss_of(group, 3, "bug", "ValueError: x") == ("raised", 3, False)


def test_samplers_on_gpus_that_a_shrink_would_move_are_refused(members):
    def refusals(layout, device):
        config = members(f"allocation_mode={layout}", "cluster.n_gpus_per_node=8").config
        found = rank_problems(config, start_facts(device))
        return [problem.where for problem in found if "numbered after those" in problem.rule]

    assert refusals("embedded:d1+archon:d2", "cuda") == ["elastic.enabled = true"]
    assert not refusals("embedded:d1+archon:d2", "cpu")
    assert not refusals("embedded:d2|archon:d2", "cuda")


def test_a_group_of_one_rank_is_a_process_beside_the_scheduler_as_before(members, held):
    group = members("allocation_mode=embedded:d1+archon:d2", "reward.fn=x:y", "elastic.min_ranks=1")
    held.lacks[1] = "it is lost"
    formed = group.form(0)
    assert formed.config.allocation_mode == "embedded:d1+archon:d1"
    placed = topology(formed.config, Facts(kind="cpu", num_devices=None))
    assert placed.is_learner_apart and not placed.is_one_process
    assert placed.store == "files", "in memory only a learner of this process would find groups"
