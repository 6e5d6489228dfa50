"""Services that every rank of a learner runs, in its own or the scheduler's process.

Contract: the scheduler calls a service's methods on all ranks in one order, JSON in and JSON out;
rank 0 returns the result. Data are read from the store or the dataset, weights are written as
folders. `service`: reinforcement learning and kept groups; `example_service`: supervised runs;
`learners` makes engines from the config; `update` trains one batch.
"""
