"""Random seeds derived from what a thing is, never from when or where it runs."""

from __future__ import annotations

import hashlib
import random
import sys


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed for the given path of names, `derive_seed(run_seed, "sample", gid, i)`.

    The same path gives the same seed in every process and on every layout; two different
    paths give independent ones.
    """
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_globals(*parts: int | str) -> None:
    """Seeds the generators that Python, NumPy and torch keep for a whole process, where they are
    imported: code of the user's draws from them."""
    seed = derive_seed(*parts, "globals")
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)
