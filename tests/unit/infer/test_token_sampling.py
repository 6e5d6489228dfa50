"""Draws depend on (seed, position) and the distribution, on nothing else."""

import numpy as np
import pytest
import torch

from pentad.infer import sampling
from pentad.infer.sampling import CHUNK, draw, invert_cdf, truncate, uniforms


def seeds_of(num, first=0):
    return np.arange(first, first + num, dtype=np.uint64)


def test_uniforms_are_a_fixed_function_of_seed_and_position():
    # entry t of splitmix64 started at mix(seed + golden); values computed in plain integers
    def mix(x):
        x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ x >> 27) * 0x94D049BB133111EB) % 2**64
        return x ^ x >> 31

    golden = 0x9E3779B97F4A7C15
    seeds = [0, 1, 2**63 + 5, 2**64 - 1]
    positions = [0, 1, 40000, 3]
    wanted = [
        (mix((mix((s + golden) % 2**64) + (t + 1) * golden) % 2**64) >> 24) / 2**40
        for s, t in zip(seeds, positions, strict=True)
    ]
    assert uniforms(np.array(seeds, np.uint64), np.array(positions)).tolist() == wanted


def test_uniforms_are_uniform_and_uncorrelated():
    num = 20000
    by_seed = uniforms(seeds_of(num), np.full(num, 5))
    by_position = uniforms(np.full(num, 77, np.uint64), np.arange(num))
    for u in (by_seed, by_position):
        counts = np.histogram(u, bins=20, range=(0, 1))[0]
        chi2 = ((counts - num / 20) ** 2 / (num / 20)).sum()
        assert chi2 < 43.8  # 19 degrees of freedom, p = 0.001; the numbers are fixed
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 4 / num**0.5


@pytest.mark.parametrize("vocab_size", [5, 128, 1500])
def test_draws_follow_the_distribution(vocab_size):
    num = 10000
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(3)) * 2
    u = torch.from_numpy(uniforms(seeds_of(num), np.zeros(num, np.int64)))
    ids, logprobs = draw(logits.expand(num, -1), u, torch.full((num,), 0.7))
    wanted = (logits / 0.7).softmax(-1)
    counts = torch.bincount(ids, minlength=vocab_size).double()
    large = wanted * num > 5
    spread = (counts - wanted * num)[large] / (wanted * num)[large].sqrt()
    assert spread.abs().max() < 4.5  # standard deviations, up to a thousand of them; fixed seeds
    assert counts[~large].sum() <= 2 * (wanted[~large].sum() * num) + 10
    torch.testing.assert_close(logprobs, (logits / 0.7).log_softmax(-1)[ids])


def test_the_first_index_past_the_number_is_taken():
    weights = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]])
    for u, wanted in [(0.0, 1), (0.2499, 1), (0.25, 3), (0.7499, 3), (0.75, 4), (1 - 2**-40, 4)]:
        assert invert_cdf(weights, torch.tensor([u], dtype=torch.float64)).item() == wanted


def test_an_index_without_weight_is_never_drawn():
    generator = torch.Generator().manual_seed(0)
    for vocab_size in (7, CHUNK, 9 * CHUNK + 3):
        weights = torch.rand(400, vocab_size, generator=generator)
        weights[torch.rand(400, vocab_size, generator=generator) < 0.9] = 0
        weights[:, 2] += 1e-30  # no row is all zero
        edges = torch.tensor([0.0, 0.5, 1 - 2**-40, 1 - 2**-39], dtype=torch.float64)
        ids = invert_cdf(weights, edges.repeat(100))
        assert (weights.gather(1, ids[:, None]) > 0).all()


def test_two_levels_agree_with_one_long_sum():
    weights = torch.rand(64, 1700, generator=torch.Generator().manual_seed(1))
    u = torch.from_numpy(uniforms(seeds_of(64), np.zeros(64, np.int64)))
    sums = weights.double().cumsum(-1)
    wanted = (sums <= (u * sums[:, -1])[:, None]).sum(-1)
    assert torch.equal(invert_cdf(weights, u), wanted)


@pytest.mark.parametrize("num_together", [None, 1, 7])
def test_a_draw_is_the_same_in_any_batch(monkeypatch, num_together):
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(2))
    u = torch.from_numpy(uniforms(seeds_of(50), np.arange(50)))
    heat = torch.linspace(0, 2, 50)
    k, p = torch.arange(50) % 5, torch.linspace(0.2, 1, 50)
    ids, logprobs = draw(logits, u, heat, k, p)
    if num_together is not None:
        monkeypatch.setattr(sampling, "HOST_LOGITS", num_together * 300)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(4))
    for part in (order[:1], order[1:8], order[8:]):
        again = draw(logits[part], u[part], heat[part], k[part], p[part])
        assert torch.equal(again[0], ids[part])
        torch.testing.assert_close(again[1], logprobs[part], atol=1e-5, rtol=1e-5)  # sums of 300


def test_truncation_keeps_the_head():
    weights = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).repeat(5, 1)
    k = torch.tensor([0, 2, 0, 3, 0])
    p = torch.tensor([1.0, 1.0, 0.5, 0.5, 1e-9])
    kept = truncate(weights, k, p) > 0
    assert kept.tolist() == [
        [True, True, True, True],
        [False, True, False, True],
        [False, True, False, True],  # 0.4 < 0.5, so the next one is needed
        [False, True, False, True],  # 0.4 / 0.9 < 0.5
        [False, True, False, False],
    ]


def test_greedy_rows_beside_sampled_ones():
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, 3.0, 1.0]])
    u = torch.tensor([0.999999, 0.999999], dtype=torch.float64)
    ids, logprobs = draw(logits, u, torch.tensor([0.0, 1.0]))
    assert ids.tolist() == [1, 2]
    torch.testing.assert_close(logprobs, logits[0].log_softmax(-1)[ids])


def test_logits_that_are_not_finite_show_in_the_logprob():
    logits = torch.tensor([[0.0, float("nan"), 1.0]])
    _, logprobs = draw(logits, torch.tensor([0.5], dtype=torch.float64), torch.ones(1))
    assert logprobs.isnan().all()
