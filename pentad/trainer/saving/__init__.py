"""What a run writes of its weights and its state, beside training or between two steps.

Contract: `saver` writes HF exports, `recovery` checkpoints that a run continues from; both are due
by a `Frequency` and tried again after a failure of the disk (`periodic`), and what was trained is
saved first whatever fails. `batches` keeps the groups of the last steps for a replay.
"""
