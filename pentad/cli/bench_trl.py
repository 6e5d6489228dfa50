"""The peer of `pentad bench rl`: the same GRPO steps by TRL's GRPOTrainer, where it is installed.

Same model config with random weights, prompts, group size, stop ids, reward and optimizer. TRL
samples with vLLM in its own process where that is installed and there is a GPU, else with
transformers. It runs as a process of its own: `python -m pentad.cli.bench_trl FOLDER`, over a
folder that `bench_rl.write_recipe` made.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from pentad.cli.bench_rl import NUM_WARM, RlCase, idle_share, watched, write_recipe

MICROBATCH_TOKENS = 32_768
"""Of a forward and backward of TRL, padded."""
LIMIT_S = 900
NUM_SHOWN = 20
"""Last lines of a peer that failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrlMeasured:
    """Of one step, the median of the counted ones, and the tokens sampled over wall clock."""

    wall_ms: float
    rollout_ms: float
    """Sampling, and the weights' way to the sampler."""
    tokens_per_s: float
    sampler: str
    span: tuple[float, float]
    """When the counted steps began and ended."""
    peak_gib: float | None
    idle_share: float | None = None


def is_installed() -> bool:
    return importlib.util.find_spec("trl") is not None


def measure(case: RlCase, device: torch.device, num_steps: int) -> TrlMeasured | str:
    """What a process with TRL measured, or why it did not."""
    with TemporaryDirectory(prefix="pentad-bench-trl-") as name:
        folder = Path(name)
        write_recipe(case, folder, NUM_WARM + num_steps)
        about = {
            "device": device.type,
            "stop_ids": case.stop_ids,
            "num_prompts": case.num_prompts,
            "num_samples": case.num_samples,
            "max_new_tokens": case.max_new_tokens,
            "num_steps": NUM_WARM + num_steps,
        }
        (folder / "case.json").write_text(json.dumps(about))
        command = [sys.executable, "-m", "pentad.cli.bench_trl", name]
        log = folder / "trl.log"
        try:
            with log.open("wb") as output, watched(folder / "busy.csv", device):
                subprocess.run(command, stdout=output, stderr=output, timeout=LIMIT_S, check=True)
        except subprocess.TimeoutExpired:
            return f"TRL took longer than {LIMIT_S} s"
        except subprocess.CalledProcessError:
            lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
            print("\n".join(lines[-NUM_SHOWN:]), file=sys.stderr)
            return f"TRL failed: {lines[-1]}"
        found = TrlMeasured(**json.loads((folder / "found.json").read_text()))
        return replace(found, idle_share=idle_share(folder / "busy.csv", *found.span))


def run_steps(folder: Path) -> TrlMeasured:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    case = json.loads((folder / "case.json").read_text())
    is_gpu = case["device"] == "cuda"
    has_vllm = is_gpu and importlib.util.find_spec("vllm") is not None
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "model"))
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model.save_pretrained(folder / "model")
    del model
    import pyarrow  # these import for long, and a model may fail before
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from trl import GRPOConfig, GRPOTrainer

    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    table = pyarrow.Table.from_pylist([{"prompt": row["prompt"]} for row in rows])
    # With a fingerprint: to make one datasets pickles types of pyarrow, which fails on Python 3.12.
    data = Dataset(InMemoryTable(table), fingerprint=folder.name)
    times: list[float] = []
    sampling: list[float] = []
    lengths: list[int] = []

    def score(completion_ids: list[list[int]], **_: Any) -> list[float]:
        lengths.append(sum(map(len, completion_ids)))
        return [(sum(ids) % 97) / 97 for ids in completion_ids]

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if is_gpu:
                torch.cuda.synchronize()
            times.append(time.time())

    whole = case["num_prompts"] * case["num_samples"]
    microbatch = max(1, min(whole, MICROBATCH_TOKENS // (case["max_new_tokens"] + 16)))
    while whole % microbatch:
        microbatch -= 1
    stops = {"stop_token_ids": case["stop_ids"]} if has_vllm else None
    config = GRPOConfig(
        output_dir=str(folder / "out"),
        learning_rate=1e-6,
        per_device_train_batch_size=microbatch,
        gradient_accumulation_steps=whole // microbatch,
        num_generations=case["num_samples"],
        max_completion_length=case["max_new_tokens"],
        max_steps=case["num_steps"],
        beta=0.0,
        bf16=is_gpu,
        use_cpu=not is_gpu,
        gradient_checkpointing=False,
        use_vllm=has_vllm,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.3,
        generation_kwargs=stops,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=score,
        args=config,
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    trainer.eos_token_ids = case["stop_ids"]
    if not has_vllm:
        trainer.generation_config.eos_token_id = case["stop_ids"]
        trainer.generation_kwargs["eos_token_id"] = case["stop_ids"]
    generate = trainer._generate

    def timed(*given: Any) -> Any:
        started = time.perf_counter()
        found = generate(*given)
        sampling.append(1e3 * (time.perf_counter() - started))
        return found

    trainer._generate = timed
    trainer.train()
    walls = [1e3 * (b - a) for a, b in zip(times, times[1:], strict=False)][NUM_WARM - 1 :]
    drawn = lengths[NUM_WARM:]
    return TrlMeasured(
        wall_ms=statistics.median(walls),
        rollout_ms=statistics.median(sampling[NUM_WARM:]),
        tokens_per_s=1e3 * sum(drawn) / sum(walls),
        span=(times[NUM_WARM - 1], times[-1]),
        peak_gib=torch.cuda.max_memory_allocated() / 2**30 if is_gpu else None,
        sampler="vLLM in the same process" if has_vllm else "transformers",
    )


def main() -> None:
    folder = Path(sys.argv[1])
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    (folder / "found.json").write_text(json.dumps(asdict(run_steps(folder))))


if __name__ == "__main__":
    # Under its own name: datasets pickles what belongs to __main__ with all that it can reach.
    from pentad.cli import bench_trl

    bench_trl.main()
