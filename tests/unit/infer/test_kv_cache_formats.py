"""A key-value cache in 8 bits: near what the model computes, and the same in every batch."""

from dataclasses import replace

import pytest
import torch
from closeness import ROUNDING


def load(make_request, dims):
    prompts = [[(7 * i + j) % dims.vocab_size for j in range(3 + 5 * i)] for i in range(6)]
    return [make_request(f"r{i}", ids, n=3, max_new_tokens=20) for i, ids in enumerate(prompts)]


def gaps(sampler, requests, results, forced_logits):
    """Of every drawn token, the sampler's log-prob less that of one plain forward."""
    found = []
    for request, generations in zip(requests, results, strict=True):
        for g in generations:
            logits = forced_logits(sampler.engine.model, request.prompt_ids, g.ids)
            wanted = logits.log_softmax(-1).gather(1, torch.tensor(g.ids)[:, None])[:, 0]
            found.append(torch.tensor(g.logprobs) - wanted)
    return torch.cat(found)


def test_log_probs_are_near_and_int8_is_nearer_than_fp8(
    make_sampler, make_request, generate, teacher_forced_logits, tiny_dims
):
    dims = replace(tiny_dims, head_dim=32)
    requests = load(make_request, dims)
    mean = {}
    for form in ("auto", "int8", "fp8"):
        sampler = make_sampler(dims, kv_cache_dtype=form)
        results = generate(sampler, requests)
        difference = gaps(sampler, requests, results, teacher_forced_logits)
        mean[form] = float(difference.abs().mean())
    assert mean["auto"] < 10 * ROUNDING
    # Half a step is 1/254 of a head's largest number, and a sixteenth of each: these logits have a
    # spread of about 5, and two layers.
    assert 1e-4 < mean["int8"] < 0.02 < 4 * mean["int8"]
    assert 2 * mean["int8"] < mean["fp8"] < 0.2


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_chunks_and_preemptions_read_what_was_stored(make_sampler, make_request, generate, form):
    """The same requests alone, side by side, in chunks, and with blocks that run short. A prefill
    attends to its own keys before they are stored, so whoever is computed again differs a bit."""
    request = make_request("a", [1, 2, 3, 4, 5, 6, 7, 8, 9], n=2, max_new_tokens=12)
    others = [make_request(f"b{i}", range(3, 9), max_new_tokens=12) for i in range(3)]
    sizes = {"whole": {}, "short": {"kv_cache_tokens": 44}, "chunks": {"max_batch_tokens": 64}}
    found = {}
    for name, size in sizes.items():
        sampler = make_sampler(kv_cache_dtype=form, **size)
        results = generate(sampler, [request, *others])
        found[name] = [logprob for g in results[0] for logprob in g.logprobs[:2]]
        assert (sampler.stats()["preemptions"] > 0) == (name == "short")
    for name in ("short", "chunks"):
        assert found[name] == pytest.approx(found["whole"], abs=0.3)
    assert found["chunks"] == pytest.approx(found["whole"], abs=100 * ROUNDING)


def test_the_cache_takes_a_quarter_of_float32(make_sampler, tiny_dims):
    dims = replace(tiny_dims, head_dim=32)
    size = {"kv_cache_tokens": None, "kv_cache_gb": 2**-10}
    blocks = {
        form: make_sampler(dims, kv_cache_dtype=form, **size).engine.pool.num_blocks
        for form in ("auto", "int8")
    }
    assert blocks["int8"] // blocks["auto"] == 128 // 36
