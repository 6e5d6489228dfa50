"""Where the processes of a run are placed: by layout, mode, machines and scheduler."""

import pytest
from rule_checks import check_layout

from pentad.config.load import load_config
from pentad.config.resolve import resolve
from pentad.config.topology import facts_of, topology


def drawn(*overrides, kind="cuda"):
    """name -> (roles, machine, GPUs, shares with, starter)."""
    return {
        one.name: (*one.runs, one.node, one.devices, one.shares_with, one.started_by)
        for one in placed(*overrides, kind=kind).processes
    }


def placed(*overrides, kind="cuda"):
    config, _ = resolve(load_config(None, overrides))
    return topology(config, facts_of(config, kind))


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
                "scheduler": ("scheduler", 0, (), (), "torchrun"),
                "learner-0": ("actor 0", 0, (0,), (), "pentad"),
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
                "learner-0": ("actor", None, (0,), (), "ray"),
                "rollout-0": ("rollout", None, (0,), (), "ray"),
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
                "learner-0": ("actor", None, (0,), (), "ray"),
                "rollout-0": ("rollout", None, (0,), (), "ray"),
                "ref-0": ("ref", None, (0,), (), "ray"),
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
            {**SCHEDULER, "rollout-0": ("rollout", 0, (0,), (), "pentad")},
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


def one_each(name, count, start=0, node=0):
    return {f"{name}-{i}": (node, (start + i,)) for i in range(count)}


@pytest.mark.parametrize(
    ("allocation", "nodes", "gpus", "more", "expected"),
    [
        # Shared devices index by index, also where there are more of one side.
        ("vllm:d2t2|archon:d2", 1, 4, [], {"vllm-0": (0, (0, 1)), "vllm-1": (0, (2, 3))}),
        ("embedded:d4|archon:d2", 1, 4, [], one_each("rollout", 4)),
        ("embedded:d1|archon:d4", 1, 4, [], {"rollout-0": (0, (0,))}),
        # Training first, whatever is written first.
        ("vllm:d2t2+archon:d1", 1, 5, [], {"vllm-0": (0, (1, 2)), "vllm-1": (0, (3, 4))}),
        ("archon:d1+vllm:d2t2", 1, 5, [], {"vllm-0": (0, (1, 2)), "vllm-1": (0, (3, 4))}),
        # A side that does not run has no devices.
        ("embedded:d2|archon:d1", 1, 2, ["only=rollout"], one_each("rollout", 2)),
        ("embedded:d2+archon:d2", 1, 2, ["only=rollout"], one_each("rollout", 2)),
        ("vllm:d2t2+archon:d4", 1, 4, ["only=rollout"], {"vllm-1": (0, (2, 3))}),
        ("vllm:d2+archon:d2", 1, 2, ["only=train", "groups_from=x"], one_each("learner", 2)),
        # Several machines: training fills those it needs, a server is whole on one.
        (
            "sglang:d4t4+archon:(attn:d1p4t2c2|ffn:d1p4t1e4)",
            *(4, 8, ["scheduler.type=slurm"]),
            {
                **one_each("learner", 8),
                **{f"learner-{8 + i}": (1, (i,)) for i in range(8)},
                **{
                    f"sglang-{i}": (2 + i // 2, tuple(range(i % 2 * 4, i % 2 * 4 + 4)))
                    for i in range(4)
                },
            },
        ),
        (
            "sglang:d2t4|archon:d8",
            *(2, 4, ["scheduler.type=slurm"]),
            {"sglang-0": (0, (0, 1, 2, 3)), "sglang-1": (1, (0, 1, 2, 3)), "learner-5": (1, (1,))},
        ),
        (
            "vllm:d1t2+archon:d14",
            *(2, 8, ["scheduler.type=slurm"]),
            {"learner-6": (0, (6,)), "learner-7": (1, (0,)), "vllm-0": (None, ())},
        ),
        ("embedded:d1+archon:d14", 2, 8, ["scheduler.type=slurm"], {"rollout-0": (0, (7,))}),
    ],
)
def test_devices(allocation, nodes, gpus, more, expected):
    given = [f"allocation_mode={allocation}", f"cluster.n_nodes={nodes}", *more]
    found = placed(*given, f"cluster.n_gpus_per_node={gpus}").processes
    places = {one.name: (one.node, one.devices) for one in found}
    assert {name: places[name] for name in expected} == expected
    users = [
        (one.node, gpu) for one in found if one.name.startswith("learner") for gpu in one.devices
    ]
    assert len(users) == len(set(users)), "two ranks that train are on one GPU"


@pytest.mark.parametrize(
    ("allocation", "more", "expected"),
    [
        (
            "embedded:d2|archon:d2",
            [],
            [
                {"learner-0": (0,), "rollout-0": (0,)},
                {"learner-1": (0,), "rollout-1": (0,)},
            ],
        ),
        (
            "embedded:d1|archon:d4",
            [],
            [
                {"learner-0": (0,), "rollout-0": (0,)},
                *({f"learner-{i}": (0,)} for i in (1, 2, 3)),
            ],
        ),
        (
            "vllm:d2t2|archon:d4",
            [],
            [
                {"learner-0": (0,), "learner-1": (1,), "vllm-0": (0, 1)},
                {"learner-2": (0,), "learner-3": (1,), "vllm-1": (0, 1)},
            ],
        ),
        ("sglang:d1t4+archon:d1", [], [{"learner-0": (0,)}, {"sglang-0": (0, 1, 2, 3)}]),
        (
            "archon[ref]:d2+embedded[rollout]:d1+archon[actor]:d1",
            ["mode=async", "algorithm.kl_coef=0.1"],
            [{"learner-0": (0,)}, {"rollout-0": (0,)}, {"ref-0": (0,)}, {"ref-1": (0,)}],
        ),
        (
            "embedded:d2|archon:d2",
            ["only=train", "groups_from=x"],
            [{"learner-0": (0,)}, {"learner-1": (0,)}],
        ),
        ("embedded:d2|archon:d2", ["only=rollout"], [{"rollout-0": (0,)}, {"rollout-1": (0,)}]),
    ],
)
def test_ray_has_one_bundle_for_what_shares_a_gpu(allocation, more, expected):
    given = [f"allocation_mode={allocation}", "cluster.n_gpus_per_node=8", "scheduler.type=ray"]
    found = placed(*given, *more)
    bundles = found.bundles()
    assert [dict(one.members) for one in bundles] == expected
    for one in bundles:
        used = {gpu for seen in one.members.values() for gpu in seen}
        assert used == set(range(one.gpus)) and one.cpus == len(one.members)
        assert sum(map(one.gpu_share, one.members)) <= one.gpus
    without = found.bundles(has_learners=False)
    assert not any(name.startswith("learner") for one in without for name in one.members)
    assert len(found.held_gpus) == sum("learner-" in str(one) for one in found.learners)


def test_a_group_of_the_same_devices_is_stated_once():
    given = ["allocation_mode=embedded:d2|archon:d2", "cluster.n_gpus_per_node=2"]
    assert placed(*given) is placed(*given)


def test_cores_are_for_samplers_that_decode_while_others_train():
    given = [
        "allocation_mode=embedded:d1+archon:d1",
        "max_staleness=1",
        "scheduler.processes=separate",
    ]
    found = placed(*given, kind="cpu")
    (sampler,) = found.samplers
    size = len(found.facts.cores) // 2
    assert sampler.cores == found.facts.cores[size : 2 * size]
    assert placed(*given[:1], "scheduler.processes=separate", kind="cpu").samplers[0].cores == ()


@pytest.mark.parametrize(
    ("more", "store", "publish_kind"),
    [
        (["allocation_mode=embedded:d1|archon:d1"], "memory", "none"),
        (["allocation_mode=embedded:d2|archon:d2"], "files", "shm"),
        (["allocation_mode=embedded:d1|archon:d1", "scheduler.processes=separate"], "files", "ipc"),
        (["allocation_mode=vllm:d1|archon:d1"], "memory", "none"),
        (["allocation_mode=vllm:d1|archon:d2"], "files", "shm"),
        (["allocation_mode=embedded:d1|archon:d1", "scheduler.type=ray"], "ray", "file"),
        (["allocation_mode=embedded:d2|archon:d2", "only=rollout"], "files", "none"),
    ],
)
def test_how_groups_and_weights_travel(more, store, publish_kind):
    found = placed("cluster.n_gpus_per_node=2", *more)
    assert (found.store, found.publish_kind) == (store, publish_kind)


@pytest.mark.parametrize(
    ("words", "is_refused"),
    [
        (["cluster.n_gpus_per_node=8", "allocation_mode=embedded:d4|archon:d4"], True),
        (["cluster.n_gpus_per_node=8", "allocation_mode=embedded:d4|archon:d5"], False),
        (["cluster.n_gpus_per_node=2", "allocation_mode=archon:d2", "cluster.n_nodes=2"], True),
        (["allocation_mode=embedded:d1|archon:d1"], False),
        (["cluster.n_gpus_per_node=8", "allocation_mode=vllm:d4+archon:d4", "only=train"], False),
        (["cluster.n_gpus_per_node=8", "allocation_mode=vllm:d4+archon:d4", "only=rollout"], False),
        (["cluster.n_gpus_per_node=8", "allocation_mode=vllm:d2+archon:d2", "only=rollout"], True),
    ],
)
def test_a_run_and_a_plan_refuse_a_layout_that_leaves_half_of_the_devices_idle(words, is_refused):
    def said(command, *more):
        config = resolve(load_config(None, [*words, *more]))[0]
        return [one for one in check_layout(config, command) if "allow_idle=true" in one.remedy]

    for command in ("train", "sft", "pretrain", "plan"):
        assert bool(said(command)) == is_refused, command
        assert not said(command, "cluster.allow_idle=true")
