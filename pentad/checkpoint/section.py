"""The keys of the block `checkpoint`."""

from __future__ import annotations

from pentad.core.remote import Remote
from pentad.core.section import Count, Positive, Seconds, Section


class CheckpointConfig(Section):
    local_dir: str | None = None
    """Folder of checkpoints and exports, such as one on a fast disk. null: checkpoints/ in
    `fileroot`."""
    remote_uri: str | None = None
    """`s3://BUCKET/PREFIX` that recovery checkpoints are copied to while training continues, and
    restored from where the local ones are older or gone. null: local ones alone."""
    endpoint_url: str | None = None
    """Server of a store that is not Amazon's (MinIO, SeaweedFS, Ceph); its buckets are addressed by
    path. null: Amazon's. Credentials are read from the environment (AWS_ACCESS_KEY_ID ...)."""
    region: str | None = None
    """Region of the bucket. null: as the environment says."""
    async_workers: Count = 4
    """Requests to the store at a time."""
    retention: Count = 2
    """Newest checkpoints that the store keeps. `recover.keep_last` local ones are kept, and those
    that the store has no copy of, nor of a newer one."""
    bandwidth_mb_s: Positive | None = None
    """Most megabytes a second that are uploaded. null: as many as go."""
    timeout_s: Seconds = 30.0
    """A request without a byte for this long has stalled and is tried again."""
    finish_timeout_s: Seconds = 600.0
    """The end of a run waits this long for an upload; the next start continues with it."""

    def remote(self, place: str) -> Remote | None:
        """The store, at a place under its prefix; None where there is none."""
        if self.remote_uri is None:
            return None
        return Remote(
            self.remote_uri,
            endpoint_url=self.endpoint_url,
            region=self.region,
            num_workers=self.async_workers,
            retention=self.retention,
            bandwidth_mb_s=self.bandwidth_mb_s,
            timeout_s=self.timeout_s,
        ).under(place)
