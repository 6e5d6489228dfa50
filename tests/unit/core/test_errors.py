"""Errors say which file they are about, and each sentence once."""

import errno
from pathlib import Path

import pytest

from pentad.core.errors import Problem, UserError, naming


def test_an_error_that_names_no_file_gets_the_one_that_was_written(tmp_path):
    def write():
        with naming(tmp_path / "state"), Path("/dev/full").open("wb", buffering=0) as file:
            file.write(b"x")

    with pytest.raises(OSError, match=r"No space left on device: '.*/state'") as caught:
        write()
    assert caught.value.errno == errno.ENOSPC


def test_an_error_that_names_a_file_keeps_it(tmp_path):
    with pytest.raises(FileNotFoundError, match="other"), naming(tmp_path / "state"):
        (tmp_path / "other").read_bytes()


def test_each_sentence_is_said_once_and_in_order():
    problem = Problem("actor.path = m", "no such folder")
    error = UserError([problem, "another", str(problem), Problem("actor.path = m", problem.rule)])
    assert error.problems == [problem, "another"]
    assert str(error) == "actor.path = m: no such folder.\nanother"
