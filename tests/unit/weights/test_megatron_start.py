"""Training that starts from a Megatron folder: the same weights as from the HF folder."""

import pytest
import torch
from megatron_models import hf_folder, run

from pentad.core.errors import UserError
from pentad.models.conversion import starting_folder
from pentad.models.exchange import native_tensors
from pentad.models.families import dims_of
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
    folder = starting_folder(str(source), checkpoint_load_path=str(tmp_path / "mg"))
    assert folder == tmp_path / "mg"
    found, fresh = loaded(source, folder)
    expected = native_tensors(load_model(source))
    assert found.keys() == expected.keys() and not fresh
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_without_one_the_hf_folder_gives_them(source):
    assert starting_folder(str(source)) == source


def test_the_first_run_converts_and_the_second_finds(source, tmp_path):
    settings = {
        "use_hf_ckpt": True,
        "save_path": str(tmp_path / "mg"),
        "model_type": "qwen2.5",
        "tp": 2,
        "pp": 2,
    }
    folder = starting_folder(str(source), **settings)
    times = {path: path.stat().st_mtime_ns for path in folder.rglob("*.pt")}
    assert len(times) == 4
    assert starting_folder(str(source), **settings) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.pt")} == times
    found, _ = loaded(source, folder)
    expected = native_tensors(load_model(source))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_another_model_in_the_converted_folder_is_not_taken_for_this_one(source, tmp_path):
    starting_folder(str(source), use_hf_ckpt=True, save_path=str(tmp_path / "mg"))
    other = hf_folder(tmp_path / "other", "qwen3")
    with pytest.raises(UserError, match="holds something else than this conversion"):
        starting_folder(str(other), use_hf_ckpt=True, save_path=str(tmp_path / "mg"))


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
