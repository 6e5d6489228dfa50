"""TRL's side of `lora_gpu.py sums`: GRPOTrainer with PEFT on two-digit sums, held-out accuracy.

    python benchmarks/lora_trl.py --model models/SmolLM2-135M-Instruct --steps 60 --rank 32

The task, the size of a batch, the rank and the learning rate are those of `lora_gpu.py sums`;
everything else is TRL's default. TRL samples with vLLM in its own process if it is installed and
there is a GPU. Answers to the held-out questions are greedy, by PEFT's model in its own dtype.
Without --rank all weights are trained, at the recipe's learning rate.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from pentad.rewards.verifiers import numeric  # noqa: E402

NUM_PROMPTS, NUM_SAMPLES, NEW_TOKENS = 64, 16, 32
LEARNING_RATE = 5e-6
"""The recipe's; an adapter has twenty times as much, as in `lora_gpu.py sums`."""
FACTOR = 20
IS_GPU = torch.cuda.is_available()


def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    texts = [one[0]["content"] for one in completions]
    return [numeric(text, a).value for text, a in zip(texts, answer, strict=True)]


def read_rows(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        {"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]}
        for row in rows
    ]


def dataset_of(rows: list[dict[str, Any]]) -> Any:
    import pyarrow
    from datasets import Dataset
    from datasets.table import InMemoryTable

    # A given fingerprint: computing one pickles pyarrow types, which fails on Python 3.12.
    return Dataset(InMemoryTable(pyarrow.Table.from_pylist(rows)), fingerprint="sums")


@torch.no_grad()
def accuracy(model: Any, tokenizer: Any, rows: list[dict[str, Any]]) -> float:
    tokenizer.padding_side = "left"
    texts = [
        tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
        for row in rows
    ]
    given = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    given = {key: given[key].to(model.device) for key in ("input_ids", "attention_mask")}
    model.eval()
    with torch.autocast(model.device.type, torch.bfloat16, enabled=IS_GPU):
        ids = model.generate(**given, max_new_tokens=NEW_TOKENS, do_sample=False)
    model.train()
    new = tokenizer.batch_decode(ids[:, given["input_ids"].shape[1] :], skip_special_tokens=True)
    pairs = zip(new, rows, strict=True)
    return statistics.mean(numeric(text, row["answer"]).value for text, row in pairs)


def options(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    whole = given.prompts * NUM_SAMPLES
    has_vllm = IS_GPU and importlib.util.find_spec("vllm") is not None
    rate = LEARNING_RATE * (FACTOR if given.rank else 1)
    return {
        "output_dir": str(folder / "out"),
        "learning_rate": given.lr or rate,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": whole // 2,
        "gradient_accumulation_steps": 2,
        "num_generations": NUM_SAMPLES,
        "max_completion_length": NEW_TOKENS,
        "max_steps": given.steps,
        "beta": 0.0,
        "bf16": IS_GPU,
        "use_cpu": not IS_GPU,
        "gradient_checkpointing": False,
        "use_vllm": has_vllm,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.15,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
    }


def train(given: argparse.Namespace, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # late, since the import is slow

    torch.manual_seed(given.seed)
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    adapter = None
    if given.rank:
        from peft import LoraConfig

        adapter = LoraConfig(r=given.rank, lora_alpha=32, target_modules="all-linear")
    test = read_rows(folder / "test.jsonl")[: given.test]
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())
            if len(ends) % given.every == 0 or len(ends) == given.steps:
                score = accuracy(trainer.model, tokenizer, test)
                print(f"held out after {len(ends)} steps: {score:.3f}", flush=True)
                ends[-1] = time.perf_counter()

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(seed=given.seed, **options(given, folder)),
        train_dataset=dataset_of(read_rows(folder / "train.jsonl")),
        processing_class=tokenizer,
        callbacks=[Clock()],
        peft_config=adapter,
    )
    print(f"held out before: {accuracy(trainer.model, tokenizer, test):.3f}", flush=True)
    trainer.train()
    walls = [b - a for a, b in zip(ends, ends[1:], strict=False)]
    print(f"median step of {len(walls)}: {1e3 * statistics.median(walls):.0f} ms")
    if IS_GPU:
        print(f"peak allocated: {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of the pretrained model")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=20, help="steps between evaluations")
    parser.add_argument("--rank", type=int, help="rank of an adapter; without it all weights")
    parser.add_argument("--lr", type=float, help="learning rate instead of the recipe's")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=NUM_PROMPTS)
    parser.add_argument("--test", type=int, default=500, help="held-out questions")
    given = parser.parse_args()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    with tempfile.TemporaryDirectory(prefix="pentad-trl-") as name:
        script = ROOT / "examples/math/sums.py"
        subprocess.run([sys.executable, str(script), name], check=True)
        train(given, Path(name))


if __name__ == "__main__":
    main()
