"""What tests set for the whole process is restored after them."""

import logging
import os
import signal
import time
from pathlib import Path

import torch
from process_state import process_restored


def test_everything_is_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setenv("PENTAD_SET", "before")
    monkeypatch.setenv("PENTAD_GONE", "before")
    ours, mine = logging.getLogger("pentad"), logging.NullHandler()
    before = state(ours)
    with process_restored():
        os.environ.update(PENTAD_SET="after", PENTAD_NEW="after")
        del os.environ["PENTAD_GONE"]
        os.chdir(tmp_path)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        for logger in (logging.root, ours):
            logger.setLevel(logging.CRITICAL)
            logger.addHandler(mine)
            logger.addFilter(lambda record: False)
            logger.propagate, logger.disabled = False, True
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(torch.get_num_threads() + 1)
        torch.set_grad_enabled(False)
        torch.use_deterministic_algorithms(True)
        assert not any(a == b for a, b in zip(state(ours), before, strict=True))
    assert state(ours) == before


def state(ours):
    return (
        dict(os.environ),
        Path.cwd(),
        signal.getsignal(signal.SIGUSR2),
        *(str(vars(logger)) for logger in (logging.root, ours)),
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
    )


def test_it_costs_next_to_nothing():
    started = time.process_time()
    for _ in range(100):
        with process_restored():
            pass
    assert time.process_time() - started < 0.5
