"""What the workers of the pipeline's tests run: steps, states, weights, gathered over stages."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from engine_toys import make_rows, state_of
from parity_cases import CONFIGS, DENSE, GLM, LOSSES, MOE, make, whole
from sections import engine_settings
from torch import Tensor

from pentad.checkpoint.exports import export_model
from pentad.core.errors import UserError
from pentad.core.layout import Layout
from pentad.engine.engine import Engine, build_engine
from pentad.ops.digest import digest_of

CONFIGS |= {
    "tied5": DENSE | {"num_hidden_layers": 5},
    "tied8": DENSE | {"num_hidden_layers": 8},
    "own5": DENSE | {"num_hidden_layers": 5, "tie_word_embeddings": False},
    "moe5": MOE | {"num_hidden_layers": 5},
    "glm5": GLM | {"num_hidden_layers": 5},
}


def over_stages(part: dict[str, Any]) -> dict[str, Any]:
    """On rank 0, what all ranks hold of something by name: stages hold different names."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return part
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(part, everyone if dist.get_rank() == 0 else None)
    return {name: x for one in everyone if one is not None for name, x in one.items()}


def spy_on_gradients(engine: Engine) -> dict[str, Tensor]:
    """Filled with the gradient that the last rows complete, before it is scaled."""
    seen: dict[str, Tensor] = {}
    add_up = engine.held.gradients

    def spy() -> dict[str, Tensor]:
        gradients = add_up()
        for name, part in gradients.items():
            seen[name] = whole(engine.cuts[name].present(part))
        return gradients

    engine.held.gradients = spy
    return seen


def train_step(
    model: str,
    layout: Layout,
    loss: str = "token",
    num_rows: int = 12,
    calls: int = 1,
    routes: list[Tensor] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """As `parity_cases.train_step`; with several calls the last brings no rows, and a forward pass
    with other weights comes between them."""
    engine = make(model, layout, loss, **settings)
    gradients = spy_on_gradients(engine)
    rows = make_rows(num_rows)
    chosen = engine.routes(rows) if engine.dims.num_experts else None
    for row, given in zip(rows, routes or chosen or [], strict=False):
        row.routes = given
    engine.save_tag("ref")
    scored = engine.forward(rows)
    engine.begin_step()
    if calls > 1:  # a step that is given up leaves nothing behind
        engine.accumulate(rows[:3], LOSSES[loss], last=False)
        engine.begin_step()
    seen = []
    ends = [len(rows) * i // calls for i in range(calls + 1)]
    for start, end in zip(ends, ends[1:], strict=False):
        seen.append(engine.accumulate(rows[start:end], LOSSES[loss], last=calls == 1))
        if calls > 1:
            engine.forward(rows[:2], "ref")
    if calls > 1:
        seen.append(engine.accumulate([], LOSSES[loss], last=True))
    result = engine.end_step()
    weights = {n: whole(t) for n, t in state_of(engine).items()}
    return {
        "routes": chosen,
        "scored": scored,
        "outputs": [out for one in seen for out in one.outputs],
        "loss_sum": sum(one.loss_sum for one in seen),
        "stats": [one.stats for one in seen],
        "gradients": over_stages(gradients),
        "result": result,
        "results": list(over_stages({f"{layout.coords(engine.meshes.rank)}": result}).values()),
        "weights": over_stages(weights),
        "after": engine.forward(rows[:3]),
    }


def shapes_seen(layout: Layout, num_rows: int, **settings: Any) -> list[int]:
    """The tokens of each microbatch of the first rank's schedule."""
    engine = make("tied8", layout, **settings)
    rows = make_rows(num_rows)
    return [mb.num_tokens for mb in engine._planned(rows, shares=False)[2]]


def weights_out(model: str, layout: Layout, folder: str, loss: str, **settings: Any) -> Any:
    """Weights by iteration on every rank, as a folder, and back: as a tag, and as an engine."""
    engine = make(model, layout, loss, **settings)
    export_model(engine, folder)
    given = dict(engine.iter_weights())
    everyone: list[Any] = [None] * layout.world
    dist.all_gather_object(everyone, digest_of(given.items()).hex())
    loaded = build_engine(
        folder,
        engine_settings(**settings),
        layout=layout,
        value_head=loss == "value",
    )
    rows = make_rows(4)
    engine.load_tag("folder", folder)
    scored = [engine.forward(rows, tag) for tag in ("actor", "folder")]
    scored.append(loaded.forward(rows))
    is_same = all(
        torch.equal(row[name], other[name])
        for one in scored
        for row, other in zip(scored[0], one, strict=True)
        for name in row
    )
    return {"weights": given, "digests": everyone, "is_same": is_same, "scored": scored[0]}


def refusal(layout: Layout, **settings: Any) -> str:
    try:
        make("tied5", layout, **settings)
    except UserError as error:
        return str(error)
    return "nothing was said"
