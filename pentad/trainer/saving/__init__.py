"""Saves weights and state of a run, during training or between two steps.

Contract: `saver` writes HF exports, `recovery` writes checkpoints from which a run resumes. One
state machine (`periodic`) handles both: due by a `Frequency`, staged, committed, retried after a
disk failure. After any failure, trained state is saved first. `batches` keeps the groups of the
last steps for a replay.
"""
