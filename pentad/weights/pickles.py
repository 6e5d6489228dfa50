"""Reads torch's pickles without executing code in them.

Tensors, and Megatron's rank files and `common.pt`, use torch's weights-only unpickler. The
`.metadata` of a DCP folder, which torch itself unpickles without restrictions, uses an unpickler
that allows torch's metadata classes. A few foreign classes are allowed by name and replaced by
`Inert`, without calling them or keeping their data. Any other class is rejected.
"""

from __future__ import annotations

import argparse
import errno
import io
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed._shard.sharded_tensor import metadata as old_metadata
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp
from torch.serialization import safe_globals

from pentad.core.errors import Problem, UserError

OF_BYTES = (None, errno.EINVAL)
"""errno of an OSError from wrong bytes, such as a negative offset; others are storage errors."""
TORN = (RuntimeError, EOFError, OSError, ValueError, KeyError, zipfile.BadZipFile)
"""Exceptions of torch for missing or wrong bytes."""
MISREAD = (
    *(EOFError, ValueError, TypeError, AttributeError, LookupError),
    *(ArithmeticError, RecursionError, MemoryError),
)
"""Exceptions of pickle, also for impossible lengths."""


class Inert:
    """Placeholder for an object of an allowed class whose data are not needed."""

    def __init__(self, *args: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


_DCP_NAMES = (
    "Metadata",
    "StorageMeta",
    "MetadataIndex",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "TensorProperties",
    "_MEM_FORMAT_ENCODING",
)
_MCORE = "megatron.core.dist_checkpointing.strategies.torch."
_PLANNER = "torch.distributed.checkpoint.planner."
_METADATA: dict[str, Any] = {
    **{f"{dcp.__name__}.{name}": vars(dcp)[name] for name in _DCP_NAMES},
    f"{old_metadata.__name__}.TensorProperties": old_metadata.TensorProperties,
    f"{old_metadata.__name__}.MEM_FORMAT_ENCODING": old_metadata.MEM_FORMAT_ENCODING,
    f"{filesystem.__name__}._StorageInfo": filesystem._StorageInfo,
    f"{_MCORE}MCoreMetadata": dcp.Metadata,
    "torch.Size": torch.Size,
    "torch.serialization._get_layout": vars(torch.serialization)["_get_layout"],
    **{
        name: Inert
        for name in (
            f"{_MCORE}MCoreSavePlan",
            f"{_PLANNER}SavePlan",
            f"{_PLANNER}WriteItem",
            f"{_PLANNER}WriteItemType",
            f"{_PLANNER}TensorWriteData",
            f"{_PLANNER}BytesIOWriteData",
            "pathlib.PosixPath",
            "pathlib._local.PosixPath",
        )
    },
}
"""Classes in `.metadata` files; plans in some of them are not needed."""


class FileWindow(io.RawIOBase):
    """A byte range of a file as a file object; torch looks for the zip directory at its end."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self.file = file
        self.start = start
        self.length = length
        self.at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.length}[whence]
        self.at = min(max(origin + offset, 0), self.length)
        return self.at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: self.length - self.at]
        self.file.seek(self.start + self.at)
        data = self.file.read(len(view))
        view[: len(data)] = data
        self.at += len(data)
        return len(data)


def load_tensor(path: Path, start: int, length: int) -> torch.Tensor:
    """Loads the tensor of a torch file that is embedded in another file."""
    try:
        with path.open("rb") as file:
            window = io.BufferedReader(FileWindow(file, start, length))
            content = torch.load(window, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise refused(path, error) from error
    except TORN as error:
        if isinstance(error, OSError) and error.errno not in OF_BYTES:
            raise
        raise broken(path, error) from error
    if not isinstance(content, torch.Tensor):
        raise UserError(Problem(str(path), f"holds a {type(content).__name__} for a tensor"))
    return content.detach()


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        full = f"{module_name}.{global_name}"
        if full in _METADATA:
            return _METADATA[full]
        found = vars(torch).get(global_name) if module_name == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(f"GLOBAL {full} is not allowed")


def load_metadata(path: Path, data: bytes | None = None) -> dcp.Metadata:
    """Loads the index of a DCP folder from its file, or from `data` if given."""
    try:
        with path.open("rb") if data is None else io.BytesIO(data) as file:
            content = _MetadataUnpickler(file).load()
    except pickle.UnpicklingError as error:
        raise refused(path, error) from error
    except MISREAD as error:
        raise broken(path, error) from error
    if not isinstance(content, dcp.Metadata):
        rule = f"holds a {type(content).__name__}, not a checkpoint's metadata"
        raise UserError(Problem(str(path), rule))
    return content


def refused(path: Path, error: Exception) -> UserError:
    """The error for a class that is not allowed, or for bytes that are not a pickle."""
    named = re.search(r"GLOBAL ([\w.]+)", str(error))
    if named is None:
        return broken(path, error)
    rule = f"its pickle contains {named[1]}, and only weights and plain data are read"
    remedy = "make sure where the file comes from; save it again without that object"
    return UserError(Problem(str(path), rule, remedy))


def broken(path: Path, error: Exception) -> UserError:
    first = str(error).strip().split("\n")[0] or type(error).__name__
    remedy = "fetch or write the file again"
    return UserError(Problem(str(path), f"is not a whole torch file ({first})", remedy))


INERT = (
    "types.SimpleNamespace",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
    "signal.Signals",
    "_io.BytesIO",
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar",
    "numpy._core.multiarray.scalar",
    "numpy.ndarray",
    "numpy.dtype",
    "numpy.dtypes.UInt32DType",
    "megatron.core.enums.ModelType",
    "megatron.core.transformer.enums.AttnBackend",
    "megatron.core.transformer.enums.CudaGraphScope",
    "megatron.core.optimizer.optimizer_config.OptimizerConfig",
    "megatron.core.rerun_state_machine.RerunDiagnostic",
    "megatron.core.rerun_state_machine.RerunMode",
    "megatron.core.rerun_state_machine.RerunState",
)
"""Classes of arguments, random states and fp8 states in rank files."""

_SAFE: list[Any] = [
    (argparse.Namespace, "argparse.Namespace"),
    *((Inert, name) for name in INERT),
]


def load_rank_file(path: Path) -> dict[str, Any]:
    """Loads a torch file that contains a dict; its tensors are views of the mapped file."""
    try:
        with safe_globals(_SAFE):
            content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        raise refused(path, error) from error
    except FileNotFoundError:
        raise UserError(Problem(str(path), "there is no such file")) from None
    except TORN as error:
        raise broken(path, error) from error
    if not isinstance(content, dict):
        rule = f"holds a {type(content).__name__}, not Megatron's dict"
        raise UserError(Problem(str(path), rule))
    return content
