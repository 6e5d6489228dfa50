"""Settings of all tests."""

import os
from pathlib import Path

from hypothesis import settings

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined

settings.register_profile("any machine", deadline=None)  # a busy machine is no failure
settings.load_profile("any machine")
