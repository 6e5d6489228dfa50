"""The budget admits exactly as far as the staleness bound allows."""

from hypothesis import given
from hypothesis import strategies as st

from pentad.trainer.pumps.state import Budget


def test_on_policy_admits_one_batch_at_a_time():
    budget = Budget(groups_per_batch=4, max_staleness=0, num_batches=3)
    assert budget.may_admit(0)
    assert not budget.may_admit(1)
    budget.count_trained()
    assert not budget.may_admit(1), "trained is not published"
    budget.count_published(1)
    assert budget.may_admit(1)
    assert budget.capacity_groups == 4


def test_the_last_batch_closes_the_gate():
    budget = Budget(groups_per_batch=1, max_staleness=5, num_batches=2)
    assert budget.last_open_batch == 1
    assert "beyond the last" in budget.closed_gate(2)


def test_the_closed_gate_names_the_version_it_waits_for():
    budget = Budget(groups_per_batch=1, max_staleness=1, num_batches=9)
    assert budget.closed_gate(1) == ""
    assert "waits for version 1 to be published (published 0" in budget.closed_gate(2)


@given(
    st.integers(0, 4),
    st.lists(st.sampled_from(["admit", "train", "publish"]), max_size=200),
)
def test_lag_never_exceeds_the_bound(max_staleness, events):
    """Any order of events: a batch trained at version b has tokens of version >= b - K."""
    budget = Budget(groups_per_batch=1, max_staleness=max_staleness, num_batches=10_000)
    admitted: list[int] = []  # the oldest version batch b can hold tokens of
    for event in events:
        if event == "admit" and budget.may_admit(len(admitted)):
            admitted.append(budget.published)
        elif event == "train" and budget.trained < len(admitted):
            assert budget.trained - admitted[budget.trained] <= max_staleness
            budget.count_trained()
        elif event == "publish":
            budget.count_published(budget.trained)
