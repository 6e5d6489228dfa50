"""Large pages for memory that is about to be filled: each page costs a fault when first written."""

from __future__ import annotations

import ctypes
import sys

from torch import Tensor

LARGE_BYTES = 2 << 20
HUGEPAGE_ADVICE = 14
"""MADV_HUGEPAGE, of Linux."""


def want_large_pages(tensor: Tensor) -> None:
    """Asks for them; a kernel that will not give any changes nothing."""
    start = -(-tensor.data_ptr() // LARGE_BYTES) * LARGE_BYTES
    stop = (tensor.data_ptr() + tensor.nbytes) // LARGE_BYTES * LARGE_BYTES
    if stop > start and sys.platform == "linux" and tensor.device.type == "cpu":
        advise = ctypes.CDLL(None).madvise
        advise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), HUGEPAGE_ADVICE)
