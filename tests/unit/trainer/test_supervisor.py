"""When a run is started again by itself, how often, and in which process."""

import logging
import os
import signal
import threading
import time
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from pentad.config.load import read_config
from pentad.config.resolve import resolve
from pentad.core.errors import Crashed, Interrupted, RunError, Transient, UserError
from pentad.runtime.helper import Died, Helper
from pentad.runtime.restarts import RestartPolicy, is_restart
from pentad.trainer.processes import ranks, supervisor
from pentad.trainer.processes.ranks import run_in_fresh_processes
from pentad.trainer.processes.supervisor import RunJob, Supervisor, Unusable
from pentad.trainer.run import RunSummary


class Service:
    """A learner without a model."""

    mild = frozenset()

    def __init__(self, config, rank, device):
        self.rank, self.device = rank, device

    def close(self, *, is_failed):
        pass


def no_run(*_):
    raise AssertionError("it is not run")


def check(config, device):
    return "checked"


@pytest.fixture
def config(tmp_path):
    given = [f"fileroot={tmp_path}", "actor.path=m", "recover.retries=2", "user=me"]
    given.append("allocation_mode=archon:d1")
    (tmp_path / "logs/me/default/trial-0").mkdir(parents=True)
    return resolve(read_config(None, given).config)[0]


@pytest.fixture
def newest(monkeypatch):
    """The step of the newest checkpoint."""
    held = SimpleNamespace(step=3)
    monkeypatch.setattr(supervisor, "newest_step", lambda config: held.step)
    return held


@pytest.fixture
def make(config, newest):
    """A supervisor of a run in one process."""
    with ExitStack() as stack:

        def make(run=no_run):
            one = Supervisor(RunJob(run, Service, check, config, device="cpu"))
            return stack.enter_context(one.resources) and one if run is no_run else one

        yield make


def follows(one, error):
    """Whether a generation follows a failure."""
    try:
        one.note_lost(error)
    except Exception as raised:
        assert raised is error or isinstance(raised, RunError)
        return False
    return True


def test_tries_are_counted_until_a_checkpoint_is_gained(make, newest, caplog, tmp_path):
    caplog.set_level(logging.WARNING)
    one, lost = make(), Transient("lost")
    assert [follows(one, lost) for _ in range(3)] == [True, True, False]
    newest.step = 4
    (tmp_path / "logs/me/default/trial-0/steps.jsonl").write_text('{"step": 5}\n')
    assert follows(one, Transient("lost\nits log")), "a step was gained"
    assert caplog.messages[-1] == (
        "the run failed: lost; it is started again after step 5 (try 1 of recover.retries = 2 "
        "without a new step)"
    )


def test_the_same_exception_at_the_same_step_twice_is_final_and_a_lost_process_is_not(
    make, newest, caplog, tmp_path
):
    steps = tmp_path / "logs/me/default/trial-0/steps.jsonl"
    steps.write_text('{"step": 4}\n')
    lost, one = Transient("rank 1 of 2, step 5: was ended by signal 9"), make()
    assert [follows(one, lost) for _ in range(2)] == [True, True]
    one = make()
    assert follows(one, Crashed("rank 1 of 2, step 5: ValueError: at 0x7f01\nits log"))
    assert not follows(one, Crashed("rank 0 of 2, step 5: ValueError: at 0x7f99\nits log"))
    assert caplog.messages[-1] == (
        "the run failed: rank 0 of 2, step 5: ValueError: at 0x7f99; the try before ended at the "
        "same step in the same way: it is not started again"
    )
    for other in (lost, Crashed("rank 0 of 2, step 5: KeyError: 3")):
        one = make()
        assert follows(one, Crashed("rank 0 of 2, step 5: ValueError: x"))
        assert follows(one, other)
    one = make()
    assert follows(one, ValueError("x"))
    steps.write_text('{"step": 4}\n{"step": 5}\n')
    assert follows(one, ValueError("x")), "it came a step further"


def test_only_failures_that_may_pass_and_have_a_checkpoint_are_followed_by_another_try(
    make, newest
):
    one = make()
    for final in (UserError("x"), RunError("a bound"), Interrupted("ctrl-C")):
        assert not follows(one, final)
    assert one.policy.generation == 0
    for error in (Transient("a sampler is gone"), ZeroDivisionError()):
        assert follows(one, error)
    assert not follows(one, ValueError("bug")), "and not for ever"
    newest.step = -1
    assert not follows(make(), Transient("before the first checkpoint"))


def test_a_process_that_failed_runs_on_with_a_new_service_and_nothing_of_the_old_one(make):
    seen = []

    def run(calls, config, notes, fresh, one):
        assert one.checked == "checked"
        seen.append((calls.service, fresh, is_restart()))
        if len(seen) == 1:
            raise ValueError("once")
        return "summary"

    assert make(run).run_checked(fresh=True) == "summary"
    (first, *begun), (second, *again) = seen
    assert first is not second and (begun, again) == ([True, False], [False, True])
    assert not is_restart()


def test_a_thread_of_an_earlier_run_that_hangs_does_not_make_the_process_unusable(make):
    end, failed = threading.Event(), []
    threading.Thread(target=end.wait, name="learner", daemon=True).start()

    def run(*_):
        if not failed:
            failed.append(True)
            raise Transient("once")
        return "summary"

    assert make(run).run_checked(fresh=False) == "summary"
    end.set()


def test_a_call_that_does_not_return_asks_for_a_fresh_process(make, caplog):
    end = threading.Event()

    def run(*_):
        threading.Thread(target=end.wait, name="learner", daemon=True).start()
        raise Transient("no progress for 60 s")

    with pytest.raises(Unusable) as raised:
        make(run).run_checked(fresh=False)
    end.set()
    assert raised.value.policy.used == 1
    assert caplog.messages[-1].endswith("fresh process: a call of the learner does not return")


# In fresh processes; what they run is found there by its name.


def summary_of(calls, config, notes, fresh, one):
    assert not fresh and is_restart() and one.checked == "checked"
    return RunSummary(records=os.getpid(), model=one.policy.used, num_steps=7)


def fail(*_):
    raise ZeroDivisionError("a defect")


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def hang_once(calls, config, notes, fresh, one):
    if one.policy.used == 1:
        threading.Thread(target=time.sleep, args=(600,), name="learner", daemon=True).start()
        raise Transient("no progress for 60 s")
    return summary_of(calls, config, notes, fresh, one)


def lose_helper(calls, config, notes, fresh, one):
    with (config.run_path / "pids").open("a") as file:
        file.write(f"{os.getpid()}\n")
    Helper("the writer", f"{__name__}:end_at_once").call().result(60)


def end_at_once(channel):
    os._exit(3)


def counted(config):
    policy = RestartPolicy(retries=config.recover.retries)
    assert policy.restarts_after("the first failure")
    return policy


@pytest.mark.parametrize("run", [summary_of, fail, die, hang_once])
def test_a_fresh_process_runs_on_and_its_end_is_that_of_the_run(config, run):
    job = RunJob(run, Service, check, config, device="cpu")
    if run is summary_of:
        found = run_in_fresh_processes(job, counted(config))
        assert found.num_steps == 7 and found.records != os.getpid() and found.model == 1
    elif run is fail:
        with pytest.raises(ZeroDivisionError, match="a defect") as raised:
            run_in_fresh_processes(job, counted(config))
        assert "in fail" in raised.value.__notes__[0], "where it was raised"
    elif run is die:
        words = "the process of the run was ended by signal 9"
        with pytest.raises(Transient, match=words):
            run_in_fresh_processes(job, counted(config))
    else:  # without a checkpoint the second failure is final
        with pytest.raises(Transient, match="no progress"):
            run_in_fresh_processes(job, counted(config))


def test_the_death_of_a_helper_of_a_fresh_process_is_not_that_of_the_process(config):
    job = RunJob(lose_helper, Service, check, config, device="cpu")
    with pytest.raises(Died, match="the writer ended with exit code 3"):
        run_in_fresh_processes(job, counted(config))
    assert len(set((config.run_path / "pids").read_text().split())) == 1


def test_a_kernel_that_does_not_end_ends_the_run_in_words(config, monkeypatch):
    end = threading.Event()
    monkeypatch.setattr(ranks, "reset_gpus", end.wait)
    monkeypatch.setattr(ranks, "RESET_S", 0.05)
    with pytest.raises(RunError, match="start the command again, and the run resumes from its"):
        run_in_fresh_processes(RunJob(fail, Service, check, config), RestartPolicy(retries=3))
    end.set()
