"""Qwen3 through our map and code is transformers' Qwen3: logits, gradients, folders both ways."""

import pytest
import torch
import transformers
from closeness import assert_close

from pentad.models.decoder import causal_attend
from pentad.models.families import map_of
from pentad.models.hf_weights import hf_metadata, install_hf, iter_hf
from pentad.models.registry import create_model, load_model, save_model
from pentad.weights import transfer

# All dims distinct and odd where they may be; head_dim is not hidden / heads; four kv groups.
CONFIG = dict(
    vocab_size=211,
    hidden_size=60,
    intermediate_size=77,
    num_hidden_layers=3,
    num_attention_heads=12,
    num_key_value_heads=4,
    head_dim=14,
    max_position_embeddings=512,
)


def randomise(model):
    """Every parameter, norms included: at their initial ones, swapped norms would go unseen."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.copy_(noise if parameter.dim() > 1 else noise + 0.7)


@pytest.fixture(params=["untied", "tied", "bias"])
def pair(request, tmp_path):
    extra = {"tie_word_embeddings": request.param == "tied"}
    config = transformers.Qwen3Config(
        **CONFIG, **extra, attention_bias=request.param == "bias", rope_theta=5e4
    )
    theirs = transformers.Qwen3ForCausalLM(config)
    randomise(theirs)
    theirs.save_pretrained(tmp_path / "hf")
    return theirs, load_model(tmp_path / "hf"), tmp_path


def test_logits_and_gradients_equal_transformers(pair):
    theirs, ours, _ = pair
    ids = torch.randint(0, 211, (29,), generator=torch.Generator().manual_seed(1))
    logits = ours.logits(ours(ids, torch.arange(29), causal_attend))
    expected = theirs(ids[None]).logits[0]
    assert_close(logits, expected)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    (logits * weight).sum().backward()
    (expected * weight).sum().backward()
    grads = {name: parameter.grad for name, parameter in ours.named_parameters()}
    ours_by_name = dict(transfer.iter_sources(grads, map_of(ours.dims)))
    for name, parameter in theirs.named_parameters():
        scale = parameter.grad.abs().max()
        error = (ours_by_name[name] - parameter.grad).abs().max() / scale
        assert error < 2e-5, f"{name}: {error}"


def test_a_saved_folder_is_the_loaded_one(pair):
    theirs, ours, folder = pair
    save_model(ours, folder / "out", source_folder=folder / "hf")
    again = transformers.AutoModelForCausalLM.from_pretrained(folder / "out")
    assert type(again) is type(theirs)
    state = again.state_dict()
    assert state.keys() == theirs.state_dict().keys()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(state[name], tensor), name


def test_live_install_takes_every_tensor_once(pair):
    _, ours, _ = pair
    for weights in (iter_hf(ours), list(iter_hf(ours))):
        other = create_model(ours.dims, seed=5)
        assert install_hf(other, weights) == len(hf_metadata(ours))
        for name, tensor in ours.state_dict().items():
            assert torch.equal(other.state_dict()[name], tensor), name


def test_metadata_announces_what_iteration_yields(pair):
    _, ours, _ = pair
    announced = [(n, i.shape, i.dtype) for n, i in hf_metadata(ours, torch.bfloat16).items()]
    yielded = [(n, tuple(t.shape), t.dtype) for n, t in iter_hf(ours, torch.bfloat16)]
    assert announced == yielded
