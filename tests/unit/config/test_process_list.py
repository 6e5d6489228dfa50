"""Which processes a run has: by layout, mode, machines and scheduler."""

import pytest

from pentad.config.load import load_config
from pentad.config.processes import run_processes
from pentad.config.resolve import resolve


def drawn(*overrides, kind="cuda"):
    """name -> (roles, machine, GPUs, shares with, starter)."""
    config, _ = resolve(load_config(None, overrides))
    return {
        one.name: (*one.runs, one.node, one.devices, one.shares_with, one.started_by)
        for one in run_processes(config, kind)
    }


ALONE = ("scheduler", "actor")
SCHEDULER = {"scheduler": ("scheduler", 0, (), (), "pentad")}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["cluster.n_gpus_per_node=1", "reward.fn=gsm8k"],
            {
                "learner-0": (*ALONE, "rollout", 0, (0,), (), "pentad"),
                "rewards": ("reward pool", 0, (), (), "pentad"),
            },
        ),
        (
            ["cluster.n_gpus_per_node=3", "allocation_mode=embedded:d2+archon:d1"],
            {
                **SCHEDULER,
                "learner-0": ("actor", 0, (0,), (), "pentad"),
                "rollout-0": ("rollout", 0, (1,), (), "pentad"),
                "rollout-1": ("rollout", 0, (2,), (), "pentad"),
            },
        ),
        (
            [
                *("cluster.n_gpus_per_node=1", "cluster.share_gpus=true"),
                *("allocation_mode=embedded:d1+archon:d1", "algorithm.name=ppo"),
            ],
            {
                **SCHEDULER,
                "learner-0": ("actor", "critic", 0, (0,), ("rollout-0",), "pentad"),
                "rollout-0": ("rollout", 0, (0,), ("learner-0",), "pentad"),
            },
        ),
        (
            [
                *("cluster.n_gpus_per_node=3", "algorithm.kl_coef=0.1"),
                "allocation_mode=archon[ref]:d1+embedded[rollout]:d1+archon[actor]:d1",
            ],
            {
                "scheduler": ("scheduler", 0, (), (), "pentad"),
                "learner-0": ("actor", 0, (0,), (), "pentad"),
                "rollout-0": ("rollout", 0, (1,), (), "pentad"),
                "ref-0": ("ref", 0, (2,), (), "pentad"),
            },
        ),
        (
            [
                *("cluster.n_nodes=2", "cluster.n_gpus_per_node=1", "scheduler.type=slurm"),
                "allocation_mode=archon:d2",
            ],
            {
                "learner-0": ("actor 0", 0, (0,), (), "torchrun"),
                "learner-1": ("actor 1", 1, (0,), (), "torchrun"),
            },
        ),
        (
            [
                *("cluster.n_nodes=2", "cluster.n_gpus_per_node=1", "scheduler.type=ray"),
                *("allocation_mode=embedded:d1+archon:d1", "num_data_storage_units=2"),
            ],
            {
                **SCHEDULER,
                "learner-0": ("actor", None, (), (), "ray"),
                "rollout-0": ("rollout", None, (), (), "ray"),
                "storage-0": ("storage unit", None, (), (), "ray"),
                "storage-1": ("storage unit", None, (), (), "ray"),
            },
        ),
        (
            [
                *("scheduler.type=ray", "algorithm.kl_coef=0.1"),
                "allocation_mode=archon[ref]:d1+embedded[rollout]:d1+archon[actor]:d1",
            ],
            {
                **SCHEDULER,
                "learner-0": ("actor", None, (), (), "ray"),
                "rollout-0": ("rollout", None, (), (), "ray"),
                "ref-0": ("ref", None, (), (), "ray"),
            },
        ),
        (
            ["only=rollout", "cluster.n_gpus_per_node=1", "reward.fn=gsm8k"],
            {
                "scheduler": ("scheduler", "rollout", 0, (0,), (), "pentad"),
                "rewards": ("reward pool", 0, (), (), "pentad"),
            },
        ),
        (
            [
                *("only=rollout", "cluster.n_gpus_per_node=2"),
                "allocation_mode=embedded:d1+archon:d1",
            ],
            {**SCHEDULER, "rollout-0": ("rollout", 0, (1,), (), "pentad")},
        ),
        (
            [
                *("only=train", "groups_from=x", "cluster.n_gpus_per_node=2"),
                *("allocation_mode=embedded:d1+archon:d1", "reward.fn=gsm8k"),
            ],
            {**SCHEDULER, "learner-0": ("actor", 0, (0,), (), "pentad")},
        ),
        (
            [
                *("cluster.n_gpus_per_node=3", "allocation_mode=vllm:d1t2+archon:d1"),
                "rollout.server.addresses=[http://n7:8000]",
            ],
            {
                "learner-0": (*ALONE, 0, (0,), (), "pentad"),
                "vllm-0": ("rollout", None, (), (), "http://n7:8000"),
            },
        ),
    ],
)
def test_processes_and_their_places(overrides, expected):
    assert drawn(*overrides) == expected


def test_on_a_cpu_processes_have_no_devices():
    layout = "allocation_mode=embedded:d2+archon:d2"
    found = drawn(layout, kind="cpu")
    assert list(found) == ["scheduler", "learner-0", "learner-1", "rollout-0", "rollout-1"]
    assert all(one[-3] == () and one[-2] == () for one in found.values())
