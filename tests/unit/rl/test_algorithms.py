"""The table of algorithms: names, defaults, and overrides, with what is refused of them."""

import json

import pytest
from sections import settings_for

from pentad.core.errors import UserError
from pentad.planner.prepare import prepare
from pentad.rl import losses
from pentad.rl.algorithms import (
    build_policy_loss,
    build_value_loss,
)
from pentad.rl.facts import FACTS, unused_settings
from pentad.rl.section import AlgorithmConfig


@pytest.mark.parametrize("name", FACTS)
def test_every_entry_gives_settings_and_losses(name):
    settings = settings_for(name)
    entry = FACTS[name]
    assert settings.name == name and settings.facts.scope == entry.scope
    assert entry.paper.startswith("https://") and entry.text.endswith(".")
    loss = build_policy_loss(settings)
    own = {"icepop": {"rollout_logprobs"}, "kpop": {"rollout_logprobs"}, "kl_cov": {"penalised"}}
    own["m2po"] = {"actor_logprobs", "rollout_logprobs"}
    assert set(loss.columns) == {"weights", "advantages"} | own.get(name, set())
    assert not loss.needs_entropy
    if settings.facts.needs_critic:
        assert "returns" in build_value_loss(settings).columns
    assert AlgorithmConfig.model_validate_json(settings.model_dump_json()) == settings


@pytest.mark.parametrize("name", FACTS)
def test_an_algorithm_reads_its_own_defaults(name):
    assert not set(FACTS[name].defaults) & set(unused_settings(FACTS[name]))


def test_defaults_are_those_of_the_papers():
    assert settings_for("grpo").clip == losses.Clip(0.2, 0.2, 3.0)
    assert settings_for("dapo").clip == losses.Clip(0.2, 0.28, 3.0)
    assert settings_for("gspo").clip == losses.Clip(3e-4, 4e-4, 3.0)
    norms = {name: settings_for(name).loss_norm for name in ("grpo", "dr_grpo", "dapo")}
    assert norms == {"grpo": "sequence", "dr_grpo": "constant", "dapo": "token"}
    assert settings_for("dapo").dynamic_filter and settings_for("dapo").overlong_penalty == 1
    assert settings_for("ppo").facts.needs_critic and settings_for("ppo").lam == 0.95
    assert settings_for("distill").needs_tags == {"teacher"}
    assert not any(settings_for(name).needs_ref for name in FACTS)


def test_none_keeps_the_default_and_values_override_it():
    settings = settings_for("dapo", eps_clip=0.1, eps_clip_higher=None, entropy_coef=0.01)
    assert settings.clip == losses.Clip(0.1, 0.28, 3.0) and settings.entropy_coef == 0.01
    assert settings_for("grpo", eps_clip=0.3).clip == losses.Clip(0.3, 0.3, 3.0)


def test_a_kl_term_needs_the_reference_where_it_is_used():
    in_loss = settings_for("grpo", kl_coef=0.1)
    assert in_loss.needs_ref and in_loss.needs_tags == {"ref"}
    assert "ref_logprobs" in build_policy_loss(in_loss).columns
    in_reward = settings_for("grpo", kl_coef=0.1, kl_in="reward")
    assert in_reward.needs_ref and "ref_logprobs" not in build_policy_loss(in_reward).columns


def test_old_log_probs_are_read_when_decoupled_or_with_several_updates():
    assert "actor_logprobs" in build_policy_loss(settings_for("grpo"), num_updates=2).columns
    settings = settings_for("ppo", decoupled=True)
    assert settings.needs_old_logprobs(1) and settings.correction == "tis"
    assert build_policy_loss(settings).columns == (
        "weights",
        "advantages",
        "actor_logprobs",
        "rollout_logprobs",
    )


def sentences(name, **overrides):
    """What a recipe with these keys of its block is told about them."""
    words = [f"algorithm.{key}={json.dumps(value)}" for key, value in overrides.items()]
    models = ["actor.path=Qwen/Qwen3-0.6B", "teacher.path=Qwen/Qwen3-0.6B"]
    try:
        prepare(None, [*models, f"algorithm.name={name}", *words], "plan")
    except UserError as error:
        found = map(str, error.problems)
        return [sentence for sentence in found if sentence.startswith("algorithm.")]
    return []


@pytest.mark.parametrize(
    ("name", "overrides", "rule"),
    [
        ("grpo", {"gamma": 0.9}, "has no effect with algorithm.name = grpo: it does not discount"),
        ("grpo", {"lam": 0.9}, "it has no critic"),
        ("reinforce", {"eps_clip": 0.2}, "its loss has no ratio"),
        ("reinforce", {"decoupled": True}, "its loss has no ratio"),
        ("cispo", {"c_clip": 3.0}, "bounded on both sides"),
        ("ppo", {"dynamic_filter": True}, "still carries signal"),
        ("distill", {"reward_scale": 2.0}, "learns from a teacher"),
        ("grpo", {"tau_pos": 2.0}, "only sapo reads it"),
        ("grpo", {"cov_share": 0.1}, "only clip_cov and kl_cov read it"),
        ("sapo", {"eps_clip": 0.1}, "its gate is smooth"),
        ("m2po", {"decoupled": False, "eps_clip": 0.4}, "takes the place of its clip"),
        ("clip_cov", {"cov_low": 6.0}, "must be below algorithm.cov_high = 5"),
        ("kl_cov", {}, "updates_per_batch = 1 has none"),
        ("grpo", {"rejection_cap": 3.0}, "has no effect while algorithm.rejection is not set"),
        ("grpo", {"kl_weighted": True}, "has no effect while algorithm.kl_coef is not set"),
        ("grpo", {"kl_weighted": True, "kl_coef": 0.1, "kl_estimator": "k1"}, "only k3"),
        ("grpo", {"kl_estimator": "k2"}, "has no effect while algorithm.kl_coef is not set"),
        ("grpo", {"correction_cap": 5.0}, "has no effect while algorithm.correction is not set"),
        (
            "grpo",
            {"overlong_buffer": 9},
            "has no effect while algorithm.overlong_penalty is not set",
        ),
        ("grpo", {"decoupled": True, "correction": "none"}, "set algorithm.correction to tis"),
        ("ppo", {"decoupled": True, "correction": "sampler_ratio"}, "sampler_ratio drops"),
        ("reinforce", {"correction": "sampler_ratio"}, "its loss has no ratio"),
        (
            "grpo",
            {"correction": "sampler_ratio", "correction_cap": 3.0},
            "the clip bounds the ratio",
        ),
    ],
)
def test_contradictions_and_settings_without_effect_are_refused(name, overrides, rule):
    (sentence,) = sentences(name, **overrides)
    assert rule in sentence


def test_all_problems_come_together():
    assert len(sentences("grpo", eps_clip=-1, lam=3, kl_in="both")) == 3
    assert len(sentences("reinforce", eps_clip=0.1, correction_cap=3.0, gamma=0.5)) == 3


def test_an_explicit_off_is_no_contradiction():
    off = {"kl_coef": 0.0, "kl_estimator": "k2", "correction": "none", "correction_cap": 9.0}
    assert not sentences("grpo", **off)
    assert not sentences("reinforce", gamma=1.0, dynamic_filter=False, decoupled=False)


def test_every_tunable_can_be_set_somewhere():
    for name in set(AlgorithmConfig.model_fields) - {"name"}:
        assert any(name not in unused_settings(entry) for entry in FACTS.values()), name
