"""Turns of several environments: exact by weight, and a function of the ordinal alone."""

from collections import Counter
from fractions import Fraction

import pytest

from pentad.data.shares import Turns, whole_shares


@pytest.mark.parametrize(
    ("weights", "shares"),
    [((1, 1), (1, 1)), ((3, 1), (3, 1)), ((0.7, 0.2, 0.1), (7, 2, 1)), ((2, 0.5), (4, 1))],
)
def test_weights_as_they_are_written_become_whole_shares(weights, shares):
    assert whole_shares(weights) == shares


@pytest.mark.parametrize("weights", [(3, 1), (0.7, 0.2, 0.1), (1, 1, 1), (5,), (0.333, 0.667)])
def test_after_any_number_of_turns_each_part_has_had_its_share(weights):
    turns = Turns(whole_shares(weights))
    had, num = Counter(), 2 * turns.length + 3
    for turn in range(num):
        part, before = turns.at(turn)
        assert before == had[part], "its own prompts come one after the other"
        had[part] += 1
        for one, weight in enumerate(weights):
            share = Fraction(str(weight)) / sum(Fraction(str(w)) for w in weights)
            assert abs(had[one] - (turn + 1) * share) <= 1


def test_an_epoch_ends_when_the_last_part_was_drawn_whole():
    turns = Turns((3, 1))
    num = turns.until((6, 5))
    seen = Counter(turns.at(turn)[0] for turn in range(num))
    fewer = Counter(turns.at(turn)[0] for turn in range(num - 1))
    assert seen[1] == 5 and seen[0] >= 6 and fewer[1] == 4
