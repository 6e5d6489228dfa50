"""What only a GPU can show: budgets kept by compiled code, and bits that repeat."""

import pytest
import torch
import torch.distributed as dist
from engine_toys import CONFIG, PolicyLoss, make_rows
from sections import engine_settings

from pentad.engine.engine import Engine, build_engine
from pentad.engine.section import OptimizerConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WIDE = CONFIG | {"hidden_size": 256, "intermediate_size": 1024, "head_dim": 64}
MIXTURE = WIDE | {
    "model_type": "qwen3_moe",
    "tie_word_embeddings": False,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}


@pytest.fixture(autouse=True)
def clean():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def make(config, **settings) -> Engine:
    optimizer = OptimizerConfig(lr=1e-3, gradient_clipping=0.5)
    given = engine_settings(dtype="bfloat16", optimizer=optimizer, **settings)
    return build_engine(config, given, device="cuda", init_from_scratch=True, seed=3)


def step(engine: Engine) -> tuple[float, float, int]:
    """(loss, gradient norm, most memory of forward and backward)."""
    rows = make_rows(64, max_len=200)
    engine.begin_step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    engine.accumulate(rows, PolicyLoss(0.1))
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    result = engine.end_step()
    return result.loss, result.grad_norm, peak


def test_a_smaller_budget_takes_less_memory():
    found = {}
    for budget in (1.0, 0.0):
        engine = make(WIDE, ac_mode="memory_budget", ac_memory_budget=budget, enable_compile=True)
        step(engine)  # compiles
        engine = make(WIDE, ac_mode="memory_budget", ac_memory_budget=budget, enable_compile=True)
        found[budget] = step(engine)
        del engine
    assert found[0.0][2] < 0.95 * found[1.0][2]
    # bf16 products computed twice by other kernels.
    assert found[0.0][0] == pytest.approx(found[1.0][0], rel=0.02)
    assert found[0.0][1] == pytest.approx(found[1.0][1], rel=0.05)


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("config", [WIDE, MIXTURE], ids=["dense", "mixture"])
def test_deterministic_runs_are_equal_bit_by_bit(config, compiles):
    finals = []
    for _ in range(2):
        engine = make(
            config, use_deterministic_algorithms=True, enable_compile=compiles, ac_mode="selective"
        )
        seen = [step(engine)[:2] for _ in range(3)]
        finals.append((seen, {name: x.clone() for name, x in engine.masters.items()}))
    assert finals[0][0] == finals[1][0]
    for name, tensor in finals[0][1].items():
        assert torch.equal(tensor, finals[1][1][name]), name


def test_captured_passes_equal_uncaptured_ones_bitwise():
    """Sequences fit into one tile of attention, so gradients are added in a fixed order."""
    how = {"enable_compile": True, "reshard_after_forward_policy": "never", "total_steps": 9}
    engine, other = (make(WIDE, cuda_graphs=True, **how) for _ in range(2))
    other.passes.graphs._capture = lambda *_: None
    rows, loss = make_rows(64, max_len=100), PolicyLoss(0.1)
    for shift in range(4):  # other tokens at every place, in a bucket of one size
        moved = rows[17 * shift :] + rows[: 17 * shift]
        found = []
        for one in (engine, other):
            one.begin_step()
            called = one.accumulate(moved, loss)
            gradients = {name: x.clone() for name, x in one.held.gradients().items()}
            found.append((gradients, called, one.end_step()))
        (gradients, called, step), (gradients_0, called_0, step_0) = found
        assert all(torch.equal(x, gradients_0[name]) for name, x in gradients.items())
        assert (called.loss_sum, called.stats, step) == (called_0.loss_sum, called_0.stats, step_0)
        for mine, theirs in zip(called.outputs, called_0.outputs, strict=True):
            assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert (engine.passes.graphs.num_captured, engine.passes.graphs.num_replayed) == (1, 3)
    assert other.passes.graphs.num_captured == 0
