"""Sums of picked rows against plain torch; interpreted where there is no GPU."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="the kernel needs Triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_kernel = pytest.mark.skipif(
    DEVICE == "cpu" and not IS_INTERPRETED, reason="needs a GPU, or TRITON_INTERPRET=1"
)

from pentad.ops import sum_kernel  # noqa: E402


@needs_kernel
@pytest.mark.parametrize("width", [24, 64, sum_kernel.MAX_BLOCK + 40])
@pytest.mark.parametrize(("num_tokens", "num_chosen"), [(5, 3), (7, 1), (0, 2)])
def test_rows_are_summed_in_fp32_and_rounded_once(width, num_tokens, num_chosen):
    torch.manual_seed(0)
    num_rows = num_tokens * num_chosen
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32  # none of bf16 when interpreted
    rows = torch.randn(num_rows, width, device=DEVICE).to(dtype)
    places = torch.randperm(num_rows, device=DEVICE)
    found = sum_kernel.sum_places(rows, places, num_chosen)
    wanted = rows.double()[places].unflatten(0, (num_tokens, num_chosen)).sum(1)
    assert found.dtype == dtype
    torch.testing.assert_close(found, wanted.to(dtype), rtol=2**-7, atol=1e-6)


@needs_kernel
@pytest.mark.parametrize("shape", [(3, 7), (sum_kernel.ADD_BLOCK,), (2, sum_kernel.ADD_BLOCK + 5)])
def test_narrow_numbers_are_added_in_the_wide_dtype(shape):
    torch.manual_seed(0)
    total, part = torch.randn(2, *shape, device=DEVICE)
    narrow = part.to(torch.bfloat16 if DEVICE == "cuda" else torch.float16)
    wanted = total + narrow.float()
    sum_kernel.add_into(total, narrow)
    assert torch.equal(total, wanted)


@needs_kernel
@pytest.mark.parametrize("width", [24, sum_kernel.MAX_BLOCK + 40])
def test_spans_are_summed_in_fp32_and_rounded_once(width):
    torch.manual_seed(0)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    rows = torch.randn(9, width, device=DEVICE).to(dtype)
    order, bounds = torch.randperm(9, device=DEVICE), torch.tensor([0, 4, 4, 5, 9], device=DEVICE)
    found = sum_kernel.sum_spans(rows, order, bounds)
    picked = rows.double()[order]
    wanted = torch.stack([picked[a:b].sum(0) for a, b in ((0, 4), (4, 4), (4, 5), (5, 9))])
    assert found.dtype == dtype
    torch.testing.assert_close(found, wanted.to(dtype), rtol=2**-7, atol=1e-6)
