"""What a run writes of its weights and its state, beside training or between two steps.

Contract: `saver` writes HF exports, `recovery` checkpoints that a run continues from. Both are
artifacts of one state machine (`periodic`): due by a `Frequency`, staged, committed, tried again
after a failure of the disk. What was trained is saved first whatever fails. `batches` keeps the
groups of the last steps for a replay.
"""
