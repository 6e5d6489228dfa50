"""The engine: right log-probs, a gradient that ignores how rows are split, honest steps."""

import math
import random

import pytest
import torch
from engine_toys import (
    CONFIG,
    PolicyLoss,
    SequenceLoss,
    ValueLoss,
    make_engine,
    make_rows,
    plain_outputs,
    train,
    weights_of,
)
from torch import Tensor

from pentad.core.errors import RunError
from pentad.engine import engine as engine_module
from pentad.models.decoder import causal_attend

BIASED = CONFIG | {"model_type": "llama", "attention_bias": True, "mlp_bias": True}


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
@pytest.mark.parametrize("config", [CONFIG, BIASED], ids=["plain", "biases"])
def test_a_step_is_clipped_adamw_on_the_mean_loss(entropy_coef, config):
    engine, rows = make_engine(config=config, max_tokens_per_mb=50), make_rows()
    twin = make_engine(config=config)
    with torch.no_grad():  # biases begin at zero, where decay would not show
        for name in [name for name in twin.parameters if name.endswith("bias")]:
            engine.parameters[name].fill_(0.5)
            twin.parameters[name].fill_(0.5)
    loss = torch.zeros(())
    for row in rows:
        logprobs, entropy = plain_outputs(twin, row.ids)
        terms = row.columns["advantages"] * logprobs + entropy_coef * entropy
        loss = loss - (row.columns["weights"] * terms).sum()
    (loss / sum(row.count for row in rows)).backward()
    norm = torch.nn.utils.clip_grad_norm_(twin.decoder.parameters(), 0.5)
    kept = ("embed.weight", "norm.weight", "bias")
    matrices = [p for n, p in twin.parameters.items() if not n.endswith(kept)]
    others = [p for n, p in twin.parameters.items() if n.endswith(kept)]
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), weight_decay=1.0).step()

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
def test_ten_random_splits_give_one_gradient(loss):
    rows = make_rows(16)
    shuffle = random.Random(1)
    reference: dict[str, Tensor] = {}
    for trial in range(11):
        budget = None if trial == 0 else shuffle.choice([None, 30, 60, 200])
        engine = make_engine(
            param_dtype="float64",
            dtype="float64",
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
    moments = {n: t.clone() for n, t in engine.state_tensors().items() if n.startswith("optimizer")}
    assert moments
    broken = make_rows()
    broken[4].columns["advantages"][2:] = float("inf")
    result = train(engine, broken)
    assert result.skipped and "not finite" in result.reason
    assert engine.num_skipped == 1 and engine.num_steps == 2
    for name, weight in weights_of(engine).items():
        assert torch.equal(weight, before[name])
    for name, moment in moments.items():
        assert torch.equal(engine.state_tensors()[name], moment), name
    assert not train(engine, rows).skipped
    assert engine.num_skipped == 1


def test_a_loss_that_is_not_finite_is_a_skipped_step_even_if_its_gradient_is():
    class Shifted(PolicyLoss):
        def __call__(self, outputs, columns):
            loss, stats = super().__call__(outputs, columns)
            return loss + math.nan * loss.detach(), stats

    engine = make_engine()
    before = weights_of(engine)
    engine.begin_step()
    engine.accumulate(make_rows(), Shifted())
    result = engine.end_step()
    assert result.skipped and "the loss is not finite" in result.reason
    assert math.isfinite(result.grad_norm)
    assert all(torch.equal(x, before[name]) for name, x in weights_of(engine).items())


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
        make_engine(total_steps=None).begin_step()


def test_a_loss_that_ignores_the_model_is_refused():
    class Constant(PolicyLoss):
        def __call__(self, outputs, columns):
            return columns["weights"].sum(), {}

    engine = make_engine()
    engine.begin_step()
    with pytest.raises(RunError, match="Constant does not depend on"):
        engine.accumulate(make_rows(2), Constant())


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


def test_a_step_whose_last_sums_failed_cannot_be_ended(monkeypatch):
    engine, rows = make_engine(), make_rows()
    before = {name: tensor.clone() for name, tensor in weights_of(engine).items()}
    engine.begin_step()
    engine.accumulate(rows[:2], PolicyLoss(), last=False)

    def fail(*_):
        raise RuntimeError("the device is lost")

    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="lost"):
        patched.setattr(engine_module, "add_up", fail)
        engine.accumulate(rows[2:], PolicyLoss())
    with pytest.raises(RunError, match="before accumulate"):
        engine.end_step()
    assert all(torch.equal(tensor, before[n]) for n, tensor in weights_of(engine).items())
