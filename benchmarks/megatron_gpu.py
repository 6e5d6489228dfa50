"""`megatron:d1` beside `archon:d1`: tokens per second, peak memory, and losses of the same steps.

    PYTHONPATH=MEGATRON_CORE python benchmarks/megatron_gpu.py              # on a GPU
    PYTHONPATH=MEGATRON_CORE python benchmarks/megatron_gpu.py --sums MODEL
    PYTHONPATH=tests/megatron_cpu:.megatron-core python benchmarks/megatron_gpu.py --tiny

MEGATRON_CORE is the folder that `make setup-megatron` makes. The models have random weights, the
same for every row of the table: Qwen3-0.6B, and two layers of Qwen3-30B-A3B. A step is forward,
backward and the optimizer over 32,768 tokens in two microbatches of packed rows, bfloat16 over
float32 masters. Losses must agree to 1%: exit status 1 if not. `megatron` has Megatron's own
layers; where Transformer Engine is installed, a further row has its layers.

With --sums, MODEL (a folder of SmolLM2-135M-Instruct) learns two-digit sums by GRPO
(`examples/math/sums.yaml`) under each learner, all runs at once on the GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pentad.core.machine import installed
from pentad.core.types import Row
from pentad.engine.engine import Engine, build_engine
from pentad.engine.section import EngineSettings, ModelConfig
from pentad.rl.losses import SftLoss

DENSE: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
}
MIXTURE = DENSE | {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
LEARNERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "archon": ("archon", {}),
    "archon, not compiled": ("archon", {"enable_compile": False}),
    "megatron": ("local", {}),
    "megatron with TE": ("transformer_engine", {}),
}
"""Name -> archon, or Megatron's transformer_impl, and keys of archon's block."""
ROW = {False: (512, 4096), True: (8, 64)}
AGREE = 0.01
SHARED = ("rollout.kv_cache_gb=8", "actor.mb_spec.max_tokens_per_mb=8192")
"""So that several runs fit on one GPU."""
SUMS = Path(__file__).parents[1] / "examples/math"


def make_rows(vocab: int, num_tokens: int, least: int, most: int) -> list[Row]:
    gen = torch.Generator().manual_seed(0)
    rows: list[Row] = []
    left = num_tokens
    while left >= least:
        length = min(left, int(torch.randint(least, most, (), generator=gen)))
        weights = torch.ones(length)
        weights[0] = 0
        ids = torch.randint(0, vocab, (length,), generator=gen)
        rows.append(Row(ids, {"weights": weights}, float(length - 1)))
        left -= length
    return rows


def build(config: dict[str, Any], layers: Any, keys: dict[str, Any], tiny: bool) -> Engine:
    archon = {"ac_mode": "none", "reshard_after_forward_policy": "never", **keys}
    if tiny:
        archon["enable_compile"] = False
    model = ModelConfig.model_validate(
        {
            "dtype": "float32" if tiny else "bfloat16",
            "param_dtype": "float32",
            "gradient_checkpointing": False,
            "mb_spec": {"max_tokens_per_mb": 512 if tiny else 16384},
            "enable_tree_training": False,
            "archon": archon,
            "optimizer": {"lr": 1e-5},
        }
    )
    settings = EngineSettings(model=model, total_steps=100, max_row_tokens=4096)
    device, backend = "cpu" if tiny else "cuda", "archon"
    if layers != "archon":
        backend, settings = "megatron", replace(settings, transformer_impl=layers)
    options: dict[str, Any] = {"init_from_scratch": True, "seed": 1, "backend": backend}
    return build_engine(config, settings, device=device, **options)


def measure(engine: Engine, rows: list[Row], num_steps: int) -> dict[str, Any]:
    """Seconds of a step (median without the first two), peak GiB, and losses and norms."""
    times, losses, norms = [], [], []
    on_gpu = engine.device.type == "cuda"
    for _ in range(num_steps):
        start = time.perf_counter()
        engine.begin_step()
        engine.accumulate(rows, SftLoss())
        result = engine.end_step()
        if on_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        losses.append(result.loss)
        norms.append(result.grad_norm)
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    return {
        "seconds": sorted(times[2:])[len(times[2:]) // 2],
        "gib": peak,
        "losses": losses,
        "norms": norms,
    }


def compare(name: str, config: dict[str, Any], tiny: bool, num_steps: int) -> bool:
    """Prints a table; whether losses agree."""
    num_tokens = 1024 if tiny else 32768
    rows = make_rows(config["vocab_size"], num_tokens, *ROW[tiny])
    num_tokens = sum(row.ids.numel() for row in rows)
    print(f"\n{name}: {len(rows)} rows, {num_tokens} tokens a step")
    print(f"{'learner':22} {'tokens/s':>9} {'ms':>8} {'GiB':>6}  losses of the first steps, norm")
    found = {}
    for label, (layers, keys) in LEARNERS.items():
        if tiny and "not compiled" in label:
            continue
        if layers == "transformer_engine" and (tiny or not installed("transformer-engine")):
            continue
        if not tiny:
            torch.cuda.reset_peak_memory_stats()
        engine = build(config, layers, keys, tiny)
        logprobs = torch.cat([out["logprobs"] for out in engine.forward(rows)])
        found[label] = one = measure(engine, rows, num_steps) | {"logprobs": logprobs.cpu()}
        shown = " ".join(f"{x:.5f}" for x in one["losses"][:4])
        print(
            f"{label:22} {num_tokens / one['seconds']:9.0f} {1e3 * one['seconds']:8.1f} "
            f"{one['gib']:6.1f}  {shown}  {one['norms'][0]:.5f}",
            flush=True,
        )
        del engine
        gc.collect()
        if not tiny:
            torch._dynamo.reset()
            torch.cuda.empty_cache()
    first, worst = found.pop("archon"), 0.0
    for label, one in found.items():
        pairs = zip(first["losses"], one["losses"], strict=True)
        off = max(abs(mine - other) / abs(mine) for mine, other in pairs)
        apart = (first["logprobs"] - one["logprobs"]).abs()
        print(
            f"{label}, beside archon: losses of {num_steps} steps differ by at most {off:.1e} of "
            f"their size, log-probs before them by {apart.mean():.1e} on average, {apart.max():.1e}"
        )
        worst = max(worst, off)
    return worst < AGREE


def sums(model: str, words: list[str]) -> int:
    """Runs the recipe with each learner, all at once; returns how many failed."""
    with tempfile.TemporaryDirectory(prefix="pentad-megatron-") as name:
        root = Path(name)
        subprocess.run([sys.executable, str(SUMS / "sums.py"), str(root / "sums")], check=True)
        recipe = ["-m", "pentad", "train", str(SUMS / "sums.yaml"), f"fileroot={root}"]
        runs = {}
        for layers in ("archon", "local", "transformer_engine"):
            if layers == "transformer_engine" and not installed("transformer-engine"):
                continue
            keys = [f"actor.path={model}", f"trial_name={layers}", *SHARED, *words]
            keys.append("allocation_mode=embedded:d1|archon:d1")
            if layers != "archon":
                keys[-1] = "allocation_mode=embedded:d1|megatron:d1"
                keys.append(f"megatron.transformer_impl={layers}")
            log = (root / f"{layers}.log").open("w")
            runs[layers] = subprocess.Popen(
                [sys.executable, *recipe, *keys], stdout=log, stderr=subprocess.STDOUT
            )
        failed = 0
        for layers, run in runs.items():
            if run.wait():
                failed += 1
                print(f"{layers} failed:", (root / f"{layers}.log").read_text()[-4000:])
                continue
            steps, evals = (
                [json.loads(line) for line in path.read_text().splitlines()]
                for file in ("steps.jsonl", "evals.jsonl")
                for path in root.rglob(file)
                if layers in path.parts
            )
            show_run(layers, steps, evals)
    return failed


def show_run(layers: str, steps: list[dict[str, Any]], evals: list[dict[str, Any]]) -> None:
    accuracy = ", ".join(f"{one['version']}: {one['accuracy']:.3f}" for one in evals)
    seconds = sum(one["wall_clock_ms"] for one in steps) / 1e3
    median = statistics.median(one["wall_clock_ms"] for one in steps)
    name = "archon:d1" if layers == "archon" else f"megatron:d1, {layers}"
    print(f"\n{name}: {len(steps)} steps, median {median:.0f} ms, {seconds:.0f} s in all")
    print(f"held-out accuracy by step  {accuracy}")
    print("reward of each step        " + " ".join(f"{s['rl']['reward_mean']:.2f}" for s in steps))
    phases = {
        phase: round(statistics.median(one["phases"].get(phase, 0.0) for one in steps), 1)
        for phase in steps[-1]["phases"]
    }
    print(f"median ms of phases        {phases}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--sums", metavar="MODEL", help="GRPO of a pretrained model instead")
    parser.add_argument("--words", nargs="*", default=[], help="overrides of the recipe of --sums")
    given = parser.parse_args()
    if given.sums:
        return 1 if sums(given.sums, given.words) else 0
    models = {"Qwen3-0.6B": DENSE, "Qwen3-30B-A3B, 2 layers": MIXTURE}
    agree = []
    for name, config in models.items():
        sizes = SMALL if given.tiny else {}
        if given.tiny and "num_experts" in config:
            sizes = sizes | {"num_experts": 8, "num_experts_per_tok": 2}
        agree.append(compare(name, config | sizes, given.tiny, given.steps))
    return 0 if all(agree) else 1


if __name__ == "__main__":
    raise SystemExit(main())
