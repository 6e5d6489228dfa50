"""One pool of processes for all distributed tests of a session."""

import sys

import pytest
from gloo_pool import PATHS, Pool

sys.path += PATHS  # the toys of the engine's own tests


@pytest.fixture(scope="session")
def pool():
    pool = Pool()
    yield pool
    pool.stop()
