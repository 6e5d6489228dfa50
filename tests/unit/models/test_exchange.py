"""Weights in and out of a model: all or nothing, each tensor once, on any shard."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from pentad.core.dims import ModelDims
from pentad.core.errors import UserError
from pentad.models.hf_weights import (
    box_of,
    hf_metadata,
    install_hf,
    iter_hf,
    native_shards,
    rows_of,
)
from pentad.models.registry import create_model, load_weights, save_model
from pentad.ops.digest import digest_of

DIMS = ModelDims(
    family="qwen3_moe",
    vocab_size=31,
    hidden_size=20,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=4,
    intermediate_size=13,
    qk_norm=True,
    num_experts=3,
    num_experts_per_token=2,
    moe_intermediate_size=7,
    moe_layers=(False, True),
)
TIED = ModelDims(
    family="llama",
    vocab_size=31,
    hidden_size=20,
    num_layers=1,
    num_heads=6,
    num_kv_heads=2,
    head_dim=4,
    intermediate_size=13,
    tie_embeddings=True,
)


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def spoiled(kind, pairs):
    """A set of weights with one fault; the sentence it must cause."""
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    if kind == "missing":
        return [pair for pair in pairs if pair[0] != name], f"{name}: missing"
    if kind == "unknown":
        return [
            *pairs,
            ("model.extra", torch.ones(3)),
        ], "model.extra: no rule of the map matches it"
    if kind == "shape":
        wrong = [(n, t[:-1] if n == name else t) for n, t in pairs]
        return wrong, rf"{name}: shape \[6, 20\], but the config makes it \[7, 20\]"
    return [*pairs, (name, dict(pairs)[name])], f"{name}: given twice"


@pytest.mark.parametrize("kind", ["missing", "unknown", "shape", "twice"])
def test_a_faulty_list_is_refused_before_anything_is_written(kind):
    source, target = create_model(DIMS, seed=1), create_model(DIMS, seed=2)
    pairs, sentence = spoiled(kind, list(iter_hf(source)))
    before = state(target)
    with pytest.raises(UserError, match=sentence):
        install_hf(target, pairs)
    assert equal(state(target), before)


def test_a_tied_head_that_is_sent_must_be_the_embedding():
    source, target = create_model(TIED, seed=1), create_model(TIED, seed=2)
    pairs = list(iter_hf(source))
    assert "lm_head.weight" not in dict(pairs)
    table = dict(pairs)["model.embed_tokens.weight"]
    good = [("lm_head.weight", table), *pairs]
    assert install_hf(target, good) == len(pairs)
    assert equal(state(target), state(source))
    bad = [("lm_head.weight", table + 1), *pairs]
    with pytest.raises(UserError, match="lm_head.weight: differs from model.embed_tokens.weight"):
        install_hf(target, bad)


def test_the_digest_of_what_left_is_the_digest_of_what_arrived():
    source, target = create_model(DIMS, seed=1), create_model(DIMS, seed=2)
    assert digest_of(iter_hf(source)).hex() != digest_of(iter_hf(target)).hex()
    install_hf(target, iter_hf(source))
    assert digest_of(iter_hf(source)).hex() == digest_of(iter_hf(target)).hex()


def test_wrapped_blocks_keep_their_names():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain, wrapped = create_model(DIMS, seed=1), create_model(DIMS, seed=1)
    for i, block in wrapped.layers.items():
        wrapped.layers[i] = checkpoint_wrapper(torch.compile(block))
    assert list(hf_metadata(wrapped)) == list(hf_metadata(plain))
    assert digest_of(iter_hf(wrapped)).hex() == digest_of(iter_hf(plain)).hex()


@pytest.mark.parametrize(("dp", "tp"), [(1, 2), (2, 2), (3, 2), (2, 4)])
def test_rows_are_those_of_tensor_parallel_chunks_cut_again_by_fsdp(dp, tp):
    placements = (_StridedShard(0, split_factor=tp), Shard(0))
    for size in range(tp, 12 * tp, tp):  # tensor parallelism cuts evenly, fsdp need not
        for tp_rank, rows in enumerate(torch.arange(size).chunk(tp)):
            for dp_rank in range(dp):
                parts = rows.chunk(dp)
                expected = parts[dp_rank].tolist() if dp_rank < len(parts) else []
                cuts = list(zip(placements, (dp, tp), (dp_rank, tp_rank), strict=True))
                assert list(range(*rows_of(size, 0, cuts))) == expected


def test_scattered_rows_are_no_box():
    cuts = [(Shard(0), 2, 0), (_StridedShard(0, split_factor=2), 2, 0)]
    with pytest.raises(AssertionError, match="scatter the rows"):
        rows_of(8, 0, cuts)


@pytest.fixture
def last_of_four():
    """This process as rank 3 of four that never talk: enough to know who holds what."""
    if torch.distributed.is_initialized():  # the group of one that an engine of another test made
        torch.distributed.destroy_process_group()
    torch.distributed.init_process_group("fake", rank=3, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (2, 2))
    torch.distributed.destroy_process_group()


PLACEMENTS = [
    (Shard(0), Replicate()),
    (Replicate(), Shard(0)),
    (Shard(0), Shard(1)),
    (Shard(1), Shard(0)),
    (Replicate(), Replicate()),
]


@pytest.mark.parametrize("placements", PLACEMENTS)
def test_a_rank_reads_exactly_its_shard(last_of_four, placements, tmp_path):
    whole, model = create_model(DIMS, seed=1), create_model(DIMS, seed=2)
    save_model(whole, tmp_path / "hf", hf_config={"model_type": "qwen3_moe"})
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            local, spots = parameter.detach(), []
            for placement in placements:
                cuts = isinstance(placement, Shard) and placement.dim < parameter.dim()
                spots.append(placement if cuts else Replicate())
                if cuts:
                    dim = placement.dim
                    local = local.narrow(dim, -(-local.shape[dim] // 2), local.shape[dim] // 2)
            nans = torch.full_like(local, float("nan"))
            sizes = {"shape": parameter.shape, "stride": parameter.stride()}
            shard = DTensor.from_local(nans, last_of_four, spots, run_check=False, **sizes)
            setattr(module, name, torch.nn.Parameter(shard))
    load_weights(model, tmp_path / "hf")
    for name, shard in native_shards(model).items():
        expected = whole.state_dict()[name]
        for placement in placements:
            if isinstance(placement, Shard) and placement.dim < expected.dim():
                expected = expected.narrow(
                    placement.dim,
                    -(-expected.shape[placement.dim] // 2),
                    expected.shape[placement.dim] // 2,
                )
        assert torch.equal(shard.tensor, expected), name


def test_a_plain_tensor_is_whole():
    assert box_of(torch.ones(3, 4)) == ((0, 3), (0, 4))
