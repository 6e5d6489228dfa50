"""Lines survive crashes and full disks; redone steps are marked."""

import errno
import os

import pytest

from pentad.core.errors import UserError
from pentad.telemetry.steps import LineWriter, read_lines, supersede


def test_every_line_can_be_read_as_soon_as_it_is_written(tmp_path):
    path = tmp_path / "steps.jsonl"
    writer = LineWriter(path)
    for step in range(1, 4):
        writer.append({"step": step, "text": "a\nb"})
        assert [r["step"] for r in read_lines(path)] == list(range(1, step + 1))
    writer.close()
    assert len(path.read_text().splitlines()) == 3


@pytest.mark.parametrize("torn", [b'{"step": 3', b'{"step": 3}', b"\x00" * 70000])
def test_a_torn_last_line_is_passed_over_and_cut_off_on_resume(tmp_path, torn):
    path = tmp_path / "steps.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n' + torn)
    assert [r["step"] for r in read_lines(path)] == [1, 2]
    writer = LineWriter(path)
    writer.append({"step": 3})
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n{"step": 3}\n'


def test_a_file_of_one_torn_line_starts_anew(tmp_path):
    path = tmp_path / "steps.jsonl"
    path.write_bytes(b'{"st')
    assert read_lines(path) == []
    LineWriter(path).append({"step": 1})
    assert path.read_bytes() == b'{"step": 1}\n'


def test_a_broken_line_inside_is_an_error_with_its_number(tmp_path):
    path = tmp_path / "steps.jsonl"
    path.write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(UserError, match=r"steps.jsonl:2: not JSON"):
        read_lines(path)


@pytest.mark.parametrize(
    "line",
    [
        *("[1]", '"x"', "1", "null", "{}", '{"step": "2"}', '{"step": null}', '{"step": 1.5}'),
        *('{"step": NaN}', '{"step": true}', '{"version": []}', "[" * 100_000, "9" * 5000),
    ],
)
def test_a_line_that_is_no_record_is_bad_input_with_its_number(tmp_path, line):
    path = tmp_path / "steps.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n')
    with pytest.raises(UserError, match=r"steps.jsonl:2: no.*Without the line the run can"):
        read_lines(path)
    with pytest.raises(UserError):
        supersede(path, after=0)
    path = tmp_path / "other.jsonl"  # a file of the run whose lines have no key of their own
    path.write_text('{"version": 1}\n')
    assert read_lines(path) == [{"version": 1}]
    with pytest.raises(UserError, match="a record lacks fields of a run.*'step'"):
        supersede(path, after=0)


def test_a_file_is_closed_once(tmp_path):
    writer = LineWriter(tmp_path / "steps.jsonl")
    number = writer.file
    writer.close()
    other = os.open(tmp_path / "other", os.O_CREAT | os.O_RDWR)
    assert other == number, "the next file gets the number"
    writer.close()
    os.write(other, b"x")
    os.close(other)


def test_no_file_means_no_records(tmp_path):
    assert read_lines(tmp_path / "steps.jsonl") == []


def test_a_full_disk_leaves_no_half_line(tmp_path, monkeypatch):
    path = tmp_path / "steps.jsonl"
    writer = LineWriter(path)
    writer.append({"step": 1})
    real = os.pwrite

    def half_then_full(file, data, offset):
        if len(data) > 4:
            return real(file, data[:4], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", lambda f, d, o: half_then_full(f, d[:9], o))
    with pytest.raises(OSError, match="No space left"):
        writer.append({"step": 2})
    monkeypatch.undo()
    assert path.read_bytes() == b'{"step": 1}\n'
    writer.append({"step": 3})
    assert path.read_bytes() == b'{"step": 1}\n{"step": 3}\n'


def test_redone_steps_are_marked_kept_and_passed_over(tmp_path):
    path = tmp_path / "steps.jsonl"
    writer = LineWriter(path)
    for step in range(1, 6):
        writer.append({"step": step, "generation": 0, "superseded": False})
    writer.close()
    with path.open("ab") as file:
        file.write(b'{"step": 6, "gener')
    assert supersede(path, after=3) == {4, 5}
    assert supersede(path, after=3) == set(), "marked once"
    writer = LineWriter(path)
    writer.append({"step": 4, "generation": 1, "superseded": False})
    writer.sync()
    kept = [(r["step"], r["generation"]) for r in read_lines(path)]
    assert kept == [(1, 0), (2, 0), (3, 0), (4, 1)]
    everything = read_lines(path, superseded=True)
    assert [r["superseded"] for r in everything] == [False, False, False, True, True, False]
