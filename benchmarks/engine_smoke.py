"""The engine on one GPU: bf16 against fp32, kernels against references, then speed and memory.

    python benchmarks/engine_smoke.py                  # checks, then Qwen3-0.6B from scratch
    python benchmarks/engine_smoke.py --parts checks   # only the checks (under a minute)
    python benchmarks/engine_smoke.py --parts speed --ac none selective --compile off on

Needs torch, numpy, safetensors and transformers. Exits 1 when a check fails. On a CPU it runs the
same code at toy size, which proves the script and nothing else.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from pentad.core.types import Row, TokenOutputs  # noqa: E402
from pentad.engine.engine import Engine, build_engine  # noqa: E402
from pentad.engine.flops import detect_peak_tflops, measure_throughput  # noqa: E402
from pentad.engine.settings import EngineSettings, OptimizerSettings  # noqa: E402
from pentad.ops.attention import PaddedAttend, build_attend, reference_attention  # noqa: E402
from pentad.ops.logprob import reference_logprobs, token_logprobs  # noqa: E402

QWEN3_0_6B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
}
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


def make_engine(config: dict[str, Any], **settings: Any) -> Engine:
    settings.setdefault("compute_dtype", "bfloat16")
    settings.setdefault("optimizer", OptimizerSettings(lr=1e-5))
    return build_engine(
        config, EngineSettings(**settings), device=DEVICE, init_from_scratch=True, seed=1
    )


def train_step(engine: Engine, rows: list[Row]) -> tuple[float, float]:
    engine.begin_step()
    engine.accumulate(rows, MeanNll())
    result = engine.end_step()
    assert not result.skipped, result.reason
    return result.loss, result.grad_norm


def synchronize() -> None:
    if IS_GPU:
        torch.cuda.synchronize()


def peak_gib() -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if IS_GPU else float("nan")


@contextmanager
def fresh_memory() -> Iterator[None]:
    gc.collect()
    if IS_GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    yield


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
        truth = reference_attention(*truth_in, lengths, window)
        truth.square().sum().backward()
        for attend in (
            build_attend(lengths, device=DEVICE, dtype=dtype, head_dim=width),
            PaddedAttend(lengths, device=DEVICE),
        ):
            mine_in = [x.clone().requires_grad_() for x in rounded]
            mine = attend(0, *mine_in, window)
            mine.double().square().sum().backward()
            name = f"{type(attend).__name__} window {window}"
            checks.compare(f"{name} values", relative(mine, truth), 1e-2)
            worst = max(relative(m.grad, t.grad) for m, t in zip(mine_in, truth_in, strict=True))  # type: ignore[arg-type]
            checks.compare(f"{name} gradients", worst, 2e-2)


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


def check_engine(checks: Checks, config: dict[str, Any]) -> None:
    config = config | {"num_hidden_layers": 4}
    lengths = [500, 37, 1, 260, 800, 129] if IS_GPU else [50, 7, 1, 26]
    rows = make_rows(lengths, config["vocab_size"])
    torch.backends.cuda.matmul.allow_tf32 = False
    exact = make_engine(config, compute_dtype="float32")
    truth = exact.forward(rows)
    loss, norm = train_step(exact, rows)
    del exact
    variants: dict[str, dict[str, Any]] = {
        "bf16": {},
        "bf16 small microbatches": {"max_tokens_per_mb": sum(lengths) // 2},
        "bf16 full recomputation": {"ac_mode": "full"},
        "bf16 selective recomputation": {"ac_mode": "selective"},
    }
    if IS_GPU:
        variants["bf16 compiled"] = {"compile": True}
        variants["bf16 compiled selective"] = {"compile": True, "ac_mode": "selective"}
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


def run_speed(config: dict[str, Any], args: argparse.Namespace) -> None:
    length = 2048 if IS_GPU else 64
    num_rows = args.tokens // length if IS_GPU else 4
    mix = [length // 2, length, length // 4, length + length // 4]
    ragged = mix * max(1, num_rows * length // sum(mix))
    for ac_mode in args.ac:
        for compiled in args.compile:
            for shape, lengths in (("equal", [length] * num_rows), ("ragged", ragged)):
                with fresh_memory():
                    report(config, ac_mode, compiled == "on", shape, lengths, args.steps)


def report(
    config: dict[str, Any], ac_mode: str, compiled: bool, shape: str, lengths: list[int], steps: int
) -> None:
    engine = make_engine(config, ac_mode=ac_mode, compile=compiled)
    rows = make_rows(lengths, config["vocab_size"])
    start = time.perf_counter()
    for _ in range(2):
        train_step(engine, rows)
    synchronize()
    warm_up_s = time.perf_counter() - start
    start = time.perf_counter()
    for _ in range(steps):
        train_step(engine, rows)
    synchronize()
    seconds = (time.perf_counter() - start) / steps
    peak_tflops = detect_peak_tflops(DEVICE)
    speed = measure_throughput(engine.dims, lengths, seconds, peak_tflops=peak_tflops)
    record = {
        "ac": ac_mode,
        "compile": compiled,
        "rows": shape,
        "tokens": sum(lengths),
        "ms_per_step": round(seconds * 1e3, 1),
        "tok_per_s": round(speed.tokens_per_s),
        "mfu_causal": None if speed.mfu_causal is None else round(speed.mfu_causal, 4),
        "mfu_full": None if speed.mfu_full is None else round(speed.mfu_full, 4),
        "peak_gib": round(peak_gib(), 2),
        "warm_up_s": round(warm_up_s, 1),
    }
    print(json.dumps(record), flush=True)


def run_head_memory() -> None:
    """Peak memory of the fused head against the logits it avoids."""
    tokens, vocab, width = (32768, 151936, 1024) if IS_GPU else (256, 2000, 32)
    dtype = torch.bfloat16 if IS_GPU else torch.float32
    with fresh_memory():
        hidden = torch.randn(tokens, width, device=DEVICE, dtype=dtype, requires_grad=True)
        weight = torch.randn(vocab, width, device=DEVICE, dtype=dtype, requires_grad=True)
        labels = torch.randint(0, vocab, (tokens,), device=DEVICE)
        held = peak_gib()
        start = time.perf_counter()
        logprobs, _ = token_logprobs(hidden, weight, labels)
        logprobs.sum().backward()
        synchronize()
        record = {
            "head_tokens": tokens,
            "vocab": vocab,
            "peak_gib_above_inputs": round(peak_gib() - held, 2),
            "fp32_logits_gib": round(tokens * vocab * 4 / 2**30, 2),
            "ms": round((time.perf_counter() - start) * 1e3, 1),
        }
        print(json.dumps(record), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--parts", nargs="+", default=["checks", "head", "speed"])
    parser.add_argument("--ac", nargs="+", default=["none", "selective"])
    parser.add_argument("--compile", nargs="+", default=["off", "on"])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    device = torch.cuda.get_device_name() if IS_GPU else "cpu (toy size)"
    print(f"torch {torch.__version__}, {device}", flush=True)
    config = QWEN3_0_6B if IS_GPU else TOY
    checks = Checks()
    if "checks" in args.parts:
        check_attention(checks)
        check_logprobs(checks)
        check_engine(checks, config)
    if "head" in args.parts:
        run_head_memory()
    if "speed" in args.parts:
        run_speed(config, args)
    if checks.failed:
        print(f"{len(checks.failed)} checks failed: {'; '.join(checks.failed)}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
