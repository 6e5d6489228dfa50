"""A start whose storage fails ends with one sentence and leaves everything as it was; the next one
resumes. Only where no checkpoint can be used for good, `--fresh` is the way to step 1."""

import json
from pathlib import Path

import pytest
from read_faults import failing, tree
from run_lab import steps_of

from pentad.checkpoint.folders import find_checkpoints
from pentad.core.errors import RunError

WORDS = (
    *("recover.freq_steps=1", "recover.keep_last=9", "saver.mode=sync"),
    *("trial_name=read", "total_train_epochs=9"),
)
NOTED = ("log.txt", "exit.json", ".generation", "run.lock", "config.yaml")
"""Where a start says what became of it, and counts itself."""
STATE, INFO = "default/recover_checkpoint/globalstep2", "recover_info/globalstep2"
OF_A_CHECKPOINT = (
    *(f"{INFO}/COMMIT", f"{INFO}/manifest.json", "recover_info/globalstep0/COMMIT"),
    *(f"{STATE}/counters.json", f"{STATE}/.metadata", f"{STATE}/__0_0.distcp"),
    *(f"{INFO}/{name}_info.json" for name in ("step", "saver", "evaluator", "stats_logger")),
    *(f"{INFO}/checkpoint_info.json", f"{INFO}/dataloader_info.json"),
    *("recover_info", "default/recover_checkpoint", "."),
)
OF_THE_RECORDS = ("manifest.json", "steps.jsonl", "evals.jsonl", "run.lock")
ERRORS = ("EIO", "ESTALE", "EACCES", "ETIMEDOUT", "EPERM")


def run(lab, num_steps, *more, **options):
    return lab.sft(*WORDS, f"total_train_steps={num_steps}", *more, **options)


def places(summary) -> dict[str, Path]:
    return {"checkpoints": summary.model.parents[1], "records": summary.records}


ALL = [
    (root, path, name)
    for number, (root, path) in enumerate(
        [
            *(("checkpoints", path) for path in OF_A_CHECKPOINT),
            *(("records", path) for path in OF_THE_RECORDS),
        ]
    )
    for name in (ERRORS[number % 5], ERRORS[(number + 2) % 5])
    # A folder that may not be written is bad input.
    if (path, name) not in (("run.lock", "EACCES"), ("run.lock", "EPERM"))
]
FEW = [
    ("checkpoints", f"{INFO}/COMMIT", "EIO"),
    ("checkpoints", f"{STATE}/counters.json", "EACCES"),
    ("records", "manifest.json", "ESTALE"),
]
"""What reads a checkpoint is tried by file and error in `unit/checkpoint/test_read_errors.py`;
these are whole starts."""


@pytest.mark.parametrize(
    "cases", [pytest.param(FEW, id="few"), pytest.param(ALL, id="all", marks=pytest.mark.full)]
)
def test_an_error_where_a_file_is_read_at_the_start_touches_nothing(lab, cases):
    first = run(lab, 3)
    found = places(first)
    before = {name: tree(root, *NOTED) for name, root in found.items()}
    for root, path, name in cases:
        file = found[root] / path
        assert file.exists(), file
        with failing(name, file) as tried, pytest.raises(RunError) as raised:
            run(lab, 5)
        assert tried, f"{file} is not read at the start"
        assert file.name in str(raised.value) or str(file) in str(raised.value)
        assert {name: tree(root, *NOTED) for name, root in found.items()} == before, (file, name)
    again = run(lab, 4)
    assert "resumed after step 3 from" in (again.records / "log.txt").read_text()
    assert [record["step"] for record in steps_of(again)] == [1, 2, 3, 4]


def spoil(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["recover_info/globalstep*/manifest.json", "**/counters.json"])
def test_a_run_whose_checkpoints_are_all_damaged_stops_until_it_is_given_up(lab, name):
    first = run(lab, 3)
    root = first.model.parents[1]
    kept = {file: file.read_bytes() for file in root.glob(name)}
    assert len(kept) == 3
    for file in kept:
        spoil(file)
    for _ in range(2):  # the second start finds them set aside
        with pytest.raises(RunError) as raised:
            run(lab, 4)
        text = str(raised.value)
        assert text.startswith(f"no recovery checkpoint of the run can be used: {root}/{INFO}")
        assert f"`pentad verify-checkpoint {root} --restore` restores intact ones" in text
        assert "--fresh begins at step 1 and gives up 3 trained steps" in text
        assert [record["step"] for record in steps_of(first)] == [1, 2, 3]
        assert not (root / "earlier").exists() and first.model.is_dir()
    again = run(lab, 1, fresh=True)
    assert [record["step"] for record in steps_of(again)] == [1]
    assert list((root / "earlier/001/recover_info").glob("globalstep*.damaged"))


def test_a_manifest_of_a_later_version_ends_the_start_and_stays(lab):
    first = run(lab, 2)
    found = places(first)
    file = found["records"] / "manifest.json"
    text = file.read_text()
    file.write_text(json.dumps(json.loads(text) | {"format": 2}))
    before = {name: tree(root, *NOTED) for name, root in found.items()}
    with pytest.raises(RunError, match="its format is 2, and this version reads 1"):
        run(lab, 3)
    assert {name: tree(root, *NOTED) for name, root in found.items()} == before
    file.write_text(text)
    run(lab, 3)
    assert [one.step for one in find_checkpoints(found["checkpoints"], pytest.fail)] == [2, 1, 0]
