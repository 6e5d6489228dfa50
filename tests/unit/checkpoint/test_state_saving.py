"""State as a DCP folder: ours read by stock torch, stock torch's by us, every byte verified."""

import pickle
import random
import re
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import format_utils

from pentad.checkpoint import rank_saver, shards
from pentad.checkpoint.folders import Checkpoint, Damaged, find_checkpoints
from pentad.checkpoint.job import CommitJob, FileSpec, Piece, run_job
from pentad.checkpoint.restore import fill_state, open_state, restore
from pentad.checkpoint.shards import StateSaver
from pentad.checkpoint.writer import Writer
from pentad.core.errors import RunError, UserError
from pentad.weights import dcp as reader
from pentad.weights.dcp import DcpFolder, flat_boxes, frame_of
from pentad.weights.regions import full_box

FOLDER = "default/recover_checkpoint/globalstep3"
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool)


def make_state(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    state = {f"kind.{dtype}": (100 * torch.randn(5, 3)).to(dtype) for dtype in DTYPES}
    return state | {
        "scalar": torch.tensor(float(seed) + 0.5),
        "empty": torch.empty(0, 4),
        "turned": torch.randn(7, 11).t(),
        "large": torch.randn(37, 5, 11),
    }


def commit(saver: StateSaver, state, root: Path, *, is_async: bool) -> Checkpoint:
    staged = saver.save(state, root, FOLDER, is_async=is_async)
    for tensor in state.values():  # what was staged is a copy, or written
        tensor.zero_()
    written = staged.result(240)["files"]
    assert [one["files"] for one in saver.outcomes()] == [written]
    info = "recover_info/globalstep3"
    file = FileSpec(f"{info}/step_info.json", (Piece("all", (b"{}",)),))
    run_job(CommitJob(root, info, written, (file,)))
    return find_checkpoints(root)[0]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype and torch.equal(tensor, b[name]), name


@pytest.fixture
def small_pieces(monkeypatch):
    """Tensors lie in several pieces, whose ends are inside rows."""
    monkeypatch.setattr(shards, "PIECE_BYTES", 64)
    monkeypatch.setattr(reader, "STRETCH_BYTES", 256)


@pytest.mark.parametrize("is_async", [False, True])
def test_what_was_saved_is_restored_and_stock_torch_reads_it(tmp_path, small_pieces, is_async):
    writer = Writer()
    saver = StateSaver(writer)
    checkpoint = commit(saver, make_state(1), tmp_path, is_async=is_async)
    found = make_state(2)
    restore(found, checkpoint, FOLDER)
    same(found, make_state(1))
    stock = make_state(3)
    stock["turned"] = stock["turned"].contiguous()
    dcp.load(stock, checkpoint_id=str(tmp_path / FOLDER), no_dist=True)
    same(stock, make_state(1))
    format_utils.dcp_to_torch_save(tmp_path / FOLDER, tmp_path / "one.pt")
    same(torch.load(tmp_path / "one.pt", weights_only=True), make_state(1))
    saver.close()
    writer.close()


def test_folders_of_stock_torch_are_read_without_verification(tmp_path, small_pieces):
    dcp.save(make_state(1), checkpoint_id=str(tmp_path / "stock"), no_dist=True)
    folder = DcpFolder(tmp_path / "stock")
    found = make_state(2)
    fill_state(found, folder)
    same(found, make_state(1))
    same({n: folder.read(n, full_box(t.shape)) for n, t in found.items()}, make_state(1))
    part = folder.read("large", ((3, 9), (1, 4), (0, 11)))
    assert torch.equal(part, make_state(1)["large"][3:9, 1:4])


def test_a_second_save_reuses_plan_and_memory_and_overwrites_nothing(tmp_path):
    writer = Writer()
    saver = StateSaver(writer)
    first = commit(saver, make_state(1), tmp_path / "a", is_async=True)
    memory, plan = saver.memory.memory, saver._plan
    second = commit(saver, make_state(2), tmp_path / "b", is_async=True)
    assert saver.memory.memory is memory and saver._plan is plan
    for checkpoint, seed in ((first, 1), (second, 2)):
        found = make_state(9)
        restore(found, checkpoint, FOLDER)
        same(found, make_state(seed))
    more = make_state(3) | {"more": torch.ones(3 << 20, dtype=torch.uint8)}
    third = commit(saver, more, tmp_path / "c", is_async=True)
    found = make_state(9) | {"more": torch.zeros(3 << 20, dtype=torch.uint8)}
    restore(found, third, FOLDER)
    assert int(found["more"].sum()) == 3 << 20
    saver.close()
    writer.close()


def test_every_flipped_byte_of_a_file_is_seen(tmp_path):
    state = make_state(1)
    del state["empty"]  # nothing of it is read
    checkpoint = commit(StateSaver(), state, tmp_path, is_async=False)
    path = tmp_path / FOLDER / "__0_0.distcp"
    whole = path.read_bytes()
    for at in range(7, len(whole), 997):
        torn = bytearray(whole)
        torn[at] ^= 0x10
        path.write_bytes(torn)
        with pytest.raises(Damaged, match=r"__0_0.distcp: piece .* does not have the digest"):
            restore(state, checkpoint, FOLDER)
    path.write_bytes(whole[:-3000])
    with pytest.raises(Damaged, match="__0_0.distcp"):
        restore(state, checkpoint, FOLDER)
    path.unlink()
    with pytest.raises(Damaged, match="__0_0.distcp"):
        restore(state, checkpoint, FOLDER)


def test_a_changed_index_is_seen_and_an_index_that_runs_code_is_refused(tmp_path):
    checkpoint = commit(StateSaver(), make_state(1), tmp_path, is_async=False)
    index = tmp_path / FOLDER / ".metadata"
    index.write_bytes(index.read_bytes()[:-1] + b"x")
    with pytest.raises(Damaged, match=r"\.metadata"):
        open_state(checkpoint, FOLDER)

    class Trap:
        def __reduce__(self):
            return Path.touch, (tmp_path / "ran",)

    index.write_bytes(pickle.dumps(Trap()))
    with pytest.raises(UserError, match="its pickle contains"):
        DcpFolder(tmp_path / FOLDER)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"more": torch.ones(2)}, "holds no more"),
        ({"scalar": torch.ones(2)}, r"scalar is \[\], not \[2\]"),
        ({"large": torch.ones(37, 5, 11, dtype=torch.bfloat16)}, "bfloat16 would round it"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_moves(tmp_path, change, words):
    checkpoint = commit(StateSaver(), make_state(1), tmp_path, is_async=False)
    found = make_state(2) | change
    with pytest.raises(RunError, match=words):
        restore(found, checkpoint, FOLDER)
    same(make_state(2) | change, found)


def test_a_failed_save_leaves_the_saver_usable(tmp_path):
    saver = StateSaver()
    (tmp_path / "file").write_text("")
    staged = saver.save(make_state(1), tmp_path / "file", FOLDER, is_async=False)
    with pytest.raises(OSError, match="File exists"):
        staged.result()
    found = make_state(2)
    restore(found, commit(saver, make_state(1), tmp_path / "good", is_async=False), FOLDER)
    same(found, make_state(1))


def test_a_rank_without_memory_to_stage_in_says_so_to_the_commit(tmp_path, monkeypatch):
    def refuse(size: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(rank_saver, "Memory", refuse)
    saver = StateSaver(Writer())
    staged = saver.save(make_state(1), tmp_path, FOLDER, is_async=True)
    words = r"no host memory to stage .* \(\[Errno 12\] Cannot allocate memory\)"
    with pytest.raises(RunError, match=words):
        staged.result()
    (outcome,) = saver.outcomes()
    assert re.match(words, outcome["error"]) and outcome["files"] == {}


def test_frames_of_tensors_beyond_4_gib_are_zip64(tmp_path):
    size = (4 << 30) + 5
    frame = frame_of(torch.uint8, (size,))
    path = tmp_path / "large.pt"
    with path.open("wb") as file:  # a sparse file
        file.write(frame.before)
        file.seek(len(frame.before) + size - 1)
        file.write(b"\x07")
        file.write(frame.after)
    tensor = torch.load(path, mmap=True, weights_only=True)
    assert tensor.shape == (size,) and tensor[-1] == 7 and tensor[0] == 0


def test_flat_stretches_are_boxes():
    draw = random.Random(3)
    for _ in range(200):
        shape = tuple(draw.randint(1, 4) for _ in range(draw.randint(0, 4)))
        numbers = numpy.arange(numpy.prod(shape, dtype=int)).reshape(shape)
        start = draw.randint(0, numbers.size)
        stop = draw.randint(start, numbers.size)
        found = []
        for place, box in flat_boxes(start, stop, shape):
            block = numbers[tuple(slice(*ends) for ends in box)]
            assert block.flat[0] == place
            found += block.ravel().tolist()
        assert found == list(range(start, stop))
