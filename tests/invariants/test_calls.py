"""What the scheduler and the learner say to each other is JSON, and groups may lie in files."""

import json

import pytest
from run_lab import values_of

from pentad.runtime.learner_client import DirectCalls


@pytest.fixture
def seen(monkeypatch):
    """The methods that were called, each with arguments and answers that went through JSON."""
    found = set()

    def by_text(real):
        def passing(self, method, **arguments):
            found.add(method)
            answer = real(self, method, **json.loads(json.dumps(arguments)))
            return json.loads(json.dumps(answer))

        return passing

    for name in ("call_all", "query"):
        monkeypatch.setattr(DirectCalls, name, by_text(getattr(DirectCalls, name)))
    return found


OFTEN = ("saver.freq_steps=1", "saver.mode=async", "recover.mode=auto", "recover.freq_steps=1")
OFTEN += ("total_train_steps=2",)


def test_rollouts_are_learned_alike_by_text_and_from_files(lab, request):
    ppo = ("algorithm.name=ppo", "algorithm.kl_coef=0.1", "num_iters_per_train_update=2", *OFTEN)
    plain = values_of(lab.train(*ppo))
    seen = request.getfixturevalue("seen")
    assert values_of(lab.train(*ppo, "store=files")) == plain
    learning = {"build", "open_store", "begin", "add", "finish", "measure", "snapshot", "forward"}
    learning.add("batch_metrics")
    keeping = {
        "keep_trained",
        "count_nodes",
        "load_tags",
        "prepare_state",
        "save_state",
        "saved_state",
        "export",
        "exported",
        "memory",
    }
    assert seen == learning | keeping


def test_examples_are_learned_alike_by_text(lab, task, request):
    sft = (*OFTEN, f"valid_dataset.path={task / 'sft.jsonl'}")
    plain = values_of(lab.sft(*sft))
    seen = request.getfixturevalue("seen")
    assert values_of(lab.sft(*sft)) == plain
    assert {"build", "step", "evaluate", "forward", "save_state", "export"} <= seen
