"""Generators that a whole process shares."""

import random
import subprocess
import sys

import numpy
import torch

from pentad.core.seeds import seed_globals


def drawn(*parts):
    seed_globals(*parts)
    return random.random(), float(numpy.random.random()), float(torch.rand(()))


def test_all_generators_of_a_process_follow_from_seed_and_name():
    first = drawn(1, "learner-0")
    assert drawn(1, "learner-0") == first
    for other in ((2, "learner-0"), (1, "learner-1"), (1, "rollout-0")):
        assert all(a != b for a, b in zip(first, drawn(*other), strict=True))


def test_nothing_is_imported_for_it():
    code = "import sys; from pentad.core.seeds import seed_globals; seed_globals(1); "
    code += "sys.exit(bool({'numpy', 'torch'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
