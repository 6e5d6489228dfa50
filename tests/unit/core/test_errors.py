"""An error of the operating system says which file it is about."""

import errno
from pathlib import Path

import pytest

from pentad.core.errors import naming


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
