"""Runs whose samplers are Ray actors: the numbers of one process, and the examples scaled down."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from run_lab import steps_of, values_of
from test_rl_runs import assert_same_weights

from pentad.core.errors import UserError
from pentad.planner.prepare import prepare
from pentad.runtime.learner_client import LearnerClient
from pentad.telemetry.recorder import Recorder
from pentad.trainer.pumps.state import RunState
from pentad.trainer.sources.rollouts import run_train

ray = pytest.importorskip("ray")
from pentad.runtime.ray_roles import RayRuntime, wait_gone  # noqa: E402

pytestmark = [
    *(pytest.mark.ray, pytest.mark.dist, pytest.mark.slow),
    pytest.mark.usefixtures("ray_cluster"),
]
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.smoke
def test_ray_gives_the_numbers_of_one_process(lab):
    one = lab.train("mode=hybrid", "scheduler.processes=one")
    on_ray = lab.train("mode=hybrid", "scheduler.type=ray", "num_data_storage_units=2")
    assert_same_weights(one, on_ray)
    assert values_of(one) == values_of(on_ray)
    assert (on_ray.records / "servers" / "rollout-0.log").exists()


def test_learner_ranks_are_actors_and_a_lost_one_is_started_again(lab, tmp_path, monkeypatch):
    """One placement group for two ranks and a sampler; the group of ranks comes back alone."""
    started = note_started(monkeypatch)
    words = ("mode=hybrid", "total_train_steps=4", "recover.freq_steps=1", "saver.mode=sync")
    layout = "allocation_mode=embedded:d1+archon:d2"
    alone = lab.train(*words, layout)
    kill_after_a_step(tmp_path, lambda: started["learner-1"][0])
    on_ray = lab.train(*words, layout, "scheduler.type=ray", trial="killed")
    assert {name: [one.generation for one in found] for name, found in started.items()} == {
        **{"learner-0": [0, 1], "learner-1": [0, 1], "rollout-0": [0]}
    }
    assert_same_weights(alone, on_ray)
    assert values_of(alone) == values_of(on_ray)


def test_a_scorer_is_an_actor_too_and_a_lost_one_is_started_again(lab, monkeypatch):
    started, plain = note_started(monkeypatch), Recorder.step
    words = ("mode=async", "algorithm.kl_coef=0.1", "gconfig.n_samples=2", "total_train_steps=6")
    alone = lab.train(*words)

    def step(self, record, *rest):
        if record.step == 2:
            os.kill(started["ref-0"][0].pid, signal.SIGKILL)
        return plain(self, record, *rest)

    monkeypatch.setattr(Recorder, "step", step)
    on_ray = lab.train(*words, "scheduler.type=ray")
    assert [process.generation for process in started["ref-0"]] == [0, 1]
    assert_same_weights(alone, on_ray)
    assert values_of(alone) == values_of(on_ray)


def test_sft_trains_on_ray(lab):
    one, on_ray = (
        lab.sft("total_train_steps=2"),
        lab.sft("total_train_steps=2", "scheduler.type=ray"),
    )
    assert_same_weights(one, on_ray)
    assert values_of(one) == values_of(on_ray)


def test_a_killed_actor_is_started_again_and_changes_no_number(lab, tmp_path, monkeypatch):
    started = note_started(monkeypatch)
    alone = lab.train("mode=hybrid", "scheduler.processes=one", "total_train_steps=10")
    kill_after_a_step(tmp_path, lambda: started["rollout-0"][0])
    ray = lab.train("mode=hybrid", "scheduler.type=ray", "total_train_steps=10", trial="killed")
    assert [process.generation for process in started["rollout-0"]] == [0, 1]
    assert len(started["learner-0"]) == 1
    assert_same_weights(alone, ray)


def note_started(monkeypatch):
    """Name -> its processes, as they are started."""
    started = {}
    start = RayRuntime.start

    async def noted(self, spec):
        process = await start(self, spec)
        started.setdefault(spec.name, []).append(process)
        return process

    monkeypatch.setattr(RayRuntime, "start", noted)
    return started


def kill_after_a_step(tmp_path, find):
    """SIGKILL of a process once the run "killed" has recorded a step."""

    def wait():
        until = time.monotonic() + 240
        while time.monotonic() < until:
            records = tmp_path.glob("logs/*/*/killed/steps.jsonl")
            if any(file.read_text() for file in records):
                os.kill(find().pid, signal.SIGKILL)
                return
            time.sleep(0.02)

    threading.Thread(target=wait, daemon=True).start()


def test_transfer_queue_holds_the_groups_of_a_run(lab):
    pytest.importorskip("transfer_queue")
    one = lab.train("mode=hybrid", "scheduler.processes=one")
    queued = lab.train("mode=hybrid", "scheduler.type=ray", "store=transfer_queue")
    assert_same_weights(one, queued)
    assert values_of(one) == values_of(queued)


def kill_unit(blobs, number):
    """SIGKILL of the process of a storage unit, and its end."""
    pid = ray.get(blobs.units[number].__ray_call__.remote(lambda unit: os.getpid()))
    os.kill(pid, signal.SIGKILL)
    wait_gone(pid)


def test_groups_of_a_killed_storage_unit_are_put_again(lab, monkeypatch, caplog):
    """Before a batch is taken, and between the scheduler's look and that of the learner."""
    trained, to_kill, stores = {}, ["lease", "add"], []
    lease, call = RunState.lease, LearnerClient.call

    def leasing(state, batch, slots):
        stores[:] = [state.store]
        if batch == 1 and "lease" in to_kill:
            to_kill.remove("lease")
            kill_unit(state.store.blobs, 0)
        groups = lease(state, batch, slots)
        for group in groups:
            trained[group.gid] = batch, group.attempt
        return groups

    async def calling(learner, method, **arguments):
        if method == "add" and trained[arguments["gids"][0]][0] == 2:
            to_kill.remove("add")
            kill_unit(stores[0].blobs, 1)
        return await call(learner, method, **arguments)

    monkeypatch.setattr(RunState, "lease", leasing)
    monkeypatch.setattr(LearnerClient, "call", calling)
    args = ("mode=hybrid", "scheduler.type=ray", "num_data_storage_units=2", "total_train_steps=4")
    summary = lab.train(*args)
    assert to_kill == [] and "groups, which are put again" in caplog.text
    size = len(trained) // 4
    assert trained == {gid: (gid // size, 0) for gid in range(4 * size)}
    assert len(steps_of(summary)) == 4


@pytest.mark.parametrize("name", ["archon_qwen3_8b.yaml", "archon_qwen3_moe.yaml"])
def test_the_examples_start_scaled_down(lab, task, tmp_path, name):
    config, notes = prepare(
        EXAMPLES / name,
        [
            *(f"fileroot={tmp_path}", "cluster.n_nodes=1", "cluster.n_gpus_per_node=null"),
            *("allocation_mode=embedded:d2+archon:d1", "actor.archon.enable_compile=auto"),
            *(f"actor.path={task / 'model'}", "actor.init_from_scratch=true"),
            *(f"train_dataset.path={task / 'train.jsonl'}", "train_dataset.batch_size=4"),
            *("gconfig.max_new_tokens=6", "reward.fn=sort_digits", "total_train_steps=1"),
        ],
        "train",
    )
    assert config.scheduler.type == "ray"
    summary = run_train(config, notes, device="cpu")
    assert len(steps_of(summary)) == 1
    assert {file.name for file in (summary.records / "servers").glob("*.log")} == {
        "rollout-0.log",
        "rollout-1.log",
    }


def test_more_replicas_than_the_cluster_holds_are_refused(lab):
    with pytest.raises(UserError, match="needs 10 CPUs .* and the cluster has 8"):
        lab.train("allocation_mode=embedded:d9+archon:d1", "scheduler.type=ray")
