"""Reads and writes HF model folders, and uploads them to the hub.

Reading opens every safetensors header first, so missing or truncated files and a wrong index are
found before any tensor is read. Writing uses a temporary folder next to the target, which is read
back, compared and then renamed: a failure leaves the old folder unchanged.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pentad.core.errors import Problem, RunError, UserError, raise_problems
from pentad.core.files import atomic_folder
from pentad.core.folders import INDEX, SINGLE, read_object
from pentad.weights.files import DTYPE_NAMES, SafeFile, checksum, memory_of
from pentad.weights.map import WeightMap
from pentad.weights.regions import Box
from pentad.weights.transfer import NUM_READERS, TensorInfo

METADATA = {"format": "pt"}
"""Metadata that transformers requires in the header of a file."""
SHARD_BYTES = 5 << 30
"""Maximum size of a file, unless one tensor is larger."""
FLUSH_BYTES = 128 << 20
COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tekken.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""Files that are copied with the weights if they exist."""
LINK_REMEDY = "put the file itself there, since exports copy it"


class HfFolder:
    """Reader of the tensors in a folder's safetensors files."""

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
        single = self.folder / SINGLE
        if index is not None:
            names = sorted(set(index.values()))
            if single.exists() and SINGLE not in names:
                rule = f"{SINGLE} and {INDEX} are both there, and the index does not name that file"
                raise UserError(Problem(self.where, rule, "remove one of the two"))
            return [self.folder / name for name in names]
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
            weight_map = dict(read_object(path)["weight_map"])
            for name, file in weight_map.items():
                if Path(file).name != file:
                    raise ValueError(f"{name}: {file} is not a file of this folder")
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(Problem(str(path), f"is not a safetensors index ({error})")) from error
        return weight_map

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
        raise_problems(problems)

    def read(self, name: str, box: Box) -> Tensor:
        """Reads a block of a tensor."""
        return self.files[self.file_of[name]].read(name, box)

    def read_into(self, name: str, box: Box, out: Tensor) -> None:
        """Reads a block of a tensor into `out`, without a copy if dtype and order allow."""
        self.files[self.file_of[name]].read_into(name, box, out)


@dataclass(frozen=True, slots=True)
class Carried:
    """A tensor that an export copies unchanged from the source folder of the model."""

    info: TensorInfo
    file: Path
    start: int
    """Offset of its bytes in the file."""


def carried_tensors(folder: str | Path, weight_map: WeightMap) -> dict[str, Carried]:
    """Tensors outside the text tower of a multimodal folder, by name; empty for a text model."""
    if not weight_map.dims.tower_names:
        return {}
    reader = HfFolder(folder)
    return {
        name: Carried(info, file.path, file.offsets[name])
        for file in reader.files.values()
        for name, info in file.infos.items()
        if weight_map.is_other(name)
    }


def plan_files(
    infos: Mapping[str, TensorInfo], shard_bytes: int = SHARD_BYTES
) -> dict[str, list[str]]:
    """Assigns tensors to files of limited size, in the order given: file name -> tensor names."""
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


class FileLayout:
    """Header and tensor offsets of a safetensors file, computed before its tensors exist."""

    def __init__(self, infos: Mapping[str, TensorInfo], align: int = 8) -> None:
        """Computes the layout; `align` is the alignment of the first tensor in bytes."""
        self.infos = infos
        self.header = header_bytes(infos, METADATA, align)
        self.starts: dict[str, int] = {}
        self.num_bytes = len(self.header)
        for name, info in infos.items():
            self.starts[name] = self.num_bytes
            self.num_bytes += info.size_bytes

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of the tensors in a byte buffer of the whole file."""
        return {
            name: flat[start : start + info.size_bytes].view(info.dtype).view(info.shape)
            for (name, info), start in zip(self.infos.items(), self.starts.values(), strict=True)
        }


@dataclass(frozen=True, slots=True)
class FolderPlan:
    """Files and tensors of a HF folder that is to be written."""

    tensors: Mapping[str, Mapping[str, TensorInfo]]
    """File -> its tensors, in the order of writing."""
    others: Mapping[str, bytes]
    """File -> content of config, index, tokenizer and similar files."""

    @classmethod
    def around(cls, infos: Mapping[str, TensorInfo], shard_bytes: int = SHARD_BYTES) -> FolderPlan:
        """A plan of only the safetensors files, and an index if there are several."""
        files = plan_files(infos, shard_bytes)
        tensors = {file: {name: infos[name] for name in names} for file, names in files.items()}
        if len(files) == 1:
            return cls(tensors, {})
        total = sum(info.size_bytes for info in infos.values())
        weight_map = {name: file for file, names in files.items() for name in names}
        index = json_bytes({"metadata": {"total_size": total}, "weight_map": weight_map})
        return cls(tensors, {INDEX: index})

    def small_parts(self) -> Iterator[tuple[str, bytes]]:
        """The non-tensor content of each file: safetensors headers and the small files."""
        for file, infos in self.tensors.items():
            yield file, FileLayout(infos).header
        yield from self.others.items()

    def places(self) -> dict[str, tuple[str, int, TensorInfo]]:
        """Location of each tensor: file, offset and info."""
        found: dict[str, tuple[str, int, TensorInfo]] = {}
        for file, infos in self.tensors.items():
            starts = FileLayout(infos).starts
            found |= {name: (file, starts[name], info) for name, info in infos.items()}
        return found

    def sizes(self) -> dict[str, int]:
        """Size of each file in bytes."""
        files = {file: FileLayout(infos).num_bytes for file, infos in self.tensors.items()}
        return files | {file: len(data) for file, data in self.others.items()}


def plan_folder(
    infos: Mapping[str, TensorInfo],
    config: Mapping[str, Any],
    *,
    companions: Sequence[str | Path] = (),
    shard_bytes: int = SHARD_BYTES,
) -> FolderPlan:
    """Plans a folder. Tokenizer and generation config files are copied from the first folder in
    `companions` that has them."""
    around = FolderPlan.around(infos, shard_bytes)
    others = {name: path.read_bytes() for name, path in find_companions(companions).items()}
    others["config.json"] = json_bytes(config)
    return FolderPlan(around.tensors, {**others, **around.others})


def save_folder(folder: str | Path, pairs: Iterable[tuple[str, Tensor]], plan: FolderPlan) -> None:
    """Writes a HF folder and replaces `folder`; extra memory is one tensor.

    `pairs` are in the order of the plan.
    """
    target = Path(folder)
    try:
        with atomic_folder(target) as aside:
            _write_folder(aside, pairs, plan)
    except OSError as error:
        reason = error.strerror or str(error)
        raise RunError(f"{target}: cannot be written ({reason}); nothing was replaced") from error


def _write_folder(aside: Path, pairs: Iterable[tuple[str, Tensor]], plan: FolderPlan) -> None:
    stream = iter(pairs)
    for file, infos in plan.tensors.items():
        write_file(aside / file, stream, infos)
    assert next(stream, None) is None, "more tensors than were announced"
    for file, data in plan.others.items():
        (aside / file).write_bytes(data)
    announced = {name: info for infos in plan.tensors.values() for name, info in infos.items()}
    assert HfFolder(aside).infos == announced, f"{aside}: index and files disagree"


def write_file(
    path: Path,
    stream: Iterator[tuple[str, Tensor]],
    infos: Mapping[str, TensorInfo],
    metadata: Mapping[str, str] = METADATA,
) -> None:
    """Writes one safetensors file from the next tensors of the stream, reads it back and compares.

    Disk writes are asynchronous: they overlap with summing and writing later tensors and with the
    read-back.
    """
    sums: dict[str, int] = {}
    flushes: list[Future[None]] = []
    disk, others = ThreadPoolExecutor(1), ThreadPoolExecutor(NUM_READERS)
    with path.open("wb") as handle, disk, others:
        handle.write(header_bytes(infos, metadata))
        waiting = 0
        for expected, announced in infos.items():
            name, tensor = next(stream, ("nothing", torch.empty(0)))
            info = TensorInfo(tuple(tensor.shape), tensor.dtype)
            assert (name, info) == (expected, announced), f"{expected}: got {name} {info}"
            data = bytes_of(tensor)
            own = others.submit(checksum, data)
            handle.write(data)
            sums[name] = own.result()
            waiting += info.size_bytes
            if waiting >= FLUSH_BYTES:
                handle.flush()
                flushes.append(disk.submit(os.fsync, handle.fileno()))
                waiting = 0
        handle.flush()
        flushes.append(disk.submit(os.fsync, handle.fileno()))
        _check_back(path, infos, sums, others)
        for flush in flushes:
            flush.result()


def _check_back(
    path: Path,
    infos: Mapping[str, TensorInfo],
    sums: Mapping[str, int],
    readers: ThreadPoolExecutor,
) -> None:
    """Raises unless the file has these names, shapes and dtypes and the written checksums."""
    file = SafeFile(path)
    assert file.infos == infos, f"{path}: the header was not written as planned"
    found = dict(zip(infos, readers.map(file.checksum, infos), strict=True))
    wrong = [name for name in infos if found[name] != sums[name]]
    if wrong:
        raise RunError(f"{path}: {wrong[0]} does not read back as written; the disk is at fault")


def header_bytes(
    infos: Mapping[str, TensorInfo], metadata: Mapping[str, str], align: int = 8
) -> bytes:
    """The bytes of a safetensors file before the first tensor."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for name, info in infos.items():
        stop = start + info.size_bytes
        dtype = DTYPE_NAMES[info.dtype]
        entry = {"dtype": dtype, "shape": list(info.shape), "data_offsets": [start, stop]}
        header[name] = entry
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % align)
    return struct.pack("<Q", len(text)) + text


def bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return memory_of(flat)


def json_bytes(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_bytes(json_bytes(content))


def find_companions(folders: Sequence[str | Path]) -> dict[str, Path]:
    """Tokenizer and config files to copy, each from the first folder that has it."""
    found = [companion_files(Path(folder)) for folder in reversed(folders)]
    return {name: path for files in found for name, path in files.items()}


def copy_companions(folders: Sequence[str | Path], target: Path) -> None:
    for name, path in find_companions(folders).items():
        shutil.copyfile(path, target / name)


def companion_files(folder: Path, names: Sequence[str] = COMPANIONS) -> dict[str, Path]:
    """The named files that a folder has. Links to other places are rejected, because an export
    would publish their targets. In the hub's cache, links from `snapshots/REVISION` and its
    subfolders to `blobs` of the same model are allowed."""
    files = {name: folder / name for name in names if (folder / name).is_file()}
    home = folder.resolve()
    blobs = next((p.parent / "blobs" for p in home.parents if p.name == "snapshots"), home)
    problems = [
        Problem(str(path), f"is a link to {path.resolve()}, outside the folder", LINK_REMEDY)
        for path in files.values()
        if not path.resolve().is_relative_to(home) and path.resolve().parent != blobs
    ]
    raise_problems(problems)
    return files


def push_to_hub(
    folder: str | Path,
    repo: str,
    *,
    private: bool = True,
    token: str | None = None,
    endpoint: str | None = None,
) -> str:
    """Uploads a folder unchanged and returns the URL of the commit.

    The folder is opened first, so an incomplete one is never uploaded. Without a token, that of `hf
    auth login` is used.
    """
    from huggingface_hub import HfApi

    HfFolder(folder)
    if repo.count("/") != 1:
        raise UserError(Problem(f"repo = {repo}", "a repository is named user/name"))
    api = HfApi(endpoint=endpoint, token=token)
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        done = api.upload_folder(folder_path=folder, repo_id=repo, commit_message="Upload model")
        return str(done)
    except Exception as error:  # hub, network and login raise many types
        reason = str(error).strip().split("\n")[0]
        rule = f"{folder} was not uploaded to {repo} at {api.endpoint} ({reason})"
        raise RunError(f"{rule}; check the network, the name and `hf auth login`") from error
