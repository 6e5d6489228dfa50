"""Routes of a mixture: recorded, replayed, and refused where they do not fit."""

import pytest
import torch
from engine_toys import CONFIG, PolicyLoss, make_engine, make_rows, train, weights_of

from pentad.core.errors import RunError

MOE = CONFIG | {
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "mlp_only_layers": [1],
}


def test_own_routes_replayed_change_nothing_and_the_router_still_learns():
    rows = make_rows()
    free, bound = make_engine(config=MOE), make_engine(config=MOE)
    result = train(free, rows, PolicyLoss(0.1))
    for row, routes in zip(rows, bound.routes(rows), strict=True):
        assert routes.shape == (len(row.ids), 2, 2)
        row.routes = routes
    assert train(bound, rows, PolicyLoss(0.1)) == result
    for name, weight in weights_of(free).items():
        assert torch.equal(weight, weights_of(bound)[name]), name
    start = weights_of(make_engine(config=MOE))
    name = "layers.0.ffn.router.weight"
    assert not torch.equal(weights_of(bound)[name], start[name])


def test_routes_do_not_depend_on_microbatches():
    rows = make_rows()
    whole = make_engine(config=MOE).routes(rows)
    parts = make_engine(config=MOE, max_tokens_per_mb=40).routes(rows)
    for a, b in zip(whole, parts, strict=True):
        assert torch.equal(a.sort(-1).values, b.sort(-1).values)


def test_other_routes_are_followed():
    engine, rows = make_engine(config=MOE), make_rows()
    own = engine.forward(rows)
    for row, routes in zip(rows, engine.routes(rows), strict=True):
        row.routes = (routes + 1) % 6
    other = engine.forward(rows)
    changes = [(a["logprobs"] - b["logprobs"]).abs().max() for a, b in zip(own, other, strict=True)]
    assert max(changes) > 0.1
    for row, routes in zip(rows, engine.routes(rows), strict=True):
        assert torch.equal(routes, row.routes), "rows that say their routes are given them back"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda rows: setattr(rows[3], "routes", None), "row 3 has no routes, but 11 of 12"),
        (lambda rows: rows[2].routes.add_(5), "row 2: routes name expert"),
        (lambda rows: rows[2].routes.zero_(), "row 2: routes give a token the same expert twice"),
        (
            lambda rows: setattr(rows[1], "routes", rows[1].routes[:, :1]),
            "row 1: routes are torch.int64",
        ),
    ],
    ids=["missing", "unknown", "twice", "shape"],
)
def test_routes_that_do_not_fit_are_refused_by_row(spoil, message):
    engine, rows = make_engine(config=MOE), make_rows()
    for row, routes in zip(rows, engine.routes(rows), strict=True):
        row.routes = routes.clone()
    spoil(rows)
    with pytest.raises(RunError, match=message):
        engine.forward(rows)
    with pytest.raises(RunError, match="no mixture layer"):
        make_engine().routes(rows)
