"""One batch's update: the same weights however its groups arrive."""

import numpy as np
import pytest
import torch
from closeness import assert_close
from sections import engine_settings, settings_for

from pentad.core.types import Group, Prompt, Row, Sample
from pentad.engine.engine import build_engine
from pentad.engine.section import OptimizerConfig
from pentad.trainer.rank.update import BatchUpdate

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 23,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "architectures": ["Qwen3ForCausalLM"],
}


def engine(**more):
    settings = engine_settings(
        gradient_checkpointing=False, optimizer=OptimizerConfig(lr=1e-2), **more
    )
    return build_engine(CONFIG, settings, init_from_scratch=True, seed=3)


def critic():
    settings = engine_settings(gradient_checkpointing=False, optimizer=OptimizerConfig(lr=1e-2))
    return build_engine(CONFIG, settings, init_from_scratch=True, seed=4, value_head=True)


def batch(num_groups=4, num_samples=3, seed=0):
    """Groups of ragged random samples with the log-probs of no model in particular."""
    rng = np.random.default_rng(seed)
    groups = []
    for gid in range(num_groups):
        prompt = tuple(rng.integers(0, 23, rng.integers(1, 5)).tolist())
        samples = []
        for _ in range(num_samples):
            answer = rng.integers(0, 23, rng.integers(1, 7))
            n, m = len(prompt), len(answer)
            samples.append(
                Sample(
                    ids=np.concatenate([prompt, answer]).astype(np.int64),
                    mask=np.array([False] * n + [True] * m),
                    rollout_logprobs=np.array([0.0] * n + [-2.5] * m, dtype=np.float32),
                    versions=np.array([-1] * n + [0] * m),
                    finish="stop",
                    reward=float(rng.integers(0, 2)),
                )
            )
        samples[0].reward, samples[1].reward = 1.0, 0.0  # so that every group has signal
        groups.append(Group(Prompt(gid, prompt, {}), samples))
    return groups


def weights_after(chunks, algorithm="grpo", with_critic=False, **kwargs):
    learner = engine()
    if settings_for(algorithm).needs_ref or kwargs.get("kl_coef"):
        learner.save_tag("ref")
    overrides = {k: kwargs.pop(k) for k in ("kl_coef", "decoupled") if k in kwargs}
    update = BatchUpdate(
        learner,
        settings_for(algorithm, **overrides),
        critic=critic() if with_critic else None,
        max_new_tokens=8,
        **kwargs,
    )
    groups = batch()
    update.begin()
    for index, (start, stop) in enumerate(chunks):
        update.add(groups[start:stop], last=index == len(chunks) - 1)
    result = update.finish()
    return dict(learner.iter_weights()), result


def largest_difference(one, other):
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "rloo", "gspo", "reinforce_plus_plus"])
def test_chunks_do_not_change_the_step(algorithm):
    whole, whole_result = weights_after([(0, 4)], algorithm)
    parts, parts_result = weights_after([(0, 1), (1, 3), (3, 4)], algorithm)
    # Adam's first step divides by the gradient's own size, so rounding of tiny entries shows.
    assert largest_difference(whole, parts) < 1e-4
    assert parts_result.steps[0].grad_norm == pytest.approx(whole_result.steps[0].grad_norm, 1e-4)
    assert len(parts_result.outputs) == len(parts_result.rows) == 12


def test_an_update_moves_the_weights():
    before = {name: tensor.clone() for name, tensor in engine().iter_weights()}
    after, result = weights_after([(0, 4)])
    assert largest_difference(before, after) > 1e-3
    assert not result.steps[0].skipped


def test_several_updates_a_batch_use_the_log_probs_of_the_first_touch():
    _, result = weights_after([(0, 4)], num_updates=2)
    assert len(result.steps) == 2
    assert sorted(len(row.ids) for row in result.rows) == sorted(
        len(sample.ids) for group in batch() for sample in group.samples
    )
    assert all("actor_logprobs" in row.columns for row in result.rows)
    first = result.rows[0]
    recorded, seen = first.columns["actor_logprobs"], result.outputs[0]["logprobs"]
    trained = first.columns["weights"] != 0
    assert_close(recorded[trained], seen[trained])  # before any step
    moved = [
        (row.columns["actor_logprobs"] - out["logprobs"])[row.columns["weights"] != 0].abs().max()
        for row, out in zip(result.rows[6:], result.outputs[6:], strict=True)
    ]
    assert max(moved) > 1e-3  # the second part sees weights that the first part moved


def test_the_reference_is_scored_under_its_own_weights():
    _, result = weights_after([(0, 2), (2, 4)], kl_coef=0.1)
    row, out = result.rows[0], result.outputs[0]
    trained = row.columns["weights"] != 0
    assert_close(row.columns["ref_logprobs"][trained], out["logprobs"][trained])


def test_ppo_trains_the_critic_on_returns():
    _, result = weights_after([(0, 2), (2, 4)], "ppo", with_critic=True)
    assert len(result.critic_steps) == 1
    assert result.critic_steps[0].loss > 0
    assert result.critic_steps[0].grad_norm > 0
    assert {"values", "returns", "advantages"} <= set(result.rows[0].columns)


MIXTURE = CONFIG | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "architectures": ["Qwen3MoeForCausalLM"],
}


def test_routes_of_the_sampler_are_followed_and_held_against_the_learners_own():
    """Half of the samples come with the learner's own routes, half with others."""
    settings = engine_settings(
        gradient_checkpointing=False, optimizer=OptimizerConfig(lr=1e-2), max_tokens_per_mb=32
    )
    learner = build_engine(MIXTURE, settings, init_from_scratch=True, seed=3)
    value_settings = engine_settings(
        gradient_checkpointing=False, optimizer=OptimizerConfig(lr=1e-2)
    )
    judge = build_engine(MIXTURE, value_settings, init_from_scratch=True, seed=4, value_head=True)
    groups = batch(2, 2)
    samples = [sample for group in groups for sample in group.samples]
    rows = [Row(torch.from_numpy(sample.ids), {}) for sample in samples]
    own = learner.routes(rows)
    for i, (sample, chosen) in enumerate(zip(samples, own, strict=True)):
        sample.routes = (chosen if i < 2 else (chosen + 1) % 8).numpy().astype(np.uint8)
    forced = [
        Row(r.ids, {}, routes=torch.from_numpy(s.routes).long())
        for r, s in zip(rows, samples, strict=True)
    ]
    wanted = [output["logprobs"] for output in learner.forward(forced)]
    update = BatchUpdate(learner, settings_for("ppo"), critic=judge, max_new_tokens=8)
    update.begin()
    update.add(groups, last=True)
    result = update.finish()
    for output, logprobs in zip(result.outputs, wanted, strict=True):
        assert_close(output["logprobs"], logprobs)
    sizes = [len(sample.ids) - 1 for sample in samples]
    differing = sum(
        float((torch.sort(own[i][:-1], -1).values != torch.sort((own[i][:-1] + 1) % 8, -1).values)
              .any(-1).float().sum())
        for i in (2, 3)
    )  # fmt: skip
    assert result.rerouted_share == pytest.approx(differing / (2 * sum(sizes)))
    assert 0.2 < result.rerouted_share < 0.8
