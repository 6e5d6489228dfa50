"""Bounds: which samples are compared, how long a sign must last, and what never ends a run."""

import json
import math

import numpy as np
import pytest

from pentad.core.types import Sample, StepResult
from pentad.rl.bounds import SHARE_WINDOW, Bounds, compare
from pentad.rl.section import GuardsConfig

RNG = np.random.default_rng(0)


def step(norm=1.0):
    skipped = not math.isfinite(norm)
    return StepResult(0.1, norm, 1e-3, skipped, 10, 1)


def sample(gap, version, num=40, reported=None):
    """One sampled token more than `num`, the first of them drawn with `version`."""
    own = -RNG.random(num + 1)
    mask = np.array([False] + [True] * num)
    said = own + gap if reported is None else np.full(num + 1, reported)
    made = Sample(np.arange(num + 1), mask, said.astype(np.float32), mask * version, "stop")
    return made, own


def seen(*pairs, version=3):
    return compare([pair[0] for pair in pairs], [pair[1] for pair in pairs], version)


def sentences(bounds, *steps):
    return [bounds.past([step()], compared) for compared in steps]


def test_only_a_gap_that_lasts_or_returns_ends_the_run():
    bounds = Bounds(GuardsConfig(patience_steps=3))
    far, near = seen(sample(0.5, 3)), seen(sample(0.01, 3))
    said = sentences(bounds, far, near, near, near, near, far, near, far, near, far)
    assert said[:9] == [""] * 9
    assert "of tokens that were drawn with the weights they train" in said[9]
    assert "guards.max_logprob_gap = 0.3, in 3 of the last 6 comparisons" in said[9]
    open_end = Bounds(GuardsConfig(patience_steps=3, max_logprob_gap=None))
    assert sentences(open_end, *[far] * 9) == [""] * 9


def test_a_shift_of_all_log_probs_counts_three_times():
    shifted, rounded = sample(0.2, 3), sample(0.0, 3)
    rounded[0].rollout_logprobs[1:] += np.resize([0.25, -0.25], 40).astype(np.float32)
    bounds = Bounds(GuardsConfig(patience_steps=1))
    assert bounds.past([step()], seen(rounded)) == ""
    assert "differ by 0.6 per log-prob" in bounds.past([step()], seen(shifted))
    assert bounds.past([step()], seen(sample(0.9, 1))) == "", "older weights shift by right"


def test_samples_of_the_present_weights_decide_where_there_are_any():
    bounds = Bounds(GuardsConfig(patience_steps=1))
    assert bounds.past([step()], seen(sample(0.01, 3), sample(2.5, 1))) == ""
    assert "weights they train" in bounds.past([step()], seen(sample(0.5, 3), sample(0.0, 1)))
    # A sample that began with older weights is not of the present ones.
    mixed = sample(2.5, 3)
    mixed[0].versions[1] = 2
    assert bounds.past([step()], seen(mixed)) == ""


def test_stale_samples_alone_may_be_ten_times_as_far():
    bounds = Bounds(GuardsConfig(patience_steps=1))
    assert bounds.past([step()], seen(sample(2.5, 1))) == ""
    said = bounds.past([step()], seen(sample(3.5, 1)))
    assert "more than guards.max_logprob_gap = 0.3 times 10, 1 steps in a row" in said
    assert "lower the learning rate or max_staleness" in said
    patient, old, young = Bounds(GuardsConfig()), seen(sample(3.5, 1)), seen(sample(2.5, 1))
    assert sentences(patient, *[old, old, old, old, young] * 4) == [""] * 20


def test_one_log_prob_for_all_tokens_is_found_at_any_age_but_not_in_a_certain_policy():
    bounds = Bounds(GuardsConfig(patience_steps=1, max_logprob_gap=None))
    assert "one log-prob, -0.5, for all" in bounds.past([step()], seen(sample(0, 1, 40, -0.5)))
    certain = sample(0, 3, 40, 0.0)
    assert bounds.past([step()], seen((certain[0], np.zeros(41)))) == ""
    assert bounds.past([step()], seen(sample(0, 3, 8, -0.5))) == "", "too few to say"
    # A policy that was certain when it sampled, and is a little less so by now.
    certain, own = sample(0, 1, 40, 0.0)
    assert bounds.past([step()], seen((certain, own / 4))) == ""
    assert "one log-prob, 0, for all" in bounds.past([step()], seen((certain, own)))


def test_each_sampler_is_counted_for_itself():
    bounds = Bounds(GuardsConfig(patience_steps=2))
    assert [bounds.past_probe(0, 0.5), bounds.past_probe(1, 0.5)] == ["", ""]
    assert [bounds.past_probe(0, None), bounds.past_probe(1, 0.1)] == ["", ""]
    assert "sampler 0 drew for the comparison" in bounds.past_probe(0, math.nan)
    assert bounds.is_doubted(1) and not bounds.is_doubted(2)
    assert [bounds.past_probe(1, 0.1) for _ in range(4)] == [""] * 4 and not bounds.is_doubted(1)


def test_impossible_tokens_are_no_usable_gradient():
    own, said = sample(0.0, 3)
    said[5] = -math.inf
    compared = seen((own, said))
    assert compared.num_impossible == 1
    bounds = Bounds(GuardsConfig(patience_steps=2))
    assert [bool(text) for text in sentences(bounds, compared, compared)] == [False, True]


@pytest.mark.parametrize(("period", "ends"), [(2, False), (3, True)])
def test_a_share_of_bad_steps_ends_the_run(period, ends):
    bounds = Bounds(GuardsConfig(max_nonfinite_share=0.5))
    norms = [1.0 if i % period == 0 else math.nan for i in range(3 * SHARE_WINDOW)]
    said = [bounds.past([step(norm)]) for norm in norms]
    assert any(said) == ends and not any(said[: SHARE_WINDOW - 1])


def test_a_batch_without_sampled_tokens_is_no_sign():
    made, own = sample(0.0, 3)
    made.mask[:] = False
    assert Bounds(GuardsConfig(patience_steps=1)).past([step()], seen((made, own))) == ""


def test_a_resumed_run_goes_on_counting():
    bad = step(math.nan)
    first = Bounds(GuardsConfig(patience_steps=3))
    assert [first.past([bad]), first.past([bad])] == ["", ""]
    again = Bounds(GuardsConfig(patience_steps=3))
    again.restore(json.loads(json.dumps(first.state())))
    assert "no usable gradient" in again.past([bad])
    assert Bounds(GuardsConfig(patience_steps=3)).past([bad]) == ""
