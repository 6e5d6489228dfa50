"""The Ray cluster of a run: joined where the user named one, else started and ended with the run.

Without its head (the GCS) every call of Ray stands still for a minute, and then Ray ends the
process. So the head is watched over a socket of our own, and calls are made beside the event loop,
with a deadline: a run whose cluster is gone ends with a sentence.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import math
import os
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError

from pentad.core.errors import InfraFailure, Problem, RunError, UserError
from pentad.core.machine import RAY_SETTINGS, find_gpus, num_cores, process_kept
from pentad.runtime.environment import visible_devices
from pentad.telemetry.log import NOTICE

log = logging.getLogger(__name__)
T = TypeVar("T")

Bundles = Mapping[str, Mapping[str, float]]
"""What each role takes, by its name: {"rollout-0": {"CPU": 1, "GPU": 1}}."""
LOST_S = 15.0
"""A head that accepts no connection for so long is gone. Ray itself waits for a minute."""
LOOK_S, POLL_S = 1.0, 0.02
CALL_S = 20.0
"""How long a call of Ray may take that a healthy cluster answers at once."""
TRIES = 2
"""To start a cluster: Ray gives its processes 30 s, which a busy machine may not."""
OWN = "local"
"""What RAY_ADDRESS is where a cluster is to be started all the same."""


class ClusterLost(InfraFailure):
    """The cluster does not answer."""


class Cluster:
    """The cluster that this process is in."""

    def __init__(self, address: str) -> None:
        self.address = address
        """Host and port of its head."""
        self.lost: str | None = None
        """Why the run cannot continue, in words; None while the cluster answers."""
        self.is_left = threading.Event()
        threading.Thread(target=self._watch, name="ray cluster", daemon=True).start()

    def answers(self) -> bool:
        """Whether its head accepts connections now."""
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5.0).close()
        except OSError:
            return False
        return True

    def _watch(self) -> None:
        away_s = 0.0
        while away_s < LOST_S and not self.is_left.wait(LOOK_S):
            away_s = 0.0 if self.answers() else away_s + LOOK_S
        if away_s >= LOST_S:
            self.lost = (
                f"the Ray cluster at {self.address} has ended: its head has accepted no connection "
                f"for {LOST_S:g} s; start the same command again, and the run resumes from its "
                "newest checkpoint"
            )

    async def run(self, call: Callable[[], T]) -> T:
        """The result of a call of Ray, however long it takes. RunError where the cluster ends."""
        future = beside(call)
        while not future.done():
            if self.lost is not None:
                raise RunError(self.lost)
            await asyncio.sleep(POLL_S)
        return future.result()

    def ask(self, call: Callable[[], T], timeout_s: float = CALL_S) -> T:
        """The result of a call that is answered at once. ClusterLost where it does not come."""
        if self.lost is not None or not self.answers():
            raise ClusterLost(f"the Ray cluster at {self.address} does not answer")
        return within(call, timeout_s)

    def leave(self) -> None:
        """The cluster, and what was started here of it. Ray's own goodbye at the end of the program
        would stand still without the head."""
        self.is_left.set()
        try:
            within(ray.shutdown, CALL_S)
        except ClusterLost:
            atexit.unregister(ray.shutdown)
            log.warning(
                "Ray did not shut down within %g s; its processes end by themselves", CALL_S
            )


def beside(call: Callable[[], T]) -> Future[T]:
    """Made on a thread of its own. One of a pool would be waited for at the end of the program."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # whoever asked gets it
            future.set_exception(error)

    threading.Thread(target=run, name="ray call", daemon=True).start()
    return future


def within(call: Callable[[], T], timeout_s: float) -> T:
    """ClusterLost where it takes longer; the call is left behind."""
    future = beside(call)
    done, _ = wait([future], timeout_s)
    if not done:
        raise ClusterLost(f"a call of Ray took longer than {timeout_s:g} s")
    return future.result()


@contextmanager
def joined_cluster(
    bundles: Bundles,
    held: Sequence[int] = (),
    *,
    spare_cpus: int = 0,
    log_file: Path | None = None,
) -> Iterator[Cluster]:
    """In a cluster; one that was joined here is left, and one that was started here ended.
    `spare_cpus`: what is started in it besides the bundles; `log_file` gets what Ray prints as it
    starts."""
    if ray.is_initialized():  # it belongs to a caller, who leaves it
        cluster = Cluster(ray.get_runtime_context().gcs_address)
        try:
            yield cluster
        finally:
            cluster.is_left.set()
        return
    named = os.environ.get("RAY_ADDRESS", OWN)
    with ExitStack() as stack:
        with process_kept(RAY_SETTINGS), printed_to(log_file):
            if named != OWN:
                join(named)
            else:
                folder = stack.enter_context(own_folder())
                start(folder, bundles, held, spare_cpus, log_file)
        cluster = Cluster(ray.get_runtime_context().gcs_address)
        stack.callback(cluster.leave)
        yield cluster


QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING}


def join(address: str) -> None:
    try:
        context = ray.init(address=address, **QUIET)
    except (ConnectionError, RayError, ValueError) as error:
        rule = f"no Ray cluster answers there ({last_line(error)})"
        remedy = "start one with `ray start`, or unset it"
        raise UserError(Problem(f"RAY_ADDRESS = {address}", rule, remedy)) from None
    log.info("joined the Ray cluster at %s (nodes: %d)", context["gcs_address"], len(ray.nodes()))


def start(
    folder: Path, bundles: Bundles, held: Sequence[int], spare_cpus: int, log_file: Path | None
) -> None:
    """A cluster of this machine that is large enough in cores. In a folder of its own, so that no
    other program takes it for one that it may join."""
    if held:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible_devices(
            [gpu for gpu in range(len(find_gpus())) if gpu not in held]
        )
    wanted = math.ceil(sum(taken.get("CPU", 0) for taken in bundles.values())) + spare_cpus
    num_cpus = max(num_cores(), wanted)
    for left in reversed(range(TRIES)):
        try:
            ray.init(
                address=OWN,
                num_cpus=num_cpus,
                include_dashboard=False,
                _temp_dir=str(folder),
                **QUIET,
            )
            break
        except Exception as error:  # Ray raises plain exceptions where its processes do not start
            within(ray.shutdown, CALL_S)
            if not left:
                raise not_started(error, log_file) from error
    text = "a Ray cluster was started for this run, and ends with it; RAY_ADDRESS names one to join"
    log.info(text, extra=NOTICE)


def not_started(error: Exception, log_file: Path | None) -> UserError:
    where = f"; what Ray printed is in {log_file}" if log_file else ""
    rule = f"no cluster could be started on this machine ({last_line(error)}){where}"
    remedy = "start it again when the machine is less busy, or name a cluster in RAY_ADDRESS"
    return UserError(Problem("scheduler.type = ray", rule, remedy))


@contextmanager
def own_folder() -> Iterator[Path]:
    """Of a cluster's sockets and logs. Short: the path of a socket has at most 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="pentad-ray-", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def printed_to(path: Path | None) -> Iterator[None]:
    """What this process and those that it starts print meanwhile goes to the file."""
    if path is None:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    saved = [(number, os.dup(number)) for number in (1, 2)]
    try:
        with path.open("ab") as file:
            _flush()
            for number, _ in saved:
                os.dup2(file.fileno(), number)
            yield
    finally:
        _flush()
        for number, before in saved:
            os.dup2(before, number)
            os.close(before)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


def last_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
