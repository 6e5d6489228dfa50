"""The torch-free config and the parts themselves say the same: what passes `plan` trains."""

import pytest
from config_values import values_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pentad.config.algorithm_rules import NEUTRAL, READERS
from pentad.config.resolve import resolve
from pentad.config.rules.check import check
from pentad.config.schema import (
    ALGORITHM_NAMES,
    CONSTANT_NORM,
    GROUP_RELATIVE,
    KL_IN_REWARD,
    REWARD_NAMES,
    WITH_CRITIC,
    WITHOUT_RATIO,
    AlgorithmConfig,
    Config,
)
from pentad.core.errors import UserError
from pentad.rewards.functions import BUILT_IN
from pentad.rl import settings as rl
from pentad.rl.algorithms import ALGORITHMS, settings_for, unused_settings


def test_the_names_are_those_of_the_table():
    assert set(ALGORITHM_NAMES) == set(ALGORITHMS)


def test_the_rewards_are_those_that_are_built_in():
    assert set(REWARD_NAMES) == set(BUILT_IN)


def test_the_overrides_are_the_tunables():
    assert set(AlgorithmConfig.model_fields) - {"name"} == set(rl.TUNABLES)
    assert NEUTRAL == rl.NEUTRAL


@pytest.mark.parametrize("name", ALGORITHM_NAMES)
def test_the_facts_are_those_of_the_table(name):
    chosen = settings_for(name)
    assert (chosen.min_group_size > 1) == (name in GROUP_RELATIVE)
    assert chosen.needs_critic == (name in WITH_CRITIC)
    assert chosen.needs_teacher == (name == "distill")
    assert (chosen.kl_in == "reward") == (name in KL_IN_REWARD)
    assert (chosen.kl_coef, chosen.correction) == (0, "none"), "what an unset switch means"
    assert (chosen.overlong_penalty > 0) == (name == "dapo")
    assert (chosen.loss_norm == "constant") == (name in CONSTANT_NORM)
    assert (chosen.ratio_level == "none") == (name in WITHOUT_RATIO)
    unread = {key for key, (readers, _) in READERS.items() if name not in readers}
    assert unread == set(unused_settings(ALGORITHMS[name]))


# Few of the overrides at a time, so that lawful combinations are met often.
overrides = st.lists(
    st.sampled_from(sorted(rl.TUNABLES)), unique=True, min_size=0, max_size=4
).flatmap(
    lambda names: st.fixed_dictionaries(
        {name: values_of(AlgorithmConfig.model_fields[name]) for name in names}
    )
)
switches = st.fixed_dictionaries(
    {},
    optional={
        "use_kl_loss": st.booleans(),
        "use_tis": st.booleans(),
        "max_staleness": st.integers(0, 2),
        "updates_per_batch": st.sampled_from([1, 2]),
    },
)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(ALGORITHM_NAMES), overrides, switches, st.integers(1, 4))
def test_what_the_config_lets_pass_the_algorithm_takes(name, chosen, flags, n_samples):
    values = {"algorithm": {"name": name, **chosen}, "gconfig": {"n_samples": n_samples}, **flags}
    values |= {"mode": "hybrid"} if flags.get("max_staleness") else {}
    config, _ = resolve(Config.model_validate({**values, "actor": {"path": "Qwen/Qwen3-0.6B"}}))
    own = ("algorithm.", "use_", "gconfig.")
    if any(problem.where.startswith(own) for problem in check(config)):
        return
    try:
        taken = settings_for(**dict(config.algorithm))
    except UserError as error:
        pytest.fail(f"{values} passed the config: {error}")
    found = rl.run_problems(
        taken,
        group_size=n_samples,
        max_new_tokens=config.gconfig.max_new_tokens,
        max_staleness=config.max_staleness,
        num_updates=config.updates_per_batch,
    )
    assert found == []
    if config.use_kl_loss is not None:
        assert config.use_kl_loss == (taken.kl_coef > 0 and taken.kl_in == "loss")
    if config.use_tis is not None:
        assert config.use_tis == (taken.correction == "tis")
