"""Pairs on a stream of their own: what one GPU can show of it, with a slow network."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pentad.models.families import dims_of
from pentad.models.moe import Moe
from pentad.ops.meter import Meter
from pentad.parallel import experts
from pentad.parallel.experts import ExpertDispatch, SideStream
from pentad.parallel.mesh import Axis

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CONFIG = {
    "model_type": "qwen2_moe",
    "vocab_size": 64,
    "hidden_size": 1024,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 32768,
}
TOKENS = 16384


@pytest.fixture
def group(tmp_path):
    """An expert group of one rank over NCCL: what is sent comes back to the sender."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    group = dist.group.WORLD
    yield Axis(size=1, rank=0, group=group)
    dist.destroy_process_group()


class SlowExchange(torch.autograd.Function):
    """NCCL's exchange with the only rank there is, after a while on the stream of the caller."""

    cycles = 0

    @staticmethod
    def forward(ctx, x, axis, out_sizes, in_sizes):
        ctx.axis, ctx.out_sizes, ctx.in_sizes = axis, out_sizes, in_sizes
        return SlowExchange.send(x, axis, out_sizes, in_sizes)

    @staticmethod
    def backward(ctx, grad):
        return SlowExchange.send(grad, ctx.axis, ctx.in_sizes, ctx.out_sizes), None, None, None

    @staticmethod
    def send(x, axis, out_sizes, in_sizes):
        torch.cuda._sleep(SlowExchange.cycles)
        sizes = list(out_sizes), list(in_sizes)
        out = torch.ops._c10d_functional.all_to_all_single(x.contiguous(), *sizes, axis.name)
        return torch.ops._c10d_functional.wait_tensor(out)


@pytest.fixture
def slow(monkeypatch):
    monkeypatch.setattr(experts, "exchange", SlowExchange.apply)
    SlowExchange.cycles = 0
    return SlowExchange


def make_mixture(dtype=torch.bfloat16) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(3)
    moe = Moe(dims_of(CONFIG))
    for parameter in moe.parameters():
        nn.init.normal_(parameter, std=0.05)
    x_TD = torch.randn(TOKENS, CONFIG["hidden_size"], device="cuda", dtype=dtype)
    return moe.to("cuda", dtype), x_TD


def run(moe, x_TD) -> dict[str, torch.Tensor]:
    x_TD = x_TD.clone().requires_grad_()
    moe.zero_grad()
    y_TD, _ = moe(x_TD)
    y_TD.square().sum().backward()
    found = {name: p.grad.clone() for name, p in moe.named_parameters()}
    return found | {"y": y_TD.detach(), "x": x_TD.grad}


def time_of(call, repeats: int = 5) -> float:
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def test_a_slow_network_changes_no_number(group, slow):
    """A wait that is missing shows at once: data would be read before it has arrived."""
    moe, x_TD = make_mixture()
    true = run(moe, x_TD)
    moe.dispatch = ExpertDispatch(group, 1, CONFIG["num_experts"])
    for cycles in (0, 4_000_000):
        slow.cycles = cycles
        for _ in range(3):  # memory is used again
            mine = run(moe, x_TD)
            for name, tensor in true.items():
                assert torch.equal(mine[name], tensor), (cycles, name)


def test_pairs_travel_while_the_shared_expert_computes(group, slow, monkeypatch):
    """Forward alone. Two delays before the experts run and one after them: each hides behind a half
    of the shared expert."""
    moe, x_TD = make_mixture()
    moe.dispatch = ExpertDispatch(group, 1, CONFIG["num_experts"])

    @torch.no_grad()
    def forward() -> None:
        moe(x_TD)

    plain = time_of(forward)
    slow.cycles = 4_000_000  # four exchanges: counts, rows, weights, results
    beside = time_of(forward) - plain
    monkeypatch.setattr(SideStream, "after", lambda self, *given: torch.cuda.stream(None))
    monkeypatch.setattr(SideStream, "join", lambda self, *taken: None)
    in_line = time_of(forward) - plain
    added = f"delays add {beside * 1e3:.2f} ms, in line {in_line * 1e3:.2f} ms"
    print(f"plain {plain * 1e3:.2f} ms; {added}")
    assert beside < 0.75 * in_line


def test_the_exchange_and_the_router_are_timed_without_waiting(group, slow):
    moe, x_TD = make_mixture()
    moe.dispatch = ExpertDispatch(group, 1, CONFIG["num_experts"])
    meter = Meter()
    with torch.no_grad():
        moe(x_TD)
        torch.cuda.synchronize()
        slow.cycles = 200_000_000  # about 0.1 s
        with meter.counting():
            moe(x_TD)
    assert len(meter.events) == 3, "they are not read yet"
    work = meter.take()
    assert work["dispatch"].seconds > 1.5 * work["combine"].seconds > 0.05, "rows and weights"
    assert 0 < work["route"].seconds < 0.05 and work["route"].block_bytes is not None
    assert work["dispatch"].num_bytes == work["combine"].num_bytes == 0, "nothing left the rank"
