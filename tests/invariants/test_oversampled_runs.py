"""Runs with `rollout.oversample`: groups that are cut off continue, and runs are repeatable."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from kill_lab import KillLab
from run_lab import FLOAT32, Lab, steps_of, values_of

from pentad.core.errors import Stopped, UserError
from pentad.core.types import Generation, Request, SamplingParams
from pentad.data.ledger import Ledger
from pentad.data.toy import write_model, write_task
from pentad.infer.engine import InferenceEngine
from pentad.models.decoder import causal_attend
from pentad.models.registry import load_model
from pentad.rollout.drafts import Draft
from pentad.rollout.workflows import SingleTurn
from pentad.trainer.pumps.train_pump import BatchTrainer
from pentad.trainer.saving.batches import read_batch
from pentad.trainer.sources import rollouts

STEPS = 6
OVER = (
    "rollout.oversample=1.5",
    "gconfig.n_samples=2",
    "gconfig.max_new_tokens=16",
    f"total_train_steps={STEPS}",
)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Eight prompts: an epoch is two steps."""
    folder = tmp_path_factory.mktemp("small")
    write_model(folder / "model")
    write_task(folder, seed=5, num_train=8, num_sft=8, num_valid=8)
    return folder


@pytest.fixture
def lab(small, tmp_path):
    return Lab(small, tmp_path)


KEPT = "telemetry.keep_batches=100"


@pytest.fixture(scope="module")
def over(small, tmp_path_factory):
    return Lab(small, tmp_path_factory.mktemp("over")).train(*OVER, KEPT)


def groups_of(summary, num=STEPS):
    return [read_batch(summary.records / "batches", step + 1).groups for step in range(num)]


def test_every_prompt_is_trained_once_over_several_epochs(over):
    gids = [group.gid for batch in groups_of(over) for group in batch]
    assert gids != sorted(gids), "some are trained later than their neighbours"
    assert sorted(gids) == list(range(4 * STEPS))
    last = steps_of(over)[-1]
    assert last["funnel"] == {"drawn": 24, "trained": 24, "dropped": {}, "in_flight": 0}
    for record in steps_of(over):
        came, waiting = record["oversampled"], record["funnel"]["in_flight"]
        assert came["started"] <= 6
        assert waiting == (0 if record["step"] == STEPS else 2)
        assert came["carried"] <= waiting
    assert sum(record["oversampled"]["tokens_carried"] for record in steps_of(over)) > 50
    lags = [pair for record in steps_of(over) for pair in record["rl"]["staleness"].items()]
    assert sum(num for lag, num in lags if lag != "0") > 50, "they are trained with their age"


def test_two_runs_are_equal_and_every_placement_gives_the_same(lab, over):
    assert values_of(lab.train(*OVER, KEPT)) == values_of(over)
    apart = lab.train(*OVER, KEPT, "mode=hybrid", "num_iters_per_train_update=2")
    for one, other in zip(steps_of(apart), steps_of(over), strict=True):
        assert one["oversampled"] == other["oversampled"]
        assert one["rl"]["staleness"] == other["rl"]["staleness"]


@torch.no_grad()
def test_carried_tokens_have_the_logprobs_of_the_version_that_drew_each(lab):
    """Every version is saved; the tokens of a sample are scored by the weights of their own."""
    saved = ("saver.freq_steps=1", "saver.mode=sync", "saver.keep_last=100")
    run = lab.train(*OVER, KEPT, *saved, "actor.optimizer.lr=1e-2")
    folder = run.model.parent
    saved = {int(one.name.rpartition("globalstep")[2]) + 1: one for one in folder.glob("epoch*")}
    models = {version: load_model(path, dtype=torch.float32) for version, path in saved.items()}
    num_mixed, moved = 0, 0.0
    for batch in groups_of(run):
        for sample in (sample for group in batch for sample in group.samples):
            drawn = sample.versions[sample.mask]
            if len(set(drawn.tolist())) < 2 or 0 in drawn:
                continue
            num_mixed += 1
            assert (np.diff(drawn) >= 0).all()
            by_version = {v: logprobs(models[v], sample.ids) for v in set(drawn.tolist())}
            first = by_version[min(by_version)]
            for version, found in by_version.items():
                own = sample.mask & (sample.versions == version)
                gap = np.abs(found - sample.rollout_logprobs)[own].max()
                assert gap <= FLOAT32, f"tokens of version {version}"
                moved = max(moved, float(np.abs(found - first)[own].max()))
    assert num_mixed >= 3, "samples that several versions drew"
    assert moved > 100 * FLOAT32, "other versions give other log-probs"


def logprobs(model, ids):
    ids_T = torch.from_numpy(ids)
    hidden = model(ids_T, torch.arange(len(ids_T)), causal_attend)
    every = model.logits(hidden).log_softmax(-1)
    own = every[:-1].gather(1, ids_T[1:, None]).squeeze(1)
    return np.concatenate([[0.0], own.numpy()])


@pytest.mark.parametrize("most", [1, 2])
def test_a_group_is_cut_off_at_most_so_often_and_then_waited_for(lab, most, monkeypatch):
    """The first group never ends within a step of its own."""
    slow_down(monkeypatch, slow_gid=1)
    words = ("total_train_steps=4", KEPT)
    run = lab.train(*OVER[:3], *words, f"rollout.max_carries={most}")
    batches = groups_of(run, 4)
    (at,) = [step for step, batch in enumerate(batches) if 1 in {group.gid for group in batch}]
    assert at == most, "cut off in every step before"
    lags = {int(lag) for record in steps_of(run) for lag in record["rl"]["staleness"]}
    assert max(lags) <= most
    assert max(record["oversampled"]["max_carries"] for record in steps_of(run)) == most


def slow_down(monkeypatch, slow_gid):
    """Of all groups one draws without end, the others end after three tokens."""
    plain = SingleTurn.run

    async def run(self, prompt, sampler, context):
        num = 16 if prompt.gid == slow_gid else 3
        params = replace(context.params, max_new_tokens=num, stop_ids=())
        return await plain(self, prompt, sampler, replace(context, params=params))

    monkeypatch.setattr(SingleTurn, "run", run)


def test_a_step_ends_before_its_longest_group(lab, monkeypatch):
    """Counted in passes of the sampler, not in seconds."""
    slow_down(monkeypatch, slow_gid=1)
    passes, plain = Counter(), InferenceEngine.step

    def step(self, report):
        passes[self.version] += 1
        plain(self, report)

    monkeypatch.setattr(InferenceEngine, "step", step)
    counted = {}
    for factor in (1, 1.5):
        passes.clear()
        lab.train(*OVER[1:3], "total_train_steps=2", f"rollout.oversample={factor}")
        counted[factor] = dict(passes)
    tested = counted[1][0] - 16
    assert counted[1.5][0] - tested == 3, "the first step trains four groups of three tokens"
    assert counted[1.5][1] == 16 - 3, "the last one waits for the rest of the long group"


def test_groups_without_a_signal_are_replaced_and_what_runs_goes_on(lab):
    run = lab.train(*OVER, "algorithm.name=dapo", KEPT)
    groups = [group for batch in groups_of(run) for group in batch]
    assert len({group.gid for group in groups}) == 4 * STEPS
    for group in groups:
        assert len({sample.reward for sample in group.samples}) > 1
    funnel = steps_of(run)[-1]["funnel"]
    dropped = funnel["dropped"].get("no_signal", 0)
    assert dropped > 0
    assert funnel["drawn"] == 4 * STEPS + dropped, "no group is lost"
    assert funnel["in_flight"] == 0


def test_killed_at_any_step_a_run_ends_bitwise_as_if_nothing_had_happened(small, tmp_path):
    words = [word for word in OVER if not word.startswith("total")]
    lab = KillLab(
        small,
        tmp_path,
        "train",
        *words,
        *(f"train_dataset.path={small / 'train.jsonl'}", "train_dataset.batch_size=4"),
        *("reward.fn=sort_digits", "telemetry.samples_per_step=100", "saver.mode=sync"),
        "total_train_steps=6",
    )
    lab.run("whole")
    carried = [record["oversampled"]["carried"] for record in lab.steps("whole")]
    held = [step + 1 for step, num in enumerate(carried) if num]
    for step in held[1:2]:
        trial = f"killed{step}"
        process = lab.start(trial, hold=step)
        lab.wait_for_steps(trial, step, process)
        lab.kill(process)
        lab.run(trial)
        (_, start) = json.loads((lab.records(trial) / "manifest.json").read_text())["starts"]
        assert start["from_step"] >= step - 1
        assert lab.weights(trial, 6) == lab.weights("whole", 6)
        assert lab.steps(trial) == lab.steps("whole")
        assert lab.gids(trial) == lab.gids("whole")


def test_a_run_goes_on_without_it_and_trains_what_was_carried(lab, monkeypatch):
    stopped_after(monkeypatch, lab, 2)
    words = ("rollout.oversample=1", KEPT, "recover.allow=[algorithm]")
    run = lab.train(*OVER, *words, trial="on")
    assert carried_at(run, 2) > 0
    assert steps_of(run)[-1]["funnel"]["drawn"] == 4 * STEPS
    late = [group for batch in groups_of_steps(run, range(3, STEPS + 1)) for group in batch]
    assert all(set(record["rl"]["staleness"]) == {"0"} for record in steps_of(run)[2:])
    assert len({group.gid for group in late}) == 4 * (STEPS - 2)


def carried_at(run, step):
    """Tokens that the next step was to continue."""
    return steps_of(run)[step - 1]["oversampled"]["tokens_carried"]


def groups_of_steps(summary, steps):
    return [read_batch(summary.records / "batches", step).groups for step in steps]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("mode=hybrid", "max_staleness=1"),
            "rollout.oversample = 1.5: needs steps that wait for their groups: max_staleness = 1",
        ),
        (
            ("rollout.max_concurrent_groups=5",),
            "rollout.max_concurrent_groups = 5: a step starts 6 groups at once",
        ),
        (
            ("rollout.workflow=class:env.py:Env",),
            "an unfinished class:env.py:Env cannot continue in a later step: single answers can",
        ),
        (("rollout.oversample=0.5",), "rollout.oversample"),
    ],
)
def test_what_it_is_not_for_is_rejected_before_the_start(lab, words, said):
    with pytest.raises(UserError) as raised:
        lab.train(*OVER, *words)
    assert said in str(raised.value)


def test_a_sampler_of_another_kind_is_cut_wherever_it_is(lab, monkeypatch):
    """Without the hold, as with servers: still every prompt once, with its tokens' age."""

    def without_hold(config, state, samplers):
        return rollouts.Oversampling(state, config.groups_started) if config.oversamples else None

    monkeypatch.setattr(rollouts, "oversampling_of", without_hold)
    run = lab.train(*OVER, KEPT)
    gids = [group.gid for batch in groups_of(run) for group in batch]
    assert sorted(gids) == list(range(4 * STEPS))


def stopped_after(monkeypatch, lab, num, trial="on"):
    """A run of all steps that a signal ends after `num` of them, with groups that are cut off."""
    plain = BatchTrainer.train

    async def train(self, batch, timer):
        trained = await plain(self, batch, timer)
        if batch + 1 == num:
            self.state.request_stop("SIGTERM")
        return trained

    with monkeypatch.context() as patch:
        patch.setattr(BatchTrainer, "train", train)
        with pytest.raises(Stopped, match=f"after {num} of {STEPS} steps"):
            lab.train(*OVER, KEPT, trial=trial, fresh=True)


@pytest.mark.parametrize("changed", ["gconfig.n_samples=3", "gconfig.max_new_tokens=4"])
def test_what_was_drawn_with_other_settings_is_drawn_anew(lab, changed, monkeypatch):
    """Forced at a resume: carried answers may be fewer or longer than the new ones."""
    stopped_after(monkeypatch, lab, 3)
    words = (*OVER, changed, KEPT, "recover.allow=[gconfig]")
    run = lab.train(*words, trial="on")
    assert carried_at(run, 3) > 0
    key, num = changed.removeprefix("gconfig.").split("=")
    groups = [group for batch in groups_of_steps(run, (5, 6)) for group in batch]
    assert len({group.gid for group in groups}) == 8
    if key == "n_samples":
        assert {len(group.samples) for group in groups} == {int(num)}
    else:
        assert max(s.num_sampled for group in groups for s in group.samples) <= int(num)


def test_a_checkpoint_from_before_groups_were_carried_is_continued(lab, monkeypatch):
    """Its live groups have no count of carries."""
    plain = Ledger.snapshot

    def snapshot(self):
        made = plain(self)
        return {**made, "live": [entry[:5] for entry in made["live"]]}

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "snapshot", snapshot)
        stopped_after(monkeypatch, lab, 3)
    run = lab.train(*OVER, KEPT, trial="on")
    assert steps_of(run)[-1]["funnel"] == {
        **{"drawn": 4 * STEPS, "trained": 4 * STEPS},
        **{"dropped": {}, "in_flight": 0},
    }


@pytest.mark.parametrize(
    ("ids", "finish"), [([5, 6, 7], "length"), ([5, 2], "stop"), ([5], "abort"), ([], "abort")]
)
def test_an_answer_that_was_cut_off_after_its_last_token_is_complete(ids, finish):
    """As a server may hand it over: nothing may be drawn after it."""
    params = SamplingParams(max_new_tokens=3, stop_ids=(2,))
    request = Request(id="r", prompt_ids=(1,), params=params, seeds=(4,))
    draft = Draft()
    cut = Generation(list(ids), [-0.5] * len(ids), [0] * len(ids), "abort")
    draft.keep(request, [cut], vocab_size=10)
    (kept,) = draft.answers
    assert (kept.ids, kept.finish) == (ids, finish)
    assert draft.rest_of(request).seeds == ((4,) if finish == "abort" else ())
