"""AdamW's kernel against torch's fused AdamW; interpreted where there is no GPU."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="the kernel needs Triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

from pentad.engine import optim  # noqa: E402
from pentad.engine.section import OptimizerConfig  # noqa: E402
from pentad.ops import adamw_kernel  # noqa: E402


@pytest.mark.skipif(
    DEVICE == "cpu" and not IS_INTERPRETED, reason="needs a GPU, or TRITON_INTERPRET=1"
)
@pytest.mark.parametrize("num", [7, adamw_kernel.BLOCK, 2 * adamw_kernel.BLOCK + 5])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_steps_equal_those_of_torch(num, weight_decay, monkeypatch):
    monkeypatch.setattr(optim, "_is_large", lambda moved: moved[0] is mine["large.weight"])
    torch.manual_seed(0)
    start = torch.randn(2, num, device=DEVICE)
    mine = {"large.weight": start.clone(), "small.weight": start.clone()}
    settings = OptimizerConfig(lr=1e-2, beta2=0.9999, weight_decay=weight_decay)
    optimizer = optim.FusedAdamW(mine, settings, decayed=mine)
    for lr in (1e-2, 1e-3, 2e-3):
        optimizer.lr, gradient = lr, torch.randn(2, num, device=DEVICE)
        for parameter in mine.values():
            parameter.grad = gradient.clone()
        optimizer.step(0.37)
    large, small = (optimizer.state[parameter] for parameter in mine.values())
    assert not torch.equal(mine["large.weight"], start)
    assert torch.equal(large["step"], small["step"])
    torch.testing.assert_close(*mine.values(), rtol=1e-6, atol=1e-7)
    for key in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(large[key], small[key], rtol=1e-6, atol=1e-7)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_large_tensors_of_a_gpu_move_as_a_copy_in_double_does(dtype):
    torch.manual_seed(0)
    shape = (3, optim.LARGE // 2)
    parameter = torch.randn(shape, device=DEVICE, dtype=dtype)
    exact = parameter.double()
    optimizer = optim.FusedAdamW({"weight": parameter}, OptimizerConfig(lr=1e-1))
    truth = optim.FusedAdamW({"weight": exact}, OptimizerConfig(lr=1e-1))
    parameter.grad = torch.randn(shape, device=DEVICE, dtype=dtype)
    exact.grad = parameter.grad.double()
    assert optim._is_large((parameter, parameter.grad, optimizer.state[parameter]))
    optimizer.step(0.37)
    assert not optim._is_large((exact, exact.grad, truth.state[exact]))
    truth.step(0.37)
    error = (parameter - exact).abs() / exact.abs().clamp(min=0.1)
    # bfloat16 goes to either of two neighbours.
    assert error.max() < (2**-7 if dtype == torch.bfloat16 else 1e-5)
