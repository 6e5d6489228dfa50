"""`pentad chaos` through its command line, and that each of its checks can fail."""

import json
import random
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pentad.cli import main as cli
from pentad_tools.chaos import chaos, invariants, suite
from pentad_tools.chaos.broken_run import Broken, ChaosRun
from pentad_tools.chaos.scenarios import Scenario
from pentad_tools.chaos.workloads import STEPS, Workload

pytestmark = pytest.mark.chaos


def run(*words):
    return CliRunner().invoke(cli.app, ["chaos", *words])


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """A run that went on from the checkpoint before a damaged one, and the whole one."""
    done = run("--scenario", "flipped-bit", "--keep", "--seed", "3")
    assert done.exit_code == 0, done.output
    found = re.search(r"files of the runs are in (\S+)", done.output)
    yield done.output, Path(found[1])
    shutil.rmtree(found[1])


def test_a_damaged_checkpoint_is_passed_over_and_the_run_ends_as_if_nothing_had_happened(broken):
    output, folder = broken
    assert "1 of 1 hold, seed 3" in output
    assert output.count("once monotone whole leaks tokens restarts equal") == 1
    assert list(folder.rglob("flipped-bit/recover_info/globalstep*.damaged"))


def opened(folder, name, tmp_path):
    """A copy that may be spoiled."""
    for kind in ("logs", "checkpoints"):
        place = Path(kind) / "me" / "default" / name
        shutil.copytree(folder / place, tmp_path / place)
    load = Workload("copy", "pretrain", (), STEPS, 1, 4, 2)
    num_starts = 2 if name == "flipped-bit" else 1
    return ChaosRun(load, tmp_path, name, random.Random(0), num_starts=num_starts)


def spoil_once(trial):
    path = trial.records / "steps.jsonl"
    path.write_text(path.read_text() + path.read_text().splitlines()[-1] + "\n")


def spoil_monotone(trial):
    path = trial.records / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["starts"][-1]["from_step"] = 0
    manifest["starts"][0]["from_step"] = 1
    path.write_text(json.dumps(manifest))


def spoil_equal(trial):
    (path,) = trial.checkpoints.glob(f"default/epoch*globalstep{STEPS - 1}/*.safetensors")
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")


def spoil_near(trial):
    path = trial.records / "steps.jsonl"
    digest = json.loads(path.read_text().splitlines()[0])["rows_digest"]
    path.write_text(path.read_text().replace(digest, "f" * len(digest)))


def spoil_whole(trial):
    path = invariants.newest_state(trial)
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")


def spoil_leaks(trial):
    trial.shared.add(trial.folder)


def spoil_tokens(trial):
    path = trial.records / "steps.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[-1]["kernel"]["tokens_per_expert_mean"] += 1
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def spoil_restarts(trial):
    trial.num_starts -= 1


def test_a_half_written_export_is_seen(broken, tmp_path):
    trial = opened(broken[1], "flipped-bit", tmp_path)
    (trial.checkpoints / "default" / ".epoch0epochstep1globalstep1.writing-7").mkdir()
    with pytest.raises(Broken, match="half-made files: .*writing-7"):
        invariants.CHECKS["whole"](trial, None)


@pytest.mark.parametrize(
    "check", ["once", "monotone", "equal", "near", "whole", "leaks", "tokens", "restarts"]
)
def test_each_check_holds_and_can_fail(broken, tmp_path, check):
    _, folder = broken
    trial = opened(folder, "flipped-bit", tmp_path)
    whole = opened(folder, "whole-0", tmp_path)
    invariants.CHECKS[check](trial, whole)
    globals()[f"spoil_{check}"](trial)
    with pytest.raises(Broken):
        invariants.CHECKS[check](trial, whole)


def test_a_scenario_that_does_not_hold_is_named_and_the_exit_status_is_1(monkeypatch):
    def fail(trial):
        trial.done = "nothing"
        raise Broken("it is not as it should be")

    monkeypatch.setattr(suite, "SCENARIOS", (Scenario("bad", fail, "recovered", "any"),))
    monkeypatch.setattr(chaos, "SCENARIOS", suite.SCENARIOS)
    done = run()
    assert done.exit_code == 1
    assert "bad: it is not as it should be" in done.output and "0 of 1 hold" in done.output
    shutil.rmtree(re.search(r"files of the runs are in (\S+)", done.output)[1])


def test_the_seed_chooses_and_unknown_names_are_refused(tmp_path):
    def drawn(seed):
        load = Workload("", "pretrain", (), STEPS, 4)
        draw = random.Random(f"{seed} kill-two 0")
        trial = ChaosRun(load, tmp_path, "", draw)
        return [(trial.some_rank(), trial.some_step()) for _ in range(8)]

    assert drawn(1) == drawn(1) != drawn(2)
    done = run("--scenario", "kill-nobody")
    assert done.exit_code == 2 and "there is no such scenario" in done.output
    listed = run("--list").output.splitlines()
    assert len(listed) == len(suite.SCENARIOS) >= 25
