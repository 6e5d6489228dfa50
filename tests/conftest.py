"""Settings of all tests."""

import gc
import os
import re
import signal
import warnings
from pathlib import Path

import pytest
from hypothesis import settings
from process_state import left_behind, process_restored, running
from warm_start import cold_starts, install, keep_environment, warm_starts

from pentad.core import device

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined

# Read when huggingface_hub is imported: no test asks the hub, those of its names ask a server here.
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # A shell starts what it runs in the background so; every process of a test would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("any machine", deadline=None)  # a busy machine is no failure
settings.load_profile("any machine")

install()
device.WARM_STEPS = 0  # every run would count the objects that are frozen below

pytest_plugins = ["cpu_times"]


ALL_DIST = re.compile(r"^pytestmark = (?:pytest\.mark\.dist$|\[[^\]]*mark\.dist\b)", re.MULTILINE)


def pytest_ignore_collect(collection_path, config):
    """Tests with a marker, or all without it, do not import the files that have none of theirs."""
    marker, _, _ = config.option.markexpr.removeprefix("not ").partition(" ")
    if marker not in ("dist", "ray") or collection_path.suffix != ".py":
        return None
    text = collection_path.read_text()
    if config.option.markexpr.startswith("not "):
        return True if marker == "dist" and ALL_DIST.search(text) else None
    return None if f"mark.{marker}" in text else True


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Imports make what stays: looking for garbage meanwhile is a quarter of their time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish():
    """Every run collects garbage: without the modules of all tests, which are most of the heap."""
    keep_environment()
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()  # or what frees itself at the end is reported as leaked


@pytest.fixture(autouse=True)
def process_as_before():
    """A test neither finds what others set for the process nor leaves anything."""
    with process_restored():
        yield


@pytest.fixture(autouse=True, scope="module")
def nothing_left_behind(request):
    """Names what a module's tests have started and not ended: it works beside later tests."""
    before = running()
    yield
    if left := left_behind(before):
        warnings.warn(f"{request.node.nodeid} left behind: {', '.join(left)}", stacklevel=1)


@pytest.fixture
def started_cold():
    """For tests of how processes start: none is forked from one that has imported everything."""
    with cold_starts():
        yield


@pytest.fixture
def started_warm():
    """For tests of what programs do: any process of this interpreter is forked from one that has
    imported everything."""
    with warm_starts():
        yield


@pytest.fixture(scope="session")
def ray_cluster():
    """One Ray cluster for all tests of a process that want one: it takes seconds to start."""
    ray = pytest.importorskip("ray")
    with process_restored():
        os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_agent_register_timeout_ms": "120000"}
        options = {"include_dashboard": False, "log_to_driver": False, "logging_level": "warning"}
        for left in (1, 0):  # its processes have 30 s to start, which a busy machine may not give
            try:
                ray.init(
                    address="local",
                    num_cpus=8,
                    num_gpus=4,
                    object_store_memory=100 << 20,
                    **options,
                )
                break
            except Exception:
                ray.shutdown()
                if not left:
                    raise
    yield
    with process_restored():
        ray.shutdown()
