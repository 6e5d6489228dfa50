"""Sinks get what they are given and cannot stop, slow or crash a run."""

import json
import logging
import os
import sqlite3
import subprocess
import sys
import threading
import time
from types import ModuleType, SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pentad.telemetry.section import TrackioConfig, WandbConfig
from pentad.telemetry.sinks import BackgroundSink, build_sinks


class Listed:
    def __init__(self):
        self.seen = []
        self.closed = False

    def write(self, step, values):
        self.seen.append((step, dict(values)))

    def close(self):
        self.closed = True


def wait_until(condition, timeout_s=60.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.005)


def warnings(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_records_arrive_in_order_and_all_before_the_end():
    sink = Listed()
    background = BackgroundSink("listed", lambda: sink)
    for step in range(100):
        background.write(step, {"loss": float(step)})
    background.close()
    assert sink.seen == [(step, {"loss": float(step)}) for step in range(100)]
    assert sink.closed and not background.is_off


@pytest.mark.parametrize("where", ["start", "write", "close"])
def test_a_sink_that_raises_is_reported_once_and_switched_off(caplog, where):
    class Broken(Listed):
        def write(self, step, values):
            if where == "write":
                raise RuntimeError("no connection")

        def close(self):
            if where == "close":
                raise RuntimeError("no connection")

    def make():
        if where == "start":
            raise RuntimeError("no connection")
        return Broken()

    background = BackgroundSink("broken", make)
    for step in range(3):
        background.write(step, {})
    if where != "close":
        wait_until(lambda: background.is_off)
    background.write(4, {})
    background.close()
    wait_until(lambda: warnings(caplog))
    said = ["broken is switched off: RuntimeError: no connection; training continues"]
    assert warnings(caplog) == said


def test_a_sink_that_blocks_delays_nobody(caplog):
    gate, entered = threading.Event(), threading.Event()

    class Stuck(Listed):
        def write(self, step, values):
            entered.set()
            gate.wait()

    clock = [0.0]
    background = BackgroundSink("stuck", Stuck, clock=lambda: clock[0], max_write_s=60)
    background.write(1, {})
    entered.wait(60)
    background.write(2, {})
    assert not background.is_off, "a slow write is given its time"
    clock[0] = 61.0
    background.write(3, {})
    assert background.is_off
    background.close()  # nobody waits for it: it hangs until the gate opens
    assert warnings(caplog) == [
        "stuck is switched off: it has not answered for 60 s; training continues"
    ]
    gate.set()


def test_a_sink_that_falls_behind_is_switched_off(caplog):
    gate = threading.Event()

    class Slow(Listed):
        def write(self, step, values):
            gate.wait()

    background = BackgroundSink("slow", Slow, max_waiting=8)
    for step in range(12):
        background.write(step, {})
    assert background.is_off
    assert warnings(caplog) == ["slow is switched off: it is 8 records behind; training continues"]
    gate.set()


def test_the_end_of_a_run_does_not_wait_for_ever(caplog):
    gate = threading.Event()

    class Slow(Listed):
        def close(self):
            gate.wait()

    background = BackgroundSink("slow", Slow)
    background.close(timeout_s=0.05)
    assert "did not finish within 0 s" in warnings(caplog)[0]
    gate.set()


def read_curves(folder):
    found = EventAccumulator(str(folder))
    found.Reload()
    tags = found.Tags()["scalars"]
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in tags}


def test_tensorboard_files_hold_the_curves(tmp_path):
    (sink,) = build_sinks(tmp_path, tensorboard=True)
    for step in (1, 2, 3):
        sink.write(step, {"loss": 0.5 * step, "rl/reward_mean": float(step)})
    sink.close()
    assert read_curves(tmp_path / "tensorboard") == {
        "loss": [(1, 0.5), (2, 1.0), (3, 1.5)],
        "rl/reward_mean": [(1, 1.0), (2, 2.0), (3, 3.0)],
    }


def test_tensorboard_forgets_the_points_a_resumed_run_draws_again(tmp_path):
    for start, steps in ((None, (1, 2, 3, 4)), (2, (3, 4)), (0, (1,))):
        (sink,) = build_sinks(tmp_path, tensorboard=True)
        if start is not None:
            sink.resume(start)
        for step in steps:
            sink.write(step, {"loss": (start or 0) + step / 8})
        sink.close()
        if start == 2:
            curve = read_curves(tmp_path / "tensorboard")["loss"]
            assert curve == [(1, 0.125), (2, 0.25), (3, 2.375), (4, 2.5)]
    assert read_curves(tmp_path / "tensorboard")["loss"] == [(1, 0.125)]


def test_tensorboard_shows_what_was_said(tmp_path):
    (sink,) = build_sinks(tmp_path, tensorboard=True)
    line = {"pick": "best", "question": "6*7?", "text": "42", "turns": [], "reward": 1.0}
    talk = [["assistant", "50"], ["user", "too low"], ["assistant", "60"]]
    sink.write_samples(3, [line, {**line, "pick": "worst", "turns": talk}])
    sink.close()
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    (event,) = found.Tensors("samples")
    assert found.SummaryMetadata("samples").plugin_data.plugin_name == "text"
    (text,) = event.tensor_proto.string_val
    assert event.step == 3 and text.decode() == (
        "**best, reward 1.0**\n\n    6*7?\n    \n    42\n\n"
        "**worst, reward 1.0**\n\n    6*7?\n    \n    50\n    [user: too low]\n    60"
    )


def test_wandb_gets_a_table_of_what_was_said(tmp_path, monkeypatch):
    """The library is not installed where most tests run: a stand-in takes its calls."""
    logged = []
    run = SimpleNamespace(
        define_metric=lambda *a, **k: None, log=logged.append, finish=lambda: None
    )
    stand_in = ModuleType("wandb")
    stand_in.init, stand_in.Settings = lambda **k: run, lambda **k: None
    stand_in.Table = lambda columns, data: [dict(zip(columns, row, strict=True)) for row in data]
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    monkeypatch.delitem(sys.modules, "pentad.telemetry.wandb_sink", raising=False)
    (sink,) = build_sinks(tmp_path, wandb=WandbConfig(project="p"))
    turns = [["assistant", "50"], ["user", "too high"], ["assistant", "42"]]
    line = {"pick": "best", "question": "6*7?", "text": "50\n42", "turns": turns, "reward": 1.5}
    line |= {"expected": "42", "reward_parts": {"right": 1.0, "short": 0.5}}
    sink.write_samples(3, [line])
    sink.close()
    monkeypatch.delitem(sys.modules, "pentad.telemetry.wandb_sink")
    row = {"step": 3, "pick": "best", "question": "6*7?", "reward": 1.5, "expected": "42"}
    row |= {"answer": "50\n[user: too high]\n42", "reward_parts": "right 1, short 0.5"}
    assert logged == [{"samples": [row], "step": 3}]


def test_a_missing_library_is_a_sentence_at_the_start(tmp_path):
    code = (
        "import sys, pathlib\n"
        "sys.modules['tensorboard'] = sys.modules['wandb'] = sys.modules['trackio'] = None\n"
        "from pentad.core.errors import UserError\n"
        "from pentad.telemetry.section import TrackioConfig, WandbConfig\n"
        "from pentad.telemetry.sinks import build_sinks\n"
        "for asked in ({'tensorboard': True}, {'wandb': WandbConfig(project='p')}):\n"
        "    try: build_sinks(pathlib.Path('x'), **asked)\n"
        "    except UserError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "telemetry.tensorboard = true: tensorboard is not installed; "
        "pip install 'pentad[tensorboard]'.",
        "telemetry.wandb.project = p: wandb is not installed; pip install 'pentad[wandb]'.",
    ]


def test_trackio_gets_steps_and_what_was_said(tmp_path, monkeypatch):
    run = SimpleNamespace(logged=[], finish=lambda: None)
    run.log = lambda values, step: run.logged.append((step, values))
    asked = []
    stand_in = ModuleType("trackio")
    stand_in.init = lambda **given: asked.append(given) or run
    stand_in.Table = lambda columns, data: (columns, data)
    for name in ("run", "utils"):
        setattr(stand_in, name, ModuleType(f"trackio.{name}"))
        monkeypatch.setitem(sys.modules, f"trackio.{name}", getattr(stand_in, name))
    monkeypatch.setitem(sys.modules, "trackio", stand_in)
    monkeypatch.delitem(sys.modules, "pentad.telemetry.trackio_sink", raising=False)
    (sink,) = build_sinks(tmp_path, trackio=TrackioConfig(project="p"), run_name="mine")
    sink.write(3, {"loss": 0.5})
    sink.close()
    monkeypatch.delitem(sys.modules, "pentad.telemetry.trackio_sink")
    (given,) = asked
    assert (given["project"], given["name"], given["resume"]) == ("p", "mine", "allow")
    assert run.logged == [(3, {"loss": 0.5})] and not sink.can_redraw


@pytest.mark.optional
def test_trackio_keeps_a_run_on_this_machine(tmp_path):
    pytest.importorskip("trackio")
    code = (
        "import sys, pathlib\n"
        "from pentad.telemetry.section import TrackioConfig\n"
        "from pentad.telemetry.sinks import build_sinks\n"
        "(sink,) = build_sinks(pathlib.Path(sys.argv[1]), trackio=TrackioConfig(project='p'))\n"
        "for step in (1, 2): sink.write(step, {'loss': 1.0 / step})\n"
        "sink.close(timeout_s=240)\n"
        "assert not sink.is_off\n"
    )
    env = {**os.environ, "TRACKIO_DIR": str(tmp_path / "kept")}
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "", "nothing runs through the live table"
    with sqlite3.connect(tmp_path / "kept/p.db") as kept:
        lines = kept.execute("select run_name, step, metrics from metrics order by step").fetchall()
    kept.close()
    assert [(name, step) for name, step, _ in lines] == [(tmp_path.name, 1), (tmp_path.name, 2)]
    assert [json.loads(values) for _, _, values in lines] == [{"loss": 1.0}, {"loss": 0.5}]


@pytest.mark.optional
def test_wandb_keeps_an_offline_run(tmp_path):
    pytest.importorskip("wandb")
    code = (
        "import sys, pathlib\n"
        "from pentad.telemetry.section import TrackioConfig, WandbConfig\n"
        "from pentad.telemetry.sinks import build_sinks\n"
        "settings = WandbConfig(project='p', mode='offline')\n"
        "(sink,) = build_sinks(pathlib.Path(sys.argv[1]), wandb=settings)\n"
        "for step in (1, 2): sink.write(step, {'loss': 1.0 / step})\n"
        "sink.close(timeout_s=240)\n"
        "assert not sink.is_off\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "", "nothing runs through the live table"
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    assert file.read_bytes().count(b"loss") >= 2
