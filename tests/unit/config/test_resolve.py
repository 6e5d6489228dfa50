import pytest

from pentad.config.aliases import DEFAULT_KL_COEF
from pentad.config.load import dump_config, load_config
from pentad.config.resolve import PATHS, resolve
from pentad.config.topology import Facts, topology
from pentad.planner.prepare import prepare

MODEL = "actor.path=Qwen/Qwen3-8B"


def resolved(*overrides):
    return resolve(load_config(None, overrides))


def test_nothing_given_means_one_device_for_both():
    config, notes = resolved()
    assert (config.allocation_mode, config.mode) == ("embedded:d1|archon:d1", "colocate")
    assert config.offload_train is False and config.offload_rollout is None
    assert len(notes) == 2


@pytest.mark.parametrize("mode", ["hybrid", "async"])
def test_a_mode_of_two_device_sets_gets_two(mode):
    config, notes = resolved(f"mode={mode}")
    assert config.allocation_mode == "embedded:d1+archon:d1"
    assert (config.offload_train, config.offload_rollout) == (False, False)
    assert f"allocation_mode = embedded:d1+archon:d1: mode = {mode}" in notes


@pytest.mark.parametrize(
    ("allocation", "mode"),
    [
        ("sglang:d4+archon:d4", "hybrid"),
        ("sglang:d4|archon:d4", "colocate"),
        ("embedded[rollout]:d2|archon[actor]:d2+archon[ref]:d2", "colocate"),
        ("archon[ref]:d2|embedded[rollout]:d2+archon[actor]:d2", "hybrid"),
        ("archon[ref]:d2+embedded[rollout]:d2+archon[actor]:d2", "async"),
    ],
)
def test_the_mode_follows_from_where_rollout_and_actor_stand(allocation, mode):
    assert resolved(f"allocation_mode={allocation}")[0].mode == mode


@pytest.mark.parametrize(
    ("mode", "allocation"),
    [
        ("hybrid", "embedded:d8+archon:d4"),
        ("", "embedded:d8+archon:d4"),
        ("colocate", "embedded:d8|archon:d4"),
    ],
)
def test_resource_becomes_an_allocation(mode, allocation):
    config, _ = resolved(f"mode={mode}", "resource={actor: [1, 4], rollout: [2, 4]}")
    assert config.allocation_mode == allocation


def test_training_that_makes_room_has_a_sampler_that_does():
    assert resolved("offload_train=true")[0].offload_rollout is True


def test_what_is_given_is_kept():
    overrides = ["offload_train=true", "mode=hybrid", "user=me", "algorithm.correction=mis"]
    config, _ = resolved(*overrides)
    assert (config.offload_train, config.offload_rollout, config.user) == (True, False, "me")
    assert config.algorithm.correction == "mis"


@pytest.mark.parametrize(
    ("overrides", "coef", "place"),
    [
        (["use_kl_loss=true"], DEFAULT_KL_COEF, "loss"),
        (["use_kl_loss=true", "algorithm.kl_coef=0.5"], 0.5, "loss"),
        (["use_kl_loss=false"], 0.0, None),
        (["use_kl_loss=false", "algorithm.name=ppo"], None, None),
        (["use_kl_loss=false", "algorithm.kl_in=reward"], None, "reward"),
        ([], None, None),
    ],
)
def test_the_kl_switch_becomes_keys_of_the_algorithm(overrides, coef, place):
    given = resolved(*overrides)[0].algorithm.given
    assert (given.get("kl_coef"), given.get("kl_in")) == (coef, place)


@pytest.mark.parametrize(("value", "word"), [("true", "tis"), ("false", "none"), ("null", None)])
def test_the_tis_switch_becomes_a_correction(value, word):
    assert resolved(f"use_tis={value}")[0].algorithm.given.get("correction") == word


def test_zero_bubble_schedules_get_what_they_can_live_with():
    config, notes = resolved("allocation_mode=archon:d1p2", "actor.archon.pp_schedule=ZBV")
    archon = config.actor.archon
    assert (archon.enable_compile, archon.ac_mode, archon.ac_selective) == (False, "selective", 2)
    assert (archon.stages_per_rank, config.actor.mb_spec.n_mbs) == (2, 4)
    assert any(note.startswith("actor.archon.ac_selective = 2") for note in notes)


def test_a_schedule_without_a_pipeline_changes_nothing():
    archon = resolved("actor.archon.pp_schedule=ZBV")[0].actor.archon
    assert (archon.enable_compile, archon.ac_mode, archon.ac_selective) == ("auto", "auto", None)
    assert archon.stages_per_rank is None


@pytest.mark.parametrize(
    ("schedule", "given", "num"),
    [("1F1B", 1, 4), ("1F1B", 16, 16), ("I1F1B", 1, 8), ("I1F1B", 12, 12)],
)
def test_microbatches_are_raised_to_the_number_of_stages(schedule, given, num):
    config, notes = resolved(
        "allocation_mode=archon:d1p4",
        f"actor.archon.pp_schedule={schedule}",
        f"actor.mb_spec.n_mbs={given}",
    )
    assert config.actor.mb_spec.n_mbs == num
    assert any("raised" in note for note in notes) == (given < num)


def test_memory_budget_turns_compile_on():
    archon = resolved("actor.archon.ac_mode=memory_budget")[0].actor.archon
    assert archon.enable_compile is True


def test_checkpointing_switched_off_is_off():
    assert resolved("actor.gradient_checkpointing=false")[0].actor.archon.ac_mode == "none"


def test_a_critic_starts_from_the_actor():
    config, notes = resolved("algorithm.name=ppo", "actor.path=x")
    assert config.critic.path == "x"
    assert "critic.path = x: that of the actor" in notes
    assert resolved("actor.path=x")[0].critic.path is None


@pytest.mark.parametrize(
    "overrides",
    [
        [MODEL],
        [MODEL, "algorithm.name=ppo", "use_kl_loss=true", "use_tis=true"],
        [MODEL, "mode=async", "max_staleness=2"],
        [MODEL, "resource={actor: [1, 4], rollout: [1, 4]}", "mode=hybrid"],
        [MODEL, "allocation_mode=sglang:d4t2+archon:d4p2t2", "actor.archon.pp_schedule=IZB"],
        [MODEL, "use_kl_loss=false", "use_tis=false", "actor.gradient_checkpointing=false"],
    ],
)
def test_a_resolved_config_fed_back_is_the_same_and_raises_no_notes(tmp_path, overrides):
    cluster = ["cluster.n_nodes=3", "cluster.n_gpus_per_node=8", "cluster.allow_idle=true"]
    config, notes = prepare(None, [*overrides, *cluster])
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config))
    assert prepare(path) == (config, [])


@pytest.mark.parametrize("key", PATHS)
def test_the_tilde_of_a_path_is_the_home_folder(key, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir("/")
    found = resolved(f"{key}=~/m")[0].model_dump()
    for name in key.split("."):
        found = found[name]
    assert found == "/home/me/m"
    # Nobody of that name: a folder that is not there, and no crash.
    assert resolved("actor.path=~nobody-here/m")[0].actor.path == "/~nobody-here/m"


def held_out(*overrides):
    config, notes = resolved(*overrides)
    return config.valid_dataset, [note for note in notes if note.startswith("valid_dataset")]


def test_held_out_rows_are_read_like_trained_ones():
    given = ["chat_template=true", "prompt_key=question", "answer_key=solution", "limit=7"]
    train = [f"train_dataset.{entry}" for entry in [*given, "path=a.jsonl", "format=jsonl"]]
    valid, notes = held_out(*train, "valid_dataset.path=b.jsonl")
    assert (valid.chat_template, valid.prompt_key, valid.answer_key) == (
        True,
        "question",
        "solution",
    )
    assert (valid.format, valid.limit, valid.path) == ("jsonl", None, "b.jsonl")
    assert "valid_dataset.chat_template = true: as train_dataset.chat_template" in notes
    again, _ = resolve(load_config(None, [*train, "valid_dataset.path=b.jsonl"]))
    assert resolve(again)[0] == again
    assert held_out(*train, "valid_dataset.path=b.parquet")[0].format == "auto"


def test_an_explicit_difference_of_the_task_is_told():
    valid, notes = held_out("train_dataset.chat_template=true", "valid_dataset.chat_template=false")
    assert valid.chat_template is False
    [note] = notes
    assert note.startswith(
        "valid_dataset.chat_template = false: held-out prompts are rendered without"
    )
    assert held_out("valid_dataset.prompt_key=q")[1] == [], "a column's name is not the task"


def test_a_column_of_text_takes_the_place_of_messages_and_stays_in_the_template():
    valid, notes = held_out("train_dataset.messages_key=chat", "valid_dataset.prompt_key=question")
    assert (valid.messages_key, valid.prompt_key, valid.chat_template) == (None, "question", True)
    assert len(notes) == 1
    valid, _ = held_out("train_dataset.prompt_key=q", "valid_dataset.messages_key=chat")
    assert (valid.messages_key, valid.prompt_key) == ("chat", "prompt")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], 256),
        (["train_dataset.batch_size=64", "gconfig.n_samples=16"], 1024),
        (["train_dataset.batch_size=40", "gconfig.n_samples=16"], 640),
        (["train_dataset.batch_size=512", "gconfig.n_samples=16"], 1024),
        (["train_dataset.batch_size=64", "gconfig.n_samples=16", "rollout.max_running=32"], 32),
        (
            ["train_dataset.batch_size=64", "gconfig.n_samples=16", "rollout.max_batch_tokens=300"],
            300,
        ),
        (
            [
                "train_dataset.batch_size=64",
                "gconfig.n_samples=16",
                "rollout.max_concurrent_groups=20",
            ],
            320,
        ),
        (
            ["train_dataset.batch_size=33", "gconfig.n_samples=16", "rollout.oversample=1.5"],
            800,
        ),
    ],
)
def test_a_sampler_decodes_what_it_is_given_at_once(overrides, expected):
    assert (resolved(*overrides)[0]).num_running == expected


def test_one_process_where_one_is_enough():
    apart, shared = "allocation_mode=embedded:d1+archon:d1", "allocation_mode=embedded:d1|archon:d1"
    cases = {
        (shared,): {None: True, 1: True, 2: True},
        (apart,): {None: True, 1: True, 2: False},
        (apart, "cluster.share_gpus=true"): {None: False, 1: False},
        (apart, "scheduler.type=ray"): {None: False},
        (apart, "scheduler.processes=separate"): {None: False, 1: False},
        (apart, "scheduler.processes=one"): {2: True},
        ("allocation_mode=embedded:d2+archon:d1",): {None: False, 1: False},
        ("allocation_mode=embedded:d1|archon:d2",): {None: False, 2: False},
        ("allocation_mode=vllm:d1|archon:d1",): {None: False},
        (shared, "cluster.n_nodes=2"): {None: False},
    }
    for words, expected in cases.items():
        config, _ = resolved(*words)
        found = {n: topology(config, Facts(kind="cuda", num_devices=n)) for n in expected}
        assert {n: placed.is_one_process for n, placed in found.items()} == expected, words


@pytest.mark.parametrize(
    ("names", "task"),
    [
        (["a.jsonl"], "sft"),
        (["a.jsonl", "README.md"], "sft"),
        (["README.md"], "pretrain"),
        (["a.npy", "README.md"], "pretrain"),
    ],
)
def test_a_page_beside_rows_does_not_make_them_a_stream(tmp_path, names, task):
    for name in names:
        (tmp_path / name).touch()
    words = [f"train_dataset.path={tmp_path}", "allocation_mode=archon:d1"]
    assert load_config(None, words).task == task
