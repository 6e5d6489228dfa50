"""Speed of the embedded sampler on a CPU, beside transformers' generate in the same run.

    OMP_NUM_THREADS=2 python benchmarks/sampler_cpu.py

Two loads on a tiny Qwen3 (fp32): the demo's (32 prompts of 6 tokens, 16 samples each, 8 new
tokens), and a ragged one (prompts of 4 to 64 tokens, answers of 4 to 96 tokens). transformers gets
each load in left-padded static batches, every batch run to the longest answer in it: in the order
given, and as an oracle would deal them, sorted by answer length, which nobody knows beforehand.
Only the tokens asked for are counted. A last figure is what `strict` costs.
`--json FILE` writes the figures with what they were measured on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import tempfile
import time
from pathlib import Path

import torch
import transformers
from transformers import Qwen3Config, Qwen3ForCausalLM

from pentad.core.types import Request, SamplingParams
from pentad.infer.sampler import EmbeddedSampler
from pentad.infer.section import SamplerSettings
from pentad.rollout.section import RolloutConfig

WIDTH, LAYERS, VOCAB = 64, 2, 32
HF_BATCH = 128


def build_hf() -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=3 * WIDTH,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config).eval()


def demo_load() -> list[Request]:
    generator = torch.Generator().manual_seed(1)
    params = SamplingParams(max_new_tokens=8)
    return [
        Request(
            id=f"demo{i}",
            prompt_ids=tuple(torch.randint(VOCAB, (6,), generator=generator).tolist()),
            params=params,
            seeds=tuple(range(16 * i, 16 * i + 16)),
        )
        for i in range(32)
    ]


def ragged_load(num: int = 256) -> list[Request]:
    generator = torch.Generator().manual_seed(2)
    out = []
    for i in range(num):
        size = int(torch.randint(4, 65, (), generator=generator))
        new = int(torch.randint(4, 97, (), generator=generator))
        ids = tuple(torch.randint(VOCAB, (size,), generator=generator).tolist())
        params = SamplingParams(max_new_tokens=new)
        out.append(Request(id=f"r{i}", prompt_ids=ids, params=params, seeds=(i,)))
    return out


def num_new(load: list[Request]) -> int:
    return sum(len(r.seeds) * r.params.max_new_tokens for r in load)


def time_ours(sampler: EmbeddedSampler, load: list[Request], repeats: int) -> float:
    async def once() -> float:
        start = time.perf_counter()
        results = await asyncio.gather(*(sampler.generate(r) for r in load))
        seconds = time.perf_counter() - start
        assert sum(len(g.ids) for gs in results for g in gs) == num_new(load)
        return seconds

    return min(asyncio.run(once()) for _ in range(repeats))


def time_hf(
    model: Qwen3ForCausalLM, load: list[Request], repeats: int, *, is_sorted: bool
) -> float:
    rows = [(r.prompt_ids, r.params.max_new_tokens) for r in load for _ in r.seeds]
    if is_sorted:
        rows.sort(key=lambda row: row[1])

    def once() -> float:
        start = time.perf_counter()
        for first in range(0, len(rows), HF_BATCH):
            part = rows[first : first + HF_BATCH]
            width = max(len(ids) for ids, _ in part)
            ids = torch.tensor([[0] * (width - len(p)) + list(p) for p, _ in part])
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p, _ in part])
            new = max(count for _, count in part)
            model.generate(
                ids, attention_mask=mask, do_sample=True, max_new_tokens=new, min_new_tokens=new
            )
        return time.perf_counter() - start

    return min(once() for _ in range(repeats))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    repeats = options.repeats
    hf = build_hf()
    with tempfile.TemporaryDirectory() as folder:
        hf.save_pretrained(folder)
        plain, strict = (
            EmbeddedSampler.from_folder(
                folder, SamplerSettings(rollout=RolloutConfig(max_running=512), strict=is_strict)
            )
            for is_strict in (False, True)
        )
    machine = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    print(f"tiny Qwen3 d{WIDTH} L{LAYERS} V{VOCAB}, {machine}")
    figures: dict[str, dict[str, float]] = {}
    for name, load in (("demo", demo_load()), ("ragged", ragged_load())):
        ours = time_ours(plain, load, repeats)
        theirs = time_hf(hf, load, repeats, is_sorted=False)
        oracle = time_hf(hf, load, repeats, is_sorted=True)
        slow = time_ours(strict, load, 1)
        tokens = num_new(load)
        print(
            f"{name:7} {tokens} new tokens: embedded {1000 * ours:.0f} ms ({tokens / ours:,.0f} "
            f"tok/s), transformers.generate {1000 * theirs:.0f} ms ({tokens / theirs:,.0f} tok/s), "
            f"ratio {theirs / ours:.1f}; sorted by answer length {1000 * oracle:.0f} ms, "
            f"ratio {oracle / ours:.1f}; strict {1000 * slow:.0f} ms ({tokens / slow:,.0f} tok/s)"
        )
        figures[name] = {
            "embedded_tok_per_s": tokens / ours,
            "transformers_tok_per_s": tokens / theirs,
            "ratio": theirs / ours,
            "ratio_sorted": oracle / ours,
            "strict_tok_per_s": tokens / slow,
        }
    if options.json:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        about = {"hardware": machine, "num_cores": os.cpu_count(), **versions}
        options.json.write_text(json.dumps({**about, "figures": figures}, indent=1) + "\n")
    for sampler in (plain, strict):
        asyncio.run(sampler.close())


if __name__ == "__main__":
    main()
