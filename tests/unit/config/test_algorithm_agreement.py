"""The torch-free config and the parts themselves say the same: what passes `plan` trains."""

import json

import pytest
from config_values import values_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pentad.config.load import read_config
from pentad.config.resolve import resolve
from pentad.config.rules.check import check
from pentad.config.schema import AlgorithmConfig
from pentad.core.algorithms import FACTS, TUNABLES
from pentad.core.errors import UserError
from pentad.rewards.functions import BUILT_IN
from pentad.rewards.section import REWARD_NAMES
from pentad.rl.algorithms import settings_for
from pentad.rl.overrides import run_problems


def test_the_rewards_are_those_that_are_built_in():
    assert set(REWARD_NAMES) == set(BUILT_IN)


def test_the_overrides_are_the_tunables():
    assert set(AlgorithmConfig.model_fields) - {"name"} == set(TUNABLES)


# Few of the overrides at a time, so that lawful combinations are met often.
overrides = st.lists(
    st.sampled_from(sorted(TUNABLES)), unique=True, min_size=0, max_size=4
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
@given(st.sampled_from(tuple(FACTS)), overrides, switches, st.integers(1, 4))
def test_what_the_config_lets_pass_the_algorithm_takes(name, chosen, flags, n_samples):
    values = {"algorithm": {"name": name, **chosen}, "gconfig": {"n_samples": n_samples}, **flags}
    values |= {"mode": "hybrid"} if flags.get("max_staleness") else {}
    words = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    reading = read_config(None, [*words, "actor.path=Qwen/Qwen3-0.6B"])
    config, _ = resolve(reading.config)
    own = ("algorithm.", "use_", "gconfig.")
    if any(one.where.startswith(own) for one in [*reading.problems, *check(config)]):
        return
    try:
        taken = settings_for(**dict(config.algorithm))
    except UserError as error:
        pytest.fail(f"{values} passed the config: {error}")
    found = run_problems(
        taken,
        group_size=n_samples,
        max_new_tokens=config.gconfig.max_new_tokens,
        max_staleness=config.max_staleness,
        num_updates=config.updates_per_batch,
    )
    assert found == []
    if "use_kl_loss" in flags:
        assert flags["use_kl_loss"] == (taken.kl_coef > 0 and taken.kl_in == "loss")
    if "use_tis" in flags:
        assert flags["use_tis"] == (taken.correction == "tis")
