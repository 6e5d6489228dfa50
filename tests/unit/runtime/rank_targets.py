"""Functions that the tests of the runtime run on ranks."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from pentad.core.errors import Problem, RunError, UserError


def describe(rank, payload):
    keys = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    keys += ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "TORCH_COMPILE_DETERMINISTIC")
    keys += ("TORCHINDUCTOR_DETERMINISTIC",)
    return {
        "payload": payload,
        "rank": [rank.rank, rank.world, rank.local_rank],
        "torch": "torch" in sys.modules,
        **{key: os.environ.get(key) for key in keys},
    }


def speak(rank, payload):
    print(f"said by {rank.rank}")
    print(f"complained by {rank.rank}", file=sys.stderr)


def work(rank, payload):
    """Steps until the end, or until rank `payload["rank"]` does something at step 3."""
    for step in range(10_000):
        rank.report(step)
        if step == 3 and rank.rank == payload["rank"]:
            DEEDS[payload["deed"]](rank)
        if payload.get("folder"):
            note = Path(payload["folder"]) / f"alive-{rank.rank}"
            note.write_text(str(os.getpid()))
        time.sleep(0.01)


def meet(rank, payload):
    """Returns when every rank is here: they do not start at one moment."""
    folder = Path(payload["folder"])
    (folder / f"here-{rank.rank}").touch()
    while len(list(folder.glob("here-*"))) < rank.world:
        time.sleep(0.01)


def lose(rank, payload):
    """One rank dies of its own error; the others say that they lost it, and say it sooner."""
    rank.report(5)
    meet(rank, payload)
    if rank.rank == payload["rank"]:
        time.sleep(0.3)
        raise KeyError("the cause")
    raise RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]")


def wait_for_one(rank, payload):
    """One rank waits for ever; the others give up."""
    rank.report(2)
    meet(rank, payload)
    if rank.rank == payload["rank"]:
        sleeping_in_a_loop()
    rank.report(3)
    time.sleep(0.3)
    raise RuntimeError("Timed out waiting 1000ms for recv operation to complete")


def stall(rank, payload):
    """All ranks stop moving; one of them a step behind the others."""
    meet(rank, payload)
    rank.report(4)
    if rank.rank != payload["rank"]:
        rank.report(5)
    sleeping_in_a_loop()


def sleeping_in_a_loop():
    while True:
        time.sleep(0.01)


def with_child(rank, payload):
    """Starts a process of its own, in the background, and waits."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (Path(payload["folder"]) / f"child-{rank.rank}").write_text(str(child.pid))
    if payload.get("is_quick"):
        return
    work(rank, {"rank": -1, "deed": "", "folder": payload["folder"]})


def leave_notes(rank, payload):
    """Runs until it is told to stop, and then tidies up."""
    folder = Path(payload["folder"])
    (folder / f"alive-{rank.rank}").write_text(str(os.getpid()))
    try:
        sleeping_in_a_loop()
    finally:
        (folder / f"tidied-{rank.rank}").write_text("yes")


def ignore_signals(rank, payload):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    leave_notes(rank, payload)


def heed(rank, payload):
    """Ends in order after a signal, with a result or with a sentence."""
    asked = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda got, frame: asked.append(got))
    (Path(payload["folder"]) / f"alive-{rank.rank}").write_text(str(os.getpid()))
    while not asked:
        time.sleep(0.01)
    time.sleep(0.2)  # saves something
    if payload["is_sorry"]:
        raise RunError(f"stopped by signal {int(asked[0])}, what was trained is saved")
    return int(asked[0])


def add_up(rank, payload):
    import torch
    import torch.distributed as dist

    total = torch.tensor([float(rank.rank + 1)])
    dist.all_reduce(total)
    if payload.get("dies") == rank.rank:
        os.kill(os.getpid(), signal.SIGKILL)
    if "dies" in payload:
        rank.report(7)
        dist.barrier()
    return [total.item(), dist.get_world_size(), dist.get_backend()]


def refuse(rank):
    raise UserError([Problem("a.b = 1", "is bad"), Problem("c = 2", "is worse", "try 3")])


def give_up(rank):
    raise RunError("out of device memory in backward")


def stumble(rank):
    print("about to stumble")
    {}["missing"]


def be_killed(rank):
    print("my last words", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def crash(rank):
    import ctypes

    ctypes.string_at(0)


def quit_silently(rank):
    os._exit(7)


def hang(rank):
    sleeping_in_a_loop()


DEEDS = {
    "refuse": refuse,
    "give_up": give_up,
    "stumble": stumble,
    "be_killed": be_killed,
    "crash": crash,
    "quit_silently": quit_silently,
    "hang": hang,
}

if __name__ == "__main__":  # what tests start as a program: run_ranks with the arguments as JSON
    from pentad.runtime.launch import LaunchSettings, run_ranks

    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it would be ignored
    given = json.loads(sys.argv[1])
    settings = LaunchSettings(**given.pop("settings", {}))
    given["log_folder"] = Path(given["log_folder"])
    try:
        print(json.dumps(run_ranks(settings=settings, **given)))
    except KeyboardInterrupt:
        print("interrupted")
        sys.exit(130)
    except (RunError, UserError) as error:
        print(f"{type(error).__name__}: {error}")
        sys.exit(1)
