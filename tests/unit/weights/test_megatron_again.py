"""A stopped conversion starts again; a finished one is found; nothing else is touched."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from megatron_models import bytes_of_folder, hf_folder, run, tensors_of

from pentad.core.errors import RunError, UserError
from pentad.core.lock import holding
from pentad.models import conversion_files
from pentad.models.conversion import Conversion, convert
from pentad.runtime.helper import HelperPool
from pentad.weights.hf import HfFolder
from pentad.weights.megatron import outputs
from pentad.weights.megatron.outputs import LegacyOutput

LAYOUT = {"tp": 2, "pp": 2}


@pytest.fixture
def source(tmp_path):
    return hf_folder(tmp_path / "hf", "qwen3")


class Stopped(Exception):
    pass


KILLED = """
import os, sys
sys.path[:0] = [{tests!r}]
from megatron_models import run
from pentad.weights.megatron.outputs import LegacyOutput
write, done = LegacyOutput.write, []
def stopping(self, name, path):
    if len(done) == 2:
        os.kill(os.getpid(), 9)
    done.append(name)
    return write(self, name, path)
LegacyOutput.write = stopping
run({source!r}, {target!r}, "legacy", tp=2, pp=2)
"""


@pytest.fixture
def killed(source, tmp_path, started_warm):
    """What a process leaves that is killed before it writes the third of four files."""
    text = KILLED.format(
        tests=str(Path(__file__).parent), source=str(source), target=str(tmp_path / "mg")
    )
    ended = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert ended.returncode == -9, ended.stderr
    (aside,) = tmp_path.glob(".mg.writing-*")
    assert len(list(aside.rglob("*.pt"))) == 2 and not (tmp_path / "mg").exists()
    return aside


def times_of(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_a_killed_conversion_is_not_taken_for_whole_and_starts_again(source, tmp_path, killed):
    (killed / "stale.txt").write_text("left by something else")
    victim = next(killed.rglob("*.pt"))
    victim.write_bytes(victim.read_bytes()[:100])
    assert run(source, tmp_path / "mg", "legacy", **LAYOUT).status == "written"
    assert not killed.exists()
    run(source, tmp_path / "direct", "legacy", **LAYOUT)
    assert bytes_of_folder(tmp_path / "mg") == bytes_of_folder(tmp_path / "direct")


def test_what_a_killed_conversion_left_is_removed_by_one_to_another_kind(source, tmp_path, killed):
    (tmp_path / ".mg.replaced-999999").mkdir()  # as one leaves that is killed while it renames
    (tmp_path / ".mg.converting-7").mkdir()  # as earlier versions name it
    assert run(source, tmp_path / "mg", "torch_dist").status == "written"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "mg"]
    assert not list((tmp_path / "mg").rglob("mp_rank_*"))


def test_a_conversion_that_fails_leaves_nothing(source, tmp_path, monkeypatch):
    def failing(self, name, path):
        path.parent.mkdir()
        path.write_text("half")
        raise Stopped

    monkeypatch.setattr(LegacyOutput, "write", failing)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(Stopped):
        run(source, tmp_path / "mg", "legacy", **LAYOUT)
    assert sorted(tmp_path.iterdir()) == before


def test_a_conversion_that_is_done_is_found(source, tmp_path):
    first = run(source, tmp_path / "mg", "legacy", **LAYOUT)
    before = times_of(tmp_path / "mg")
    second = run(source, tmp_path / "mg", "legacy", **LAYOUT)
    assert (first.status, second.status) == ("written", "found")
    assert first.identity == second.identity
    assert times_of(tmp_path / "mg") == before


def test_it_is_found_from_a_copy_of_the_source_by_its_digest(source, tmp_path):
    run(source, tmp_path / "mg", "legacy", **LAYOUT)
    shutil.copytree(source, tmp_path / "copy", copy_function=shutil.copyfile)
    assert run(tmp_path / "copy", tmp_path / "mg", "legacy", **LAYOUT).status == "found"


def test_it_is_not_found_when_source_or_layout_differ(source, tmp_path):
    run(source, tmp_path / "mg", "legacy", **LAYOUT)
    before = bytes_of_folder(tmp_path / "mg")
    with pytest.raises(UserError, match="is not the result of this conversion"):
        run(source, tmp_path / "mg", "legacy", tp=4)
    head = torch.ones(211, 40)
    hf_folder(source, "qwen3", **{"lm_head.weight": head})
    with pytest.raises(UserError, match="is not the result of this conversion"):
        run(source, tmp_path / "mg", "legacy", **LAYOUT)
    assert bytes_of_folder(tmp_path / "mg") == before
    assert run(source, tmp_path / "mg", "legacy", **LAYOUT, force=True).status == "written"
    run(tmp_path / "mg", tmp_path / "back", "hf")
    assert torch.equal(tensors_of(tmp_path / "back")["lm_head.weight"], head)


def test_a_found_folder_that_lost_a_file_is_written_again(source, tmp_path):
    run(source, tmp_path / "mg", "legacy", **LAYOUT)
    whole = bytes_of_folder(tmp_path / "mg")
    next((tmp_path / "mg").rglob("*.pt")).unlink()
    assert run(source, tmp_path / "mg", "legacy", **LAYOUT).status == "written"
    assert bytes_of_folder(tmp_path / "mg") == whole


def test_the_record_names_source_layout_and_files(source, tmp_path):
    ended = run(source, tmp_path / "mg", "legacy", **LAYOUT)
    record = json.loads((tmp_path / "mg" / conversion_files.RECORD).read_text())
    assert record["identity"] == ended.identity
    assert (record["request"]["tp"], record["request"]["pp"]) == (2, 2)
    assert "dequantize" not in record["request"], "records of earlier versions have no such key"
    assert len(record["files"]) == 4 and "model.safetensors" in record["source"]["digests"]


def test_a_folder_of_somebody_else_is_left_alone(source, tmp_path):
    (tmp_path / "mg").mkdir()
    (tmp_path / "mg" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="exists and is not the result"):
        run(source, tmp_path / "mg", "legacy")
    assert (tmp_path / "mg" / "notes.txt").read_text() == "mine"


def test_a_source_that_changes_meanwhile_is_noticed(source, tmp_path, monkeypatch):
    finish = LegacyOutput.finish

    def meddling(self, folder, notes):
        (source / "config.json").write_text((source / "config.json").read_text() + " ")
        finish(self, folder, notes)

    monkeypatch.setattr(LegacyOutput, "finish", meddling)
    with pytest.raises(RunError, match="changed while it was read"):
        run(source, tmp_path / "mg", "legacy")
    assert not (tmp_path / "mg").exists()


def test_two_writers_do_not_meet(source, tmp_path, killed):
    with (
        holding(killed),
        pytest.raises(UserError, match="another conversion is writing it right now"),
    ):
        run(source, tmp_path / "mg", "legacy", **LAYOUT)
    assert len(list(killed.rglob("*.pt"))) == 2  # the other's files were left alone


def test_a_disk_that_changes_bytes_is_noticed(source, tmp_path, monkeypatch):
    """The file is read back: a byte that differs stops the conversion."""
    real = outputs.load_rank_file

    def flipped(path):
        content = real(path)
        content["model"]["decoder.final_layernorm.weight"] += 1
        return content

    monkeypatch.setattr(outputs, "load_rank_file", flipped)
    with pytest.raises(RunError, match="final_layernorm.weight does not read back as written"):
        run(source, tmp_path / "mg", "legacy")
    assert not (tmp_path / "mg").exists()


def test_a_disk_that_is_too_small_is_told_before_writing(source, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    little = usage._replace(free=1000)
    monkeypatch.setattr(conversion_files.shutil, "disk_usage", lambda path: little)
    with pytest.raises(UserError, match="the disk has 0 MiB left"):
        run(source, tmp_path / "mg", "legacy")


@pytest.mark.usefixtures("started_warm")
def test_a_lost_process_is_a_sentence_with_the_remedy(source, tmp_path):
    conversion = Conversion(source=str(source), target=str(tmp_path / "mg"), to="legacy", **LAYOUT)
    pool = HelperPool(2)
    pool.submit = lambda *_: HelperPool.submit(pool, os._exit, 9)
    with pytest.raises(RunError, match="worker process ended with exit code 9; run it again"):
        convert(conversion, pool=pool)
    assert not (tmp_path / "mg").exists()


def test_memory_needed_is_one_file(source, tmp_path, monkeypatch):
    """HF tensors are read one region at a time, never whole where a rank holds a part."""
    sizes = []
    read = HfFolder.read

    def counted(self, name, box):
        piece = read(self, name, box)
        sizes.append(piece.numel())
        return piece

    monkeypatch.setattr(HfFolder, "read", counted)
    run(source, tmp_path / "mg", "legacy", tp=4)
    assert max(sizes) == 128 * 40  # a quarter of the padded vocabulary, the largest shard


def test_the_source_is_never_replaced_by_what_is_made_from_it(source, tmp_path):
    before = bytes_of_folder(source)
    for target in (source, source / "inside", tmp_path):
        with pytest.raises(UserError, match="is inside the source, .*, or contains it"):
            run(source, target, "legacy", force=True)
    assert bytes_of_folder(source) == before


def test_a_flipped_bit_in_a_converted_folder_is_told_when_it_is_read(source, tmp_path):
    run(source, tmp_path / "mg", "legacy")
    (file,) = (tmp_path / "mg").rglob("*.pt")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(UserError, match="differs from the file recorded in pentad-convert.json"):
        run(tmp_path / "mg", tmp_path / "back", "hf")
    assert not (tmp_path / "back").exists()
    (tmp_path / "mg" / "pentad-convert.json").unlink()
    run(tmp_path / "mg", tmp_path / "back", "hf")


@pytest.mark.parametrize("to", ["legacy", "torch_dist", "hf"])
def test_a_disk_that_fills_up_is_told_and_the_next_run_is_whole(source, tmp_path, monkeypatch, to):
    kind = {"legacy": LegacyOutput, "torch_dist": outputs.DistOutput, "hf": outputs.HfOutput}[to]

    def full(self, name, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kind, "write", full)
    with pytest.raises(RunError, match="cannot be written .*No space left on device"):
        run(source, tmp_path / "mg", to)
    assert not (tmp_path / "mg").exists()
    monkeypatch.undo()
    assert run(source, tmp_path / "mg", to).status == "written"


@pytest.mark.parametrize("to", ["legacy", "torch_dist", "hf"])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_weights_that_are_not_numbers_are_refused_by_name(tmp_path, to, value):
    bad = torch.ones(211, 40)
    bad[5, 3] = float(value)
    source = hf_folder(tmp_path / "hf", "qwen3", **{"lm_head.weight": bad})
    with pytest.raises(UserError, match="lm_head.weight: holds numbers that are NaN or infinite"):
        run(source, tmp_path / "mg", to)
    bad[5, 3] = 1e38
    source = hf_folder(tmp_path / "hf", "qwen3", **{"lm_head.weight": bad})
    with pytest.raises(UserError, match="too large for float16; give a wider type with --dtype"):
        run(source, tmp_path / "mg", to, dtype="float16")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_config_that_is_a_link_out_of_the_folder_is_not_copied(source, tmp_path):
    (source / "config.json").rename(tmp_path / "elsewhere.json")
    (source / "config.json").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(UserError, match=r"config.json: is a link to .*, outside the folder"):
        run(source, tmp_path / "mg", "legacy")
    assert not (tmp_path / "mg").exists()
