"""SmolLM2-135M on GSM8K: SFT, then GRPO, and held-out accuracy before and after each.

    python benchmarks/gsm8k_gpu.py MODEL DATA OUT               # one GPU, about 15 minutes
    python benchmarks/gsm8k_gpu.py MODEL DATA OUT --minutes 9   # again, until the table is there
    python benchmarks/gsm8k_gpu.py tiny DATA OUT --try-out      # two steps of each, on a CPU

MODEL is a folder, DATA one with train.jsonl and test.jsonl (columns question and answer).
Recipes, runs and models are in `--work`; OUT gets table.md, evals.json, sft_steps.jsonl,
grpo_steps.jsonl and grpo_evals.jsonl. All goes through the public commands, which resume: the same
command continues what `--minutes` ended.

`gsm8k` is accuracy by the number after `####`, which a model that was not trained here never
writes; `last number` takes the last number of the answer, so that the first row too can be
compared. Greedy, all test questions.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

RECIPE = """\
experiment_name: gsm8k
user: bench
trial_name: {name}
fileroot: {work}
actor:
  path: {model}
  optimizer: {{lr: {lr}, lr_scheduler_type: {schedule}, warmup_steps_proportion: 0.03}}
  mb_spec: {{max_tokens_per_mb: 32768}}
train_dataset:
  path: {data}/train.jsonl
  prompt_key: question
  response_key: answer
  chat_template: true
  batch_size: {batch}
valid_dataset:
  path: {data}/test.jsonl
  limit: {limit}
  shuffle: false
recover: {{freq_secs: 120}}
saver: {{freq_steps: {save}, keep_last: 1}}
total_train_steps: {steps}
"""
REWARDS = """\
reward:
  fn: [gsm8k, numeric]
  weights: [1.0, 0.0]
gconfig: {{n_samples: {samples}, max_new_tokens: {length}}}
rollout: {{max_running: 1024}}
evaluator: {{freq_steps: {evaluate}, max_new_tokens: {length}}}
"""


@dataclass(frozen=True)
class Sizes:
    sft_steps: int = 930  # 4 epochs of 32 rows
    sft_batch: int = 32
    sft_lr: float = 1e-4
    rl_steps: int = 120
    rl_batch: int = 64
    rl_lr: float = 5e-6
    samples: int = 16
    length: int = 256
    evaluate: int = 20
    limit: int = 100_000


TINY = Sizes(sft_steps=2, rl_steps=2, rl_batch=4, samples=2, length=8, evaluate=1, limit=8)


class Stopped(Exception):
    """The time of this call is over; the next one continues."""


@dataclass
class Bench:
    model: str
    data: Path
    out: Path
    work: Path
    sizes: Sizes
    ends_at: float
    env: dict[str, str]

    def run(self, *words: str, keep: Path | None = None) -> str:
        """One `pentad` command; at the end of the time it is stopped as by ctrl-C, saved."""
        print("\n$ pentad", *words, flush=True)
        command = [sys.executable, "-u", "-m", "pentad.cli.main", *words]
        env = {
            **os.environ,
            **self.env,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        with Path(keep or os.devnull).open("w") as file:
            child = subprocess.Popen(command, env=env, stdout=file if keep else None)
            try:
                code = child.wait(max(1.0, self.ends_at - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.send_signal(signal.SIGINT)
                child.wait()
                raise Stopped from None
        if code:
            raise SystemExit(f"gsm8k_gpu: pentad {words[0]} ended with {code}")
        return keep.read_text() if keep else ""

    def recipe(self, name: str, **values: Any) -> str:
        path = self.work / f"{name}.yaml"
        text = RECIPE + (REWARDS if name != "sft" else "")
        s = self.sizes
        values = {
            "limit": s.limit,
            "samples": s.samples,
            "length": s.length,
            "evaluate": s.evaluate,
        } | values
        path.write_text(text.format(name=name, work=self.work, data=self.data, **values))
        return str(path)

    def logs(self, trial: str) -> Path:
        return self.work / "logs/bench/gsm8k" / trial

    def exported(self, trial: str) -> Path:
        """The newest model that a run left."""
        root = self.work / "checkpoints/bench/gsm8k" / trial / "default"
        found = sorted(
            root.glob("epoch*"), key=lambda path: int(path.name.rpartition("globalstep")[2])
        )
        assert found, f"{root} has no model"
        return found[-1]

    def measure(self, name: str, model: str) -> dict[str, Any]:
        """Greedy figures of all test questions, by both readings of an answer."""
        answers, done = self.work / f"answers-{name}.jsonl", self.work / f"eval-{name}.json"
        if not done.exists():
            path = self.recipe(
                "eval",
                model=model,
                lr=1e-5,
                schedule="constant",
                batch=8,
                steps=1,
                save=1,
            )
            begun = time.monotonic()
            text = self.run(
                "eval",
                path,
                "--json",
                "--out",
                str(answers),
                keep=self.work / "eval.out",
            )
            found = json.loads(text)
            lines = [json.loads(line) for line in answers.open()]
            right = [
                line["reward_parts"]["numeric/correct"] for line in lines if "reward_parts" in line
            ]
            found |= {"last_number": sum(right) / len(right), "seconds": time.monotonic() - begun}
            done.write_text(json.dumps(found))
        return json.loads(done.read_text())

    def train(self, command: str, trial: str, **values: Any) -> str:
        """The model of a whole run; its records are copied also where the run is stopped."""
        done = self.work / f"{trial}.done"
        if not done.exists():
            try:
                self.run(command, self.recipe(trial, **values))
                done.touch()
            finally:
                for file in ("steps.jsonl", "evals.jsonl"):
                    if (self.logs(trial) / file).exists() and (trial, file) != (
                        "sft",
                        "evals.jsonl",
                    ):
                        shutil.copy(self.logs(trial) / file, self.out / f"{trial}_{file}")
        return str(self.exported(trial))


def table(bench: Bench, rows: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| | gsm8k | 95% | last number | cut | tokens | steps | seconds a step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        steps = bench.out / f"{name}_steps.jsonl"
        seconds = (
            [json.loads(line)["wall_clock_ms"] / 1000 for line in steps.open()]
            if steps.exists()
            else []
        )
        median = f"{sorted(seconds)[len(seconds) // 2]:.2f}" if seconds else ""
        low, high = row["accuracy_low"], row["accuracy_high"]
        lines.append(
            f"| {name} | {row['accuracy']:.4f} | {low:.4f} to {high:.4f} | "
            f"{row['last_number']:.4f} | {row['truncated_share']:.3f} | {row['length_mean']:.0f} | "
            f"{len(seconds) or ''} | {median} |"
        )
    return "\n".join(lines)


def make_tiny(folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    from pentad.data.toy import write_byte_model

    if not folder.exists():
        write_byte_model(folder)
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)


def play(bench: Bench) -> dict[str, dict[str, Any]]:
    """The stages in order; those that an earlier call finished are read."""
    s, tiny = bench.sizes, bench.model == "tiny"
    first = str(bench.work / "tiny") if tiny else bench.model
    if tiny:
        make_tiny(bench.work / "tiny")
    rows = {"before": bench.measure("before", first)}
    tuned = bench.train(
        "sft", "sft", model=first, lr=s.sft_lr, schedule="cosine",
        batch=s.sft_batch, steps=s.sft_steps, save=s.sft_steps, limit=min(500, s.limit),
    )  # fmt: skip
    rows["sft"] = bench.measure("sft", tuned)
    trained = bench.train(
        "train", "grpo", model=tuned, lr=s.rl_lr, schedule="constant",
        batch=s.rl_batch, steps=s.rl_steps, save=s.rl_steps, limit=min(500, s.limit),
    )  # fmt: skip
    return rows | {"grpo": bench.measure("grpo", trained)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", help="folder of SmolLM2-135M-Instruct, or tiny")
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--work", type=Path, default=Path("runs/gsm8k"))
    parser.add_argument(
        "--minutes", type=float, default=600, help="then stop, saved; the same command continues"
    )
    parser.add_argument("--rl-steps", type=int, help="steps of GRPO (120)")
    parser.add_argument("--try-out", action="store_true", help="two steps of each, on a CPU")
    options = parser.parse_args()
    for folder in (options.out, options.work):
        folder.mkdir(parents=True, exist_ok=True)
    sizes = TINY if options.try_out else Sizes()
    if options.rl_steps:
        sizes = replace(sizes, rl_steps=options.rl_steps)
    model = options.model if options.model == "tiny" else str(Path(options.model).resolve())
    ends_at = time.monotonic() + 60 * options.minutes
    env = {"CUDA_VISIBLE_DEVICES": ""} if options.try_out else {}
    bench = Bench(
        model, options.data.resolve(), options.out, options.work.resolve(), sizes, ends_at, env
    )
    try:
        rows = play(bench)
    except Stopped:
        print(
            "\ngsm8k_gpu: the time is over and the run has saved; the same command continues",
            flush=True,
        )
        return
    (options.out / "evals.json").write_text(json.dumps(rows, indent=1))
    (options.out / "table.md").write_text(table(bench, rows) + "\n")
    print("\n" + table(bench, rows))


if __name__ == "__main__":
    main()
