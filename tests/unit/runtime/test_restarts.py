"""What follows a loss: every kind of it, in every phase of a run, once and again."""

import pytest

from pentad.runtime.restarts import Lost, RestartPolicy

KINDS = {
    "SIGKILL": ("died", "was ended by signal 9 (SIGKILL)"),
    "exit code": ("died", "ended with exit code 3"),
    "hang": ("stuck", "does not run, its last step began 60 s ago"),
    "raise": ("raised", "RuntimeError: CUDA error: an illegal memory access, at 0x7f{slot}"),
    "OOM": ("raised", "OutOfMemoryError: tried to allocate {slot}.5 GiB, GPU {slot} has 79 GiB"),
    "machine lost": ("away", "its slot is gone"),
}
PHASES = {"start": None, "rollout": 5, "train": 5, "publish": 6, "save": 6, "end": 9}
"""The step under way in each; None: the group is not ready. After the last step: the next one."""
R, T, S = "restart", "retire", "stop"
RECURRENCES = {
    # Slots in the order of their losses: what follows a process that is gone, and an exception.
    "once": ([1], [R], [R]),
    "same slot": ([1, 1], [R, T], [R, T]),
    "other slot": ([1, 2], [R, R], [R, S]),
    "two slots": ([1, 1, 2, 2], [R, T, R, T], [R, T, S]),
    "two in turn": ([1, 2, 1, 2], [R, R, T, T], [R, S]),
    "three slots": ([1, 1, 2, 2, 3, 3], [R, T, R, T, R, S], [R, T, S]),
}


def losses(slots, kind="SIGKILL", **more):
    what, cause = KINDS[kind]
    given = {"step": 5, "newest": 3, "can_shrink": True, **more}
    return [Lost(kind=what, cause=cause.format(slot=slot), slot=slot, **given) for slot in slots]


def actions(policy, given):
    """Until the run ends."""
    found = []
    for lost in given:
        found.append(policy.decide(lost).action)
        if found[-1] == S:
            break
    return found


@pytest.mark.parametrize("recurrence", RECURRENCES)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_loss_in_every_phase_once_and_again(kind, phase, recurrence):
    slots, gone, raised = RECURRENCES[recurrence]
    given = losses(slots, kind, step=PHASES[phase])
    policy = RestartPolicy(retries=3, slot_failures=2, newest=3)
    wanted = {"died": gone, "stuck": gone, "raised": raised, "away": ["regroup"] * len(slots)}
    found = actions(policy, given)
    assert found == wanted[KINDS[kind][0]]
    assert policy.generation == len([one for one in found if one != S]), "one for each group"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "machine lost"])
@pytest.mark.parametrize("phase", PHASES)
def test_without_elastic_the_same_group_is_started_again_and_not_for_ever(kind, phase):
    step = PHASES[phase]
    found = actions(RestartPolicy(retries=3, newest=3), losses([1, 2, 1, 2, 1], kind, step=step))
    if KINDS[kind][0] == "raised":
        assert found == [R, S], "the same exception at the same step"
    else:
        assert found == ([R, R, R, S] if step is None else [R, R, S])
    assert actions(RestartPolicy(retries=0), losses([1], kind, step=step)) == [S]


def test_a_group_that_cannot_shrink_waits_for_slots_and_not_for_code():
    policy = RestartPolicy(retries=3, slot_failures=2)
    assert actions(policy, losses([0, 0], can_shrink=False)) == [R, T], "others may return"
    policy = RestartPolicy(retries=3, slot_failures=2)
    assert actions(policy, losses([0, 0], "raise", can_shrink=False)) == [R, S]
    policy = RestartPolicy(retries=3, slot_failures=2)
    assert actions(policy, losses([1, 1])) == [R, T]
    assert actions(policy, losses([0, 0], can_shrink=False)) == [R, S], "none is left to try"


def test_a_slot_is_retired_at_once_where_one_failure_is_enough():
    policy = RestartPolicy(retries=3, slot_failures=1)
    assert actions(policy, losses([3, 2])) == [T, T]
    policy = RestartPolicy(retries=3, slot_failures=1)
    other = Lost(kind="raised", cause="ValueError: x", slot=2, step=5, newest=3, can_shrink=True)
    assert actions(policy, [*losses([3], "raise"), other]) == [T, T], "another error"
    assert actions(policy, losses([1], "raise")) == [S]


def test_a_patient_slot_is_retired_by_what_would_end_a_run():
    """The same step thrice, or the same exception twice, of one slot of several."""
    for kind, wanted in (("hang", [R, R, T]), ("OOM", [R, T])):
        policy = RestartPolicy(retries=9, slot_failures=9)
        assert actions(policy, losses([1, 1, 1][: len(wanted)], kind)) == wanted


def test_what_no_slot_is_at_fault_for_retires_none():
    policy = RestartPolicy(retries=3, slot_failures=1)
    lost = Lost(kind="died", cause="gloo: connection closed", slot=None, step=5)
    assert actions(policy, [lost] * 3) == [R, R, S] and not policy.retired


def test_a_checkpoint_gained_forgets_and_a_changed_group_counts_anew():
    policy = RestartPolicy(retries=1, slot_failures=2)
    assert actions(policy, losses([1], step=5)) == [R]
    assert actions(policy, losses([1], step=7, newest=5)) == [R], "a checkpoint was gained"
    assert actions(policy, losses([2], step=7, newest=5)) == [S], "tries are used up"
    policy = RestartPolicy(retries=1, slot_failures=2)
    assert actions(policy, losses([1, 1, 2])) == [R, T, R]
    policy.grow()
    assert policy.generation == 4 and actions(policy, losses([3])) == [R]


def test_a_process_without_slots_is_started_again_so_often_between_two_answers():
    policy = RestartPolicy(retries=2)
    lost = "was ended by signal 9"
    assert [policy.restarts_after(lost) for _ in range(3)] == [True, True, False]
    assert (policy.generation, policy.used) == (2, 2)
    policy.note_progress()
    assert policy.restarts_after(lost) and (policy.generation, policy.used) == (3, 1)


def test_sentences_name_what_is_blamed_and_slots_that_are_not_come_back():
    policy = RestartPolicy(retries=3, slot_failures=2)
    said = [policy.decide(lost) for lost in losses([1, 1, 2], "raise")]
    assert said[0].why == (
        "it is started again after step 4 (try 1 of recover.retries = 3 without a new step)"
    )
    assert said[1].why.startswith("its process failed 2 times in a row, the last time: RuntimeErr")
    assert said[2].diagnosis == (
        "step 5 failed with the same error on slots 1 and 2, so its data or computation is "
        "the likely cause and not a device, and the run is not started again"
    )
    assert said[2].give_back == (1,)
    policy = RestartPolicy(retries=3, slot_failures=2)
    *_, last = [policy.decide(lost) for lost in losses([1, 1, 2, 2, 0, 0])]
    assert last.diagnosis.startswith("step 5 failed 6 times in a row on slots 0, 1 and 2, so its ")
    assert last.give_back == (1, 2)
