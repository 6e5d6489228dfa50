"""A tiny model, rows and losses for the tests of the engine."""

from typing import Any

import torch
from sections import engine_settings
from torch import Tensor

from pentad.core.types import Row, TokenOutputs
from pentad.engine.engine import Engine, build_engine
from pentad.engine.section import OptimizerConfig
from pentad.models.decoder import causal_attend
from pentad.parallel.cuts import local

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


def group_rows(sizes=(5, 3, 1, 4), prompt: int = 80, seed: int = 0) -> list[Row]:
    """Groups of so many rows that begin with `prompt` common tokens; weights on answers, and a few
    on prompts, whose gradients add up over the rows."""
    gen = torch.Generator().manual_seed(seed)
    rows = []
    for gid, size in enumerate(sizes):
        begin = torch.randint(0, VOCAB, (prompt + gid,), generator=gen)
        for _ in range(size):
            length = int(torch.randint(1, 20, (), generator=gen))
            ids = torch.cat((begin, torch.randint(0, VOCAB, (length,), generator=gen)))
            weights = torch.ones(len(ids))
            weights[: len(begin) - 2] = 0
            advantages = torch.randn(len(ids), generator=gen)
            columns = {"weights": weights, "advantages": advantages, "returns": advantages * 2}
            rows.append(Row(ids, columns, float(weights.sum()), group=gid))
    return rows


def make_engine(value_head: bool = False, lr: float = 1e-2, config=None, **settings) -> Engine:
    optimizer = OptimizerConfig(lr=lr, weight_decay=1.0, gradient_clipping=0.5)
    settings.setdefault("optimizer", optimizer)
    return build_engine(
        config or CONFIG,
        engine_settings(**settings),
        init_from_scratch=True,
        seed=3,
        value_head=value_head,
    )


def state_of(engine: Engine, prefix: str = "model.") -> dict[str, Tensor]:
    """A part of the engine's state by the names behind the prefix."""
    state = engine.state_tensors()
    return {n.removeprefix(prefix): tensor for n, tensor in state.items() if n.startswith(prefix)}


def keep_state(engine: Engine) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A copy of this rank's part of everything that training continues from."""
    tensors = {name: local(tensor).clone() for name, tensor in engine.state_tensors().items()}
    return tensors, engine.state_counters()


def bring_back(engine: Engine, kept: tuple[dict[str, Tensor], dict[str, Any]]) -> None:
    tensors, counters = kept
    engine.begin_restore(counters)
    for name, tensor in engine.state_tensors().items():
        local(tensor).copy_(tensors[name])
    engine.end_restore(counters)


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
