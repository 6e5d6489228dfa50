"""scheduler.type=slurm: the job that is written, what sbatch is given, and that it trains."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from run_cases import settings_of
from sglang_stand_in import write_environment
from typer.testing import CliRunner

from pentad.cli.main import app
from pentad.data.toy import write_model, write_task
from pentad.telemetry.steps import read_lines

pytestmark = pytest.mark.dist

SRUN = """#!/usr/bin/env bash
# Every node's command on this machine; a TERM goes on to all of them, as srun does it.
pids=""
trap 'kill -TERM $pids 2>/dev/null' TERM
nodes=$STUB_NODES first=0
while [ "${1#--}" != "$1" ]; do
    case "$1" in
        --nodes=*) nodes=${1#--nodes=} ;;
        --relative=*) first=${1#--relative=} ;;
        --kill-on-bad-exit=1 | --overlap | --ntasks=*) ;;
        *) echo "srun: unknown option $1" >&2; exit 1 ;;
    esac
    shift
done
echo "step of $nodes nodes from $first on, $SRUN_CPUS_PER_TASK cores a task" >> "$STUB_STEPS"
export SLURMD_NODENAME=127.0.0.1
for node in $(seq 0 $((nodes - 1))); do SLURM_NODEID=$node "$@" & pids="$pids $!"; done
code=0
for pid in $pids; do
    wait $pid; one=$?
    while kill -0 $pid 2>/dev/null; do wait $pid; one=$?; done
    [ $one -ne 0 ] && code=$one
done
exit $code
"""
SCONTROL = """#!/usr/bin/env bash
if [ "$1" = requeue ]; then echo "$2" > "$STUB_REQUEUED"; else echo 127.0.0.1; fi
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    write_model(folder / "model")
    write_task(folder, seed=5, num_train=64, num_sft=64, num_valid=16)
    return folder


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """A folder of stand-ins, first on the path."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def put(folder, name, text):
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def start_job(folder, script, num_nodes, **more):
    """The body of the script as Slurm would start it, in a session of its own."""
    put(folder, "srun", SRUN)
    put(folder, "scontrol", SCONTROL)
    own = {"SLURM_JOB_NODELIST": "here", "SLURM_JOB_ID": str(os.getpid()), **more}
    own |= {"STUB_NODES": str(num_nodes), "STUB_REQUEUED": str(folder / "requeued")}
    own |= {"STUB_STEPS": str(folder / "steps"), "SLURM_CPUS_ON_NODE": "48"}
    return subprocess.Popen(
        ["bash", str(script)],
        env={**os.environ, **own},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def submitted(task, tmp_path, commands):
    """The script of a job of two nodes, which `sbatch` has been given."""
    put(commands, "sbatch", '#!/bin/sh\necho "Submitted batch job 17"\ncp "$1" "$0.given"\n')
    words = settings_of(task, tmp_path, "train", "slurm", "total_train_steps=2")
    layout = ["allocation_mode=embedded:d1|archon:d2", "cluster.n_nodes=2", "scheduler.type=slurm"]
    shown = CliRunner().invoke(app, ["train", *words, *layout])
    assert shown.exit_code == 0, shown.output
    script = tmp_path / "slurm" / "me-default-slurm" / "submit.sh"
    assert f"Submitted batch job 17 ({script};" in shown.output
    assert "the job requests no GPUs" in shown.output
    text = (commands / "sbatch.given").read_text()
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n" in text
    assert "--nnodes=2 --nproc-per-node=1" in text and "#SBATCH --requeue" in text
    return script


def test_a_job_is_written_and_submitted(task, tmp_path, commands):
    assert submitted(task, tmp_path, commands).is_file()


@pytest.mark.full
def test_a_job_trains_on_two_nodes(task, tmp_path, commands):
    job = start_job(commands, submitted(task, tmp_path, commands), 2)
    said, _ = job.communicate(timeout=500)
    assert job.returncode == 0, said
    assert said.count("2 steps done. Records: ") == 1
    assert len(read_lines(tmp_path / "logs/me/default/slurm/steps.jsonl")) == 2


@pytest.mark.full
def test_a_server_runs_on_the_node_that_has_its_gpus(task, tmp_path, commands):
    """Two nodes with a GPU each: the first trains, an agent starts the server on the second."""
    put(commands, "sbatch", "#!/bin/sh\necho Submitted batch job 19\n")
    write_environment(task / "env", "0.5.17")
    words = settings_of(task, tmp_path, "train", "far", "total_train_steps=2")
    words += ["cluster.n_nodes=2", "cluster.n_gpus_per_node=1", "scheduler.type=slurm"]
    words += ["allocation_mode=sglang:d1+archon:d1", f"rollout.server.python={task / 'env'}"]
    shown = CliRunner().invoke(app, ["train", *words])
    assert shown.exit_code == 0, shown.output
    script = tmp_path / "slurm" / "me-default-far" / "submit.sh"
    text = script.read_text()
    assert "--nnodes=1 --nproc-per-node=1" in text and "for node in 1; do" in text
    job = start_job(commands, script, 2)
    said, _ = job.communicate(timeout=500)
    assert job.returncode == 0, said
    assert "2 steps done. Records: " in said
    assert len(read_lines(tmp_path / "logs/me/default/far/steps.jsonl")) == 2
    steps = (commands / "steps").read_text().splitlines()
    assert sorted(steps) == [
        "step of 1 nodes from 0 on, 48 cores a task",
        "step of 1 nodes from 1 on, 48 cores a task",
    ]
    assert not list(Path("/proc").glob(f"{job.pid}/task/*/children"))


@pytest.mark.parametrize(
    ("more", "present", "absent"),
    [
        ([], ["--exclusive", "--mem=0", "--gpus-per-node=8"], ["--cpus-per-task"]),
        (
            ["cluster.n_cpus_per_node=24", "cluster.memory_gb_per_node=180"],
            ["--cpus-per-task=24", "--mem=184320M"],
            ["--exclusive"],
        ),
    ],
)
def test_a_job_asks_for_cores_and_memory(task, tmp_path, more, present, absent):
    words = settings_of(task, tmp_path, "train", "sized", "scheduler.type=slurm", *more)
    words += ["cluster.n_gpus_per_node=8", "allocation_mode=embedded:d8|archon:d8"]
    shown = CliRunner().invoke(app, ["train", *words])
    assert shown.exit_code == 0, shown.output
    text = (tmp_path / "slurm" / "me-default-sized" / "submit.sh").read_text()
    assert all(f"#SBATCH {word}\n" in text for word in present)
    assert not any(f"#SBATCH {word}" in text for word in absent)
    assert "export SRUN_CPUS_PER_TASK=" in text


@pytest.mark.full
@pytest.mark.timeout(900)
def test_before_the_limit_a_job_stops_saved_and_is_queued_again(task, tmp_path, commands):
    put(commands, "sbatch", "#!/bin/sh\necho Submitted batch job 18\n")
    words = settings_of(task, tmp_path, "sft", "long", "total_train_epochs=100000")
    job_words = ["scheduler.type=slurm", "cluster.n_gpus_per_node=1", "allocation_mode=archon:d1"]
    shown = CliRunner().invoke(app, ["sft", *words, *job_words, "--fresh"])
    assert shown.exit_code == 0, shown.output
    script = tmp_path / "slurm" / "me-default-long" / "submit.sh"
    assert "--gpus-per-node=1" in script.read_text()
    records = tmp_path / "logs/me/default/long/steps.jsonl"
    job = start_job(commands, script, 1)
    until = time.monotonic() + 250
    while not (records.is_file() and records.read_text()) and time.monotonic() < until:
        time.sleep(0.1)
    os.kill(job.pid, signal.SIGUSR1)  # as Slurm does it shortly before the time limit
    said, _ = job.communicate(timeout=240)
    assert job.returncode != 0 and "stopped by SIGTERM" in said, said
    assert (commands / "requeued").read_text().split() == [str(os.getpid())]
    trained = len(read_lines(records))
    # Started again it goes on, although the first start was to be a fresh one.
    again = start_job(commands, script, 1, SLURM_RESTART_COUNT="1")
    while len(read_lines(records)) <= trained and time.monotonic() < until + 250:
        time.sleep(0.1)
    os.kill(again.pid, signal.SIGUSR1)
    said, _ = again.communicate(timeout=240)
    assert f"resumed after step {trained}" in said, said


def test_without_sbatch_it_says_where_the_job_is_and_a_refusal_is_passed_on(
    task, tmp_path, commands, monkeypatch
):
    words = settings_of(task, tmp_path, "train", "here", "scheduler.type=slurm")
    script = tmp_path / "slurm" / "me-default-here" / "submit.sh"
    shown = CliRunner().invoke(app, ["train", *words])
    assert shown.exit_code == 0, shown.output
    assert f"There is no sbatch on the path. The job is written: sbatch {script}" in shown.output
    assert Path(script.parent / "config.yaml").is_file()
    put(commands, "sbatch", "#!/bin/sh\necho no such partition >&2\nexit 1\n")
    shown = CliRunner().invoke(app, ["train", *words])
    assert shown.exit_code == 1
    assert f"sbatch refused {script} (exit 1): no such partition" in shown.stderr


def test_what_is_wrong_is_said_before_a_job_is_written(task, tmp_path):
    words = settings_of(task, tmp_path, "train", "bad", "scheduler.type=slurm")
    more = ["cluster.n_nodes=2", "cluster.n_gpus_per_node=1", "offload_rollout=false"]
    more += ["offload_train=true"]
    more += ["allocation_mode=embedded:d1|archon:d3", "train_dataset.path=no.jsonl"]
    shown = CliRunner().invoke(app, ["train", *words, *more])
    assert shown.exit_code == 2
    for part in ("cluster.n_nodes = 2: ", "no.jsonl", "offload_train = true", "needs 3 devices"):
        assert part in shown.stderr
    assert not (tmp_path / "slurm").exists()
