"""TRL's side of `pentad bench rl`: the same GRPO steps by GRPOTrainer, if TRL is installed.

Same model config with random weights, prompts, group size, stop ids, reward and optimizer. TRL
samples with colocated vLLM if it is installed and there is a GPU, else with transformers. It runs
as a separate process, `python -m pentad_tools.bench.bench_trl FOLDER`, on a folder written by
`bench_rl.write_recipe`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from pentad_tools.bench.bench_rl import RlCase, idle_share, watched, write_recipe

MICROBATCH_TOKENS = 32_768
"""Padded tokens per forward and backward pass of TRL."""
NUM_WARM = 1
"""Steps that are not counted: TRL compiles nothing, and vLLM has captured its graphs before."""
LIMIT_S = 900
"""Time limit of TRL's process in seconds; then its figure covers the steps counted so far."""
FOUND = "found.json"
NUM_SHOWN = 20
"""Number of last output lines shown if TRL fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrlMeasured:
    """Median times of the measured steps, and sampled tokens per second of wall-clock time."""

    wall_ms: float
    rollout_ms: float
    """Time of sampling and of the weight transfer to the sampler."""
    tokens_per_s: float
    sampler: str
    span: tuple[float, float]
    """Begin and end of the counted steps."""
    peak_gib: float | None
    idle_share: float | None = None


def is_installed() -> bool:
    return importlib.util.find_spec("trl") is not None


def measure(case: RlCase, device: torch.device, num_steps: int) -> TrlMeasured | str:
    """Measurements of a TRL process, or the reason why it failed."""
    with TemporaryDirectory(prefix="pentad-bench-trl-") as name:
        folder = Path(name)
        write_recipe(case, folder, NUM_WARM + num_steps)
        about = {
            "device": device.type,
            "stop_ids": case.stop_ids,
            "num_prompts": case.num_prompts,
            "num_samples": case.num_samples,
            "num_row_tokens": (case.prompt_length or 16) + case.max_new_tokens,
            "max_new_tokens": case.max_new_tokens,
            "num_steps": NUM_WARM + num_steps,
        }
        (folder / "case.json").write_text(json.dumps(about))
        command = [sys.executable, "-m", "pentad_tools.bench.bench_trl", name]
        log = folder / "trl.log"
        try:
            with log.open("wb") as output, watched(folder / "busy.csv", device):
                subprocess.run(command, stdout=output, stderr=output, timeout=LIMIT_S, check=True)
        except subprocess.TimeoutExpired:
            if not (folder / FOUND).is_file():
                return f"TRL took longer than {LIMIT_S} s"
        except subprocess.CalledProcessError:
            lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
            print("\n".join(lines[-NUM_SHOWN:]), file=sys.stderr)
            return f"TRL failed: {lines[-1]}"
        found = TrlMeasured(**json.loads((folder / FOUND).read_text()))
        return replace(found, idle_share=idle_share(folder / "busy.csv", *found.span))


class StepClock:
    """Records the end of steps, sampling time and sampled tokens. It writes them after every
    measured step, so a process that is stopped early leaves results."""

    def __init__(self, path: Path, *, is_gpu: bool, sampler: str) -> None:
        self.path, self.is_gpu, self.sampler = path, is_gpu, sampler
        self.ends: list[float] = []
        self.sampling_ms: list[float] = []
        self.num_drawn: list[int] = []

    def score(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        """Reward function of `bench_rl`."""
        self.num_drawn.append(sum(map(len, completion_ids)))
        return [(sum(ids) % 97) / 97 for ids in completion_ids]

    def timed(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            started = time.perf_counter()
            found = generate(*given)
            self.sampling_ms.append(1e3 * (time.perf_counter() - started))
            return found

        return call

    def end_step(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()
        self.ends.append(time.time())
        print(f"step {len(self.ends)} ended", flush=True)
        if len(self.ends) > NUM_WARM:
            self.path.write_text(json.dumps(asdict(self.measured())))

    def measured(self) -> TrlMeasured:
        ends = self.ends[NUM_WARM - 1 :]
        walls = [1e3 * (b - a) for a, b in zip(ends, ends[1:], strict=False)]
        last = NUM_WARM + len(walls)
        return TrlMeasured(
            wall_ms=statistics.median(walls),
            rollout_ms=statistics.median(self.sampling_ms[NUM_WARM:last]),
            tokens_per_s=1e3 * sum(self.num_drawn[NUM_WARM:last]) / sum(walls),
            span=(ends[0], ends[-1]),
            peak_gib=torch.cuda.max_memory_allocated() / 2**30 if self.is_gpu else None,
            sampler=self.sampler,
        )


def run_steps(folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    case = json.loads((folder / "case.json").read_text())
    is_gpu = case["device"] == "cuda"
    has_vllm = is_gpu and importlib.util.find_spec("vllm") is not None
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "model"))
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model.save_pretrained(folder / "model")
    del model
    from trl import GRPOConfig, GRPOTrainer  # late, since the import is slow

    sampler = "vLLM in the same process" if has_vllm else "transformers"
    clock = StepClock(folder / FOUND, is_gpu=is_gpu, sampler=sampler)

    class Ends(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.end_step()

    trainer = GRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=clock.score,
        args=GRPOConfig(output_dir=str(folder / "out"), **options_of(case, has_vllm=has_vllm)),
        train_dataset=read_prompts(folder / "train.jsonl"),
        processing_class=tokenizer,
        callbacks=[Ends()],
    )
    trainer.eos_token_ids = case["stop_ids"]
    if not has_vllm:
        trainer.generation_config.eos_token_id = case["stop_ids"]
        trainer.generation_kwargs["eos_token_id"] = case["stop_ids"]
    trainer._generate = clock.timed(trainer._generate)
    trainer.train()


def options_of(case: dict[str, Any], *, has_vllm: bool) -> dict[str, Any]:
    """Builds the arguments of GRPOConfig."""
    is_gpu = case["device"] == "cuda"
    whole = case["num_prompts"] * case["num_samples"]
    microbatch = max(1, min(whole, MICROBATCH_TOKENS // case["num_row_tokens"]))
    while whole % microbatch:
        microbatch -= 1
    return {
        "learning_rate": 1e-6,
        "per_device_train_batch_size": microbatch,
        "gradient_accumulation_steps": whole // microbatch,
        "num_generations": case["num_samples"],
        "max_completion_length": case["max_new_tokens"],
        "max_steps": case["num_steps"],
        "beta": 0.0,
        "bf16": is_gpu,
        "use_cpu": not is_gpu,
        "gradient_checkpointing": False,
        "use_vllm": has_vllm,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.3,
        "generation_kwargs": {"stop_token_ids": case["stop_ids"]} if has_vllm else None,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def read_prompts(path: Path) -> Any:
    import pyarrow
    from datasets import Dataset
    from datasets.table import InMemoryTable

    rows = [json.loads(line) for line in path.read_text().splitlines()]
    table = pyarrow.Table.from_pylist([{"prompt": row["prompt"]} for row in rows])
    # A given fingerprint: computing one pickles pyarrow types, which fails on Python 3.12.
    return Dataset(InMemoryTable(table), fingerprint="prompts")


def main() -> None:
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    run_steps(Path(sys.argv[1]))


if __name__ == "__main__":
    # Imported by name: datasets pickles objects of __main__ with everything they refer to.
    from pentad_tools.bench import bench_trl

    bench_trl.main()
