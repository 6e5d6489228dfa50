"""memory_budget is kept to, and ac_debug says what is kept and what is computed again."""

import logging

import pytest
import torch
import torch._dynamo
from engine_toys import CONFIG, PolicyLoss, make_engine, make_rows, train
from sections import engine_keys, engine_settings
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager_decomp_partition

from pentad.core.errors import UserError
from pentad.engine.engine import build_engine
from pentad.engine.predictor import mixtures_of
from pentad.models.decoder import causal_attend
from pentad.parallel.blocks import apply_to_block, apply_to_blocks

CUDA = torch.device("cuda")


def kept_and_gradients(budget: float | None) -> tuple[int, list[Tensor]]:
    """Elements that blocks compiled as for a GPU keep for backward, and all gradients."""
    decoder = make_engine().decoder
    keys = engine_keys(enable_compile=True)
    if budget is not None:
        keys = engine_keys(enable_compile=True, ac_mode="memory_budget", ac_memory_budget=budget)
    for i, block in decoder.layers.items():
        apply_to_block(block, int(i), keys, CUDA)
    kept: list[int] = []

    def pack(x: Tensor) -> Tensor:
        if not isinstance(x, torch.nn.Parameter):
            kept.append(x.numel())
        return x

    ids = torch.arange(24)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = decoder(ids, ids, causal_attend).square().sum()
    loss.backward()
    return sum(kept), [p.grad.clone() for p in decoder.parameters() if p.grad is not None]


def test_a_smaller_budget_keeps_less_and_changes_nothing(monkeypatch):
    """With torch's own partitioner, which is where the budget is read; code generation, which
    takes a GPU or minutes, is left out."""
    from torch._inductor import compile_fx  # a second of every process that collects

    compile_ = torch.compile
    monkeypatch.setattr(compile_fx, "compile_fx", aot_eager_decomp_partition)
    monkeypatch.setattr(
        torch,
        "compile",
        lambda f, *, backend, **kw: compile_(
            f, backend=aot_eager_decomp_partition if backend == "inductor" else backend, **kw
        ),
    )
    torch._dynamo.reset()
    # All in one process without a reset: blocks of another budget must not share its graphs.
    plain, true = kept_and_gradients(None)
    sizes = {}
    for budget in (1.0, 0.5, 0.0):
        sizes[budget], gradients = kept_and_gradients(budget)
        for mine, expected in zip(gradients, true, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)
    assert sizes[1.0] == plain
    assert sizes[0.0] < sizes[0.5] < sizes[1.0]
    torch._dynamo.reset()


@pytest.mark.parametrize("how", ["none", "selective", "full"])
def test_numbers_of_a_model_are_constants_of_its_compiled_blocks(monkeypatch, how):
    """As an input, a norm's eps is a tensor of the CPU: a C++ kernel to build, run at each pass."""
    inputs: list[Tensor] = []

    def look(graph, example):
        inputs.extend(x for x in example if isinstance(x, Tensor))
        return graph

    compile_ = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda f, *, backend, **kw: compile_(f, backend=look, **kw)
    )
    torch._dynamo.reset()
    decoder = make_engine().decoder
    for i, block in decoder.layers.items():
        apply_to_block(block, int(i), engine_keys(enable_compile=True, ac_mode=how), CUDA)
    ids = torch.arange(24)
    decoder(ids, ids, causal_attend)
    assert len(inputs) > 5 and not [x for x in inputs if x.dim() == 0]


def test_a_budget_is_refused_where_nothing_is_compiled():
    with pytest.raises(UserError, match="on CUDA only, not on cpu; use selective or full"):
        make_engine(ac_mode="memory_budget", enable_compile=True)
    assert make_engine(ac_mode="memory_budget", gradient_checkpointing=False)


def rows_of(text: str) -> dict[str, tuple[int, int]]:
    """Operation -> (calls, calls again) of a logged table."""
    lines = [line.split() for line in text.splitlines()[2:-1]]
    return {line[0]: (int(line[1]), int(line[3])) for line in lines}


@pytest.mark.parametrize(
    ("how", "again"),
    [
        # Of six products the last of a layer is read by nobody in its backward.
        ({"ac_mode": "full"}, 5),
        ({"ac_mode": "selective", "ac_selective": "op"}, 0),
    ],
    ids=["full", "op"],
)
def test_ac_debug_tells_what_each_layer_computes_again(caplog, how, again):
    rows = make_rows()
    true = make_engine(**how)
    with caplog.at_level(logging.INFO, logger="pentad.parallel.recompute_log"):
        engine = make_engine(ac_debug=True, **how)
        engine.forward(rows)  # keeps nothing, tells nothing
        assert not caplog.messages
        for one in (engine, true):
            train(one, rows, PolicyLoss(0.1), steps=2)
    for name, weight in engine.masters.items():
        assert torch.equal(weight, true.masters[name]), name
    assert len(caplog.messages) == CONFIG["num_hidden_layers"], "once a layer"
    table = rows_of(caplog.messages[0])
    products = [n for n in table if n in ("aten.mm.default", "aten.addmm.default")]
    assert sum(table[n][1] for n in products) == again
    assert table["aten.silu.default"] == (1, 1)
    assert caplog.messages[1:] == ["ac_debug: layer 1 as layer 2", "ac_debug: layer 0 as layer 2"]


def test_ac_debug_names_layers_that_keep_everything(caplog):
    with caplog.at_level(logging.INFO, logger="pentad.parallel.recompute_log"):
        engine = make_engine(ac_debug=True, ac_mode="selective", ac_selective=2)
        train(engine, make_rows())
    assert caplog.messages[0] == "ac_debug: layer 1 keeps everything"
    assert [m.split("\n")[0] for m in caplog.messages[1:]] == [
        "ac_debug: layer 2",
        "ac_debug: layer 0 as layer 2",
    ]


MIXTURE = CONFIG | {
    "model_type": "qwen2_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 20,
    "norm_topk_prob": True,
}


@pytest.mark.parametrize(
    ("how", "compiled", "num_runs"),
    [
        ({"ac_mode": "none"}, 4, [1, 1, 1]),
        ({"ac_mode": "full"}, 4, [2, 2, 2]),
        ({"ac_mode": "selective", "ac_selective": 2}, 4, [2, 1, 2]),
        ({"ac_mode": "selective", "ac_selective": "op"}, 1, [2, 2, 2]),
    ],
    ids=["none", "full", "stride", "op"],
)
def test_a_mixture_in_parts_is_compiled_and_recomputed_as_asked(
    monkeypatch, how, compiled, num_runs
):
    """All of its three parts are, or by operation the first alone, with its ffn beside it."""
    called: list[str] = []

    def compile_not(run, **kwargs):
        def note(part, *args):
            called.append(part.__qualname__)
            return run(part, *args)

        return note

    monkeypatch.setattr(torch, "compile", compile_not)
    keys = engine_keys(enable_compile=True, **how)
    engine = build_engine(MIXTURE, engine_settings(), init_from_scratch=True)
    decoder = engine.decoder
    apply_to_blocks(decoder.blocks, keys, CUDA, mixtures_of(decoder))
    runs = {}
    for layer, block in decoder.blocks.items():
        for part in (block.attn_norm, block.ffn.router):
            key = (layer, type(part).__name__)
            runs[key] = 0

            def count(*args, key=key):
                runs[key] += 1

            part.register_forward_pre_hook(count)
    ids = torch.arange(24)
    x = decoder(ids, ids, causal_attend)
    parts = ["Block.mix", *2 * ["SharedExpert.forward"], "Experts.forward"]
    assert sorted(called) == sorted(parts[:compiled] * 3)
    x.square().sum().backward()
    for layer, num in enumerate(num_runs):
        assert runs[layer, "Norm"] == runs[layer, "Router"] == num


def test_no_kind_of_block_is_left_uncompiled_because_there_are_many(monkeypatch):
    """Dense blocks and the three parts of mixtures, trained over many tokens and scored over one:
    all run through one function, of which dynamo compiles eight versions unless told."""
    compile_ = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda f, *, backend, **kw: compile_(f, backend="eager", **kw)
    )
    monkeypatch.setattr(torch._dynamo.config, "fail_on_recompile_limit_hit", True)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    config = MIXTURE | {"num_hidden_layers": 2, "mlp_only_layers": [1]}
    decoder = build_engine(config, engine_settings(), init_from_scratch=True).decoder
    keys = engine_keys(enable_compile=True, ac_mode="none")
    apply_to_blocks(decoder.blocks, keys, CUDA, mixtures_of(decoder))
    ids, one = torch.arange(24), torch.arange(1)
    decoder(ids, ids, causal_attend).sum().backward()
    with torch.no_grad():
        decoder(one, one, causal_attend)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 8
    torch._dynamo.reset()
