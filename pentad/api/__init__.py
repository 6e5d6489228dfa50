"""Pentad from Python: `import pentad`, then `pentad.train`, `pentad.sft` and `pentad.load`."""
