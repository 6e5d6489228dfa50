"""Runs a job: one loop over batches for every kind of run.

Contract: a `Run` takes a batch from its `BatchSource`, has the learner train it, guards it, hands
the weights to sinks, saves, records, and commits, in this order and once for every kind of run. A
batch is trained exactly once; a restarted run continues bitwise equal.

The files here are shared by all kinds of runs. In reading order: `run` (the loop, the restore
before it, and the end of a run), `context` (folders, log, records), `resume` (selects the
checkpoint), `stopping` (signals), `records` (the record of a step); `inputs`, `preflight`,
`reward_trial` and `run_folders` are checks before a start, `look` those of a plan.

Subpackages for one kind of run or one task; the docstring of each states its contract:

- `sources`: sources of batches: examples, kept groups, rollouts.
- `pumps`: background tasks of an RL run: rollouts, scores, publishing, the watchdog.
- `sampling`: the samplers of a run, the devices they share with the learner, and their checks.
- `rank`: the services that every rank of a learner runs.
- `saving`: exports, recovery checkpoints and kept batches.
- `processes`: the processes of a run, and recovery when one is lost.
"""
