"""Batch sources, one file per kind of run.

Contract: a file reads and checks the inputs of its command (`RunInputs`), opens a `BatchSource`
over them, and has `processes.ranks` run it. A source trains one batch a step, says what a
checkpoint holds of it, and takes that back when a run is resumed. `replay` is no source: it trains
recorded steps again and compares.

`examples`: supervised and pretraining; `kept_groups`: train only; `rollouts`: reinforcement
learning; `rollout_only`: a step writes its batch.
"""
