"""Which changes of a config a run may go on with."""

import pytest

from pentad.config.describe import fields
from pentad.config.load import read_config
from pentad.config.resolve import resolve
from pentad.config.rules.check import check
from pentad.config.rules.checkpoint import HARMLESS, LENGTHS, OF_A_MODEL, judge_changes


def values(*overrides):
    config, _ = resolve(
        read_config(None, ["actor.path=m", "train_dataset.path=d", *overrides]).config
    )
    return config.model_dump(mode="json")


def judged(*overrides, begun=(), allow=()):
    changes = judge_changes(values(*begun), values(*begun, *overrides), tuple(allow))
    return changes.accepted, [str(problem) for problem in changes.refused]


@pytest.mark.parametrize(
    "override",
    [
        "allocation_mode=embedded:d1|archon:d2",
        "actor.mb_spec.max_tokens_per_mb=512",
        "actor.archon.offload_params=true",
        "telemetry.tensorboard=true",
        "saver.freq_steps=5",
        "recover.freq_secs=30",
        "stall_abort_s=100",
        "rollout.max_running=9",
        "rollout.max_carries=9",
        "reward.num_workers=2",
        "fileroot=elsewhere",
        "total_train_epochs=9",
    ],
)
def test_where_and_how_fast_it_runs_may_change(override):
    accepted, refused = judged(override)
    key = override.partition("=")[0]
    assert not refused and any(text.startswith(f"{key} was ") for text in accepted)


@pytest.mark.parametrize(
    "override",
    [
        "seed=2",
        "actor.optimizer.lr=1e-3",
        "actor.path=other",
        "train_dataset.path=other",
        "train_dataset.shuffle=false",
        "gconfig.n_samples=4",
        "gconfig.temperature=0.5",
        "algorithm.eps_clip=0.1",
        "max_staleness=1",
        "updates_per_batch=2",
        "reward.fn=gsm8k",
        "actor.param_dtype=bfloat16",
        "rollout.workflow=a.b:C",
        "ref_update_interval=3",
    ],
)
def test_what_changes_the_training_is_refused_with_both_values_and_the_key_that_forces_it(override):
    key = override.partition("=")[0]
    _, refused = judged(override)
    (sentence,) = [text for text in refused if text.startswith(f"{key} = ")]
    assert " so far, and the training depends on it; set it back, force it with " in sentence
    assert f"recover.allow=[{key}], or start over with --fresh." in sentence
    accepted, refused = judged(override, allow=[text.partition(" = ")[0] for text in refused])
    assert not refused and any(text.startswith(f"{key} was") for text in accepted)


def test_a_block_can_be_allowed_as_a_whole():
    assert not judged("actor.optimizer.lr=1", "actor.optimizer.eps=1", allow=["actor.optimizer"])[1]


def test_the_length_matters_where_the_learning_rate_depends_on_it():
    for begun in (
        "actor.optimizer.lr_scheduler_type=cosine",
        "actor.optimizer.warmup_steps_proportion=0.1",
    ):
        _, refused = judged("total_train_steps=50", begun=[begun])
        assert [text.partition(" = ")[0] for text in refused] == ["total_train_steps"]


def test_a_key_that_a_later_version_added_is_no_change_unless_it_is_set():
    now = values()
    before = values()
    del before["strict"], before["algorithm"]["max_reward"], before["teacher"]
    assert judge_changes(before, now).refused == []
    del before["seed"]
    now["strict"], now["seed"] = True, 7
    found = {problem.where for problem in judge_changes(before, now).refused}
    assert found == {"strict = true", "seed = 7"}
    now["new_in_future"] = 1
    assert "new_in_future = 1" in [p.where for p in judge_changes(before, now).refused]


def test_the_table_names_keys():
    known = fields()
    for key in (*HARMLESS, *LENGTHS):
        assert key in known or key == "checkpoint", key
    assert all(f"critic.{key}" in known for key in OF_A_MODEL)


def test_modes_are_words_and_the_booleans_that_yaml_makes_of_them(tmp_path):
    for word, mode in (
        ("on", "on"),
        ("off", "off"),
        ("true", "on"),
        ("auto", "auto"),
        ("disabled", "disabled"),
    ):
        path = tmp_path / "r.yaml"
        path.write_text(f"recover: {{mode: {word}}}\n")
        assert read_config(path).config.recover.mode == mode
        assert read_config(None, [f"recover.mode={word}"]).config.recover.mode == mode
    assert "on, auto, off or disabled" in str(read_config(None, ["recover.mode=maybe"]).problems[0])


def test_a_frequency_is_chosen_where_none_is_given():
    recover = values()["recover"]
    assert (recover["freq_secs"], recover["freq_epochs"], recover["freq_steps"]) == (600, 1, None)
    recover = values("recover.freq_steps=3")["recover"]
    assert (recover["freq_secs"], recover["freq_epochs"], recover["freq_steps"]) == (None, None, 3)
    assert values("recover.mode=off")["recover"]["freq_secs"] is None


def test_allowed_keys_must_be_keys():
    config, _ = resolve(
        read_config(
            None, ["actor.path=Qwen/Qwen3-8B", "recover.allow=[actor.optimizer.lrr]"]
        ).config
    )
    (problem,) = [p for p in check(config) if p.where.startswith("recover.allow")]
    assert str(problem) == (
        "recover.allow = [actor.optimizer.lrr]: actor.optimizer.lrr is not a key; did you mean "
        "actor.optimizer.lr?"
    )
