"""Random seeds derived from the identity of an object, never from time or location."""

from __future__ import annotations

import hashlib
import random
import sys


def derive_seed(*parts: int | str) -> int:
    """Returns a 63-bit seed for a path of names, such as `derive_seed(run_seed, "sample", gid, i)`.

    The same path gives the same seed in every process and on every layout; two different
    paths give independent ones.
    """
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_globals(*parts: int | str) -> None:
    """Seeds the global generators of Python, NumPy and torch, if imported, which user code may
    use."""
    seed = derive_seed(*parts, "globals")
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)
