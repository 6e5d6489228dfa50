"""Blocks whose gated activations have a kernel for their gradient: numbers, and what is kept.

On a CPU the kernel is interpreted and code is traced, not generated.
"""

import os
from itertools import product

import pytest
import torch
import torch._dynamo
from sections import engine_keys
from tables import table
from torch import nn
from torch._dynamo.backends.debugging import aot_eager_decomp_partition

from pentad.models.families import dims_of
from pentad.models.layers import Mlp
from pentad.models.moe import Moe
from pentad.ops import gated
from pentad.parallel import blocks

gated_kernel = pytest.importorskip("pentad.ops.gated_kernel", reason="the kernel needs Triton")
DENSE = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
MIXTURE = DENSE | {
    "model_type": "qwen2_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 80,
}
CONFIGS = {"dense": DENSE, "mixture": MIXTURE}
LAUNCHES = {"dense": [False] * 2, "mixture": [False, False, True, True]}
"""Of the kernel in backward, of two layers: with weights for experts, without for shared ones."""
MODES = {
    "none": {"gradient_checkpointing": False},
    "op": {"ac_mode": "selective", "ac_selective": "op"},
    "full": {"ac_mode": "full"},
    "budget": {"ac_mode": "memory_budget", "ac_memory_budget": 0.5},
}
CASES = list(product(CONFIGS, MODES, ("eager", "compiled")))
SLOW = [case for case in CASES if case[0] == "mixture" or case[2] == "eager"]
SLOW.remove(("mixture", "op", "compiled"))
SLOW.remove(("dense", "none", "eager"))
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Block(nn.Module):
    """A residual feed-forward: of a mixture the experts are given."""

    def __init__(self, ffn: nn.Module) -> None:
        super().__init__()
        self.ffn = ffn

    def forward(self, x_TD, chosen_Tk):
        if chosen_Tk is None:
            return x_TD + self.ffn(x_TD)
        return x_TD + self.ffn(x_TD, chosen_Tk)[0]


def make(kind, device, dtype) -> nn.ModuleList:
    torch.manual_seed(0)
    dims = dims_of(CONFIGS[kind])
    found = nn.ModuleList([Block(Mlp(dims) if kind == "dense" else Moe(dims)) for _ in range(2)])
    for parameter in found.parameters():
        nn.init.normal_(parameter, std=0.1)
    return found.bfloat16().to(device, dtype)  # any dtype has the same numbers


def gradients(layers, kind) -> tuple[dict[str, torch.Tensor], int]:
    """Of the input and all parameters, and the bytes kept from forward to backward."""
    like = next(layers.parameters())
    seed = torch.Generator().manual_seed(1)
    x_TD = torch.randn(16, 64, generator=seed).bfloat16().to(like).requires_grad_()
    chosen_Tk = None
    if kind == "mixture":
        chosen_Tk = torch.rand(16, 4, generator=seed).argsort(-1)[:, :2].to(like.device)
    kept: dict[int, int] = {}

    def note(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        y_TD = x_TD
        for layer in layers:
            y_TD = layer(y_TD, chosen_Tk)
        loss = y_TD.float().square().mean()
    num_bytes = sum(kept.values())
    loss.backward()
    found = {name: p.grad.float().cpu() for name, p in layers.named_parameters()}
    return found | {"x": x_TD.grad.float().cpu()}, num_bytes


@pytest.fixture
def launches(monkeypatch):
    """Whether weights were given, of each run of the kernel."""
    seen: list[bool] = []
    launch = gated_kernel._launch

    def counted(grad, h, weights, out, dweights):
        seen.append(weights is not None)
        launch(grad, h, weights, out, dweights)

    monkeypatch.setattr(gated_kernel, "_launch", counted)
    return seen


def set_up(monkeypatch, device) -> None:
    if device == "cuda":
        return
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs TRITON_INTERPRET=1")
    compile_ = torch.compile
    monkeypatch.setattr(blocks, "COMPILED_ON", {"cpu"})
    monkeypatch.setattr(
        torch,
        "compile",
        lambda run, *, backend, **how: compile_(run, backend=aot_eager_decomp_partition, **how),
    )
    monkeypatch.setattr(gated, "has_kernel", lambda h: True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("kind", "mode", "how"), table(CASES, SLOW))
def test_gradients_are_those_of_plain_fp32(monkeypatch, launches, kind, mode, how, device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    compiles = how == "compiled"
    if mode == "budget" and (device == "cpu" or not compiles):
        pytest.skip("the compiler of a GPU keeps to budgets")
    true, _ = gradients(make(kind, "cpu", torch.float32), kind)
    assert not launches
    set_up(monkeypatch, device)
    kept = {}
    settings = engine_keys(enable_compile=compiles, **MODES[mode])
    for has_kernel in (True, False):
        torch._dynamo.reset()
        layers = make(kind, device, torch.bfloat16)
        blocks.apply_to_blocks(dict(enumerate(layers)), settings, torch.device(device))
        if not has_kernel:
            monkeypatch.setattr(gated, "has_kernel", lambda h: False)
        launches.clear()
        mine, kept[has_kernel] = gradients(layers, kind)
        assert sorted(launches) == has_kernel * LAUNCHES[kind]
        for name, gradient in true.items():
            error = (mine[name] - gradient).norm() / gradient.norm()
            assert error < 0.03, f"{name}: relative error {error:.2e}"
    # Not more is kept, but the weights of pairs; eager dense layers do without silu(gate).
    assert kept[True] <= 1.005 * kept[False] or mode == "budget"
    assert compiles or mode != "none" or kept[True] < kept[False]
