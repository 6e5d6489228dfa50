"""The process of one rank: `python -m pentad.runtime.worker JOB`. Started by `launch`.

Nothing heavy is imported before the process is bound to its parent.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from pentad.core.errors import RunError, UserError
from pentad.runtime.rank import Board, Rank, rank_from_environment
from pentad.runtime.report import describe_failure, write_failure

PR_SET_PDEATHSIG = 1
FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130

Target = Callable[[Rank, Any], Any]
"""What runs on every rank: takes the rank and the payload, returns something JSON can hold."""


def die_with_parent(parent: int) -> None:
    """The kernel ends this process when the thread that started it ends, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(FAILED)


def load_target(name: str) -> Target:
    """The function of "module:function"."""
    module, _, function = name.partition(":")
    target: Target = vars(importlib.import_module(module))[function]
    return target


def call(target: Target, rank: Rank, payload: Any, job: dict[str, Any]) -> Any:
    """Runs the target within its process group, if the job wants one; without a name torchrun's."""
    if not job["has_group"]:
        return target(rank, payload)
    from pentad.runtime.join import device_of, join_group, leave_group

    device = device_of(rank, job["device"])
    join_group(
        rank,
        device,
        timeout_s=job["timeout_s"],
        group=job.get("group", ""),
        listen_fd=job.get("listen_fd", -1),
    )
    result = target(rank, payload)
    leave_group()
    return result


def main(path: Path) -> int:
    job = json.loads(path.read_text(encoding="utf-8"))
    die_with_parent(job["parent"])
    signal.signal(signal.SIGTERM, _leave)
    faulthandler.enable()
    found = rank_from_environment()
    assert found is not None, "the launcher sets RANK and WORLD_SIZE"
    rank = found
    folder = path.parent
    rank.board = Board(folder / "board", rank.world)
    rank.start_beating()
    # Stacks go to the log alone; what rank 0 complains about is on the screen as well.
    stacks = os.open(Path(job["log_folder"], f"rank-{rank.rank}.log"), os.O_WRONLY | os.O_APPEND)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    sys.path[:0] = job["path"]
    try:
        result = call(load_target(job["target"]), rank, job["payload"], job)
        (folder / f"result-{rank.rank}.json").write_text(json.dumps(result), encoding="utf-8")
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as leave:
        return leave.code if isinstance(leave.code, int) else FAILED
    except Exception as error:
        failure = describe_failure(rank.rank, rank.step, error)
        write_failure(folder / f"failure-{rank.rank}.json", failure)
        _show(error, is_new=rank.rank > 0 or (failure.kind == "bug" and not failure.is_consequence))
        return BAD_INPUT if isinstance(error, UserError) else FAILED
    return 0


def _show(error: Exception, *, is_new: bool) -> None:
    """In the rank's own log; rank 0's is on the screen too, where the launcher says the cause."""
    if is_new and isinstance(error, RunError | UserError):
        print(error, file=sys.stderr)
    elif is_new:
        traceback.print_exc()


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    code = main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    # Libraries' threads may wait for ranks that are gone; there is nothing left to save here.
    os._exit(code)
