"""Whole preference runs on CPU, against transformers trained on the coupled loss."""

import json
import signal

import pytest
import torch
import torch.nn.functional as F
from run_lab import steps_of, values_of
from tower_toys import write_whole
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from pentad.core.errors import RunError, UserError
from pentad.data.toy import write_byte_model
from pentad.planner.prepare import prepare
from pentad.telemetry.recorder import Recorder
from pentad.telemetry.steps import read_lines
from pentad.trainer.sources.examples import ON_EXAMPLES

EOS = 1
VOCABULARY = {symbol: number for number, symbol in enumerate("0123456789>", 2)}
LR = 3e-3


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("preferences")
    digits = [f"{n * 7919 % 100000:05d}" for n in range(1, 33)]
    rows = [(d, "".join(sorted(d)), "".join(sorted(d, reverse=True))) for d in digits]
    pairs = [{"prompt": f"{d}>", "chosen": good, "rejected": bad} for d, good, bad in rows]
    labels = [
        {"prompt": f"{d}>", "response": good if n % 2 else bad, "label": n % 2 == 1}
        for n, (d, good, bad) in enumerate(rows)
    ]
    for name, lines in (("pairs", pairs), ("labels", labels)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    return folder


@pytest.fixture
def run(lab, data):
    def start(*overrides, trial=None, command="dpo"):
        lab.count += 1
        kept = [word for word in lab.words_for(trial or f"dpo{lab.count}") if "." in word]
        words = {
            **dict(word.split("=", 1) for word in [f"fileroot={lab.fileroot}", *kept]),
            "trial_name": trial or f"dpo{lab.count}",
            "train_dataset.path": str(data / "pairs.jsonl"),
            "train_dataset.shuffle": "false",
            "train_dataset.batch_size": "8",
            "total_train_steps": "3",
            "actor.optimizer.lr": str(LR),
            "actor.optimizer.gradient_clipping": "1000",
            "actor.optimizer.weight_decay": "0",
            **dict(word.split("=", 1) for word in overrides),
        }
        left_out = ("gconfig.", "reward.")
        given = [f"{key}={value}" for key, value in words.items() if not key.startswith(left_out)]
        config, notes = prepare(None, given, command)
        return ON_EXAMPLES[command](config, notes, device="cpu")

    return start


def log_probs(model, prompts, answers):
    """Sums over the answer and its end, one sequence at a time."""
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = [VOCABULARY[c] for c in prompt + answer] + [EOS]
        logits = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        each = logits.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        found.append(each[len(prompt) - 1 :].sum())
    return torch.stack(found)


def trained_by_transformers(folder, rows, loss, kind=AutoModelForCausalLM, steps=3, size=8):
    """Three steps of Adam on the mean of a coupled loss."""
    model, reference = (kind.from_pretrained(folder).float() for _ in range(2))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
    )
    losses = []
    for step in range(steps):
        value = loss(model, reference, rows[step * size : (step + 1) * size])
        losses.append(float(value.detach()))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    return losses, model.state_dict()


def ratio(model, reference, prompts, answers):
    with torch.no_grad():
        against = log_probs(reference, prompts, answers)
    return log_probs(model, prompts, answers) - against


def dpo_loss(model, reference, rows):
    prompts = [row["prompt"] for row in rows]
    good, bad = (
        ratio(model, reference, prompts, [row[key] for row in rows])
        for key in ("chosen", "rejected")
    )
    return -F.logsigmoid(0.1 * (good - bad)).mean()


def kto_loss(model, reference, rows):
    prompts, answers = [row["prompt"] for row in rows], [row["response"] for row in rows]
    own = ratio(model, reference, prompts, answers)
    with torch.no_grad():
        others = ratio(model, reference, prompts, [*answers[1:], answers[0]])
    sign = torch.tensor([1.0 if row["label"] else -1.0 for row in rows])
    return (1 - torch.sigmoid(0.1 * sign * (own - others.mean().clamp(min=0)))).mean()


@pytest.mark.parametrize("loss, file", [("dpo", "pairs"), ("kto", "labels")])
def test_a_run_is_transformers_on_the_coupled_loss(lab, run, data, loss, file):
    start = lab.sft("total_train_steps=2").model
    begun = [f"actor.path={start}", "actor.init_from_scratch=false"]
    summary = run(*begun, f"preference.loss={loss}", f"train_dataset.path={data / file}.jsonl")
    rows = [json.loads(line) for line in (data / f"{file}.jsonl").read_text().splitlines()]
    coupled = {"dpo": dpo_loss, "kto": kto_loss}[loss]
    losses, weights = trained_by_transformers(start, rows, coupled)
    assert [one["loss"] for one in steps_of(summary)] == pytest.approx(losses, abs=1e-5)
    found = AutoModelForCausalLM.from_pretrained(summary.model).float().state_dict()
    moved = max(float((found[name] - weights[name]).abs().max()) for name in weights)
    assert moved < 0.02 * LR  # Adam blows rounding up where a gradient is nearly 0


def test_pairs_are_learned_and_held_out_ones_are_told_apart(run, data):
    summary = run(f"valid_dataset.path={data / 'pairs.jsonl'}", "total_train_steps=12")
    first, *_, last = summary.evals
    assert first["accuracy"] < 0.5 and first["loss"] == pytest.approx(0.6931, abs=1e-3)
    assert last["accuracy"] > 0.9 and last["margin"] > 0.5
    assert steps_of(summary)[-1]["preference"]["accuracy"] > 0.9


def test_a_stopped_run_goes_on_with_its_reference(run, monkeypatch):
    """Against the model that it began with, not against the one it stopped with."""
    whole = run("recover.freq_steps=1")
    record = Recorder.step

    def stop_at_2(self, *args, **kwargs):
        line = record(self, *args, **kwargs)
        if line["step"] == 2:
            signal.raise_signal(signal.SIGTERM)
        return line

    monkeypatch.setattr(Recorder, "step", stop_at_2)
    with pytest.raises(RunError, match="after 2 of 3 steps"):
        run("recover.freq_steps=1", trial="stopped")
    monkeypatch.undo()
    assert values_of(run("recover.freq_steps=1", trial="stopped")) == values_of(whole)


def test_an_adapter_is_compared_with_the_weights_below_it(lab, run):
    start = lab.sft("total_train_steps=2").model
    begun = [f"actor.path={start}", "actor.init_from_scratch=false", "actor.lora.rank=4"]
    first, *_, last = steps_of(run(*begun, "actor.optimizer.lr=5e-3", "total_train_steps=10"))
    assert first["preference"]["margin"] == 0.0  # B is 0: the policy is the reference
    assert last["preference"]["margin"] > 0.01


def test_kto_needs_other_answers(run, data):
    words = ["preference.loss=kto", f"train_dataset.path={data / 'labels.jsonl'}"]
    with pytest.raises(UserError, match="train_dataset.batch_size = 1"):
        run(*words, "train_dataset.batch_size=1")


def test_a_given_reference_is_read_and_looked_for_at_the_start(lab, run, capsys):
    start = lab.sft("total_train_steps=2").model
    first = steps_of(run(f"ref.path={start}"))[0]["preference"]
    assert first["margin"] != 0.0 and "ref.path" not in capsys.readouterr().err
    with pytest.raises(UserError, match="ref.path = .*: its .* is .* and the actor's"):
        other = lab.fileroot / "other"
        write_byte_model(other)
        run(f"ref.path={other}")
    with pytest.raises(UserError, match="ref.path = /nowhere: there is no such folder"):
        run("ref.path=/nowhere")


def test_other_commands_say_that_they_do_not_read_the_block(lab):
    words = lab.words_for("x", "preference.loss=ipo")
    config, notes = prepare(None, words, "train")
    assert config.preference is None and config.frozen_models == ()
    assert "preference: without effect, train does not read it" in notes


def rewards(model, rows, key):
    return torch.cat(
        [
            model(torch.tensor([[VOCABULARY[c] for c in row["prompt"] + row[key]] + [EOS]])).logits[
                :, 0
            ]
            for row in rows
        ]
    )


def reward_loss(model, reference, rows):
    return -F.logsigmoid(rewards(model, rows, "chosen") - rewards(model, rows, "rejected")).mean()


def test_a_reward_model_is_transformers_classifier_on_the_coupled_loss(lab, run, data):
    begun = [f"actor.path={lab.sft('total_train_steps=2').model}", "actor.init_from_scratch=false"]
    headed = run(*begun, "total_train_steps=1", "actor.optimizer.lr=0", command="reward-model")
    summary = run(f"actor.path={headed.model}", begun[1], command="reward-model")
    rows = [json.loads(line) for line in (data / "pairs.jsonl").read_text().splitlines()]
    kind = AutoModelForSequenceClassification
    losses, weights = trained_by_transformers(headed.model, rows, reward_loss, kind)
    assert [one["loss"] for one in steps_of(summary)] == pytest.approx(losses, abs=1e-5)
    found = kind.from_pretrained(summary.model).float().state_dict()
    assert found["score.weight"].abs().max() > 0
    moved = max(float((found[name] - weights[name]).abs().max()) for name in weights)
    assert moved < 0.1 * LR  # Adam blows rounding up where a gradient is nearly 0


def test_a_reward_model_learns_pairs_and_says_what_it_does_not_take(lab, run, data):
    words = [f"valid_dataset.path={data / 'pairs.jsonl'}", "total_train_steps=10"]
    summary = run(*words, command="reward-model")
    assert summary.evals[-1]["accuracy"] > 0.9 > summary.evals[0]["accuracy"]
    given = lab.words_for("x", "preference.loss=ipo", "ref.path=/nowhere")
    config, notes = prepare(None, given, "reward-model")
    assert config.preference.loss == "reward" and config.frozen_models == ()
    said = "preference.loss = reward in place of ipo: reward-model trains a reward model"
    assert said in notes
    with pytest.raises(UserError, match="preference.loss = reward: .* use pentad reward-model"):
        run("preference.loss=reward")
    with pytest.raises(UserError, match="actor.lora: adapters of reward models are not supported"):
        run("actor.lora.rank=4", command="reward-model")


def test_a_reward_model_of_a_tower_is_a_language_model(run, tmp_path):
    write_whole(tmp_path / "whole", "llava")
    begun = (f"actor.path={tmp_path / 'whole'}", "actor.init_from_scratch=false")
    model = run(*begun, "total_train_steps=1", command="reward-model").model
    found = AutoModelForSequenceClassification.from_pretrained(model)
    assert type(found).__name__ == "LlamaForSequenceClassification"
    assert found.score.weight.abs().max() > 0


def test_a_policy_learns_what_a_reward_model_prefers(lab, run):
    model = run("total_train_steps=8", command="reward-model").model
    words = ("reward.fn=reward_model", f"reward.model.path={model}", "total_train_steps=3")
    first = lab.train(*words, "reward.model.scale=2.0")
    assert values_of(lab.train(*words, "reward.model.scale=2.0")) == values_of(first)
    [*samples] = read_lines(first.records / "samples.jsonl")
    classifier = AutoModelForSequenceClassification.from_pretrained(model).float()
    for one in samples[:6]:
        ids = [VOCABULARY[c] for c in one["prompt"] + one["text"] if c in VOCABULARY] + [EOS]
        with torch.no_grad():
            expected = 2 * float(classifier(torch.tensor([ids])).logits[0, 0])
        assert one["reward"] == pytest.approx(expected, abs=1e-4)
    with pytest.raises(UserError, match="reward.model.path: is not set, and reward.fn = reward_mo"):
        lab.train("reward.fn=reward_model")
    with pytest.raises(UserError, match="reward.model.path = /nowhere: there is no such folder"):
        lab.train("reward.fn=reward_model", "reward.model.path=/nowhere")
