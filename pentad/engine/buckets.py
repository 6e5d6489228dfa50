"""Sizes to which microbatches are padded so that few of them occur: a captured pass is valid for
one size.

Padding tokens form sequences of their own, which are never trained and come last. No sequence is
empty: kernels of attention are only verified with tokens in each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pentad.ops.attention import CUDNN_STEP

MIN_TOKENS = 256
"""Smallest step between numbers of tokens..."""
TOKEN_STEPS = 32
"""...and number of steps up to a power of two: above 8,192 tokens, at most 1/16 of a microbatch is
padding of its tokens, and about 1/50 on average."""
MIN_SEQUENCES = 16
SEQUENCE_STEPS = (9, 11, 13, 15, 18)
"""Numbers of sequences, in eighths of a power of two. They are not powers of two, around which
balanced microbatches of equal groups have sometimes more and sometimes fewer sequences."""
MIN_LONGEST = 64
"""Attention has blocks of at least as many tokens."""


@dataclass(frozen=True, slots=True)
class TokenBucket:
    """The sizes of a padded microbatch."""

    num_tokens: int
    num_sequences: int
    longest: int
    """A bound of the lengths: a power of two."""


def has_bucket(lengths: Sequence[int]) -> bool:
    """Whether a microbatch is padded to a bucket: not if all sequences have a length for which
    attention has a faster kernel (`ops.attention.EqualAttend`)."""
    return len(set(lengths)) > 1 or lengths[0] % CUDNN_STEP != 0


def fill_bucket(lengths: Sequence[int]) -> tuple[list[int], TokenBucket]:
    """Adds sequences of padding tokens; returns all lengths and the sizes."""
    num_given, num_sequences = sum(lengths), len(lengths)
    longest = max(MIN_LONGEST, _power_of_two(max(lengths)))
    step = max(MIN_TOKENS, _power_of_two(num_given) // TOKEN_STEPS)
    tokens = _round_up(num_given, step)
    seats = _seats(num_sequences)
    while True:
        missing, added = tokens - num_given, seats - num_sequences
        if missing < added:
            tokens += step
        elif missing > added * longest:
            seats = _seats(seats + 1)
        else:
            break
    each, more = divmod(missing, added) if added else (0, 0)
    padding = [each + (i < more) for i in range(added)]
    return [*lengths, *padding], TokenBucket(tokens, seats, longest)


def _seats(number: int) -> int:
    """The smallest number of sequences of a bucket that is not below the number."""
    power = max(MIN_SEQUENCES, _power_of_two(number) // 2)
    return next(power * eighths // 8 for eighths in SEQUENCE_STEPS if power * eighths >= 8 * number)


def _power_of_two(number: int) -> int:
    """The smallest power of two that is not below the number."""
    return 1 << (number - 1).bit_length()


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step
