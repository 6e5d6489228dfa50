"""Training passes that are padded to buckets, captured and replayed.

A CPU captures nothing: `Replayer` computes again at each replay, from the buffers of the first
pass, as a CUDA graph does. `test_engine_gpu.py` compares real graphs.
"""

from contextlib import nullcontext

import pytest
import torch
from closeness import assert_close
from engine_toys import CONFIG, PolicyLoss, SequenceLoss, make_engine, make_rows, weights_of
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from sections import engine_settings, settings_for

from pentad.core.dims import ModelDims
from pentad.core.layout import Layout
from pentad.core.types import Row
from pentad.engine import passes
from pentad.engine.buckets import fill_bucket
from pentad.engine.graphs import MAX_GRAPHS
from pentad.engine.section import EngineSettings, OptimizerConfig, captures
from pentad.models.families import dims_of
from pentad.ops.attention import reference_attention
from pentad.rl.algorithms import build_policy_loss
from pentad.rl.losses import SftLoss, ValueLoss

ONE = Layout()
COLUMNS = ("actor_logprobs", "rollout_logprobs", "ref_logprobs", "values", "penalised")


class Replayed:
    def __init__(self, compute) -> None:
        self.compute = compute
        self.outputs = None

    def replay(self) -> None:
        self.outputs = self.compute()


class Replayer:
    """Computes at each replay what was to be captured."""

    def running(self):
        return nullcontext()

    def record(self, compute):
        return Replayed(compute)

    def reserved_bytes(self) -> int:
        return 0


class Refusing(Replayer):
    """Fails during the capture, and then at its end, as torch does."""

    def __init__(self, error=RuntimeError) -> None:
        self.error = error

    def record(self, compute):
        try:
            raise self.error("operation not permitted when stream is capturing")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")


class MaskAttend:
    """Attention in plain torch that reads lengths at each call, as a kernel on a device does."""

    def __init__(self, lengths_S, max_length, **_) -> None:
        self.lengths_S = lengths_S
        assert int(lengths_S.min()) > 0
        assert int(lengths_S.max()) <= max_length

    def __call__(self, layer, q_THd, k_TKd, v_TKd, window=None, sinks=None, cap=None):
        lengths = self.lengths_S.tolist()
        return reference_attention(q_THd, k_TKd, v_TKd, lengths, window, sinks, cap)


@pytest.fixture
def attends(monkeypatch):
    monkeypatch.setattr(passes, "attend_captured", MaskAttend)


def make(recorder=None, value_head=False, **given):
    optimizer = OptimizerConfig(lr=1e-2, gradient_clipping=0.5)
    given = {"reshard_after_forward_policy": "never", "total_steps": 9} | given
    engine = make_engine(value_head, optimizer=optimizer, **given)
    if recorder is not None:
        engine.passes.capture(engine.parameters.values(), recorder, is_required=True)
    return engine


def full_rows(seed: int, num: int = 24) -> list[Row]:
    """Rows with all columns that losses read."""
    gen = torch.Generator().manual_seed(seed)
    rows = make_rows(num, seed)
    for row in rows:
        length = row.ids.numel()
        row.columns |= {name: -torch.rand(length, generator=gen) * 5 for name in COLUMNS[:4]}
        row.columns["penalised"] = (torch.rand(length, generator=gen) < 0.3).float()
    return rows


def steps(engine, loss, num: int = 3, num_rows: int = 24):
    """(gradients, results of calls, result of the step) of several steps of other rows."""
    found = []
    for seed in range(num):
        engine.begin_step()
        called = engine.accumulate(full_rows(seed, num_rows), loss)
        gradients = {name: p.grad.clone() for name, p in engine.parameters.items()}
        found.append((gradients, called, engine.end_step()))
    return found


def assert_same_steps(found, wanted, close=assert_close) -> None:
    for (gradients, called, step), (gradients_0, called_0, step_0) in zip(
        found, wanted, strict=True
    ):
        for name, gradient in gradients.items():
            close(gradient, gradients_0[name])
        assert called.loss_sum == pytest.approx(called_0.loss_sum, rel=1e-5)
        assert called.stats == pytest.approx(called_0.stats, rel=1e-5)
        assert step.grad_norm == pytest.approx(step_0.grad_norm, rel=1e-5)
        assert step.num_tokens == step_0.num_tokens
        for mine, other in zip(called.outputs, called_0.outputs, strict=True):
            assert mine.keys() == other.keys()
            for name in mine:
                close(mine[name], other[name], scale=5.0)


def losses():
    algorithms = ("grpo", "gspo", "cispo", "sapo", "gmpo", "reinforce", "kl_cov")
    found = {name: build_policy_loss(settings_for(name), num_updates=2) for name in algorithms}
    full = settings_for("grpo", kl_coef=0.1, entropy_coef=0.01)
    return found | {
        "grpo with a KL term": build_policy_loss(full),
        "sft": SftLoss(),
        "sequences": SequenceLoss(),
        "values": ValueLoss(eps_clip_value=0.2),
    }


@given(st.lists(st.integers(1, 400), min_size=1, max_size=300))
@examples(max_examples=200, deadline=None)
def test_a_bucket_adds_sequences_of_its_length_and_few_tokens(lengths):
    padded, bucket = fill_bucket(lengths)
    assert padded[: len(lengths)] == lengths
    assert min(padded) > 0
    assert max(padded) <= bucket.longest
    assert (sum(padded), len(padded)) == (bucket.num_tokens, bucket.num_sequences)
    assert bucket.longest < 2 * max(lengths) or bucket.longest == 64
    added = bucket.num_tokens - sum(lengths)
    assert added <= max(512, sum(lengths) / 8) + (bucket.num_sequences - len(lengths))


def test_batches_of_similar_sizes_share_a_bucket():
    gen = torch.Generator().manual_seed(0)
    found = set()
    for _ in range(20):
        lengths = 27 + torch.empty(512).geometric_(1 / 30, generator=gen).clamp(max=64).long()
        found.add(fill_bucket(lengths.tolist())[1])
    assert len(found) <= 3


@pytest.mark.parametrize("name", losses())
def test_replayed_steps_equal_steps_without_buckets(attends, name):
    loss, head = losses()[name], name == "values"
    wide = {"dtype": "float64", "param_dtype": "float64"}
    engine = make(Replayer(), head, **wide)
    found, wanted = steps(engine, loss), steps(make(None, head, **wide), loss)
    assert_same_steps(found, wanted)
    graphs = engine.passes.graphs
    assert (graphs.num_captured, graphs.num_replayed) == (1, 2)


def test_a_replay_adds_to_the_gradient_of_earlier_microbatches(attends):
    """Also to that of a microbatch without bucket, and in other sizes."""
    found = {}
    for recorder in (None, Replayer()):
        engine = make(recorder, n_mbs=3)
        found[recorder is None] = steps(engine, PolicyLoss(), num=4, num_rows=40)
    assert_same_steps(found[False], found[True])


def test_replays_equal_uncaptured_passes_over_the_same_padding_bitwise(attends):
    """With masters in float32 and passes in bfloat16: replays see the weights of their step."""
    given = {"dtype": "bfloat16", "param_dtype": "float32"}
    engine, other, loss = make(Replayer(), **given), make(Replayer(), **given), PolicyLoss()
    for seed in range(4):
        for one in (engine, other):
            one.begin_step()
            # A new loss is another pass, which is seen once and not captured.
            one.accumulate(full_rows(seed), loss if one is engine else PolicyLoss())
        for name, gradient in engine.held.gradients().items():
            assert torch.equal(gradient, other.held.gradients()[name]), name
        assert engine.end_step() == other.end_step()
    graphs, cast = engine.passes.graphs, engine.passes.graphs.cast
    assert graphs.num_replayed > 0 == other.passes.graphs.num_replayed
    assert cast.keeps_memory
    assert not cast.is_in_use
    assert all(p.dtype == torch.float32 for p in weights_of(engine).values())
    engine.offload()
    assert all(copy.untyped_storage().nbytes() == 0 for copy in cast.copies.values())
    steps(engine, loss, num=1)
    assert all(copy.untyped_storage().nbytes() == 0 for copy in cast.copies.values())


def test_captured_passes_are_bounded(attends, monkeypatch):
    engine = make(Replayer())
    graphs, loss = engine.passes.graphs, PolicyLoss()
    monkeypatch.setattr("pentad.engine.graphs.MAX_GRAPHS", 2)
    assert MAX_GRAPHS > 2
    for num in (10, 40, 80, 10, 40, 80):
        engine.begin_step()
        engine.accumulate(full_rows(0, num), loss)
        engine.end_step()
    assert graphs.num_captured == 3
    assert sum(one is not None for one in graphs.passes.values()) == 2


def test_changed_settings_of_a_loss_are_another_pass(attends):
    wide = {"dtype": "float64", "param_dtype": "float64"}
    engine, plain, loss = make(Replayer(), **wide), make(**wide), PolicyLoss(0.1)
    for one in (engine, plain):
        steps(one, loss, num=2)
    loss.entropy_coef = 0.7
    assert_same_steps(steps(engine, loss, num=1), steps(plain, loss, num=1))
    assert engine.passes.graphs.num_replayed == 1


def test_moved_weights_are_not_read_at_old_addresses(attends):
    engine, loss = make(Replayer()), PolicyLoss()
    steps(engine, loss)
    assert len(engine.passes.graphs.passes) == 1
    moved = next(iter(engine.parameters.values()))
    moved.data = moved.data.clone()
    engine.begin_step()
    engine.accumulate(full_rows(0), loss)
    captured = engine.passes.graphs.passes.values()
    assert list(captured) == [None]


def test_a_pass_that_cannot_be_captured_runs_without(attends, caplog):
    engine, plain, loss = make(), make(), PolicyLoss()
    engine.passes.capture(engine.parameters.values(), Refusing())
    assert_same_steps(steps(engine, loss), steps(plain, loss))
    assert "not permitted when stream is capturing" in caplog.text
    assert not engine.passes.graphs.is_on
    strict = make(Refusing())
    with pytest.raises(RuntimeError, match="not permitted"):
        steps(strict, loss)
    ended = make()
    ended.passes.capture(ended.parameters.values(), Refusing(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        steps(ended, loss)


def test_offloaded_weights_end_captures(attends, caplog):
    caplog.set_level("INFO")
    engine, plain, loss = make(Replayer()), make(), PolicyLoss()
    found = steps(engine, loss, num=2)
    engine.offload()
    found += steps(engine, loss, num=1)
    assert_same_steps(found, [*steps(plain, loss, num=2), *steps(plain, loss, num=1)])
    assert not engine.passes.graphs.is_on
    assert caplog.text.count("no longer captured as CUDA graphs: weights are offloaded") == 1


def decides(config=CONFIG, layout=ONE, backend="archon", device="cuda", **given) -> bool:
    archon = {"enable_compile": "auto", "reshard_after_forward_policy": "default"}
    keys = archon | {"dtype": "bfloat16", "max_row_tokens": 4096} | given
    settings: EngineSettings = engine_settings(**keys).settled(device, layout)
    dims: ModelDims = dims_of(config)
    return captures(settings, dims, layout, backend, device)


LARGE = CONFIG | {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
MIXTURE = CONFIG | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}


def test_small_models_on_one_gpu_are_captured():
    assert decides()
    assert not decides(LARGE)
    assert decides(LARGE, max_tokens_per_mb=4096)
    assert decides(LARGE, cuda_graphs=True)
    assert not decides(cuda_graphs=False)
    assert not decides(device="cpu")
    assert not decides(MIXTURE, cuda_graphs=True)
    for keys in (
        {"strict": True},
        {"enable_compile": False},
        {"dtype": "float32"},
        {"offload_params": True},
        {"use_deterministic_algorithms": True},
        {"offloads": True},
    ):
        assert not decides(cuda_graphs=True, **keys), keys
    assert not decides(layout=Layout(dp_shard=2))
    assert not decides(backend="fsdp")
