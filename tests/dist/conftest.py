"""One pool of processes for all distributed tests of a session."""

import sys
from pathlib import Path

import pytest
from gloo_pool import PATHS, Pool

sys.path += PATHS  # the toys of the engine's own tests
sys.path.append(str(Path(__file__).parents[1] / "contracts"))  # the stand-in for SGLang


@pytest.fixture(scope="session")
def pool():
    pool = Pool()
    yield pool
    pool.stop()
