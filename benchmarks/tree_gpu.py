"""Training groups as trees beside training whole rows: time and memory of a step, and gradients.

    python benchmarks/tree_gpu.py                # every case
    python benchmarks/tree_gpu.py 512+256        # the named ones

A case is PROMPT+ANSWER: 4 groups of 16 answers of up to ANSWER tokens. Qwen3-0.6B with random
weights, bfloat16 over float32 masters, compiled blocks, microbatches of up to 32,768 tokens. Both
run in one process, one after the other; a step is forward, backward and the optimizer.
"""

from __future__ import annotations

import gc
import sys
import time

import torch
from sampler_load import QWEN3_06B

from pentad.core.types import Row
from pentad.engine.engine import Engine, build_engine
from pentad.engine.section import EngineSettings, ModelConfig
from pentad.rl.algorithms import build_policy_loss
from pentad.rl.section import AlgorithmConfig

CASES = ((512, 256), (2048, 200), (128, 512), (64, 256))
GROUPS, ROWS, STEPS = 4, 16, 6
CONFIG = {
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
assert QWEN3_06B.num_layers == CONFIG["num_hidden_layers"]


def make_rows(prompt: int, answer: int, *, ragged: bool = True) -> list[Row]:
    gen = torch.Generator().manual_seed(0)
    rows = []
    for gid in range(GROUPS):
        begin = torch.randint(0, 151936, (prompt,), generator=gen)
        for _ in range(ROWS):
            least = answer // 2 if ragged else answer
            num = int(torch.randint(least, answer + 1, (), generator=gen))
            ids = torch.cat((begin, torch.randint(0, 151936, (num,), generator=gen)))
            weights = torch.zeros(len(ids))
            weights[prompt:] = 1
            advantages = torch.randn((), generator=gen) * weights
            columns = {
                "weights": weights,
                "advantages": advantages,
                "rollout_logprobs": torch.full((len(ids),), -11.93),
            }
            rows.append(Row(ids, columns, float(weights.sum()), group=gid))
    return rows


def build(tree: bool) -> Engine:
    archon = {"ac_mode": "selective", "reshard_after_forward_policy": "never"}
    model = ModelConfig.model_validate(
        {
            "mb_spec": {"max_tokens_per_mb": 32768},
            "enable_tree_training": None if tree else False,
            "archon": archon,
        }
    )
    settings = EngineSettings(model=model, total_steps=100, max_row_tokens=2304)
    return build_engine(CONFIG, settings, device="cuda", init_from_scratch=True, seed=1)


def measure(engine: Engine, rows: list[Row]) -> tuple[float, float, float]:
    """(milliseconds of a step, peak GiB, norm of the first gradient)."""
    loss = build_policy_loss(AlgorithmConfig())
    times, norm = [], 0.0
    torch.cuda.reset_peak_memory_stats()
    for n in range(STEPS + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        engine.begin_step()
        engine.accumulate(rows, loss)
        result = engine.end_step()
        torch.cuda.synchronize()
        if n == 0:
            norm = result.grad_norm
        if n > 1:
            times.append(time.perf_counter() - start)
    return 1e3 * sorted(times)[len(times) // 2], torch.cuda.max_memory_allocated() / 2**30, norm


def score(engine: Engine, rows: list[Row]) -> float:
    engine.forward(rows)
    torch.cuda.synchronize()
    start = time.perf_counter()
    engine.forward(rows)
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def main() -> None:
    wanted = set(sys.argv[1:])
    found: dict[tuple[int, int], dict[bool, tuple[float, ...]]] = {case: {} for case in CASES}
    for tree in (False, True):
        engine = build(tree)
        for case in CASES:
            if wanted and f"{case[0]}+{case[1]}" not in wanted:
                continue
            rows = make_rows(*case)
            found[case][tree] = (*measure(engine, rows), score(engine, rows))
            print(case, "tree" if tree else "whole", found[case][tree], flush=True)
        del engine
        gc.collect()
        torch._dynamo.reset()
        torch.cuda.empty_cache()
    print("case      tokens  whole ms  tree ms  ratio  scoring  GiB          first gradient norm")
    for case, both in found.items():
        if not both:
            continue
        tokens = sum(len(row.ids) for row in make_rows(*case))
        (ms, gib, norm, scored), (ms_2, gib_2, norm_2, scored_2) = both[False], both[True]
        print(
            f"{case[0]}+{case[1]:<6} {tokens:6} {ms:9.1f} {ms_2:8.1f} {ms / ms_2:6.2f}"
            f" {scored / scored_2:8.2f}  {gib:5.1f} -> {gib_2:4.1f}  {norm:.6f} {norm_2:.6f}"
        )


if __name__ == "__main__":
    main()
