"""Role processes on a Ray cluster: one placement group for the run, a plain actor for each role.

An actor runs the code of `role_host` and reports its address; the caller connects as to a process
of this machine. The run joins the cluster named by RAY_ADDRESS, else starts one on this machine.
`close` ends only what this run started.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import AuthenticationError, GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import (
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from pentad.core.bundles import Bundle
from pentad.core.errors import InfraFailure, Problem, RunError, UserError, raise_problems
from pentad.core.machine import RAY_SETTINGS, find_gpus, installed, num_cores, process_kept
from pentad.runtime.environment import visible_devices
from pentad.runtime.ray_cluster import (
    CALL_S,
    Cluster,
    ClusterLost,
    answers,
    causes,
    comes_up,
    last_line,
    printed_to,
    within,
)
from pentad.runtime.ray_guard import VARIABLE, own_folder
from pentad.runtime.report import describe_exit
from pentad.runtime.role_host import job_of, serve, set_up
from pentad.runtime.roles import CONNECT_S, RoleProcess, RoleSpec, Runtime
from pentad.telemetry.log import NOTICE

log = logging.getLogger(__name__)

READY_S = 60.0
"""Time limit for the cluster to provide the resources, in seconds."""
GONE_S = 10.0
ANSWER_S, JOIN_S = 10.0, 60.0
"""Time limits for the head of a named cluster to accept a connection, and to be joined."""
TRIES = 2
"""Attempts to start a cluster: Ray gives its processes 30 s, which may not suffice on a busy
machine."""
OWN = "local"
"""Value of RAY_ADDRESS with which a new cluster is started."""
ADDRESS = re.compile(r"(\[[^]]+\]|[^:\s]+):[0-9]{1,5}")
"""The address of the head of a cluster."""
Bundles = Sequence[Bundle]
"""Every role that will be started is a member of one of these bundles."""


class RoleActor:
    """A role process as an actor. `serve` blocks its main thread: no actor calls afterwards."""

    def open(self, job: dict[str, Any]) -> dict[str, Any]:
        """Opens the socket and returns its address; redirects output to the role's log."""
        os.environ.update(job["environment"])
        path = Path(job["log"])
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
                os.dup2(file.fileno(), stream.fileno())
        set_up(job)
        self.job = job
        self.sock = socket.create_server((ray.util.get_node_ip_address(), 0))
        host, port = self.sock.getsockname()[:2]
        node = ray.get_runtime_context().get_node_id()
        return {"address": (host, port), "pid": os.getpid(), "node": node}

    def serve(self) -> int:
        return serve(self.job, self.sock)


class RayProcess(RoleProcess):
    """The actor of one role."""

    def __init__(
        self, spec: RoleSpec, token: str, actor: Any, opened: dict[str, Any], cluster: Cluster
    ) -> None:
        """`opened`: the result of the actor's `open`."""
        super().__init__(spec, token)
        self.actor = actor
        self.cluster = cluster
        self.address = tuple(opened["address"])
        self.pid: int = opened["pid"]
        self.node: str = opened["node"]
        self.is_here = self.node == ray.get_runtime_context().get_node_id()
        self.serving = actor.serve.remote()

    def ended(self) -> str | None:
        done, _ = ray.wait([self.serving], timeout=0)
        if not done:
            return None
        try:
            return describe_exit(ray.get(self.serving))
        except RayActorError as error:
            return f"died: {' '.join(str(error).split())}"
        except RayError as error:
            return f"failed: {str(error).strip().splitlines()[-1]}"

    def end(self) -> None:
        def kill() -> None:
            ray.kill(self.actor)
            ray.wait([self.serving], timeout=GONE_S)

        try:
            self.cluster.ask(kill)
        except ClusterLost:
            if self.is_here and is_actor(self.pid):  # on other nodes Ray ends it
                _send_signal(self.pid, signal.SIGKILL)
        if self.is_here:
            wait_gone(self.pid)

    def stacks(self) -> None:
        """A task on its node sends the signal, because the actor itself may not respond."""
        where = NodeAffinitySchedulingStrategy(self.node, soft=False)
        send = ray.remote(_send_signal).options(num_cpus=0, scheduling_strategy=where)
        with suppress(ClusterLost):
            self.cluster.ask(lambda: send.remote(self.pid, int(signal.SIGUSR1)))


def is_actor(pid: int) -> bool:
    """Whether a process of this machine is still a Ray actor, and not another with a reused pid."""
    try:
        return b"ray::" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def wait_gone(pid: int) -> None:
    """Waits until a process of this machine is gone, shortly after its actor's end."""
    until = time.monotonic() + GONE_S
    while time.monotonic() < until and Path(f"/proc/{pid}").exists():
        time.sleep(0.02)


def _own_gpus() -> list[str]:
    return [str(gpu) for gpu in ray.get_gpu_ids()]


def _send_signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):  # it has ended meanwhile
        os.kill(pid, number)


class RayRuntime(Runtime):
    """Starts role processes as actors, in one placement group."""

    def __init__(
        self,
        bundles: Bundles,
        folders: Mapping[str, str] | None = None,
        held: Sequence[int] = (),
        **cluster: Any,
    ) -> None:
        """`bundles`: every role to be started; `folders`, by their keys, must exist on their nodes;
        `held`: GPUs of this machine that the caller uses itself; `cluster`: further arguments of
        `joined_cluster`. UserError if the cluster is too small or incomplete; waits, with a
        message, for resources used by others."""
        super().__init__()
        self.bundles = list(bundles)
        self.place = {name: i for i, one in enumerate(self.bundles) for name in one.members}
        """The bundle of each role."""
        self.gpus_seen: dict[int, tuple[str, list[str]]] = {}
        """The node of a bundle and the names of its GPUs, as reported there."""
        self.looking = threading.Lock()
        with ExitStack() as stack:
            self.cluster = stack.enter_context(joined_cluster(bundles, held, **cluster))
            self.is_spread = sum(node["Alive"] for node in ray.nodes()) > 1
            check_gpus(held)
            self.group = _reserve([one.resources for one in self.bundles])
            stack.callback(self._release)
            self.check_nodes(folders or {})
            self.leaving = stack.pop_all()

    async def _start(self, spec: RoleSpec) -> RayProcess:
        """Starts a process on its bundle, after an earlier process of this name has released it."""
        return await self.cluster.run(lambda: self._open_actor(spec))

    def _open_actor(self, spec: RoleSpec) -> RayProcess:
        bundle = self.bundles[self.place[spec.name]]
        environment = {**spec.environment, **self._visible(spec.name)}
        spec = replace(spec, environment=environment)
        actor = ray.remote(RoleActor).options(
            num_cpus=bundle.cpus / len(bundle.members),
            num_gpus=bundle.gpu_share(spec.name),
            max_restarts=0,
            scheduling_strategy=self._at(spec.name),
        )
        made = actor.remote()
        try:
            opened = ray.get(made.open.remote(job_of(spec, self.token)), timeout=CONNECT_S)
        except RayError as error:
            ray.kill(made)
            raise InfraFailure(f"{spec.name} did not start on Ray: {last_line(error)}") from error
        return RayProcess(spec, self.token, made, opened, self.cluster)

    def lost(self) -> str | None:
        return self.cluster.lost

    def why_unavailable(self, name: str) -> str | None:
        """Returns why a bundle has no node: its node is lost, and no other has room for it."""

        def find() -> bool:
            table = placement_group_table(self.group)
            node = table["bundles_to_node_id"].get(self.place[name])
            return node in {one["NodeID"] for one in ray.nodes() if one["Alive"]}

        try:
            return None if self.cluster.ask(find) else "the cluster has no node for it"
        except ClusterLost as error:
            if self.cluster.lost is not None:
                raise RunError(self.cluster.lost) from error
            return str(error)

    def _release(self) -> None:
        with suppress(ClusterLost):
            self.cluster.ask(lambda: remove_placement_group(self.group))

    async def close(self) -> None:
        with self.leaving:
            await super().close()

    def check_nodes(self, folders: Mapping[str, str], package: str = "pentad") -> None:
        """Raises UserError if nodes of the placement lack the package, or folders that role
        processes read, given by config key."""
        version = installed(package)

        def look(package: str, folders: dict[str, str]) -> dict[str, Any]:  # sent by value
            import importlib.metadata
            import importlib.util
            import pathlib
            import socket

            found = importlib.util.find_spec(package) is not None
            try:
                version = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                version = None
            missing = [key for key, path in folders.items() if not pathlib.Path(path).is_dir()]
            host = socket.gethostname()
            return {"host": host, "found": found, "version": version, "missing": missing}

        task = ray.remote(look)
        asked = {
            name: task.options(num_cpus=0, scheduling_strategy=self._at(name)).remote(
                package, dict(folders)
            )
            for name in self.place
        }
        nodes = {name: answer_of(answer, f"the node of {name}") for name, answer in asked.items()}
        first = {node["host"]: name for name, node in reversed(nodes.items())}
        problems = [
            problem
            for name in first.values()
            for problem in node_problems(nodes[name], name, package, version, folders)
        ]
        raise_problems(problems)

    def _visible(self, name: str) -> dict[str, str]:
        """Returns the variables with the role's GPUs. Ray's own choice is not used: if several
        roles share the GPUs of a bundle, it could give two training ranks the same GPU."""
        index = self.place[name]
        bundle = self.bundles[index]
        if bundle.gpus < 2 or len(bundle.members) == 1:
            return {}
        with self.looking:  # before a process starts on the bundle
            node = placement_group_table(self.group)["bundles_to_node_id"].get(index, "")
            if self.gpus_seen.get(index, ("",))[0] != node:
                asked = ray.remote(_own_gpus).options(
                    num_cpus=0, num_gpus=bundle.gpus, scheduling_strategy=self._at(name)
                )
                self.gpus_seen[index] = node, answer_of(asked.remote(), f"the node of {name}")
        ids = self.gpus_seen[index][1]
        return {"CUDA_VISIBLE_DEVICES": ",".join(ids[gpu] for gpu in bundle.members[name])}

    def _at(self, name: str) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(
            self.group, placement_group_bundle_index=self.place[name]
        )


def answer_of(asked: Any, place: str) -> Any:
    """Returns the result of a short task; InfraFailure if its node does not start it."""
    try:
        return ray.get(asked, timeout=READY_S)
    except GetTimeoutError as error:
        text = f"{place} on Ray started no task within {READY_S:g} s; see ray.log and its own logs"
        raise InfraFailure(text) from error


def node_problems(
    node: Mapping[str, Any],
    role: str,
    package: str,
    version: str | None,
    folders: Mapping[str, str],
) -> Iterator[Problem]:
    """Yields problems of a node of the placement, from its report."""
    where = f"scheduler.type = ray: {node['host']}, the node of {role},"
    if not node["found"]:
        yield Problem(where, f"has no package {package}", "install it in Ray's environment there")
    elif version is not None and node["version"] not in (None, version):
        rule = f"has {package} {node['version']}, and this process {version}"
        yield Problem(where, rule, "install the same version on all nodes")
    for key in node["missing"]:
        rule = f"{node['host']}, the node of {role}, has no such folder"
        remedy = "copy it there under the same name, or use a folder that all machines see"
        yield Problem(f"{key} = {folders[key]}", rule, remedy)


def check_gpus(held: Sequence[int]) -> None:
    """Raises UserError if Ray would assign GPUs that the caller uses itself."""
    own = ray.get_runtime_context().get_node_id()
    given = sum(node["Resources"].get("GPU", 0) for node in ray.nodes() if node["NodeID"] == own)
    free = len(find_gpus()) - len(held)
    if held and given > free:
        rule = f"it has {given:g} GPUs of this machine, where the run takes {len(held)} itself"
        kept = visible_devices(range(len(held), len(find_gpus())))
        remedy = f"start it here with CUDA_VISIBLE_DEVICES={kept} ray start"
        raise UserError(Problem("scheduler.type = ray", rule, remedy))


@contextmanager
def joined_cluster(
    bundles: Bundles,
    held: Sequence[int] = (),
    *,
    spare_cpus: int = 0,
    log_file: Path | None = None,
) -> Iterator[Cluster]:
    """Joins or starts a cluster; at the end leaves a joined one and ends a started one.
    `spare_cpus`: for tasks outside of the bundles; `log_file`: for Ray's output at its start."""
    if ray.is_initialized():  # the caller has joined, and will leave
        cluster = Cluster(ray.get_runtime_context().gcs_address)
        try:
            yield cluster
        finally:
            cluster.is_left.set()
        return
    named = os.environ.get("RAY_ADDRESS") or OWN  # Ray also ignores an empty value
    with ExitStack() as stack:
        with process_kept(RAY_SETTINGS), printed_to(log_file):
            if named != OWN:
                join_cluster(named)
            else:
                folder = stack.enter_context(own_folder())
                start_cluster(folder, bundles, held, spare_cpus, log_file)
        cluster = Cluster(ray.get_runtime_context().gcs_address)
        stack.callback(cluster.leave, ray.shutdown)
        yield cluster


USE_TOKEN = (
    "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to the file with the cluster's token where "
    "that is not ~/.ray/auth_token"
)
QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING}


def use_saved_token() -> None:
    """Uses the token saved in the user's home, which `ray start` requires if it exists; any run
    that started its own cluster leaves one. Ray itself uses it only for the address `auto`."""
    try:
        from ray._private.authentication import authentication_token_setup as setup
    except ImportError:  # private API: without it the user sets RAY_AUTH_MODE
        log.debug("this version of Ray does not show whether a token is saved")
        return
    setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def check_address(where: str, address: str, remedy: str) -> None:
    if not ADDRESS.fullmatch(address):
        raise UserError(Problem(where, "is not HOST:PORT, `auto` or `local`", remedy))
    port = int(address.rpartition(":")[2])
    if not 1 <= port <= 65535:  # the system would use it modulo 65,536
        raise UserError(Problem(where, f"{port} is not a port (1 to 65535)", remedy))


def join_cluster(address: str) -> None:
    where = f"RAY_ADDRESS = {address}"
    if "://" in address:
        rule = "roles of a run cannot be reached over Ray Client"
        remedy = "give the address of the head itself, such as HOST:6379, or use `ray job submit`"
        raise UserError(Problem(where, rule, remedy))
    remedy = "start one with `ray start`, or unset it"
    if address != "auto":
        check_address(where, address, remedy)
    if address != "auto" and not comes_up(address, ANSWER_S):  # Ray would retry for minutes
        rule = f"no Ray cluster answers there (no connection within {ANSWER_S:g} s)"
        raise UserError(Problem(where, rule, remedy))
    use_saved_token()
    try:
        context = within(lambda: ray.init(address=address, **QUIET), JOIN_S)
    except ClusterLost:
        atexit.unregister(ray.shutdown)  # it would wait for the failed connection
        rule = f"a program accepts connections there, but Ray could not join within {JOIN_S:g} s"
        remedy = "check that it is a healthy Ray head: `ray status --address=ADDRESS`"
        raise UserError(Problem(where, rule, remedy)) from None
    except (ConnectionError, RayError, RuntimeError, ValueError) as error:
        rule = f"no Ray cluster answers there ({last_line(error)})"
        if any(isinstance(one, AuthenticationError) for one in causes(error)):
            rule, remedy = "the Ray cluster there refuses this program's token", USE_TOKEN
        elif answers(address):  # Ray may report a rejected token as a lost connection
            rule = f"a program answers there, but Ray could not join it ({last_line(error)})"
            remedy = f"use the cluster's Ray and Python; where it requires a token, {USE_TOKEN}"
        raise UserError(Problem(where, rule, remedy)) from None
    log.info("joined the Ray cluster at %s (nodes: %d)", context["gcs_address"], len(ray.nodes()))


def start_cluster(
    folder: Path, bundles: Bundles, held: Sequence[int], spare_cpus: int, log_file: Path | None
) -> None:
    """Starts a cluster on this machine with enough cores, in a separate folder so that no other
    program joins it."""
    if held:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible_devices(
            [gpu for gpu in range(len(find_gpus())) if gpu not in held]
        )
    os.environ[VARIABLE] = str(folder)
    wanted = math.ceil(sum(one.cpus for one in bundles)) + spare_cpus
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
        except Exception as error:  # Ray raises plain exceptions if its processes do not start
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


def _reserve(bundles: Sequence[Mapping[str, float]]) -> Any:
    """Reserves the placement group of the run; UserError if the cluster has too few resources."""
    have = ray.cluster_resources()
    wanted = {kind: sum(taken.get(kind, 0) for taken in bundles) for kind in ("CPU", "GPU")}
    problems = [
        Problem(
            "scheduler.type = ray",
            f"the run needs {count:g} {kind}s for its roles, and the cluster has "
            f"{have.get(kind, 0):g}",
            "add nodes, or make the axes of allocation_mode smaller",
        )
        for kind, count in wanted.items()
        if count > have.get(kind, 0)
    ]
    raise_problems(problems)
    group = placement_group([dict(taken) for taken in bundles], strategy="PACK")
    if not group.wait(READY_S):
        remove_placement_group(group)
        free = ray.available_resources()
        left = ", ".join(f"{free.get(kind, 0):g} {kind}s" for kind in wanted)
        needs = ", ".join(f"{count:g} {kind}s" for kind, count in wanted.items())
        rule = f"the run needs {needs}, and of the cluster {left} are free after {READY_S:g} s"
        raise UserError(Problem("scheduler.type = ray", rule, "wait for other jobs, or end them"))
    return group
