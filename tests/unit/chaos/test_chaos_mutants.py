"""Every check of `pentad chaos` fails at least once: made-up runs, each with one thing wrong.
`tests/invariants/test_chaos_mutants_live.py` has programs with one thing wrong."""

import json
import os
import random
import subprocess
import sys

import pytest

from pentad.cli.recipe import Recipe
from pentad.data.toy import write_byte_model, write_task
from pentad_tools.chaos import invariants
from pentad_tools.chaos.broken_run import MARK, Broken, ChaosRun
from pentad_tools.chaos.chaos import workloads_of
from pentad_tools.chaos.invariants import CHECKS
from pentad_tools.chaos.scenarios import SCENARIOS
from pentad_tools.chaos.workloads import Workload

pytestmark = pytest.mark.chaos

STEPS, EXPERTS, TOP_K = 4, 4, 2
ELSEWHERE = {"whole": "tests/invariants/test_chaos_runs.py::test_each_check_holds_and_can_fail"}
"""Checks whose mutants need a real checkpoint."""


class Made:
    """A run folder as a run of four steps leaves it."""

    def __init__(self, root, name="run"):
        load = Workload("made", "train", (), STEPS, 2, EXPERTS, TOP_K)
        self.trial = ChaosRun(load, root, name, random.Random(0), num_starts=1)
        self.starts = [{"generation": 0, "from_step": 0}]
        self.lines = [
            {
                "step": step,
                "generation": 0,
                "loss": 1.0 / step,
                "rows_digest": f"rows {step}",
                "num_tokens": 100,
                "kernel": {"tokens_per_expert_mean": 100 * TOP_K / EXPERTS, "balance": {"1": {}}},
                "collective": {"pairs_computed": 100 * TOP_K, "dispatch_bytes": 64},
            }
            for step in range(1, STEPS + 1)
        ]
        self.samples = [
            {"step": step, "gid": 2 * step + n} for step in range(1, STEPS + 1) for n in (0, 1)
        ]
        self.said = ""
        self.weights = b"weights"

    def write(self):
        trial = self.trial
        trial.records.mkdir(parents=True, exist_ok=True)
        (trial.records / "manifest.json").write_text(json.dumps({"starts": self.starts}))
        for name, lines in (("steps", self.lines), ("samples", self.samples)):
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (trial.records / f"{name}.jsonl").write_text(text)
        (trial.records / "log.txt").write_text(self.said)
        export = trial.checkpoints / "default" / f"epoch0epochstep{STEPS - 1}globalstep{STEPS - 1}"
        export.mkdir(parents=True, exist_ok=True)
        (export / "model.safetensors").write_bytes(self.weights)
        return trial


def lose_a_step(made):
    del made.lines[1]


def train_a_step_twice(made):
    made.lines.insert(2, {**made.lines[1], "step": 2})


def end_a_step_early(made):
    del made.lines[-1]


def go_further_back(made):
    made.starts = [{"generation": n, "from_step": step} for n, step in enumerate((0, 3, 2))]
    made.trial.num_starts = 3


def forget_a_start(made):
    made.starts = [{"generation": 1, "from_step": 0}]


def train_what_was_restored(made):
    made.starts[0]["from_step"] = 1


def change_a_weight(made):
    made.weights = b"Weights"


def change_a_record(made):
    made.lines[2]["loss"] += 1e-9


def change_a_loss(made):
    made.lines[2]["loss"] *= 1.01


def train_other_rows(made):
    made.lines[2]["rows_digest"] = "others"


def train_other_groups(made):
    made.samples[0]["gid"] = 99


def train_a_group_twice(made):
    made.samples[2]["gid"] = made.samples[0]["gid"]


def leave_a_group_out(made):
    del made.samples[3]


def lose_a_token(made):
    made.lines[1]["kernel"]["tokens_per_expert_mean"] -= 1 / EXPERTS


def lose_a_pair_after_dispatch(made):
    """The router chose all of them; one did not arrive at its expert."""
    made.lines[1]["collective"]["pairs_computed"] -= 1


def leave_weights(made):
    """As /dev/shm/pentad-weights-x of a scheduler that the next start did not clean up after."""
    left = made.trial.folder / "pentad-weights-x"
    left.mkdir()
    made.trial.shared.add(left)


def leave_samples(made):
    left = made.trial.folder / "pentad-store-x"
    left.mkdir()
    made.trial.shared.add(left)


def open_more_files(made):
    made.trial.handles += [(1, 20), (1, 40)]


def restart_as_a_whole(made):
    """The restarted sampler did not get the newest weights: the run failed, and all began anew."""
    made.trial.restarts = frozenset({"samplers"})
    made.starts.append({"generation": 1, "from_step": 2})
    made.said = "rollout-0 serves again 1.0 s after it was lost, with weights of version 2"


def restart_no_sampler(made):
    made.trial.restarts = frozenset({"samplers"})


def restart_no_rank(made):
    made.trial.restarts = frozenset({"ranks"})


def restart_a_sampler(made):
    made.said = "rollout-0 serves again 1.0 s after it was lost, with weights of version 2"


def replace_a_sampler(made):
    """Closed and made anew, which the run does not mention."""
    made.trial.processes |= {(1, "rollout-0", 7), (1, "rollout-0", 8), (2, "rollout-0", 9)}


def replace_a_rank(made):
    made.trial.processes |= {(1, "learner-1", 7), (1, "learner-1", 8), (1, "learner-0", 9)}


MUTANTS = [
    ("once", lose_a_step, "one is missing or twice"),
    ("once", train_a_step_twice, "one is missing or twice"),
    ("once", end_a_step_early, "3 steps, not 4"),
    ("monotone", go_further_back, "went further back"),
    ("monotone", forget_a_start, "generations"),
    ("monotone", train_what_was_restored, "was restored already"),
    ("equal", change_a_weight, "weights of the last step differ"),
    ("equal", change_a_record, "the record of step 3 differs in"),
    ("equal", train_other_groups, "the groups that were trained differ"),
    ("near", change_a_loss, "step 3: the loss differs"),
    ("near", train_other_rows, "step 3 trained other samples"),
    ("near", train_other_groups, "the groups that were trained differ"),
    ("groups", train_a_group_twice, "a group was trained in two steps"),
    ("groups", leave_a_group_out, "different numbers of groups"),
    ("tokens", lose_a_token, "tokens at experts, not"),
    ("tokens", lose_a_pair_after_dispatch, "step 2: 199 pairs were computed, not 200"),
    ("leaks", leave_weights, "folders that are left: .*pentad-weights-x"),
    ("leaks", leave_samples, "folders that are left: .*pentad-store-x"),
    ("leaks", open_more_files, "open files of the scheduler grew"),
    ("restarts", restart_as_a_whole, "2 groups of ranks in 1 starts of the run: ranks were start"),
    ("restarts", restart_no_sampler, "no sampler serves again"),
    ("restarts", restart_no_rank, "the ranks were not started again"),
    ("restarts", restart_a_sampler, r"samplers were started again: ..rollout-0"),
    ("restarts", replace_a_sampler, r"samplers were started again: ..rollout-0"),
    ("restarts", replace_a_rank, r"ranks were started again: ..learner-1"),
]


def test_every_check_has_a_mutant():
    assert set(CHECKS) == {check for check, _, _ in MUTANTS} | set(ELSEWHERE)


@pytest.mark.parametrize(
    "check, mutate, sentence", MUTANTS, ids=lambda one: getattr(one, "__name__", None)
)
def test_the_check_holds_and_fails_on_its_mutant(tmp_path, check, mutate, sentence):
    whole = Made(tmp_path, "whole").write()
    CHECKS[check](Made(tmp_path).write(), whole)
    made = Made(tmp_path)
    mutate(made)
    with pytest.raises(Broken, match=sentence):
        CHECKS[check](made.write(), whole)


def test_a_process_that_is_left_is_a_leak(tmp_path, monkeypatch):
    trial = Made(tmp_path).write()
    monkeypatch.setattr("pentad_tools.chaos.broken_run.LIMIT_S", 1.0)
    mark = {**os.environ, MARK: str(tmp_path / "run")}
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=mark)
    try:
        with pytest.raises(Broken, match="processes that are left"):
            invariants.check_leaks(trial, None)
    finally:
        left.kill()
        left.wait()


NAMES = ["pentad-weights-x/owner.lock", "pentad-store-x/owner.lock", "pentad-meeting-x/owner.lock"]


@pytest.mark.parametrize("name", NAMES)
def test_temporary_folders_of_a_run_are_seen_among_open_files(tmp_path, name):
    """Of the process itself, which stands for the scheduler; they are still judged when it was
    killed: the next start removes them."""
    path = tmp_path / name
    path.parent.mkdir()
    trial = Made(tmp_path).write()

    class Scheduler:
        pid = os.getpid()

    trial.process = Scheduler()
    with path.open("w"):
        trial.look()
    assert path.parent in trial.shared
    trial.process = None
    with pytest.raises(Broken, match="folders that are left"):
        invariants.check_leaks(trial, None)


def test_what_may_be_restarted_is_said_of_every_scenario_that_kills_a_part():
    """Not of those where the run ends, which are started again by the scenario."""
    said = {one.name: set(one.restarts) for one in SCENARIOS if one.restarts}
    assert {name for name, what in said.items() if "ranks" in what} == {
        *("kill-forward", "kill-backward", "kill-all-reduce", "kill-optimizer", "kill-rank-0"),
        *("kill-two", "kill-in-recovery", "stop-rank", "shrink", "shrink-and-grow"),
        *("poison-batch", "crash-loop", "kill-learner", "shrink-and-grow-rl"),
    }
    assert {name for name, what in said.items() if "ranks" not in what} == {
        *("kill-sampler", "kill-one-of-two-samplers", "kill-all-samplers", "cut-weight-sync"),
    }


@pytest.mark.parametrize(("command", "recorded"), [("train", True), ("sft", False)])
def test_a_recipe_records_every_sample_of_its_steps(tmp_path, command, recorded):
    """Groups of a step are counted by its samples: four of them may be of three groups or four."""
    write_byte_model(tmp_path / "model")
    write_task(tmp_path, seed=1, num_train=8, num_sft=8, num_valid=8)
    name = "train" if recorded else "sft"
    words = [f"actor.path={tmp_path / 'model'}", "actor.init_from_scratch=true"]
    words += [f"train_dataset.path={tmp_path / name}.jsonl", "reward.fn=exact_match"]
    words += ["train_dataset.batch_size=3", "gconfig.n_samples=5"]
    workload = workloads_of(Recipe(None, words, []), command, tmp_path)["any"]
    assert ("telemetry.samples_per_step=15" in workload.words) == recorded
