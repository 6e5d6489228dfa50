"""Captures of several threads. torch.cuda.graph is replaced: the rules are about calls."""

import gc
import re
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import pentad
from pentad.engine.graphs import CudaRecorder
from pentad.ops.capture import capturing, free_cached_memory, wait_for_device


@pytest.fixture
def pools(monkeypatch):
    """The pools of captures; torch's rules are asserted."""
    used, state = [], {"active": 0, "last": 0}

    @contextmanager
    def graph(graph, pool=None, stream=None, capture_error_mode="global"):
        state["active"] += 1
        assert state["active"] == 1, "two captures at a time"
        assert capture_error_mode == "thread_local"
        used.append(pool)
        try:
            time.sleep(0.01)
            yield
        finally:
            state["active"] -= 1

    def handle():
        state["last"] += 1
        return (0, state["last"])

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", handle)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    return used


def test_threads_capture_one_after_the_other(pools):
    failed = []

    def capture():
        try:
            with capturing(object(), None):
                pass
        except AssertionError as error:
            failed.append(error)

    threads = [threading.Thread(target=capture) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert len(pools) == 4


def test_a_failed_capture_does_not_block_others(pools):
    with pytest.raises(RuntimeError, match="not permitted"), capturing(object(), None):
        raise RuntimeError("operation not permitted")
    with capturing(object(), None):
        pass
    assert len(pools) == 2


@pytest.mark.parametrize(
    ("name", "work"), [("synchronize", wait_for_device), ("empty_cache", free_cached_memory)]
)
def test_work_on_the_whole_device_waits_for_a_capture_of_another_thread(
    pools, monkeypatch, name, work
):
    order, begun = [], threading.Event()
    monkeypatch.setattr(torch.cuda, name, lambda *_: order.append("device"))

    def capture():
        with capturing(object(), None):
            begun.set()
            time.sleep(0.3)
            order.append("captured")

    other = threading.Thread(target=capture)
    other.start()
    begun.wait()
    work()
    other.join()
    assert order == ["captured", "device"]
    with capturing(object(), None):  # torch raises, which is better than a deadlock
        work()


def test_all_work_on_whole_devices_waits_for_captures():
    """Except where no capture can run, or one that hangs must not be waited for."""
    allowed = {"ops/capture.py", "samplers/sglang_worker.py", "trainer/processes/supervisor.py"}
    root = Path(pentad.__file__).parent
    found = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if re.search(r"cuda\.(synchronize|empty_cache)\(", path.read_text())
    }
    assert found == allowed


def test_graphs_share_a_pool_until_all_have_been_freed(pools):
    recorder = CudaRecorder(torch.device("cpu"))
    kept = [recorder.record(lambda: None) for _ in range(2)]
    kept.pop()
    kept.append(recorder.record(lambda: None))
    assert len(set(pools)) == 1
    kept.clear()
    gc.collect()
    kept.append(recorder.record(lambda: None))
    assert pools[-1] not in pools[:-1]
