"""Running out of memory, and operations that cannot be repeated, end in a sentence."""

import pytest
import torch
from engine_toys import PolicyLoss, make_engine, make_rows, train

from pentad.core.errors import RunError
from pentad.engine.held import HeldModel

CUDA_SAYS = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.15 GiB of "
    "which 812.88 MiB is free. Including non-PyTorch memory, this process has 78.13 GiB memory in "
    "use. Of the allocated memory 70.25 GiB is allocated by PyTorch, and 1.20 GiB is reserved by "
    "PyTorch but unallocated."
)
SIZES = ", asking for 2.50 GiB more; 812.88 MiB of 79.15 GiB are free, tensors hold 70.25 GiB; "


def run_out(*args, **kwargs):
    raise torch.OutOfMemoryError(CUDA_SAYS)


class Greedy(PolicyLoss):
    def __call__(self, outputs, columns):
        run_out()


class GreedyBackward(PolicyLoss):
    def __call__(self, outputs, columns):
        outputs.logprobs_T.register_hook(run_out)
        return super().__call__(outputs, columns)


def said(call) -> str:
    with pytest.raises(RunError) as error:
        call()
    assert isinstance(error.value.__cause__, torch.OutOfMemoryError)
    return str(error.value)


def test_kept_logits_are_among_what_can_be_given_up():
    engine, rows = make_engine(keep_logits=True), make_rows(3)
    engine.begin_step()
    assert "set archon.keep_logits: false" in said(lambda: engine.accumulate(rows, Greedy()))


@pytest.mark.parametrize("loss", [Greedy(), GreedyBackward()], ids=["forward", "backward"])
def test_running_out_of_memory_says_where_and_what_helps(loss):
    engine, rows = make_engine(), make_rows(3)
    tokens = sum(len(row.ids) for row in rows)
    engine.begin_step()
    assert said(lambda: engine.accumulate(rows, loss)) == (
        f"out of device memory in forward and backward of a microbatch of {tokens} tokens{SIZES}"
        "lower mb_spec.max_tokens_per_mb, set archon.ac_mode: full, set archon.offload_params: "
        "true, or use more devices (allocation_mode)"
    )
    assert not train(engine, rows).skipped, "a new step starts clean"


def test_every_phase_is_named(monkeypatch):
    engine, rows = make_engine(ac_mode="full"), make_rows(3)
    monkeypatch.setattr(engine.passes, "_predict", run_out)
    text = said(lambda: engine.forward(rows))
    assert "in scoring of a microbatch" in text and "ac_mode" not in text, "it is full already"
    monkeypatch.undo()
    engine.begin_step()
    engine.accumulate(rows, PolicyLoss())
    monkeypatch.setattr(engine.optimizer, "step", run_out)
    assert said(engine.end_step) == (
        f"out of device memory in the optimizer step{SIZES}"
        "set archon.offload_params: true, or use more devices (allocation_mode)"
    )
    monkeypatch.setattr(HeldModel, "initialise", run_out)
    assert said(make_engine).startswith(f"out of device memory in loading{SIZES}set archon.off")


@pytest.fixture
def deterministic(monkeypatch):
    for name in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"):
        monkeypatch.delenv(name, raising=False)


class Varying(PolicyLoss):
    """Uses an operation that torch has no deterministic form of, on any device."""

    def __call__(self, outputs, columns):
        target = torch.zeros_like(outputs.logprobs_T)
        target.put_(torch.tensor([0]), torch.ones(1))
        return super().__call__(outputs, columns)


def test_deterministic_runs_are_equal_bit_by_bit_and_the_default_is_off(deterministic):
    assert not torch.are_deterministic_algorithms_enabled()
    finals = []
    for _ in range(2):
        engine = make_engine(use_deterministic_algorithms=True, max_tokens_per_mb=60)
        results = [train(engine, make_rows(), PolicyLoss(0.2)) for _ in range(3)]
        finals.append((results, {n: t.clone() for n, t in engine.masters.items()}))
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled(), "a warning would let it pass"
    assert finals[0][0] == finals[1][0]
    for name, tensor in finals[0][1].items():
        assert torch.equal(tensor, finals[1][1][name]), name


def test_an_operation_that_varies_is_refused_by_name(deterministic):
    engine, rows = make_engine(use_deterministic_algorithms=True), make_rows()
    engine.begin_step()
    with pytest.raises(RunError) as error:
        engine.accumulate(rows, Varying())
    assert str(error.value).startswith("archon.use_deterministic_algorithms = true: put_")
    assert "has no deterministic form on this device, and forward and backward" in str(error.value)


def test_what_libraries_read_is_set_where_nobody_set_it(deterministic, monkeypatch):
    import os

    monkeypatch.setenv("NCCL_ALGO", "Tree")
    make_engine(use_deterministic_algorithms=True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert os.environ["NCCL_ALGO"] == "Tree", "what the user set stays"
