"""The hardware and packages of this machine, without torch: GPUs, memory, disk, cores, installed
packages."""

from __future__ import annotations

import ctypes
import getpass
import importlib.metadata
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

GIB = 2**30
MIB = 2**20
CGROUP = Path("/sys/fs/cgroup")
VISIBLE = "CUDA_VISIBLE_DEVICES"
QUERY_TIMEOUT_S = 20.0
"""nvidia-smi takes seconds if the driver is not kept loaded, and forever if it is broken."""

RAY_SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_agent_register_timeout_ms": "120000"}
"""For a cluster that a run starts: it sends no usage report, and may start on a busy machine."""


def user_name() -> str:
    """The login name; in a container whose user has a number only, that number."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid{os.getuid()}"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One NVIDIA device as nvidia-smi sees it."""

    name: str
    memory_bytes: int
    free_bytes: int
    driver: str
    capability: str
    """Compute capability, such as 9.0; empty where the driver does not say."""


class GpuQueryError(Exception):
    """nvidia-smi exists but fails; the message has the reason."""


@cache
def find_gpus() -> tuple[Gpu, ...]:
    """The GPUs of this machine that are visible to this process; () without a driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    fields = "name,memory.total,memory.free,driver_version,compute_cap"
    command = [program, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GpuQueryError(f"nvidia-smi: {error}") from error
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip().splitlines()
        raise GpuQueryError(f"nvidia-smi: {said[-1] if said else f'exit {done.returncode}'}")
    return visible(parse_gpus(done.stdout), os.environ.get(VISIBLE))


@contextmanager
def gpus_hidden(is_hidden: bool) -> Iterator[None]:
    """For a command that computes on the CPU: GPUs of the machine are not counted, neither here nor
    in its child processes."""
    if not is_hidden:
        yield
        return
    before = os.environ.get(VISIBLE)
    os.environ[VISIBLE] = ""
    find_gpus.cache_clear()
    try:
        yield
    finally:
        os.environ.pop(VISIBLE)
        if before is not None:
            os.environ[VISIBLE] = before
        find_gpus.cache_clear()


class NvmlMemory(ctypes.Structure):
    """Memory of a GPU from the driver's library, in bytes."""

    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


@cache
def nvml() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return library if library.nvmlInit_v2() == 0 else None


def gpu_memory_used(index: int) -> int | None:
    """Bytes in use by all processes on one of this process's GPUs; None if unknown. Read from the
    driver, because torch would allocate memory for it."""
    library, handle, memory = nvml(), ctypes.c_void_p(), NvmlMemory()
    if library is None:
        return None
    seen = [word.strip() for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    name = seen[index] if index < len(seen) and seen[index] else str(index)
    if name.isdigit():
        failed = library.nvmlDeviceGetHandleByIndex_v2(int(name), ctypes.byref(handle))
    else:
        failed = library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
    if failed or library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)):
        return None
    return int(memory.used)


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Lines of `name, MiB, MiB, driver, capability`."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 5 or not (cells[1].isdigit() and cells[2].isdigit()):
            continue
        name, total, free, driver, capability = cells
        found.append(Gpu(name, int(total) * MIB, int(free) * MIB, driver, capability))
    return tuple(found)


def visible(gpus: tuple[Gpu, ...], setting: str | None) -> tuple[Gpu, ...]:
    """Those CUDA_VISIBLE_DEVICES leaves; names (GPU-..., MIG-...) are counted, not looked up."""
    if setting is None:
        return gpus
    words = [word.strip() for word in setting.split(",")]
    kept: list[Gpu] = []
    for word in words:
        if word.isdigit() and int(word) < len(gpus):
            kept.append(gpus[int(word)])
        elif word.startswith(("GPU-", "MIG-")) and gpus:
            kept.append(gpus[0])
        else:  # CUDA ignores what follows the first entry it does not know
            break
    return tuple(kept)


def host_memory() -> tuple[int, int]:
    """(total, available) bytes of main memory, cgroup limits included."""
    total, available = _meminfo()
    limit, used = _cgroup("memory.max"), _cgroup("memory.current")
    if limit is not None and limit < total:
        total = limit
        available = min(available, limit - (used or 0) + _cached())
    return total, available


def _cached() -> int:
    """Memory of the cgroup that caches files and is freed when needed."""
    try:
        lines = (CGROUP / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    values = dict(line.split() for line in lines)
    return int(values.get("active_file", 0)) + int(values.get("inactive_file", 0))


def _meminfo() -> tuple[int, int]:
    path = Path("/proc/meminfo")
    if not path.is_file():  # not Linux
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total
    values = {}
    for line in path.read_text().splitlines():
        name, _, rest = line.partition(":")
        values[name] = int(rest.split()[0]) * 1024
    return values["MemTotal"], values.get("MemAvailable", values["MemFree"])


def _cgroup(name: str) -> int | None:
    path = CGROUP / name
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def auto_dtype(device: str) -> Literal["float32", "bfloat16"]:
    """The number format that `auto` stands for on a device of this type."""
    return "bfloat16" if device == "cuda" else "float32"


def num_cores() -> int:
    """Cores this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def free_disk(folder: str) -> tuple[int, str]:
    """(free bytes, the existing folder they were asked of) where `folder` is or would be."""
    path = Path(folder).expanduser().absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free, str(path)


def installed(package: str) -> str | None:
    """Version of an installed distribution, without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def flush_output() -> None:
    """Writes out what is buffered for stdout and stderr; closed ones and broken pipes are passed
    over."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(OSError, ValueError):
                stream.flush()


@contextmanager
def process_kept(settings: Mapping[str, str]) -> Iterator[None]:
    """For a library that replaces the SIGTERM handler and reads its settings from the environment:
    both are restored afterwards."""
    before, handler = dict(os.environ), signal.getsignal(signal.SIGTERM)
    os.environ.update(settings)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
        os.environ.clear()
        os.environ.update(before)
