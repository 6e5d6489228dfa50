"""Steps with and without over-sampling, on a CPU: `python benchmarks/oversample.py`.

An untrained toy model ends an answer at every token with about the same probability, so lengths are
geometric with a long tail. Each case is one colocated run of the same recipe. Printed per step: the
forward passes of the sampler, CPU seconds of the process, and trained tokens; the first and the
last step are left out.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from pentad.data.toy import write_model, write_task
from pentad.infer.engine import InferenceEngine, Report
from pentad.planner.prepare import prepare
from pentad.telemetry.recorder import Recorder
from pentad.telemetry.steps import read_lines
from pentad.trainer.sources.rollouts import run_train

BATCH, NUM_SAMPLES, LONGEST = 16, 4, 100
num_passes = 0
marks: list[tuple[int, float]] = []
"""Passes and CPU seconds at the record of each step."""


def count_passes() -> None:
    step, record = InferenceEngine.step, Recorder.step

    def counted(self: InferenceEngine, report: Report) -> None:
        global num_passes
        num_passes += 1
        step(self, report)

    def marked(self: Recorder, *given: Any) -> Any:
        marks.append((num_passes, time.process_time()))
        return record(self, *given)

    InferenceEngine.step, Recorder.step = counted, marked  # type: ignore[method-assign]


def run_case(folder: Path, factor: float, steps: int) -> tuple[float, float, float, str]:
    marks.clear()
    words = [
        *(f"fileroot={folder}", f"trial_name=case{factor}", f"actor.path={folder / 'model'}"),
        *("actor.init_from_scratch=true", "actor.gradient_checkpointing=false"),
        *("actor.optimizer.lr=1e-6", f"train_dataset.path={folder / 'train.jsonl'}"),
        *(f"train_dataset.batch_size={BATCH}", f"gconfig.n_samples={NUM_SAMPLES}"),
        *(f"gconfig.max_new_tokens={LONGEST}", "reward.fn=sort_digits", "recover.mode=off"),
        *(f"total_train_steps={steps}", f"rollout.oversample={factor}"),
    ]
    config, notes = prepare(None, words, "train")
    run = run_train(config, notes, device="cpu")
    counted = read_lines(run.records / "steps.jsonl")[1:-1]
    num = len(counted)
    passes, seconds = (b - a for a, b in zip(marks[0], marks[-2], strict=True))
    tokens = sum(record["num_tokens"] for record in counted) / num
    lags: dict[str, int] = {}
    for record in counted:
        for lag, count in record["rl"]["staleness"].items():
            lags[lag] = lags.get(lag, 0) + count
    shares = ", ".join(f"{lag}: {n / sum(lags.values()):.0%}" for lag, n in sorted(lags.items()))
    return passes / num, seconds / num, tokens, shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--factors", type=float, nargs="+", default=[1.0, 1.5, 2.0])
    given = parser.parse_args()
    count_passes()
    with tempfile.TemporaryDirectory(prefix="pentad-oversample-") as name:
        folder = Path(name)
        write_model(folder / "model")
        write_task(folder, seed=5, num_train=1024, num_sft=8, num_valid=8)
        found = {factor: run_case(folder, factor, given.steps) for factor in given.factors}
    base = next(iter(found.values()))
    print("\n| oversample | passes a step | CPU s a step | tokens a step | ratio | lag |")
    print("|---|---|---|---|---|---|")
    for factor, (passes, seconds, tokens, lags) in found.items():
        ratio = (tokens / seconds) / (base[2] / base[1])
        cells = (f"{factor:g}", f"{passes:.0f}", f"{seconds:.2f}", f"{tokens:.0f}", f"{ratio:.2f}")
        print(f"| {' | '.join(cells)} | {lags} |")


if __name__ == "__main__":
    main()
