"""Factors beside the frozen weights in memory: one product computes both, in shared memory too."""

import os
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from pentad.engine.section import LoraConfig  # noqa: E402
from pentad.infer import adapters  # noqa: E402
from pentad.infer.adapters import join_factors  # noqa: E402
from pentad.infer.fuse import FusedAttention, apply_fused, join_all  # noqa: E402
from pentad.models.families import dims_of  # noqa: E402
from pentad.models.hf_weights import native_tensors  # noqa: E402
from pentad.models.joined import join_all_projections, leave_room  # noqa: E402
from pentad.models.lora import (  # noqa: E402
    apply_lora,
    blank_factors,
    factors_of,
    share_weights,
    switched_off,
)
from pentad.models.registry import build_model, create_model  # noqa: E402

CONFIG = {
    "model_type": "qwen2",  # q, k and v have biases
    "vocab_size": 41,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
DIMS = replace(dims_of(CONFIG), head_dim=16)


def attend(_layer, q_THd, k_TKd, v_TKd, **_):
    """A stand-in: what is compared are the projections."""
    group = q_THd.shape[1] // k_TKd.shape[1]
    return q_THd + (k_TKd * v_TKd).repeat_interleave(group, 1)


def outputs(model, num=6):
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 41, (num,), generator=generator).to(DEVICE)
    return model(ids, torch.arange(num, device=DEVICE), attend)


def fill(model, seed=2):
    generator = torch.Generator().manual_seed(seed)
    for factors in factors_of(model):
        for one in factors.parameters():
            one.data.copy_(torch.randn(one.shape, generator=generator) * 0.2)


def adapted(targets, base=None):
    """A model with factors; with the weights of `base`, if it is given."""
    if base is None:
        model = create_model(DIMS, seed=1).to(DEVICE)
        for name, one in model.named_parameters():
            if name.endswith("bias"):
                one.data.normal_(generator=torch.Generator(DEVICE).manual_seed(7))
    else:
        model = build_model(DIMS, device="meta", dtype=torch.float32)
        share_weights(model, base)
        apply_fused(model)
    apply_lora(model, LoraConfig(rank=3, alpha=6.0, targets=targets))
    blank_factors(model.requires_grad_(False), torch.device(DEVICE))
    fill(model)
    return model


@pytest.mark.parametrize("targets", ["all-linear", ["k", "down"], ["gate", "up", "o"]])
@pytest.mark.parametrize("widest", [1024, 2])
def test_a_sampler_computes_as_the_learner_whose_weights_it_shares(targets, widest, monkeypatch):
    monkeypatch.setattr(adapters, "MAX_WIDE_TOKENS", widest)
    learner = adapted(targets)
    leave_room(learner, 3)
    join_all_projections(learner)
    base = native_tensors(learner)
    sampler = adapted(targets, base)
    places = {name: one.data_ptr() for name, one in native_tensors(sampler).items()}
    joined = join_factors(sampler)
    join_all(sampler)
    joined.refresh()
    assert places == {name: one.data_ptr() for name, one in native_tensors(sampler).items()}
    assert all(places[name] == one.data_ptr() for name, one in base.items()), "no copy of the base"
    wanted = outputs(learner)
    torch.testing.assert_close(outputs(sampler), wanted, atol=1e-4, rtol=1e-4)
    with switched_off(factors_of(learner)), switched_off(factors_of(sampler)):
        plain = outputs(learner)
        torch.testing.assert_close(outputs(sampler), plain, atol=1e-4, rtol=1e-4)
    assert (plain - wanted).abs().max() > 0.01
    fill(learner, 3)
    fill(sampler, 3)
    joined.refresh()
    torch.testing.assert_close(outputs(sampler), outputs(learner), atol=1e-4, rtol=1e-4)


def test_a_sampler_of_its_own_makes_the_room():
    learner = adapted("all-linear")
    base = {name: one.clone() for name, one in native_tensors(learner).items()}
    sampler = adapted("all-linear", base)
    join_factors(sampler).refresh()
    join_all(sampler)
    torch.testing.assert_close(outputs(sampler), outputs(learner), atol=1e-4, rtol=1e-4)
    for name, one in native_tensors(sampler).items():
        assert torch.equal(one, base[name]), "the frozen weights are as before"
    (first, *_) = (m for m in sampler.modules() if isinstance(m, FusedAttention))
    assert first.adapter is not None and first.adapter.wide_WI.shape[0] == 4 * 16 + 2 * 32 + 3 * 16
