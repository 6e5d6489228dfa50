"""Slurm: the submission script of a run, its check, and its hand-over to sbatch.

On one node the script runs the command as it is; on several, `torchrun` on each of them with the
rendezvous on the first. Shortly before the time limit the run is asked to stop and the job queued
again, and it goes on from its last checkpoint; so it does after the loss of a node.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from pentad.core.errors import RunError

GRACE_S = 300
"""Before the time limit, for the step in progress and a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """What a script is made of."""

    name: str
    folder: Path
    """Of the script and of what the job prints; seen by all nodes."""
    num_nodes: int
    ranks_per_node: int
    gpus_per_node: int | None
    """Asked of Slurm; None: none are."""
    command: tuple[str, ...]
    """Words after `python -m pentad.cli.main`."""
    first_only: tuple[str, ...] = ()
    """Words more at the first start, not after a requeue."""
    work_folder: Path


def script_of(job: SlurmJob) -> str:
    name = re.sub(r"[^\w.-]", "-", job.name)
    header = [
        f"#SBATCH --job-name={name}",
        f"#SBATCH --nodes={job.num_nodes}",
        "#SBATCH --ntasks-per-node=1",
        *([f"#SBATCH --gpus-per-node={job.gpus_per_node}"] if job.gpus_per_node else []),
        f"#SBATCH --output={shlex.quote(str(job.folder / 'slurm-%j.log'))}",
        "#SBATCH --open-mode=append",
        "#SBATCH --requeue",
        f"#SBATCH --signal=B:USR1@{GRACE_S}",
    ]
    return TEMPLATE.format(
        header="\n".join(header),
        work_folder=shlex.quote(str(job.work_folder)),
        first_only=" ".join(map(shlex.quote, job.first_only)),
        launch=shlex.quote(launch_of(job)),
    )


def launch_of(job: SlurmJob) -> str:
    """What each node runs. The nodes fill in their own number."""
    command = ["-m", "pentad.cli.main", *job.command]
    if job.num_nodes == 1:
        return f'exec {shlex.join([sys.executable, *command])} "$@"'
    rendezvous = '--node-rank "$SLURM_NODEID" --master-addr "$FIRST_NODE" --master-port "$PORT"'
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    sizes = [f"--nnodes={job.num_nodes}", f"--nproc-per-node={job.ranks_per_node}"]
    return f'exec {shlex.join(torchrun + sizes)} {rendezvous} {shlex.join(command)} "$@"'


TEMPLATE = """\
#!/usr/bin/env bash
{header}
# Partition, account and time limit: SBATCH_PARTITION, SBATCH_ACCOUNT and SBATCH_TIMELIMIT when this
# is submitted, or further #SBATCH lines here.
set -u
cd {work_folder}

FIRST_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
PORT=$((20000 + SLURM_JOB_ID % 20000))
export FIRST_NODE PORT
# The interface between the nodes, where the one that is found is wrong:
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0

# A job that is queued again goes on from its last checkpoint.
set -- {first_only}
[ "${{SLURM_RESTART_COUNT:-0}}" -gt 0 ] && set --

ask_to_stop=0
before_the_limit() {{ ask_to_stop=1; kill -TERM "$step"; }}
trap before_the_limit USR1

srun --kill-on-bad-exit=1 bash -c {launch} pentad "$@" &
step=$!
wait "$step"
code=$?
while kill -0 "$step" 2>/dev/null; do  # a signal ended the wait, not the run
    wait "$step"
    code=$?
done
if [ "$ask_to_stop" = 1 ] && [ "$code" -ne 0 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def write_script(job: SlurmJob) -> Path:
    """The script in the job's folder, as far as bash accepts it."""
    job.folder.mkdir(parents=True, exist_ok=True)
    path = job.folder / "submit.sh"
    path.write_text(script_of(job))
    path.chmod(0o755)
    if bash := shutil.which("bash"):
        checked = subprocess.run([bash, "-n", str(path)], capture_output=True, text=True)
        if checked.returncode:
            raise RunError(f"bash does not accept {path}: {checked.stderr.strip()}")
    return path


def submit(path: Path) -> str | None:
    """What sbatch says; None where there is no sbatch. Raises RunError if it refuses."""
    program = shutil.which("sbatch")
    if program is None:
        return None
    done = subprocess.run([program, str(path)], capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise RunError(f"sbatch refused {path} (exit {done.returncode}): {said}")
    return done.stdout.strip()
