"""A server of a run: its settings, and the process of a server that the run starts."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from pydantic import Field

import pentad
from pentad.core.dims import ModelDims
from pentad.core.errors import InfraFailure, Problem, RunError, UserError
from pentad.core.section import Section
from pentad.engine.section import LoraConfig
from pentad.rollout.section import RolloutConfig
from pentad.runtime.environment import visible_devices
from pentad.runtime.process import Child, bound
from pentad.samplers.http import Wire
from pentad.samplers.section import ServerConfig

ROUTES_FLAG = "--enable-return-routed-experts"
"""Settings that are the same for vLLM and SGLang."""


class ServerSettings(Section):
    """Settings of one server of a run: the resolved block `rollout`, and its placement."""

    rollout: RolloutConfig
    model_folder: str
    """Folder of config.json and tokenizer; weights are installed later."""
    dims: ModelDims
    dtype: str
    max_context: int
    device: str
    """cpu or cuda."""
    devices: tuple[int, ...] = ()
    """GPUs visible to a started server; their number is tensor x pipeline."""
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    lora: LoraConfig | None = None
    """The adapter whose factors are installed; the frozen weights come from the model folder."""
    can_sleep: bool = False
    """Whether it will be put to sleep while others use its devices."""
    key: str | None = Field(default=None, repr=False)
    """Sent with every request; a server that the run starts gets a new one each time."""
    is_started: bool = False
    """Whether the run started it: it then runs on this machine as the same user."""

    @property
    def server(self) -> ServerConfig:
        return self.rollout.server

    @property
    def transfer_folder(self) -> Path:
        """Folder for weights that are transferred by disk."""
        return Path(self.server.transfer_folder or tempfile.gettempdir())


STOP_PATIENCE_S = 15.0
PROBE_INTERVAL_S = 0.5
END_PATIENCE_S = 1.0
"""Seconds to wait after a failed call for the exit of the server's process, which may be the
cause."""
TAIL_LINES = 8
INSTALLED_S = 60.0
"""Time limit for the server's interpreter to report the package's version, in seconds."""
KEY = "rollout.server.python"
T = TypeVar("T")


class ServerProcess:
    """One server and the processes it starts, in a separate session."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log_file: Path,
        files: ExitStack | None = None,
    ) -> None:
        """`command` begins with a Python interpreter. `files`: what is removed after its end."""
        self.files = files or ExitStack()
        self.name = name
        self.log_file = log_file
        self.package = tempfile.TemporaryDirectory(prefix="pentad-server-")
        own = package_path(Path(self.package.name))
        path = os.pathsep.join(filter(None, [own, environment.get("PYTHONPATH")]))
        self.child = Child.start(
            bound(command),
            log=log_file,
            log_mode=0o600,  # private: SGLang logs its key
            environment={**environment, "PYTHONPATH": path},
        )

    def check(self) -> None:
        """Raises RunError, with the end of the log, if the server has exited."""
        if (ended := self.child.poll(TAIL_LINES)) is not None:
            raise RunError(f"{self.name} {ended}")

    def poll(self) -> str | None:
        """Describes how it ended; None while it runs."""
        return self.child.ended()

    def stacks(self) -> None:
        """Does nothing: servers write no stacks."""

    async def wait_ready(self, probe: Callable[[], Awaitable[None]], timeout_s: float) -> None:
        """Waits until `probe` raises no InfraFailure."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.check()
            try:
                await probe()
                return
            except InfraFailure as failure:
                if time.monotonic() > deadline:
                    raise RunError(
                        f"{self.name} was not ready after {timeout_s:g} s ({failure}); "
                        f"its output is in {self.log_file}"
                    ) from failure
            await asyncio.sleep(PROBE_INTERVAL_S)

    async def opened(self, wire: Wire, attach: Callable[[], Awaitable[T]], timeout_s: float) -> T:
        """Waits until the server answers and returns the result of `attach`; stops the server after
        any failure."""
        try:
            await self.wait_ready(lambda: wire.get("/health"), timeout_s)
            return await attach()
        except BaseException:
            await self.stop()
            raise
        finally:
            await wire.close()

    async def stop(self) -> None:
        """Stops the server, then kills it with all processes it started."""
        self.child.send_all(signal.SIGTERM)
        deadline = time.monotonic() + STOP_PATIENCE_S
        while self.child.is_running and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        self.child.end()
        self.package.cleanup()
        self.files.close()


async def soon_lost(lost: asyncio.Future[str]) -> bool:
    """Whether the process of `lost` has ended or ends now, which explains a failure that just
    occurred."""
    await asyncio.wait([lost], timeout=END_PATIENCE_S)
    return lost.done()


PLUGIN = "[sglang.srt.plugins]\npentad = pentad.samplers.sglang_worker:register\n"


def package_path(folder: Path) -> str:
    """Makes an import folder with only this package, so that our site-packages do not shadow torch
    and other packages of the server's environment, and with its plugin for SGLang."""
    (folder / "pentad").symlink_to(Path(pentad.__file__).parent, target_is_directory=True)
    info = folder / "pentad_server.dist-info"
    info.mkdir()
    about = f"Metadata-Version: 2.1\nName: pentad-server\nVersion: {pentad.__version__}\n"
    (info / "METADATA").write_text(about)
    (info / "entry_points.txt").write_text(PLUGIN)
    return str(folder)


def server_python(wanted: str | None, command: str) -> str:
    """Returns the interpreter of the server's environment. `wanted`: the interpreter or the
    environment's folder; None: that of the `command` on the path."""
    if wanted is None:
        found = shutil.which(command)
        beside = Path(found).resolve().parent / "python" if found else Path(sys.executable)
        return str(beside)
    given = Path(wanted).expanduser().absolute()
    python = given / "bin" / "python" if given.is_dir() else given
    if not os.access(python, os.X_OK):
        rule = f"there is no interpreter {python}" if given.is_dir() else "cannot be run"
        remedy = "give the Python of the environment the server is installed in, or its folder"
        raise UserError(Problem(f"{KEY} = {wanted}", rule, remedy))
    return str(python)


def check_installed(python: str, module: str, wanted: str | None) -> str:
    """Returns the version of the server's package; UserError if it is not installed."""
    code = (
        "import importlib.metadata as m, importlib.util as u, sys\n"
        "name = sys.argv[1]\n"
        "u.find_spec(name) or sys.exit(1)\n"
        "print(m.version(m.packages_distributions()[name][0]))"
    )
    command = [python, "-c", code, module]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=INSTALLED_S)
    except subprocess.TimeoutExpired:
        rule = f"its interpreter {python} did not answer within {INSTALLED_S:g} s"
        remedy = f"start it once by hand (`{python} -c pass`) to see why it hangs"
        raise UserError(Problem(f"{KEY} = {wanted or 'null'}", rule, remedy)) from None
    except OSError as error:
        rule, remedy = f"{python} cannot be run ({error.strerror})", "give a Python interpreter"
        raise UserError(Problem(f"{KEY} = {wanted or 'null'}", rule, remedy)) from None
    if found.returncode == 0:
        return found.stdout.strip()
    remedy = f"install {module} in its own environment and give its folder"
    if wanted is None:
        rule = f"there is no {module} command on the path, and no {module} beside Pentad"
        raise UserError(Problem(f"{KEY} = null", rule, remedy))
    raise UserError(Problem(f"{KEY} = {wanted}", f"has no {module}", remedy))


def server_environment(devices: Sequence[int], **own: str) -> dict[str, str]:
    """Returns our environment variables without our package paths, and with downloads disabled,
    because models are folders."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    seen = {"CUDA_VISIBLE_DEVICES": visible_devices(devices)} if devices else {}
    return {**kept, "HF_HUB_OFFLINE": "1", **seen, **own}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
