"""What a model class of transformers makes of its head's product on the way to logits.

Families scale or cap their logits, each by a config key of its own. Instead of a list of keys the
class itself is asked: its forward is run with stand-ins for body and head, and what comes out is
compared with what the head gave.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from pentad.core.errors import Problem, UserError

TOLERANCE = 1e-6
"""Some classes compute their logits in float32."""
FAR = 1e6
"""Where a cap is reached, to the last digit."""
NEAR = 0.5


@dataclass(frozen=True, slots=True)
class LogitRule:
    """logits = bend(scale * (hidden @ weight^T)), with bend(x) = cap * tanh(x / cap)."""

    scale: float = 1.0
    cap: float | None = None

    def apply(self, x: Tensor) -> Tensor:
        x = x * self.scale
        return x if self.cap is None else self.cap * torch.tanh(x / self.cap)


class _Output(MoeModelOutputWithPast):
    """Of what a body gives besides hidden states it has nothing."""

    def __getattr__(self, name: str) -> None:
        return None


class _Body(nn.Module):
    """Gives the hidden states it was made with."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden

    def forward(self, *args: object, **kwargs: object) -> MoeModelOutputWithPast:
        return _Output(last_hidden_state=self.hidden)


class _Head(nn.Module):
    """Passes on what it is given."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden


def read_logit_rule(causal: PreTrainedModel, where: str) -> LogitRule:
    """The rule of a class, with the numbers of its config; UserError where it has another form."""
    head = causal.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        rule = "its head has a bias or is no linear layer, which the fused log-probs cannot take"
        raise UserError(Problem(where, rule))
    given = torch.tensor([*range(-60, 61), NEAR, FAR], dtype=torch.float64, device="cpu")
    try:
        with _stand_ins(causal, _Body(given.view(1, 1, -1)), _Head()), torch.no_grad():
            ids = torch.zeros(1, 1, dtype=torch.int64, device="cpu")
            logits = causal(input_ids=ids, use_cache=False).logits.double().flatten()
    except Exception as error:  # layers between body and head fail in ways of their own
        rule = f"its forward is no body and head one after the other ({error})"
        raise UserError(Problem(where, rule)) from error
    for found in _candidates(logits):
        if torch.allclose(found.apply(given), logits, rtol=TOLERANCE, atol=TOLERANCE):
            return found
    rule = "its logits are neither scaled nor capped in a known way: log-probs would be others"
    raise UserError(Problem(where, rule))


def _candidates(logits: Tensor) -> Iterator[LogitRule]:
    near, far = float(logits[-2]), float(logits[-1])
    yield LogitRule(scale=round(far / FAR, 9))
    if far > near > 0:
        slope = float(torch.atanh(logits[-2] / far)) * far / NEAR
        yield LogitRule(scale=round(slope, 6), cap=far)


@contextmanager
def _stand_ins(causal: PreTrainedModel, body: nn.Module, head: nn.Module) -> Iterator[None]:
    prefix = causal.base_model_prefix
    real = causal.get_submodule(prefix), causal.get_output_embeddings()
    setattr(causal, prefix, body)
    causal.set_output_embeddings(head)
    try:
        yield
    finally:
        setattr(causal, prefix, real[0])
        causal.set_output_embeddings(real[1])
