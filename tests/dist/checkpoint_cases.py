"""What workers run in tests of checkpoints: train and save under a layout, restore in another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from engine_toys import make_rows
from parity_cases import CONFIGS, LOSSES, MOE, whole
from parity_cases import make as make_archon
from pipeline_cases import over_stages
from sections import engine_settings
from torch import Tensor

from pentad.checkpoint.folders import find_checkpoints, info_folder, state_folder
from pentad.checkpoint.job import CommitJob, run_job
from pentad.checkpoint.restore import restore_learner
from pentad.checkpoint.shards import StateSaver
from pentad.checkpoint.writer import Writer
from pentad.core.layout import Layout
from pentad.engine.engine import Engine, build_engine
from pentad.engine.section import OptimizerConfig
from pentad.weights.transfer import iter_sources

CONFIGS["moe6"] = MOE | {"num_hidden_layers": 3, "num_experts": 6}
"""Six experts: three or two on a rank, and uneven over the ranks that share them."""
STEP = 1
Seen = TypeVar("Seen")
PARTS = ("model.", "optimizer.exp_avg.", "optimizer.exp_avg_sq.", "tags.ref.")


def make(model: str, layout: Layout, loss: str, backend: str, seed: int, **settings: Any) -> Engine:
    # The eps keeps a young AdamW from blowing up the rounding of small gradients to lr.
    settings["optimizer"] = OptimizerConfig(
        lr=1e-2, weight_decay=1.0, gradient_clipping=0.5, eps=1e-2
    )
    if backend == "archon":
        return make_archon(model, layout, loss, seed, **settings)
    return build_engine(
        CONFIGS[model],
        engine_settings(**settings),
        layout=layout,
        init_from_scratch=True,
        seed=seed,
        value_head=loss == "value",
        backend=backend,
    )


def train(engine: Engine, loss: str, routes: list[Tensor] | None) -> None:
    rows = make_rows(12)
    for row, given in zip(rows, routes or (), strict=False):
        row.routes = given
    engine.begin_step()
    engine.accumulate(rows, LOSSES[loss])
    engine.end_step()


def seen(engine: Engine, parts: tuple[str, ...] = PARTS) -> dict[str, Any]:
    """On rank 0, the whole state under HF names, whatever the layout and the backend."""
    weight_map, state = engine.held.whole.trained_map, engine.state_tensors()
    held = {name: whole(tensor) for name, tensor in state.items() if name.startswith(parts)}
    steps = {name: float(t) for name, t in state.items() if name.startswith("optimizer.step.")}
    if engine.meshes.layout.pp > 1:
        held, steps = over_stages(held), over_stages(steps)
    if engine.meshes.rank:
        return {}
    out: dict[str, Any] = {"steps": set(steps.values()), "num_steps": engine.num_steps}
    for part in parts:
        own = {n.removeprefix(part): tensor for n, tensor in held.items() if n.startswith(part)}
        out[part] = {name: tensor.clone() for name, tensor in iter_sources(own, weight_map)}
    return out


def save(
    model: str,
    layout: Layout,
    root: str,
    loss: str = "token",
    backend: str = "archon",
    is_async: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Two steps and a checkpoint; what it holds, and what one more step makes of it."""
    engine = make(model, layout, loss, backend, 3, **settings)
    engine.save_tag("ref")
    can_route = engine.dims.num_experts and backend == "archon"
    routes = engine.routes(make_rows(12)) if can_route else None
    for _ in range(STEP + 1):
        train(engine, loss, routes)
    then = seen(engine)

    def go_on() -> dict[str, Any]:
        train(engine, loss, routes)  # what is saved is the state before it
        return seen(engine, PARTS[:1])

    after = write_checkpoint(engine, root, go_on, is_async=is_async)
    return {"then": then, "after": after, "routes": routes}


def write_checkpoint(
    engine: Engine, root: str, go_on: Callable[[], Seen], *, is_async: bool = False
) -> Seen:
    """One of the engine as it is; gives what `go_on` sees between the save and its end."""
    writer = Writer()
    saver = StateSaver(writer)
    saver.prepare(engine.state_tensors())
    folder = state_folder("default", STEP)
    tensors, counters = engine.state_tensors(), engine.state_counters()
    staged = saver.save(tensors, Path(root), folder, is_async=is_async, counters=counters)
    after = go_on()
    staged.result(240)
    if engine.meshes.rank == 0:
        written = {path: file for one in saver.outcomes() for path, file in one["files"].items()}
        run_job(CommitJob(Path(root), info_folder(STEP), written, ()))
    if engine.meshes.layout.world > 1:
        dist.barrier()
    saver.close()
    writer.close()
    return after


def load(
    model: str,
    layout: Layout,
    root: str,
    routes: list[Tensor] | None,
    loss: str = "token",
    backend: str = "archon",
    **settings: Any,
) -> dict[str, Any]:
    """Another engine, of another seed, continues; what it restored, and the next step."""
    engine = make(model, layout, loss, backend, 99, **settings)
    engine.save_tag("stale")
    engine.forward(make_rows(2))  # weights that a pass gathered must not survive
    (checkpoint,) = find_checkpoints(root)
    restore_learner(engine, checkpoint, state_folder("default", STEP))
    assert list(engine.tags.copies) == ["ref"]
    now = seen(engine)
    train(engine, loss, routes)
    return {"now": now, "after": seen(engine, PARTS[:1])}


def save_where_one_rank_has_no_disk(root: str) -> dict[str, Any]:
    """What every rank knows of a save in which rank 1 cannot write, and of the next."""
    writer, rank = Writer(), dist.get_rank()
    saver = StateSaver(writer)
    tensors = {f"w{rank}": torch.full((4,), float(rank))}
    found = []
    for step, is_broken in ((0, rank == 1), (1, False)):
        place = Path(root) / "file" if is_broken else Path(root)
        saver.save(tensors, place, state_folder("default", step), is_async=True)
        found.append(saver.outcomes())
    saver.close()
    writer.close()
    return {"outcomes": found}
