"""The pool of processes itself: failures are reported with their cause, and it works afterwards."""

import os
import signal
import time

import pytest
from gloo_pool import CaseFailed

pytestmark = pytest.mark.dist


def add_ranks(extra: int) -> int:
    import torch
    import torch.distributed as dist

    x = torch.tensor(dist.get_rank() + extra)
    dist.all_reduce(x)
    return int(x)


def fail_on_one() -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise ValueError("a reason of its own")
    dist.barrier()


def die_on_one() -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()


def crash_on_one() -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()


def hang_on_one() -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        time.sleep(600)


def test_a_failure_is_told_with_its_rank_and_cause_and_the_pool_goes_on(pool):
    assert pool.run(2, "test_pool", "add_ranks", extra=10) == 21
    with pytest.raises(CaseFailed, match=r"rank 1:[\s\S]*ValueError: a reason of its own"):
        pool.run(2, "test_pool", "fail_on_one")
    with pytest.raises(CaseFailed, match="rank 1 died with exit code 7"):
        pool.run(2, "test_pool", "die_on_one")
    with pytest.raises(CaseFailed, match=r"rank 1 died with exit code -11[\s\S]*in crash_on_one"):
        pool.run(2, "test_pool", "crash_on_one")
    with pytest.raises(CaseFailed, match=r"ranks \[1\] gave no answer[\s\S]*in hang_on_one"):
        pool.run(2, "test_pool", "add_ranks", extra=0)
        pool.run(2, "test_pool", "hang_on_one", timeout_s=4.0)
    assert pool.run(3, "test_pool", "add_ranks", extra=0) == 3
