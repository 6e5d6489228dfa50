"""The torch-free config and the parts themselves say the same: what passes `plan` trains."""

import json

from config_values import values_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pentad.config.load import read_config
from pentad.config.resolve import resolve
from pentad.config.rules.check import check
from pentad.rewards.functions import BUILT_IN
from pentad.rewards.section import REWARD_NAMES
from pentad.rl.facts import FACTS
from pentad.rl.section import AlgorithmConfig


def test_the_rewards_are_those_that_are_built_in():
    assert set(REWARD_NAMES) == set(BUILT_IN)


def test_null_is_the_default_of_the_algorithm_and_is_recorded_as_null():
    """Another algorithm can be chosen for a recorded config."""
    given = {"name": "gspo", "c_clip": None, "eps_clip_higher": None, "kl_coef": 0.1}
    taken = AlgorithmConfig(**given)
    assert (taken.eps_clip, taken.eps_clip_higher, taken.c_clip) == (3e-4, 4e-4, 3.0)
    assert taken.given == {"kl_coef": 0.1}
    record = taken.model_dump(mode="json")
    assert [key for key, value in record.items() if value is not None] == ["name", "kl_coef"]
    assert AlgorithmConfig(**record) == taken
    other = AlgorithmConfig(**record | {"name": "ppo"})
    assert (other.lam, other.kl_in, other.eps_clip_higher) == (0.95, "reward", None)
    assert AlgorithmConfig(decoupled=True).correction == "tis"


# Few of the overrides at a time, so that lawful combinations are met often.
overrides = st.lists(
    st.sampled_from(sorted(set(AlgorithmConfig.model_fields) - {"name"})),
    unique=True,
    min_size=0,
    max_size=4,
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


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(tuple(FACTS)), overrides, switches, st.integers(1, 4))
def test_switches_reach_the_algorithm(name, chosen, flags, n_samples):
    values = {"algorithm": {"name": name, **chosen}, "gconfig": {"n_samples": n_samples}, **flags}
    values |= {"mode": "hybrid"} if flags.get("max_staleness") else {}
    words = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    reading = read_config(None, [*words, "actor.path=Qwen/Qwen3-0.6B"])
    config, _ = resolve(reading.config)
    own = ("algorithm.", "use_", "gconfig.")
    if any(one.where.startswith(own) for one in [*reading.problems, *check(config)]):
        return
    taken = config.algorithm
    if "use_kl_loss" in flags:
        assert flags["use_kl_loss"] == (taken.kl_coef > 0 and taken.kl_in == "loss")
    if "use_tis" in flags:
        assert flags["use_tis"] == (taken.correction == "tis")
