"""Runs a job: one loop over batches, whatever they come from.

Contract: a `Run` takes a batch from its `BatchSource`, has the learner train it, guards it, hands
the weights to sinks, saves, records, and commits, in this order and once for every kind of run.
A batch is trained exactly once; a run that is started again continues bit by bit.

The files here are what every run has. In the order of reading: `run` (the loop, what is restored
before it, and how a run ends), `learner_client` (calls on all ranks of the learner), `context`
(folders, log, records), `resume` (which checkpoint), `stopping` (signals), `records` (the record of
a step); `preflight`, `reward_trial` and `run_folders` are asked before a start.

What a kind of run adds, each with its contract in its first page:

- `sources`: where batches come from: examples, kept groups, rollouts.
- `pumps`: what runs beside the steps of an RL run: rollouts, scores, publishing, the watchdog.
- `sampling`: the samplers of a run, the devices they share with the learner, and their proofs.
- `rank`: what every rank of a learner runs.
- `saving`: exports, recovery checkpoints and kept batches.
- `processes`: which processes a run has, and what follows when one is lost.
"""
