"""A run folder with the files of a short run, written as a run writes them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pentad.core.types import Group, Prompt, Sample
from pentad.telemetry.record import Rl, StepRecord
from pentad.trainer.saving.batches import BatchKeeper, TrainedTokens, write_trained

MakeRun = Callable[..., Path]


def step_line(step: int, **more: Any) -> dict[str, Any]:
    rl = Rl(reward_mean=step / 100, reward_parts={"correct": step / 200}, staleness={"0": 10})
    phases = {"rollout": 100.0, "train": 300.0, "other": 1.0}
    record = StepRecord(
        step=step,
        time_s=1e9 + 2.0 * step,
        loss=1.0 / step,
        wall_clock_ms=401.0,
        phases=phases,
        rl=rl,
    )
    return record.as_json() | more


def sample_line(step: int, index: int = 0, text: str = "12345", **more: Any) -> dict[str, Any]:
    return {
        **{"step": step, "pick": ("best", "worst", "random")[min(index, 2)], "gid": step},
        **{"index": index, "epoch": 0, "attempt": 0, "question": f"q{step % 3}>", "prompt": "p"},
        **{"expected": "1", "text": text, "turns": [], "reward": 1.0 - index / 4},
        **{"reward_parts": {"reward": 0.5}, "finish": "stop", "num_sampled": 2 + index},
        **{"min_version": step - 1, "max_version": step - 1, "ids": [5, 6, 7], "nonfinite": None},
        **{"trained_spans": [[1, 3]], **more},
    }


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    def make(name: str = "trial0", *, num_steps: int = 20, **config: Any) -> Path:
        folder = tmp_path / "runs" / "logs" / "me" / "exp" / name
        folder.mkdir(parents=True)
        start = {"time": "2026-03-01T12:00:00+00:00", "from_step": 0, "generation": 0}
        known = {"total_train_steps": 20, "trial_name": name, **config}
        manifest = {
            "format": 1,
            "config_digest": "d",
            "seed": 1,
            "config": known,
            "starts": [start],
        }
        (folder / "manifest.json").write_text(json.dumps(manifest))
        write_lines(folder / "steps.jsonl", [step_line(n) for n in range(1, num_steps + 1)])
        samples = [sample_line(n, k) for n in range(1, num_steps + 1) for k in range(3)]
        write_lines(folder / "samples.jsonl", samples)
        write_lines(folder / "evals.jsonl", [{"version": 0, "accuracy": 0.5}])
        keep_batch(folder, num_steps)
        return folder

    return make


def keep_batch(folder: Path, step: int) -> None:
    samples = [
        Sample(
            ids=np.array([5, 6, 7]),
            mask=np.array([False, True, True]),
            rollout_logprobs=np.array([0, -0.1 - n, -0.5], dtype=np.float32),
            versions=np.array([-1, step - 1, step - 1]),
            finish="stop",
            text=f"answer {n}",
            reward=float(n),
            reward_parts={"correct": float(n)},
        )
        for n in range(4)
    ]
    keeper = BatchKeeper(folder / "batches", 4, {"size": {"max_row_tokens": 3}})
    figures = [
        TrainedTokens(step, n, np.array([0, n - 1.5, n - 1.5]), one.rollout_logprobs + np.log(2))
        for n, one in enumerate(samples)
    ]
    keeper.keep(
        step,
        [Group(Prompt(step, (), {}), samples)],
        lambda path: write_trained(Path(path), figures),
    )
