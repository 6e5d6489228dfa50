"""Lets megatron-core compute on a CPU: put this folder on PYTHONPATH.

What it asks of CUDA is replaced when a learner imports it, in any process of a run.
"""

import importlib.abc
import importlib.machinery
import os
import sys

os.environ.setdefault("PENTAD_MEGATRON_ON_CPU", "1")
LAST = "pentad.engine.megatron.core"
"""Imports all of megatron-core that a learner needs; then names can be replaced."""


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != LAST:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module

        def exec_module(module):
            from megatron_on_cpu import imported_lightly, replace_cuda

            with imported_lightly():
                run(module)
            replace_cuda()

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
