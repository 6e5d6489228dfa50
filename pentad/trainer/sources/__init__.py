"""Batch sources, one file per kind of run.

Contract: a file reads and checks the inputs of its command (`RunInputs`), opens a `BatchSource`
over them, and calls `processes.ranks` to run it. A source trains one batch per step, returns its
state for checkpoints, and restores it when a run resumes.

`examples`: supervised and pretraining; `kept_groups`: train only; `rollouts`: reinforcement
learning; `rollout_only`: a step writes its batch; `replay`: recorded steps, compared with their
records.
"""
