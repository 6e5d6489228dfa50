"""The compute settings of this process: its device, number formats by name, its garbage
collector."""

from __future__ import annotations

import atexit
import ctypes
import gc

import torch

from pentad.core.errors import Problem, UserError
from pentad.core.machine import GpuQueryError, auto_dtype, find_gpus


def pick_device(wanted: str = "auto") -> torch.device:
    """Returns the named device, else the first GPU if there is one."""
    has_gpu = torch.cuda.is_available()
    if wanted == "auto":
        return torch.device("cuda:0" if has_gpu else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError:
        device = torch.device("meta")
    where = f"device = {wanted}"
    if device.type not in ("cpu", "cuda"):  # torch knows the names of many more
        raise UserError(Problem(where, "no such device", "give auto, cpu or cuda"))
    if device.type == "cuda" and not has_gpu:
        raise UserError(Problem(where, "torch finds no GPU", "give cpu, or see pentad doctor"))
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        last = f"cuda:{torch.cuda.device_count() - 1}"
        raise UserError(Problem(where, f"the last GPU here is {last}", "give one that is there"))
    return torch.device("cuda:0") if wanted == "cuda" else device


def gpu_name(device: torch.device) -> str:
    """Read from nvidia-smi, if there is one: torch would allocate GPU memory for it, and the
    scheduler of a run uses none."""
    try:
        gpus = find_gpus()
    except GpuQueryError:
        gpus = ()
    index = device.index or 0
    return gpus[index].name if index < len(gpus) else torch.cuda.get_device_name(device)


DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def dtype_of(name: str, device: torch.device) -> torch.dtype:
    return DTYPES[auto_dtype(device.type) if name == "auto" else name]


def dtype_problems(where: str, name: str) -> list[Problem]:
    if name in ("auto", *DTYPES):
        return []
    return [Problem(f"{where} = {name}", f"must be auto or one of {', '.join(DTYPES)}")]


WARM_STEPS = 2
"""Steps after which a process has all its lasting objects: models, compiled code, captured
graphs."""

YOUNG_OBJECTS = 10_000
"""New ones, less those that are gone, between two collections of a process with a frozen heap. A
step of a thousand answers makes some 20,000, nearly all of which go without a collection."""

is_frozen = False
found_threshold = gc.get_threshold()
"""The process's own setting before its heap was frozen."""


def freeze_gc(num_steps: int) -> None:
    """Called after every step: when the warm ones are over, what was built so far is kept out of
    further collections, which are fewer from then on. A full collection walks every object of the
    process, about half a second with torch's compiler loaded, and begins in the middle of whatever
    step it likes. Where the process had objects kept out before the run, it stays as it is: the
    run's could not be told from them when it ends."""
    global is_frozen, found_threshold
    if num_steps != WARM_STEPS:
        return
    gc.collect()
    if is_frozen or gc.get_freeze_count() == 0:
        gc.freeze()
        if not is_frozen:
            found_threshold = gc.get_threshold()
            gc.set_threshold(max(YOUNG_OBJECTS, found_threshold[0]), *found_threshold[1:])
        is_frozen = True
        atexit.register(unfreeze_gc)  # or what frees itself at the end is reported as leaked


def unfreeze_gc() -> None:
    """Makes objects collectable again at the end of a run, for a process that continues."""
    global is_frozen
    if is_frozen:
        gc.unfreeze()
        gc.set_threshold(*found_threshold)
        is_frozen = False


def reset_gpus() -> None:
    """Frees all GPU memory of this process, which cannot use its GPUs afterwards. Waits for running
    kernels."""
    if not torch.cuda.is_initialized():
        return
    driver, device = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    for index in range(torch.cuda.device_count()):
        driver.cuDeviceGet(ctypes.byref(device), index)
        driver.cuDevicePrimaryCtxReset_v2(device)
