"""Log-prob and entropy fused with the head: right values, right gradients, no T x V memory."""

import threading

import pytest
import torch
from torch import Tensor

from pentad.ops import logprob
from pentad.ops.logprob import (
    VocabShard,
    chunk_tokens,
    reference_logprobs,
    token_logprobs,
)

T, V, D = 13, 29, 7


def inputs(dtype=torch.float64, seed=0, scale=1.0) -> tuple[Tensor, Tensor, Tensor]:
    gen = torch.Generator().manual_seed(seed)
    hidden = torch.randn(T, D, generator=gen, dtype=torch.float64) * scale
    weight = torch.randn(V, D, generator=gen, dtype=torch.float64)
    labels = torch.randint(0, V, (T,), generator=gen)
    labels[[3, T - 1]] = -1
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


def bytes_for(tokens: int, itemsize: int) -> int:
    return tokens * V * itemsize * 3


@pytest.mark.parametrize("tokens", [1, 2, 5, T, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.3])
@pytest.mark.parametrize("cap", [None, 2.5])
def test_chunked_values_and_gradients_equal_the_plain_ones(tokens, temperature, cap):
    hidden, weight, labels = inputs()
    mix = torch.randn(2, T, dtype=torch.float64)
    budget = bytes_for(tokens, 8)
    options = {"temperature": temperature, "cap": cap}
    ours = token_logprobs(hidden, weight, labels, chunk_bytes=budget, **options)
    plain = reference_logprobs(hidden, weight, labels, **options)
    ours_grads = torch.autograd.grad((torch.stack(ours) * mix).sum(), (hidden, weight))
    plain_grads = torch.autograd.grad((torch.stack(plain) * mix).sum(), (hidden, weight))
    # fp64 on both sides: only the order of sums differs.
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours_grads, plain_grads, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("use", ["logprob", "entropy", "both"])
def test_gradcheck(use):
    hidden, weight, labels = inputs()

    def f(h: Tensor, w: Tensor) -> Tensor:
        lp, ent = token_logprobs(h, w, labels, temperature=0.8, chunk_bytes=bytes_for(4, 8))
        return {"logprob": lp, "entropy": ent, "both": lp * ent}[use]

    assert torch.autograd.gradcheck(f, (hidden, weight))


def test_tokens_without_a_label_are_zero_and_pass_no_gradient():
    hidden, weight, labels = inputs()
    logprobs, entropy = token_logprobs(hidden, weight, labels)
    assert logprobs[3] == 0 and entropy[3] == 0 and logprobs[-1] == 0
    (logprobs.sum() + entropy.sum()).backward()
    assert hidden.grad is not None
    assert (hidden.grad[3] == 0).all() and (hidden.grad[T - 1] == 0).all()
    assert (hidden.grad[4] != 0).all()


@pytest.mark.parametrize("num_live", [0, 1, 5])
def test_tokens_that_no_gradient_comes_from_cost_nothing_in_backward(num_live, monkeypatch):
    """A loss that reads only answers leaves out prompts."""
    hidden, weight, labels = inputs()
    mix = torch.zeros(2, T, dtype=torch.float64)
    mix[0, 2 : 2 + num_live] = torch.randn(num_live, dtype=torch.float64)
    mix[1, 4 : 2 + num_live] = 1.0
    ours = token_logprobs(hidden, weight, labels, chunk_bytes=bytes_for(2, 8))
    plain = reference_logprobs(hidden, weight, labels)
    plain_grads = torch.autograd.grad((torch.stack(plain) * mix).sum(), (hidden, weight))
    made = count_products(monkeypatch)
    ours_grads = torch.autograd.grad((torch.stack(ours) * mix).sum(), (hidden, weight))
    torch.testing.assert_close(ours_grads, plain_grads, rtol=1e-11, atol=1e-12)
    assert sum(made) == num_live - (num_live > 1)  # one of them has no label


def test_bf16_inputs_lose_nothing_in_the_softmax():
    hidden, weight, labels = inputs(torch.bfloat16, scale=3.0)
    ours = token_logprobs(hidden, weight, labels, chunk_bytes=bytes_for(4, 4))
    with torch.no_grad():  # on CPU the product rounds to bf16; everything after it is exact
        rounded = (hidden @ weight.t()).double()
    exact = reference_logprobs(rounded, torch.eye(V, dtype=torch.float64), labels)
    for mine, true in zip(ours, exact, strict=True):
        assert mine.dtype == torch.float32
        # fp32 rounding of sums over 29 terms; bf16 sums would be off by 1e-2.
        torch.testing.assert_close(mine.double(), true, rtol=1e-5, atol=1e-5)
    sum(x.sum() for x in ours).backward()
    assert weight.grad is not None and weight.grad.dtype == torch.bfloat16


def test_extreme_logits_stay_finite():
    hidden, weight, labels = inputs(torch.float32, scale=1e4)
    logprobs, entropy = token_logprobs(hidden, weight, labels)
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs.isfinite().all() and entropy.isfinite().all() and (entropy >= 0).all()
    assert hidden.grad is not None and hidden.grad.isfinite().all()


def test_saved_memory_does_not_grow_with_the_vocabulary():
    hidden = torch.randn(64, D, requires_grad=True)
    sizes: dict[int, int] = {}
    for vocab in (50, 5000):
        weight = torch.randn(vocab, D, requires_grad=True)
        saved: list[Tensor] = []

        def pack(x: Tensor, saved: list[Tensor] = saved) -> Tensor:
            saved.append(x)
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            token_logprobs(hidden, weight, torch.zeros(64, dtype=torch.long))
        sizes[vocab] = sum(x.numel() for x in saved if x is not weight and x.numel() != vocab * D)
    assert sizes[50] == sizes[5000]
    assert sizes[5000] < 64 * 5000 / 50


def test_peak_memory_is_one_chunk_not_all_logits():
    """Counts every allocation of the operation: none is larger than a chunk of logits."""
    tokens, vocab = 512, 2000
    hidden = torch.randn(tokens, D, requires_grad=True)
    weight = torch.randn(vocab, D, requires_grad=True)
    labels = torch.randint(0, vocab, (tokens,))
    budget = 3 * 4 * vocab * 16  # room for 16 tokens
    largest = max(biggest_results(lambda: run_both(hidden, weight, labels, budget)))
    assert largest == 16 * vocab  # all logits would be 512 x 2000
    whole = max(biggest_results(lambda: run_both(hidden, weight, labels, 1 << 30)))
    assert whole == tokens * vocab


def run_both(hidden: Tensor, weight: Tensor, labels: Tensor, budget: int) -> None:
    logprobs, entropy = token_logprobs(hidden, weight, labels, chunk_bytes=budget)
    (logprobs.sum() + entropy.sum()).backward()


def biggest_results(call) -> list[int]:
    from torch.utils._python_dispatch import TorchDispatchMode

    sizes: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(
                x.untyped_storage().nbytes() // x.element_size()
                for x in (out if isinstance(out, tuple | list) else (out,))
                if isinstance(x, Tensor)
            )
            return out

    with Watch():
        call()
    return sizes


class Meeting:
    """Reduces over threads as ranks would, so that the vocabulary can be cut in one process."""

    def __init__(self, num: int) -> None:
        self.barrier = threading.Barrier(num, timeout=240)
        self.parts: dict[int, Tensor] = {}

    def reduce(self, rank: int, x: Tensor, how) -> Tensor:
        self.parts[rank] = x
        self.barrier.wait()
        result = how(torch.stack([self.parts[i] for i in sorted(self.parts)]))
        self.barrier.wait()
        return result


@pytest.mark.parametrize("keep", [False, True])
def test_a_vocabulary_cut_over_three_ranks_gives_the_whole_result(keep):
    hidden, weight, labels = inputs()
    labels = torch.arange(T) if keep else labels  # backward finds what is kept where all count
    cuts = [0, 10, 11, V]
    meeting = Meeting(3)
    mix = torch.randn(2, T, dtype=torch.float64)
    results: dict[int, tuple] = {}

    def rank(i: int) -> None:
        shard = VocabShard(
            cuts[i],
            lambda x: meeting.reduce(i, x, lambda s: s.amax(0)),
            lambda x: meeting.reduce(i, x, lambda s: s.sum(0)),
        )
        h = hidden.detach().requires_grad_()
        w = weight.detach()[cuts[i] : cuts[i + 1]].requires_grad_()
        options = {"temperature": 0.9, "chunk_bytes": bytes_for(5, 8), "keep": keep}
        out = token_logprobs(h, w, labels, shard=shard, **options)
        (torch.stack(out) * mix).sum().backward()
        results[i] = (out, h.grad, w.grad)

    threads = [threading.Thread(target=rank, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    plain = reference_logprobs(hidden, weight, labels, 0.9)
    dh, dw = torch.autograd.grad((torch.stack(plain) * mix).sum(), (hidden, weight))
    for out, _, _ in results.values():
        torch.testing.assert_close(out, plain, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sum(r[1] for r in results.values()), dh, rtol=1e-11, atol=1e-12)
    parts = torch.cat([results[i][2] for i in range(3)])
    torch.testing.assert_close(parts, dw, rtol=1e-11, atol=1e-12)


def test_chunk_size_follows_the_budget():
    assert chunk_tokens(151936, 2 << 30, 4) == 1152
    assert chunk_tokens(151936, 1, 4) == 1
    assert chunk_tokens(100, 3 * 4 * 100 * 77, 4) == 77


def kept_and_not(use="both", *, dtype=torch.float32, labels=None, **options) -> list[list[Tensor]]:
    """Results and gradients with logits that are kept, and with logits that are made again."""
    hidden, weight, own = inputs(dtype)
    mix = torch.randn(2, T, generator=torch.Generator().manual_seed(1)).to(hidden.dtype)
    found = []
    for keep in (True, False):
        out = token_logprobs(
            hidden, weight, own if labels is None else labels, keep=keep, **options
        )
        parts = {"logprob": (0,), "entropy": (1,), "both": (0, 1)}[use]
        loss = torch.stack([(out[i] * mix[i]).sum() for i in parts]).sum()
        found.append([*out, *torch.autograd.grad(loss, (hidden, weight))])
    return found


@pytest.mark.parametrize("tokens", [1, 5, T])
@pytest.mark.parametrize("use", ["logprob", "entropy", "both"])
@pytest.mark.parametrize(
    "how",
    [{}, {"temperature": 0.7}, {"cap": 2.5, "temperature": 1.3}, {"shard": VocabShard(start=4)}],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_kept_logits_give_the_bits_of_those_made_again(tokens, use, how, dtype):
    every = torch.arange(T)  # all tokens have a label: backward takes forward's chunks
    budget = bytes_for(tokens, 8 if dtype == torch.float64 else 4)
    kept, again = kept_and_not(use, dtype=dtype, labels=every, chunk_bytes=budget, **how)
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


def test_kept_logits_change_nothing_where_backward_leaves_tokens_out():
    kept, again = kept_and_not(chunk_bytes=bytes_for(4, 4))  # two of them have no label
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


def count_products(monkeypatch) -> list[int]:
    """Tokens of every product with the head from now on."""
    made: list[int] = []
    compute = logprob.compute_logits
    monkeypatch.setattr(
        logprob, "compute_logits", lambda h, w: made.append(len(h)) or compute(h, w)
    )
    return made


def test_backward_finds_kept_logits_and_lets_them_go(monkeypatch):
    hidden, weight, _ = inputs()
    made = count_products(monkeypatch)
    options = {"chunk_bytes": bytes_for(5, 8), "keep": True}
    logprobs, _ = token_logprobs(hidden, weight, torch.arange(T), **options)
    node = logprobs.grad_fn
    assert made == [4, 4, 5] and [len(x) for x in node.kept] == made
    logprobs.sum().backward()
    assert sum(made) == T and node.kept == []
    with torch.no_grad():
        assert token_logprobs(hidden, weight, torch.arange(T), **options)[0].grad_fn is None
    frozen = token_logprobs(hidden.detach(), weight.detach(), torch.arange(T), **options)
    assert not frozen[0].requires_grad


def test_a_forward_pass_without_gradients_keeps_no_logits():
    hidden, weight, labels = inputs(torch.float32)
    seen = []
    forward = logprob._TokenLogprobs.forward

    class Spy(logprob._TokenLogprobs):
        @staticmethod
        def forward(ctx, *args):
            out = forward(ctx, *args)
            seen.append(len(ctx.kept))
            return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprob, "_TokenLogprobs", Spy)
        with torch.no_grad():
            token_logprobs(hidden, weight, labels, keep=True)
        token_logprobs(hidden.detach(), weight.detach(), labels, keep=True)
        token_logprobs(hidden, weight, labels, keep=True)
    assert seen == [0, 0, 1]


def test_a_second_backward_gives_the_same_or_torchs_own_error():
    hidden, weight, _ = inputs(torch.float32)
    options = {"chunk_bytes": bytes_for(5, 4), "keep": True}
    out = sum(x.sum() for x in token_logprobs(hidden, weight, torch.arange(T), **options))
    first = torch.autograd.grad(out, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(out, (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(out, (hidden, weight))


@pytest.mark.parametrize("reentrant", [True, False])
def test_kept_logits_go_with_a_head_that_is_recomputed(reentrant):
    from torch.utils.checkpoint import checkpoint

    hidden, weight, _ = inputs(torch.float32)
    found = []
    for wraps in (True, False):

        def head(h: Tensor, w: Tensor) -> Tensor:
            out = token_logprobs(h, w, torch.arange(T), chunk_bytes=bytes_for(5, 4), keep=True)
            return torch.stack(out).sum()

        loss = checkpoint(head, hidden, weight, use_reentrant=reentrant) if wraps else None
        loss = head(hidden, weight) if loss is None else loss
        hidden.grad = weight.grad = None
        loss.backward()
        found.append((hidden.grad, weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
