"""Compute settings of this process: device, dtypes by name, garbage collection."""

from __future__ import annotations

import atexit
import ctypes
import gc

import torch

from pentad.core.errors import Problem, UserError
from pentad.core.machine import GpuQueryError, auto_dtype, find_gpus


def pick_device(wanted: str = "auto") -> torch.device:
    """Returns the named device; for auto the first GPU, or the CPU if there is none."""
    has_gpu = torch.cuda.is_available()
    if wanted == "auto":
        return torch.device("cuda:0" if has_gpu else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError:
        device = torch.device("meta")
    where = f"device = {wanted}"
    if device.type not in ("cpu", "cuda"):  # torch accepts many more names
        raise UserError(Problem(where, "no such device", "give auto, cpu or cuda"))
    if device.type == "cuda" and not has_gpu:
        raise UserError(Problem(where, "torch finds no GPU", "give cpu, or see pentad doctor"))
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        last = f"cuda:{torch.cuda.device_count() - 1}"
        raise UserError(Problem(where, f"the last GPU here is {last}", "give an existing one"))
    return torch.device("cuda:0") if wanted == "cuda" else device


def gpu_name(device: torch.device) -> str:
    """Name of a GPU, from nvidia-smi if it exists: torch would allocate GPU memory, which the
    scheduler of a run must not use."""
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
"""Steps after which a process has created its long-lived objects: models, compiled code, captured
graphs."""

YOUNG_OBJECTS = 10_000
"""Net number of new objects between two collections of a process with a frozen heap. A step with a
thousand answers creates some 20,000, nearly all of which are freed without a collection."""

RARELY = 10
"""How many times as much garbage a step may leave before a full collection starts within it; less
is collected between steps."""

is_frozen = False
has_loop = False
"""Whether the loop of a run is in this process."""
found_threshold = gc.get_threshold()
"""The process's thresholds before its heap was frozen."""


def freeze_gc(num_steps: int, *, is_loop: bool = False) -> None:
    """Called after every step. After WARM_STEPS it excludes all existing objects from garbage
    collection, and makes collections rarer: a full one visits every object, takes about half a
    second with torch's compiler loaded, and starts at any point of a step. Later it makes the full
    ones, if they are due. Does nothing if the process had frozen objects before the run, which
    could not be told apart at its end.

    `is_loop`: called by the loop of a run, between its steps. Others in its process then leave full
    collections to it."""
    global is_frozen, found_threshold, has_loop
    has_loop |= is_loop
    if is_frozen and num_steps > WARM_STEPS and is_loop == has_loop:
        if gc.get_count()[2] > found_threshold[2]:
            gc.collect()
        return
    if num_steps != WARM_STEPS:
        return
    gc.collect()
    if is_frozen or gc.get_freeze_count() == 0:
        gc.freeze()
        if not is_frozen:
            found_threshold = gc.get_threshold()
            young, middle, old = found_threshold
            gc.set_threshold(max(YOUNG_OBJECTS, young), middle, RARELY * old)
        is_frozen = True
        atexit.register(unfreeze_gc)  # else objects freed at exit are reported as leaks


def unfreeze_gc() -> None:
    """Makes objects collectable again at the end of a run, for a process that continues."""
    global is_frozen, has_loop
    has_loop = False
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
