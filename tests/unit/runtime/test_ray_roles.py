"""Role processes as Ray actors: they serve, are noticed when they die, and end with their runtime.

One cluster serves all tests of a worker (the fixture `ray_cluster`).
"""

import asyncio
import os
import signal
from contextlib import asynccontextmanager

import pytest

from pentad.config.load import load_config
from pentad.config.resolve import resolve
from pentad.config.topology import topology
from pentad.core.bundles import Bundle
from pentad.core.errors import InfraFailure, UserError
from pentad.runtime import roles
from pentad.runtime.roles import RoleSpec

ray = pytest.importorskip("ray")
from pentad.runtime.ray_roles import RayRuntime, node_problems  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.dist, pytest.mark.usefixtures("ray_cluster")]


def spec(folder, payload=None, **more):
    given = {"name": "rollout-0", "target": "role_targets:make", "payload": payload or {}}
    return RoleSpec(**{**given, "log": folder / "log" / "rollout-0.log", **more})


def bundle(*names):
    return Bundle(cpus=len(names), gpus=0, members=dict.fromkeys(names, ()))


@asynccontextmanager
async def runtime_of(*names):
    runtime = RayRuntime([bundle(name) for name in names])
    try:
        yield runtime
    finally:
        await runtime.close()


async def poll_until_ended(process):
    while (ended := process.poll()) is None:
        await asyncio.sleep(0.05)
    return ended


def test_an_actor_serves_as_a_process_of_this_machine_does(tmp_path):
    beats = []

    async def main():
        async with runtime_of("rollout-0") as runtime:
            process = await runtime.start(spec(tmp_path, environment={"OWN": "x"}))
            connection = await roles.connect(process, lambda name, value: beats.append(value))
            assert await connection.call("echo", x=1) == {"x": 1}
            pid, _, values = await connection.call("environment", names=["OWN"])
            assert pid == process.pid != os.getpid() and values == {"OWN": "x"}
            while not (beats and beats[-1]):
                await asyncio.sleep(0.05)
            call = asyncio.ensure_future(connection.call("block", until=str(tmp_path / "end")))
            while "in block" not in (tmp_path / "log" / "rollout-0.log").read_text():
                process.stacks()
                await asyncio.sleep(0.1)
            (tmp_path / "end").touch()
            await call
            await connection.close()
            return await poll_until_ended(process)

    assert asyncio.run(main()).startswith("ended with exit code 0")
    assert beats[-1]["num_calls"] == 1


def test_a_killed_actor_is_noticed_and_its_place_is_taken_again(tmp_path):
    async def main():
        async with runtime_of("rollout-0") as runtime:
            first = await runtime.start(spec(tmp_path))
            connection = await roles.connect(first)
            call = asyncio.ensure_future(connection.call("late", value=1, seconds=60))
            await connection.call("echo")
            os.kill(first.pid, signal.SIGKILL)
            with pytest.raises(InfraFailure, match="rollout-0: the connection is lost"):
                await call
            ended = await poll_until_ended(first)
            first.kill()
            second = await runtime.start(spec(tmp_path, generation=1))
            again = await roles.connect(second)
            assert await again.call("echo", y=2) == {"y": 2}
            await again.close()
            return ended, second.pid

    ended, pid = asyncio.run(main())
    assert ended.startswith("died: ")
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(
    ("allocation", "together"),
    [
        ("embedded:d2|archon:d2", [("learner-0", "rollout-0"), ("learner-1", "rollout-1")]),
        ("embedded:d1|archon:d4", [("learner-0", "rollout-0")]),
        ("vllm:d1t2|archon:d2", [("learner-0", "vllm-0"), ("learner-1", "vllm-0")]),
    ],
)
def test_learners_have_a_gpu_each_and_share_it_as_planned(tmp_path, allocation, together):
    """The cluster has four GPUs by name: what each process sees is Ray's word."""
    words = [f"allocation_mode={allocation}", "cluster.n_gpus_per_node=4", "scheduler.type=ray"]
    placed = topology(resolve(load_config(None, words))[0])

    async def main():
        runtime, seen = RayRuntime(placed.bundles()), {}
        try:
            for one in [*placed.learners, *placed.samplers]:
                process = await runtime.start(spec(tmp_path, name=one.name))
                connection = await roles.connect(process)
                key = "CUDA_VISIBLE_DEVICES"
                _, _, values = await connection.call("environment", names=[key])
                seen[one.name] = values[key].split(",")
        finally:
            await runtime.close()
        return seen

    seen = asyncio.run(main())
    trained = [gpu for name, gpus in seen.items() if name.startswith("learner") for gpu in gpus]
    assert len(trained) == len(set(trained)) == len(placed.learners)
    assert all(len(seen[one.name]) == one.num_gpus for one in placed.processes if one.num_gpus)
    for learner, sampler in together:
        assert set(seen[learner]) <= set(seen[sampler])


def test_close_gives_back_what_it_took_and_leaves_the_cluster(tmp_path):
    def held():
        return ray.cluster_resources()["CPU"] - ray.available_resources().get("CPU", 0)

    async def main():
        while held():  # what an earlier test gave back
            await asyncio.sleep(0.1)
        async with runtime_of("rollout-0", "rollout-1") as runtime:
            await runtime.start(spec(tmp_path))
            while held() < 2:
                await asyncio.sleep(0.1)
        while held():
            await asyncio.sleep(0.1)

    asyncio.run(asyncio.wait_for(main(), 120))
    assert ray.is_initialized()


def test_a_cluster_that_is_too_small_is_said_at_once():
    with pytest.raises(UserError, match="needs 9 GPUs .* the cluster has 4"):
        RayRuntime([Bundle(cpus=1, gpus=9, members={"rollout-0": tuple(range(9))})])


def test_a_node_without_the_package_or_the_model_is_refused(tmp_path):
    folders = {"actor.path": str(tmp_path / "nowhere"), "ref.path": str(tmp_path)}

    async def main():
        async with runtime_of("rollout-0", "rollout-1") as runtime:
            runtime.check_nodes({"ref.path": str(tmp_path)})
            with pytest.raises(UserError) as caught:
                runtime.check_nodes(folders, package="pentad_of_nowhere")
            return [str(problem) for problem in caught.value.problems]

    package, folder = asyncio.run(main())  # once, although two roles are there
    assert "has no package pentad_of_nowhere; install it in Ray's environment" in package
    assert f"actor.path = {tmp_path}/nowhere: " in folder and "has no such folder" in folder


def test_a_node_with_another_version_is_refused():
    node = {"host": "n1", "found": True, "version": "0.1", "missing": []}
    (problem,) = node_problems(node, "rollout-0", "pentad", "0.2", {})
    assert "has pentad 0.1, and this process 0.2" in str(problem)
