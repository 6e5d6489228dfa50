"""Strict: what the sampler reports is, bit for bit, what the learner computes."""

import functools
from dataclasses import replace

import pytest
import torch
from family_toys import FAMILY_CONFIGS, LAX_FAMILIES
from sections import engine_settings, sampler_settings
from tables import table

from pentad.core.errors import UserError
from pentad.core.layout import Layout
from pentad.core.types import Row
from pentad.engine.engine import build_engine
from pentad.infer.sampler import EmbeddedSampler
from pentad.models.hf_weights import iter_hf
from pentad.models.registry import create_model

DENSE = {
    "model_type": "qwen3",
    "vocab_size": 37,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "architectures": ["Qwen3ForCausalLM"],
    "initializer_range": 0.5,
}
MIXTURE = DENSE | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
SHARED = MIXTURE | {
    "model_type": "qwen2_moe",
    "architectures": ["Qwen2MoeForCausalLM"],
    "shared_expert_intermediate_size": 24,
}
ODD = DENSE | {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 36,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 12,
    "attention_bias": True,
    "tie_word_embeddings": False,
}
GLM = DENSE | {
    "model_type": "glm4_moe",
    "architectures": ["Glm4MoeForCausalLM"],
    "tie_word_embeddings": False,
    "attention_bias": True,
    "n_routed_experts": 7,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
MODELS = {"dense": DENSE, "mixture": MIXTURE, "shared": SHARED, "odd": ODD, "glm_moe": GLM}
STRICT_FAMILIES = [name for name in FAMILY_CONFIGS if name not in LAX_FAMILIES]
MODELS |= {name: FAMILY_CONFIGS[name] for name in STRICT_FAMILIES}


def learner_of(config, **settings):
    options = engine_settings(**({"strict": True, "gradient_checkpointing": False} | settings))
    learner = build_engine(config, options, init_from_scratch=True, seed=3)
    for name, tensor in learner.tensors.items():
        if name.endswith("router.bias"):
            tensor.copy_(torch.linspace(-0.4, 0.4, len(tensor)))
    return learner


def sampler_like(learner, **settings):
    defaults = {"max_running": 64, "kv_cache_tokens": 8192, "block_size": 4, "strict": True}
    model = create_model(learner.dims, seed=1)
    sampler = EmbeddedSampler(model, sampler_settings(**(defaults | settings)), version=0)
    sampler.engine.install(0, list(learner.iter_weights()))
    return sampler


def ragged(make_request, num, n=2, **params):
    return [
        make_request(f"r{i}", [(3 * i + 7 * j) % 37 for j in range(1 + (5 * i) % 23)], n, **params)
        for i in range(num)
    ]


def rows_of(requests, results):
    pairs = [(r, g) for r, gs in zip(requests, results, strict=True) for g in gs]
    rows = [Row(torch.tensor([*r.prompt_ids, *g.ids]), {}) for r, g in pairs]
    reported = [torch.tensor(g.logprobs) for _, g in pairs]
    return rows, reported


def assert_bitwise(learner, rows, reported):
    for output, wanted in zip(learner.forward(rows), reported, strict=True):
        assert torch.equal(output["logprobs"][-len(wanted) :], wanted)


FAMILIES_REST = [(model, "chunked") for model in STRICT_FAMILIES if model != "olmo3"]
CASES = {
    "plain": {},
    "few-rows": {"max_running": 3},
    "chunked": {"max_running": 2, "max_batch_tokens": 3},
    "preempted": {"kv_cache_tokens": 64},
    "prefixes": {"keep_prefixes": True, "block_size": 16},
}


@pytest.mark.parametrize(
    ("model", "case"),
    [
        *((model, case) for model in ("dense", "mixture") for case in CASES),
        *(
            (model, case)
            for model in ("shared", "odd", "glm_moe")
            for case in ("chunked", "preempted")
        ),
        *table([(model, "chunked") for model in STRICT_FAMILIES], FAMILIES_REST),
    ],
)
def test_reported_logprobs_are_the_learners(make_request, generate, model, case):
    settings = CASES[case]
    learner = learner_of(MODELS[model])
    sampler = sampler_like(learner, **settings)
    requests = ragged(make_request, 6, temperature=0.7)
    results = generate(sampler, requests)
    learner_at = learner_of(MODELS[model], temperature=0.7, max_tokens_per_mb=64)
    assert_bitwise(learner_at, *rows_of(requests, results))
    if "kv_cache_tokens" in settings:
        assert sampler.stats()["preemptions"] > 0
    if "max_batch_tokens" in settings:
        assert sampler.stats()["prefill_tokens_computed"] > 3 * 6


def test_the_batch_changes_no_bit(make_request, generate):
    """The same request alone, among others, and found in the cache: ids and log-probs are equal."""
    learner = learner_of(MIXTURE)
    wanted = generate(sampler_like(learner), ragged(make_request, 4)[2:3])[0]
    crowd = generate(sampler_like(learner, max_running=64), ragged(make_request, 12))[2]
    kept = sampler_like(learner, keep_prefixes=True)
    generate(kept, ragged(make_request, 4)[2:3])
    again = generate(kept, ragged(make_request, 4)[2:3])[0]
    assert kept.stats()["prefill_tokens_reused"] > 11  # beyond what the second sample shares
    for other in (crowd, again):
        assert [g.ids for g in other] == [g.ids for g in wanted]
        assert [g.logprobs for g in other] == [g.logprobs for g in wanted]


def test_packing_changes_no_bit(make_request, generate):
    learner = learner_of(DENSE)
    requests = ragged(make_request, 8)
    rows, reported = rows_of(requests, generate(sampler_like(learner), requests))
    for row, wanted in zip(rows, reported, strict=True):
        assert_bitwise(learner, [row], [wanted])
    assert_bitwise(learner, rows[::-1], reported[::-1])


def test_plain_operations_do_not_agree_bit_for_bit(make_request, generate):
    """What strict is for: without it the last bits differ."""
    learner = learner_of(DENSE, strict=False)
    sampler = sampler_like(learner, strict=False)
    requests = ragged(make_request, 8)
    rows, reported = rows_of(requests, generate(sampler, requests))
    outputs = [output["logprobs"] for output in learner.forward(rows)]
    assert any(
        not torch.equal(output[-len(wanted) :], wanted)
        for output, wanted in zip(outputs, reported, strict=True)
    )


class Likelihood:
    needs_entropy = False
    columns = ("weights",)

    def __call__(self, outputs, columns):
        return -(outputs.logprobs_T * columns["weights"]).sum() + 0.1 * outputs.entropy_T.sum(), {}


def loss_and_gradients(model, **settings):
    torch.manual_seed(0)
    rows = [
        Row(torch.randint(0, 37, (n,)), {"weights": torch.ones(n)}, count=float(n))
        for n in (5, 23, 40, 1)
    ]
    learner = learner_of(MODELS[model], **settings)
    learner.begin_step()
    seen = learner.accumulate(rows, Likelihood())
    return seen.loss_sum, {name: p.grad.clone() for name, p in learner.parameters.items()}


@functools.cache
def plain_gradients(model):
    return loss_and_gradients(model, strict=False)


RECOMPUTED = [(model, mode) for model in MODELS for mode in ("none", "full", "selective")]
RECOMPUTED_REST = [
    (model, mode) for model, mode in RECOMPUTED if model in FAMILY_CONFIGS and mode != "selective"
]
"""What is computed again, and what is not, is the same of every family's operations."""


@pytest.mark.parametrize(("model", "recompute"), table(RECOMPUTED, RECOMPUTED_REST))
def test_gradients_are_those_of_the_plain_operations(model, recompute):
    modes = {"gradient_checkpointing": recompute != "none", "ac_mode": recompute}
    loss, plain = plain_gradients(model)
    strict_loss, strict = loss_and_gradients(model, strict=True, **modes)
    assert strict_loss == pytest.approx(loss, rel=1e-5)
    for name, gradient in plain.items():
        # fp32 sums of some hundred terms, in other orders
        torch.testing.assert_close(
            strict[name], gradient, rtol=2e-4, atol=2e-4 * float(gradient.abs().max())
        )


def test_the_gradient_pass_sees_the_same_logprobs(make_request, generate):
    """So the importance ratio of fresh samples is exactly 1."""
    learner = learner_of(MIXTURE)
    requests = ragged(make_request, 5)
    rows, reported = rows_of(requests, generate(sampler_like(learner), requests))
    rows = [Row(r.ids, {"weights": torch.ones(len(r.ids))}, count=1.0) for r in rows]
    learner.begin_step()
    seen = learner.accumulate(rows, Likelihood())
    for output, wanted in zip(seen.outputs, reported, strict=True):
        assert torch.equal(output["logprobs"][-len(wanted) :], wanted)


def test_layouts_that_cut_layers_are_refused():
    from pentad.engine.predictor import check_strict

    check_strict(Layout())
    with pytest.raises(UserError, match="tp = 2: layers split over ranks"):
        check_strict(replace(Layout(), tp=2))


def test_windows_are_exact_too(make_request, generate, windowed_dims):
    model = create_model(windowed_dims, seed=1)
    given = {"strict": True, "kv_cache_tokens": 4096, "block_size": 4, "max_running": 8}
    sampler = EmbeddedSampler(model, sampler_settings(**given), version=0)
    requests = ragged(make_request, 5)
    results = generate(sampler, requests)
    chunked = EmbeddedSampler(
        create_model(windowed_dims, seed=1),
        sampler_settings(**given | {"max_running": 2, "max_batch_tokens": 3}),
        version=0,
    )
    assert dict(iter_hf(chunked.engine.model)).keys() == dict(iter_hf(model)).keys()
    again = generate(chunked, requests)
    assert [[g.logprobs for g in gs] for gs in again] == [
        [g.logprobs for g in gs] for gs in results
    ]
