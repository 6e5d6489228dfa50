"""HF folders: transformers and safetensors read what is written, and bad ones are refused."""

import json
import os
import resource
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file, save_file

from pentad.core.errors import RunError, UserError
from pentad.core.files import sweep
from pentad.core.lock import holding
from pentad.weights.files import SafeFile, checksum
from pentad.weights.hf import (
    INDEX,
    SINGLE,
    HfFolder,
    _check_back,
    bytes_of,
    plan_files,
    plan_folder,
    save_folder,
)
from pentad.weights.transfer import TensorInfo


def tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(7, 5, generator=generator),
        "b": torch.randn(11, generator=generator).bfloat16(),
        "c": torch.randint(0, 99, (3, 2, 2), generator=generator),
        "d": torch.randn(40, generator=generator),
    }


def infos_of(given):
    return {name: TensorInfo(tuple(t.shape), t.dtype) for name, t in given.items()}


def save(folder, given, **options):
    plan = plan_folder(infos_of(given), {"model_type": "toy"}, **options)
    save_folder(folder, given.items(), plan)


def test_safetensors_reads_what_was_written(tmp_path):
    given = tensors()
    save(tmp_path / "out", given)
    back = load_file(tmp_path / "out" / SINGLE)
    assert back.keys() == given.keys()
    for name, tensor in given.items():
        assert back[name].dtype == tensor.dtype and torch.equal(back[name], tensor)


def test_small_shards_have_an_index_and_the_same_tensors(tmp_path):
    given = tensors()
    save(tmp_path / "out", given, shard_bytes=170)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["weight_map"] == {
        "a": "model-00001-of-00003.safetensors",
        "b": "model-00001-of-00003.safetensors",
        "c": "model-00002-of-00003.safetensors",
        "d": "model-00003-of-00003.safetensors",
    }
    assert index["metadata"]["total_size"] == 140 + 22 + 96 + 160
    reader = HfFolder(tmp_path / "out")
    for name, tensor in given.items():
        box = tuple((0, size) for size in tensor.shape)
        assert torch.equal(reader.read(name, box), tensor)


def test_files_are_filled_in_order_and_a_large_tensor_gets_its_own():
    infos = {
        n: TensorInfo((size,), torch.uint8)
        for n, size in zip("abcde", (4, 4, 9, 1, 1), strict=True)
    }
    assert list(plan_files(infos, 8).values()) == [["a", "b"], ["c"], ["d", "e"]]
    assert plan_files(infos, 100) == {SINGLE: list("abcde")}


def test_any_block_can_be_read(tmp_path):
    given = tensors()
    save(tmp_path / "out", given)
    reader = HfFolder(tmp_path / "out")
    assert torch.equal(reader.read("a", ((2, 6), (1, 3))), given["a"][2:6, 1:3])
    assert torch.equal(reader.read("c", ((0, 3), (1, 2), (0, 1))), given["c"][0:3, 1:2, 0:1])


def test_a_failed_save_leaves_the_old_folder_and_nothing_else(tmp_path):
    old = tensors(1)
    save(tmp_path / "out", old)

    def broken():
        yield "a", tensors()["a"]
        raise RuntimeError("the trainer stopped")

    with pytest.raises(RuntimeError, match="the trainer stopped"):
        save_folder(tmp_path / "out", broken(), plan_folder(infos_of(tensors()), {}))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert torch.equal(load_file(tmp_path / "out" / SINGLE)["a"], old["a"])


def test_a_full_disk_leaves_the_old_folder_and_says_so(tmp_path):
    old = tensors(1)
    save(tmp_path / "out", old)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, limit[1]))  # as good as a full disk
    try:
        with pytest.raises(
            RunError, match=r"out: cannot be written \(File too large\); nothing was"
        ):
            save(tmp_path / "out", tensors())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert torch.equal(load_file(tmp_path / "out" / SINGLE)["a"], old["a"])


def test_what_a_killed_writer_left_is_swept(tmp_path):
    (tmp_path / ".out.writing-1").mkdir()
    (tmp_path / ".out.writing-1" / "model.safetensors").write_text("torn")
    save(tmp_path / "out", tensors())
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_byte_that_changes_on_disk_is_noticed(tmp_path):
    given = tensors()
    save(tmp_path / "out", given)
    sums = {name: checksum(bytes_of(tensor)) for name, tensor in given.items()}
    file = tmp_path / "out" / SINGLE
    with ThreadPoolExecutor(2) as readers:
        _check_back(file, infos_of(given), sums, readers)
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    with (
        ThreadPoolExecutor(2) as readers,
        pytest.raises(RunError, match="d does not read back as written"),
    ):
        _check_back(file, infos_of(given), sums, readers)


def test_companions_come_from_the_first_folder_that_has_them(tmp_path):
    for name, files in {"tok": ["tokenizer.json"], "src": ["tokenizer.json", "merges.txt"]}.items():
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).write_text(name)
    save(tmp_path / "out", tensors(), companions=[tmp_path / "tok", tmp_path / "src"])
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "tok"
    assert (tmp_path / "out" / "merges.txt").read_text() == "src"


def write_shards(folder, index=None):
    folder.mkdir()
    save_file({"a": torch.ones(3)}, folder / "x.safetensors")
    save_file({"b": torch.ones(4)}, folder / "y.safetensors")
    weight_map = {"a": "x.safetensors", "b": "y.safetensors"} if index is None else index
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    ("index", "sentence"),
    [
        ({"a": "x.safetensors", "b": "z.safetensors"}, "z.safetensors: missing, but .* names it"),
        ({"a": "x.safetensors", "b": "x.safetensors"}, "b: x.safetensors does not hold it"),
        (
            {"b": "y.safetensors", "c": "x.safetensors"},
            "a: is in x.safetensors, but .* not list it",
        ),
        ({"a": "../m/x.safetensors"}, "index .a: ../m/x.safetensors is not a file of this folder"),
        ({"a": 5}, "is not a safetensors index"),
        ([1], "is not a safetensors index"),
        (5, "is not a safetensors index"),
    ],
)
def test_an_index_that_lies_is_refused(tmp_path, index, sentence):
    write_shards(tmp_path / "m", index)
    with pytest.raises(UserError, match=sentence):
        HfFolder(tmp_path / "m")


def test_one_file_beside_an_index_of_others_is_refused(tmp_path):
    write_shards(tmp_path / "m")
    save_file({"a": torch.zeros(3)}, tmp_path / "m" / SINGLE)
    with pytest.raises(UserError, match="are both there, and the index does not name that file"):
        HfFolder(tmp_path / "m")


def test_a_tensor_in_two_files_is_refused(tmp_path):
    write_shards(tmp_path / "m")
    save_file({"a": torch.ones(3), "b": torch.ones(4)}, tmp_path / "m" / "y.safetensors")
    with pytest.raises(UserError, match="a: is in both x.safetensors and y.safetensors"):
        HfFolder(tmp_path / "m")


@pytest.mark.parametrize("keep", [0, 5, 30, -1])
def test_a_truncated_file_is_refused(tmp_path, keep):
    file = tmp_path / SINGLE
    save_file({"a": torch.ones(30)}, file)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(UserError, match=f"{SINGLE}: (is not a safetensors file|has .* bytes, but)"):
        HfFolder(tmp_path)


def test_a_corrupt_header_is_refused(tmp_path):
    file = tmp_path / SINGLE
    texts = (b"{]", b"[1, 2]", b'{"a": 3}', b'{"a": {"dtype": "F32"}}')
    for header in [text.ljust(32) for text in texts]:
        file.write_bytes(struct.pack("<Q", 32) + header + b"\0" * 64)
        with pytest.raises(UserError, match="is not a safetensors file"):
            SafeFile(file)


def header_of(**offsets):
    entries = {n: {"dtype": "F32", "shape": [2], "data_offsets": o} for n, o in offsets.items()}
    return json.dumps(entries)


@pytest.mark.parametrize(
    ("header", "sentence"),
    [
        (header_of(a=[0, 8], b=[0, 8], c=[8, 16]), "b: its bytes begin at 0, but .* end at 8"),
        (header_of(a=[0, 8], b=[4, 12], c=[8, 16]), "b: its bytes begin at 4, but .* end at 8"),
        (header_of(a=[0, 8], c=[12, 16]), "c: its bytes begin at 12, but .* end at 8"),
        (header_of(a=[0, 8])[:-1] + "," + header_of(a=[8, 16])[1:], "a is in it twice"),
        (header_of(a=[0, 8], b=[8.0, 16.0]), "b: shape or offsets are"),
        (header_of(a=[0, 8], b=[-8, 16]), "b: shape or offsets are"),
        (header_of(a=[0, 8], b=[8, 16, 16]), "is not a safetensors file"),
    ],
)
def test_a_header_whose_tensors_share_or_skip_bytes_is_refused(tmp_path, header, sentence):
    """One tensor's bytes under another's name would load silently."""
    text = header.encode()
    (tmp_path / SINGLE).write_bytes(struct.pack("<Q", len(text)) + text + bytes(range(16)))
    with pytest.raises(UserError, match=sentence):
        HfFolder(tmp_path)


def test_a_folder_in_the_place_of_a_file_is_refused(tmp_path):
    (tmp_path / SINGLE).mkdir()
    with pytest.raises(UserError, match=f"{SINGLE}: is a folder, not a file"):
        HfFolder(tmp_path)


def test_sizes_that_do_not_fit_the_shape_are_refused(tmp_path):
    file = tmp_path / SINGLE
    save_file({"a": torch.ones(6)}, file)
    data = file.read_bytes().replace(b"[6]", b"[7]")
    file.write_bytes(data)
    with pytest.raises(UserError, match=r"a: 24 bytes are not F32 of shape \[7\]"):
        SafeFile(file)


def test_folders_without_safetensors_are_refused(tmp_path):
    with pytest.raises(UserError, match="give a folder with safetensors files"):
        HfFolder(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UserError, match=r"pickled .bin files are not read"):
        HfFolder(tmp_path)
    (tmp_path / INDEX).write_text("{}")
    with pytest.raises(UserError, match="is not a safetensors index"):
        HfFolder(tmp_path)


KILLED = """\
import sys, time, torch
from pentad.weights.transfer import TensorInfo
from pentad.weights.hf import plan_folder, save_folder
def pairs():
    yield "a", torch.zeros(4)
    print("under way", flush=True)
    time.sleep(60)
infos = {name: TensorInfo((4,), torch.float32) for name in "ab"}
save_folder(sys.argv[1], pairs(), plan_folder(infos, {}))
"""


@pytest.mark.usefixtures("started_warm")
def test_what_a_killed_writer_left_is_swept_and_nothing_else(tmp_path):
    writer = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path / "whole")], stdout=subprocess.PIPE
    )
    assert writer.stdout.readline() == b"under way\n"
    assert sweep(tmp_path) == [], "its owner lives"
    (half,) = tmp_path.iterdir()
    writer.kill()
    writer.wait()
    old = tmp_path / f".old.replaced-{writer.pid}"
    old.mkdir()  # moved away for a folder that never came
    (tmp_path / ".git-1").mkdir()
    assert set(sweep(tmp_path)) == {half, old}
    assert {entry.name for entry in tmp_path.iterdir()} == {"old", ".git-1"}


@pytest.mark.parametrize("number", [1, os.getpid(), os.getppid()], ids=["init", "own", "parent"])
@pytest.mark.parametrize("state", ["writing", "replaced", "removed"])
def test_a_process_that_has_the_number_of_a_dead_writer_keeps_nothing(tmp_path, state, number):
    left = tmp_path / f".epoch0epochstep1globalstep1.{state}-{number}"
    left.mkdir()
    assert sweep(tmp_path) == [left]
    back = ["epoch0epochstep1globalstep1"] if state == "replaced" else []
    assert [entry.name for entry in tmp_path.iterdir()] == back


def test_what_is_being_written_keeps_also_the_folder_it_replaces(tmp_path):
    half, old = tmp_path / ".a.writing-1", tmp_path / ".a.replaced-1"
    half.mkdir(), old.mkdir()
    with holding(half):
        assert sweep(tmp_path) == []
    assert set(sweep(tmp_path)) == {half, old}
