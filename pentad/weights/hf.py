"""HF folders: reading any block of any tensor in place, and writing a folder that is whole.

Reading opens every safetensors header first, so a missing file, a truncated one or an index that
lies is told before a tensor is touched. Writing goes to a folder beside the target, is read back
and compared, and takes the target's name last: a failure leaves the old folder as it was.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO
from zlib import crc32

import torch
from torch import Tensor

from pentad.core.errors import Problem, RunError, UserError
from pentad.weights.files import DTYPE_NAMES, PIECE_BYTES, SafeFile, read_header
from pentad.weights.flow import TensorInfo
from pentad.weights.regions import Box

__all__ = [
    "COMPANIONS",
    "INDEX",
    "METADATA",
    "SHARD_BYTES",
    "SINGLE",
    "HfFolder",
    "bytes_of",
    "copy_companions",
    "move_into_place",
    "plan_files",
    "read_header",
    "save_folder",
    "write_file",
    "write_json",
]
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
METADATA = {"format": "pt"}
"""What transformers wants in the header of a file."""
SHARD_BYTES = 5 << 30
"""Where a new file begins, unless one tensor is larger."""
FLUSH_BYTES = 128 << 20
NUM_READERS = 4
COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files that travel with the weights; those that exist are copied."""


class HfFolder:
    """The tensors of a folder's safetensors files, as a reader."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.where = str(folder)
        self.file_of: dict[str, Path] = {}
        self.infos: dict[str, TensorInfo] = {}
        self.files = {path: SafeFile(path) for path in self._files()}
        for path, file in self.files.items():
            for name, info in file.infos.items():
                if name in self.file_of:
                    rule = f"is in both {self.file_of[name].name} and {path.name}"
                    raise UserError(Problem(f"{self.where}: {name}", rule, "remove one of the two"))
                self.file_of[name] = path
                self.infos[name] = info
        self._check_index()

    def _files(self) -> list[Path]:
        index = self._index()
        if index is not None:
            return [self.folder / name for name in sorted(set(index.values()))]
        single = self.folder / SINGLE
        if single.exists():
            return [single]
        rule = f"neither {SINGLE} nor {INDEX} is there"
        if any(self.folder.glob("*.bin")):
            remedy = "save the model as safetensors first (pickled .bin files are not read)"
        else:
            remedy = "give a folder with safetensors files"
        raise UserError(Problem(f"model folder = {self.where}", rule, remedy))

    def _index(self) -> dict[str, str] | None:
        path = self.folder / INDEX
        if not path.exists():
            return None
        try:
            weight_map = json.loads(path.read_text())["weight_map"]
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise UserError(Problem(str(path), f"is not a safetensors index ({error})")) from error
        return {str(name): str(file) for name, file in weight_map.items()}

    def _check_index(self) -> None:
        index = self._index() or {name: SINGLE for name in self.infos}
        problems = [
            Problem(f"{self.where}/{INDEX}: {name}", f"{file} does not hold it")
            for name, file in index.items()
            if self.file_of.get(name) != self.folder / file
        ]
        problems += [
            Problem(f"{self.where}: {name}", f"is in {file.name}, but {INDEX} does not list it")
            for name, file in self.file_of.items()
            if name not in index
        ]
        if problems:
            raise UserError(problems)

    def read(self, name: str, box: Box) -> Tensor:
        """That block of the tensor."""
        return self.files[self.file_of[name]].read(name, box)

    def read_into(self, name: str, box: Box, out: Tensor) -> None:
        """Fills `out` with that block, without a copy where dtype and order allow."""
        self.files[self.file_of[name]].read_into(name, box, out)

    def checksum(self, name: str) -> int:
        return self.files[self.file_of[name]].checksum(name)


def plan_files(
    infos: Mapping[str, TensorInfo], shard_bytes: int = SHARD_BYTES
) -> dict[str, list[str]]:
    """File name -> tensor names, in the order given; a file is closed before it gets too large."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, info in infos.items():
        if groups[-1] and filled + info.size_bytes > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += info.size_bytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    count = len(groups)
    return {f"model-{n:05d}-of-{count:05d}.safetensors": g for n, g in enumerate(groups, start=1)}


def save_folder(
    folder: str | Path,
    pairs: Iterable[tuple[str, Tensor]],
    infos: Mapping[str, TensorInfo],
    config: Mapping[str, Any],
    *,
    companions: Sequence[str | Path] = (),
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes a whole HF folder in the place of `folder`; memory needed is one tensor.

    `pairs` come in the order of `infos`. Of the folders in `companions` tokenizer and generation
    config are copied, the first that has a file gives it.
    """
    target = Path(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    for stale in target.parent.glob(f".{target.name}.writing-*"):
        shutil.rmtree(stale)  # what a killed writer left; a folder has one writer at a time
    aside = target.with_name(f".{target.name}.writing-{os.getpid()}")
    aside.mkdir()
    try:
        checksums = _write_tensors(aside, iter(pairs), infos, shard_bytes)
        write_json(aside / "config.json", config)
        copy_companions(companions, aside)
        _verify(aside, infos, checksums)
        move_into_place(aside, target)
    except OSError as error:
        reason = error.strerror or str(error)
        raise RunError(f"{target}: cannot be written ({reason}); nothing was replaced") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write_tensors(
    folder: Path,
    pairs: Iterable[tuple[str, Tensor]],
    infos: Mapping[str, TensorInfo],
    shard_bytes: int,
) -> dict[str, int]:
    """Returns the checksum of every tensor's bytes as they were handed over."""
    stream = iter(pairs)
    checksums: dict[str, int] = {}
    files = plan_files(infos, shard_bytes)
    for file, names in files.items():
        checksums |= write_file(folder / file, stream, {name: infos[name] for name in names})
    assert next(stream, None) is None, "more tensors than were announced"
    if len(files) > 1:
        total = sum(info.size_bytes for info in infos.values())
        weight_map = {name: file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(folder / INDEX, index)
    return checksums


def write_file(
    path: Path,
    stream: Iterator[tuple[str, Tensor]],
    infos: Mapping[str, TensorInfo],
    metadata: Mapping[str, str] = METADATA,
) -> dict[str, int]:
    """One safetensors file from the next tensors of the stream, on disk; returns checksums.

    The disk works while further tensors are written: waiting for it at the end would cost as
    long again.
    """
    checksums: dict[str, int] = {}
    flushes: list[Future[None]] = []
    with path.open("wb") as handle, ThreadPoolExecutor(1) as disk:
        _write_header(handle, infos, metadata)
        waiting = 0
        for expected, announced in infos.items():
            name, tensor = next(stream, ("nothing", torch.empty(0)))
            info = TensorInfo(tuple(tensor.shape), tensor.dtype)
            assert (name, info) == (expected, announced), f"{expected}: got {name} {info}"
            checksums[name] = _write_summed(handle, bytes_of(tensor))
            waiting += info.size_bytes
            if waiting >= FLUSH_BYTES:
                handle.flush()
                flushes.append(disk.submit(os.fsync, handle.fileno()))
                waiting = 0
        handle.flush()
        flushes.append(disk.submit(os.fsync, handle.fileno()))
        for flush in flushes:
            flush.result()
    return checksums


def _write_summed(handle: BinaryIO, data: memoryview) -> int:
    total = 0
    for at in range(0, len(data), PIECE_BYTES):
        piece = data[at : at + PIECE_BYTES]
        total = crc32(piece, total)
        handle.write(piece)
    return total


def _write_header(
    handle: BinaryIO, infos: Mapping[str, TensorInfo], metadata: Mapping[str, str]
) -> None:
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for name, info in infos.items():
        stop = start + info.size_bytes
        dtype = DTYPE_NAMES[info.dtype]
        entry = {"dtype": dtype, "shape": list(info.shape), "data_offsets": [start, stop]}
        header[name] = entry
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    handle.write(struct.pack("<Q", len(text)) + text)


def bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return flat.numpy().data


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def copy_companions(folders: Sequence[str | Path], target: Path) -> None:
    for name in COMPANIONS:
        found = [Path(folder) / name for folder in folders if (Path(folder) / name).is_file()]
        if found:
            shutil.copyfile(found[0], target / name)


def _verify(folder: Path, infos: Mapping[str, TensorInfo], checksums: Mapping[str, int]) -> None:
    """Reads the files back: same names, shapes, dtypes, and the bytes that were handed over."""
    reader = HfFolder(folder)
    wrong = [name for name in {*reader.infos, *infos} if reader.infos.get(name) != infos.get(name)]
    with ThreadPoolExecutor(NUM_READERS) as readers:
        sums = [] if wrong else list(readers.map(reader.checksum, infos))
    wrong += [name for name, found in zip(infos, sums, strict=False) if found != checksums[name]]
    if wrong:
        raise RunError(f"{folder}: {wrong[0]} does not read back as written; the disk is at fault")


def move_into_place(aside: Path, target: Path) -> None:
    """Renames; a folder that is already there is moved out of the way first and removed last."""
    old = target.with_name(f".{target.name}.replaced-{os.getpid()}")
    if target.exists():
        target.rename(old)
    aside.rename(target)
    shutil.rmtree(old, ignore_errors=True)
