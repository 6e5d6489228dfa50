"""A real S3 server on loopback: SeaweedFS, killed and started again at will."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import httpx

KEY, SECRET = "testkey", "testsecret"
START_S = 180.0
IDENTITY = {
    "name": "tests",
    "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
    "actions": ["Admin", "Read", "Write", "List", "Tagging"],
}


def weed() -> str | None:
    """The program, from the environment that runs the tests."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.is_file() else shutil.which("weed")


def free_ports(num: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(num)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


class Server:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = free_ports(8)
        self.process: subprocess.Popen[bytes] | None = None
        (folder / "data").mkdir(parents=True)
        (folder / "s3.json").write_text(json.dumps({"identities": [IDENTITY]}))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports[6]}"

    def start(self) -> None:
        program = weed()
        assert program is not None, "the fixture skips without it"
        master, volume, filer, s3 = zip(self.ports[::2], self.ports[1::2], strict=True)
        options = [
            *("-dir", self.folder / "data", "-ip", "127.0.0.1", "-ip.bind", "127.0.0.1"),
            *("-master.port", master[0], "-master.port.grpc", master[1]),
            *("-volume.port", volume[0], "-volume.port.grpc", volume[1], "-volume.max", 50),
            *("-filer.port", filer[0], "-filer.port.grpc", filer[1]),
            *("-s3.port", s3[0], "-s3.port.grpc", s3[1], "-s3.config", self.folder / "s3.json"),
            *("-s3.port.iceberg", 0, "-s3.port.lance", 0, "-s3.localSocket", self.folder / "s3"),
            *("-filer.localSocket", self.folder / "filer", "-master.volumeSizeLimitMB", 64),
            *("-master.electionTimeout", "1s", "-master.heartbeatInterval", "200ms"),
        ]
        words = [f"{name}={value}" for name, value in zip(options[::2], options[1::2], strict=True)]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [program, "-logtostderr=true", "server", "-filer", "-s3"]
                + ["-master.telemetry=false", *words],
                stdout=log,
                stderr=log,
            )
        self._wait()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def _wait(self) -> None:
        """Until it answers, be it that it wants a signature, and can store what is sent."""
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            assert self.process is not None and self.process.poll() is None, self._last_words()
            try:
                if httpx.get(self.url, timeout=2.0, trust_env=False).status_code == 403:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
        raise TimeoutError(self._last_words())

    def _last_words(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-2000:]
