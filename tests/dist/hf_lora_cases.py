"""What the workers of the tests of adapters of the backend `fsdp` run."""

from __future__ import annotations

from typing import Any

import torch
from checkpoint_cases import PARTS, STEP, seen, write_checkpoint
from engine_toys import make_rows, train
from hf_cases import make

from pentad.checkpoint.folders import find_checkpoints, state_folder
from pentad.checkpoint.restore import restore_learner
from pentad.core.layout import Layout
from pentad.engine.engine import Engine
from pentad.engine.section import LoraConfig

STATE = (*PARTS[:3], "tags.old_actor.")


def adapted(source: str, layout: Layout, lora: LoraConfig, **settings: Any) -> Engine:
    return make(source, layout, lora=lora, **settings)


def steps(source: str, layout: Layout, num: int = 3, **settings: Any) -> dict[str, Any]:
    """What steps with fresh factors give, and what frozen weights alone do before and after."""
    engine, rows = adapted(source, layout, **settings), make_rows(12)
    engine.save_tag("ref")
    before = engine.forward(rows, "ref")
    results = [train(engine, rows) for _ in range(num)]
    pairs = zip(before, engine.forward(rows, "ref"), strict=True)
    return {
        "losses": [one.loss for one in results],
        "norms": [one.grad_norm for one in results],
        "factors": {name: tensor.clone() for name, tensor in engine.iter_weights()},
        "digest": engine.base.digest,
        "is_still": all(torch.equal(a["logprobs"], b["logprobs"]) for a, b in pairs),
        "copies": list(engine.tags.copies),
        "logprobs": [one["logprobs"] for one in engine.forward(rows)],
    }


def save(source: str, layout: Layout, root: str, **settings: Any) -> dict[str, Any]:
    """Two steps and a checkpoint; what it holds, and what one more step makes of it."""
    engine = adapted(source, layout, **settings)
    engine.save_tag("ref")
    train(engine, make_rows(12))
    engine.save_tag("old_actor")
    train(engine, make_rows(12))
    then = seen(engine, STATE)
    return {"then": then, "after": write_checkpoint(engine, root, lambda: _next(engine))}


def load(source: str, layout: Layout, root: str, **settings: Any) -> dict[str, Any]:
    """Another engine continues; what it restored, and the next step."""
    engine = adapted(source, layout, **settings)
    (checkpoint,) = find_checkpoints(root)
    restore_learner(engine, checkpoint, state_folder("default", STEP))
    assert engine.base.tags == ["ref"] and list(engine.tags.copies) == ["old_actor"]
    return {"then": seen(engine, STATE), "after": _next(engine)}


def _next(engine: Engine) -> dict[str, Any]:
    train(engine, make_rows(12))
    return seen(engine, STATE[:1])
