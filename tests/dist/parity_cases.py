"""What the workers of a distributed test run: one training step under a layout, seen whole."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from engine_toys import (
    CONFIG,
    PolicyLoss,
    SequenceLoss,
    ValueLoss,
    bring_back,
    group_rows,
    keep_state,
    make_rows,
    state_of,
)
from family_toys import ALL_CONFIGS
from sections import engine_settings
from torch import Tensor

from pentad.checkpoint.exports import export_model
from pentad.core.errors import RunError
from pentad.core.layout import Layout
from pentad.engine.engine import Engine, build_engine
from pentad.engine.section import OptimizerConfig
from pentad.models.hf_weights import gather_whole
from pentad.ops.digest import digest_of, tensor_checksum
from pentad.parallel.cuts import local
from pentad.parallel.gradients import global_square
from pentad.sync.publisher import take_snapshot

DENSE = CONFIG | {
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "pad_token_id": 20,
}
"""8 heads, 2 kv heads: tp * cp up to 8, with repeated kv heads from 4 on. 37 words: uneven. The
row of the padding, which lookups give no gradient, is the second rank's of two."""
MOE = DENSE | {
    "model_type": "qwen3_moe",
    "tie_word_embeddings": False,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "mlp_only_layers": [1],
}
BIASED = DENSE | {"model_type": "llama", "attention_bias": True, "mlp_bias": True}
SHARED = MOE | {
    "model_type": "qwen2_moe",
    "shared_expert_intermediate_size": 20,
    "head_dim": 6,
}
GLM = DENSE | {
    "model_type": "glm4_moe",
    "tie_word_embeddings": False,
    "attention_bias": True,
    "use_qk_norm": True,
    "head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.4,
}
SIX = MOE | {"num_experts": 6}
OWN = {name: config | {"initializer_range": 0.2} for name, config in ALL_CONFIGS.items()}
CONFIGS = OWN | {
    "dense": DENSE,
    "moe": MOE,
    "six": SIX,
    "biased": BIASED,
    "shared": SHARED,
    "glm_moe": GLM,
}
ROUTED = ("moe", "six", "glm_moe", "gpt_oss", "gemma4_text")
LOSSES = {"token": PolicyLoss(0.3), "sequence": SequenceLoss(), "value": ValueLoss()}


def make(model: str, layout: Layout, loss: str = "token", seed: int = 3, **settings: Any) -> Engine:
    settings.setdefault(
        "optimizer", OptimizerConfig(lr=1e-2, weight_decay=1.0, gradient_clipping=0.5)
    )
    if CONFIGS[model]["model_type"] in ("glm4_moe", "deepseek_v3"):
        settings.setdefault("moe_bias_rate", 0.01)
    engine = build_engine(
        CONFIGS[model],
        engine_settings(**settings),
        layout=layout,
        init_from_scratch=True,
        seed=seed,
        value_head=loss == "value",
    )
    bend(engine)
    return engine


def bend(engine: Engine) -> None:
    """Moves weights that start at one value (norms, biases, B of factors) off it, by name, on any
    layout."""
    with torch.no_grad():
        for name, tensor in state_of(engine).items():
            if tensor.ndim == 1 or name.endswith(("lora.b", "bias")):
                gen = torch.Generator().manual_seed(len(name) + sum(map(ord, name)))
                noise = 0.3 * torch.randn(tensor.shape, generator=gen)
                part = engine.cuts[name].take(noise) if name in engine.cuts else noise
                engine.tensors[name].add_(part)


def whole(tensor: Tensor) -> Tensor:
    return gather_whole(tensor.detach()).clone()


def train_step(
    model: str,
    layout: Layout,
    loss: str = "token",
    num_rows: int = 12,
    calls: int = 1,
    routes: list[Tensor] | None = None,
    crowd: bool = False,
    beside: Layout | None = None,
    scores: bool = True,
    grouped: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Everything a step gives: outputs, loss, every gradient, the norm, the weights after it.

    Mixtures follow the given routes: a choice that flips by rounding is no wrong gradient. A crowd
    sends every token to the same few experts, so that most ranks have nothing to do. Beside: an
    engine of that layout, built later. Without scores it only trains. Grouped rows begin alike.
    """
    engine = make(model, layout, loss, **settings)
    _other = make(model, beside, loss, **settings) if beside else None
    rows = group_rows() if grouped else make_rows(num_rows)
    chosen = engine.routes(rows) if scores and model in ROUTED else None
    for row, given in zip(rows, routes or chosen or [], strict=False):
        row.routes = torch.arange(given.shape[-1]).expand_as(given) if crowd else given
    scored = engine.forward(rows) if scores else None
    engine.begin_step()
    seen = []
    cuts = [len(rows) * i // calls for i in range(calls + 1)]
    for a, b in zip(cuts, cuts[1:], strict=False):
        seen.append(engine.accumulate(rows[a:b], LOSSES[loss], last=b == len(rows)))
    gradients = gradients_of(engine)
    result = engine.end_step()
    return {
        "routes": chosen,
        "scored": scored,
        "outputs": [out for one in seen for out in one.outputs],
        "loss_sum": sum(one.loss_sum for one in seen),
        "stats": [one.stats for one in seen],
        "gradients": gradients,
        "result": result,
        "weights": {n: whole(t) for n, t in state_of(engine).items()},
    }


def rounded_steps(model: str, layout: Layout) -> dict[str, Tensor]:
    """Weights and moments in bfloat16 after two steps by given gradients."""
    engine = make(model, layout, param_dtype="bfloat16", dtype="bfloat16")
    for number in range(2):
        for name, master in engine.masters.items():
            gen = torch.Generator().manual_seed(len(name) + sum(map(ord, name)) + number)
            cut = engine.cuts[name]
            if not number:
                master.detach().copy_(cut.take(torch.randn(cut.shape, generator=gen)))
            master.grad = cut.take(torch.randn(cut.shape, generator=gen)).to(master)
        engine.optimizer.step(0.5, number)
    state = engine.state_tensors()
    kinds = ("model.", "optimizer.exp_avg.", "optimizer.exp_avg_sq.")
    trained = [f"{kind}{name}" for kind in kinds for name in engine.masters]
    return {name: whole(state[name]) for name in trained}


def gradients_of(engine: Engine) -> dict[str, Tensor]:
    """Every gradient whole, as the call with the last rows has summed it over ranks."""
    parts = {n: local(p.grad).clone() for n, p in engine.parameters.items() if p.grad is not None}
    return {name: whole(engine.cuts[name].present(part)) for name, part in parts.items()}


def ranks_agree(model: str, layout: Layout, steps: int = 3) -> dict[str, Any]:
    """Trains with free routing, then compares what ranks hold in common, bit by bit."""
    engine = make(model, layout)
    rows = make_rows(12)
    results = []
    for _ in range(steps):
        engine.begin_step()
        engine.accumulate(rows, LOSSES["token"])
        results.append(engine.end_step())
    held = {
        name: (engine.cuts[name].stored, tensor_checksum(tensor))
        for name, tensor in engine.masters.items()
    }
    everyone: list[Any] = [None] * layout.world
    dist.all_gather_object(everyone, (results, held))
    return {"results": [one[0] for one in everyone], "held": [one[1] for one in everyone]}


def expert_norms(layout: Layout, routes: list[Tensor]) -> dict[str, float]:
    """The norms of the gradients of experts alone, of routers alone, and of all."""
    engine = make("moe", layout)
    rows = make_rows(12)
    for row, given in zip(rows, routes, strict=True):
        row.routes = given
    engine.begin_step()
    engine.accumulate(rows, LOSSES["token"])
    parts = {n: local(p.grad) for n, p in engine.parameters.items() if p.grad is not None}
    picked = {
        "experts": {n: g for n, g in parts.items() if "experts" in n},
        "routers": {n: g for n, g in parts.items() if "router" in n},
        "all": parts,
    }
    return {
        key: float(global_square(part, engine.cuts, engine.meshes).sqrt())
        for key, part in picked.items()
    }


def broken_gradient(
    layout: Layout, model: str = "dense", on_last_rank: bool = False, **settings: Any
) -> dict[str, Any]:
    """One row makes the gradient infinite, or one element of the last rank's shards is: what each
    rank does, and what follows."""
    engine = make(model, layout, **settings)
    before = {n: t.clone() for n, t in engine.masters.items()}
    rows = make_rows(12)
    if not on_last_rank:
        rows[4].columns["advantages"][2:] = float("inf")
    add_up = engine.held.gradients

    def spoiled() -> dict[str, Tensor]:
        gradients = add_up()
        next(part for part in gradients.values() if part.numel()).view(-1)[0] = float("inf")
        return gradients

    if on_last_rank and dist.get_rank() == layout.world - 1:
        engine.held.gradients = spoiled
    engine.begin_step()
    engine.accumulate(rows, LOSSES["token"])
    engine.held.gradients = add_up
    result = engine.end_step()
    is_still = all(torch.equal(t, before[n]) for n, t in engine.masters.items())
    engine.begin_step()
    engine.accumulate(make_rows(12), LOSSES["token"])
    after = engine.end_step()
    everyone: list[Any] = [None] * layout.world
    dist.all_gather_object(everyone, (result, is_still, after, engine.num_skipped))
    return {"ranks": everyone}


def different_rows(layout: Layout) -> str:
    """Each rank is given other rows, as a loader that shards by itself would do."""
    engine = make("dense", layout)
    engine.begin_step()
    try:
        engine.accumulate(make_rows(6, seed=dist.get_rank()), LOSSES["token"])
    except RunError as error:
        return str(error)
    return "nothing was said"


def copied_state(layout: Layout) -> bool:
    """A deep copy of the state brings an engine of the same layout back, bit by bit."""
    engine = make("moe", layout)
    rows = make_rows(12)
    state = keep_state(engine)
    first = train_once(engine, rows)
    bring_back(engine, state)
    again = train_once(engine, rows)
    return all(torch.equal(first[name], again[name]) for name in first)


def train_once(engine: Engine, rows: list[Any]) -> dict[str, Tensor]:
    engine.begin_step()
    engine.accumulate(rows, LOSSES["token"])
    engine.end_step()
    return {name: tensor.detach().clone() for name, tensor in engine.masters.items()}


def weights_out(model: str, layout: Layout, folder: str) -> dict[str, Any]:
    """Weights by iteration on every rank, as a folder, and from it into a tag and an engine."""
    engine = make(model, layout)
    export_model(engine, folder)
    given = dict(engine.iter_weights())
    digest = digest_of(given.items()).hex()
    digests: list[Any] = [None] * layout.world
    dist.all_gather_object(digests, digest)
    loaded = build_engine(folder, engine_settings(), layout=layout)
    rows = make_rows(4)
    engine.load_tag("same", folder)
    a, b, c = engine.forward(rows), loaded.forward(rows), engine.forward(rows, "same")
    is_same = all(
        torch.equal(x["logprobs"], y["logprobs"]) and torch.equal(x["logprobs"], z["logprobs"])
        for x, y, z in zip(a, b, c, strict=True)
    )
    try:
        export_model(engine, "/proc/nowhere/to/be/written")
        refused = ""
    except Exception as error:
        refused = type(error).__name__
    refusals: list[Any] = [None] * layout.world
    dist.all_gather_object(refusals, refused)
    return {"weights": given, "digests": digests, "is_same": is_same, "refusals": refusals}


def snapshot_held(model: str, layout: Layout, copy: bool, **settings: Any) -> int:
    """Bytes that a snapshot holds besides the weights themselves."""
    engine = make(model, layout, **settings)
    own = {_storage(local(tensor)) for tensor in state_of(engine).values()}
    taken = take_snapshot(1, engine.iter_weights(), copy=copy).weights
    held = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for _, tensor in taken
        if _storage(tensor) not in own
    }
    return sum(held.values())


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
