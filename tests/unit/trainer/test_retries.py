"""When a run is started again by itself, and how often."""

import logging
import os
from types import SimpleNamespace

import pytest

from pentad.config.load import read_config
from pentad.config.resolve import resolve
from pentad.core.errors import Crashed, Interrupted, RunError, Transient, UserError
from pentad.trainer import retries
from pentad.trainer.preflight import AGAIN
from pentad.trainer.retries import is_started_again, policy_of, start_again


@pytest.fixture
def config(tmp_path):
    given = [f"fileroot={tmp_path}", "actor.path=m", "recover.retries=2", "user=me"]
    (tmp_path / "logs/me/default/trial-0").mkdir(parents=True)
    return resolve(read_config(None, given).config)[0]


@pytest.fixture
def newest(monkeypatch):
    """The step of the newest checkpoint."""
    held = SimpleNamespace(step=3)
    monkeypatch.setattr(retries, "newest_step", lambda config: held.step)
    return held


def take(config, policy, error):
    return is_started_again(config, policy, error)


def test_tries_are_counted_until_a_checkpoint_is_gained(config, newest, caplog, tmp_path):
    caplog.set_level(logging.WARNING)
    tries, lost = policy_of(config), Transient("lost")
    assert [take(config, tries, lost) for _ in range(3)] == [True, True, False]
    newest.step = 4
    (tmp_path / "logs/me/default/trial-0/steps.jsonl").write_text('{"step": 5}\n')
    assert take(config, tries, Transient("lost\nits log")), "a step was gained"
    assert caplog.messages[-1] == (
        "the run failed: lost; it is started again after step 5 (try 1 of recover.retries = 2 "
        "without a step gained)"
    )


def test_the_same_exception_at_the_same_step_twice_is_final_and_a_lost_process_is_not(
    config, newest, caplog, tmp_path, monkeypatch
):
    steps = tmp_path / "logs/me/default/trial-0/steps.jsonl"
    steps.write_text('{"step": 4}\n')
    lost = Transient("rank 1 of 2, step 5: was ended by signal 9")
    tries = policy_of(config)
    assert [take(config, tries, lost) for _ in range(2)] == [True, True]
    tries = policy_of(config)
    assert take(config, tries, Crashed("rank 1 of 2, step 5: ValueError: at 0x7f01\nits log"))
    assert not take(config, tries, Crashed("rank 0 of 2, step 5: ValueError: at 0x7f99\nits log"))
    assert caplog.messages[-1] == (
        "the run failed: rank 0 of 2, step 5: ValueError: at 0x7f99; the try before ended at the "
        "same step in the same way: it is not started again"
    )
    for other in (lost, Crashed("rank 0 of 2, step 5: KeyError: 3")):
        tries = policy_of(config)
        assert take(config, tries, Crashed("rank 0 of 2, step 5: ValueError: x"))
        assert take(config, tries, other)
    tries = policy_of(config)
    assert take(config, tries, ValueError("x"))
    steps.write_text('{"step": 4}\n{"step": 5}\n')
    assert take(config, tries, ValueError("x")), "it came a step further"
    monkeypatch.setenv(AGAIN, str(tries))
    assert not take(config, policy_of(config), ValueError("x")), "known to the next program"


def test_only_failures_that_may_pass_put_the_command_in_place_of_the_program(
    config, newest, monkeypatch
):
    begun = []
    monkeypatch.setattr(retries, "replace_program", lambda: begun.append(os.environ[AGAIN]))
    monkeypatch.setenv(AGAIN, "")
    for final in (UserError("x"), RunError("a bound"), Interrupted("ctrl-C")):
        start_again(config, final)
    assert begun == []
    for error in (Transient("a sampler is gone"), ZeroDivisionError(), ValueError("bug")):
        start_again(config, error)
    assert [one.split(":")[:2] for one in begun] == [["1", "3"], ["2", "3"]], "and not for ever"
    newest.step = -1
    monkeypatch.setenv(AGAIN, "")
    start_again(config, Transient("before the first checkpoint"))
    assert len(begun) == 2
    newest.step = 5
    monkeypatch.setenv("RANK", "0"), monkeypatch.setenv("WORLD_SIZE", "2")
    start_again(config, Transient("torchrun starts its ranks again"))
    assert len(begun) == 2
