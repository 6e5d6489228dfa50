"""What a process says of the machine, and to its output."""

import io
import sys

import pytest

from pentad.core.machine import flush_output


class Unread(io.StringIO):
    """The pipe of a reader that has left."""

    def flush(self):
        raise BrokenPipeError


@pytest.mark.parametrize("closed", [True, False])
def test_output_that_nobody_reads_does_not_keep_a_process_from_its_end(monkeypatch, closed):
    stream, flushed = (io.StringIO() if closed else Unread()), []
    if closed:
        stream.close()
    rest = io.StringIO()
    rest.flush = lambda: flushed.append(True)
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", rest)
    flush_output()
    assert flushed
