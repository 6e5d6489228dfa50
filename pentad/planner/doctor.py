"""Checks this machine: what can run, what is missing, and the remedy for each. No torch.

Every check is a function that returns findings. A finding is `fail` if nothing can run until it is
fixed, `warn` if something will be slow or fail later, `info` otherwise.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pentad.core.layout import SERVERS
from pentad.core.machine import (
    GIB,
    GpuQueryError,
    find_gpus,
    free_disk,
    host_memory,
    installed,
    num_cores,
)

Status = Literal["ok", "info", "warn", "fail"]
PYTHONS = ((3, 11), (3, 13))
MIN_CAPABILITY = 8.0
"""Compute capability of the first GPUs with bfloat16."""
MIN_MEMORY_GIB, MIN_DISK_GIB, MIN_SHM_GIB = 8, 10, 1
MIN_OPEN_FILES = 4096
UNEQUAL_STAGES = (2, 13)
"""First torch version whose pipelines take microbatches of unequal length."""
OPTIONAL = {
    "math-verify": ("the reward math", "pip install 'pentad[math]'"),
    "starlette": ("pentad serve, and agents as programs", "pip install 'pentad[serve]'"),
    "uvicorn": ("pentad serve, and agents as programs", "pip install 'pentad[serve]'"),
    "boto3": ("checkpoints on S3", "pip install 'pentad[s3]'"),
    "ray": ("runs over several machines", "pip install 'pentad[ray]'"),
    "pyarrow": ("Parquet and saved HF datasets", "pip install 'pentad[parquet]'"),
    "tensorboard": ("curves in TensorBoard", "pip install 'pentad[tensorboard]'"),
    "wandb": ("records in Weights & Biases", "pip install 'pentad[wandb]'"),
    "TransferQueue": ("store=transfer_queue", "pip install 'pentad[transfer-queue]'"),
    "gymnasium": ("rollout.workflow=gym:ID", "pip install 'pentad[gym]'"),
    "websockets": ("rollout.workflow=openenv:URL", "pip install 'pentad[openenv]'"),
    "mcp": ("rollout.workflow=mcp:COMMAND", "pip install 'pentad[mcp]'"),
    "reasoning-gym": ("its tasks by reasoning_gym:NAME", "pip install 'pentad[reasoning-gym]'"),
    "megatron-core": ("training with megatron:...", "pip install 'pentad[megatron]'"),
    "transformer-engine": (
        "layers for megatron:... (megatron.transformer_impl)",
        "pip install --no-build-isolation 'pentad[transformer-engine]'",
    ),
    "trackio": ("records in Trackio", "pip install 'pentad[trackio]'"),
    "trl": ("pentad bench rl beside TRL", "pip install 'pentad[trl]'"),
    "flash-attn-4": ("faster attention on Hopper GPUs and later", "pip install 'pentad[fa4]'"),
    "triton": ("GPU kernels and torch.compile on a GPU", "comes with torch for CUDA"),
}
"""Distribution -> (its purpose, the command that installs it)."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    name: str
    status: Status
    text: str
    remedy: str = ""


def examine(fileroot: str = "runs") -> list[Finding]:
    """All findings, in the order of CHECKS."""
    found = [finding for check in CHECKS for finding in check()]
    return [*found, *check_disk(fileroot), *what_runs()]


def is_healthy(findings: list[Finding]) -> bool:
    return all(finding.status != "fail" for finding in findings)


def check_python() -> Iterator[Finding]:
    version = sys.version_info[:2]
    text = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    low, high = PYTHONS
    if version < low:
        yield Finding("python", "fail", text, f"use Python {low[0]}.{low[1]} or later")
    elif version > high:
        remedy = f"versions up to {high[0]}.{high[1]} are tested"
        yield Finding("python", "warn", text, remedy)
    else:
        yield Finding("python", "ok", text)


def check_requirements() -> Iterator[Finding]:
    """Checks every dependency of the package and its version."""
    try:
        wanted = importlib.metadata.requires("pentad") or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding("pentad", "warn", "is importable but not installed", "pip install -e .")
        return
    missing: dict[str, str] = {}
    for line in wanted:
        name, least, below = read_requirement(line)
        if "extra ==" in line:
            continue
        have, wanted_here = installed(name), line.partition(";")[0].strip()
        if have is None or numbers(have) < numbers(least):
            missing[wanted_here] = f"{name} >= {least} ({have or 'missing'})"
        elif below and numbers(have) >= numbers(below):
            text = f"{have} is later than the tested versions (below {below})"
            yield Finding(name, "warn", text, f"pip install '{wanted_here}'")
    if missing:
        remedy = "pip install " + " ".join(f"'{requirement}'" for requirement in missing)
        yield Finding("packages", "fail", ", ".join(missing.values()), remedy)
    else:
        yield Finding("packages", "ok", "all dependencies are installed")


def read_requirement(line: str) -> tuple[str, str, str]:
    """(name, lowest version, first version that is too high) of `name<3,>=1.2; marker`."""
    name = re.match(r"[A-Za-z0-9._-]+", line)
    assert name is not None, f"not a requirement: {line}"
    versions = line.partition(";")[0]
    least = re.search(r"[>=~]=\s*([0-9][0-9.]*)", versions)
    below = re.search(r"<\s*([0-9][0-9.]*)", versions)
    return name[0], least[1] if least else "0", below[1] if below else ""


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: 2.13.0+cpu gives (2, 13, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def check_torch() -> Iterator[Finding]:
    version = installed("torch")
    if version is None:
        return  # check_requirements reports it
    cuda = torch_cuda()
    text = f"{version}, built for {f'CUDA {cuda}' if cuda else 'the CPU'}"
    try:
        has_gpu = bool(find_gpus())
    except GpuQueryError:
        has_gpu = False
    if has_gpu and not cuda:
        remedy = "this machine has a GPU: install the CUDA build from https://pytorch.org"
        yield Finding("torch", "fail", text, remedy)
    elif numbers(version)[:2] < UNEQUAL_STAGES:
        remedy = "pipelines pad their microbatches to equal length; torch 2.13 does not need that"
        yield Finding("torch", "info", text, remedy)
    else:
        yield Finding("torch", "ok", text)


def torch_cuda() -> str | None:
    """The CUDA version torch was built for, read from its files."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = (Path(spec.origin).parent / "version.py").read_text()
    found = re.search(r"^cuda[^=]*=\s*'([^']+)'", text, re.MULTILINE)
    return found.group(1) if found else None


def check_gpus() -> Iterator[Finding]:
    try:
        gpus = find_gpus()
    except GpuQueryError as error:
        remedy = "reload the NVIDIA driver, or reboot; until then runs use the CPU"
        yield Finding("gpu", "fail", str(error), remedy)
        return
    if not gpus:
        text = "none: everything runs on the CPU, in float32"
        remedy = "leave dtype at auto: bfloat16 on a CPU can be hundreds of times slower"
        yield Finding("gpu", "info", text, remedy)
        return
    for index, gpu in enumerate(gpus):
        text = f"{gpu.name}, {gpu.memory_bytes / GIB:.0f} GiB ({gpu.free_bytes / GIB:.0f} free)"
        text += f", driver {gpu.driver}"
        name = f"gpu {index}"
        if gpu.capability and float(gpu.capability) < MIN_CAPABILITY:
            remedy = f"capability {gpu.capability} has no bfloat16: set actor.dtype=float32"
            yield Finding(name, "warn", text, remedy)
        elif gpu.free_bytes < 0.8 * gpu.memory_bytes:
            yield Finding(name, "warn", text, "another program holds memory: see nvidia-smi")
        else:
            yield Finding(name, "ok", text)
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        remedy = "install gcc: torch.compile and Triton kernels need it"
        yield Finding("compiler", "warn", "no C compiler", remedy)


def graded(name: str, text: str, low: bool, remedy: str) -> Finding:
    return Finding(name, "warn", text, remedy) if low else Finding(name, "ok", text)


def check_memory() -> Iterator[Finding]:
    total, available = host_memory()
    text = f"{total / GIB:.1f} GiB, {available / GIB:.1f} available; {num_cores()} cores"
    remedy = "small models only; `pentad plan` shows what a recipe needs"
    yield graded("memory", text, available < MIN_MEMORY_GIB * GIB, remedy)


def check_shm() -> Iterator[Finding]:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return
    size = shutil.disk_usage(folder).total
    remedy = "start the container with --shm-size=16g or --ipc=host: processes share tensors there"
    text = f"{size / GIB:.2g} GiB of shared memory"
    yield graded("shm", text, size < MIN_SHM_GIB * GIB, remedy)


def check_open_files() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = soft != resource.RLIM_INFINITY and soft < MIN_OPEN_FILES
    most = "no limit" if hard == resource.RLIM_INFINITY else str(hard)
    remedy = f"ulimit -n {MIN_OPEN_FILES * 4} (allowed here: {most}): sockets and stores use many"
    count = "no limit" if soft == resource.RLIM_INFINITY else str(soft)
    yield graded("open files", count, low, remedy)


def check_network() -> Iterator[Finding]:
    """Checks that ranks can connect over loopback, and that the host's name resolves, which gloo
    needs."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                pass
    except OSError as error:
        remedy = "allow connections to 127.0.0.1: processes of a run communicate over it"
        yield Finding("loopback", "fail", str(error), remedy)
        return
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        remedy = "export GLOO_SOCKET_IFNAME=lo, or add the host's name to /etc/hosts"
        text = f"the name {socket.gethostname()} has no address"
        yield Finding("network", "warn", text, remedy)
        return
    yield Finding("network", "ok", f"loopback works, {socket.gethostname()} is {address}")


def check_temp() -> Iterator[Finding]:
    try:
        with tempfile.NamedTemporaryFile():
            pass
    except OSError as error:
        yield Finding("temp", "fail", str(error), "set TMPDIR to a folder that can be written")


def check_disk(fileroot: str) -> Iterator[Finding]:
    free, folder = free_disk(fileroot)
    text = f"{free / GIB:.1f} GiB free at {folder}"
    if not os.access(folder, os.W_OK):
        remedy = "set fileroot to a folder that can be written"
        yield Finding("disk", "fail", f"{folder} cannot be written", remedy)
    elif free < MIN_DISK_GIB * GIB:
        remedy = "set fileroot to a larger disk; `pentad plan` shows how much a recipe writes"
        yield Finding("disk", "warn", text, remedy)
    else:
        yield Finding("disk", "ok", text)


def check_optional() -> Iterator[Finding]:
    for name, (gives, how) in OPTIONAL.items():
        version = installed(name)
        if version:
            yield Finding(name, "ok", f"{version}: {gives}")
        else:
            yield Finding(name, "info", f"not here: {gives}", how)
    for name in SERVERS:
        found = shutil.which(name)
        if found:
            yield Finding(name, "ok", f"{found}: rollout by a {name} server")
        else:
            how = f"install {name} in its own environment and set rollout.server.python"
            yield Finding(name, "info", f"not on the path: rollout by a {name} server", how)


def what_runs() -> Iterator[Finding]:
    """Backends and modes that this machine can run."""
    try:
        gpus = find_gpus()
    except GpuQueryError:
        gpus = ()
    cuda = bool(gpus) and torch_cuda() is not None
    where = f"{gpus[0].name}, bfloat16 compute" if cuda else "the CPU, float32"
    yield Finding("train", "ok", f"archon on {where}")
    yield Finding("rollout", "ok", f"embedded on {where}")
    yield Finding("modes", "ok", "colocate, hybrid and async")


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    check_python,
    check_requirements,
    check_torch,
    check_gpus,
    check_memory,
    check_shm,
    check_open_files,
    check_network,
    check_temp,
    check_optional,
)
