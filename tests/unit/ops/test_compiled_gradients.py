"""Functions with a backward of their own keep it when they are compiled.

torch 2.11 loses it where a forward ends in an operation that gives back its own input, in place or
with nothing to do: the result is right and has no gradient.
"""

import pytest
import torch
import torch._dynamo
from torch import Tensor

from pentad.ops.attention import PaddedAttend
from pentad.ops.experts import grouped_linear, sort_pairs, sum_rows, take_rows, take_weights
from pentad.ops.gated import weighted_silu_mul
from pentad.ops.router import RouteRule, add_loss, balance_loss, route

ENDS_E = torch.tensor([3, 3, 10], dtype=torch.int32)
CHOSEN_TK = torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1], [2, 0]])


def draw(*shape: int) -> Tensor:
    seed = torch.Generator().manual_seed(len(shape) + shape[-1])
    return torch.randn(*shape, generator=seed).requires_grad_()


def padded(q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
    return PADDED(0, q_THd, k_TKd, v_TKd)


def experts(x_ND: Tensor, gate_up_E2MD: Tensor, down_EDM: Tensor, weights_N: Tensor) -> Tensor:
    h_NG = grouped_linear(x_ND, gate_up_E2MD.flatten(1, 2), ENDS_E)
    return grouped_linear(weighted_silu_mul(h_NG, weights_N), down_EDM, ENDS_E)


def there_and_back(x_TD: Tensor, weights_Tk: Tensor) -> Tensor:
    pairs = sort_pairs(CHOSEN_TK, 3)
    return sum_rows(take_rows(x_TD, pairs) * take_weights(weights_Tk, pairs)[:, None], pairs)


def balanced(logits_TE: Tensor) -> Tensor:
    rule = RouteRule(2)
    weights_Tk, chosen_Tk = route(logits_TE, rule)
    return add_loss(weights_Tk, balance_loss(logits_TE, chosen_Tk, rule))


PADDED = PaddedAttend([3, 5, 2], device=torch.device("cpu"))
CASES = {
    "padded attention": (padded, draw(10, 4, 6), draw(10, 2, 6), draw(10, 2, 6)),
    "experts": (experts, draw(10, 8), draw(3, 2, 5, 8), draw(3, 8, 5), draw(10)),
    "pairs": (there_and_back, draw(5, 8), draw(5, 2)),
    "a router's own loss": (balanced, draw(6, 4)),
}


def test_attention_with_a_window_is_one_graph_at_any_length():
    torch._dynamo.reset()

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return PADDED._attend_bucket(*(x.transpose(0, 1)[None] for x in (q, k, v)), 8, None, None)

    compiled = torch.compile(run, backend="eager", fullgraph=True, dynamic=True)
    for length in (7, 9, 33):
        qkv = (draw(length, 4, 6), draw(length, 2, 6), draw(length, 2, 6))
        torch.testing.assert_close(compiled(*qkv), run(*qkv))


@pytest.mark.parametrize("name", CASES)
def test_compiled_gradients_are_those_of_plain_code(name):
    run, *inputs = CASES[name]
    torch._dynamo.reset()
    true = torch.autograd.grad(run(*inputs).square().sum(), inputs)
    mine = torch.autograd.grad(torch.compile(run, backend="eager")(*inputs).square().sum(), inputs)
    for a, b in zip(mine, true, strict=True):
        assert b.norm() > 0
        torch.testing.assert_close(a, b)
