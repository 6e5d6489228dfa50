"""Defects of the systems this package follows, each held off by a test that bears its name.

Others have theirs elsewhere: a gradient norm that context parallelism splits or that loses experts,
and routers that drift apart over tensor parallelism (tests/dist/test_ranks.py, test_parity.py);
state of several model parts on a rank (tests/dist/test_pipeline_state.py); master weights in 16 bit
(test_engine_wrap.py); a deterministic mode that only warns (test_explain.py); balance that nothing
updates (test_engine_balance.py, tests/dist/test_balance.py); routes that nobody replays
(test_engine_routes.py).
"""

import torch
from closeness import assert_close
from engine_toys import ValueLoss, make_engine, make_rows, train
from sections import engine_settings

from pentad.checkpoint.exports import export_model
from pentad.engine.engine import build_engine
from pentad.engine.section import OptimizerConfig


def test_a_critics_head_is_initialised_saved_and_loaded(tmp_path):
    """Elsewhere it was in no weight map: uninitialised memory, neither exported nor restored."""
    rows = make_rows()
    critic, twin = make_engine(value_head=True), make_engine(value_head=True)
    head = critic.parameters["value_head.weight"]
    assert torch.equal(head, twin.parameters["value_head.weight"]), "drawn from the seed"
    assert head.isfinite().all() and head.abs().max() > 0
    start = head.detach().clone()
    train(critic, rows, ValueLoss(), steps=3)
    assert not torch.equal(head, start)
    assert any("score" in name or "value" in name for name, _ in critic.iter_weights())
    export_model(critic, str(tmp_path / "critic"))
    again = build_engine(str(tmp_path / "critic"), engine_settings(), value_head=True, seed=77)
    for a, b in zip(again.forward(rows), critic.forward(rows), strict=True):
        assert_close(a["values"], b["values"])


def test_the_schedule_and_the_random_numbers_continue_where_they_were():
    """Elsewhere a recovered run warmed up once more, under another stream of random numbers."""
    keys = {"lr_scheduler_type": "cosine", "warmup_steps_proportion": 0.3}
    given = {"optimizer": OptimizerConfig(lr=1e-2, **keys), "total_steps": 10}
    rows, engine = make_rows(), make_engine(**given)
    for _ in range(5):
        train(engine, rows)
    state = {name: tensor.clone() for name, tensor in engine.state_tensors().items()}
    counters = engine.state_counters()
    drawn = torch.rand(3)
    rates = [train(engine, rows).lr for _ in range(4)]
    other = make_engine(**given)
    torch.manual_seed(99)
    other.begin_restore(counters)
    for name, tensor in other.state_tensors().items():
        tensor.copy_(state[name])
    other.end_restore(counters)
    assert torch.equal(torch.rand(3), drawn)
    assert [train(other, rows).lr for _ in range(4)] == rates
    assert rates == sorted(rates, reverse=True), "past the warm-up"
    for name, tensor in engine.masters.items():
        assert torch.equal(tensor, other.masters[name]), name
