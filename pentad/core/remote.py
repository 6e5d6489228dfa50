"""Location of a run's objects in an S3-compatible store, and access to it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


@dataclass(frozen=True, slots=True)
class Remote:
    """Location of checkpoints. Credentials are read from the environment, as by AWS tools.

    Example: Remote("s3://models/pentad", endpoint_url="http://127.0.0.1:9000")
    """

    uri: str
    """`s3://BUCKET/PREFIX`; keys of a run's objects are their local paths below it."""
    endpoint_url: str | None = None
    """Address of a store that is not Amazon's. Buckets are then addressed by path."""
    region: str | None = None
    num_workers: int = 4
    """Number of concurrent requests."""
    retention: int = 2
    """Number of newest checkpoints that are kept."""
    bandwidth_mb_s: float | None = None
    """Maximum number of megabytes sent per second, averaged over a part."""
    timeout_s: float = 30.0
    """A request without any byte for this long has stalled."""
    max_attempts: int = 8
    """Maximum number of attempts of a request; a failed upload is resumed later."""
    backoff_s: float = 0.25
    """Pause after the first failed attempt; doubles each time."""
    part_bytes: int = 16 << 20
    """Part size of a multipart upload; S3 requires at least 5 MiB except for the last part."""

    def under(self, path: str) -> Remote:
        return replace(self, uri=f"{self.uri.rstrip('/')}/{path}")

    @property
    def bucket(self) -> str:
        return split_uri(self.uri)[0]

    @property
    def prefix(self) -> str:
        """Key prefix: empty, or ending with a slash."""
        return split_uri(self.uri)[1]


def split_uri(uri: str) -> tuple[str, str]:
    """Splits `s3://BUCKET/PREFIX` into bucket and prefix; ValueError if it is invalid."""
    scheme, mark, rest = uri.partition("://")
    if scheme != "s3" or not mark:
        raise ValueError("is not the address of a store")
    bucket, _, prefix = rest.partition("/")
    if not BUCKET.fullmatch(bucket):
        rule = "a bucket's name has 3 to 63 small letters, digits, dots and hyphens"
        raise ValueError(f"{rule}, and here it is {bucket!r}")
    parts = [part for part in prefix.split("/") if part]
    if any(part in (".", "..") for part in parts):
        raise ValueError("a prefix has no . and .. in it")
    return bucket, "".join(f"{part}/" for part in parts)
