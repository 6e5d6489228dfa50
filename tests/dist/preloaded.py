"""Imported where the workers of the pool are forked: what the processes of a run import, and
cases."""

import pytest  # noqa: F401 (by the cases of test_pool)
from warm_start import preload

import pentad.parallel.pipeline_stage  # noqa: F401 (by an engine with stages)

preload()
