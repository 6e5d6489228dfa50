"""The fused head's kernels against plain torch; interpreted where there is no GPU."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_kernels = pytest.mark.skipif(
    DEVICE == "cpu" and not IS_INTERPRETED, reason="needs a GPU, or TRITON_INTERPRET=1"
)

from pentad.ops import logprob, logprob_kernels  # noqa: E402

# A row of several blocks with a rest, a block exactly, less than one.
VOCABS = [2 * logprob_kernels.BLOCK + 77, logprob_kernels.BLOCK, 29]


def make(vocab, scale=3.0):
    torch.manual_seed(0)
    logits = scale * torch.randn(5, vocab, device=DEVICE)
    column = torch.tensor([0, vocab - 1, 7, -1, vocab], device=DEVICE)  # the last two: elsewhere
    return logits, column


@needs_kernels
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize(("scale", "temperature"), [(3.0, 1.0), (3.0, 0.05), (1e4, 1.3), (0.0, 1)])
def test_a_chunk_is_reduced_as_in_fp64(vocab, scale, temperature):
    logits, column = make(vocab, scale)
    wanted = torch.empty(4, 5, device=DEVICE, dtype=torch.float64)
    logprob.reduce_logits(logits.double(), 1 / temperature, column, wanted)
    # A slice of a wider table, as the caller gives it.
    table = torch.full((4, 9), float("nan"), device=DEVICE)
    logprob_kernels.reduce_logits(logits, 1 / temperature, column, table[:, 2:7])
    # fp32 rounding of x itself, up to 5 * scale / temperature in size: e^x makes it relative.
    rounding = 5 * scale / temperature * 2**-23
    loose = {"rtol": 1e-5 + 2 * rounding, "atol": 1e-5 + 2 * rounding}
    torch.testing.assert_close(table[:, 2:7].double(), wanted, **loose)
    assert table[:, :2].isnan().all() and table[:, 7:].isnan().all()


@needs_kernels
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("use", ["logprob", "entropy", "both"])
def test_gradients_are_those_of_fp64(vocab, use):
    logits, column = make(vocab)
    parts = torch.empty(4, 5, device=DEVICE, dtype=torch.float64)
    logprob.reduce_logits(logits.double(), 1 / 0.8, column, parts)
    _, entropy, lse = logprob._combine(parts, logprob.WHOLE_VOCAB)
    glp, gent = torch.randn(2, 5, device=DEVICE)
    rows = (lse, entropy, glp if use != "entropy" else None, gent if use != "logprob" else None)
    wide = [None if x is None else x.double() for x in rows]
    narrow = [None if x is None else x.float() for x in rows]
    wanted = logprob.logit_gradient(logits.double(), 1 / 0.8, column, *wide, torch.float64)
    found = logprob_kernels.logit_gradient(logits, 1 / 0.8, column, *narrow, torch.float32)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-7)  # rounding of lse


@needs_kernels
def test_what_is_not_a_number_shows():
    logits, column = make(logprob_kernels.BLOCK + 5)
    logits[1, -1] = float("nan")
    out = torch.empty(4, 5, device=DEVICE)
    logprob_kernels.reduce_logits(logits, 1.0, column, out)
    assert out[1, 1].isnan() and out[1, [0, 2, 3, 4]].isfinite().all()


@pytest.mark.skipif(DEVICE == "cpu", reason="the head's products keep fp32 on CUDA only")
def test_the_head_with_kernels_equals_the_head_without(monkeypatch):
    torch.manual_seed(0)
    hidden = torch.randn(300, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(5000, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(-1, 5000, (300,), device=DEVICE)
    results = []
    for has_triton in (True, False):
        monkeypatch.setattr(logprob, "HAS_TRITON", has_triton)
        out = logprob.token_logprobs(hidden, weight, labels, temperature=0.9, chunk_bytes=5 << 20)
        results.append((*out, *torch.autograd.grad(out[0].sum() + out[1].sum(), (hidden, weight))))
    for mine, plain in zip(*results, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-2, atol=1e-4)  # gradients leave in bf16


def head_gradients(keep, num_tokens, vocab, dtype, budget, **options):
    torch.manual_seed(0)
    hidden = torch.randn(num_tokens, 64, device=DEVICE).to(dtype).requires_grad_()
    weight = torch.randn(vocab, 64, device=DEVICE).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab, (num_tokens,), device=DEVICE)
    if DEVICE == "cuda":
        labels[::3] = -1
    out = logprob.token_logprobs(hidden, weight, labels, chunk_bytes=budget, keep=keep, **options)
    mix = torch.rand(2, num_tokens, device=DEVICE) + 0.5
    return (*out, *torch.autograd.grad((torch.stack(out) * mix).sum(), (hidden, weight)))


@needs_kernels
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"cap": 3.0, "temperature": 1.2}])
def test_the_kernels_leave_kept_logits_as_they_are(options, monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(logprob, "_is_fused", lambda logits_CV: True)
        size = (7, logprob_kernels.BLOCK + 5, torch.float32, 3 * 4 * 3 * logprob_kernels.BLOCK)
    else:
        size = (3000, 50000, torch.bfloat16, 1 << 28)
    kept, again = (head_gradients(keep, *size, **options) for keep in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_kept_logits_save_the_time_of_a_product_and_take_their_bytes():
    """Printed with -s: times of forward and backward at the head of Qwen3-0.6B."""
    num_tokens, width, vocab = 16384, 1024, 151936
    hidden = torch.randn(num_tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = 0.02 * torch.randn(vocab, width, device="cuda", dtype=torch.bfloat16)
    weight.requires_grad_()
    labels = torch.randint(0, vocab, (num_tokens,), device="cuda")

    def step(keep):
        logprobs, _ = logprob.token_logprobs(hidden, weight, labels, keep=keep)
        return logprobs, *torch.autograd.grad(logprobs.sum(), (hidden, weight))

    found, ms, peak = {}, {}, {}
    for keep in (False, True):
        found[keep] = step(keep)
        step(keep)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        times = []
        for _ in range(9):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            step(keep)
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        ms[keep] = sorted(times)[4]
        peak[keep] = torch.cuda.max_memory_allocated() - before
    print(
        f"made again {ms[False]:.2f} ms, kept {ms[True]:.2f} ms",
        {k: v >> 20 for k, v in peak.items()},
    )
    assert all(torch.equal(a, b) for a, b in zip(found[True], found[False], strict=True))
    assert ms[True] < ms[False]
    all_logits = 4 * num_tokens * vocab
    assert all_logits < peak[True] < all_logits + (3 << 30)
    assert peak[False] < 4 << 30
