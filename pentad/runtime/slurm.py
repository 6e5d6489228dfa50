"""Slurm: the submission script of a run, its check, and its submission by sbatch.

On one node the script runs the command unchanged; on several, `torchrun` on each training node with
the rendezvous on the first, and an agent (`runtime.nodes`) on each node with samplers except the
first. Shortly before the time limit the run is stopped and the job requeued; it then resumes from
its last checkpoint; the same happens after the loss of a node.
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
"""The run stops this many seconds before the time limit, to finish a step and a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """The values of a script."""

    name: str
    folder: Path
    """Folder of the script and the job's output; visible to all nodes."""
    num_nodes: int
    num_train_nodes: int
    """Number of training nodes: the first ones, with the same number of ranks each."""
    ranks_per_node: int
    agent_nodes: tuple[int, ...] = ()
    """Nodes, except the first, on which the run starts samplers."""
    gpus_per_node: int | None
    """GPUs requested of Slurm; None: no request."""
    cpus_per_node: int | None = None
    """CPU cores requested; None: all of the node, exclusively."""
    memory_gb_per_node: float | None = None
    """Memory in GiB requested; None: all of the node."""
    command: tuple[str, ...]
    """Words after `python -m pentad.cli.main`."""
    first_only: tuple[str, ...] = ()
    """Additional words at the first start, not after a requeue."""
    work_folder: Path


def script_of(job: SlurmJob) -> str:
    name = re.sub(r"[^\w.-]", "-", job.name)
    header = [
        f"#SBATCH --job-name={name}",
        f"#SBATCH --nodes={job.num_nodes}",
        "#SBATCH --ntasks-per-node=1",
        *([f"#SBATCH --gpus-per-node={job.gpus_per_node}"] if job.gpus_per_node else []),
        f"#SBATCH --cpus-per-task={job.cpus_per_node}" if job.cpus_per_node else EXCLUSIVE,
        f"#SBATCH --mem={memory_of(job)}",
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
        agents=agents_of(job),
        num_train_nodes=job.num_train_nodes,
    )


def memory_of(job: SlurmJob) -> str:
    """Memory in the format of sbatch; 0 means all of the node."""
    size = job.memory_gb_per_node
    return "0" if size is None else f"{int(size * 1024)}M"


def agents_of(job: SlurmJob) -> str:
    """Returns the Slurm steps of the agents that start samplers on other nodes."""
    if not job.agent_nodes:
        return ""
    agent = shlex.join([sys.executable, "-m", "pentad.runtime.nodes"])
    folder = shlex.quote(str(job.folder / "nodes"))
    return AGENTS.format(agent=agent, folder=folder, nodes=" ".join(map(str, job.agent_nodes)))


def launch_of(job: SlurmJob) -> str:
    """Returns the command of each node, which reads its node number from the environment."""
    command = ["-m", "pentad.cli.main", *job.command]
    if job.num_nodes == 1:
        return f'exec {shlex.join([sys.executable, *command])} "$@"'
    rendezvous = '--node-rank "$SLURM_NODEID" --master-addr "$FIRST_NODE" --master-port "$PORT"'
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    sizes = [f"--nnodes={job.num_train_nodes}", f"--nproc-per-node={job.ranks_per_node}"]
    return f'exec {shlex.join(torchrun + sizes)} {rendezvous} {shlex.join(command)} "$@"'


EXCLUSIVE = "#SBATCH --exclusive"
AGENTS = """\
# Samplers on other nodes are started by an agent there, which knows the run by this token.
PENTAD_NODES={folder}/$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}
PENTAD_NODES_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')
export PENTAD_NODES PENTAD_NODES_TOKEN
for node in {nodes}; do
    srun --overlap --nodes=1 --ntasks=1 --relative="$node" {agent} "$node" &
    agents="$agents $!"
done
"""
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
# srun gives a step one core unless this is set: it does not inherit the number of sbatch.
export SRUN_CPUS_PER_TASK="${{SLURM_CPUS_PER_TASK:-${{SLURM_CPUS_ON_NODE:-1}}}}"
# The interface between the nodes, where the one that is found is wrong:
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0

# A job that is queued again resumes from its last checkpoint.
set -- {first_only}
[ "${{SLURM_RESTART_COUNT:-0}}" -gt 0 ] && set --

ask_to_stop=0
before_the_limit() {{ ask_to_stop=1; kill -TERM "$step"; }}
trap before_the_limit USR1

agents=""
{agents}srun --kill-on-bad-exit=1 --nodes={num_train_nodes} --ntasks={num_train_nodes} \\
    bash -c {launch} pentad "$@" &
step=$!
wait "$step"
code=$?
while kill -0 "$step" 2>/dev/null; do  # a signal ended the wait, not the run
    wait "$step"
    code=$?
done
[ -n "$agents" ] && kill -TERM $agents 2>/dev/null
if [ "$ask_to_stop" = 1 ] && [ "$code" -ne 0 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def write_script(job: SlurmJob) -> Path:
    """Writes the script to the job's folder, after a syntax check by bash."""
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
    """Submits the script and returns sbatch's output; None without sbatch. RunError if sbatch
    rejects it."""
    program = shutil.which("sbatch")
    if program is None:
        return None
    done = subprocess.run([program, str(path)], capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise RunError(f"sbatch refused {path} (exit {done.returncode}): {said}")
    return done.stdout.strip()
