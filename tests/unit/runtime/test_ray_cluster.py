"""Which cluster a run is in, and how it ends where that is gone."""

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pentad.config.load import read_config
from pentad.config.resolve import resolve
from pentad.core.bundles import Bundle
from pentad.core.errors import InfraFailure, RunError, UserError
from pentad.trainer.sampling.samplers import ray_options

ray = pytest.importorskip("ray")
from ray.exceptions import AuthenticationError, GetTimeoutError  # noqa: E402

from pentad.data import ray_blobs  # noqa: E402
from pentad.runtime import ray_cluster, ray_roles  # noqa: E402
from pentad.runtime.ray_cluster import Cluster, ClusterLost, within  # noqa: E402
from pentad.runtime.ray_guard import own_folder  # noqa: E402
from pentad.runtime.ray_roles import answer_of, joined_cluster  # noqa: E402


@pytest.fixture
def inits(monkeypatch):
    """What Ray was asked for; nothing is started."""
    asked = []

    class Context:
        gcs_address = "127.0.0.1:1"

    def init(**options):
        asked.append(options)
        return {"gcs_address": "127.0.0.1:1"}

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "nodes", lambda: [1])
    monkeypatch.setattr(ray, "shutdown", lambda: asked.append("shutdown"))
    monkeypatch.setattr(ray, "get_runtime_context", Context)
    monkeypatch.setattr(ray_roles, "comes_up", lambda address, within_s: True)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return asked


BUNDLES = [Bundle(cpus=1.0, gpus=0, members={f"learner-{n}": ()}) for n in range(90)]


@pytest.mark.parametrize(
    "named, joined", [(None, "local"), ("local", "local"), ("auto", "auto"), ("h:6379", "h:6379")]
)
def test_only_a_cluster_that_was_named_is_joined(inits, monkeypatch, named, joined):
    if named:
        monkeypatch.setenv("RAY_ADDRESS", named)
    with joined_cluster(BUNDLES, spare_cpus=3):
        pass
    options, end = inits
    assert options["address"] == joined and end == "shutdown"
    if joined == "local":
        assert options["num_cpus"] == 93, "TransferQueue's CPUs come on top of the roles'"
        assert not Path(options["_temp_dir"]).exists(), "no other program finds it, and it is gone"


def test_a_start_that_times_out_is_one_sentence_and_its_noise_is_in_the_log(
    inits, monkeypatch, tmp_path, capfd
):
    def fail(**options):
        inits.append(options)
        os.write(2, b"raylet.out: a dump of 40 lines\n")
        raise Exception("Traceback ...\nThe current node timed out during startup.")

    monkeypatch.setattr(ray, "init", fail)
    log = tmp_path / "run" / "ray.log"
    with pytest.raises(UserError) as caught, joined_cluster(BUNDLES, log_file=log):
        pass
    (problem,) = caught.value.problems
    assert str(problem) == (
        "scheduler.type = ray: no cluster could be started on this machine (The current node timed "
        f"out during startup.); what Ray printed is in {log}; start it again when the machine is "
        "less busy, or name a cluster in RAY_ADDRESS."
    )
    assert len([one for one in inits if one != "shutdown"]) == 2, "tried again, once"
    assert log.read_text().count("a dump of 40 lines") == 2
    assert "dump" not in capfd.readouterr().err


def test_a_named_cluster_that_does_not_answer_is_refused(inits, monkeypatch):
    def fail(**options):
        raise ConnectionError("no head")

    monkeypatch.setattr(ray, "init", fail)
    monkeypatch.setenv("RAY_ADDRESS", "h:1")
    with pytest.raises(UserError, match="RAY_ADDRESS = h:1: no Ray cluster answers there .no head"):
        joined_cluster(BUNDLES).__enter__()


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1", "h:port", "h:6379/x"])
def test_a_name_that_is_no_address_is_refused_before_ray_is_asked(inits, monkeypatch, address):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(UserError, match=f"RAY_ADDRESS = {address}: is not HOST:PORT"):
        joined_cluster(BUNDLES).__enter__()
    assert not inits


@pytest.mark.parametrize("number", [0, 65536, 99999])
def test_a_number_that_is_no_port_is_refused_before_it_is_asked(inits, monkeypatch, number):
    """The system takes it modulo 65,536: 99999 is asked at 34463, where another program may be."""
    monkeypatch.setattr(ray_roles, "comes_up", lambda *_: pytest.fail("another port is asked"))
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{number}")
    with pytest.raises(UserError, match=f"RAY_ADDRESS = .*: {number} is not a port .1 to 65535"):
        joined_cluster(BUNDLES).__enter__()
    assert not inits


def test_a_port_without_a_listener_is_refused_in_time(monkeypatch):
    """Ray itself asks there for more than a minute, and again."""
    monkeypatch.setattr(ray, "init", lambda **options: pytest.fail("Ray is not asked"))
    monkeypatch.setattr(ray_roles, "ANSWER_S", 0.5)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(UserError, match="127.0.0.1:1: no Ray cluster answers there .no con"):
        joined_cluster(BUNDLES).__enter__()


def test_a_head_that_is_just_starting_is_waited_for():
    with socket.socket() as head:
        head.bind(("127.0.0.1", 0))
        threading.Timer(0.6, head.listen).start()
        assert ray_cluster.comes_up(f"127.0.0.1:{head.getsockname()[1]}", 30)


SILENT = """
import socket, sys, os, time
from pentad.core.errors import UserError
from pentad.runtime import ray_roles
ray_roles.JOIN_S = 3.0
head = socket.create_server(("127.0.0.1", 0))
os.environ["RAY_ADDRESS"] = f"127.0.0.1:{head.getsockname()[1]}"
began = time.monotonic()
try:
    ray_roles.joined_cluster([]).__enter__()
except UserError as error:
    print(f"{time.monotonic() - began:.1f}", error, flush=True)
    sys.exit(2)
"""


@pytest.mark.ray
@pytest.mark.dist
def test_what_accepts_connections_and_says_nothing_is_left_in_time_and_the_program_ends():
    """Also at its end, where what was left behind still asks."""
    given = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", SILENT],
        env={**given, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert 3 <= float(done.stdout.split()[0]) < 30
    assert "a program accepts connections there, but Ray could not join within" in done.stdout


def test_an_address_of_ray_client_is_refused_and_an_empty_one_names_no_cluster(inits, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "ray://h:10001")
    with pytest.raises(UserError, match="ray://h:10001: roles .* such as HOST:6379"):
        joined_cluster(BUNDLES).__enter__()
    assert not inits
    monkeypatch.setenv("RAY_ADDRESS", "")
    with joined_cluster(BUNDLES):
        assert inits[0]["address"] == "local"


@pytest.mark.parametrize("error", [ConnectionError("no"), RuntimeError("Version mismatch")])
def test_a_head_that_answers_and_is_not_joined_is_not_called_absent(inits, monkeypatch, error):
    """Ray tells of a refused token, in some of its releases, only that it failed to connect."""

    def fail(**options):
        raise error

    monkeypatch.setattr(ray, "init", fail)
    with socket.create_server(("127.0.0.1", 0)) as head:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{head.getsockname()[1]}")
        said = f"a program answers there, but Ray could not join it .{error}.; .*RAY_AUTH_MODE"
        with pytest.raises(UserError, match=said):
            joined_cluster(BUNDLES).__enter__()


def test_a_node_that_starts_no_task_is_one_sentence(monkeypatch):
    def wait(asked, timeout):
        raise GetTimeoutError("Get timed out: some object(s) not ready.")

    monkeypatch.setattr(ray, "get", wait)
    with pytest.raises(InfraFailure, match="the node of learner-0 on Ray started no task within"):
        answer_of(None, "the node of learner-0")


def test_a_named_cluster_that_asks_for_a_token_is_refused_with_what_to_set(inits, monkeypatch):
    """The token is deep in what Ray raises, which itself says only that it failed to connect."""

    def fail(**options):
        try:
            try:
                raise AuthenticationError("InvalidAuthToken")
            except AuthenticationError as error:
                raise RuntimeError("Failed to connect to GCS") from error
        except RuntimeError as error:
            raise ConnectionError("Failed to connect to Ray cluster at h:1") from error

    monkeypatch.setattr(ray, "init", fail)
    monkeypatch.setenv("RAY_ADDRESS", "h:1")
    with pytest.raises(UserError, match="RAY_ADDRESS = h:1: .* token; set RAY_AUTH_MODE=token"):
        joined_cluster(BUNDLES).__enter__()


@pytest.fixture
def stand_still():
    """A call of Ray that does not end before the test."""
    end = threading.Event()
    yield end.wait
    end.set()


def test_a_head_that_is_gone_is_noticed_and_calls_of_ray_do_not_stand_still(
    monkeypatch, stand_still
):
    monkeypatch.setattr(ray_cluster, "LOST_S", 0.4)
    monkeypatch.setattr(ray_cluster, "LOOK_S", 0.1)
    server = socket.create_server(("127.0.0.1", 0))
    cluster = Cluster(f"127.0.0.1:{server.getsockname()[1]}")
    assert cluster.ask(lambda: 3) == 3 == asyncio.run(cluster.run(lambda: 3))
    with pytest.raises(ClusterLost, match="took longer than 0.1 s"):
        cluster.ask(stand_still, 0.1)
    with pytest.raises(ZeroDivisionError):
        cluster.ask(lambda: 1 // 0)
    time.sleep(0.6)
    assert cluster.lost is None, "it answers"
    server.close()
    with pytest.raises(ClusterLost, match="does not answer"):
        cluster.ask(lambda: 3)
    with pytest.raises(RunError, match="has ended: its head has accepted no connection for 0.4 s"):
        asyncio.run(cluster.run(stand_still))


def test_a_call_that_stands_still_is_left_behind(stand_still):
    began = time.monotonic()
    with pytest.raises(ClusterLost):
        within(stand_still, 0.2)
    assert time.monotonic() - began < 60


def test_a_cluster_of_the_run_has_cpus_for_transfer_queue_and_another_is_not_waited_for_for_ever(
    monkeypatch,
):
    words = ["actor.path=m", "store=transfer_queue", "num_data_storage_units=3"]
    config = resolve(read_config(None, words).config)[0]
    assert ray_options(config)["spare_cpus"] == 4
    assert ray_options(config)["log_file"].name == "ray.log"
    assert ray_options(resolve(read_config(None, words[:1]).config)[0])["spare_cpus"] == 0
    monkeypatch.setattr(ray_blobs, "READY_S", 0.1)
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 3.0})
    ray_blobs.wait_cpus(3)
    with pytest.raises(UserError, match="store = transfer_queue: needs 4 CPUs .* 3 are free after"):
        ray_blobs.wait_cpus(4)


RUN = """
import asyncio, os, sys
from pathlib import Path
import ray
from pentad.runtime import ray_cluster
from pentad.runtime.ray_roles import RayRuntime
from pentad.runtime.group_calls import RankGroup
from pentad.runtime.roles import RoleSpec
from pentad.core.bundles import Bundle
from pentad.core.errors import RunError
ray_cluster.LOST_S = 5.0
folder = Path(sys.argv[1])
bundle = Bundle(cpus=1, gpus=0, members={"rollout-0": ()})
runtime = RayRuntime([bundle], log_file=folder / "ray.log")
spec = RoleSpec(name="rollout-0", target="role_targets:make", payload={}, log=folder / "r.log")
process = asyncio.run(runtime.start(spec))
(gcs,) = [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit()
          and (p / "stat").read_text().split()[3] == str(os.getpid())
          and b"gcs_server" in (p / "cmdline").read_bytes()]
os.kill(gcs, 9)
try:
    asyncio.run(runtime.start(spec))
except RunError as error:
    print("ended:", error, flush=True)
asyncio.run(runtime.close())
print("left:", Path(f"/proc/{process.pid}").exists(), list(Path("/tmp").glob("pentad-ray-*")))
"""


@pytest.mark.ray
@pytest.mark.dist
@pytest.mark.slow
def test_a_real_cluster_whose_head_is_killed_ends_the_program_in_time(tmp_path):
    paths = [str(Path(__file__).parent), *sys.path]
    given = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path)],
        env={**given, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ended: the Ray cluster at " in done.stdout and "left: False" in done.stdout
    assert "Failed to connect to GCS within" not in done.stderr


JOIN = """
import ray
from pentad.runtime.ray_roles import joined_cluster
with joined_cluster([]) as cluster:
    print("joined", cluster.address, ray.cluster_resources()["CPU"])
"""


@pytest.mark.ray
@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["", pytest.param("disabled", marks=pytest.mark.full)])
def test_a_head_started_by_hand_is_joined_by_its_address(mode):
    """Whether or not it requires the token in the user's home, which any cluster of `ray.init`,
    also that of a run, leaves there, and `ray start` takes up by itself."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ray_folder = Path(sys.executable).with_name("ray")
    with own_folder() as folder:
        (folder / ".ray").mkdir()
        (folder / ".ray/auth_token").write_text("a token of sixteen and more")
        given = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        given |= {"HOME": str(folder), "RAY_agent_register_timeout_ms": "300000"}
        words = ["start", "--head", "--block", "--num-cpus=2", f"--port={port}"]
        words += [f"--temp-dir={folder}", "--include-dashboard=false", "--disable-usage-stats"]
        head = subprocess.Popen(
            [ray_folder, *words],
            env=given | ({"RAY_AUTH_MODE": mode} if mode else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            said = ""
            while "--block" not in said:
                assert (line := head.stdout.readline()), f"the head did not start: {said}"
                said += line
            joined = subprocess.run(
                [sys.executable, "-c", JOIN],
                env=given | {"RAY_ADDRESS": f"127.0.0.1:{port}"},
                capture_output=True,
                text=True,
                timeout=300,
            )
        finally:
            head.terminate()
            head.communicate(timeout=120)
    assert "joined" in joined.stdout and joined.stdout.split()[-1] == "2.0", joined.stderr
