"""Imported where the workers of the pool are forked: what the processes of a run import."""

from warm_start import preload

preload()
