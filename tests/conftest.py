"""Settings of all tests."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined

settings.register_profile("any machine", deadline=None)  # a busy machine is no failure
settings.load_profile("any machine")

DIST = Path(__file__).parent / "dist"


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items):
    """What uses the pool of processes is a distributed test."""
    for item in items:
        if item.path.is_relative_to(DIST):
            item.add_marker(pytest.mark.dist)
