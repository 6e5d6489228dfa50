"""Code of the user's that draws from the generators of Python, NumPy and torch: runs repeat."""

import pytest
from run_lab import steps_of, values_of
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
        return (f"{key}={file}:{name}", "recover.freq_steps=1", "total_train_steps=4")

    return given


@pytest.mark.parametrize("processes", ["one", "separate"])
@pytest.mark.parametrize("kind", ["flow", "reward"])
def test_a_run_repeats_and_goes_on_with_what_its_code_draws(lab, words, kind, processes):
    given = (*words(kind), f"scheduler.processes={processes}")
    whole, again = lab.train(*given), lab.train(*given)
    assert_same_weights(whole, again)
    assert values_of(whole) == values_of(again)
    means = [record["rl"]["reward_mean"] for record in steps_of(whole)]
    assert len(set(means)) == 4, "each step draws other numbers"
    lab.train(*given, "total_train_steps=2", trial="halted")
    resumed = lab.train(*given, trial="halted")
    assert_same_weights(whole, resumed)
    other = lab.train(*given, "seed=2")
    assert means[0] != steps_of(other)[0]["rl"]["reward_mean"]
