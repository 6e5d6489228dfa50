"""The engine: right log-probs, a gradient that ignores how rows are split, honest steps."""

import copy
import random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pentad.core.errors import RunError
from pentad.core.types import Row, TokenOutputs
from pentad.engine.engine import Engine, build_engine
from pentad.engine.settings import EngineSettings, OptimizerSettings
from pentad.engine.wrap import apply_to_block
from pentad.models.decoder import causal_attend

VOCAB = 37
CONFIG = {
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "initializer_range": 0.3,  # far from uniform, so that wrong alignments show
}


class PolicyLoss:
    """-sum(weights * advantages * log p) - coef * sum(weights * entropy)."""

    columns = ("weights", "advantages")

    def __init__(self, entropy_coef: float = 0.0) -> None:
        self.needs_entropy = entropy_coef != 0
        self.entropy_coef = entropy_coef

    def __call__(self, outputs: TokenOutputs, columns) -> tuple[Tensor, dict[str, Tensor]]:
        weights = columns["weights"]
        assert outputs.entropy_T is not None
        entropy = (weights * outputs.entropy_T).sum()
        loss = -(weights * columns["advantages"] * outputs.logprobs_T).sum()
        stats = {"entropy": entropy.detach(), "tokens": (weights != 0).sum()}
        return loss - self.entropy_coef * entropy, stats


class SequenceLoss:
    """Uses the segments: -sum over sequences of (sum of log p)^2."""

    needs_entropy = False
    columns = ("weights",)

    def __call__(self, outputs: TokenOutputs, columns) -> tuple[Tensor, dict[str, Tensor]]:
        per_row = outputs.segments.sum(columns["weights"] * outputs.logprobs_T)
        spread = outputs.segments.spread(per_row)
        return -(columns["weights"] * spread * outputs.logprobs_T).sum(), {}


class ValueLoss:
    needs_entropy = False
    columns = ("weights", "returns")

    def __call__(self, outputs: TokenOutputs, columns) -> tuple[Tensor, dict[str, Tensor]]:
        assert outputs.values_T is not None
        error = outputs.values_T - columns["returns"]
        return (columns["weights"] * error.square()).sum(), {}


def make_rows(num: int = 12, seed: int = 0, max_len: int = 30) -> list[Row]:
    gen = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(num):
        length = int(torch.randint(1, max_len, (), generator=gen))
        weights = (torch.rand(length, generator=gen) < 0.7).float()
        weights[0] = 0
        advantages = torch.randn(length, generator=gen)
        ids = torch.randint(0, VOCAB, (length,), generator=gen)
        columns = {"weights": weights, "advantages": advantages, "returns": advantages * 2}
        rows.append(Row(ids, columns, float(weights.sum())))
    return rows


def make_engine(value_head: bool = False, lr: float = 1e-2, **settings) -> Engine:
    optimizer = OptimizerSettings(lr=lr, weight_decay=0.1, gradient_clipping=0.5)
    settings.setdefault("optimizer", optimizer)
    return build_engine(
        CONFIG,
        EngineSettings(**settings),
        init_from_scratch=True,
        seed=3,
        value_head=value_head,
    )


def weights_of(engine: Engine) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in engine.parameters.items()}


def train(engine: Engine, rows: list[Row], loss=None, steps: int = 1):
    for _ in range(steps):
        engine.begin_step()
        engine.accumulate(rows, loss or PolicyLoss())
        result = engine.end_step()
    return result


def plain_outputs(engine: Engine, ids: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """(log-probs, entropy) of one row, token-aligned, with all logits and no packing."""
    hidden = engine.decoder(ids, torch.arange(len(ids)), causal_attend)
    logp = torch.log_softmax(engine.decoder.logits(hidden) / temperature, -1)
    at = logp[:-1].gather(1, ids[1:, None])[:, 0]
    entropy = -(logp.exp() * logp).sum(-1)[:-1]
    zero = torch.zeros(1)
    return torch.cat([zero, at]), torch.cat([zero, entropy])


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("budget", [None, 40])
def test_logprobs_are_those_of_each_row_alone(temperature, budget):
    engine = make_engine(temperature=temperature, max_tokens_per_mb=budget)
    rows = make_rows()
    engine.begin_step()
    seen = engine.accumulate(rows, PolicyLoss())
    for row, scored, trained in zip(rows, engine.forward(rows), seen.outputs, strict=True):
        with torch.no_grad():
            logprobs, entropy = plain_outputs(engine, row.ids, temperature)
        assert scored["logprobs"][0] == 0 and scored.keys() == {"logprobs"}
        # fp32: packed and single products round differently.
        torch.testing.assert_close(scored["logprobs"], logprobs, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(trained["logprobs"], logprobs, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(trained["entropy"], entropy, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("entropy_coef", [0.0, 0.3])
def test_a_step_is_clipped_adamw_on_the_mean_loss(entropy_coef):
    engine, rows = make_engine(max_tokens_per_mb=50), make_rows()
    twin = make_engine()
    loss = torch.zeros(())
    for row in rows:
        logprobs, entropy = plain_outputs(twin, row.ids)
        terms = row.columns["advantages"] * logprobs + entropy_coef * entropy
        loss = loss - (row.columns["weights"] * terms).sum()
    (loss / sum(row.count for row in rows)).backward()
    norm = torch.nn.utils.clip_grad_norm_(twin.decoder.parameters(), 0.5)
    matrices = [p for n, p in twin.parameters.items() if p.ndim > 1 and "embed" not in n]
    others = [p for n, p in twin.parameters.items() if p.ndim == 1 or "embed" in n]
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1).step()

    result = train(engine, rows, PolicyLoss(entropy_coef))
    assert not result.skipped and result.num_microbatches > 1 and norm > 0.5
    assert result.grad_norm == pytest.approx(float(norm), rel=1e-4)
    assert result.loss == pytest.approx(loss.item() / sum(row.count for row in rows), rel=1e-4)
    assert result.num_tokens == sum(len(row.ids) for row in rows)
    for name, mine in engine.parameters.items():
        # A first AdamW step moves every weight by about lr = 1e-2, whatever its gradient: fp32
        # noise in a small gradient shows as a few percent of that.
        torch.testing.assert_close(mine, twin.parameters[name], rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("loss", [PolicyLoss(0.1), SequenceLoss()], ids=["token", "sequence"])
def test_twenty_random_splits_give_one_gradient(loss):
    rows = make_rows(16)
    shuffle = random.Random(1)
    reference: dict[str, Tensor] = {}
    for trial in range(21):
        budget = None if trial == 0 else shuffle.choice([None, 30, 60, 200])
        engine = make_engine(
            param_dtype="float64",
            compute_dtype="float64",
            max_tokens_per_mb=budget,
            n_mbs=1 if trial == 0 else shuffle.randint(1, 6),
            logprob_bytes=None if trial == 0 else shuffle.choice([1, 8000, 1 << 20]),
        )
        order = list(range(len(rows)))
        cuts = [0, len(rows)]
        if trial:
            shuffle.shuffle(order)
            inner = shuffle.sample(range(1, len(rows)), shuffle.randint(0, 5))
            cuts = sorted([0, len(rows), *inner])
        engine.begin_step()
        for a, b in zip(cuts, cuts[1:], strict=False):
            engine.accumulate([rows[i] for i in order[a:b]], loss, last=b == len(rows))
        grads = {n: p.grad.clone() for n, p in engine.parameters.items() if p.grad is not None}
        assert grads.keys() == engine.parameters.keys()
        reference = reference or grads
        for name, grad in grads.items():
            # fp64 sums; the norms of the model compute in fp32, per token and split-independent.
            error = (grad - reference[name]).norm() / reference[name].norm()
            assert error < 1e-6, f"split {trial}, {name}: {error}"


def test_the_gradient_is_not_divided_before_the_end():
    """Two calls with 3 and 9 rows: a mean per call would weigh them alike."""
    rows = make_rows()
    whole, parts = make_engine(), make_engine()
    expected = train(whole, rows)
    parts.begin_step()
    parts.accumulate(rows[:3], PolicyLoss(), last=False)
    parts.accumulate(rows[3:], PolicyLoss())
    result = parts.end_step()
    assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    assert result.loss == pytest.approx(expected.loss, rel=1e-5)


def test_same_inputs_give_bitwise_the_same_weights():
    results = []
    for _ in range(2):
        engine = make_engine(max_tokens_per_mb=60)
        train(engine, make_rows(), PolicyLoss(0.1), steps=4)
        results.append(weights_of(engine))
    for name, weight in results[0].items():
        assert torch.equal(weight, results[1][name]), name


def test_a_gradient_that_is_not_finite_skips_the_step_and_is_counted():
    engine, rows = make_engine(), make_rows()
    train(engine, rows)
    before = weights_of(engine)
    moments = copy.deepcopy(engine.state_dict()["optimizer"])
    broken = make_rows()
    broken[4].columns["advantages"][2:] = float("inf")
    result = train(engine, broken)
    assert result.skipped and "not finite" in result.reason
    assert engine.num_skipped == 1 and engine.num_steps == 2
    for name, weight in weights_of(engine).items():
        assert torch.equal(weight, before[name])
    for key, tensors in engine.state_dict()["optimizer"].items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, moments[key][name])
    assert not train(engine, rows).skipped
    assert engine.num_skipped == 1


def test_nothing_to_train_is_a_skipped_step_that_says_so():
    engine, rows = make_engine(), make_rows()
    before = weights_of(engine)
    for row in rows:
        row.columns["weights"].zero_()
        row.count = 0.0
    result = train(engine, rows)
    assert result.skipped and "nothing to train" in result.reason
    assert result.loss == 0 and result.grad_norm == 0
    engine.begin_step()
    engine.accumulate([], PolicyLoss())
    assert engine.end_step().skipped
    for name, weight in weights_of(engine).items():
        assert torch.equal(weight, before[name])


def test_a_step_begun_anew_forgets_the_abandoned_gradient():
    rows = make_rows()
    clean, dirty = make_engine(), make_engine()
    train(clean, rows)
    dirty.begin_step()
    dirty.accumulate(make_rows(seed=9), PolicyLoss(), last=False)
    train(dirty, rows)
    for name, weight in weights_of(clean).items():
        assert torch.equal(weight, weights_of(dirty)[name])


def test_the_order_of_calls_is_kept():
    engine, rows = make_engine(), make_rows(2)
    with pytest.raises(RunError, match="outside a step"):
        engine.accumulate(rows, PolicyLoss())
    engine.begin_step()
    engine.accumulate(rows, PolicyLoss(), last=False)
    with pytest.raises(RunError, match="before accumulate"):
        engine.end_step()
    engine.accumulate(rows, PolicyLoss())
    with pytest.raises(RunError, match="after the call with last=True"):
        engine.accumulate(rows, PolicyLoss())
    engine.end_step()
    with pytest.raises(RunError, match="outside a step"):
        engine.end_step()
    with pytest.raises(RunError, match="only scores"):
        make_engine(optimizer=None).begin_step()


def test_a_loss_that_ignores_the_model_is_refused():
    class Constant(PolicyLoss):
        def __call__(self, outputs, columns):
            return columns["weights"].sum(), {}

    engine = make_engine()
    engine.begin_step()
    with pytest.raises(RunError, match="Constant does not depend on"):
        engine.accumulate(make_rows(2), Constant())


def test_tags_are_used_and_left_again():
    engine, rows = make_engine(), make_rows()
    first = engine.forward(rows)
    engine.save_tag("ref")
    train(engine, rows, steps=3)
    trained = weights_of(engine)
    now, then = engine.forward(rows), engine.forward(rows, "ref")
    for a, b, c in zip(first, then, now, strict=True):
        assert torch.equal(a["logprobs"], b["logprobs"])
        assert len(a["logprobs"]) < 3 or not torch.equal(a["logprobs"], c["logprobs"])
    with pytest.raises(ZeroDivisionError), engine.use("ref"):
        raise ZeroDivisionError
    with engine.use("ref"):
        with pytest.raises(RunError, match="those of ref are used"), engine.use("ref"):
            pass
        for deed in (engine.begin_step, engine.state_dict, lambda: engine.save_tag("x")):
            with pytest.raises(RunError, match="those of ref are used"):
                deed()
    with pytest.raises(RunError, match="no weights were saved as teacher; there are actor, ref"):
        engine.forward(rows, "teacher")
    with pytest.raises(RunError, match="the tag actor is what is trained"):
        engine.save_tag("actor")
    for name, weight in weights_of(engine).items():
        assert torch.equal(weight, trained[name]), name


def test_scoring_a_tag_between_two_accumulates_leaves_the_gradient_alone():
    rows = make_rows()
    engines = [make_engine(), make_engine()]
    for engine, interrupts in zip(engines, (False, True), strict=True):
        engine.save_tag("ref")
        train(engine, rows)
        engine.begin_step()
        engine.accumulate(rows[:5], PolicyLoss(), last=False)
        if interrupts:
            engine.forward(rows, "ref")
        engine.accumulate(rows[5:], PolicyLoss())
        engine.end_step()
    for name, weight in weights_of(engines[0]).items():
        assert torch.equal(weight, weights_of(engines[1])[name])


def test_a_tag_can_hold_other_weights_than_ever_trained():
    engine, rows = make_engine(), make_rows()
    before = weights_of(engine)
    teacher = build_engine(CONFIG, EngineSettings(), init_from_scratch=True, seed=77)
    engine.load_tag("teacher", list(teacher.iter_weights()))
    for mine, theirs in zip(engine.forward(rows, "teacher"), teacher.forward(rows), strict=True):
        assert torch.equal(mine["logprobs"], theirs["logprobs"])
    for name, weight in weights_of(engine).items():
        assert torch.equal(weight, before[name])


def test_a_run_continues_from_its_state_bitwise():
    rows, loss = make_rows(), PolicyLoss()
    optimizer = OptimizerSettings(
        lr=1e-2, lr_scheduler_type="cosine", warmup_steps_proportion=0.5, total_steps=6
    )
    straight = make_engine(optimizer=optimizer)
    straight.save_tag("ref")
    train(straight, rows, loss, steps=3)
    state = copy.deepcopy(straight.state_dict())
    expected = train(straight, rows, loss, steps=3)

    resumed = build_engine(
        CONFIG, EngineSettings(optimizer=optimizer), init_from_scratch=True, seed=99
    )
    resumed.save_tag("stale")
    resumed.load_state_dict(state)
    assert resumed.num_steps == 3 and list(resumed.tags.copies) == ["ref"]
    assert train(resumed, rows, loss, steps=3) == expected
    for name, weight in weights_of(straight).items():
        assert torch.equal(weight, weights_of(resumed)[name])
    for a, b in zip(straight.forward(rows, "ref"), resumed.forward(rows, "ref"), strict=True):
        assert torch.equal(a["logprobs"], b["logprobs"])


def test_a_state_of_another_model_is_refused_before_anything_changes():
    engine = make_engine()
    before = weights_of(engine)
    state = copy.deepcopy(make_engine(lr=1.0).state_dict())
    state["model"]["norm.weight"] += 1
    del state["optimizer"]["exp_avg"]["norm.weight"]
    with pytest.raises(RunError, match=r"optimizer state \(exp_avg\).*norm.weight missing"):
        engine.load_state_dict(state)
    state["model"]["norm.weight"] = torch.zeros(5)
    with pytest.raises(RunError, match=r"norm.weight is \(5,\), not \(24,\)"):
        engine.load_state_dict(state)
    for name, weight in weights_of(engine).items():
        assert torch.equal(weight, before[name])


def test_a_critic_says_values_of_the_state_before_each_token_and_learns():
    critic, rows = make_engine(value_head=True, lr=3e-2), make_rows()
    outputs = critic.forward(rows)
    for row, output in zip(rows, outputs, strict=True):
        assert output.keys() == {"values"} and output["values"][0] == 0
        with torch.no_grad():
            hidden = critic.decoder(row.ids, torch.arange(len(row.ids)), causal_attend)
            values = critic.decoder.values(hidden)
        torch.testing.assert_close(output["values"][1:], values[:-1], rtol=1e-4, atol=1e-4)
    first = train(critic, rows, ValueLoss())
    last = train(critic, rows, ValueLoss(), steps=60)
    assert last.loss < 0.5 * first.loss
    critic.begin_step()
    assert critic.accumulate(rows, ValueLoss()).outputs[0].keys() == {"values"}


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


def test_entropy_moves_the_gradient_only_where_the_loss_asks():
    rows = make_rows()
    grads = []
    for coef, needs in ((0.0, False), (0.3, False), (0.3, True)):
        engine, loss = make_engine(), PolicyLoss(coef)
        loss.needs_entropy = needs
        engine.begin_step()
        engine.accumulate(rows, loss)
        grads.append(engine.parameters["norm.weight"].grad.clone())
    assert torch.equal(grads[0], grads[1])
    assert not torch.allclose(grads[0], grads[2], rtol=1e-2)


def test_weights_leave_under_their_hf_names_and_load_in_transformers(tmp_path):
    import transformers

    engine, rows = make_engine(), make_rows()
    train(engine, rows)
    engine.save_hf(str(tmp_path / "out"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    names = dict(engine.iter_weights())
    assert names.keys() == {n for n, _ in theirs.named_parameters()}
    ids = rows[0].ids
    with torch.no_grad():
        logp = torch.log_softmax(theirs(ids[None]).logits[0], -1)
    expected = logp[:-1].gather(1, ids[1:, None])[:, 0]
    mine = engine.forward(rows[:1])[0]["logprobs"][1:]
    torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4)
    half = make_engine(publish_dtype="bfloat16")
    assert {w.dtype for _, w in half.iter_weights()} == {torch.bfloat16}


@pytest.fixture
def no_process_group():
    """Mixed precision makes a process group of one; leave none behind."""
    assert not dist.is_initialized()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_masters_are_cast_for_compute_and_stepped_in_full(no_process_group, tmp_path):
    """The path of a GPU (fp32 masters, bf16 compute) with fp64 masters and fp32 compute."""
    rows = make_rows()
    plain = make_engine(max_tokens_per_mb=60)
    mixed = make_engine(param_dtype="float64", max_tokens_per_mb=60)
    assert mixed.settings.is_mixed
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
    state = copy.deepcopy(mixed.state_dict())
    before = weights_of(mixed)
    train(mixed, rows)
    mixed.load_state_dict(state)
    for name, weight in weights_of(mixed).items():
        assert torch.equal(weight, before[name])
    for a, b in zip(mixed.forward(rows, "ref"), make_engine().forward(rows), strict=True):
        torch.testing.assert_close(a["logprobs"], b["logprobs"], rtol=1e-4, atol=1e-4)
    mixed.save_hf(str(tmp_path / "out"))


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
    exact, rough = make_engine(), make_engine(compute_dtype="bfloat16")
    for a, b in zip(exact.forward(rows), rough.forward(rows), strict=True):
        # bf16 keeps 8 bits; log-probs of this model reach -20.
        assert (a["logprobs"] - b["logprobs"]).abs().max() < 0.5
    one, two = train(exact, rows), train(rough, rows)
    assert two.loss == pytest.approx(one.loss, rel=0.05)
    assert two.grad_norm == pytest.approx(one.grad_norm, rel=0.1)
    assert {p.dtype for p in rough.parameters.values()} == {torch.float32}


def test_deterministic_mode_is_torchs_own_refusal():
    try:
        engine = make_engine(deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert not train(engine, make_rows()).skipped
    finally:
        torch.use_deterministic_algorithms(False)


def test_compiled_blocks_share_one_graph_over_layers_and_lengths(monkeypatch):
    """Recompiling per layer or length would hit dynamo's limit and fall back in silence."""
    import torch._dynamo
    from torch._dynamo.backends.debugging import aot_eager

    graphs: list[object] = []

    def backend(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    compile_ = torch.compile
    # The default backend needs a GPU to be worth its minutes; the graphs are the same.
    monkeypatch.setattr(
        torch, "compile", lambda f, **kw: compile_(f, backend=backend, fullgraph=True, **kw)
    )
    torch._dynamo.reset()
    eager, compiled = make_engine().decoder, make_engine().decoder
    for i, block in enumerate(compiled.layers.values()):
        apply_to_block(block, i, EngineSettings(compile=True), torch.device("cuda"))
    for length in (9, 20):
        ids = torch.arange(length)
        for model in (eager, compiled):
            model(ids, ids, causal_attend).square().sum().backward()
    assert len(graphs) == 1
    for mine, true in zip(compiled.parameters(), eager.parameters(), strict=True):
        assert mine.grad is not None and torch.equal(mine.grad, true.grad)
