"""Saves weights and state of a run, during training or between two steps.

Contract: `saver` writes HF exports, `recovery` checkpoints from which a run resumes. Both are
artifacts of one state machine (`periodic`): due by a `Frequency`, staged, committed, retried after
a failure of the disk. After any failure, trained state is saved first. `batches` keeps the groups
of the last steps for a replay.
"""
