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
from pathlib import Path
from typing import Any, BinaryIO
from zlib import crc32

import torch
from safetensors import safe_open
from torch import Tensor

from pentad.core.errors import Problem, RunError, UserError
from pentad.weights.flow import TensorInfo
from pentad.weights.regions import Box, full_box

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
METADATA = {"format": "pt"}
"""What transformers wants in the header of a file."""
SHARD_BYTES = 5 << 30
"""Where a new file begins, unless one tensor is larger."""
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
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class HfFolder:
    """The tensors of a folder's safetensors files, as a reader."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.where = str(folder)
        self.file_of: dict[str, Path] = {}
        self.infos: dict[str, TensorInfo] = {}
        self.open_files: dict[Path, Any] = {}
        for file in self._files():
            for name, info in read_header(file).items():
                if name in self.file_of:
                    rule = f"is in both {self.file_of[name].name} and {file.name}"
                    raise UserError(Problem(f"{self.where}: {name}", rule, "remove one of the two"))
                self.file_of[name] = file
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
        """That block of the tensor; bytes outside it are not read."""
        file = self.file_of[name]
        if file not in self.open_files:
            self.open_files[file] = safe_open(file, framework="pt", device="cpu")
        view = self.open_files[file].get_slice(name)
        return view[tuple(slice(start, stop) for start, stop in box)]


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Names, shapes and dtypes of one safetensors file; refuses a file that is not whole."""
    try:
        size = file.stat().st_size
        with file.open("rb") as handle:
            (length,) = struct.unpack("<Q", handle.read(8))
            header = json.loads(handle.read(length)) if length < size else None
    except FileNotFoundError:
        remedy = "fetch the file again"
        raise UserError(Problem(str(file), f"missing, but {INDEX} names it", remedy)) from None
    except (struct.error, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(Problem(str(file), f"is not a safetensors file ({error})")) from error
    if not isinstance(header, dict):
        raise UserError(Problem(str(file), "is not a safetensors file (its header is cut off)"))
    header.pop("__metadata__", None)
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size != 8 + length + end:
        rule = f"has {size} bytes, but its header says {8 + length + end}"
        raise UserError(Problem(str(file), rule, "fetch or write the file again"))
    return {name: _info(file, name, entry) for name, entry in header.items()}


def _info(file: Path, name: str, entry: Mapping[str, Any]) -> TensorInfo:
    if entry["dtype"] not in DTYPES:
        raise UserError(Problem(f"{file}: {name}", f"dtype {entry['dtype']} is not known"))
    info = TensorInfo(tuple(entry["shape"]), DTYPES[entry["dtype"]])
    start, stop = entry["data_offsets"]
    if stop - start != info.size_bytes:
        rule = f"{stop - start} bytes are no {entry['dtype']} of shape {list(info.shape)}"
        raise UserError(Problem(f"{file}: {name}", rule, "fetch or write the file again"))
    return info


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
    """One safetensors file from the next tensors of the stream; returns their checksums."""
    checksums: dict[str, int] = {}
    with path.open("wb") as handle:
        _write_header(handle, infos, metadata)
        for expected, announced in infos.items():
            name, tensor = next(stream, ("nothing", torch.empty(0)))
            info = TensorInfo(tuple(tensor.shape), tensor.dtype)
            assert (name, info) == (expected, announced), f"{expected}: got {name} {info}"
            data = bytes_of(tensor)
            checksums[name] = crc32(data)
            handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())
    return checksums


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
    for name, info in infos.items():
        if (
            not wrong
            and crc32(bytes_of(reader.read(name, full_box(info.shape)))) != checksums[name]
        ):
            wrong.append(name)
    if wrong:
        raise RunError(f"{folder}: {wrong[0]} does not read back as written; the disk is at fault")


def move_into_place(aside: Path, target: Path) -> None:
    """Renames; a folder that is already there is moved out of the way first and removed last."""
    old = target.with_name(f".{target.name}.replaced-{os.getpid()}")
    if target.exists():
        target.rename(old)
    aside.rename(target)
    shutil.rmtree(old, ignore_errors=True)
