"""The keys of the block `checkpoint`."""

from __future__ import annotations

from pentad.core.remote import Remote
from pentad.core.section import Count, Positive, Seconds, Section


class CheckpointConfig(Section):
    local_dir: str | None = None
    """Folder of checkpoints and exports, such as one on a fast disk. null: checkpoints/ in
    `fileroot`."""
    remote_uri: str | None = None
    """`s3://BUCKET/PREFIX` to which recovery checkpoints are copied while training continues, and
    from which they are restored if the local ones are older or missing. null: local checkpoints
    only."""
    endpoint_url: str | None = None
    """Server of a store that is not Amazon's (MinIO, SeaweedFS, Ceph); its buckets are addressed by
    path. null: Amazon's. Credentials are read from the environment (AWS_ACCESS_KEY_ID ...)."""
    region: str | None = None
    """Region of the bucket. null: from the environment."""
    async_workers: Count = 4
    """Parallel requests to the store."""
    retention: Count = 2
    """Number of newest checkpoints kept in the store. Local ones are kept by `recover.keep_last`,
    and until the store has them or a newer one."""
    bandwidth_mb_s: Positive | None = None
    """Upload limit in megabytes per second. null: no limit."""
    timeout_s: Seconds = 30.0
    """A request that transfers no byte for this long has stalled and is retried."""
    finish_timeout_s: Seconds = 600.0
    """How long the end of a run waits for an upload; the next start resumes it."""

    def remote(self, place: str) -> Remote | None:
        """The store, with its prefix; None without `remote_uri`."""
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
