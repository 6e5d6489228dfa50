"""Code of the user's that draws from the generators of Python, NumPy and torch: runs repeat."""

import pytest
from run_lab import steps_of, values_of
from tables import table
from test_rl_runs import assert_same_weights

FLOW = """
import random
import numpy
import torch
from pentad.rollout.workflows import SingleTurn

class Drawing(SingleTurn):
    async def run(self, prompt, sampler, context):
        # Before it waits: which group is answered first may differ between two runs.
        drawn = random.random() + numpy.random.random() + float(torch.rand(()))
        samples = await super().run(prompt, sampler, context)
        for number, sample in enumerate(samples):
            sample.reward = drawn * number
        return samples
"""
REWARD = """
import random
import numpy

def drawing(completion):
    return random.random() + numpy.random.random()
"""


@pytest.fixture
def words(tmp_path):
    def given(kind):
        file = tmp_path / f"{kind}.py"
        file.write_text(FLOW if kind == "flow" else REWARD)
        key = "rollout.workflow" if kind == "flow" else "reward.fn"
        name = "Drawing" if kind == "flow" else "drawing"
        sizes = ("train_dataset.batch_size=2", "gconfig.n_samples=2")  # each sample is a process
        steps = ("recover.freq_steps=1", "total_train_steps=4")
        return (f"{key}={file}:{name}", "reward.num_workers=1", *sizes, *steps)

    return given


@pytest.mark.parametrize(
    ("kind", "processes"),
    table(
        [(kind, processes) for kind in ("flow", "reward") for processes in ("one", "separate")],
        [("flow", "one"), ("reward", "separate")],
    ),
)
def test_a_run_repeats_and_goes_on_with_what_its_code_draws(lab, words, kind, processes):
    given = (*words(kind), f"scheduler.processes={processes}")
    whole = lab.train(*given)
    means = [record["rl"]["reward_mean"] for record in steps_of(whole)]
    assert len(set(means)) == 4, "each step draws other numbers"
    lab.train(*given, "total_train_steps=2", trial="halted")
    resumed = lab.train(*given, trial="halted")
    assert_same_weights(whole, resumed)
    assert values_of(whole) == values_of(resumed)
    other = lab.train(*given, "seed=2", "total_train_steps=1")
    assert means[0] != steps_of(other)[0]["rl"]["reward_mean"]
