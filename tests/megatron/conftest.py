"""Runs on megatron-core, which `make setup-megatron` puts into a folder of its own."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / ".megatron-core"


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if here in Path(item.fspath).parents:
            item.add_marker(pytest.mark.optional)
            item.add_marker(pytest.mark.slow)
            if not (PACKAGE / "megatron").exists() and find_spec("megatron") is None:
                item.add_marker(pytest.mark.skip(reason="no megatron-core; run make test-megatron"))


@pytest.fixture(scope="session")
def environment():
    """For processes in which megatron-core computes on the CPU, with the package of this checkout,
    whichever the environment has."""
    paths = [str(ROOT / "tests" / "megatron_cpu"), str(PACKAGE), str(ROOT)]
    quiet = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return {**os.environ, **quiet, "PYTHONPATH": os.pathsep.join(paths)}
