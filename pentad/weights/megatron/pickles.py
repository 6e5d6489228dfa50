"""Reading Megatron's rank files and `common.pt` without running what is in them.

They go through torch's weights-only unpickler, which builds tensors and plain data. A few more
classes that Megatron writes are let through by name and become `Inert`: nothing of them is called
or kept.
"""

from __future__ import annotations

import argparse
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.serialization import safe_globals

from pentad.core.errors import Problem, UserError
from pentad.weights.pickles import TORN, Inert, broken, refused

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
    """A torch file that holds a dict; its tensors are views of the mapped file, read on use."""
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
