"""Objects of one run in an S3-compatible store: the only file that imports boto3.

Requests are retried a bounded number of times if that can help: the store is busy (503), a
connection is reset or stalls, a body is incomplete. Everything is sent with its SHA256, which the
store checks before it acknowledges.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import boto3
import botocore.session
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    SSLError,
)
from botocore.exceptions import ConnectionError as NoConnection

from pentad.core.errors import RunError
from pentad.core.remote import Remote

DIGEST = "pentad-sha256"
"""Metadata key of an object for the digest of its content in the manifest."""
MAX_PARTS = 10_000
MIN_PART_BYTES = 5 << 20
PROBE = ".pentad-probe"
"""Test object that is written and removed before a run starts."""
BATCH = 1000
"""Keys in one request to delete."""
CHUNK = 1 << 20
MAX_PAUSE_S = 20.0
PASSING = {"SlowDown", "RequestTimeout", "InternalError", "BadDigest", "IncompleteBody"}
PASSING |= {"ConditionalRequestConflict", "OperationAborted", "XAmzContentSHA256Mismatch"}
"""Error codes outside 500 to 599 for which a retry may help."""


class StoreError(RunError):
    """A request to the store failed in all attempts."""


class Gone(StoreError):
    """An object is missing, or incomplete."""


@dataclass(frozen=True, slots=True)
class Head:
    size: int
    digest: str
    """Digest from the manifest; empty if none was given."""
    checksum: str
    """SHA256 as the store computed it, base64; `...-N` over the digests of N parts."""


@dataclass(frozen=True, slots=True)
class Part:
    """A range of a file that is sent in one request."""

    offset: int
    length: int
    sha256: bytes


class Throttle:
    """Limits the number of bytes per second, over all threads."""

    def __init__(self, mb_s: float | None) -> None:
        self.rate = None if mb_s is None else mb_s * 1e6
        self.free_at = time.monotonic()
        self.lock = threading.Lock()

    def take(self, num_bytes: int) -> None:
        if self.rate is None:
            return
        with self.lock:
            begins = max(self.free_at, time.monotonic())
            self.free_at = begins + num_bytes / self.rate
        time.sleep(max(0.0, begins - time.monotonic()))


@functools.cache
def _descriptions() -> Any:
    """The reader of AWS's descriptions of its services; it keeps what it has read. boto3 would read
    a megabyte for every client."""
    return botocore.session.Session().get_component("data_loader")


def _session() -> boto3.session.Session:
    """A session with the credentials and settings of this moment."""
    session = botocore.session.Session()
    session.register_component("data_loader", _descriptions())
    return boto3.session.Session(botocore_session=session)


class Store:
    """Keys are relative to the prefix of `remote`. Safe to use from several threads."""

    def __init__(self, remote: Remote) -> None:
        self.remote = remote
        self.bucket, self.prefix = remote.bucket, remote.prefix
        self.throttle = Throttle(remote.bandwidth_mb_s)
        self.num_retries = 0
        self.num_bytes = 0
        """Number of bytes acknowledged by the store."""
        self.lock = threading.Lock()
        style = {} if remote.endpoint_url is None else {"addressing_style": "path"}
        settings = Config(
            connect_timeout=min(10.0, remote.timeout_s),
            read_timeout=remote.timeout_s,
            retries={"total_max_attempts": 1, "mode": "standard"},
            max_pool_connections=remote.num_workers + 2,
            s3=style,
        )
        try:
            self.client: Any = _session().client(
                "s3",
                endpoint_url=remote.endpoint_url,
                region_name=remote.region,
                config=settings,
            )
        except (BotoCoreError, ValueError) as error:
            raise StoreError(f"{remote.uri}: {error}") from error

    @property
    def part_bytes(self) -> int:
        """Size of a part; smaller with a bandwidth limit, so that no part takes long."""
        rate = self.remote.bandwidth_mb_s
        capped = self.remote.part_bytes if rate is None else int(rate * 1e6)
        return max(MIN_PART_BYTES, min(self.remote.part_bytes, capped))

    def reach(self) -> None:
        """Raises StoreError unless objects can be listed, written and removed in the store."""
        self._try(self.client.list_objects_v2, Prefix=self.prefix, MaxKeys=1)
        self.put(PROBE, b"")
        self.delete([PROBE])

    def head(self, key: str) -> Head | None:
        try:
            found = self._try(
                self.client.head_object, Key=self.prefix + key, ChecksumMode="ENABLED"
            )
        except Gone:
            return None
        digest = found.get("Metadata", {}).get(DIGEST, "")
        return Head(found["ContentLength"], digest, found.get("ChecksumSHA256", ""))

    def read(self, key: str, max_bytes: int = 1 << 30) -> bytes | None:
        """A small object; None if it does not exist."""
        head = self.head(key)
        if head is None:
            return None
        if head.size > max_bytes:
            raise Gone(f"{self.place(key)} has {head.size} bytes, and {max_bytes} are the most")
        return b"".join(self.stream(key, 0, head.size))

    def stream(self, key: str, start: int, length: int) -> Iterator[bytes]:
        """Yields the bytes of a range; an incomplete body is continued by another request."""
        end, attempt = start + length, 1
        while start < end:
            try:
                wanted = f"bytes={start}-{end - 1}"
                body = self._try(self.client.get_object, Key=self.prefix + key, Range=wanted)[
                    "Body"
                ]
                while chunk := body.read(min(CHUNK, end - start)):
                    yield chunk
                    start, attempt = start + len(chunk), 1
                cut: Exception = EOFError(f"the body ended {end - start} bytes early")
            except (BotoCoreError, OSError) as error:
                cut = error
            if start < end:
                self._pause(cut, attempt, f"reading {self.place(key)}")
                attempt += 1

    def put(self, key: str, data: bytes, digest: str = "", **conditions: str) -> None:
        self.throttle.take(len(data))
        self._try(
            self.client.put_object,
            Key=self.prefix + key,
            Body=data,
            ChecksumSHA256=_base64(hashlib.sha256(data).digest()),
            Metadata={DIGEST: digest} if digest else {},
            **conditions,
        )
        self._count(len(data))

    def put_once(self, key: str, data: bytes) -> bool:
        """Creates an object; False if it exists, perhaps from an own attempt whose response was
        lost."""
        try:
            self.put(key, data, IfNoneMatch="*")
        except StoreError as error:
            if _status(error.__cause__) != 412:
                raise
            return False
        return True

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Key -> size of everything below `prefix`."""
        request = {"Prefix": self.prefix + prefix}
        listed = self._listed(
            self.client.list_objects_v2, "Contents", ("ContinuationToken",), **request
        )
        return {one["Key"][len(self.prefix) :]: one["Size"] for one in listed}

    def delete(self, keys: Iterable[str]) -> None:
        doomed = [{"Key": self.prefix + key} for key in keys]
        for first in range(0, len(doomed), BATCH):
            request = {"Objects": doomed[first : first + BATCH], "Quiet": True}
            answer = self._try(self.client.delete_objects, Delete=request)
            for failed in answer.get("Errors", ()):
                raise StoreError(f"{self.place(failed['Key'])}: {failed.get('Message')}")

    def uploads(self) -> dict[str, list[str]]:
        """Key -> ids of incomplete multipart uploads, newest first."""
        markers = ("KeyMarker", "UploadIdMarker")
        listed = self._listed(
            self.client.list_multipart_uploads, "Uploads", markers, Prefix=self.prefix
        )
        found: dict[str, list[str]] = {}
        for one in sorted(
            listed, key=lambda one: (one["Initiated"], one["UploadId"]), reverse=True
        ):
            found.setdefault(one["Key"][len(self.prefix) :], []).append(one["UploadId"])
        return found

    def begin(self, key: str, digest: str) -> str:
        answer = self._try(
            self.client.create_multipart_upload,
            Key=self.prefix + key,
            ChecksumAlgorithm="SHA256",
            Metadata={DIGEST: digest},
        )
        return str(answer["UploadId"])

    def sent_parts(self, key: str, upload: str) -> dict[int, dict[str, Any]]:
        """Number of each acknowledged part -> the store's entry for it."""
        request = {"Key": self.prefix + key, "UploadId": upload}
        listed = self._listed(self.client.list_parts, "Parts", ("PartNumberMarker",), **request)
        return {one["PartNumber"]: one for one in listed}

    def send_part(self, key: str, upload: str, number: int, data: bytes, sha256: bytes) -> str:
        """Sends a part and returns its ETag. The store rejects bytes with another digest."""
        self.throttle.take(len(data))
        answer = self._try(
            self.client.upload_part,
            Key=self.prefix + key,
            UploadId=upload,
            PartNumber=number,
            Body=data,
            ChecksumSHA256=_base64(sha256),
        )
        self._count(len(data))
        return str(answer["ETag"])

    def complete(self, key: str, upload: str, parts: Sequence[Part], tags: Sequence[str]) -> None:
        """Joins the parts to an object; if the response is lost, the object is checked."""
        listed = [
            {"PartNumber": number, "ETag": tag, "ChecksumSHA256": _base64(part.sha256)}
            for number, (part, tag) in enumerate(zip(parts, tags, strict=True), start=1)
        ]
        try:
            self._try(
                self.client.complete_multipart_upload,
                Key=self.prefix + key,
                UploadId=upload,
                MultipartUpload={"Parts": listed},
            )
        except Gone:
            head = self.head(key)
            if head is None or head.checksum not in ("", checksum_of(parts)):
                raise

    def abort(self, key: str, upload: str) -> None:
        try:
            self._try(self.client.abort_multipart_upload, Key=self.prefix + key, UploadId=upload)
        except Gone:
            return  # already completed or aborted

    def place(self, key: str) -> str:
        return f"s3://{self.bucket}/{self.prefix}{key}"

    def _listed(
        self, call: Callable[..., Any], what: str, markers: Sequence[str], **request: Any
    ) -> Iterator[dict[str, Any]]:
        """Yields the entries of all pages; `Next` + marker of a page starts the next one."""
        page: dict[str, Any] = {"IsTruncated": True}
        while page.get("IsTruncated"):
            more = {name: page[f"Next{name}"] for name in markers if f"Next{name}" in page}
            page = self._try(call, **request, **more)
            yield from page.get(what, ())

    def _count(self, num_bytes: int) -> None:
        with self.lock:
            self.num_bytes += num_bytes

    def _try(self, call: Callable[..., Any], **request: Any) -> Any:
        attempt = 1
        while True:
            try:
                return call(Bucket=self.bucket, **request)
            except (BotoCoreError, ClientError, OSError) as error:
                where = self.place(
                    request.get("Key", request.get("Prefix", ""))[len(self.prefix) :]
                )
                self._pause(error, attempt, where)
                attempt += 1

    def _pause(self, error: Exception, attempt: int, where: str) -> None:
        """Waits before another attempt; raises if none is left or would help."""
        if _status(error) == 404 and _code(error) != "NoSuchBucket":
            raise Gone(f"{where} is not there") from error
        if _status(error) == 416:
            raise Gone(f"{where} is shorter than it was") from error
        if not is_passing(error) or attempt >= self.remote.max_attempts:
            text = explain(error, self.remote)
            tried = f", after {attempt} attempts" if attempt > 1 else ""
            raise StoreError(f"{text} ({where}{tried})") from error
        with self.lock:
            self.num_retries += 1
        longest = min(MAX_PAUSE_S, self.remote.backoff_s * 2 ** (attempt - 1))
        time.sleep(longest * random.uniform(0.5, 1.0))


def checksum_of(parts: Sequence[Part]) -> str:
    """The store's checksum of an object sent in these parts; a single part is sent whole."""
    if len(parts) == 1:
        return _base64(parts[0].sha256)
    digests = b"".join(part.sha256 for part in parts)
    return f"{_base64(hashlib.sha256(digests).digest())}-{len(parts)}"


def is_passing(error: BaseException | None) -> bool:
    if isinstance(error, ClientError):
        status = _status(error) or 0
        return status >= 500 or status == 429 or _code(error) in PASSING
    if isinstance(error, SSLError):
        return False
    passing = HTTPClientError | NoConnection | IncompleteReadError | OSError | EOFError
    return isinstance(error, passing)


def _status(error: BaseException | None) -> int | None:
    if not isinstance(error, ClientError):
        return None
    status: int | None = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status


def _code(error: BaseException | None) -> str:
    """The store's error code."""
    code = error.response.get("Error", {}).get("Code", "") if isinstance(error, ClientError) else ""
    return str(code)


def explain(error: Exception, remote: Remote) -> str:
    """Error message with the address, the problem, and the remedy."""
    at = remote.uri if remote.endpoint_url is None else f"{remote.uri} at {remote.endpoint_url}"
    status, code = _status(error), _code(error)
    if isinstance(error, NoCredentialsError | PartialCredentialsError | CredentialRetrievalError):
        return f"{at}: there are no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    if code in ("SignatureDoesNotMatch", "InvalidAccessKeyId", "ExpiredToken", "InvalidToken"):
        remedy = "look at AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        return f"{at}: the credentials are refused ({code}); {remedy}"
    if status == 403:
        remedy = "its credentials must list, read, write and delete there"
        return f"{at}: access is denied ({code}); {remedy}"
    if status in (301, 307, 400) and code in ("PermanentRedirect", "AuthorizationHeaderMalformed"):
        return f"{at}: the bucket is in another region; set checkpoint.region"
    if code == "NoSuchBucket" or status == 404:
        return f"{at}: there is no bucket {remote.bucket}; make it, or give another"
    if isinstance(error, NoConnection | HTTPClientError):
        return f"{at}: cannot be reached ({error}); look at checkpoint.endpoint_url"
    return f"{at}: {error}"


def _base64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()
