import pytest
from pydantic import ValidationError

from pentad.config.describe import fields, section_of, takes
from pentad.config.other_systems import SPELLED, is_block
from pentad.config.schema import Config


def test_every_key_is_documented_in_a_sentence():
    for key, field in fields().items():
        text = field.description
        assert text, f"{key} has no text"
        assert text.endswith("."), f"{key}: {text}"


def test_every_key_can_be_left_out_except_inside_resource():
    required = [key for key, field in fields().items() if field.is_required()]
    assert required == ["rollout.workflows.workflow", "resource.actor", "resource.rollout"]
    assert Config() == Config.model_validate({})


def test_a_config_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        Config().seed = 3
    with pytest.raises(ValidationError, match="frozen"):
        Config().actor.optimizer.lr = 3.0


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("I1F1B", "Interleaved1F1B"),
        ("IZB", "InterleavedZeroBubble"),
        ("ZBV", "ZBVZeroBubble"),
        ("1F1B", "1F1B"),
    ],
)
def test_schedules_have_short_names(short, long):
    config = Config.model_validate({"actor": {"archon": {"pp_schedule": short}}})
    assert config.actor.archon.pp_schedule == long


def test_dtypes_have_short_names():
    config = Config.model_validate({"actor": {"dtype": "bf16", "param_dtype": "fp32"}})
    assert (config.actor.dtype, config.actor.param_dtype) == ("bfloat16", "float32")


@pytest.mark.parametrize(
    "values",
    [
        {"seed": True},
        {"gconfig": {"temperature": True}},
        {"actor": {"mb_spec": {"n_mbs": True}}},
        {"user": True},
        {"mode": True},
    ],
)
def test_true_is_not_a_number_nor_a_name(values):
    with pytest.raises(ValidationError):
        Config.model_validate(values)


def test_infinite_numbers_are_refused():
    for number in (float("inf"), float("nan")):
        with pytest.raises(ValidationError):
            Config.model_validate({"actor": {"optimizer": {"lr": number}}})


def test_a_stride_may_be_written_as_text():
    config = Config.model_validate({"actor": {"archon": {"ac_selective": "2"}}})
    assert config.actor.archon.ac_selective == 2


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("seed", "an integer of at least 0"),
        ("mode", "colocate, hybrid, async or null"),
        ("actor.pad_to_maximum", "auto, true or false"),
        ("actor.archon.ac_selective", "op, an integer of at least 1 or null"),
        ("actor.optimizer.beta1", "a number of at least 0 and below 1"),
        ("gconfig.top_p", "a number above 0 and at most 1"),
        ("gconfig.stop", "a list of texts"),
        ("gconfig.stop_token_ids", "a list of integers of at least 0"),
        ("resource.actor", "a list of 2 integers of at least 1"),
        ("telemetry.wandb", "a block of keys or null"),
        ("user", "text or null"),
    ],
)
def test_what_a_key_takes_is_put_into_words(key, words):
    assert takes(fields()[key]) == words


def test_what_is_called_unknown_is_unknown_and_what_is_pointed_to_exists():
    for key in SPELLED:
        assert key not in fields(), key
        block = key.rpartition(".")[0]
        is_asked = not block or is_block(block) or section_of(fields()[block].annotation)
        assert is_asked, f"{key} can never be asked for"
    for target in SPELLED.values():
        for name in target.split(" and "):
            key, _, value = name.partition(": ")
            assert key in fields(), target
            assert not value or value in takes(fields()[key])
