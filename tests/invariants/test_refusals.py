"""What a run refuses before anything starts, and how it ends when it must."""

import os
import re
import signal
import time

import pytest
import torch

from pentad.core.errors import RunError, UserError
from pentad.engine.section import EngineSettings
from pentad.infer.sampler import EmbeddedSampler
from pentad.telemetry.steps import read_lines
from pentad.trainer.rank import learners


def test_a_folder_of_another_config_is_left_alone(lab):
    lab.train(trial="same")
    with pytest.raises(UserError, match=r"lr = 0\.002: was 0\.001 so far"):
        lab.train("actor.optimizer.lr=2e-3", trial="same")
    with pytest.raises(UserError, match="another config.*lr was"):
        lab.train("actor.optimizer.lr=2e-3", "recover.mode=off", trial="same")


def test_a_finished_run_is_not_overwritten_unless_asked(lab):
    first = lab.train("recover.mode=off", trial="same")
    with pytest.raises(UserError, match="already holds a run of 3 steps"):
        lab.train("recover.mode=off", trial="same")
    again = lab.train(trial="same", fresh=True)
    assert lab.train(trial="same").num_steps == 3, "says so and is content"
    assert len(read_lines(again.records / "steps.jsonl")) == 3
    assert len(read_lines(first.records / "earlier" / "001" / "steps.jsonl")) == 3


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_run_folder_is_one_sentence(lab):
    lab.fileroot.chmod(0o500)
    with pytest.raises(UserError, match="cannot be written"):
        lab.train()


def test_a_file_in_the_way_of_the_run_folder_is_one_sentence(lab):
    (lab.fileroot / "logs").write_text("in the way")
    with pytest.raises(UserError, match="cannot be written"):
        lab.train()


@pytest.mark.parametrize(
    ("allocation", "said"),
    [
        ("embedded:t2|archon:d2", "is not split over GPUs"),
        ("embedded[rollout]:d1|archon[actor]:d2|archon[critic]:d1", "must use the same ranks"),
        ("archon[actor]:d1+archon[critic]:d1+embedded[rollout]:d1", "must use the same ranks"),
        ("embedded:d1|archon:t8", "must divide num_heads = 4"),
    ],
)
def test_layouts_that_cannot_run_are_refused_before_a_process_starts(lab, allocation, said):
    with pytest.raises(UserError) as caught:
        lab.train(f"allocation_mode={allocation}")
    assert said in str(caught.value)
    assert not (lab.fileroot / "logs").exists()


def test_everything_wrong_with_the_inputs_comes_at_once(lab, task):
    broken = lab.fileroot / "broken.jsonl"
    broken.write_text('{"prompt": "12>"}\n{"prompt": 7}\n')
    with pytest.raises(UserError) as caught:
        lab.train(
            f"train_dataset.path={broken}",
            "allocation_mode=vllm:d1|archon:d1",
            "rollout.server.python=/no/such/python",
            "rollout.workflow=no.such.module:Flow",
        )
    text = str(caught.value)
    assert "broken.jsonl:2" in text and "/no/such/python" in text and "no.such.module" in text


def test_a_sampler_that_keeps_its_old_weights_stops_the_run(lab, monkeypatch):
    install = EmbeddedSampler.install

    async def lazy(self, version, weights):
        weights = [(name, torch.zeros_like(t) if "o_proj" in name else t) for name, t in weights]
        return await install(self, version, weights)

    monkeypatch.setattr(EmbeddedSampler, "install", lazy)
    with pytest.raises(RunError, match="holds version 0, digest"):
        lab.train()


def test_a_sampler_that_runs_another_policy_stops_the_run(lab, monkeypatch):
    """The weights arrive whole, but the sampler reports the log-probs of another temperature."""
    monkeypatch.setattr(
        "pentad.trainer.rank.learners.EngineSettings",
        lambda **given: EngineSettings(**given | {"temperature": 2.0}),
    )
    with pytest.raises(RunError, match="differ between sampler and trainer"):
        lab.train()


def test_a_reward_that_fails_is_found_on_the_first_row(lab, tmp_path):
    (tmp_path / "bad_reward.py").write_text("def score(completion):\n    raise ValueError('no')\n")
    file = tmp_path / "bad_reward.py"
    with pytest.raises(UserError) as caught:
        lab.train(f"reward.fn={file}:score")
    assert str(caught.value) == (
        f"reward.fn = {file}:score: it fails on row 0 ({lab.task}/train.jsonl:1) with the row's "
        f"own answer: ValueError: no ({file}, line 2); fix it, and test it with pentad reward."
    )
    assert not (lab.fileroot / "logs").exists(), "nothing was started"


def test_a_first_batch_that_fails_alike_ends_the_run(lab, tmp_path):
    """The trial passes, since it samples nothing; every real answer fails."""
    file = tmp_path / "picky.py"
    file.write_text(
        "def score(completion, answer):\n"
        "    if completion not in ('', answer):\n"
        "        raise ValueError(f'odd length {len(completion)}')\n"
        "    return 1.0\n"
    )
    with pytest.raises(RunError) as caught:
        lab.train(f"reward.fn={file}:score", "rollout.max_retries=0")
    said = str(caught.value)
    assert said.startswith(f"the first 4 groups failed alike, the last ({lab.task}/train.jsonl:")
    assert re.search(rf"ValueError: odd length \d \({re.escape(str(file))}, line 3\)", said), said


@pytest.mark.parametrize("command", ["train", "sft"])
def test_a_signal_before_the_first_step_is_answered_with_a_sentence(lab, monkeypatch, command):
    build = learners.build_engine

    def interrupted(*args, **kwargs):
        signal.raise_signal(signal.SIGTERM)
        return build(*args, **kwargs)

    monkeypatch.setattr(learners, "build_engine", interrupted)
    with pytest.raises(RunError, match="stopped by SIGTERM before the first step; nothing was"):
        lab.train(trial="early") if command == "train" else lab.sft()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    (log,) = lab.fileroot.rglob("log.txt")
    assert "the run ended: stopped by SIGTERM" in log.read_text()


def test_a_signal_during_the_baseline_stops_an_rl_run_with_a_sentence(lab, task, monkeypatch):
    """On the event loop, and what was opened is closed."""
    generate = EmbeddedSampler.generate

    async def interrupted(self, request, on_token=None):
        signal.raise_signal(signal.SIGTERM)
        return await generate(self, request, on_token)

    closed = []
    close = EmbeddedSampler.close

    async def noted(self):
        closed.append(self)
        await close(self)

    monkeypatch.setattr(EmbeddedSampler, "generate", interrupted)
    monkeypatch.setattr(EmbeddedSampler, "close", noted)
    with pytest.raises(RunError, match="stopped by SIGTERM before the first step; nothing was"):
        lab.train(f"valid_dataset.path={task / 'valid.jsonl'}")
    assert len(closed) == 1


def test_a_workflow_that_holds_the_event_loop_is_named_and_ends_the_run(lab, tmp_path):
    flow = tmp_path / "flow.py"
    flow.write_text(
        "import time\nclass Blocking:\n    async def run(self, prompt, sampler, context):\n"
        "        time.sleep(600)\n"
    )
    started = time.monotonic()
    with pytest.raises(RunError, match=r"Blocking.run \(.*flow.py:4\) blocks the event loop"):
        lab.train(
            f"rollout.workflow={flow}:Blocking", "stall_warning_s=0.2", "stall_abort_s=5", trial="x"
        )
    assert time.monotonic() - started < 240
    (log,) = lab.fileroot.rglob("log.txt")
    assert "flow.py:4) blocks the event loop; a workflow must await" in log.read_text()
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
