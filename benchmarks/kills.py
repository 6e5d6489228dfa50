"""What the loss of a process costs: SIGKILL of each role at random moments of small CPU runs.

    python benchmarks/kills.py --kills 20 [--minutes 30] [--roles rollout learner ref reward]

Every run samples and trains as processes of their own (async, staleness 1), with a reference that
scores in a process of its own and a reward of the user's in the reward pool. A process of the role
is killed at random moments until the run has ended; then every group must have been trained once
and in its batch. Printed, a line for each role when it is done: kills, runs, how often the role
worked again and the seconds until it did (a sampler serves, the learners have trained a step, a
scorer has scored, a reward worker has answered), by the run's own log. Past `--minutes` no more is
killed and no run is started; what was found by then is printed.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from pentad.data.toy import write_model, write_task
from pentad.telemetry.steps import read_lines

STEPS, BATCH = 12, 4
AGAIN = {
    "rollout": re.compile(r"rollout-\d serves again ([0-9.]+) s after it was lost"),
    "learner": re.compile(r"training resumed: a step ended ([0-9.]+) s after the failure"),
    "ref": re.compile(r"the ref scores again ([0-9.]+) s after it was lost"),
    "reward": re.compile(r"a reward worker answers again ([0-9.]+) s after it was lost"),
}
REWARD = """
from pentad.rewards.verifiers import sort_digits


def judge(completion, answer):
    return sort_digits(completion, answer)
"""


def processes_of(parent: int, role: str) -> list[int]:
    mark = "rewards.warden" if role == "reward" else f"role_host\0{role}-"
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            words = (folder / "stat").read_text().rpartition(") ")[2].split()
            is_role = mark in (folder / "cmdline").read_text()
            if words[1] == str(parent) and words[0] != "Z" and is_role:
                found.append(int(folder.name))
    return found


def run_with_kills(
    folder: Path, role: str, trial: str, draw: random.Random, most: int, until: float
) -> int:
    """One run, whose processes of the role are killed now and then; how many kills it met."""
    given = [
        *(f"fileroot={folder}", "user=me", f"trial_name={trial}", "mode=async"),
        *("max_staleness=1", "scheduler.processes=separate", "recover.freq_steps=1"),
        *(f"actor.path={folder / 'model'}", "actor.init_from_scratch=true"),
        *(f"train_dataset.path={folder / 'train.jsonl'}", f"train_dataset.batch_size={BATCH}"),
        *("gconfig.n_samples=4", "gconfig.max_new_tokens=24", "algorithm.kl_coef=0.1"),
        *(f"reward.fn={folder / 'reward.py'}:judge", "reward.num_workers=2"),
        *("reward.allow_weaker=true", "total_train_epochs=100", f"total_train_steps={STEPS}"),
        *("telemetry.samples_per_step=16", "recover.retries=100", "rollout.restarts=100"),
    ]
    log = folder / f"{trial}.out"
    steps = folder / "logs/me/default" / trial / "steps.jsonl"
    with log.open("wb") as output:
        command = [sys.executable, "-m", "pentad.cli.main", "train", *given]
        run = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        kills = 0
        while run.poll() is None:
            wanted = len(read_lines(steps)) + draw.randint(1, 2)
            wait = draw.uniform(0.0, 1.5)
            while run.poll() is None and len(read_lines(steps)) < wanted:
                time.sleep(0.05)
            time.sleep(wait)
            found = processes_of(run.pid, role)
            if found and run.poll() is None and kills < most and time.monotonic() < until:
                with suppress(ProcessLookupError):
                    os.kill(draw.choice(found), signal.SIGKILL)
                    kills += 1
    if run.returncode != 0:
        raise SystemExit(f"{trial} failed:\n{log.read_text()[-3000:]}")
    return kills


def check_groups(folder: Path, trial: str) -> None:
    trained: dict[int, set[int]] = {}
    for line in read_lines(folder / "logs/me/default" / trial / "samples.jsonl"):
        trained.setdefault(line["step"], set()).add(line["gid"])
    expected = {n + 1: set(range(n * BATCH, (n + 1) * BATCH)) for n in range(STEPS)}
    assert trained == expected, f"{trial}: groups were lost, or trained twice"


def try_role(folder: Path, role: str, asked: argparse.Namespace, until: float) -> str:
    """Its line of the table."""
    draw, kills, runs, seconds = random.Random(asked.seed), 0, 0, []
    while kills < asked.kills and time.monotonic() < until:
        trial = f"{role}{runs}"
        kills += run_with_kills(folder, role, trial, draw, asked.kills - kills, until)
        check_groups(folder, trial)
        log = (folder / "logs/me/default" / trial / "log.txt").read_text()
        seconds += [float(found) for found in AGAIN[role].findall(log)]
        runs += 1
    median, worst = (statistics.median(seconds), max(seconds)) if seconds else (0.0, 0.0)
    end = "each trained once" if runs else "no time was left"
    return f"{role:8} {kills:5} {runs:5} {len(seconds):6} {median:9.1f} {worst:7.1f}  {end}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="of each role")
    parser.add_argument("--minutes", type=float, default=60.0, help="for all roles together")
    parser.add_argument("--roles", nargs="+", choices=list(AGAIN), default=list(AGAIN))
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    end = time.monotonic() + 60 * asked.minutes
    print(f"{'role':8} kills  runs  again  median s   max s  groups", flush=True)
    with tempfile.TemporaryDirectory(prefix="pentad-kills-") as name:
        folder = Path(name)
        write_model(folder / "model")
        write_task(folder, seed=5, num_train=64, num_sft=4, num_valid=2)
        (folder / "reward.py").write_text(REWARD)
        for number, role in enumerate(asked.roles):
            now = time.monotonic()
            until = now + (end - now) / (len(asked.roles) - number)
            print(try_role(folder, role, asked, until), flush=True)


if __name__ == "__main__":
    main()
