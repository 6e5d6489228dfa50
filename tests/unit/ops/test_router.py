"""The router: choices exact, weights and gradients against fp64, kernels against the reference.

Kernels run on a GPU, or interpreted where there is none (`tests/conftest.py`).
"""

import os

import pytest
import torch
from tables import table

from pentad.ops import router
from pentad.ops.router import (
    HAS_TRITON,
    RouteRule,
    add_loss,
    balance_loss,
    expert_load,
    fused_route,
    gate_logits,
    reference_route,
    route,
    split_wide,
    z_loss,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_kernels = pytest.mark.skipif(
    not (HAS_TRITON and (DEVICE == "cuda" or IS_INTERPRETED)),
    reason="needs Triton, and a GPU or TRITON_INTERPRET=1",
)
RULES = [
    RouteRule(3, score, renormalise, scale)
    for score in ("softmax", "sigmoid")
    for renormalise in (True, False)
    for scale in (1.0, 2.5)
]
IMPLEMENTATIONS = [reference_route, pytest.param(fused_route, marks=needs_kernels)]
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}  # what is promised against fp64


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


def make_logits(num_tokens=9, num_experts=13, spread=4.0):
    return (spread * torch.randn(num_tokens, num_experts, device=DEVICE)).requires_grad_()


def plain(logits, rule, bias, chosen, is_given):
    """The definition, token by token; asserts that nothing larger was left out."""
    rows = []
    for row, picks in zip(logits, chosen.tolist(), strict=True):
        e = row.exp()
        score = e / e.sum() if rule.score == "softmax" else e / (1 + e)
        key = (row if bias is None else score + bias).tolist()
        rest = [key[i] for i in range(len(row)) if i not in picks]
        assert is_given or min(key[i] for i in picks) >= max(rest) - 1e-9
        weight = torch.stack([score[i] for i in picks])
        rows.append(rule.scale * (weight / weight.sum() if rule.renormalise else weight))
    return torch.stack(rows)


@pytest.mark.parametrize("routed", IMPLEMENTATIONS)
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("is_given", [False, True], ids=["chosen", "given"])
def test_choices_weights_and_gradients_equal_the_definition_in_fp64(
    routed, rule, has_bias, is_given
):
    logits = make_logits()
    bias = 0.3 * torch.randn(13, device=DEVICE) if has_bias else None
    given = None
    if is_given:
        given = torch.stack([torch.randperm(13)[:3] for _ in range(9)]).to(DEVICE)
    weights, chosen = routed(logits, rule, bias, given)
    if is_given:
        assert torch.equal(chosen, given)
    exact = logits.detach().double().requires_grad_()
    wide_bias = None if bias is None else bias.double()
    wanted = plain(exact, rule, wide_bias, chosen, is_given)
    torch.testing.assert_close(weights.double(), wanted, **TOLERANCE)
    direction = torch.randn_like(weights)
    (mine,) = torch.autograd.grad(weights, logits, direction)
    (theirs,) = torch.autograd.grad(wanted, exact, direction.double())
    assert theirs.abs().max() > 1e-3
    torch.testing.assert_close(mine.double(), theirs, **TOLERANCE)


@pytest.mark.parametrize("routed", IMPLEMENTATIONS)
def test_the_largest_comes_first_and_of_equal_ones_the_lower_index(routed):
    logits = torch.tensor(
        [
            [1.0, 3.0, 3.0, 2.0, 3.0],
            [0.0, -0.0, 0.0, -0.0, 0.0],
            [-9.0, -9.0, -8.0, -9.0, -9.0],
            [200.0, 100.0, 150.0, -200.0, 0.0],  # scores below underflow, logits do not
        ],
        device=DEVICE,
    )
    _, chosen = routed(logits, RouteRule(4))
    assert chosen.tolist() == [[1, 2, 4, 3], [0, 1, 2, 3], [2, 0, 1, 3], [0, 2, 1, 4]]
    assert chosen.dtype == torch.int64


@pytest.mark.parametrize("routed", IMPLEMENTATIONS)
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_bias_decides_the_choice_and_is_not_weighed(routed, score):
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]], device=DEVICE)
    bias = torch.tensor([-5.0, 0.0, 0.0, 5.0], device=DEVICE)
    weights, chosen = routed(logits, RouteRule(2, score, renormalise=False), bias)
    assert chosen.tolist() == [[3, 1]]
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    torch.testing.assert_close(weights, scores[:, [3, 1]])


@pytest.mark.parametrize("routed", IMPLEMENTATIONS)
@pytest.mark.parametrize("bad", [float("nan"), -float("nan")])
def test_what_is_not_a_number_shows_in_the_weights_and_stays_in_range(routed, bad):
    logits = make_logits(4, 5).detach()
    logits[1, 2] = bad
    logits[2] = bad
    weights, chosen = routed(logits, RouteRule(2, renormalise=True))
    assert weights[1].isnan().any() and weights[2].isnan().all()
    assert not weights[[0, 3]].isnan().any()
    assert int(chosen.min()) >= 0 and int(chosen.max()) < 5
    assert all(len(set(row)) == 2 for row in chosen.tolist())


@needs_kernels
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "num_chosen"),
    [(33, 128, 8), (5, 60, 4), (7, 8, 8), (3, 4, 1), (17, 512, 10), (2, 2048, 8), (0, 16, 2)],
)
def test_kernels_choose_what_the_reference_chooses_at_every_size(
    num_tokens, num_experts, num_chosen
):
    logits = make_logits(num_tokens, num_experts)
    # Coarse values, so that ties are common.
    logits.data.mul_(4).round_().div_(4)
    rule = RouteRule(num_chosen)
    ours, wanted = fused_route(logits, rule), reference_route(logits, rule)
    assert torch.equal(ours[1], wanted[1])
    torch.testing.assert_close(ours[0], wanted[0])
    direction = torch.randn_like(ours[0])
    (mine,), (theirs,) = (torch.autograd.grad(w, logits, direction) for w, _ in (ours, wanted))
    torch.testing.assert_close(mine, theirs)


TRUSTED = [(rule, is_given) for is_given in (False, True) for rule in RULES[::2]]
"""Rules of scale 1, each with its own choice and with a given one."""


@needs_kernels
@pytest.mark.parametrize(
    ("rule", "is_given"),
    table(TRUSTED, [(r, g) for r, g in TRUSTED if (r.score == "softmax") ^ r.renormalise ^ g]),
    ids=str,
)
def test_the_kernels_are_operators_that_compilation_can_trust(rule, is_given):
    logits = make_logits()
    given = torch.stack([torch.randperm(13)[:3] for _ in range(9)]).to(DEVICE)
    arguments = (logits, None, given if is_given else None, 3, rule.score == "softmax",
                 rule.renormalise, rule.scale)  # fmt: skip
    torch.library.opcheck(torch.ops.pentad.route.default, arguments)

    def loss(x, chosen):
        return fused_route(x, rule, None, chosen)[0].square().sum()

    torch._dynamo.reset()  # each rule is a graph of its own
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=True)
    for num_tokens in (9, 7):
        x = logits.detach()[:num_tokens].clone().requires_grad_()
        chosen = given[:num_tokens] if is_given else None
        wanted, found = loss(x, chosen), compiled(x, chosen)
        assert torch.equal(wanted, found)
        a, b = (torch.autograd.grad(y, x)[0] for y in (wanted, found))
        assert torch.equal(a, b)


def test_without_a_gpu_the_reference_runs(monkeypatch):
    def refuse(*args):
        raise AssertionError("the kernel was called")

    monkeypatch.setattr(router, "fused_route", refuse)
    logits = torch.randn(4, 6)
    ours, wanted = route(logits, RouteRule(2)), reference_route(logits, RouteRule(2))
    assert all(torch.equal(a, b) for a, b in zip(ours, wanted, strict=True))


def test_following_its_own_choice_changes_nothing():
    logits = make_logits()
    first, chosen = route(logits, RouteRule(3))
    second, again = route(logits, RouteRule(3), chosen_Tk=chosen)
    assert torch.equal(first, second) and torch.equal(chosen, again)
    direction = torch.randn_like(first)
    a, b = (torch.autograd.grad(w, logits, direction)[0] for w in (first, second))
    assert torch.equal(a, b) and a.abs().max() > 0


def test_gate_logits_are_not_rounded_to_the_dtype_of_their_inputs():
    x = torch.randn(5, 64, dtype=torch.bfloat16, device=DEVICE)
    weight = torch.randn(7, 64, dtype=torch.bfloat16, device=DEVICE)
    logits = gate_logits(x, weight)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), x.double() @ weight.double().T, **TOLERANCE)
    assert gate_logits(x.double(), weight).dtype == torch.float64


@pytest.mark.skipif(DEVICE == "cpu", reason="the product that keeps fp32 is CUDA's")
def test_gate_gradients_on_the_device_keep_sixteen_bits():
    x = torch.randn(256, 64, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    weight = torch.randn(16, 64, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    direction = torch.randn(256, 16, device=DEVICE)
    mine = torch.autograd.grad(gate_logits(x, weight), (x, weight), direction)
    wide = direction.double()
    wanted = (wide @ weight.double(), wide.T @ x.double())
    for a, b in zip(mine, wanted, strict=True):  # rounded once, to 8 bits
        assert (a.double() - b).abs().max() <= 2.0**-8 * b.abs().max()


def test_a_gradient_split_in_two_parts_keeps_sixteen_bits():
    x = torch.randn(50, 20)
    high, low = split_wide(x, torch.bfloat16).double().chunk(2, dim=-1)
    assert ((high - x).abs() / x.abs()).max() > 1e-3
    assert ((high + low - x).abs() / x.abs()).max() < 2.0**-16


def test_load_counts_every_pair_once():
    chosen = torch.tensor([[0, 3], [3, 1], [3, 0]])
    assert expert_load(chosen, 5).tolist() == [2, 1, 0, 3, 0]


def test_balance_loss_is_one_when_balanced_and_grows_with_imbalance():
    rule = RouteRule(1)
    eye = torch.eye(4) * 30
    balanced = balance_loss(eye, torch.arange(4)[:, None], rule)
    torch.testing.assert_close(balanced, torch.tensor(1.0))
    one = balance_loss(eye[:1].expand(4, 4), torch.zeros(4, 1, dtype=torch.int64), rule)
    torch.testing.assert_close(one, torch.tensor(4.0))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_gradient_of_the_balance_loss_moves_tokens_off_the_busiest_expert(score):
    logits = make_logits(40, 6)
    rule = RouteRule(2, score)
    logits.data[:, 1] += 5
    _, chosen = route(logits, rule)
    (gradient,) = torch.autograd.grad(balance_loss(logits, chosen, rule), logits)
    per_expert = gradient.sum(0)
    assert int(per_expert.argmax()) == 1 and per_expert[1] > 0
    wide = logits.detach().double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: balance_loss(x, chosen, rule), wide)


def test_z_loss_is_the_mean_square_of_the_log_partition():
    logits = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    log2 = torch.log(torch.tensor(2.0))
    torch.testing.assert_close(z_loss(logits), (log2**2 + (1 + log2) ** 2) / 2)


def test_an_added_loss_reaches_the_gradient_and_leaves_the_value():
    x = torch.randn(3, requires_grad=True)
    y = torch.randn(3, requires_grad=True)
    out = add_loss(x, 0.5 * y.square().sum())
    assert torch.equal(out, x)
    gx, gy = torch.autograd.grad(out, (x, y), torch.tensor([1.0, 2.0, 3.0]))
    assert gx.tolist() == [1, 2, 3]
    torch.testing.assert_close(gy, y.detach())
