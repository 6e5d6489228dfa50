"""Training that starts from a Megatron folder: the same weights as from the HF folder."""

import pytest
import torch
from megatron_models import hf_folder, run

from pentad.core.errors import UserError
from pentad.models.families import dims_of
from pentad.models.hf_weights import native_tensors
from pentad.models.registry import build_model, load_model, load_weights


@pytest.fixture
def source(tmp_path):
    return hf_folder(tmp_path / "hf", "qwen2, tied")


def loaded(source, folder, **options):
    """As the engine does it: built from the HF config, filled from the starting folder."""
    model = build_model(dims_of(source), device="cpu", dtype=torch.float32, **options)
    fresh = load_weights(model, folder)
    return native_tensors(model), fresh


@pytest.mark.parametrize("to", ["legacy", "torch_dist"])
def test_a_checkpoint_load_path_gives_the_weights(source, tmp_path, to):
    run(source, tmp_path / "mg", to, tp=2)
    found, fresh = loaded(source, tmp_path / "mg")
    expected = native_tensors(load_model(source))
    assert found.keys() == expected.keys() and not fresh
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_another_model_in_the_converted_folder_is_not_taken_for_this_one(source, tmp_path):
    run(source, tmp_path / "mg", "legacy")
    other = hf_folder(tmp_path / "other", "qwen3")
    with pytest.raises(UserError, match="is not the result of this conversion"):
        run(other, tmp_path / "mg", "legacy")


def test_a_value_head_is_initialised(source, tmp_path):
    run(source, tmp_path / "mg", "torch_dist")
    found, fresh = loaded(source, tmp_path / "mg", value_head=True)
    assert fresh == ["value_head.weight"]
    assert torch.isfinite(found["value_head.weight"]).all() and found["value_head.weight"].any()


def test_the_folder_is_a_model_of_its_own(source, tmp_path):
    """Config and tokenizer lie beside the weights."""
    run(source, tmp_path / "mg", "legacy", pp=2)
    found, expected = (
        native_tensors(load_model(tmp_path / "mg")),
        native_tensors(load_model(source)),
    )
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert (tmp_path / "mg" / "tokenizer_config.json").is_file()
