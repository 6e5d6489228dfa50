"""Offloaded parameters: everything an engine does gives the numbers of one that keeps them."""

import gc

import pytest
import torch
import torch.distributed as dist
from closeness import assert_close
from engine_toys import (
    CONFIG,
    PolicyLoss,
    bring_back,
    keep_state,
    make_engine,
    make_rows,
    train,
)
from sections import engine_settings

from pentad.checkpoint.exports import export_model
from pentad.engine.engine import build_engine
from pentad.engine.section import OptimizerConfig

WIDE = CONFIG | {"hidden_size": 256, "intermediate_size": 1024, "head_dim": 64}
HAS_CUDA = torch.cuda.is_available()
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device"),
        ],
    ),
]


@pytest.fixture(autouse=True)
def no_process_group():
    """Storage makes a process group of one; leave none behind."""
    assert not dist.is_initialized()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def on(device: str, config=CONFIG, **settings):
    """An engine on the device, in fp32 if nothing else is said, so that two can be compared."""
    if device == "cpu":
        return make_engine(max_tokens_per_mb=60, **settings)
    optimizer = OptimizerConfig(lr=1e-2, weight_decay=1.0, gradient_clipping=0.5)
    given = engine_settings(max_tokens_per_mb=60, optimizer=optimizer, **settings)
    return build_engine(config, given, device=device, init_from_scratch=True, seed=3)


@pytest.mark.parametrize("device", DEVICES)
def test_offloaded_training_gives_the_same_numbers(device, tmp_path):
    rows = make_rows()
    plain, away = on(device), on(device, offload_params=True)
    assert {x.device.type for x in away.masters.values()} == {"cpu"}
    plain.save_tag("ref")
    away.save_tag("ref")
    for _ in range(3):
        one, two = train(plain, rows, PolicyLoss(0.2)), train(away, rows, PolicyLoss(0.2))
        assert two.loss == pytest.approx(one.loss, rel=1e-5)
        assert two.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
        assert two.grad_norm > 0.5, "so the step was clipped"
    weights = {name: tensor.cpu() for name, tensor in plain.iter_weights()}
    given = dict(away.iter_weights())
    assert given.keys() == weights.keys()
    for name, tensor in given.items():
        # Sums in another order through AdamW's first steps, which scale rounding up.
        torch.testing.assert_close(tensor.cpu(), weights[name], rtol=1e-3, atol=5e-4)
    for tag in ("actor", "ref"):
        a, b = away.forward(rows, tag), plain.forward(rows, tag)
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x["logprobs"], y["logprobs"], rtol=1e-3, atol=5e-3)
    export_model(away, str(tmp_path / "out"))
    again = build_engine(
        str(tmp_path / "out"), engine_settings(offload_params=True), device=away.device
    )
    for x, y in zip(again.forward(rows), away.forward(rows), strict=True):
        assert_close(x["logprobs"], y["logprobs"])


@pytest.mark.parametrize("device", DEVICES)
def test_offloaded_state_comes_back_bit_by_bit(device):
    rows = make_rows()
    engine = on(device, offload_params=True)
    train(engine, rows, steps=2)
    state = keep_state(engine)
    train(engine, rows)
    after = {name: tensor.clone() for name, tensor in engine.masters.items()}
    bring_back(engine, state)
    train(engine, rows)
    for name, tensor in engine.masters.items():
        assert torch.equal(tensor, after[name]), name


@pytest.mark.parametrize("device", DEVICES)
def test_passes_read_the_memory_that_the_optimizer_steps(device):
    """FSDP2 may pin host memory anew, and would go on with a copy that nobody trains."""
    engine, rows = on(device, offload_params=True), make_rows()
    train(engine, rows)
    for name, parameter in engine.parameters.items():
        assert parameter.to_local().data_ptr() == engine.masters[name].data_ptr(), name
    before = engine.forward(rows)[0]["logprobs"]
    train(engine, rows)
    assert (engine.forward(rows)[0]["logprobs"] - before).abs().max() > 1e-3


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")
def test_little_stays_on_the_device_between_steps():
    """At most the weights that backward left gathered, in the dtype of compute."""
    stays = {}
    for is_offloaded in (True, False):
        before = torch.cuda.memory_allocated()
        engine = on("cuda", WIDE, offload_params=is_offloaded, dtype="bfloat16")
        train(engine, make_rows())
        torch.cuda.synchronize()
        masters = sum(x.numel() * x.element_size() for x in engine.masters.values())
        stays[is_offloaded] = (torch.cuda.memory_allocated() - before) / masters
        del engine
        gc.collect()
    assert stays[True] < 0.6
    assert stays[False] >= 3  # masters and two moments


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_state_that_left_the_device_comes_back_bit_by_bit(device, dtype):
    """Each call brings it back: none is refused and none reads memory that is gone."""
    rows = make_rows()
    # Without checkpointing tags lie on the device.
    stays, leaves = (on(device, dtype=dtype, gradient_checkpointing=False) for _ in range(2))
    for engine in (stays, leaves):
        engine.save_tag("ref")
    for _ in range(2):
        for use in (
            lambda engine: train(engine, rows, PolicyLoss(0.2)).grad_norm,
            lambda engine: engine.forward(rows, "ref")[0]["logprobs"].tolist(),
            lambda engine: [tensor.tolist() for _, tensor in engine.iter_weights()],
            lambda engine: {name: x.tolist() for name, x in engine.state_tensors().items()},
            lambda engine: engine.save_tag("ref"),
        ):
            leaves.offload()
            leaves.begin_step()  # a batch begins while samplers still have the device
            assert leaves.is_offloaded
            assert not any(x.untyped_storage().nbytes() for x in leaves.tensors.values())
            states = leaves.optimizer.state.values()
            assert not any(x.untyped_storage().nbytes() for state in states for x in state.values())
            assert not any(x.untyped_storage().nbytes() for x in leaves.tags.copies["ref"].views)
            assert use(leaves) == use(stays)
            assert not leaves.is_offloaded


def test_weights_that_were_read_from_files_leave_and_come_back(tmp_path):
    """Reading and writing files views the memory as NumPy's, which may then not be resized."""
    rows, folder = make_rows(), str(tmp_path / "model")
    export_model(on("cpu"), folder)
    stays, leaves = (
        build_engine(folder, engine_settings(max_tokens_per_mb=60), device="cpu") for _ in range(2)
    )
    for _ in range(2):
        leaves.offload()
        assert train(leaves, rows).grad_norm == train(stays, rows).grad_norm
        export_model(leaves, folder)
    given = dict(stays.iter_weights())
    assert all(torch.equal(tensor, given[name]) for name, tensor in leaves.iter_weights())
