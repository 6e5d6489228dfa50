"""Benchmarks of whole RL steps for `pentad bench`: GRPO by `pentad train`, timed by phase.

A case is a model config with random weights, a byte tokenizer, sorting prompts, a reward function
in a user file, and defaults for everything else. Random weights sample tokens almost uniformly, so
a set of stop ids ends answers at random: lengths are geometric and vary as in real runs.
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from datetime import datetime
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from pentad.data.toy import write_byte_model, write_task
from pentad.planner.prepare import prepare
from pentad.trainer.sources.rollouts import run_train
from pentad_tools.bench.bench_train import QWEN3_0_6B, QWEN3_MOE_SLICE, TOY

SMOLLM2_135M: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
}
REWARD = '''\
def score(completion: str, ids: list[int]) -> float:
    """Anything that differs between answers."""
    return (sum(ids) % 97) / 97
'''
NUM_WARM = 3
"""Warm-up steps that are not counted: compilation, captured graphs, first allocations."""
WATCH_MS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class RlCase:
    model: str
    config: dict[str, Any]
    num_prompts: int
    num_samples: int
    mean_length: int
    """Mean tokens of answers without the length limit."""
    max_new_tokens: int
    prompt_length: int | None = None
    """Tokens of each prompt; None: a few, as the task has them."""

    @property
    def name(self) -> str:
        load = f"{self.num_prompts} x {self.num_samples} answers of about {self.mean_length} tokens"
        prompts = "" if self.prompt_length is None else f" to prompts of {self.prompt_length:,}"
        return f"{self.model}, {load}{prompts}"

    @property
    def stop_ids(self) -> list[int]:
        """Stop ids: one in `mean_length` tokens, without the tokenizer's own."""
        step = self.mean_length
        return list(range(300 + step, self.config["vocab_size"], step))


@dataclass(frozen=True, slots=True, kw_only=True)
class RlMeasured:
    case: RlCase
    wall_ms: float
    """Median time of the counted steps."""
    slowest_ms: float
    phases_ms: dict[str, float]
    tokens_per_s: float
    """Sampled tokens per second of wall clock."""
    rollout_tokens_per_s: float
    peak_gib: float | None
    idle_share: float | None
    """Idle time of the device over the counted steps; None on a CPU."""
    first_step_s: float


def gpu_cases() -> list[RlCase]:
    size: dict[str, Any] = {"num_samples": 16}
    return [
        RlCase(
            model="SmolLM2-135M",
            config=SMOLLM2_135M,
            num_prompts=64,
            mean_length=30,
            max_new_tokens=64,
            **size,
        ),
        RlCase(
            model="Qwen3-0.6B",
            config=QWEN3_0_6B,
            num_prompts=32,
            mean_length=400,
            max_new_tokens=1024,
            **size,
        ),
        RlCase(
            model="Qwen3-0.6B",
            config=QWEN3_0_6B,
            num_prompts=32,
            mean_length=200,
            max_new_tokens=512,
            prompt_length=2048,
            **size,
        ),
        RlCase(
            model="Qwen3-30B-A3B, 8 layers",
            config=QWEN3_MOE_SLICE,
            num_prompts=16,
            mean_length=200,
            max_new_tokens=512,
            **size,
        ),
    ]


def cpu_cases() -> list[RlCase]:
    size: dict[str, Any] = {"mean_length": 16, "max_new_tokens": 32}
    return [
        RlCase(model="toy dense", config=TOY, num_prompts=8, num_samples=8, **size),
        RlCase(model="SmolLM2-135M", config=SMOLLM2_135M, num_prompts=4, num_samples=4, **size),
    ]


def measure(case: RlCase, device: torch.device, num_steps: int, *extra: str) -> RlMeasured:
    """Runs the case in a temporary folder; `extra` are overrides of the recipe."""
    total = NUM_WARM + num_steps
    with TemporaryDirectory(prefix="pentad-bench-") as folder:
        config, notes = prepare(write_recipe(case, Path(folder), total), list(extra), "train")
        busy = Path(folder, "busy.csv")
        with redirect_stdout(StringIO()), watched(busy, device):
            summary = run_train(config, notes, device=str(device))
        lines = (summary.records / "steps.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        span = records[NUM_WARM - 1]["time_s"], records[-1]["time_s"]
        idle = idle_share(busy, *span)
    counted = records[NUM_WARM:]
    drawn = [r["num_samples"] * r["rl"]["length_mean"] for r in counted]
    walls = [r["wall_clock_ms"] for r in counted]
    rollout = [r["phases"]["rollout"] for r in counted]
    peak = counted[-1]["memory"]["peak_allocated_gb"]
    return RlMeasured(
        case=case,
        wall_ms=statistics.median(walls),
        slowest_ms=max(walls),
        phases_ms={
            name: statistics.median(r["phases"].get(name, 0.0) for r in counted)
            for name in counted[-1]["phases"]
        },
        tokens_per_s=1e3 * sum(drawn) / sum(walls),
        rollout_tokens_per_s=1e3 * sum(drawn) / sum(rollout),
        peak_gib=peak,
        idle_share=idle,
        first_step_s=records[0]["wall_clock_ms"] / 1e3,
    )


def write_recipe(case: RlCase, folder: Path, num_steps: int) -> Path:
    """Writes a folder with model, prompts and reward function, and its recipe."""
    model = folder / "model"
    write_byte_model(model)
    tokens = json.loads((model / "config.json").read_text())
    kept = {key: tokens[key] for key in ("pad_token_id", "eos_token_id", "bos_token_id")}
    (model / "config.json").write_text(json.dumps({**case.config, **kept}))
    # One step more than used: the end of an epoch writes a recovery checkpoint, unlike TRL.
    num_train = case.num_prompts * (num_steps + 1)
    write_task(folder, seed=0, num_train=num_train, num_sft=0, num_valid=0)
    if case.prompt_length is not None:
        lengthen_prompts(folder / "train.jsonl", case.prompt_length)
    (folder / "reward.py").write_text(REWARD)
    recipe = {
        "experiment_name": "bench",
        "trial_name": "rl",
        "fileroot": str(folder / "runs"),
        "actor": {"path": str(model), "init_from_scratch": True, "optimizer": {"lr": 1e-6}},
        "algorithm": {"name": "grpo"},
        "train_dataset": {
            "path": str(folder / "train.jsonl"),
            "batch_size": case.num_prompts,
        },
        "gconfig": {
            "n_samples": case.num_samples,
            "max_new_tokens": case.max_new_tokens,
            "stop_token_ids": case.stop_ids,
        },
        "reward": {"fn": f"{folder / 'reward.py'}:score"},
        "total_train_epochs": 1,
        "total_train_steps": num_steps,
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe))  # JSON is valid YAML
    return path


def lengthen_prompts(path: Path, length: int) -> None:
    """Puts random digits before each prompt, up to `length` tokens: one per byte."""
    digits = random.Random(0)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        missing = length - len(row["prompt"])
        row["prompt"] = "".join(digits.choices("0123456789", k=missing)) + row["prompt"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@contextmanager
def watched(path: Path, device: torch.device) -> Iterator[None]:
    """Records GPU utilisation to `path`, several times a second."""
    if device.type != "cuda" or shutil.which("nvidia-smi") is None:
        yield
        return
    query = ["--query-gpu=timestamp,utilization.gpu", "--format=csv,noheader,nounits"]
    command = ["nvidia-smi", *query, f"--loop-ms={WATCH_MS}", f"--id={device.index or 0}"]
    with path.open("wb") as file, subprocess.Popen(command, stdout=file) as process:
        try:
            yield
        finally:
            process.terminate()


def idle_share(path: Path, begin_s: float, end_s: float) -> float | None:
    """Share of a time span in which the GPU was idle, by the driver's utilisation counter; None if
    not measured."""
    if not path.is_file():
        return None
    busy = []
    for line in path.read_text().splitlines():
        moment, _, share = line.partition(",")
        try:
            at = datetime.strptime(moment.strip(), "%Y/%m/%d %H:%M:%S.%f").timestamp()
            if begin_s <= at <= end_s:
                busy.append(float(share) / 100)
        except ValueError:  # incomplete last line
            continue
    return 1.0 - statistics.mean(busy) if busy else None
