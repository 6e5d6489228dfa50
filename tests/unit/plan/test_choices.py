"""What a recipe leaves open is chosen so that all devices are used and the run fits them."""

import pytest

from pentad.core.machine import GIB
from pentad.planner.figures import Device
from pentad.planner.plan import build_plan
from pentad.planner.prepare import prepare
from pentad.planner.remedies import propose, propose_host

MODEL = "actor.path=Qwen/Qwen3-8B"
EIGHT = "cluster.n_gpus_per_node=8"


@pytest.mark.parametrize(
    ("words", "command", "allocation"),
    [
        ([], "plan", "embedded:d8|archon:d8"),
        (["mode=colocate"], "plan", "embedded:d8|archon:d8"),
        (["mode=hybrid"], "plan", "embedded:d4+archon:d4"),
        (
            ["mode=async", "algorithm.kl_coef=0.1"],
            "plan",
            "embedded[rollout]:d4+archon[actor]:d3+archon[ref]:d1",
        ),
        (["cluster.n_nodes=2"], "plan", "embedded:d16|archon:d16"),
        (["cluster.n_gpus_per_node=1"], "plan", "embedded:d1|archon:d1"),
        (["resource={actor: [1, 2], rollout: [1, 4]}"], "plan", "embedded:d4+archon:d2"),
        (["allocation_mode=embedded:d1|archon:d6"], "plan", "embedded:d1|archon:d6"),
    ],
)
def test_all_devices_are_used_unless_a_key_says_otherwise(words, command, allocation):
    config, notes = prepare(None, [MODEL, EIGHT, *words], command, 80)
    assert config.allocation_mode == allocation
    is_chosen = not any("allocation_mode" in word for word in words)
    assert any(note.startswith(f"allocation_mode = {allocation}: ") for note in notes) == is_chosen


@pytest.mark.parametrize(
    ("words", "task"),
    [
        (["train_dataset.path=train.jsonl"], "sft"),
        (["train_dataset.path=corpus.txt"], "pretrain"),
        (["train_dataset.text_key=text"], "pretrain"),
        (["preference.loss=ipo"], "dpo"),
        (["preference.loss=reward"], "reward-model"),
        (["train_dataset.path=train.jsonl", "reward.fn=math"], "train"),
        (["train_dataset.path=train.jsonl", "rollout.workflow=multi_turn"], "train"),
        (["train_dataset.path=train.jsonl", "mode=hybrid"], "train"),
        ([], "train"),
    ],
)
def test_a_recipe_on_examples_is_planned_without_a_sampler(words, task):
    """Also on one device, where a run of the command has no sampler either."""
    from pentad.config.load import read_config
    from pentad.config.resolve import resolve

    config = read_config(None, [MODEL, *words]).config
    config, _ = resolve(config, samples=not config.has_examples)
    assert (config.task, config.has_sampler) == (task, task == "train")


@pytest.mark.parametrize("command", ["sft", "pretrain"])
def test_a_command_that_only_trains_gets_all_devices_for_that(command, tmp_path):
    from pentad.config.load import read_config
    from pentad.config.resolve import resolve

    config, _ = resolve(read_config(None, [MODEL, EIGHT]).config, samples=False)
    assert config.allocation_mode == "archon:d8"
    from pentad.planner import prepare as module

    seen = {}
    real = module.resolve

    def spy(config, *, samples):
        seen["samples"] = samples
        return real(config, samples=samples)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(module.UserError):
        patch.setattr(module, "resolve", spy)
        prepare(None, [MODEL, EIGHT], command)
    assert seen == {"samples": False}


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["mode=hybrid"],
        ["allocation_mode=archon:d2", "train_dataset.batch_size=64", "cluster.n_gpus_per_node=2"],
        ["gconfig.max_new_tokens=8192"],
        ["algorithm.name=ppo", "critic.path=Qwen/Qwen3-0.6B"],
    ],
)
def test_microbatches_are_as_many_as_the_memory_asks_for(words):
    config, notes = prepare(None, [MODEL, EIGHT, *words], "plan", 80)
    device = Device("cuda", 80 * GIB, "", False)
    count = config.actor.mb_spec.n_mbs
    assert count > 1 and build_plan(config, device).fits
    assert any(
        note.startswith(f"actor.mb_spec.n_mbs = {count}: in one microbatch") for note in notes
    )
    if config.algorithm.name == "ppo":
        assert config.critic.mb_spec.n_mbs == count
    once, notes = prepare(None, [MODEL, EIGHT, *words, "actor.mb_spec.n_mbs=1"], "plan", 80)
    assert once.actor.mb_spec.n_mbs == 1, "what is given is kept"
    assert not build_plan(once, device).fits


def test_one_microbatch_is_enough_where_it_fits_and_where_no_memory_is_known():
    small, _ = prepare(None, ["actor.path=Qwen/Qwen3-0.6B", EIGHT], "plan", 140)
    assert small.actor.mb_spec.n_mbs == 1
    on_cpu, _ = prepare(None, ["actor.path=Qwen/Qwen3-0.6B"], "plan")
    assert on_cpu.actor.mb_spec.n_mbs == 1


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        (24, [MODEL, EIGHT]),
        (80, [MODEL, EIGHT, "actor.mb_spec.n_mbs=1"]),
        (80, [MODEL, "cluster.n_gpus_per_node=1"]),
        (40, [MODEL, EIGHT, "mode=hybrid", "actor.mb_spec.n_mbs=1"]),
        (72, ["actor.path=Qwen/Qwen3-30B-A3B", EIGHT]),
        (
            24,
            [
                "actor.path=Qwen/Qwen3-4B",
                EIGHT,
                "cluster.allow_idle=true",
                "allocation_mode=archon:d4",
                "actor.mb_spec.n_mbs=1",
            ],
        ),
    ],
)
def test_remedies_together_fit_and_each_is_needed(memory, words):
    """What is offered was planned as it will be typed, and no step undoes or repeats another."""
    device = Device("cuda", memory * GIB, "", False)
    config, _ = prepare(None, words, "plan", memory)
    remedies = propose(build_plan(config, device))
    assert remedies and remedies[-1].fits
    typed = [text for remedy in remedies for text in remedy.overrides]
    keys = [text.split("=")[0] for text in typed]
    assert len(keys) == len(set(keys)), "a key is offered once"

    def fits(overrides):
        given = {text.split("=")[0] for text in overrides}
        kept = [word for word in words if word.split("=")[0] not in given]
        return build_plan(prepare(None, [*kept, *overrides], "plan", memory)[0], device).fits

    assert fits(typed)
    for remedy in remedies[:-1]:
        others = [text for text in typed if text not in remedy.overrides]
        pinned = [f"actor.mb_spec.n_mbs={config.actor.mb_spec.n_mbs}"]
        pinned = [] if any("n_mbs" in text for text in others) else pinned
        assert not fits([*others, *pinned]), f"{remedy.overrides} is not needed"


@pytest.mark.parametrize(
    ("kind", "words", "offered"),
    [
        ("cpu", ["actor.path=Qwen/Qwen3-8B"], "actor.archon.ac_mode=full"),
        (
            "cuda",
            ["actor.path=Qwen/Qwen3-32B", EIGHT, "offload_rollout=true"],
            "offload_train=true",
        ),
    ],
)
def test_remedies_that_are_not_enough_do_not_cancel_each_other(kind, words, offered):
    """Which layers are recomputed has no effect where all are, and what is set is not offered."""
    given = [*words, "gconfig.max_new_tokens=1024"]
    device = Device(kind, 24 * GIB, "", False)
    remedies = propose(build_plan(prepare(None, given, "plan")[0], device))
    typed = [text for remedy in remedies for text in remedy.overrides]
    assert not remedies[-1].fits and offered in typed
    assert not set(typed) & set(words)
    assert not any(text.startswith("actor.archon.ac_selective") for text in typed)


def test_host_memory_is_offered_where_one_device_is_not_enough():
    """As it will be typed, with the memory of the machine; not where the machine has less."""
    words, memory = ["actor.path=Qwen/Qwen3-8B"], 24
    device = Device("cuda", memory * GIB, "", False)
    plan = build_plan(prepare(None, words, "plan", memory)[0], device)
    found = propose_host(plan)
    assert found[0].overrides == ("actor.archon.offload_params=true",)
    assert found[-1].fits and found[-1].num_devices == 1
    typed = [text for remedy in found for text in remedy.overrides]
    again = build_plan(prepare(None, [*words, *typed], "plan", memory)[0], device)
    assert again.fits and max(again.host_bytes.values()) == found[-1].host_bytes
    adapted = prepare(None, [*words, "actor.lora.rank=8"], "plan", memory)[0]
    assert propose_host(build_plan(adapted, device)) == [], "lora excludes it"
