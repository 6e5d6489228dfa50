"""Step records: the seed's envelope, nulls instead of inventions, and one documented schema."""

import json
import math
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np

from pentad.core.types import Group, Prompt, Sample
from pentad.data.ledger import Ledger
from pentad.rl.metrics import sample_metrics, staleness_histogram
from pentad.telemetry import record as record_module
from pentad.telemetry.record import (
    BLOCKS,
    Funnel,
    Kernel,
    MemoryUse,
    Rl,
    StepRecord,
    comparable,
    plain_json,
    scalars,
)

ENVELOPE = {
    "step": None,
    "loss": None,
    "mfu": None,
    "tokens_per_sec": None,
    "wall_clock_ms": None,
    "kernel": {
        "sram_bytes_per_block",
        "achieved_bw_gbps",
        "tokens_per_expert_mean",
        "tokens_per_expert_std",
        "used_triton",
    },
    "collective": {"all_to_all_dispatch_ms", "all_to_all_combine_ms"},
    "memory": {"peak_allocated_gb", "reserved_gb", "leak_delta_gb"},
    "infra": {"async_ckpt_commit_ms", "active_nodes", "ep_world_size"},
}
"""The telemetry envelope users know, field by field."""


def test_every_record_has_the_whole_envelope():
    line = StepRecord(step=3, loss=2.5).as_json()
    for name, inner in ENVELOPE.items():
        assert name in line
        if inner:
            assert inner <= line[name].keys()


def test_what_nobody_measured_is_null():
    line = StepRecord(step=3, loss=2.5, memory=MemoryUse(reserved_gb=1.0)).as_json()
    given = {"schema": 1, "step": 3, "loss": 2.5, "generation": 0, "superseded": False}
    for name, value in line.items():
        if name == "memory":
            assert value.pop("reserved_gb") == 1.0
        if name in BLOCKS:
            assert set(value.values()) == {None}
        else:
            assert value == given.get(name)


def test_records_are_strict_json_and_say_what_was_not_finite():
    rl = Rl(ratio_max=math.inf, reward_parts={"a": math.nan, "b": 1.0})
    line = StepRecord(step=1, loss=math.nan, grad_norm=np.float32(2.5), rl=rl).as_json()
    again = json.loads(json.dumps(line, allow_nan=False))
    assert again["loss"] is None and again["rl"]["ratio_max"] is None
    assert again["rl"]["reward_parts"] == {"a": None, "b": 1.0}
    assert again["nonfinite"] == {"loss": "nan", "rl.ratio_max": "inf", "rl.reward_parts.a": "nan"}
    assert again["grad_norm"] == 2.5


def test_plain_json_takes_numpy_numbers():
    line = plain_json({"a": np.int64(3), "b": [np.float32(-np.inf)], "c": True})
    assert json.dumps(line) == '{"a": 3, "b": [null], "c": true, "nonfinite": {"b.0": "-inf"}}'


def test_rl_metrics_and_the_funnel_fit_the_schema():
    """What the parts of a run report goes in under the same names."""
    sample = Sample(
        ids=np.array([5, 7]),
        mask=np.array([False, True]),
        rollout_logprobs=np.array([0, -0.1], np.float32),
        versions=np.array([-1, 3]),
        finish="length",
        reward=0.5,
    )
    groups = [Group(Prompt(0, (5,), {}), [sample])]
    rl = Rl(**sample_metrics(groups), staleness=staleness_histogram(groups, 4))
    ledger = Ledger(2)
    ledger.drop(ledger.admit(0), "too_long")
    funnel = Funnel(**asdict(ledger.funnel()))
    line = StepRecord(step=1, rl=rl, funnel=funnel).as_json()
    assert (line["rl"]["reward_mean"], line["rl"]["truncated_share"]) == (0.5, 1.0)
    assert line["rl"]["staleness"] == {"1": 1}
    assert line["funnel"] == {
        "drawn": 1,
        "trained": 0,
        "dropped": {"too_long": 1},
        "in_flight": 0,
    }


def test_every_metric_of_rl_has_its_field():
    import dataclasses

    from pentad.rl import metrics
    from pentad.rl.section import AlgorithmConfig

    settings = AlgorithmConfig()
    found = metrics.compute_metrics([], [], [], settings, stats={})
    assert found.keys() <= {entry.name for entry in dataclasses.fields(Rl)}


def test_scalars_are_numbers_by_path():
    rl = Rl(reward_mean=0.5, staleness={"0": 12})
    line = StepRecord(step=7, loss=1.0, rl=rl, kernel=Kernel(used_triton=True)).as_json()
    assert scalars(line) == {
        "loss": 1.0,
        "rl/reward_mean": 0.5,
        "rl/staleness/0": 12.0,
        "kernel/used_triton": 1.0,
    }


def test_comparable_leaves_out_what_measures_the_machine():
    def run(seconds):
        return StepRecord(
            step=1,
            loss=0.25,
            time_s=seconds,
            wall_clock_ms=seconds,
            phases={"train": seconds},
            memory=MemoryUse(peak_allocated_gb=seconds),
            evals=[{"version": 0, "accuracy": 0.5, "seconds": seconds}],
        ).as_json()

    assert comparable(run(1.0)) == comparable(run(2.0))
    assert comparable(run(1.0))["loss"] == 0.25
    assert comparable(run(1.0))["evals"] == [{"version": 0, "accuracy": 0.5}]
    assert comparable(StepRecord(step=1, loss=0.5).as_json()) != comparable(run(1.0))


def test_every_field_is_explained():
    import dataclasses

    for cls in (StepRecord, *BLOCKS.values()):
        for entry in dataclasses.fields(cls):
            assert entry.metadata["meaning"] or entry.name in BLOCKS, f"{cls.__name__}.{entry.name}"


def test_telemetry_loads_no_torch():
    room = Path(record_module.__file__).parent
    optional = {"tensorboard_sink", "wandb_sink", "trackio_sink"}
    names = [f"pentad.telemetry.{p.stem}" for p in room.glob("*.py") if p.stem not in optional]
    code = f"import sys, importlib\nfor m in {sorted(names)!r}: importlib.import_module(m)\n"
    code += "print(sorted(set(sys.modules) & {'torch', 'transformers', 'numpy', 'tensorboard'}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
