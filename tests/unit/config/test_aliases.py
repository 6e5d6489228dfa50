"""Aliases are read as the keys that they stand for, and a config does not have them."""

import pytest

from pentad.config.aliases import TABLE, config_from_record
from pentad.config.describe import fields
from pentad.config.load import dump_config, read_config
from pentad.config.rules.checkpoint import changed_keys
from pentad.config.schema import ALIASES, Config
from pentad.core.errors import UserError
from pentad.planner.prepare import prepare

MODEL = "actor.path=Qwen/Qwen3-0.6B"
CONTRADICTED = [
    (["use_kl_loss=true", "algorithm.kl_coef=0"], "use_kl_loss = true", "algorithm.kl_coef = 0"),
    (
        ["use_kl_loss=true", "algorithm.kl_in=reward"],
        "use_kl_loss = true",
        "algorithm.kl_in = reward",
    ),
    (
        ["use_kl_loss=false", "algorithm.kl_coef=0.01"],
        "use_kl_loss = false",
        "algorithm.kl_coef = 0.01",
    ),
    (["use_tis=true", "algorithm.correction=mis"], "use_tis = true", "algorithm.correction = mis"),
    (
        ["use_tis=false", "algorithm.correction=tis"],
        "use_tis = false",
        "algorithm.correction = tis",
    ),
    (
        ["parallelism.tensor_parallel=2", "allocation_mode=embedded:d1|archon:d2"],
        "parallelism = {data_parallel: 1, tensor_parallel: 2, pipeline_parallel:...",
        "is archon:d1p1t2 (2 devices), but allocation_mode has archon:d2",
    ),
    (
        ["allocation_mode=embedded:d1+archon:d1", "resource={actor: [1, 4], rollout: [1, 1]}"],
        "resource.actor = [1, 4]",
        "is 4 devices, but archon:d1 has 1",
    ),
]


@pytest.mark.parametrize(("words", "where", "rule"), CONTRADICTED)
def test_an_alias_that_contradicts_its_key_is_one_problem_with_both_values(words, where, rule):
    (problem,) = read_config(None, words).problems
    assert problem.where == where
    assert rule in problem.rule and problem.remedy


@pytest.mark.parametrize(
    ("words", "notes"),
    [
        (
            ["use_kl_loss=true", "use_tis=true"],
            [
                "algorithm.kl_in = loss: use_kl_loss = true",
                "algorithm.kl_coef = 0.001: use_kl_loss = true",
                "algorithm.correction = tis: use_tis = true",
            ],
        ),
        (["resource={actor: [1, 2], rollout: [1, 1]}"], ["embedded:d1+archon:d2: from resource"]),
        (["use_tis=null", "resource=null", "parallelism=null", "use_kl_loss=null"], []),
    ],
)
def test_what_an_alias_was_read_as_is_noted(words, notes):
    reading = read_config(None, words)
    assert [note.removeprefix("allocation_mode = ") for note in reading.notes] == notes
    assert not ALIASES & reading.config.model_dump().keys()
    assert not any(f"\n{name}:" in dump_config(reading.config) for name in ALIASES)


def test_every_alias_is_a_documented_key_and_stands_for_keys_of_a_config():
    assert {alias.name for alias in TABLE} == ALIASES
    for alias in TABLE:
        assert fields()[alias.name].description
        assert set(alias.stands_for) <= fields().keys() - ALIASES


def test_of_an_alias_that_cannot_be_read_the_keys_are_not_known():
    reading = read_config(None, ["use_kl_loss=perhaps", "resource.actor=[1]", "ref.path=x"])
    assert {"algorithm.kl_coef", "algorithm.kl_in", "allocation_mode"} <= reading.bad
    with pytest.raises(UserError) as caught:
        prepare(None, [MODEL, "use_kl_loss=perhaps", "ref_update_interval=5"])
    (problem,) = caught.value.problems
    assert problem.where.startswith("use_kl_loss = perhaps")


def test_a_problem_of_the_key_names_the_alias_that_was_written():
    with pytest.raises(UserError) as caught:
        prepare(None, [MODEL, "updates_per_batch=2", "use_tis=false"])
    (problem,) = caught.value.problems
    assert problem.where == "use_tis = false"


def test_a_record_that_has_aliases_beside_their_keys_is_read_and_compared():
    values = Config().model_dump(mode="json")
    older = values | {"use_kl_loss": True, "resource": {"actor": [1, 1], "rollout": [1, 1]}}
    assert config_from_record(older) == Config()
    assert list(changed_keys(older, values)) == []
