"""From groups to rows: columns, shaping, scopes, and what is refused."""

import numpy as np
import plain_rl
import pytest
import torch
from plain_rl import Plain
from ragged_batches import make_groups, make_sample
from sections import settings_for

from pentad.core.errors import RunError
from pentad.core.types import Greedy, Group, Prompt
from pentad.rl.algorithms import make_rows
from pentad.rl.facts import FACTS

EVERYTHING = ("actor_logprobs", "ref_logprobs", "teacher_logprobs", "values")


@pytest.fixture
def rng():
    return np.random.default_rng(11)


def plain(groups, *, token_reward=None):
    """The groups as the plain reference sees them."""
    out = []
    for group in groups:
        for s in group.samples:
            tokens = np.zeros(s.ids.size) if token_reward is None else token_reward(s)
            values = s.columns.get("values", np.zeros(s.ids.size)).tolist()
            out.append(Plain(group.gid, s.reward, s.mask.tolist(), tokens.tolist(), values))
    return out


def assert_advantages(rows, expected):
    for row, values in zip(rows, expected, strict=True):
        # Computed in fp64, rounded once to fp32.
        want = torch.tensor(values, dtype=torch.float64)
        torch.testing.assert_close(row.columns["advantages"].double(), want, rtol=1e-6, atol=1e-7)


def difference(one, other):
    """float64 difference of two columns of a sample, whose names are given."""

    def column(sample, name):
        source = sample.rollout_logprobs if name == "rollout_logprobs" else sample.columns[name]
        return source.astype(np.float64)

    return lambda sample: column(sample, one) - column(sample, other)


def test_rows_carry_ids_weights_and_the_columns_of_their_samples(rng):
    groups = make_groups(rng, [2, 3], columns=("ref_logprobs",))
    rows = make_rows(groups, settings_for("grpo"), max_new_tokens=8)
    samples = [s for group in groups for s in group.samples]
    for row, sample in zip(rows, samples, strict=True):
        assert row.ids.tolist() == sample.ids.tolist()
        assert set(row.columns) == {"weights", "advantages", "rollout_logprobs", "ref_logprobs"}
        assert all(column.dtype == torch.float32 for column in row.columns.values())
        assert row.columns["rollout_logprobs"].tolist() == sample.rollout_logprobs.tolist()
        assert row.columns["ref_logprobs"].tolist() == sample.columns["ref_logprobs"].tolist()
        assert ((row.columns["weights"] != 0).numpy() == sample.mask).all()
        assert row.count == (1.0 if sample.mask.any() else 0.0)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "gspo", "cispo"])
def test_group_scope_is_the_same_group_by_group(rng, name):
    groups = make_groups(rng, [3, 1, 4])
    settings = settings_for(name)
    assert settings.facts.scope == "group"
    whole = make_rows(groups, settings, max_new_tokens=8)
    parts = [row for group in groups for row in make_rows([group], settings, max_new_tokens=8)]
    for one, other in zip(whole, parts, strict=True):
        assert one.count == other.count
        assert all(torch.equal(one.columns[c], other.columns[c]) for c in one.columns)


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("grpo", plain_rl.grpo),
        ("dr_grpo", plain_rl.dr_grpo),
        ("rloo", plain_rl.rloo),
        ("reinforce", plain_rl.reinforce),
        ("reinforce_plus_plus", lambda samples: plain_rl.reinforce_plus_plus(samples, 1.0)),
        ("gspo", plain_rl.grpo),
        ("cispo", plain_rl.grpo),
    ],
)
def test_each_algorithm_computes_its_advantages(rng, name, reference):
    groups = make_groups(rng, [3, 1, 4])
    rows = make_rows(groups, settings_for(name), max_new_tokens=8)
    assert_advantages(rows, reference(plain(groups)))


@pytest.mark.parametrize("sizes", [[3, 1, 4], [1, 1, 1]])
def test_remax_shapes_the_greedy_reward_like_those_of_samples(rng, sizes):
    groups = make_groups(rng, sizes)
    for group in groups:
        group.greedy = Greedy(float(rng.normal()), int(rng.integers(1, 9)))
    shaping = {"reward_scale": 2.0, "reward_clip": 1.5, "overlong_penalty": 0.5}
    settings = settings_for("remax", overlong_buffer=4, **shaping)

    def shaped(reward, num):
        return min(1.5, max(-1.5, 2 * reward)) - 0.5 * min(1.0, max(0.0, (num - 4) / 4))

    samples = plain(groups)
    for sample in samples:
        sample.reward = shaped(sample.reward, len(sample.steps))
    greedy = {group.gid: shaped(group.greedy.reward, group.greedy.num_sampled) for group in groups}
    rows = make_rows(groups, settings, max_new_tokens=8)
    assert_advantages(rows, plain_rl.remax(samples, [greedy[s.group] for s in samples]))


def test_remax_does_not_train_a_group_without_a_greedy_answer(rng):
    groups = make_groups(rng, [2, 2])
    groups[1].greedy = None
    with pytest.raises(RunError, match="group 1 has no greedy answer, whose reward remax needs"):
        make_rows(groups, settings_for("remax"), max_new_tokens=8)
    groups[1].greedy = Greedy(float("nan"), 1)
    with pytest.raises(RunError, match="group 1 has .*nan.*, whose reward remax needs"):
        make_rows(groups, settings_for("remax"), max_new_tokens=8)


@pytest.mark.parametrize("method", ["loglinear", "metrics"])
def test_rows_have_the_share_of_the_current_policy_by_the_age_of_a_token(rng, method):
    group = make_groups(rng, [2], max_length=8)[0]
    for sample in group.samples:
        sample.versions = np.where(sample.mask, rng.integers(0, 8, sample.mask.size), -1)
    settings = settings_for("grpo", prox_logp_method=method)
    for row, sample in zip(
        make_rows([group], settings, max_new_tokens=8, version=6), group.samples, strict=True
    ):
        want = [
            plain_rl.areal_proximal(0.0, 1.0, v, 6) if v >= 0 else 0.0
            for v in sample.versions.tolist()
        ]
        assert row.columns["proximal_share"].tolist() == pytest.approx(want, abs=1e-7)


def test_ppo_fills_whitened_advantages_and_plain_returns(rng):
    groups = make_groups(rng, [2, 2], columns=("values",))
    rows = make_rows(groups, settings_for("ppo", gamma=0.9), max_new_tokens=8)
    samples = plain(groups)
    pairs = [plain_rl.gae(s, 0.9, 0.95) for s in samples]
    assert_advantages(rows, plain_rl.whiten([a for a, _ in pairs], samples))
    for row, (_, returns) in zip(rows, pairs, strict=True):
        want = torch.tensor(returns, dtype=torch.float32)
        torch.testing.assert_close(row.columns["returns"], want)
        assert "values" in row.columns


@pytest.mark.parametrize("gamma", [0.0, 0.5])
def test_distill_judges_tokens_by_the_teacher_and_needs_no_reward(rng, gamma):
    groups = make_groups(rng, [2, 1], columns=("teacher_logprobs",))
    samples = plain(groups, token_reward=difference("teacher_logprobs", "rollout_logprobs"))
    for group in groups:
        for sample in group.samples:
            sample.reward = None
    rows = make_rows(groups, settings_for("distill", gamma=gamma), max_new_tokens=8)
    assert_advantages(rows, [plain_rl.returns_to_go(s, gamma, with_reward=False) for s in samples])


def test_the_trainers_own_log_probs_are_the_student_when_there_are_any(rng):
    groups = make_groups(rng, [2, 1], columns=("teacher_logprobs", "actor_logprobs"))
    samples = plain(groups, token_reward=difference("teacher_logprobs", "actor_logprobs"))
    rows = make_rows(groups, settings_for("distill"), max_new_tokens=8)
    assert_advantages(rows, [plain_rl.returns_to_go(s, 0.0, with_reward=False) for s in samples])


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_in_reward_is_paid_token_by_token(rng, estimator):
    groups = make_groups(rng, [3, 2], columns=("ref_logprobs",))
    formula = {
        "k1": lambda d: d,
        "k2": lambda d: d**2 / 2,
        "k3": lambda d: np.exp(-d) - 1 + d,
    }[estimator]
    gap = difference("rollout_logprobs", "ref_logprobs")
    samples = plain(groups, token_reward=lambda s: -0.2 * formula(gap(s)))
    kl = {"kl_coef": 0.2, "kl_in": "reward", "kl_estimator": estimator}
    rows = make_rows(groups, settings_for("rloo", **kl), max_new_tokens=8)
    assert_advantages(rows, plain_rl.rloo(samples))
    rows = make_rows(groups, settings_for("reinforce_plus_plus", gamma=0.9, **kl), max_new_tokens=8)
    assert_advantages(rows, plain_rl.reinforce_plus_plus(samples, 0.9))


def group_of(rng, lengths, rewards):
    samples = [
        make_sample(rng, [False] + [True] * n, reward=r)
        for n, r in zip(lengths, rewards, strict=True)
    ]
    return Group(Prompt(0, (1,), {}), samples)


def advantages_of(group, settings, max_new_tokens=10):
    rows = make_rows([group], settings, max_new_tokens=max_new_tokens)
    return [float(row.columns["advantages"][-1]) for row in rows]


def test_overlong_answers_are_punished_along_the_buffer(rng):
    group = group_of(rng, [2, 6, 7, 8, 10, 12], [1.0] * 6)
    settings = settings_for("dr_grpo", overlong_penalty=2.0, overlong_buffer=4)
    shaped = np.array([1.0, 1.0, 0.5, 0.0, -1.0, -1.0])
    assert advantages_of(group, settings) == pytest.approx(shaped - shaped.mean(), abs=1e-6)
    # dapo: the last fifth of the limit, penalty 1
    dapo = settings_for("dapo")
    rows = make_rows([group_of(rng, [8, 9, 10], [0.0] * 3)], dapo, max_new_tokens=10)
    last = [float(row.columns["advantages"][-1]) for row in rows]
    assert last == pytest.approx([1.0, 0.0, -1.0], abs=1e-5)


def test_rewards_are_scaled_then_clipped_then_punished(rng):
    group = group_of(rng, [2, 2, 10], [1.0, 4.0, 4.0])
    settings = settings_for(
        "dr_grpo", reward_scale=2.0, reward_clip=5.0, overlong_penalty=1.0, overlong_buffer=2
    )
    shaped = np.array([2.0, 5.0, 4.0])
    assert advantages_of(group, settings) == pytest.approx(shaped - shaped.mean(), abs=1e-6)


def test_delivered_advantages_are_taken_as_they_are(rng):
    groups = make_groups(rng, [2], columns=("advantages", "values", "returns"))
    rows = make_rows(groups, settings_for("ppo"), max_new_tokens=8, compute_advantages=False)
    for row, sample in zip(rows, groups[0].samples, strict=True):
        for name in ("advantages", "returns"):
            assert row.columns[name].tolist() == sample.columns[name].tolist()
    del groups[0].samples[0].columns["advantages"]
    with pytest.raises(RunError, match="lacks the column advantages"):
        make_rows(groups, settings_for("ppo"), max_new_tokens=8, compute_advantages=False)


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf")])
def test_a_missing_reward_is_refused_not_taken_for_zero(rng, reward):
    groups = make_groups(rng, [2, 2])
    groups[1].samples[1].reward = reward
    with pytest.raises(RunError, match="group 1, sample 1: its reward is"):
        make_rows(groups, settings_for("grpo"), max_new_tokens=8)


@pytest.mark.parametrize(
    ("name", "overrides", "column"),
    [
        ("grpo", {"kl_coef": 0.1}, "ref_logprobs"),
        ("ppo", {}, "values"),
        ("distill", {}, "teacher_logprobs"),
    ],
)
def test_a_missing_column_names_group_and_sample(rng, name, overrides, column):
    groups = make_groups(rng, [1, 2], columns=EVERYTHING)
    del groups[1].samples[0].columns[column]
    with pytest.raises(RunError, match=f"group 1, sample 0: it lacks the column {column}"):
        make_rows(groups, settings_for(name, **overrides), max_new_tokens=8)


def test_columns_that_are_not_finite_or_not_aligned_are_refused(rng):
    group = group_of(rng, [3, 3], [0.0, 1.0])
    group.samples[1].rollout_logprobs[2] = np.nan
    with pytest.raises(RunError, match="sample 1: its rollout_logprobs is nan at token 2"):
        make_rows([group], settings_for("grpo"), max_new_tokens=8)
    group = group_of(rng, [3, 3], [0.0, 1.0])
    group.samples[0].columns["actor_logprobs"] = np.zeros(3, dtype=np.float32)
    with pytest.raises(RunError, match="actor_logprobs has 3 entries for 4 tokens"):
        make_rows([group], settings_for("grpo"), max_new_tokens=8)
    group = group_of(rng, [3, 3], [0.0, 1.0])
    group.samples[0].mask[0] = True
    with pytest.raises(RunError, match="first token is marked as sampled"):
        make_rows([group], settings_for("grpo"), max_new_tokens=8)


@pytest.mark.parametrize("name", FACTS)
def test_a_batch_without_any_sampled_token_makes_rows_that_weigh_nothing(rng, name):
    samples = [make_sample(rng, [False, False], columns=EVERYTHING) for _ in range(2)]
    group = Group(Prompt(0, (1,), {}), samples, greedy=Greedy(1.0, 3))
    rows = make_rows([group], settings_for(name), max_new_tokens=8)
    assert [row.count for row in rows] == [0.0, 0.0]
    assert all((row.columns[c] == 0).all() for row in rows for c in ("weights", "advantages"))
    assert make_rows([], settings_for(name), max_new_tokens=8) == []


def test_truncated_samples_are_left_out_and_still_count_in_the_baseline(rng):
    (group,) = make_groups(rng, [4])
    for sample, finish in zip(group.samples, ("length", "stop", "length", "stop"), strict=True):
        sample.finish, sample.mask[1:] = finish, True
    plain_rows = make_rows([group], settings_for("grpo"), max_new_tokens=8)
    rows = make_rows([group], settings_for("grpo", mask_truncated=True), max_new_tokens=8)
    for i, (row, other) in enumerate(zip(rows, plain_rows, strict=True)):
        assert torch.equal(row.columns["advantages"], other.columns["advantages"])
        is_cut = i in (0, 2)
        assert row.count == (0.0 if is_cut else 1.0)
        want = torch.zeros_like(other.columns["weights"]) if is_cut else other.columns["weights"]
        assert torch.equal(row.columns["weights"], want)


def test_m2po_leaves_out_the_fewest_tokens_that_bring_the_second_moment_down(rng):
    groups = make_groups(rng, [3, 2], columns=("actor_logprobs",))
    threshold = 0.05
    rows = make_rows(groups, settings_for("m2po", m2_threshold=threshold), max_new_tokens=8)
    samples = [s for group in groups for s in group.samples]
    squares = [
        (float(s.columns["actor_logprobs"][t]) - float(s.rollout_logprobs[t])) ** 2
        for s in samples
        for t in np.flatnonzero(s.mask)
    ]
    kept = sorted(squares)
    while kept and sum(kept) / len(kept) > threshold:
        kept.pop()
    trained = [
        row.columns["weights"][t].item() != 0
        for row, s in zip(rows, samples, strict=True)
        for t in np.flatnonzero(s.mask)
    ]
    assert 0 < len(kept) < len(squares), "the case must leave out some"
    assert sorted(x for x, is_kept in zip(squares, trained, strict=True) if is_kept) == kept
    assert sum(row.count for row in rows) == len(kept)


def covariances(groups, rows):
    """(row, token, covariance) of every sampled token, by its definition."""
    found = []
    for row, sample in zip(rows, [s for g in groups for s in g.samples], strict=True):
        for t in np.flatnonzero(sample.mask):
            found.append((row, t, float(sample.columns["actor_logprobs"][t])))
    mean = sum(x for _, _, x in found) / len(found)
    gains = [float(row.columns["advantages"][t]) for row, t, _ in found]
    centre = sum(gains) / len(gains)
    return [(r, t, (x - mean) * (a - centre)) for (r, t, x), a in zip(found, gains, strict=True)]


def test_kl_cov_marks_the_highest_covariances_and_clip_cov_silences_some_within_bounds(rng):
    groups = make_groups(rng, [4, 3], columns=("actor_logprobs",))
    plain_rows = make_rows(groups, settings_for("grpo"), max_new_tokens=8)
    cells = covariances(groups, plain_rows)
    num = int(0.2 * len(cells))
    marked = make_rows(groups, settings_for("kl_cov", cov_share=0.2), max_new_tokens=8)
    got = [
        cov
        for (_, t, cov), row in zip(cells, _by_cell(groups, marked), strict=True)
        if row.columns["penalised"][t]
    ]
    assert sorted(got) == sorted(cov for _, _, cov in cells)[-num:]
    bounds = {"cov_low": 0.05, "cov_high": 1.0}
    silenced = make_rows(
        groups, settings_for("clip_cov", cov_share=0.2, **bounds), max_new_tokens=8
    )
    out = [
        cov
        for (old, t, cov), row in zip(cells, _by_cell(groups, silenced), strict=True)
        if row.columns["advantages"][t] == 0 != old.columns["advantages"][t]
    ]
    among = [cov for _, _, cov in cells if 0.05 <= cov <= 1.0]
    assert 0 < len(out) == min(num, len(among)) and set(out) <= set(among)
    again = make_rows(groups, settings_for("clip_cov", cov_share=0.2, **bounds), max_new_tokens=8)
    for one, other in zip(silenced, again, strict=True):
        assert torch.equal(one.columns["advantages"], other.columns["advantages"])


def _by_cell(groups, rows):
    samples = [s for group in groups for s in group.samples]
    pairs = zip(rows, samples, strict=True)
    return [row for row, sample in pairs for _ in np.flatnonzero(sample.mask)]
