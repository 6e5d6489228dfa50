"""Which processes a run has, and what follows when one is lost.

Contract: `ranks` runs a job on this process, on ranks that it starts, or on torchrun's.
`supervisor` runs one generation of the learners after the other: `runtime.restarts` decides whether
one follows a failure, `membership` which slots it has, `resources` is what outlives it. `fresh` is
a one-process run whose process a failure made unusable.
"""
