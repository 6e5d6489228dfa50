"""A learner of one rank publishes to a sampler of its process by native name: the same numbers as
by the names on disk, without a tensor for each of them."""

import asyncio

import pytest
import torch
from engine_toys import CONFIG, make_engine, make_rows, train
from sections import sampler_settings

from pentad.infer.sampler import EmbeddedSampler
from pentad.models.hf_weights import iter_hf
from pentad.models.registry import create_model
from pentad.ops.digest import digest_of
from pentad.sync.publisher import take_snapshot

MOE = CONFIG | {
    "model_type": "qwen3_moe",
    "tie_word_embeddings": False,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}
KINDS = {
    "fp32": {},
    "fp32 masters": {"dtype": "bfloat16", "param_dtype": "float32"},
    "FSDP2": {
        "dtype": "bfloat16",
        "param_dtype": "float32",
        "reshard_after_forward_policy": "always",
    },
    "bf16": {"dtype": "bfloat16", "param_dtype": "bfloat16"},
}


def make_sampler(engine, dtype=None):
    model = create_model(engine.dims, seed=8, dtype=dtype or engine._publish_dtype)
    return EmbeddedSampler(model, sampler_settings(max_running=4))


def install(sampler, weights):
    async def run():
        receipt = await sampler.install(1, weights)
        await sampler.close()
        return receipt

    return asyncio.run(run())


def tensors_of(sampler):
    return dict(iter_hf(sampler.engine.model))


@pytest.mark.parametrize("config", [CONFIG, MOE], ids=["dense", "mixture"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_publish_by_native_name_writes_what_a_publish_by_name_on_disk_writes(kind, config):
    engine = make_engine(config=config, **KINDS[kind])
    train(engine, make_rows())
    one, other = make_sampler(engine), make_sampler(engine)
    snapshot = take_snapshot(1, engine.iter_weights(), copy=False, hashed=False)
    receipt = install(one, snapshot)
    by_name = install(other, list(engine.iter_weights()))
    assert "pairs" not in vars(snapshot.weights), "nothing was cut into pairs"
    assert receipt.is_same and receipt.num_tensors == by_name.num_tensors == snapshot.num_tensors
    mine, theirs = tensors_of(one), tensors_of(other)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert snapshot.digest.hex() == digest_of(mine.items()).hex() == by_name.digest


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_publish_by_native_name_is_seen(kind):
    engine = make_engine(**KINDS[kind])
    sampler = make_sampler(engine)
    model = sampler.engine.model
    sampler.engine.runner.refresh = lambda: model.get_parameter("norm.weight").data[3:4].neg_()
    snapshot = take_snapshot(1, engine.iter_weights(), copy=False, hashed=False)
    receipt = install(sampler, snapshot)
    assert not receipt.is_same and receipt.digest != snapshot.digest.hex()


def test_values_that_are_published_shorter_than_both_sides_hold_them_are_rounded():
    """A sampler in float32 gets the numbers of a bfloat16 publish, not the masters."""
    engine = make_engine(**KINDS["fp32 masters"])
    sampler = make_sampler(engine, torch.float32)
    snapshot = take_snapshot(1, engine.iter_weights(), copy=False, hashed=False)
    receipt = install(sampler, snapshot)
    assert receipt.num_tensors == snapshot.num_tensors
    published = dict(engine.iter_weights())
    for name, tensor in tensors_of(sampler).items():
        assert published[name].dtype == torch.bfloat16
        assert torch.equal(tensor, published[name].float()), name


def test_a_copied_snapshot_takes_the_weights_one_at_a_time(monkeypatch):
    engine = make_engine(**KINDS["fp32 masters"])
    weights = engine.iter_weights()
    snapshot = take_snapshot(1, weights, copy=True)
    assert "pairs" not in vars(weights), "that would be another copy of the model"
    train(engine, make_rows())
    moved = dict(engine.iter_weights())
    kept = dict(snapshot.weights)
    assert kept.keys() == moved.keys()
    assert any(not torch.equal(kept[name], moved[name]) for name in kept)
