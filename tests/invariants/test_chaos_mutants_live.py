"""Every check of `pentad chaos` fails by a program with one thing wrong, under a real scenario."""

import re
import shutil
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from chaos_mutants import MUTANTS, run_mutant

from pentad_tools.chaos import broken_run
from pentad_tools.chaos.invariants import CHECKS
from pentad_tools.chaos.suite import SCENARIOS, Suite
from pentad_tools.chaos.workloads import built_in

pytestmark = [pytest.mark.chaos, pytest.mark.full, pytest.mark.slow]

CASES = [
    ("once", "keep_superseded", "kill-before-commit", "one is missing or twice"),
    ("monotone", "count_no_generation", "kill-before-commit", r"generations \[0, 0\]"),
    ("whole", "commit_other_bytes", "kill-before-commit", "does not have the digest"),
    ("equal", "forget_moments", "kill-in-write", "the record of step . differs in"),
    ("leaks", "open_files", "kill-before-commit", "open files of the scheduler grew"),
    ("tokens", "lose_a_token", "kill-forward", "pairs were computed, not"),
    ("near", "forget_moments", "shrink", "the loss differs by"),
    ("leaks", "sweep_nothing", "kill-scheduler-rl", "folders that are left: .*/dev/shm/pentad-"),
    ("restarts", "leave_old_weights", "kill-sampler", "ranks were started again"),
    ("restarts", "replace_samplers", "kill-learner", "samplers were started again: ..rollout-0"),
    ("groups", "draw_again", "reward-crash", "a group was trained in two steps"),
]


@pytest.fixture(scope="module")
def suite():
    folder = Path(tempfile.mkdtemp(prefix="pentad-chaos-"))
    yield Suite(built_in(folder), folder, seed=0)
    shutil.rmtree(folder)


def test_every_check_and_every_mutant_is_in_the_table():
    assert {check for check, *_ in CASES} == set(CHECKS)
    assert {mutant for _, mutant, *_ in CASES} == set(MUTANTS)


@pytest.mark.parametrize("check, mutant, scenario, sentence", CASES)
def test_a_program_with_one_thing_wrong_is_found(
    suite, monkeypatch, check, mutant, scenario, sentence
):
    (chosen,) = [one for one in SCENARIOS if one.name == scenario]
    compared = {"is_equal": check == "equal", "is_near": check == "near"}
    chosen = replace(chosen, **compared)
    if any(compared.values()):  # by the program as it is
        suite.reference(suite.workloads[chosen.kind])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(broken_run, "run_command", partial(run_mutant, mutant))
    found = suite.run(chosen, number=1 + CASES.index((check, mutant, scenario, sentence)))
    assert check not in found.held and re.search(sentence, found.broken), found
