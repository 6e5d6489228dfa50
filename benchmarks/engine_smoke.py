"""The engine on one GPU: bf16 against fp32, kernels against references; no times (`pentad bench`).

    python benchmarks/engine_smoke.py

Needs torch, numpy, safetensors and transformers. Exits 1 when a check fails. On a CPU it runs the
same code at toy size, which proves the script and nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from pentad.core.types import Row, TokenOutputs  # noqa: E402
from pentad.engine.engine import Engine, build_engine  # noqa: E402
from pentad.engine.section import EngineSettings, ModelConfig  # noqa: E402
from pentad.ops.attention import PaddedAttend, build_attend, reference_attention  # noqa: E402
from pentad.ops.experts import (  # noqa: E402
    grouped_linear,
    reference_mixture,
    sort_pairs,
    sum_rows,
    take_rows,
    take_weights,
)
from pentad.ops.gated import weighted_silu_mul  # noqa: E402
from pentad.ops.logprob import reference_logprobs, token_logprobs  # noqa: E402
from pentad_tools.bench.bench_train import QWEN3_0_6B  # noqa: E402

TOY = QWEN3_0_6B | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "head_dim": 16,
}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IS_GPU = DEVICE.type == "cuda"


class MeanNll:
    """-sum(weights * log p)."""

    needs_entropy = False
    columns = ("weights",)

    def __call__(
        self, outputs: TokenOutputs, columns: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return -(columns["weights"] * outputs.logprobs_T).sum(), {}


def make_rows(lengths: list[int], vocab_size: int, seed: int = 0) -> list[Row]:
    gen = torch.Generator().manual_seed(seed)
    rows = []
    for length in lengths:
        ids = torch.randint(0, vocab_size, (length,), generator=gen)
        weights = torch.ones(length)
        weights[0] = 0
        rows.append(Row(ids, {"weights": weights}, float(length - 1)))
    return rows


def make_engine(config: dict[str, Any], **keys: Any) -> Engine:
    archon = {"ac_mode": "none", "enable_compile": False, "reshard_after_forward_policy": "always"}
    keys = {
        "dtype": "bfloat16",
        "optimizer": {"lr": 1e-5},
        **keys,
        "archon": archon | keys.get("archon", {}),
    }
    settings = EngineSettings(model=ModelConfig.model_validate(keys), total_steps=1)
    return build_engine(config, settings, device=DEVICE, init_from_scratch=True, seed=1)


def train_step(engine: Engine, rows: list[Row]) -> tuple[float, float]:
    engine.begin_step()
    engine.accumulate(rows, MeanNll())
    result = engine.end_step()
    assert not result.skipped, result.reason
    return result.loss, result.grad_norm


class Checks:
    """Prints each comparison with its limit and remembers whether all held."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def compare(self, name: str, error: float, limit: float) -> None:
        ok = error <= limit
        print(f"  {'ok  ' if ok else 'FAIL'} {name}: {error:.3g} (limit {limit:g})", flush=True)
        if not ok:
            self.failed.append(name)


def relative(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


def check_attention(checks: Checks) -> None:
    lengths, heads, kv_heads, width = [700, 33, 1, 128, 260], 16, 8, 128
    gen = torch.Generator().manual_seed(0)
    exact = [
        torch.randn(sum(lengths), n, width, generator=gen, dtype=torch.float64).to(DEVICE)
        for n in (heads, kv_heads, kv_heads)
    ]
    dtype = torch.bfloat16 if IS_GPU else torch.float32
    rounded = [x.to(dtype) for x in exact]
    for window in (None, 50):
        truth_in = [x.double().requires_grad_() for x in rounded]
        truth = reference_attention(*truth_in, lengths=lengths, window=window)
        truth.square().sum().backward()
        for attend in (
            build_attend(lengths, device=DEVICE, dtype=dtype, head_dim=width),
            PaddedAttend(lengths, device=DEVICE),
        ):
            mine_in = [x.clone().requires_grad_() for x in rounded]
            mine = attend(0, *mine_in, window=window)
            mine.double().square().sum().backward()
            name = f"{type(attend).__name__} window {window}"
            checks.compare(f"{name} values", relative(mine, truth), 1e-2)
            worst = max(relative(m.grad, t.grad) for m, t in zip(mine_in, truth_in, strict=True))  # type: ignore[arg-type]
            checks.compare(f"{name} gradients", worst, 2e-2)


def check_mixture(checks: Checks) -> None:
    tokens, chosen_count, experts, width, inner = 1000, 4, 16, 256, 128
    gen = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if IS_GPU else torch.float32
    shapes = [(tokens, width), (tokens, chosen_count), (experts, 2, inner, width)]
    shapes.append((experts, width, inner))
    rough = [(0.3 * torch.randn(*n, generator=gen)).to(DEVICE, dtype) for n in shapes]
    chosen = torch.rand(tokens, experts, generator=gen).topk(chosen_count, -1).indices.to(DEVICE)
    results = []
    for is_truth in (False, True):
        kind = torch.float64 if is_truth else dtype
        x, weights, gate_up, down = leaves = [y.to(kind).requires_grad_() for y in rough]
        if is_truth:
            out = reference_mixture(x, weights, chosen, gate_up, down)
        else:
            pairs = sort_pairs(chosen, experts)
            rows, scales = take_rows(x, pairs), take_weights(weights, pairs)
            h = grouped_linear(rows, gate_up.flatten(1, 2), pairs.ends_E)
            a = weighted_silu_mul(h, scales)
            out = sum_rows(grouped_linear(a, down, pairs.ends_E), pairs)
        results.append((out, *torch.autograd.grad(out.double().square().sum(), leaves)))
    names = ("values", "token gradient", "weight gradient", "gate_up gradient", "down gradient")
    for name, mine, true in zip(names, *results, strict=True):
        checks.compare(f"mixture: {name}", relative(mine, true), 2e-2)  # a few bf16 roundings


def check_logprobs(checks: Checks) -> None:
    tokens, vocab, width = (512, 151936, 1024) if IS_GPU else (64, 500, 32)
    gen = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if IS_GPU else torch.float32
    hidden = torch.randn(tokens, width, generator=gen).to(DEVICE, dtype)
    weight = (torch.randn(vocab, width, generator=gen) * 0.1).to(DEVICE, dtype)
    labels = torch.randint(0, vocab, (tokens,), generator=gen).to(DEVICE)
    results = []
    for is_truth in (False, True):
        kind = torch.float64 if is_truth else dtype
        h, w = (x.detach().to(kind, copy=True).requires_grad_() for x in (hidden, weight))
        if is_truth:
            logprobs, entropy = reference_logprobs(h, w, labels, 0.8)
        else:
            logprobs, entropy = token_logprobs(
                h, w, labels, temperature=0.8, chunk_bytes=100 * vocab * 12
            )
        (logprobs.double().sum() + 0.1 * entropy.double().sum()).backward()
        results.append((logprobs.detach(), entropy.detach(), h.grad, w.grad))
    names = ("log-probs", "entropy", "hidden gradient", "head gradient")
    limits = (1e-5, 1e-5, 1e-2, 1e-2)  # values in fp32; gradients leave in the inputs' dtype
    for name, limit, mine, true in zip(names, limits, *results, strict=True):
        checks.compare(f"fused head: {name}", relative(mine, true), limit)


def check_engine(checks: Checks, config: dict[str, Any], lengths: list[int]) -> None:
    config = config | {"num_hidden_layers": 4}
    rows = make_rows(lengths, config["vocab_size"])
    torch.backends.cuda.matmul.allow_tf32 = False
    exact = make_engine(config, dtype="float32")
    truth = exact.forward(rows)
    loss, norm = train_step(exact, rows)
    del exact
    variants: dict[str, dict[str, Any]] = {
        "bf16": {},
        "bf16 cast whole": {"archon": {"reshard_after_forward_policy": "never"}},
        "bf16 small microbatches": {"mb_spec": {"max_tokens_per_mb": sum(lengths) // 2}},
        "bf16 full recomputation": {"archon": {"ac_mode": "full"}},
        "bf16 selective recomputation": {"archon": {"ac_mode": "selective"}},
    }
    if IS_GPU:
        compiled = {"enable_compile": True}
        selective, whole = {"ac_mode": "selective"}, {"reshard_after_forward_policy": "never"}
        variants["bf16 compiled"] = {"archon": compiled}
        variants["bf16 compiled selective"] = {"archon": compiled | selective}
        variants["bf16 compiled, cast whole"] = {"archon": compiled | whole}
    for name, settings in variants.items():
        engine = make_engine(config, **settings)
        got = engine.forward(rows)
        alone = [engine.forward([row])[0] for row in rows[:4]]
        packed = torch.cat([x["logprobs"] for x in got[:4]])
        checks.compare(
            f"{name}: packed against alone, max |d log p|",
            float((packed - torch.cat([x["logprobs"] for x in alone])).abs().max()),
            0.05,
        )
        mine = torch.cat([x["logprobs"] for x in got])
        true = torch.cat([x["logprobs"] for x in truth])
        checks.compare(f"{name}: mean |d log p| to fp32", float((mine - true).abs().mean()), 0.02)
        got_loss, got_norm = train_step(engine, rows)
        checks.compare(f"{name}: loss to fp32, relative", abs(got_loss / loss - 1), 2e-3)
        checks.compare(f"{name}: grad norm to fp32, relative", abs(got_norm / norm - 1), 2e-2)
        del engine


def main() -> int:
    device = torch.cuda.get_device_name() if IS_GPU else "cpu (toy size)"
    print(f"torch {torch.__version__}, {device}", flush=True)
    checks = Checks()
    check_attention(checks)
    check_logprobs(checks)
    check_mixture(checks)
    config = QWEN3_0_6B if IS_GPU else TOY
    check_engine(checks, config, [500, 37, 1, 260, 800, 129] if IS_GPU else [50, 7, 1, 26])
    check_engine(checks, config, [256] * 4)
    if checks.failed:
        print(f"{len(checks.failed)} checks failed: {'; '.join(checks.failed)}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
