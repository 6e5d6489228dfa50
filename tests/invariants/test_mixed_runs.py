"""Several environments in one run: shares, records, evaluation, and a run that is killed."""

import json
from collections import Counter

import pytest
from kill_lab import KillLab
from run_lab import steps_of

from pentad.cli.plan import make_plan
from pentad.config.load import load_config
from pentad.core.errors import UserError
from pentad.planner.prepare import prepare
from pentad.telemetry.steps import read_lines

SHORT = '''
from pentad.rollout.workflows import SingleTurn


class Short(SingleTurn):
    """Scores its answers itself: the shorter, the better."""

    async def run(self, prompt, sampler, context):
        samples = await super().run(prompt, sampler, context)
        for sample in samples:
            sample.reward = -float(sample.num_sampled)
        return samples
'''


@pytest.fixture(scope="module")
def mixed(task, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixed")
    (folder / "short.py").write_text(SHORT)
    rows = [{"ask": f"{n}>", "answer": "0"} for n in (21, 43, 65)]
    (folder / "short.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    short = {
        "workflow": f"{folder / 'short.py'}:Short",
        "name": "short",
        "data": {"path": str(folder / "short.jsonl"), "prompt_key": "ask"},
        "valid": str(folder / "short.jsonl"),
    }
    digits = {
        "workflow": "single_turn",
        "name": "digits",
        "data": str(task / "train.jsonl"),
        "valid": {"path": str(task / "valid.jsonl"), "limit": 4},
        "weight": 3,
        "reward": {"fn": "sort_digits"},
    }
    return [digits, short]


def words(workflows, *more):
    return ["train_dataset.path=null", f"rollout.workflows={json.dumps(workflows)}", *more]


def test_a_run_draws_by_weight_and_names_the_environment(lab, mixed):
    summary = lab.train(*words(mixed, "reward.fn=null", "telemetry.samples_per_step=16"))
    steps = steps_of(summary)
    for step in steps:
        found = step["rl"]["environments"]
        assert {name: one["num_groups"] for name, one in found.items()} == {"digits": 3, "short": 1}
        assert found["short"]["num_samples"] == 4
        assert found["short"]["reward_mean"] == -found["short"]["length_mean"]
        total = sum(one["reward_mean"] * one["num_samples"] for one in found.values())
        assert total / 16 == pytest.approx(step["rl"]["reward_mean"], rel=1e-6)
    lines = read_lines(summary.records / "samples.jsonl")
    assert Counter(line["environment"] for line in lines) == {"digits": 36, "short": 12}
    evals = read_lines(summary.records / "evals.jsonl")
    assert [line["version"] for line in evals] == [0, 3]
    for line in evals:
        own = line["environments"]
        assert (own["digits"]["num_prompts"], own["short"]["num_prompts"]) == (4, 3)
        assert line["num_prompts"] == 7 and own["short"]["accuracy"] is None
        assert own["short"]["reward_mean"] == -own["short"]["length_mean"]


def test_a_mixed_run_that_is_killed_ends_bitwise_as_if_nothing_had_happened(task, mixed, tmp_path):
    given = [f"rollout.workflows={json.dumps(mixed)}", "train_dataset.batch_size=2"]
    given += ["gconfig.n_samples=2", "gconfig.max_new_tokens=4", "total_train_steps=4"]
    lab = KillLab(task, tmp_path, "train", *given, "evaluator.freq_steps=2")
    lab.run("whole", "saver.mode=sync")
    process = lab.start("killed", "saver.mode=sync", hold=2)
    lab.wait_for_steps("killed", 2, process)
    lab.kill(process)
    lab.run("killed", "saver.mode=sync")
    for found in (lambda trial: lab.weights(trial, 4), lab.steps, lab.evals, lab.gids):
        assert found("killed") == found("whole")


def test_another_weight_is_not_the_run_that_was_begun(lab, mixed):
    lab.train(*words(mixed, "reward.fn=null", "total_train_steps=1"), trial="begun")
    heavier = [{**mixed[0], "weight": 4}, mixed[1]]
    with pytest.raises(UserError, match=r"rollout\.workflows\.0\.weight = 4: was 3 so far"):
        lab.train(*words(heavier, "reward.fn=null", "total_train_steps=2"), trial="begun")


def test_a_plan_shows_the_environments(lab, mixed):
    given = lab.words_for("plan", *words(mixed, "reward.fn=null", "total_train_steps=null"))
    config, notes = prepare(None, given, "plan")
    plan = make_plan(config, notes, None)
    shown = [note for note in plan.notes if note.startswith("environment ")]
    assert "digits: 3 of 4 prompts, single_turn, 64 rows of" in shown[0]
    assert "short: 1 of 4 prompts" in shown[1] and ", held-out " in shown[1]
    assert plan.batch.num_rows == 85  # 64 of digits, 21 of short


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"name": "digits"}, "workflows.0.name = digits: another environment has this name"),
        ({"weight": 0}, "rollout.workflows.1.weight = 0: must be a number above 0"),
        ({"weight": 1e-7}, "the weights are shares of 30,000,001"),
        ({"wight": 2}, "rollout.workflows.1.wight = 2: there is no such key"),
        ({"data": {"path": "/no"}}, "rollout.workflows.1.data.path = /no: there is no such file"),
        ({"data": {}}, "rollout.workflows.1.data.path: is not set"),
        ({"workflow": "no_such"}, "rollout.workflows.1.workflow = no_such"),
        ({"workflow": "agent"}, "rollout.workflows.1.agent: is not set"),
        ({"reward": {"fn": "no_such"}}, "rollout.workflows.1.reward.fn = no_such"),
        ({"data": {"path": "x", "batch_size": 4}}, "set train_dataset.batch_size"),
    ],
)
def test_what_is_wrong_with_one_of_them_is_named(lab, mixed, change, sentence):
    with pytest.raises(UserError) as refused:
        lab.train(*words([mixed[0], {**mixed[1], **change}], "reward.fn=null"))
    assert sentence in str(refused.value)


def test_keys_that_say_the_same_are_refused_together(lab, mixed):
    task = lab.task
    given = [f"rollout.workflows={json.dumps(mixed)}", f"valid_dataset.path={task}/valid.jsonl"]
    with pytest.raises(UserError) as refused:
        lab.train(*given, "rollout.workflow=agent", "rollout.agent=x.py:y")
    for key in ("train_dataset.path", "valid_dataset", "rollout.workflow", "rollout.agent"):
        assert f"{key}: rollout.workflows names the environments and their data" in str(
            refused.value
        )


@pytest.mark.parametrize("command", ["eval", "reward"])
def test_commands_that_look_at_one_environment_say_so(lab, mixed, command):
    given = lab.words_for("one", f"rollout.workflows={json.dumps(mixed)}")
    with pytest.raises(UserError, match=f"rollout.workflows: {command} supports one environment"):
        prepare(None, given, command)


def test_a_reasoning_gym_task_brings_rows_and_reward():
    both = [
        {"workflow": "reasoning_gym:chain_sum?size=4"},
        {"workflow": "single_turn", "data": "x"},
    ]
    config = load_config(None, [f"rollout.workflows={json.dumps(both)}", "reward.fn=numeric"])
    from pentad.config.resolve import resolve

    made, own = resolve(config)[0].rollout.workflows
    assert (made.name, made.workflow) == (both[0]["workflow"], "single_turn")
    assert made.data.path == both[0]["workflow"] and "reasoning_gym" in made.reward.fn
    assert own.reward is None
