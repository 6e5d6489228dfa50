"""What is laid around the model changes memory and speed, not numbers."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from engine_toys import (
    CONFIG,
    PolicyLoss,
    bring_back,
    keep_state,
    make_engine,
    make_rows,
    train,
    weights_of,
)
from sections import engine_keys, engine_settings
from torch import Tensor

from pentad.checkpoint.exports import export_model
from pentad.engine.engine import build_engine
from pentad.models.families import REGISTERED, qwen3_moe
from pentad.ops.attention import PaddedAttend
from pentad.parallel.blocks import apply_to_block

MOE_CONFIG = CONFIG | {
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}


@pytest.mark.parametrize(
    "how",
    [
        {"ac_mode": "full"},
        {"ac_mode": "selective", "ac_selective": "op"},
        {"ac_mode": "selective", "ac_selective": 2},
    ],
    ids=["full", "op", "stride"],
)
def test_recomputation_saves_memory_and_changes_nothing(how):
    rows = make_rows()
    grads, kept = [], []
    for settings in ({}, how, {**how, "gradient_checkpointing": False}):
        engine = make_engine(**settings)
        sizes: list[int] = []

        def pack(x: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(x.numel())
            return x

        engine.begin_step()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            engine.accumulate(rows, PolicyLoss(0.1))
        kept.append(sum(sizes))
        grads.append({n: p.grad.clone() for n, p in engine.parameters.items()})
    for name, grad in grads[0].items():
        assert torch.equal(grad, grads[1][name]) and torch.equal(grad, grads[2][name]), name
    assert kept[2] == kept[0]
    if how.get("ac_selective") != "op":  # kept products are not saved through autograd's hooks
        assert kept[1] < kept[0]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("leaves_out", [False, True])  # tokens without gradient, as a CPU does
def test_kept_logits_change_no_bit_of_a_step(strict, leaves_out, monkeypatch):
    if not leaves_out:
        monkeypatch.setattr("pentad.ops.logprob._live", lambda *grads: None)
    rows, found = make_rows(), []
    for keep in (False, True):
        how = {"strict": strict, "max_tokens_per_mb": 60, "logprob_bytes": 20000}
        engine = make_engine(keep_logits=keep, **how)
        engine.begin_step()
        engine.accumulate(rows, PolicyLoss(0.1))
        found.append([p.grad.clone() for p in engine.parameters.values()])
        found[-1] += [torch.tensor(engine.end_step().loss), *weights_of(engine).values()]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.fixture
def no_process_group():
    """Mixed precision makes a process group of one; leave none behind."""
    assert not dist.is_initialized()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("reshards", ["always", "never"], ids=["by-block", "whole"])
def test_masters_are_cast_for_compute_and_stepped_in_full(no_process_group, tmp_path, reshards):
    """The path of a GPU (fp32 masters, bf16 compute) with fp64 masters and fp32 compute."""
    rows = make_rows()
    plain = make_engine(max_tokens_per_mb=60)
    mixed = make_engine(
        param_dtype="float64", max_tokens_per_mb=60, reshard_after_forward_policy=reshards
    )
    assert mixed.settings.model.is_mixed
    assert {p.dtype for p in mixed.parameters.values()} == {torch.float64}
    for a, b in zip(mixed.forward(rows), plain.forward(rows), strict=True):
        assert torch.equal(a["logprobs"], b["logprobs"])
    mixed.save_tag("ref")
    for engine in (mixed, plain):
        engine.begin_step()
        engine.accumulate(rows[:5], PolicyLoss(), last=False)
        engine.accumulate(rows[5:], PolicyLoss())
    results = [engine.end_step() for engine in (mixed, plain)]
    assert results[0].grad_norm == pytest.approx(results[1].grad_norm, rel=1e-5)
    assert results[0].loss == pytest.approx(results[1].loss, rel=1e-6)
    weights = dict(plain.iter_weights())
    for name, weight in mixed.iter_weights():
        assert weight.dtype == torch.float32
        torch.testing.assert_close(weight, weights[name], rtol=1e-3, atol=2e-4)
    state = keep_state(mixed)
    before = weights_of(mixed)
    train(mixed, rows)
    bring_back(mixed, state)
    for name, weight in weights_of(mixed).items():
        assert torch.equal(weight, before[name])
    for a, b in zip(mixed.forward(rows, "ref"), make_engine().forward(rows), strict=True):
        torch.testing.assert_close(a["logprobs"], b["logprobs"], rtol=1e-4, atol=1e-4)
    export_model(mixed, str(tmp_path / "out"))


@pytest.mark.parametrize("is_moe", [False, True], ids=["dense", "mixture"])
@pytest.mark.parametrize("ac_mode", ["none", "selective", "full"])
def test_weights_cast_whole_train_as_those_cast_by_block(no_process_group, is_moe, ac_mode):
    rows = make_rows()
    config = MOE_CONFIG if is_moe else CONFIG
    engines = [
        make_engine(
            config=config,
            param_dtype="float64",
            max_tokens_per_mb=60,
            ac_mode=ac_mode,
            reshard_after_forward_policy=reshards,
        )
        for reshards in ("always", "never")
    ]
    for _ in range(2):
        norms = []
        for engine in engines:
            engine.begin_step()
            engine.accumulate(rows[:5], PolicyLoss(0.1), last=False)
            engine.accumulate(rows[5:], PolicyLoss(0.1))
            assert {p.grad.dtype for p in engine.parameters.values()} == {torch.float64}
            norms.append(engine.end_step().grad_norm)
        assert norms[0] == norms[1] > 0
    by_block, whole = (engine.tensors for engine in engines)
    for name, weight in by_block.items():
        assert torch.equal(weight, whole[name]), name


def test_a_model_of_transformers_is_cast_whole_too(no_process_group):
    rows, results = make_rows(), []
    for reshards in ("always", "never"):
        settings = engine_settings(param_dtype="float64", reshard_after_forward_policy=reshards)
        engine = build_engine(CONFIG, settings, backend="fsdp", init_from_scratch=True)
        results.append((train(engine, rows).grad_norm, engine.tensors))
    assert results[0][0] == results[1][0] > 0
    for name, weight in results[0][1].items():
        assert torch.equal(weight, results[1][1][name]), name


def test_a_failed_pass_leaves_the_masters_in_place(no_process_group):
    engine, rows = (
        make_engine(param_dtype="float64", reshard_after_forward_policy="never"),
        make_rows(),
    )

    class Failing(PolicyLoss):
        def __call__(self, outputs, columns):
            raise ValueError("no loss today")

    engine.begin_step()
    with pytest.raises(ValueError, match="no loss today"):
        engine.accumulate(rows, Failing())
    assert {p.dtype for p in engine.decoder.parameters()} == {torch.float64}
    assert not train(engine, rows).skipped


def test_steps_smaller_than_the_compute_dtype_can_hold_are_not_lost(no_process_group):
    engine, rows = make_engine(param_dtype="float64", lr=1e-12), make_rows()
    before, seen = weights_of(engine), dict(engine.iter_weights())
    train(engine, rows)
    moved = weights_of(engine)
    for name, weight in engine.iter_weights():
        if weight.ndim == 1:  # norms start at 1, where fp32 cannot hold such a step
            assert torch.equal(weight, seen[name]), name
    for name in moved:
        step = (moved[name] - before[name]).abs().mean()
        assert 1e-13 < step < 1e-11, name


def test_bf16_compute_stays_near_fp32(no_process_group):
    rows = make_rows(6)
    exact, rough = make_engine(), make_engine(dtype="bfloat16")
    for a, b in zip(exact.forward(rows), rough.forward(rows), strict=True):
        # bf16 keeps 8 bits; log-probs of this model reach -20.
        assert (a["logprobs"] - b["logprobs"]).abs().max() < 0.5
    one, two = train(exact, rows), train(rough, rows)
    assert two.loss == pytest.approx(one.loss, rel=0.05)
    assert two.grad_norm == pytest.approx(one.grad_norm, rel=0.1)
    assert {p.dtype for p in rough.parameters.values()} == {torch.float32}


def test_deterministic_mode_is_torchs_own_refusal():
    engine = make_engine(use_deterministic_algorithms=True)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert not train(engine, make_rows()).skipped


def test_compiled_blocks_share_one_graph_over_layers_and_lengths(monkeypatch):
    """Recompiling per layer or length would hit dynamo's limit and fall back in silence."""
    import torch._dynamo

    graphs: list[object] = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compile_ = torch.compile
    # The default backend needs a GPU to be worth its minutes; the graphs are the same.
    monkeypatch.setattr(
        torch, "compile", lambda f, **kw: compile_(f, **kw | {"backend": backend}, fullgraph=True)
    )
    torch._dynamo.reset()
    eager, compiled = make_engine().decoder, make_engine().decoder
    for i, block in enumerate(compiled.layers.values()):
        apply_to_block(block, i, engine_keys(enable_compile=True), torch.device("cuda"))
    for length in (9, 20):
        ids, attend = torch.arange(length), PaddedAttend([length], device=torch.device("cpu"))
        for model in (eager, compiled):
            model(ids, ids, attend).square().sum().backward()
    assert len(graphs) == 1
    for mine, true in zip(compiled.parameters(), eager.parameters(), strict=True):
        assert mine.grad is not None and torch.equal(mine.grad, true.grad)


ROUTER_IN_FP32 = dataclasses.replace(
    qwen3_moe.SPEC,
    rules=tuple(
        dataclasses.replace(rule, dtype="float32") if "router" in rule.target else rule
        for rule in qwen3_moe.SPEC.rules
    ),
)


def test_a_mixture_trains_with_its_router_in_the_dtype_its_map_names(no_process_group, monkeypatch):
    monkeypatch.setitem(REGISTERED, "qwen3_moe", f"{__name__}:ROUTER_IN_FP32")
    config = CONFIG | {
        "model_type": "qwen3_moe",
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    }
    rows = make_rows()
    exact = make_engine(config=config)
    rough = make_engine(config=config, dtype="bfloat16")
    seen: dict[str, torch.dtype] = {}
    block = rough.decoder.layers["1"]
    for name in ("ffn.router", "attn.q"):
        module = block.get_submodule(name)
        module.register_forward_pre_hook(
            lambda module, _, name=name: seen.update({name: module.weight.dtype})
        )
    one, two = train(exact, rows), train(rough, rows)
    assert seen == {"ffn.router": torch.float32, "attn.q": torch.bfloat16}
    # bf16 may send a token to another expert, so the two differ by more than rounding.
    assert two.loss == pytest.approx(one.loss, rel=0.1)
    for name, parameter in rough.parameters.items():
        assert parameter.dtype == torch.float32, name
