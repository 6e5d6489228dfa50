"""Scenarios of RL runs: samplers, weights on their way to them, rewards."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

from pentad.chaos.broken_run import ChaosRun, require
from pentad.chaos.invariants import check_groups
from pentad.chaos.scenarios import (
    RECOVERED,
    WENT_ON,
    Scenario,
    kill_rank,
    kill_scheduler,
    says,
    shrink,
)

NUM_BAD = 2
"""Rows whose reward fails."""


def kill_sampler(trial: ChaosRun, at: str, words: tuple[str, ...] = ()) -> None:
    version = trial.draw.randint(1, trial.workload.steps - 2)
    what = {"generate": "as it samples with", "install": "between weights and receipt of"}
    trial.done = f"SIGKILL of a sampler {what[at]} version {version}"
    fault = trial.fault(at, "kill", step=version)
    trial.start_until(fault, words=words)
    trial.wait_end()
    says(trial, "is lost: ", "SIGKILL")
    note_served(trial)
    check_groups(trial, None)


def note_served(trial: ChaosRun) -> None:
    """A step sampled before may end meanwhile: the run says how long a sampler was away."""
    found = re.findall(r"serves again ([0-9.]+) s after it was lost", trial.said)
    trial.recovery_s = max(map(float, found), default=None)


def kill_one_of_two(trial: ChaosRun) -> None:
    """The other one takes its groups: in other company, which rounds otherwise."""
    kill_sampler(trial, "generate", ("allocation_mode=embedded:d2|archon:d2",))


def kill_samplers(trial: ChaosRun) -> None:
    version = trial.draw.randint(1, trial.workload.steps - 2)
    trial.done = f"SIGKILL of both samplers while one samples with version {version}"
    fault = trial.fault("generate", "hold", step=version)
    trial.start_until(fault, words=["allocation_mode=embedded:d2|archon:d2"])
    trial.kill(trial.roles("rollout"))
    trial.wait_end()
    says(trial, "serves again")
    note_served(trial)
    check_groups(trial, None)


def shrink_and_grow(trial: ChaosRun) -> None:
    """Fewer ranks round otherwise, so samples may differ; prompts may not."""
    shrink(trial, grows=True)
    check_groups(trial, None)


def fail_reward(trial: ChaosRun, how: str) -> None:
    """Rewards of two rows fail every time; other rows take their place."""
    folder = trial.workload.folder
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    for row in trial.draw.sample(rows[: 4 * trial.workload.steps], NUM_BAD):
        row["answer"] = "BAD"
    data = Path(f"{trial.folder / trial.name}.jsonl")
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trial.done = f"the reward of {NUM_BAD} rows {how}s"
    words = [f"train_dataset.path={data}", f"reward.fn={folder / 'rewards.py'}:{how}"]
    trial.start(words=[*words, "train_dataset.shuffle=false", "reward.timeout_s=5"])
    trial.wait_end()
    dropped = trial.lines[-1]["funnel"]["dropped"]
    require(sum(dropped.values()) >= NUM_BAD, f"dropped: {dropped}")
    check_groups(trial, None)


OF_ROLLOUT = (
    Scenario("kill-sampler", partial(kill_sampler, at="generate"), RECOVERED, "rl", is_soaked=True),
    Scenario("kill-one-of-two-samplers", kill_one_of_two, RECOVERED, "rl", is_equal=False),
    Scenario("kill-all-samplers", kill_samplers, RECOVERED, "rl", is_equal=False),
    Scenario("cut-weight-sync", partial(kill_sampler, at="install"), RECOVERED, "rl"),
    Scenario("kill-learner", partial(kill_rank, at="backward"), RECOVERED, "rl", is_soaked=True),
    Scenario(
        "kill-scheduler-rl", partial(kill_scheduler, at="backward"), RECOVERED, "rl", is_soaked=True
    ),
    Scenario("shrink-and-grow-rl", shrink_and_grow, RECOVERED, "rl", is_equal=False),
    Scenario("reward-hang", partial(fail_reward, how="hang"), WENT_ON, "rl", is_equal=False),
    Scenario("reward-crash", partial(fail_reward, how="crash"), WENT_ON, "rl", is_equal=False),
)
