"""What is laid around blocks: recomputation draws what forward drew, and compiling is announced."""

import logging

import pytest
import torch
from torch import nn

from pentad.core.settings import EngineSettings
from pentad.parallel.blocks import apply_to_blocks, compile_run, compiling

CPU = torch.device("cpu")


class Block(nn.Module):
    """Draws in three ways, between products that selective checkpointing keeps."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x_TD):
        h = nn.functional.dropout(self.up(x_TD), 0.5)
        h = h * torch.rand_like(h)
        return x_TD + self.down(h) * torch.bernoulli(torch.full((8,), 0.5))


def gradients(**settings):
    torch.manual_seed(0)
    blocks = nn.ModuleList([Block(), Block()])
    apply_to_blocks(dict(enumerate(blocks)), EngineSettings(**settings), CPU)
    x_TD = torch.randn(5, 8)
    torch.manual_seed(1)
    for block in blocks:
        x_TD = block(x_TD)
    torch.randn(3)  # others draw between forward and backward
    x_TD.square().sum().backward()
    return [parameter.grad for parameter in blocks.parameters()], torch.get_rng_state()


@pytest.mark.parametrize(
    "settings",
    [{"ac_mode": "full"}, {"ac_mode": "selective", "ac_selective": "op"}, {"ac_debug": True}],
    ids=str,
)
def test_what_a_block_draws_is_drawn_again_when_it_is_recomputed(settings):
    plain, after = gradients(gradient_checkpointing=False)
    found, state = gradients(gradient_checkpointing=True, **settings)
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
    assert torch.equal(after, state), "and the generator is left as it was"


def test_compiling_says_that_it_runs_and_how_long_it_took(caplog):
    caplog.set_level(logging.INFO)
    compile_run(torch.sin, backend="eager")
    torch._dynamo.reset()  # it ends the watch of what was compiled before
    compiling.tell()
    caplog.clear()
    run = compile_run(lambda x: x.sin() + 1, backend="eager")
    run(torch.randn(4))
    compiling.tell()
    compiling.tell()
    begun, done = caplog.records
    assert begun.getMessage() == "compiling the model's blocks ..."
    assert done.getMessage().startswith("compiled the model's blocks in ")
    assert all(record.is_notice for record in (begun, done))
