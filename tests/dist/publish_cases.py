"""What workers run in tests of a publish: each writes its shards, and all that is read back."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hf_cases
import parity_cases
import pipeline_cases
import torch
import torch.distributed as dist

from pentad.checkpoint.exports import Exporter
from pentad.checkpoint.writer import Writer
from pentad.core.layout import Layout
from pentad.engine.engine import Engine
from pentad.ops.digest import digest_of
from pentad.sync.published import Kind, open_weights, wait_written
from pentad.sync.shards import ShardWriter
from pentad.weights import blocks as sharding
from pentad.weights.hf import save_folder

MAKERS = {"parity": parity_cases.make, "pipeline": pipeline_cases.make, "hf": hf_cases.make}


def group() -> Any:
    return dist.new_group(backend="gloo") if dist.is_initialized() else None


def published(
    source: str,
    model: str,
    layout: Layout,
    kind: Kind,
    folder: str,
    bucket: int = 0,
    **settings: Any,
) -> dict[str, Any]:
    """Two versions, the weights moved in between and right after each; what the tickets give."""
    engine: Engine = MAKERS[source](model, layout, **settings)
    if bucket:
        sharding.PUBLISH_BUCKET_BYTES = bucket
    writer = ShardWriter(engine.weight_shards(), *engine.published(), group())
    seen = []
    for version in (1, 2):
        true = {name: x.clone() for name, x in engine.iter_weights()}
        made = writer.write(version, engine.weight_shards(), kind, Path(folder))
        with torch.no_grad():  # the learner moves on at once
            for tensor in engine.tensors.values():
                tensor.mul_(1.5)
        asyncio.run(wait_written(made.weights))
        got = open_weights(asdict(made.weights))
        seen.append(
            {
                "names": sorted(name for name, _ in got) == sorted(true),
                "equal": all(
                    x.dtype == true[name].dtype and torch.equal(x, true[name]) for name, x in got
                ),
                "digest": made.weights.digest == digest_of(true.items()).hex() == made.digest.hex(),
            }
        )
        writer.close()
    loads: list[Any] = [writer.staged_bytes]
    if dist.is_initialized():
        loads = [None] * layout.world
        dist.all_gather_object(loads, writer.staged_bytes)
    sharding.PUBLISH_BUCKET_BYTES = 64 << 20
    return {
        "seen": seen,
        "loads": loads,
        "num_bytes": writer.layout.num_bytes,
        "loose": writer.loose,
    }


def exported(
    source: str, model: str, layout: Layout, folder: str, bucket: int = 0, **settings: Any
) -> dict[str, Any]:
    """Two exports by blocks, beside training and not, against one of gathered tensors."""
    engine: Engine = MAKERS[source](model, layout, **settings)
    if bucket:
        sharding.PUBLISH_BUCKET_BYTES = bucket
    root, writer = Path(folder), Writer()
    gathered = {name: x.clone() for name, x in engine.iter_weights()}
    if not dist.is_initialized() or dist.get_rank() == 0:
        save_folder(root / "whole", gathered.items(), engine.plan_export())
    exporter = Exporter(writer)
    exporter.export(engine, root / "waited", is_async=False)
    exporter.export(engine, root / "beside", is_async=True)
    with torch.no_grad():  # the learner moves on at once
        for tensor in engine.tensors.values():
            tensor.mul_(1.5)
    exporter.finish()
    error = exporter.outcomes()[0]["error"]
    exporter.close()
    writer.close()
    sharding.PUBLISH_BUCKET_BYTES = 64 << 20
    names = ("whole", "waited", "beside")
    files = [{f.name: f.read_bytes() for f in (root / name).iterdir()} for name in names]
    return {"error": error, "same": files[0] == files[1] == files[2], "names": list(files[0])}
